//! libnccl: where it is, which version it is, and what it can do.
//!
//! ```text
//!  $SYMMALLOC_NCCL_LIBRARY ── a libnccl that this process has opened already ── libnccl.so.2 ── libnccl.so
//!          set: this one or none         PyTorch's, cudarc's: shared, so that one NCCL has all communicators
//! ```

use crate::calls::Calls;
use crate::nccl_error::LoadError;
use crate::version::{Capability, NcclVersion};
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The variable that names the library to open, in place of all others.
const LIBRARY_VARIABLE: &str = "SYMMALLOC_NCCL_LIBRARY";

/// The names under which NCCL is installed.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// A libnccl that was opened, with its calls.
pub struct Nccl {
    calls: Calls,
    version: NcclVersion,
    path: PathBuf,
}

impl Nccl {
    /// The libnccl of this process: opened at the first call, and never closed.
    ///
    /// In this order: the library that `SYMMALLOC_NCCL_LIBRARY` names, and no other if it is set; a libnccl that the process
    /// has opened already, so that PyTorch's or cudarc's communicators come from the same one; `libnccl.so.2`;
    /// `libnccl.so`.
    ///
    /// # Errors
    /// When no library can be opened or the one found is too old. The answer does not change within a process.
    pub fn load() -> Result<&'static Nccl, LoadError> {
        static NCCL: OnceLock<Result<&'static Nccl, LoadError>> = OnceLock::new();
        NCCL.get_or_init(Nccl::find).clone()
    }

    /// A library of your choosing, besides that of [`load`](Self::load). Never closed.
    ///
    /// # Errors
    /// When it cannot be opened or is too old.
    pub fn open(path: impl AsRef<Path>) -> Result<&'static Nccl, LoadError> {
        let path = path.as_ref().as_os_str();
        let library = open(path).map_err(|reason| LoadError::LibraryMissing { tried: vec![attempt(path, &reason)] })?;
        Nccl::resolve(library, path)
    }

    fn find() -> Result<&'static Nccl, LoadError> {
        if let Some(path) = std::env::var_os(LIBRARY_VARIABLE).filter(|path| !path.is_empty()) {
            return Nccl::open(path);
        }
        if let Some((library, name)) = NAMES.iter().find_map(|name| Some((opened_already(name)?, *name))) {
            return Nccl::resolve(library, OsStr::new(name));
        }
        let mut tried = vec![];
        for name in NAMES {
            match open(OsStr::new(name)) {
                Ok(library) => return Nccl::resolve(library, OsStr::new(name)),
                Err(reason) => tried.push(attempt(OsStr::new(name), &reason)),
            }
        }
        Err(LoadError::LibraryMissing { tried })
    }

    fn resolve(library: libloading::Library, name: &OsStr) -> Result<&'static Nccl, LoadError> {
        // Never closed: its threads and the table below outlive every owner.
        let library: &'static libloading::Library = Box::leak(Box::new(library));
        let path = path_of(library).unwrap_or_else(|| PathBuf::from(name));
        let shown = path.display().to_string();
        let version = Calls::version(library, &shown)?;
        if version < NcclVersion::OLDEST {
            return Err(LoadError::TooOld { path: shown, version });
        }
        let calls = Calls::resolve(library, &shown)?;
        tracing::debug!(name: "nccl.loaded", target: "symmalloc", %version, path = %shown);
        Ok(Box::leak(Box::new(Nccl { calls, version, path })))
    }

    /// Its version.
    pub fn version(&self) -> NcclVersion {
        self.version
    }

    /// The file it came from, where the system says so; its name otherwise.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it can do this.
    pub fn supports(&self, capability: Capability) -> bool {
        self.calls.has(capability) && self.version >= capability.since()
    }

    pub(crate) fn calls(&self) -> &Calls {
        &self.calls
    }
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nccl").field("version", &self.version).field("path", &self.path).finish_non_exhaustive()
    }
}

fn attempt(name: &OsStr, reason: &libloading::Error) -> String {
    let reason = std::error::Error::source(reason).map_or_else(|| reason.to_string(), ToString::to_string);
    if reason.contains(&*name.to_string_lossy()) { reason } else { format!("{}: {reason}", name.display()) }
}

fn open(name: &OsStr) -> Result<libloading::Library, libloading::Error> {
    // SAFETY: runs the library's initialisers, which NCCL allows at any time.
    unsafe { libloading::Library::new(OsString::from(name)) }
}

/// A handle of a library that is in this process already.
#[cfg(unix)]
fn opened_already(name: &str) -> Option<libloading::Library> {
    use libloading::os::unix::Library;
    // SAFETY: opens nothing: it only counts one more user of a library that is there.
    let library = unsafe { Library::open(Some(name), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    library.ok().map(Into::into)
}

#[cfg(not(unix))]
fn opened_already(_name: &str) -> Option<libloading::Library> {
    None
}

/// The file that the library's code came from.
#[cfg(unix)]
fn path_of(library: &libloading::Library) -> Option<PathBuf> {
    use std::ffi::CStr;
    use std::os::unix::ffi::OsStrExt;
    // SAFETY: looked up only, never called through this type.
    let symbol = unsafe { library.get::<unsafe extern "C" fn()>("ncclGetVersion") }.ok()?;
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
fn path_of(_library: &libloading::Library) -> Option<PathBuf> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_named_with_the_systems_reason() {
        let Err(LoadError::LibraryMissing { tried }) = Nccl::open("/nowhere/libnccl.so.2") else {
            panic!("opened a library that is not there");
        };
        assert_eq!(tried.len(), 1);
        assert!(tried[0].contains("/nowhere/libnccl.so.2"), "{tried:?}");
    }
}
