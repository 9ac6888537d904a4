//! Opens libraries at run time: libcuda, and libnccl for `symmalloc-nccl`.

use libloading::Library;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

/// Opens the library of this name.
///
/// # Errors
/// Returns the loader's messages if the library is not found or cannot be loaded.
///
/// # Safety
/// The library's initializers may run at any time.
pub unsafe fn named(name: &OsStr) -> Result<Library, Vec<String>> {
    // SAFETY: the caller's contract.
    unsafe { Library::new(OsString::from(name)) }.map_err(|error| {
        let reason = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
        let has_name = reason.contains(&*name.to_string_lossy());
        vec![if has_name { reason } else { format!("{}: {reason}", name.display()) }]
    })
}

/// Returns the first of the `opened` libraries that this process has already opened, or else the first of `names` that can be opened.
///
/// # Errors
/// Returns one message for each name that was tried if none can be opened.
///
/// # Safety
/// See [`named`].
pub unsafe fn first_of<'a>(
    opened: impl IntoIterator<Item = &'a &'a str>,
    names: &[&'a str],
) -> Result<(Library, &'a OsStr), Vec<String>> {
    if let Some(found) = opened.into_iter().find_map(|name| Some((opened_already(name)?, OsStr::new(*name)))) {
        return Ok(found);
    }
    let mut tried = Vec::new();
    for name in names.iter().map(|name| OsStr::new(*name)) {
        // SAFETY: the caller's contract.
        match unsafe { named(name) } {
            Ok(library) => return Ok((library, name)),
            Err(reasons) => tried.extend(reasons),
        }
    }
    Err(tried)
}

/// Returns a library that this process has already loaded.
#[cfg(unix)]
fn opened_already(name: &str) -> Option<Library> {
    use libloading::os::unix::Library;
    // SAFETY: loads nothing: it only increments the reference count of a loaded library.
    let library = unsafe { Library::open(Some(name), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    library.ok().map(Into::into)
}

#[cfg(not(unix))]
fn opened_already(_name: &str) -> Option<Library> {
    None
}

/// Returns the path of the file that defines this symbol of a library.
#[cfg(unix)]
pub fn path_of(library: &Library, symbol: &str) -> Option<PathBuf> {
    use std::ffi::CStr;
    use std::os::unix::ffi::OsStrExt;
    // SAFETY: only resolved, never called through this type.
    let symbol = unsafe { library.get::<unsafe extern "C" fn()>(symbol) }.ok()?;
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: `info` is valid for writing; any address may be queried.
    if unsafe { libc::dladdr(*symbol as *const libc::c_void, info.as_mut_ptr()) } == 0 {
        return None;
    }
    // SAFETY: dladdr filled it.
    let info = unsafe { info.assume_init() };
    if info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: a C string that lives as long as the library, which is never closed.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}

/// Returns `None`: the path is unknown on this platform.
#[cfg(not(unix))]
pub fn path_of(_library: &Library, _symbol: &str) -> Option<PathBuf> {
    None
}
