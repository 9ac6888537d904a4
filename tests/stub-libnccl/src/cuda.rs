//! The interface of the stub of libcuda, as defined in its `external.rs`. The library is opened by name, so it is the same instance that
//! the program uses.

use crate::abi::{Hooks, Region};
use crate::messages::Extent;
use std::ffi::{CStr, c_int, c_void};
use std::sync::OnceLock;

macro_rules! table {
    ($($name:ident = $symbol:ident ($($arg:ident: $type:ty),*) $(-> $answer:ty)?;)*) => {
        struct Table {
            $($name: unsafe extern "C" fn($($type),*) $(-> $answer)?,)*
        }

        impl Table {
            fn open() -> Option<Self> {
                let library = open(c"libcuda.so").or_else(|| open(c"libcuda.so.1"))?;
                $(
                    // SAFETY: the library stays open, and the pointer is a C string.
                    let $name = unsafe { libc::dlsym(library, concat!(stringify!($symbol), "\0").as_ptr().cast()) };
                )*
                if [$($name),*].contains(&std::ptr::null_mut()) {
                    return None;
                }
                // SAFETY: the types are those of the stub of libcuda.
                Some(Table { $($name: unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) $(-> $answer)?>($name) },)* })
            }
        }
    };
}

table! {
    hooks = stub_hooks(hooks: Hooks);
    submit = stub_external_submit(stream: u64, template: u64) -> c_int;
    complete = stub_external_complete(instance: u64);
    device = stub_device() -> c_int;
    stream_device = stub_stream_device(stream: u64) -> c_int;
    devices = stub_devices(memory_bytes: *mut u64) -> c_int;
    region = stub_region(address: u64, region: *mut Region) -> c_int;
    extents = stub_extents(address: u64, size: u64, extents: *mut [u64; 2], capacity: usize) -> isize;
    memory_file = stub_memory_file(base: *mut u64) -> c_int;
    retain = stub_retain(handle: u64) -> i64;
    drop = stub_drop(handle: u64);
    guard = stub_guard(base: u64, size: u64) -> u64;
    unguard = stub_unguard(guard: u64);
    capture_forbids = stub_capture_forbids() -> c_int;
    reserve = cuMemAddressReserve(base: *mut u64, size: usize, alignment: usize, hint: u64, flags: u64) -> c_int;
    address_free = cuMemAddressFree(base: u64, size: usize) -> c_int;
    create = cuMemCreate(handle: *mut u64, size: usize, properties: *const [c_int; 8], flags: u64) -> c_int;
    map = cuMemMap(address: u64, size: usize, offset: usize, handle: u64, flags: u64) -> c_int;
    set_access = cuMemSetAccess(address: u64, size: usize, access: *const [c_int; 3], count: usize) -> c_int;
    unmap = cuMemUnmap(address: u64, size: usize) -> c_int;
    release = cuMemRelease(handle: u64) -> c_int;
}

fn open(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the pointer is a C string, and the stub has no initializers.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
    (!library.is_null()).then_some(library)
}

/// Returns the table of functions, after installing this stub's hooks.
fn table() -> Option<&'static Table> {
    static TABLE: OnceLock<Option<Table>> = OnceLock::new();
    let table = TABLE.get_or_init(|| {
        let table = Table::open()?;
        let hooks = Hooks {
            submitted: crate::streams::submitted,
            arrived: crate::streams::arrived,
            unmapped: crate::window::unmapped,
        };
        // SAFETY: the hooks stay callable, because the loader never closes this library while the program uses it.
        unsafe { (table.hooks)(hooks) };
        Some(table)
    });
    table.as_ref()
}

/// Returns `true` if the driver is available.
pub fn is_there() -> bool {
    table().is_some()
}

fn driver() -> &'static Table {
    table().expect("the stub of libcuda is on the library path")
}

/// Submits work to a stream. Returns `true` if it was captured, or the driver's error.
pub fn submit(stream: u64, template: u64) -> Result<bool, c_int> {
    // SAFETY: there are no pointers.
    match unsafe { (driver().submit)(stream, template) } {
        code @ ..0 => Err(-code),
        code => Ok(code == 1),
    }
}

/// Marks work as finished.
pub fn complete(instance: u64) {
    // SAFETY: there are no pointers.
    unsafe { (driver().complete)(instance) };
}

