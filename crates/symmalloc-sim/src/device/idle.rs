//! A backend for programs that need only placements, and for timing an allocator. Every call succeeds at negligible cost,
//! whereas calls of [`SimBackend`](super::SimBackend) take longer than the allocator itself. Placements are the same on
//! both, as they are on every device (rule D1).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use symmalloc_core::backend::{Backend, BackendError, DeviceAddress, Event, Image, Part, Range, RangeOffset};
use symmalloc_core::base::{Base, BaseError, Occupant, SLOT_BYTES};
use symmalloc_core::ids::{PoolId, StreamId};
use symmalloc_core::units::MIB;

const GRANULARITY_BYTES: u64 = 2 * MIB;

/// Above the addresses of every base.
const FIRST_ADDRESS: u64 = 1 << 48;

/// A backend on which every call succeeds at negligible cost. It checks nothing, has no limit of memory or
/// addresses, and counts the calls that are slow on a real device.
#[derive(Debug)]
pub struct IdleBackend {
    /// Base of the next range, above the addresses of pools with a base. Addresses are never reused, because the 64-bit
    /// address space is large enough.
    next: AtomicU64,
    /// The pools that have a base.
    spaces: Mutex<Vec<(Base, PoolId)>>,
    range_calls: AtomicU64,
    map_calls: AtomicU64,
    wait_calls: AtomicU64,
}

impl IdleBackend {
    /// Returns the number of calls that reserved or released address space.
    pub fn range_calls(&self) -> u64 {
        self.range_calls.load(Ordering::Relaxed)
    }

    /// Returns the number of calls that mapped or unmapped memory.
    pub fn map_calls(&self) -> u64 {
        self.map_calls.load(Ordering::Relaxed)
    }

    /// Returns the number of calls that made a stream wait for an event.
    pub fn wait_calls(&self) -> u64 {
        self.wait_calls.load(Ordering::Relaxed)
    }

    fn spaces(&self) -> MutexGuard<'_, Vec<(Base, PoolId)>> {
        self.spaces.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn count(calls: &AtomicU64) {
    calls.fetch_add(1, Ordering::Relaxed);
}

impl Default for IdleBackend {
    fn default() -> Self {
        IdleBackend {
            next: AtomicU64::new(FIRST_ADDRESS),
            spaces: Mutex::default(),
            range_calls: AtomicU64::new(0),
            map_calls: AtomicU64::new(0),
            wait_calls: AtomicU64::new(0),
        }
    }
}

impl Backend for IdleBackend {
    fn granularity_bytes(&self) -> u64 {
        GRANULARITY_BYTES
    }

    fn reserve(&self, size_bytes: u64) -> Result<Range, BackendError> {
        count(&self.range_calls);
        let base = self.next.fetch_add(size_bytes, Ordering::Relaxed);
        Ok(Range { base: DeviceAddress(base), size_bytes })
    }

    fn reserve_at(&self, base: Base, pool: PoolId) -> Result<Range, BaseError> {
        count(&self.range_calls);
        let mut spaces = self.spaces();
        if let Some(&(other, pool)) = spaces.iter().find(|(other, _)| other.overlaps(base)) {
            let occupant = Occupant::Pool { pool, device: 0, base: other };
            let free_slot = Base::free_slot(&spaces.iter().map(|(other, _)| *other));
            return Err(BaseError::Occupied { base, occupant, free_slot });
        }
        spaces.push((base, pool));
        Ok(Range { base: DeviceAddress(base.address()), size_bytes: SLOT_BYTES })
    }

    fn carve(&self, _: Range, _: Range) -> Result<(), BackendError> {
        Ok(())
    }

    fn release_space(&self, space: Range) -> Result<(), BackendError> {
        count(&self.range_calls);
        self.spaces().retain(|(base, _)| base.address() != space.base.0);
        Ok(())
    }

    fn map(&self, _: Range, _: u64, _: u64) -> Result<(), BackendError> {
        count(&self.map_calls);
        Ok(())
    }

    fn can_alias(&self) -> bool {
        true
    }

    fn alias(&self, _: RangeOffset, _: RangeOffset, _: u64) -> Result<(), BackendError> {
        count(&self.map_calls);
        Ok(())
    }

    fn unmap(&self, _: Range, _: u64, _: u64) -> Result<(), BackendError> {
        count(&self.map_calls);
        Ok(())
    }

    fn release(&self, _: Range) -> Result<(), BackendError> {
        count(&self.range_calls);
        Ok(())
    }

    fn record(&self, _: StreamId) -> Result<Event, BackendError> {
        Ok(Event(0))
    }

    fn wait(&self, _: StreamId, _: Event) -> Result<(), BackendError> {
        count(&self.wait_calls);
        Ok(())
    }

    fn query(&self, _: Event) -> Result<bool, BackendError> {
        Ok(true)
    }

    fn recycle(&self, _: Event) {}

    fn synchronize(&self, _: StreamId) -> Result<(), BackendError> {
        Ok(())
    }

    fn save(&self, _: PoolId, _: &[Part]) -> Result<Image, BackendError> {
        Ok(Image(0))
    }

    fn load(&self, _: Image, _: &[Part]) -> Result<(), BackendError> {
        Ok(())
    }

    fn zero(&self, _: &[Part]) -> Result<(), BackendError> {
        Ok(())
    }
}
