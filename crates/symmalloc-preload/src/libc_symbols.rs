//! The C library's `dlsym` and `dlvsym`, which this library interposes.
//!
//! A lookup by name would return this library's own `dlsym` and `dlvsym`. This file instead finds the C library's functions where the
//! loader finds them, in the C library's dynamic symbol table:
//!
//! ```text
//!  dl_iterate_phdr ─► libc.so.6 (libdl.so.2 before glibc 2.34) ─► PT_DYNAMIC ─► DT_SYMTAB, DT_STRTAB, DT_GNU_HASH ─► address
//! ```
//!
//! Nothing here allocates, locks or opens a library, because a program may call `dlsym` before its `malloc` works.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// `dlsym`.
pub(crate) type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
/// `dlvsym`.
pub(crate) type Dlvsym = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;

static DLSYM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static DLVSYM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Returns the address of the C library's `dlsym`, to jump to.
pub(crate) fn dlsym_address() -> *mut c_void {
    found(&DLSYM, c"dlsym")
}

/// Returns the address of the C library's `dlvsym`, to jump to.
pub(crate) fn dlvsym_address() -> *mut c_void {
    found(&DLVSYM, c"dlvsym")
}

/// Returns the C library's `dlsym`.
pub(crate) fn dlsym() -> Dlsym {
    // SAFETY: the type is that of the C library's function of this name.
    unsafe { std::mem::transmute::<*mut c_void, Dlsym>(dlsym_address()) }
}

/// Returns the C library's `dlvsym`.
pub(crate) fn dlvsym() -> Dlvsym {
    // SAFETY: the type is that of the C library's function of this name.
    unsafe { std::mem::transmute::<*mut c_void, Dlvsym>(dlvsym_address()) }
}

/// Looks up a symbol of a library with the C library's `dlsym`.
///
/// # Safety
/// The handle must belong to an open library.
pub(crate) unsafe fn look_up(library: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: by the caller's contract, the library is open, and the name is a C string.
    unsafe { dlsym()(library, name.as_ptr()) }
}

/// Looks up a function at the first call and caches its address. Concurrent lookups find the same address.
fn found(place: &AtomicPtr<c_void>, name: &'static CStr) -> *mut c_void {
    let known = place.load(Ordering::Relaxed);
    if !known.is_null() {
        return known;
    }
    let mut search = Search { name, address: 0 };
    // SAFETY: the callback has the type that is called, and `search` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(look_into), (&raw mut search).cast()) };
    if search.address == 0 {
        // The program cannot continue without the function, and there is no way to report an error.
        // SAFETY: the function takes no arguments.
        unsafe { libc::abort() };
    }
    let address = search.address as *mut c_void;
    place.store(address, Ordering::Relaxed);
    address
}

struct Search {
    name: &'static CStr,
    address: usize,
}

/// Searches one loaded library, if it is a part of the C library. Returns 1, which ends the iteration, once the symbol
/// is found.
unsafe extern "C" fn look_into(info: *mut libc::dl_phdr_info, _size: usize, data: *mut c_void) -> c_int {
    // SAFETY: `found` passes its own `Search`, and the loader passes the description of a loaded library.
    let (info, search) = unsafe { (&*info, &mut *data.cast::<Search>()) };
    if info.dlpi_name.is_null() {
        return 0;
    }
    // SAFETY: the loader provides a C string.
    let name = unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes();
    let file = name.rsplit(|byte| *byte == b'/').next().unwrap_or(name);
    if file != b"libc.so.6" && file != b"libdl.so.2" {
        return 0;
    }
    // SAFETY: the library is loaded while the loader describes it, and the C library is never unloaded.
    let Some(address) = (unsafe { symbol_of(info, search.name) }) else { return 0 };
    search.address = address;
    1
}

/// The required tables of a dynamic section.
#[derive(Default)]
struct Tables {
    symbols: usize,
    strings: usize,
    hash: usize,
}

const DT_NULL: i64 = 0;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_GNU_HASH: i64 = 0x6fff_fef5;

/// Returns the address of a function that a library defines.
///
/// # Safety
/// The library must be loaded.
unsafe fn symbol_of(info: &libc::dl_phdr_info, name: &CStr) -> Option<usize> {
    let base = info.dlpi_addr as usize;
    // SAFETY: the table belongs to the loader.
    let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
    let dynamic = headers.iter().find(|header| header.p_type == libc::PT_DYNAMIC)?;
    let mut entry = (base + dynamic.p_vaddr as usize) as *const [i64; 2];
    let mut tables = Tables::default();
    loop {
        // SAFETY: the section ends with DT_NULL.
        let [tag, value] = unsafe { entry.read() };
        // glibc stores addresses in the section, other loaders store offsets.
        let address = if (value as usize) < base { base + value as usize } else { value as usize };
        match tag {
            DT_NULL => break,
            DT_STRTAB => tables.strings = address,
            DT_SYMTAB => tables.symbols = address,
            DT_GNU_HASH => tables.hash = address,
            _ => {}
        }
        // SAFETY: the entry is before DT_NULL.
        entry = unsafe { entry.add(1) };
    }
    if tables.symbols == 0 || tables.strings == 0 || tables.hash == 0 {
        return None;
    }
    // SAFETY: the tables belong to a loaded library.
    unsafe { tables.find(base, name) }
}

impl Tables {
    /// Looks up a name as the loader does: bucket first, then chain.
    ///
    /// # Safety
    /// The tables must be those of a loaded library.
    unsafe fn find(&self, base: usize, name: &CStr) -> Option<usize> {
        let hash =
            name.to_bytes().iter().fold(5381_u32, |hash, byte| hash.wrapping_mul(33).wrapping_add(u32::from(*byte)));
        let words = self.hash as *const u32;
        // SAFETY: the table begins with a header of four words: the number of buckets, the index of the first symbol,
        // the number of words of the Bloom filter, and the filter's shift.
        let [buckets, first, bloom, _shift] = unsafe { words.cast::<[u32; 4]>().read() };
        let bucket_at = 4 + bloom as usize * 2;
        // SAFETY: the index is within the buckets.
        let mut index = unsafe { words.add(bucket_at + (hash % buckets.max(1)) as usize).read() };
        if index < first {
            return None;
        }
        let chain_at = bucket_at + buckets as usize;
        loop {
            // SAFETY: chains cover the symbol table from `first` on, and end with a word whose lowest bit is set.
            let word = unsafe { words.add(chain_at + (index - first) as usize).read() };
            if word | 1 == hash | 1 {
                // SAFETY: the index is that of a symbol, and its name is in the string table.
                let (symbol, text) = unsafe {
                    let symbol = &*(self.symbols as *const libc::Elf64_Sym).add(index as usize);
                    (symbol, CStr::from_ptr((self.strings + symbol.st_name as usize) as *const c_char))
                };
                let is_function = symbol.st_info & 15 == 2 && symbol.st_shndx != 0;
                if is_function && text == name {
                    return Some(base + symbol.st_value as usize);
                }
            }
            if word & 1 == 1 {
                return None;
            }
            index += 1;
        }
    }
}
