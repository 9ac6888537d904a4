//! Which way a heap's requests go: what is known ahead of time of heaps without peculiarities, and what others must note.
//!
//! It depends on how the heap is configured, and on what came to it since: a name, a journal, a recording. Whatever changes
//! one of these calls [`Heap::note_books`], and the way to a block asks one field.

use crate::digest::{Mark, OpKind};
use crate::heap::Heap;
use crate::ids::StreamId;

/// What is known of a plain heap ahead of time. It has one stream, its sizes are [`Exact`](crate::size_rules::Exact), it keeps
/// no books, and it is not recorded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plain {
    pub(crate) stream: StreamId,
    pub(crate) allocates: OpKind,
    pub(crate) frees: OpKind,
}

impl Heap {
    /// Keeps `keeps_books` and the three sorts of plain true: after a name came or went, say.
    pub(crate) fn note_books(&mut self) {
        self.keeps_books = self.has_books_of_frees() || self.journal.is_some();
        let keeps_others = self.has_rare_books() || self.journal.is_some();
        let plain = self.stream.filter(|_| !keeps_others && self.rules.are_exact());
        let plain = plain.map(|stream| Plain {
            stream,
            allocates: OpKind::new(Mark::Allocate, stream),
            frees: OpKind::new(Mark::Free, stream),
        });
        let (plain, indexed) = if self.pointers.is_off() { (plain, None) } else { (None, plain) };
        self.indexed_plain = indexed.filter(|_| !self.is_recorded && self.pointers.is_exact());
        (self.plain, self.recorded_plain) = if self.is_recorded { (None, plain) } else { (plain, None) };
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
