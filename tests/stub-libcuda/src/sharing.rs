//! Export and import of physical memory between processes.
//!
//! ```text
//!  exporter                                              importer
//!  memory file ── opened again, and its position ──────► descriptor ── kept open by the handle
//!                 encodes the location: offset | device | granules
//! ```
//! A dma-buf is a file of the size of its range that holds no memory, so the memory stays only if the program keeps it.
//!
//! An import allocates no memory of this process's devices. A fabric handle names the process and its memory file, so it becomes invalid
//! when the process ends.

use crate::memory::Physical;
use crate::model::{GRANULARITY, State, with};
use crate::{INVALID_DEVICE, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, answer, call, call_outside_capture};
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

/// Number of low bits of a place that hold the number of granules. The next 4 bits hold the device; both are below the granularity.
const GRANULES_BITS: u64 = 16;
/// Size of a host page.
const PAGE_BYTES: u64 = 4096;

impl Physical {
    fn place(&self) -> u64 {
        let granules = self.size / GRANULARITY;
        assert!(
            granules < 1 << GRANULES_BITS && (0..16).contains(&self.device),
            "the size and the device fit into a place"
        );
        self.offset | (self.device as u64) << GRANULES_BITS | granules
    }

    fn at(place: u64, file: c_int, handle_types: u32) -> Self {
        Physical {
            size: (place & ((1 << GRANULES_BITS) - 1)) * GRANULARITY,
            offset: place / GRANULARITY * GRANULARITY,
            device: (place >> GRANULES_BITS & 15) as c_int,
            handle_types,
            file,
            is_exported: true,
            owners: 1,
        }
    }
}

/// Opens the file behind a descriptor again, with a separate position.
fn open_again(process: u64, descriptor: c_int) -> Option<c_int> {
    let path = std::ffi::CString::new(format!("/proc/{process}/fd/{descriptor}"))
        .expect("the text should contain no zero byte");
    // SAFETY: the path is a C string.
    let opened = unsafe { libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
    (opened >= 0).then_some(opened)
}

fn inode(file: c_int) -> Option<(u64, u64)> {
    // SAFETY: all zeros are a valid `stat`.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: `stat` is valid for writing.
    (unsafe { libc::fstat(file, &raw mut stat) } == 0).then_some((stat.st_dev, stat.st_ino))
}

impl State {
    /// Imports memory from a memory file, and takes ownership of the descriptor. For memory of this process, closes the descriptor and
    /// returns the existing handle.
    fn adopt(&mut self, place: u64, file: c_int, handle_types: u32) -> u64 {
        let is_own = inode(file) == inode(self.memory.file);
        let mut own = self.memory.physical.iter().filter(|(_, own)| is_own && own.file == self.memory.file);
        if let Some(handle) = own.find(|(_, own)| own.place() == place).map(|(handle, _)| *handle) {
            // SAFETY: this function owns the descriptor.
            unsafe { libc::close(file) };
            self.retain(handle);
            return handle;
        }
        let handle = self.handle();
        self.memory.physical.insert(handle, Physical::at(place, file, handle_types));
        handle
    }
}

stub! {
    call cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) |state| {
        if !(0..state.options.devices).contains(&device) { return Err(INVALID_DEVICE); }
        let mut bytes = *b"stub of a device";
        bytes[0] = state.options.uuid;
        bytes[15] = device as u8;
        answer(uuid, bytes);
        Ok(())
    };
    call_outside_capture cuMemExportToShareableHandle(shareable: *mut c_void, handle: u64, kind: c_int, flags: c_ulonglong) |state| {
        let file = state.memory.file;
        let physical = state.memory.physical.get_mut(&handle).ok_or(INVALID_VALUE)?;
        if physical.handle_types & kind as u32 == 0 || physical.file != file { return Err(INVALID_VALUE); }
        physical.is_exported = true;
        let place = physical.place();
        match kind {
            1 => {
                let opened = open_again(u64::from(std::process::id()), file).ok_or(NOT_SUPPORTED)?;
                libc::lseek(opened, place as libc::off_t, libc::SEEK_SET);
                answer(shareable.cast(), opened);
            }
            8 => answer(shareable.cast(), [u64::from(std::process::id()), file as u64, place, 0, 0, 0, 0, 0]),
            _ => return Err(INVALID_VALUE),
        }
        Ok(())
    };
    call_outside_capture cuMemImportFromShareableHandle(handle: *mut u64, shareable: *mut c_void, kind: c_int) |state| {
        let (place, file) = match kind {
            1 => {
                // The descriptor is passed in place of a pointer.
                let given = shareable as usize as c_int;
                let place = libc::lseek(given, 0, libc::SEEK_CUR);
                let file = libc::fcntl(given, libc::F_DUPFD_CLOEXEC, 0);
                if place < 0 || file < 0 { return Err(INVALID_VALUE); }
                (place as u64, file)
            }
            8 => {
                let [process, file, place, ..] = shareable.cast::<[u64; 8]>().read_unaligned();
                (place, open_again(process, file as c_int).ok_or(INVALID_VALUE)?)
            }
            _ => return Err(INVALID_VALUE),
        };
        if Physical::at(place, file, kind as u32).size == 0 {
            libc::close(file);
            return Err(INVALID_VALUE);
        }
        let adopted = state.adopt(place, file, kind as u32);
        answer(handle, adopted);
        Ok(())
    };
    call_outside_capture cuMemGetHandleForAddressRange(handle: *mut c_void, address: u64, size: usize, kind: c_int, flags: c_ulonglong) |state| {
        if !state.options.has(124) { return Err(NOT_SUPPORTED); }
        let is_whole = address.is_multiple_of(PAGE_BYTES) && (size as u64).is_multiple_of(PAGE_BYTES) && size > 0;
        let chunks = state.memory.parts(address, size as u64);
        let [(start, length)] = chunks[..] else { return Err(INVALID_VALUE) };
        let is_inside = start <= address && address + size as u64 <= start + length;
        if kind != 1 || flags != 0 || !is_whole || !is_inside { return Err(INVALID_VALUE); }
        let file = libc::memfd_create(c"stub-dma-buf".as_ptr(), libc::MFD_CLOEXEC);
        if file < 0 || libc::ftruncate(file, size as libc::off_t) != 0 { return Err(OUT_OF_MEMORY); }
        answer(handle.cast(), file);
        Ok(())
    };
    call cuMemGetAllocationPropertiesFromHandle(properties: *mut c_int, handle: u64) |state| {
        let physical = state.memory.physical.get(&handle).ok_or(INVALID_VALUE)?;
        properties.write(1);
        properties.add(1).write(physical.handle_types as c_int);
        properties.add(2).write(1);
        properties.add(3).write(physical.device);
        Ok(())
    };
}

/// Returns the number of pieces of physical memory that were imported from other processes.
#[unsafe(no_mangle)]
pub extern "C" fn stub_imports() -> c_uint {
    with(|state| state.memory.physical.values().filter(|physical| physical.file != state.memory.file).count() as c_uint)
}
