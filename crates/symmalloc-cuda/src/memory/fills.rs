//! Fills: image bytes that are copied to the device while more memory is being mapped for them.
//!
//! ```text
//!  mapped    │ chunk │ chunk │ chunk │ ...
//!  copied            │ piece │ piece │ piece │      behind the mapping, on a stream
//! ```
//! Mapping memory takes a tenth of the time of copying, and runs concurrently with it. When a pool wakes, the pieces of its image are
//! announced. Each mapping of memory then starts the copies of the announced pieces that lie in this memory. `finish` copies the remaining
//! pieces.
//!
//! F1: copies into memory finish before that memory is unmapped, and all copies of a fill finish before its image is released.

use super::copies::{Chunk, Copies, Direction, Piece};
use crate::error::DriverError;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The fills of one backend.
#[derive(Default)]
pub(crate) struct Fills(Mutex<Vec<Fill>>);

struct Fill {
    /// Id of the image that the chunks belong to.
    image: u64,
    chunks: Vec<Chunk>,
    copies: Copies,
    /// Pieces whose copy has not started, by address.
    left: BTreeMap<u64, Piece>,
    begun: Vec<Range<u64>>,
    /// The first error of the copies that were started.
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
            let piece = self.left.remove(&address).expect("the key was found in the map");
            self.begin(&piece);
        }
    }

    /// Copies the remaining pieces and waits for all copies.
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

    /// Registers pieces of an image to be copied as soon as their memory is mapped.
    pub(super) fn announce(&self, image: u64, chunks: Vec<Chunk>, pieces: Vec<Piece>, copies: Copies) {
        let left = pieces.into_iter().map(|piece| (piece.address, piece)).collect();
        self.forget(image);
        self.lock().push(Fill { image, chunks, copies, left, begun: Vec::new(), outcome: Ok(()) });
    }

    /// Starts the copies into these addresses, which belong to one range and are accessible. A context must be current.
    pub(super) fn mapped(&self, addresses: &Range<u64>) {
        self.lock().iter_mut().for_each(|fill| fill.begin_in(addresses));
    }

    /// Waits for copies into these addresses before they are unmapped. A fill with such copies is dropped; a second announcement restarts
    /// it.
    pub(super) fn unmapping(&self, addresses: &Range<u64>) {
        self.lock().retain(|fill| {
            let touches = |begun: &Range<u64>| begun.start < addresses.end && addresses.start < begun.end;
            let is_over = fill.begun.iter().any(touches);
            if is_over {
                // An error of the wait is an error of the device, which the next call reports.
                let _waited = fill.copies.wait();
            }
            !is_over
        });
    }

    /// Copies the remaining pieces of an image and waits for all copies. Returns `None` if no fill was announced.
    pub(super) fn finish(&self, image: u64) -> Option<Result<(), DriverError>> {
        self.take(image).map(Fill::finish)
    }

    /// Cancels the fill of an image and waits for the copies that were started.
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
