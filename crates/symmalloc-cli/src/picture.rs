//! Pictures of a job: what memory it took over time, and where everything lay at one op.
//!
//! ```text
//!            ┌─► timeline ──► history     live, allocated and reserved bytes over ops
//! Recorded ──┤
//!            └─► memory ────► map         segments and blocks at one op, of one rank or of two side by side
//! PlanFile ──► following ──► both         the same as planned
//!                                │
//!                svg, page ◄─────┘
//! ```
//!
//! Every picture is drawn at a width in CSS pixels and never scaled down, so that text keeps its size: wide for screens
//! and paper, narrow for phones. Nothing needs a script, a network, a pointer to hover with, or colour: each colour (of
//! Okabe and Ito's palette) has a pattern or a label of its own; where there is a pointer, it shows more. Equal jobs are equal
//! bytes.

pub(crate) mod following;
pub(crate) mod history;
pub(crate) mod map;
pub(crate) mod memory;
pub(crate) mod page;
pub(crate) mod png;
pub(crate) mod share;
pub(crate) mod svg;
pub(crate) mod timeline;

use symmalloc_import::rerun::Owner;

/// A picture's width for screens and paper, in CSS pixels.
pub(crate) const WIDE: u32 = 880;
/// For phones.
pub(crate) const NARROW: u32 = 360;

/// Which heaps are shown.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Selection {
    pub(crate) pool: Option<u32>,
    pub(crate) stream: Option<u16>,
}

impl Selection {
    pub(crate) fn has(self, owner: Owner) -> bool {
        self.pool.is_none_or(|pool| pool == owner.pool.0)
            && self.stream.is_none_or(|stream| owner.stream.is_some_and(|of| of.0 == stream))
    }
}

/// What a heap is called in a picture.
pub(crate) fn heap_name(owner: Owner) -> String {
    match owner.stream {
        Some(stream) => format!("pool {}, stream {}", owner.pool.0, stream.0),
        None => format!("pool {}, all streams", owner.pool.0),
    }
}
