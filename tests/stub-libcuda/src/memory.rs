//! The memory of all stub devices: one sparse file per process, mapped at the addresses that the driver returns.
//!
//! ```text
//!  addresses of device 0      addresses of device 1                     the whole file, at `base`
//!  ├ range ┬ range ─┬ ...     ├ range ┬ ...                             ├──────────────────────────┤
//!      │ map            map       │                                      ▲            ▲
//!      ▼ offset          ▼        ▼                                      │ another    │ device's
//!  ┌── physical ─────── physical ─ physical ──── memory file ────────────┴ process, another library
//! ```
//!
//! Physical memory therefore has a fixed offset, regardless of the addresses that it is mapped at. A device that uses an earlier offset
//! sees the **old** memory after new memory is mapped at an address, as NCCL's windows do. Another process can map the file too.

use crate::model::{GRANULARITY, Options, State};
use crate::space::{End, Space};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_int;

/// Size limit of the memory file: the file is sparse, and larger than the memory of all devices.
const FILE_BYTES: u64 = 1 << 40;
/// Address space that all devices share evenly, out of the 128 TiB of a process.
const ADDRESS_BYTES: u64 = 80 << 40;
/// Address space of pinned host memory.
const HOST_ADDRESS_BYTES: u64 = 1 << 40;
/// Minimum size of copies and memsets that skip or remove pages instead of touching them.
const SPARSE_BYTES: usize = 64 << 10;
/// Minimum size of a reservation whose hint is granted. CUDA's driver ignores the hint of 2 MiB, and grants it for 64 GiB.
const LEAST_HINTED_BYTES: u64 = 64 << 30;
/// Alignment of a hint that is granted. CUDA's driver moves a hint at 2 MiB after such an address.
const HINT_ALIGNMENT: u64 = 32 << 20;
/// The device number of host memory.
const HOST: c_int = -1;

/// The permitted access to mapped memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// No access yet.
    None,
    /// Reads only.
    Read,
    /// Reads and writes.
    ReadWrite,
}

/// A mapping of physical memory into a range.
#[derive(Clone, Copy, Debug)]
pub struct Mapping {
    /// Size in bytes.
    pub size: u64,
    /// Handle of the mapped physical memory.
    pub handle: u64,
    access: Access,
}

/// Physical memory with a handle.
#[derive(Clone, Copy, Debug)]
pub struct Physical {
    /// Size in bytes.
    pub size: u64,
    /// Offset in the memory file.
    pub offset: u64,
    /// Device of the memory.
    pub device: c_int,
    /// Handle types that the memory can be exported as, combined by bitwise OR: 1 is a file descriptor, 8 is fabric.
    pub handle_types: u32,
    /// The file that contains it: the memory file, or that of another process.
    pub(crate) file: c_int,
    /// `true` once the memory was exported. Another process may then map its part of the memory file, which is therefore never reused.
    pub(crate) is_exported: bool,
    /// Number of owners: the handle itself, each mapping, and each retainer.
    pub(crate) owners: u32,
}

/// An allocation without a handle, as from `cuMemAlloc`.
#[derive(Clone, Copy, Debug)]
struct Allocation {
    size: u64,
    offset: u64,
    device: c_int,
}

#[derive(Debug)]
struct Arena {
    base: u64,
    space: Space,
    end: End,
}

/// The memory of all devices; see the module documentation.
#[derive(Debug)]
pub struct Memory {
    /// The memory file.
    pub file: c_int,
    /// Address at which all of the file is mapped.
    pub base: u64,
    file_space: Space,
    arenas: BTreeMap<c_int, Arena>,
    /// Reserved ranges: base address to size and device.
    pub ranges: BTreeMap<u64, (u64, c_int)>,
    /// Base addresses of ranges that the caller chose. They lie outside of the arenas.
    hinted: BTreeSet<u64>,
    /// `true` if no hint is granted; see `stub_move_hints`.
    pub moves_hints: bool,
    /// Mappings by address.
    pub mappings: BTreeMap<u64, Mapping>,
    /// Physical memory by handle.
    pub physical: BTreeMap<u64, Physical>,
    allocations: BTreeMap<u64, Allocation>,
    /// Bytes in use, by device.
    used: BTreeMap<c_int, u64>,
}