/// Returns the current device.
pub fn device() -> Option<c_int> {
    // SAFETY: there are no pointers.
    let device = unsafe { (driver().device)() };
    (device >= 0).then_some(device)
}

/// Returns the device of a stream.
pub fn stream_device(stream: u64) -> Option<c_int> {
    // SAFETY: there are no pointers.
    let device = unsafe { (driver().stream_device)(stream) };
    (device >= 0).then_some(device)
}

/// Returns the number of devices, and the memory of each in bytes.
pub fn devices() -> (c_int, u64) {
    let mut bytes = 0;
    // SAFETY: `bytes` is valid for writing.
    (unsafe { (driver().devices)(&raw mut bytes) }, bytes)
}

/// Describes the memory at an address.
pub fn region(address: u64) -> Option<Region> {
    let mut region = Region::default();
    // SAFETY: `region` is valid for writing.
    (unsafe { (driver().region)(address, &raw mut region) } == 1).then_some(region)
}

/// Returns the parts of the memory file behind an address range.
pub fn extents(address: u64, size: u64) -> Option<Vec<Extent>> {
    let mut found = vec![[0; 2]; 4];
    loop {
        // SAFETY: the vector is valid for writing this many elements.
        let count = unsafe { (driver().extents)(address, size, found.as_mut_ptr(), found.len()) };
        let count = usize::try_from(count).ok()?;
        if count <= found.len() {
            found.truncate(count);
            return Some(found.into_iter().map(|[offset, length]| (offset, length)).collect());
        }
        found.resize(count, [0; 2]);
    }
}

/// Returns the memory file of this process, and the address at which it is mapped.
pub fn memory_file() -> (c_int, u64) {
    let mut base = 0;
    // SAFETY: `base` is valid for writing.
    let file = unsafe { (driver().memory_file)(&raw mut base) };
    (file, base)
}

/// Retains physical memory. Returns its offset in the memory file.
pub fn retain(handle: u64) -> Option<u64> {
    // SAFETY: there are no pointers.
    u64::try_from(unsafe { (driver().retain)(handle) }).ok()
}

/// Releases memory that [`retain`] retained.
pub fn release_retained(handle: u64) {
    // SAFETY: there are no pointers.
    unsafe { (driver().drop)(handle) };
}

/// Registers a guard, whose hook is called when memory in the range is unmapped or freed.
pub fn guard(base: u64, size: u64) -> u64 {
    // SAFETY: there are no pointers.
    unsafe { (driver().guard)(base, size) }
}

/// Removes a guard.
pub fn unguard(guard: u64) {
    // SAFETY: there are no pointers.
    unsafe { (driver().unguard)(guard) };
}

/// Returns `true` if captures forbid this thread host calls, and invalidates them.
pub fn capture_forbids() -> bool {
    // SAFETY: there are no pointers.
    unsafe { (driver().capture_forbids)() == 1 }
}

/// Allocates memory in a dedicated range, like `ncclMemAlloc`.
pub fn allocate(size: usize) -> Option<u64> {
    let size = size.next_multiple_of(2 << 20);
    let device = device()?;
    let (mut base, mut handle) = (0, 0);
    let properties = [1, 1, 1, device, 0, 0, 0x100, 0];
    let access = [1, device, 3];
    let table = driver();
    // SAFETY: the pointers are to locals that are valid during the call, and the range and the handle have just been created.
    unsafe {
        let is_reserved = (table.reserve)(&raw mut base, size, 0, 0, 0) == 0;
        if !is_reserved || (table.create)(&raw mut handle, size, &raw const properties, 0) != 0 {
            return None;
        }
        let is_mapped = (table.map)(base, size, 0, handle, 0) == 0;
        let is_accessible = (table.set_access)(base, size, &raw const access, 1) == 0;
        (table.release)(handle);
        (is_mapped && is_accessible).then_some(base)
    }
}

/// Frees memory, like `ncclMemFree`.
pub fn free(base: u64) -> Option<()> {
    let region = region(base).filter(|region| region.base == base && region.handle != 0)?;
    let (table, size) = (driver(), region.size as usize);
    // SAFETY: `allocate` made this memory, and the caller no longer uses it.
    let is_free = unsafe { (table.unmap)(base, size) == 0 && (table.address_free)(base, size) == 0 };
    is_free.then_some(())
}
