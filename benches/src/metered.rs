//! A simulated device that counts the calls and bytes for mapping and unmapping memory.
//!
//! The simulator counts backend calls. The requests to a CUDA device, and their cost, depend on the physical chunks
//! into which `symmalloc-cuda` divides growth: it creates and releases whole chunks, and releases one only when all of
//! it is unmapped. Until then the unmapped parts are *idle*: the device holds them, and they are reused first.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use symmalloc_core::backend::{Backend, BackendError, Event, Image, Part, Range, RangeOffset};
use symmalloc_core::ids::{PoolId, StreamId};
use symmalloc_sim::{Call, SimBackend};

/// The requests to a device since its creation, or between two points in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// Calls of `map`.
    pub maps: u64,
    /// Calls of `unmap`.
    pub unmaps: u64,
    /// Calls of `synchronize`, by which the host waits for a stream.
    pub synchronizes: u64,
    /// Calls of `record`.
    pub records: u64,
    /// Calls of `wait`, by which a stream waits for another one on the device.
    pub waits: u64,
    /// Bytes mapped.
    pub mapped_bytes: u64,
    /// Bytes unmapped.
    pub unmapped_bytes: u64,
    /// Physical chunks created.
    pub chunks_made: u64,
    /// Physical chunks released.
    pub chunks_given_back: u64,
    /// Calls of `alias`, which are also counted as calls of `map`.
    pub aliases: u64,
}

impl Asked {
    /// Returns the requests since an earlier count.
    #[must_use]
    pub fn since(self, then: Asked) -> Asked {
        Asked {
            maps: self.maps - then.maps,
            unmaps: self.unmaps - then.unmaps,
            synchronizes: self.synchronizes - then.synchronizes,
            records: self.records - then.records,
            waits: self.waits - then.waits,
            mapped_bytes: self.mapped_bytes - then.mapped_bytes,
            unmapped_bytes: self.unmapped_bytes - then.unmapped_bytes,
            chunks_made: self.chunks_made - then.chunks_made,
            chunks_given_back: self.chunks_given_back - then.chunks_given_back,
            aliases: self.aliases - then.aliases,
        }
    }
}

/// A device that counts requests. See the [module documentation](self).
#[derive(Debug)]
pub struct Metered {
    device: SimBackend,
    chunk_bytes: u64,
    /// The chunks of each range, by its base.
    ranges: RefCell<BTreeMap<u64, Chunks>>,
    mapped_bytes: Cell<u64>,
    unmapped_bytes: Cell<u64>,
    chunks_made: Cell<u64>,
    chunks_given_back: Cell<u64>,
    aliases: Cell<u64>,
    held_bytes: Cell<u64>,
    held_bytes_peak: Cell<u64>,
}

/// The chunks of a range, in granules.
#[derive(Debug, Default)]
struct Chunks {
    /// Index of the chunk that backs each granule, up to the last granule that was ever mapped.
    backing: Vec<Option<usize>>,
    /// All chunks that were ever created.
    chunks: Vec<Chunk>,
}

#[derive(Clone, Debug)]
struct Chunk {
    granules: std::ops::Range<usize>,
    /// Number of mapped granules of the chunk.
    mapped: usize,
}

impl Metered {
    /// Creates a device with unlimited memory that divides growing ranges into chunks of at most `chunk_bytes` bytes.
    pub fn new(chunk_bytes: u64) -> Self {
        Metered {
            device: SimBackend::builder().memory_bytes(u64::MAX).build(),
            chunk_bytes,
            ranges: RefCell::default(),
            mapped_bytes: Cell::new(0),
            unmapped_bytes: Cell::new(0),
            chunks_made: Cell::new(0),
            chunks_given_back: Cell::new(0),
            aliases: Cell::new(0),
            held_bytes: Cell::new(0),
            held_bytes_peak: Cell::new(0),
        }
    }