impl Memory {
    /// Creates the state in which nothing is in use.
    pub fn empty(options: &Options) -> Self {
        let file_bytes = FILE_BYTES.min(options.address_bytes);
        // SAFETY: the name is a C string.
        let file = unsafe { libc::memfd_create(c"stub-memory".as_ptr(), libc::MFD_CLOEXEC) };
        // SAFETY: the file belongs to this process.
        let sized = unsafe { libc::ftruncate(file, file_bytes as libc::off_t) };
        assert!(file >= 0 && sized == 0, "a sparse file in memory");
        let base = map_file(0, file_bytes, file, 0, 0).expect("addresses for the memory file");
        Memory {
            file,
            base,
            file_space: Space::new(file_bytes),
            arenas: BTreeMap::new(),
            ranges: BTreeMap::new(),
            hinted: BTreeSet::new(),
            moves_hints: false,
            mappings: BTreeMap::new(),
            physical: BTreeMap::new(),
            allocations: BTreeMap::new(),
            used: BTreeMap::new(),
        }
    }

    fn take_file(&mut self, size: u64, device: c_int) -> Option<u64> {
        let offset = self.file_space.take(size.next_multiple_of(GRANULARITY), End::Lowest)?;
        *self.used.entry(device).or_default() += size;
        Some(offset)
    }

    fn give_file(&mut self, offset: u64, size: u64, device: c_int) {
        *self.used.get_mut(&device).expect("the device has memory in use") -= size;
        let size = size.next_multiple_of(GRANULARITY);
        // SAFETY: nothing uses this part of the memory file, except the mapping at `base`.
        unsafe { self.punch(offset, size) };
        self.file_space.give(offset, size);
    }

    fn give_back(&mut self, physical: &Physical) {
        let Physical { size, offset, device, file, is_exported, .. } = *physical;
        if file != self.file {
            // SAFETY: only this import uses the descriptor.
            unsafe { libc::close(file) };
        } else if is_exported {
            *self.used.get_mut(&device).expect("the device has memory in use") -= size;
        } else {
            self.give_file(offset, size, device);
        }
    }

    /// Returns the memory in use on a device, in bytes.
    pub fn used_bytes(&self, device: c_int) -> u64 {
        self.used.get(&device).copied().unwrap_or(0)
    }

    /// Returns the memory in use on all devices, in bytes.
    pub fn device_bytes(&self) -> u64 {
        self.used.iter().filter(|(device, _)| **device != HOST).map(|(_, bytes)| bytes).sum()
    }

    /// Returns the pinned host memory, in bytes.
    pub fn host_bytes(&self) -> u64 {
        self.used_bytes(HOST)
    }

    /// Returns the number of pinned host allocations.
    pub fn host_allocations(&self) -> u64 {
        self.allocations.values().filter(|of| of.device == HOST).count() as u64
    }

    fn arena(&mut self, device: c_int, options: &Options) -> &mut Arena {
        self.arenas.entry(device).or_insert_with(|| {
            let share = (ADDRESS_BYTES / options.devices.max(1) as u64).min(options.address_bytes);
            let bytes = if device == HOST { HOST_ADDRESS_BYTES } else { share };
            let bytes = bytes / GRANULARITY * GRANULARITY;
            let base = map_nothing(0, bytes + GRANULARITY).expect("addresses for a device");
            let end = if options.descending.contains(&device) { End::Highest } else { End::Lowest };
            Arena { base: base.next_multiple_of(GRANULARITY), space: Space::new(bytes), end }
        })
    }

    fn take_addresses(&mut self, size: u64, device: c_int, options: &Options) -> Option<u64> {
        let arena = self.arena(device, options);
        arena.space.take(size.next_multiple_of(GRANULARITY), arena.end).map(|at| arena.base + at)
    }

    /// Returns the address and size of each mapping that overlaps the range.
    pub(crate) fn parts(&self, address: u64, size: u64) -> Vec<(u64, u64)> {
        let all = self.mappings.range(..address + size).rev();
        let mut parts: Vec<_> =
            all.map(|(at, mapping)| (*at, mapping.size)).take_while(|(at, length)| at + length > address).collect();
        parts.reverse();
        parts
    }

    /// Returns the first byte, size and device of the whole allocation that contains an address.
    pub fn allocation(&self, address: u64) -> Option<(u64, u64, c_int)> {
        let (base, of) = self.allocations.range(..=address).next_back()?;
        (address < base + of.size).then_some((*base, of.size, of.device))
    }

