//! Pictures of a job: its memory over time, and the layout of its memory after one op.
//!
//! ```text
//!            ┌─► timeline ──► history     live, allocated and reserved bytes over ops
//! Recorded ──┤
//!            └─► memory ────► map         segments and blocks after one op, of one rank or of two next to each other
//! PlanFile ──► following ──► both         the same with a plan
//!                                │
//!                      svg ◄─────┘
//! ```
//!
//! Every picture is drawn at one of two widths in CSS pixels, wide for screens and paper or narrow for phones. It is never scaled down, so
//! that text keeps its size. Pictures need no script, network, pointer or color. Each color, from Okabe and Ito's palette, comes with a
//! distinct pattern or label, and tooltips only add details. Equal jobs give equal bytes.

pub(crate) mod following;
pub(crate) mod history;
pub(crate) mod map;
pub(crate) mod memory;
pub(crate) mod share;
pub(crate) mod svg;
pub(crate) mod timeline;

use maud::{PreEscaped, html};
use symmalloc_core::ids::{HeapId, StreamGroup};

/// Width of a picture for screens and paper, in CSS pixels.
pub(crate) const WIDE: u32 = 880;
/// Width of a picture for phones, in CSS pixels.
pub(crate) const NARROW: u32 = 360;

/// Filter for the heaps that are shown.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Selection {
    pub(crate) pool: Option<u32>,
    pub(crate) stream: Option<u16>,
}

impl Selection {
    pub(crate) fn has(self, owner: HeapId) -> bool {
        self.pool.is_none_or(|pool| pool == owner.pool.0)
            && self.stream.is_none_or(|stream| owner.group.first().is_some_and(|of| of.0 == stream))
    }
}

/// Returns the name of a heap in pictures.
pub(crate) fn heap_name(owner: HeapId) -> String {
    match owner.group {
        StreamGroup::One(stream) => format!("pool {}, stream {}", owner.pool.0, stream.0),
        StreamGroup::Group(first) => format!("pool {}, group of stream {}", owner.pool.0, first.0),
        _ => format!("pool {}, all streams", owner.pool.0),
    }
}

/// Returns the number that identifies the heap's group of streams in JSON, if the heap belongs to a group.
pub(crate) fn group_number(owner: HeapId) -> Option<u16> {
    owner.group.first().filter(|_| owner.stream().is_none()).map(|first| first.0)
}

/// Returns a figure with a picture in both widths.
pub(crate) fn figure(wide: &str, narrow: &str) -> String {
    html! { figure { (PreEscaped(wide)) (PreEscaped(narrow)) } }.into_string()
}
