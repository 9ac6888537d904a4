//! libcuda: where it is, and what it has.
//!
//! ```text
//!  $SYMMALLOC_CUDA_LIBRARY ── a libcuda that this process has opened already ── libcuda.so ── libcuda.so.1
//!         set: this one or none        linked, PyTorch's, cudarc's                cudarc's order
//! ```
//! The look-up is this crate's own, so it is the same whether other crates make cudarc link libcuda or open it. A process has one
//! libcuda: it is taken from memory if it is there.

use crate::error::LoadError;
use libloading::Library;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// The variable that names the file to open, in place of all others.
const LIBRARY_VARIABLE: &str = "SYMMALLOC_CUDA_LIBRARY";

/// The names under which the driver is installed. cudarc, where it opens libcuda itself, tries them too, in this order.
const NAMES: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so", "libcuda.so.1"] };

/// A libcuda that was opened. Never closed.
pub(crate) struct Libcuda {
    library: &'static Library,
    path: PathBuf,
}

impl Libcuda {
    /// The libcuda of this process.
    pub(crate) fn find() -> Result<Libcuda, LoadError> {
        match std::env::var_os(LIBRARY_VARIABLE).filter(|path| !path.is_empty()) {
            Some(path) => Self::named(&path),
            None => Self::installed(),
        }
    }

    /// The file of this name. cudarc looks for its libcuda by itself, so one of the usual names must lead to one as well: to
    /// this file, once it is open, if it carries the driver's own name (`libcuda.so.1`) inside.
    fn named(path: &OsStr) -> Result<Libcuda, LoadError> {
        let opened = open(path).map_err(|reason| LoadError::LibraryMissing { tried: vec![attempt(path, &reason)] })?;
        Self::installed()?;
        Ok(Self::of(opened, path))
    }

    fn installed() -> Result<Libcuda, LoadError> {
        if let Some((library, name)) = NAMES.iter().rev().find_map(|name| Some((opened_already(name)?, *name))) {
            return Ok(Self::of(library, OsStr::new(name)));
        }
        let mut tried = vec![];
        for name in NAMES.iter().map(OsStr::new) {
            match open(name) {
                Ok(library) => return Ok(Self::of(library, name)),
                Err(reason) => tried.push(attempt(name, &reason)),
            }
        }
        Err(LoadError::LibraryMissing { tried })
    }

    fn of(library: Library, name: &OsStr) -> Libcuda {
        // Never closed: the driver does not support it, and the calls that were resolved outlive every owner.
        let library: &'static Library = Box::leak(Box::new(library));
        Libcuda { library, path: path_of(library).unwrap_or_else(|| PathBuf::from(name)) }
    }

    /// The file, where the system says so; its name otherwise.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// A call of the library.
    ///
    /// # Safety
    /// `F` is the type of a function pointer, and the call's.
    pub(crate) unsafe fn symbol<F: Copy>(&self, name: &'static str) -> Result<F, LoadError> {
        // SAFETY: the caller's contract.
        let symbol = unsafe { self.library.get::<F>(name) };
        let missing = |_| LoadError::SymbolMissing { path: self.path.display().to_string(), symbol: name };
        symbol.map(|symbol| *symbol).map_err(missing)
    }
}

fn attempt(name: &OsStr, reason: &libloading::Error) -> String {
    let reason = std::error::Error::source(reason).map_or_else(|| reason.to_string(), ToString::to_string);
    if reason.contains(&*name.to_string_lossy()) { reason } else { format!("{}: {reason}", name.display()) }
}

fn open(name: &OsStr) -> Result<Library, libloading::Error> {
    // SAFETY: runs the library's initialisers, which libcuda allows at any time.
    unsafe { Library::new(OsString::from(name)) }
}

/// A library that is in this process already.
#[cfg(unix)]
fn opened_already(name: &str) -> Option<Library> {
    use libloading::os::unix::Library;
    // SAFETY: opens nothing: it only counts one more user of a library that is there.
    let library = unsafe { Library::open(Some(name), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    library.ok().map(Into::into)
}

#[cfg(not(unix))]
fn opened_already(_name: &str) -> Option<Library> {
    None
}

/// The file that the library's code came from.
#[cfg(unix)]
fn path_of(library: &Library) -> Option<PathBuf> {
    use std::ffi::CStr;
    use std::os::unix::ffi::OsStrExt;
    // SAFETY: looked up only, never called through this type.
    let symbol = unsafe { library.get::<unsafe extern "C" fn()>("cuInit") }.ok()?;
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: `info` is valid for writing; any address may be asked about.
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

#[cfg(not(unix))]
fn path_of(_library: &Library) -> Option<PathBuf> {
    None
}