    /// Returns the parts of the memory file behind an address range; `None` if any byte has no accessible memory.
    pub fn extents(&self, address: u64, size: u64) -> Option<Vec<(u64, u64)>> {
        let mut extents = Vec::new();
        let mut at = address;
        while at < address + size {
            let mapped = self.mappings.range(..=at).next_back().map(|(start, mapping)| {
                let physical = &self.physical[&mapping.handle];
                (*start, mapping.size, physical.offset, mapping.access != Access::None && physical.file == self.file)
            });
            let whole = self.allocations.range(..=at).next_back();
            let whole = whole.map(|(start, of)| (*start, of.size, of.offset + *start % GRANULARITY, true));
            let found = [mapped, whole].into_iter().flatten().find(|(start, size, ..)| at < start + size);
            let (start, length, offset, is_accessible) = found?;
            if !is_accessible {
                return None;
            }
            let end = (start + length).min(address + size);
            extents.push((offset + (at - start), end - at));
            at = end;
        }
        Some(extents)
    }

    /// Returns the parts of an address range that have been written, as offset from `address` and size in bytes; `None` if any byte has no
    /// accessible memory. All other bytes are 0.
    fn written(&self, address: u64, size: u64) -> Option<Vec<(u64, u64)>> {
        let (mut written, mut start) = (Vec::new(), 0);
        for (offset, length) in self.extents(address, size)? {
            let (mut at, end) = (offset, offset + length);
            while let Some(data) = self.seek(at, libc::SEEK_DATA).filter(|data| *data < end) {
                at = self.seek(data, libc::SEEK_HOLE).map_or(end, |hole| hole.min(end));
                written.push((start + (data - offset), at - data));
            }
            start += length;
        }
        Some(written)
    }

    /// Returns the next offset with contents, or without.
    fn seek(&self, from: u64, whence: c_int) -> Option<u64> {
        // SAFETY: the file belongs to this process. Nothing uses its position.
        let found = unsafe { libc::lseek(self.file, from as libc::off_t, whence) };
        let is_known = found >= 0 || std::io::Error::last_os_error().raw_os_error() == Some(libc::ENXIO);
        assert!(is_known, "the memory file supports holes");
        u64::try_from(found).ok()
    }

    /// Copies bytes. Skips pages of the source that were never written: most of the memory in tests never is.
    ///
    /// # Safety
    /// The bytes are mapped, and no other thread or process accesses them. If the address ranges are disjoint, so is the memory behind them.
    pub unsafe fn copy(&self, to: u64, from: u64, count: usize) {
        let is_sparse = count >= SPARSE_BYTES && to.abs_diff(from) >= count as u64;
        let Some(written) = is_sparse.then(|| self.written(from, count as u64)).flatten() else {
            // SAFETY: by this function's contract.
            return unsafe { std::ptr::copy(from as *const u8, to as *mut u8, count) };
        };
        let mut done = 0;
        for (at, length) in written.into_iter().chain([(count as u64, 0)]) {
            // SAFETY: by this function's contract, and the ranges do not overlap.
            unsafe {
                self.set(to + done, 0, (at - done) as usize);
                std::ptr::copy_nonoverlapping((from + at) as *const u8, (to + at) as *mut u8, length as usize);
            }
            done = at + length;
        }
    }

    /// Sets bytes. Large ranges of zeros are removed from the file instead of written.
    ///
    /// # Safety
    /// The bytes are mapped, and no other thread or process accesses them.
    pub unsafe fn set(&self, address: u64, value: u8, count: usize) {
        let is_sparse = value == 0 && count >= SPARSE_BYTES && self.is_writable(address, count as u64);
        match is_sparse.then(|| self.extents(address, count as u64)).flatten() {
            // SAFETY: by this function's contract.
            Some(extents) => extents.into_iter().for_each(|(offset, size)| unsafe { self.punch(offset, size) }),
            // SAFETY: by this function's contract.
            None => unsafe { std::ptr::write_bytes(address as *mut u8, value, count) },
        }
    }

    /// Returns `true` if all mappings in the range are writable.
    fn is_writable(&self, address: u64, size: u64) -> bool {
        self.parts(address, size).iter().all(|(at, _)| self.mappings[at].access == Access::ReadWrite)
    }

    /// Removes the contents of a part of the memory file. Its bytes are 0 afterwards.
    ///
    /// # Safety
    /// Nothing else accesses this part of the file.
    unsafe fn punch(&self, offset: u64, size: u64) {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: the file belongs to this process, and by this function's contract.
        let done = unsafe { libc::fallocate(self.file, mode, offset as libc::off_t, size as libc::off_t) };
        assert_eq!(done, 0, "the memory file supports holes");
    }
}

