//! The addresses of pools with a base: reservations at chosen addresses.
//!
//! `cuMemAddressReserve` takes an address as a hint. Drivers grant the hint for large reservations if nothing uses the addresses. Otherwise
//! the call *succeeds with other addresses*, as for small reservations, and for addresses that are not a multiple of 32 MiB. A pool
//! therefore makes one reservation of 1 TiB for all of its ranges, compares the result with the base, and returns anything else at once.
//!
//! ```text
//!  reserve 1 TiB at the base ──► the base          the pool's
//!                            ├─► another address   released; the error names the user of the base, and a free slot
//!                            └─► error             the error
//! ```
//!
//! The user of the addresses is another pool of this process, or a mapping in `/proc/self/maps`. The driver shows reservations of other
//! libraries there too, because device addresses are also addresses of the process.

use super::backing::Backing;
use crate::device::CudaDevice;
use crate::error::{DriverError, INVALID_VALUE};
use cudarc::driver::sys::CUdeviceptr;
use std::collections::BTreeMap;
use std::fs;
use std::ops;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use symmalloc_core::backend::{DeviceAddress, Range};
use symmalloc_core::base::{Base, BaseError, Occupant, SLOT_BYTES, SLOT_COUNT};
use symmalloc_core::ids::PoolId;

/// A pool with a base.
#[derive(Clone, Copy, Debug)]
struct Owner {
    base: Base,
    pool: PoolId,
    /// Ordinal of the pool's device.
    device: usize,
}

/// The pools of all allocators of the process that have a base, by its address.
static OWNERS: Mutex<BTreeMap<u64, Owner>> = Mutex::new(BTreeMap::new());

fn owners() -> MutexGuard<'static, BTreeMap<u64, Owner>> {
    lock(&OWNERS)
}

/// Reserves the addresses of a pool. The caller has entered the device's context.
fn reserve(device: &CudaDevice, base: Base, pool: PoolId, granularity_bytes: u64) -> Result<Range, BaseError> {
    // Held until the end, so that two pools cannot both find the addresses free.
    let mut owners = owners();
    if let Some(owner) = owner_of(&owners, &addresses_of(base)) {
        let occupant = Occupant::Pool { pool: owner.pool, device: owner.device, base: owner.base };
        return Err(BaseError::Occupied { base, occupant, free_slot: free_slot(&owners, &mappings()) });
    }
    let driver = device.driver();
    let mut returned: CUdeviceptr = 0;
    let (size, alignment) = (SLOT_BYTES as usize, granularity_bytes as usize);
    // SAFETY: `returned` is valid for writing.
    let reserved = unsafe { driver.address_reserve(&raw mut returned, size, alignment, base.address(), 0) };
    reserved.map_err(|error| BaseError::Driver { base, call: error.call, code: error.code })?;
    if returned == base.address() {
        owners.insert(returned, Owner { base, pool, device: device.ordinal() });
        return Ok(Range { base: DeviceAddress(returned), size_bytes: SLOT_BYTES });
    }
    // SAFETY: reserved above with this size, and nothing is mapped there.
    if let Err(error) = unsafe { driver.address_free(returned, size) } {
        tracing::warn!(name: "memory.addresses_kept", target: "symmalloc", size_bytes = SLOT_BYTES, %error);
    }
    let mappings = mappings();
    let mapping = mappings.iter().find(|mapping| overlaps(&mapping.addresses, &addresses_of(base)));
    let occupant = mapping.map_or(Occupant::Unknown { returned }, |mapping| Occupant::Mapping {
        start: mapping.addresses.start,
        end: mapping.addresses.end,
        name: mapping.name.as_str().into(),
    });
    Err(BaseError::Occupied { base, occupant, free_slot: free_slot(&owners, &mappings) })
}

/// Ranges of an allocator by base address.
type Ranges = Mutex<BTreeMap<u64, Arc<Backing>>>;

fn lock<T>(values: &Mutex<T>) -> MutexGuard<'_, T> {
    values.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The addresses that one allocator's memory reserved for pools with a base.
#[derive(Default)]
pub(super) struct Spaces {
    /// First address to size. Locked before the ranges.
    reserved: Mutex<BTreeMap<u64, u64>>,
}

impl Spaces {
    /// Reserves the addresses of a pool. The caller has entered the device's context.
    pub(super) fn reserve(
        &self,
        device: &CudaDevice,
        base: Base,
        pool: PoolId,
        granularity_bytes: u64,
    ) -> Result<Range, BaseError> {
        let space = reserve(device, base, pool, granularity_bytes)?;
        lock(&self.reserved).insert(space.base.0, space.size_bytes);
        Ok(space)
    }

    /// Turns a part of these addresses into a range, if it overlaps no other one.
    pub(super) fn carve(&self, ranges: &Ranges, part: Range, granularity_bytes: u64) -> Result<(), DriverError> {
        let (reserved, mut ranges) = (lock(&self.reserved), lock(ranges));
        let (start, size_bytes) = (part.base.0, part.size_bytes);
        let is_whole = size_bytes > 0 && (start | size_bytes).is_multiple_of(granularity_bytes);
        let end = start.checked_add(size_bytes).filter(|_| is_whole);
        let is_inside =
            |end: &u64| reserved.range(..=start).next_back().is_some_and(|(space, size)| *end <= space + size);
        let is_free = |end: &u64| {
            let before = ranges.range(..end).next_back();
            before.is_none_or(|(other, backing)| other + backing.range.size_bytes <= start)
        };
        if end.filter(is_inside).filter(is_free).is_none() {
            return Err(DriverError { call: "cuMemAddressReserve", code: INVALID_VALUE });
        }
        ranges.insert(start, Arc::new(Backing::new(part, true)));
        Ok(())
    }