    /// Returns the requests since the creation of the device.
    pub fn asked(&self) -> Asked {
        let calls = self.device.calls();
        Asked {
            maps: calls.of(Call::Map),
            unmaps: calls.of(Call::Unmap),
            synchronizes: calls.of(Call::Synchronize),
            records: calls.of(Call::Record),
            waits: calls.of(Call::Wait),
            mapped_bytes: self.mapped_bytes.get(),
            unmapped_bytes: self.unmapped_bytes.get(),
            chunks_made: self.chunks_made.get(),
            chunks_given_back: self.chunks_given_back.get(),
            aliases: self.aliases.get(),
        }
    }

    /// Returns the number of bytes that are currently mapped.
    pub fn reserved_bytes(&self) -> u64 {
        self.mapped_bytes.get() - self.unmapped_bytes.get()
    }

    /// Returns the peak of bytes in chunks, both mapped and idle.
    pub fn held_bytes_peak(&self) -> u64 {
        self.held_bytes_peak.get()
    }

    /// Returns the granules of a part of a range.
    fn granules(&self, offset_bytes: u64, size_bytes: u64) -> std::ops::Range<usize> {
        let granule = self.device.granularity_bytes();
        (offset_bytes / granule) as usize..((offset_bytes + size_bytes) / granule) as usize
    }

    fn hold(&self, granules: usize) {
        self.held_bytes.set(self.held_bytes.get() + granules as u64 * self.device.granularity_bytes());
        self.held_bytes_peak.set(self.held_bytes_peak.get().max(self.held_bytes.get()));
    }

    fn drop_held(&self, granules: usize) {
        self.held_bytes.set(self.held_bytes.get() - granules as u64 * self.device.granularity_bytes());
    }
}

fn add(count: &Cell<u64>, more: u64) {
    count.set(count.get() + more);
}

impl Backend for Metered {
    fn granularity_bytes(&self) -> u64 {
        self.device.granularity_bytes()
    }

    fn reserve(&self, size_bytes: u64) -> Result<Range, BackendError> {
        let range = self.device.reserve(size_bytes)?;
        self.ranges.borrow_mut().insert(range.base.0, Chunks::default());
        Ok(range)
    }