impl State {
    /// Reserves an address range at `hint`, or elsewhere: if the range is small, if something else uses the addresses, or if the hint is 0.
    pub fn reserve_near(&mut self, hint: u64, size: u64, device: c_int) -> Option<u64> {
        let is_possible = hint != 0 && hint.is_multiple_of(HINT_ALIGNMENT) && size >= LEAST_HINTED_BYTES;
        let is_granted = is_possible && !self.memory.moves_hints;
        let base = if is_granted { map_nothing_at(hint, size) } else { None };
        let Some(base) = base else { return self.reserve(size, device) };
        self.memory.hinted.insert(base);
        self.memory.ranges.insert(base, (size, device));
        Some(base)
    }

    /// Reserves an address range.
    pub fn reserve(&mut self, size: u64, device: c_int) -> Option<u64> {
        let base = self.memory.take_addresses(size, device, &self.options)?;
        self.memory.ranges.insert(base, (size, device));
        Some(base)
    }

    /// Releases an address range.
    pub fn unreserve(&mut self, base: u64) {
        if let Some((size, device)) = self.memory.ranges.remove(&base) {
            if self.memory.hinted.remove(&base) {
                // SAFETY: the stub mapped these addresses without memory, and nothing is mapped over them.
                unsafe { libc::munmap(base as *mut libc::c_void, size as usize) };
                return;
            }
            let arena = self.memory.arena(device, &self.options);
            arena.space.give(base - arena.base, size.next_multiple_of(GRANULARITY));
        }
    }

    fn has_room(&self, size: u64, device: c_int) -> bool {
        size <= self.options.memory_bytes.saturating_sub(self.memory.used_bytes(device))
    }

    /// Creates physical memory. Returns its handle.
    pub fn create(&mut self, size: u64, device: c_int, handle_types: u32) -> Option<u64> {
        if !self.has_room(size, device) {
            return None;
        }
        let offset = self.memory.take_file(size, device)?;
        let (handle, file) = (self.handle(), self.memory.file);
        self.memory
            .physical
            .insert(handle, Physical { size, offset, device, handle_types, file, is_exported: false, owners: 1 });
        Some(handle)
    }

    /// Adds an owner.
    pub fn retain(&mut self, handle: u64) -> Option<()> {
        self.memory.physical.get_mut(&handle)?.owners += 1;
        Some(())
    }

    /// Returns the handle of the memory mapped at an address, with an additional owner.
    pub fn retain_at(&mut self, address: u64) -> Option<u64> {
        let (start, mapping) = self.memory.mappings.range(..=address).next_back()?;
        let handle = (address < start + mapping.size).then_some(mapping.handle)?;
        self.retain(handle)?;
        Some(handle)
    }

    /// Removes an owner: a handle, a mapping of it, or a retainer.
    pub fn release(&mut self, handle: u64) -> Option<()> {
        let physical = self.memory.physical.get_mut(&handle)?;
        physical.owners -= 1;
        if physical.owners == 0 {
            let gone = *physical;
            self.memory.physical.remove(&handle);
            self.memory.give_back(&gone);
        }
        Some(())
    }

    /// Maps the whole memory of a handle into a free part of a range.
    pub fn map(&mut self, address: u64, size: u64, handle: u64) -> Option<()> {
        let (base, (range, _)) = self.memory.ranges.range(..=address).next_back()?;
        let is_inside = address + size <= base + range;
        let is_free = self.memory.parts(address, size).is_empty();
        let physical = self.memory.physical.get_mut(&handle)?;
        if !is_inside || !is_free || physical.size != size {
            return None;
        }
        physical.owners += 1;
        self.memory.mappings.insert(address, Mapping { size, handle, access: Access::None });
        Some(())
    }

    /// Makes mapped memory accessible. The range must consist of whole mappings.
    pub fn set_access(&mut self, address: u64, size: u64, access: Access) -> Option<()> {
        let parts = self.memory.parts(address, size);
        if !tile(&parts, address, size) {
            return None;
        }
        for (at, length) in parts {
            let mapping = self.memory.mappings.get_mut(&at).expect("just found");
            mapping.access = access;
            let Physical { offset, file, .. } = self.memory.physical[&mapping.handle];
            map_file(at, length, file, offset, libc::MAP_FIXED)?;
            if access == Access::Read {
                // SAFETY: this function has just mapped these addresses.
                unsafe { libc::mprotect(at as *mut _, length as usize, libc::PROT_READ) };
            }
        }
        Some(())
    }