    /// Releases the addresses of a pool if none of their parts is a range. After an error, they stay reserved. The caller has entered the
    /// device's context.
    pub(super) fn release(&self, ranges: &Ranges, device: &CudaDevice, space: Range) -> Result<(), DriverError> {
        // Held until the end, so that no part is carved in the meantime.
        let mut reserved = lock(&self.reserved);
        let Range { base: DeviceAddress(start), size_bytes } = space;
        let is_owned = reserved.get(&start) == Some(&size_bytes);
        if !is_owned || lock(ranges).range(start..start + size_bytes).next().is_some() {
            return Err(DriverError { call: "cuMemAddressFree", code: INVALID_VALUE });
        }
        let mut owners = owners();
        // SAFETY: checked above: `reserve` of this value reserved these addresses with this size, and no range lies inside. A range is
        // removed only after its memory is unmapped, so nothing is mapped there.
        unsafe { device.driver().address_free(start, size_bytes as usize) }?;
        owners.remove(&start);
        reserved.remove(&start);
        Ok(())
    }
}

fn addresses_of(base: Base) -> ops::Range<u64> {
    base.address()..base.address() + SLOT_BYTES
}

fn overlaps(one: &ops::Range<u64>, other: &ops::Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

fn owner_of(owners: &BTreeMap<u64, Owner>, addresses: &ops::Range<u64>) -> Option<Owner> {
    owners.values().copied().find(|owner| overlaps(&addresses_of(owner.base), addresses))
}

/// Returns the first slot that no pool and no mapping uses.
fn free_slot(owners: &BTreeMap<u64, Owner>, mappings: &[Mapping]) -> Option<u32> {
    (0..SLOT_COUNT).find(|slot| {
        let addresses = addresses_of(Base::slot(*slot).expect("the slot exists"));
        let is_mapped = mappings.iter().any(|mapping| overlaps(&mapping.addresses, &addresses));
        !is_mapped && owner_of(owners, &addresses).is_none()
    })
}

/// A mapping of the process.
#[derive(Debug, PartialEq, Eq)]
struct Mapping {
    addresses: ops::Range<u64>,
    name: String,
}

/// Returns the mappings of the process, by address. Returns none if the system does not list them.
fn mappings() -> Vec<Mapping> {
    parse(&fs::read("/proc/self/maps").unwrap_or_default())
}

fn parse(maps: &[u8]) -> Vec<Mapping> {
    let mapping = |line: &str| {
        let (start, rest) = line.split_once('-')?;
        let mut fields = rest.splitn(6, ' ');
        let start = u64::from_str_radix(start, 16).ok()?;
        let end = u64::from_str_radix(fields.next()?, 16).ok()?;
        // The permissions, offset, device and inode precede the name.
        let name = fields.nth(4).unwrap_or_default().trim().to_owned();
        Some(Mapping { addresses: start..end, name })
    };
    String::from_utf8_lossy(maps).lines().filter_map(mapping).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
        00400000-00452000 r-xp 00000000 08:02 173521      /usr/bin/a program\n\
        100000000000-110000000000 ---p 00000000 00:00 0 \n\
        1200001ff000-120000400000 rw-s 00000000 00:05 7                          /dev/zero (deleted)\n\
        not a mapping\n\
        7ffc0000-7ffd0000 rw-p 00000000 00:00 0                                   [stack]\n";

    #[test]
    fn mappings_are_read_with_their_names() {
        let found = parse(MAPS.as_bytes());
        let names: Vec<_> = found.iter().map(|mapping| mapping.name.as_str()).collect();
        assert_eq!(names, ["/usr/bin/a program", "", "/dev/zero (deleted)", "[stack]"]);
        assert_eq!(found[1].addresses, 0x1000_0000_0000..0x1100_0000_0000);
        assert!(mappings().iter().any(|mapping| mapping.name == "[stack]"), "this process has a stack");
    }

    #[test]
    fn the_free_slot_overlaps_no_mapping_and_no_pool() {
        let base = Base::at(0x1380_0000_0000).expect("aligned");
        let owners = BTreeMap::from([(base.address(), Owner { base, pool: PoolId(1), device: 0 })]);
        // Slots 0 and 2 are mapped, and the pool begins in the middle of slot 3.
        assert_eq!(free_slot(&owners, &parse(MAPS.as_bytes())), Some(1));
        let all = "100000000000-120000000000 ---p 0 0:0 0\n".to_owned() + MAPS;
        assert_eq!(free_slot(&owners, &parse(all.as_bytes())), Some(5));
        assert_eq!(free_slot(&owners, &parse(b"100000000000-700000000000 ---p 0 0:0 0\n")), None);
    }
}
