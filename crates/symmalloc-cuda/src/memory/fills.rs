//! Fills: bytes of images that are copied to the device while more memory is mapped for them.
//!
//! ```text
//!  mapped    │ chunk │ chunk │ chunk │ ...
//!  copied            │ piece │ piece │ piece │      behind the mapping, on a stream
//! ```
//! Mapping takes a tenth of the time that copying does, and goes on beside it. Who wakes a pool announces what the image has for it;
//! who maps memory says so; what nobody mapped by then is copied in the end.
//!
//! F1: the copies into memory are over before it is unmapped, and all copies of a fill before its image goes.

use super::copies::{Chunk, Copies, Direction, Piece};
use crate::error::DriverError;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The fills of one backend.
#[derive(Default)]
pub(crate) struct Fills(Mutex<Vec<Fill>>);

struct Fill {
    /// The number of the image, whose chunks these are.
    image: u64,
    chunks: Vec<Chunk>,
    copies: Copies,
    /// Not begun, by address.
    left: BTreeMap<u64, Piece>,
    begun: Vec<Range<u64>>,
    /// That of the copies that were begun.
    outcome: Result<(), DriverError>,
}

impl Fill {
    fn begin(&mut self, piece: &Piece) {
        self.begun.push(piece.addresses());
        if self.outcome.is_ok() {
            self.outcome = self.copies.submit(piece, self.chunks[piece.chunk], Direction::ToDevice);
        }
    }

    fn begin_in(&mut self, mapped: &Range<u64>) {
        let whole = self.left.range(mapped.start..mapped.end).filter(|(_, piece)| piece.addresses().end <= mapped.end);
        let whole: Vec<u64> = whole.map(|(address, _)| *address).collect();
        for address in whole {
            let piece = self.left.remove(&address).expect("it was found");
            self.begin(&piece);
        }
    }

    /// Copies what is left, and waits.
    fn finish(mut self) -> Result<(), DriverError> {
        for piece in std::mem::take(&mut self.left).into_values() {
            self.begin(&piece);
        }
        self.copies.end(self.outcome)
    }
}

impl Fills {
    fn lock(&self) -> MutexGuard<'_, Vec<Fill>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on these pieces of an image are copied when they are mapped.
    pub(super) fn announce(&self, image: u64, chunks: Vec<Chunk>, pieces: Vec<Piece>, copies: Copies) {
        let left = pieces.into_iter().map(|piece| (piece.address, piece)).collect();
        self.forget(image);
        self.lock().push(Fill { image, chunks, copies, left, begun: Vec::new(), outcome: Ok(()) });
    }

    /// These addresses, all of one range, have accessible memory. A context is current.
    pub(super) fn mapped(&self, addresses: &Range<u64>) {
        self.lock().iter_mut().for_each(|fill| fill.begin_in(addresses));
    }

    /// The memory at these addresses is about to go: a fill of it is over, and begins anew when it is announced again.
    pub(super) fn unmapping(&self, addresses: &Range<u64>) {
        self.lock().retain(|fill| {
            let touches = |begun: &Range<u64>| begun.start < addresses.end && addresses.start < begun.end;
            let is_over = fill.begun.iter().any(touches);
            if is_over {
                // An error of the wait is the device's, which the next call says again.
                let _waited = fill.copies.wait();
            }
            !is_over
        });
    }

    /// Copies what is left of an image, and waits for all of it. `None`: nothing was announced.
    pub(super) fn finish(&self, image: u64) -> Option<Result<(), DriverError>> {
        self.take(image).map(Fill::finish)
    }

    /// Nothing more is copied of an image, and what was begun is over.
    pub(super) fn forget(&self, image: u64) {
        if let Some(fill) = self.take(image).filter(|fill| !fill.begun.is_empty()) {
            let _waited = fill.copies.wait();
        }
    }

    fn take(&self, image: u64) -> Option<Fill> {
        let mut fills = self.lock();
        fills.iter().position(|fill| fill.image == image).map(|at| fills.swap_remove(at))
    }
}