    /// Unmaps whole mappings.
    pub fn unmap(&mut self, address: u64, size: u64) -> Option<()> {
        let parts = self.memory.parts(address, size);
        if !tile(&parts, address, size) {
            return None;
        }
        self.note_unmapped(address, size);
        map_nothing(address, size)?;
        for (at, _) in parts {
            let mapping = self.memory.mappings.remove(&at).expect("just found");
            self.release(mapping.handle)?;
        }
        Some(())
    }

    /// Creates a whole allocation. It is aligned to 512 bytes and, deliberately, not always to the granularity.
    pub fn allocate(&mut self, size: u64, device: c_int) -> Option<u64> {
        if !self.has_room(size, device) && device != HOST {
            return None;
        }
        let shift = 512 * (self.memory.allocations.len() as u64 % 2);
        let base = self.memory.take_addresses(size + shift, device, &self.options)?;
        let offset = self.memory.take_file(size + shift, device)?;
        *self.memory.used.get_mut(&device).expect("the device has memory in use") -= shift;
        map_file(base, (size + shift).next_multiple_of(4096), self.memory.file, offset, libc::MAP_FIXED)?;
        self.memory.allocations.insert(base + shift, Allocation { size, offset, device });
        Some(base + shift)
    }

    /// Returns `true` if memory is mapped at an address.
    pub fn is_mapped(&self, address: u64) -> bool {
        let before = self.memory.mappings.range(..=address).next_back();
        before.is_some_and(|(at, mapping)| address < at + mapping.size)
    }

    /// Returns `true` if an address belongs to neither a device nor pinned host memory.
    pub fn is_pageable(&self, address: u64) -> bool {
        self.memory.allocation(address).is_none() && !self.is_mapped(address)
    }

    /// Frees all whole allocations of a device.
    pub fn free_all(&mut self, device: c_int) {
        let of_device = self.memory.allocations.iter().filter(|(_, of)| of.device == device);
        let all: Vec<(u64, u64)> = of_device.map(|(address, of)| (*address, of.size)).collect();
        for (address, size) in all {
            self.forget_pooled(address, size);
            self.free(address);
        }
    }

    /// Frees a whole allocation. Its addresses are not reused.
    pub fn free(&mut self, address: u64) -> Option<()> {
        let Allocation { size, offset, device } = self.memory.allocations.remove(&address)?;
        self.note_unmapped(address, size);
        let shift = address % GRANULARITY;
        map_nothing(address - shift, (size + shift).next_multiple_of(4096))?;
        *self.memory.used.get_mut(&device).expect("the device has memory in use") += shift;
        self.memory.give_file(offset, size + shift, device);
        // As with the driver, the next allocation may get these addresses.
        let arena = self.memory.arena(device, &self.options);
        arena.space.give(address - shift - arena.base, (size + shift).next_multiple_of(GRANULARITY));
        Some(())
    }
}

/// Returns `true` if mappings cover the range exactly.
fn tile(parts: &[(u64, u64)], address: u64, size: u64) -> bool {
    let inside = parts.iter().all(|(at, length)| *at >= address && at + length <= address + size);
    size > 0 && inside && parts.iter().map(|(_, length)| length).sum::<u64>() == size
}

/// Maps addresses without memory: new addresses if `address` is 0, else at `address`, which this module must have mapped before.
fn map_nothing(address: u64, size: u64) -> Option<u64> {
    let fixed = if address == 0 { 0 } else { libc::MAP_FIXED };
    let flags = fixed | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a fixed address was mapped by this module before.
    let mapped = unsafe { libc::mmap(address as *mut _, size as usize, libc::PROT_NONE, flags, -1, 0) };
    (mapped != libc::MAP_FAILED).then_some(mapped as u64)
}

/// Maps addresses without memory at `address`, unless the process uses any of them.
fn map_nothing_at(address: u64, size: u64) -> Option<u64> {
    let flags = libc::MAP_FIXED_NOREPLACE | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: the call replaces no other mapping.
    let mapped = unsafe { libc::mmap(address as *mut _, size as usize, libc::PROT_NONE, flags, -1, 0) };
    (mapped as u64 == address).then_some(address)
}

/// Maps a part of the memory file. A fixed address must have been mapped by this module before.
fn map_file(address: u64, size: u64, file: c_int, offset: u64, fixed: c_int) -> Option<u64> {
    let flags = fixed | libc::MAP_SHARED | libc::MAP_NORESERVE;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a fixed address was mapped by this module before.
    let mapped =
        unsafe { libc::mmap(address as *mut _, size as usize, protection, flags, file, offset as libc::off_t) };
    (mapped != libc::MAP_FAILED).then_some(mapped as u64)
}