    fn map(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError> {
        self.map_pieces((range, offset_bytes), size_bytes, self.chunk_bytes)
    }

    fn map_pieces(&self, at: RangeOffset, size_bytes: u64, piece_bytes: u64) -> Result<(), BackendError> {
        self.device.map_pieces(at, size_bytes, piece_bytes)?;
        let (range, offset_bytes) = at;
        add(&self.mapped_bytes, size_bytes);
        let mut ranges = self.ranges.borrow_mut();
        let chunks = ranges.get_mut(&range.base.0).expect("the range should have been reserved before");
        let part = self.granules(offset_bytes, size_bytes);
        // Mapping a whole range creates one chunk.
        let most = if size_bytes == range.size_bytes { size_bytes } else { piece_bytes };
        let made = chunks.map(part, (most / self.granularity_bytes()) as usize);
        add(&self.chunks_made, made.len() as u64);
        self.hold(made.iter().sum());
        Ok(())
    }

    fn can_alias(&self) -> bool {
        true
    }

    fn alias(&self, at: RangeOffset, source: RangeOffset, piece_bytes: u64) -> Result<(), BackendError> {
        self.device.alias(at, source, piece_bytes)?;
        add(&self.aliases, 1);
        Ok(())
    }

    fn unmap(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError> {
        self.device.unmap(range, offset_bytes, size_bytes)?;
        let mut ranges = self.ranges.borrow_mut();
        let chunks = ranges.get_mut(&range.base.0).expect("the range should have been reserved before");
        if chunks.chunks.is_empty() {
            // Only aliases were ever mapped here.
            return Ok(());
        }
        add(&self.unmapped_bytes, size_bytes);
        let given_back = chunks.unmap(self.granules(offset_bytes, size_bytes));
        add(&self.chunks_given_back, given_back.len() as u64);
        self.drop_held(given_back.iter().sum());
        Ok(())
    }

    fn release(&self, range: Range) -> Result<(), BackendError> {
        self.device.release(range)?;
        self.ranges.borrow_mut().remove(&range.base.0);
        Ok(())
    }

    fn record(&self, stream: StreamId) -> Result<Event, BackendError> {
        self.device.record(stream)
    }

    fn wait(&self, stream: StreamId, event: Event) -> Result<(), BackendError> {
        self.device.wait(stream, event)
    }

    fn query(&self, event: Event) -> Result<bool, BackendError> {
        self.device.query(event)
    }

    fn recycle(&self, event: Event) {
        self.device.recycle(event);
    }

    fn synchronize(&self, stream: StreamId) -> Result<(), BackendError> {
        self.device.synchronize(stream)
    }

    fn save(&self, pool: PoolId, parts: &[Part]) -> Result<Image, BackendError> {
        self.device.save(pool, parts)
    }

    fn load(&self, image: Image, parts: &[Part]) -> Result<(), BackendError> {
        self.device.load(image, parts)
    }

    fn discard(&self, image: Image) {
        self.device.discard(image);
    }

    fn zero(&self, parts: &[Part]) -> Result<(), BackendError> {
        self.device.zero(parts)
    }
}

impl Chunks {
    /// Maps granules. Granules without a chunk get new chunks of at most `most` granules. Returns the number of
    /// granules of each new chunk.
    fn map(&mut self, part: std::ops::Range<usize>, most: usize) -> Vec<usize> {
        if self.backing.len() < part.end {
            self.backing.resize(part.end, None);
        }
        let first_made = self.chunks.len();
        for at in part {
            let chunk = self.backing[at].unwrap_or_else(|| {
                let extends = |chunk: &Chunk| chunk.granules.end == at && chunk.granules.len() < most;
                if !self.chunks[first_made..].last().is_some_and(extends) {
                    self.chunks.push(Chunk { granules: at..at, mapped: 0 });
                }
                let newest = self.chunks.len() - 1;
                self.chunks[newest].granules.end = at + 1;
                newest
            });
            self.chunks[chunk].mapped += 1;
            self.backing[at] = Some(chunk);
        }
        self.chunks[first_made..].iter().map(|chunk| chunk.granules.len()).collect()
    }

    /// Unmaps granules. Returns the number of granules of each chunk that is no longer mapped at all.
    fn unmap(&mut self, part: std::ops::Range<usize>) -> Vec<usize> {
        let mut given_back = Vec::new();
        for at in part {
            let chunk = &mut self.chunks[self.backing[at].expect("the mapping should succeed")];
            chunk.mapped -= 1;
            if chunk.mapped == 0 {
                given_back.push(chunk.granules.len());
                self.backing[chunk.granules.clone()].fill(None);
            }
        }
        given_back
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_chunk_is_released_when_all_of_it_is_unmapped() {
        let device = Metered::new(8 * MIB);
        let range = device.reserve(64 * MIB).expect("addresses");
        device.map(range, 0, 12 * MIB).expect("memory should suffice");
        assert_eq!((device.asked().chunks_made, device.held_bytes_peak()), (2, 12 * MIB));
        device.unmap(range, 2 * MIB, 6 * MIB).expect("the memory should be mapped");
        assert_eq!(device.asked().chunks_given_back, 0);
        device.map(range, 12 * MIB, 2 * MIB).expect("memory should suffice");
        // 8 MiB are mapped, and 6 are idle.
        assert_eq!((device.reserved_bytes(), device.held_bytes_peak()), (8 * MIB, 14 * MIB));
        device.map(range, 4 * MIB, 2 * MIB).expect("it should be idle");
        assert_eq!(device.asked().chunks_made, 3);
        device.unmap(range, 4 * MIB, 2 * MIB).expect("the memory should be mapped");
        device.unmap(range, 0, 2 * MIB).expect("the memory should be mapped");
        assert_eq!(device.asked().chunks_given_back, 1);
        device.map(range, 0, 8 * MIB).expect("memory should suffice");
        assert_eq!((device.asked().chunks_made, device.held_bytes_peak()), (4, 14 * MIB));
    }
}
