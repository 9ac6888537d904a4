//! Which way a heap's requests go: the short one of heaps without peculiarities, or one that asks and notes more.
//!
//! It depends on how the heap is configured, and on what came to it since: a name, a journal, a recording. Whatever changes
//! one of these calls [`Heap::note_books`], and the way to a block asks one field.

use crate::digest::{Mark, OpKind};
use crate::heap::Heap;
use crate::ids::StreamId;

/// The way of a heap's requests. A *plain* heap has one stream, its sizes are [`Exact`](crate::size_rules::Exact), and it keeps
/// no books.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// The heap is plain.
    Plain,
    /// The heap is plain, but that its ops pass the gate of the recording first.
    PlainRecorded,
    /// The heap is plain, but that allocations are found by their first address: see [`crate::by_pointer`].
    PlainIndexed,
    /// The rules decide.
    ByRule,
}

/// A stream, with what the digest's words for all its allocations and frees have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamOps {
    pub(crate) stream: StreamId,
    pub(crate) allocates: OpKind,
    pub(crate) frees: OpKind,
}

impl StreamOps {
    #[inline(always)]
    pub(crate) fn new(stream: StreamId) -> Self {
        StreamOps { stream, allocates: OpKind::new(Mark::Allocate, stream), frees: OpKind::new(Mark::Free, stream) }
    }
}

impl Heap {
    /// Keeps `keeps_books` and `way` true: after a name came or went, say.
    pub(crate) fn note_books(&mut self) {
        self.keeps_books = self.has_books_of_frees() || self.journal.is_some();
        let keeps_others = self.has_rare_books() || self.journal.is_some();
        self.way = if keeps_others || self.stream.is_none() || !self.rules.are_exact() {
            Way::ByRule
        } else {
            match (self.pointers.is_off(), self.is_recorded) {
                (true, false) => Way::Plain,
                (true, true) => Way::PlainRecorded,
                (false, false) if self.pointers.is_exact() => Way::PlainIndexed,
                (false, _) => Way::ByRule,
            }
        };
    }

    /// Whether a free has more to note than the op.
    pub(crate) fn has_books_of_frees(&self) -> bool {
        !self.pointers.is_off() || self.has_rare_books()
    }

    /// As [`has_books_of_frees`](Self::has_books_of_frees), besides its address.
    pub(crate) fn has_rare_books(&self) -> bool {
        let releases = self.config.release_threshold_bytes().is_some();
        self.stream.is_none() || releases || !self.names.is_empty()
    }
}
