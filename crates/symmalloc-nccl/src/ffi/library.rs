//! The libnccl of a process: its search order, version and capabilities.
//!
//! ```text
//!  $SYMMALLOC_NCCL_LIBRARY ── a libnccl that this process has already opened ── libnccl.so.2 ── libnccl.so
//!          if set: only this one         PyTorch's, cudarc's: shared, so that one NCCL has all communicators
//! ```

use crate::ffi::calls::Calls;
use crate::ffi::error::LoadError;
use crate::ffi::version::{Capability, NcclVersion};
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use symmalloc_cuda::loading;

/// The environment variable that specifies the library and disables the search.
const LIBRARY_VARIABLE: &str = "SYMMALLOC_NCCL_LIBRARY";

/// The file names of NCCL's library.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// An opened libnccl with its calls.
pub struct Nccl {
    calls: Calls,
    version: NcclVersion,
    path: PathBuf,
}

impl Nccl {
    /// Returns the libnccl of this process, which is opened by the first call and never closed.
    ///
    /// Libraries are tried in this order: the library that `SYMMALLOC_NCCL_LIBRARY` specifies, and no other if the variable is set; a
    /// libnccl that the process has already opened, so that PyTorch's or cudarc's communicators share it; `libnccl.so.2`; `libnccl.so`.
    ///
    /// # Errors
    /// Returns an error if no library can be opened, or if the first one found is too old. The result does not change within a process.
    pub fn load() -> Result<&'static Nccl, LoadError> {
        static NCCL: OnceLock<Result<&'static Nccl, LoadError>> = OnceLock::new();
        NCCL.get_or_init(Nccl::find).clone()
    }

    /// Opens a specific library, in addition to the one that [`load`](Self::load) opens. The library is never closed.
    ///
    /// # Errors
    /// Returns an error if the library cannot be opened or is too old.
    pub fn open(path: impl AsRef<Path>) -> Result<&'static Nccl, LoadError> {
        let path = path.as_ref().as_os_str();
        // SAFETY: NCCL's initializers may run at any time.
        let library = unsafe { loading::named(path) }.map_err(|tried| LoadError::LibraryMissing { tried })?;
        Nccl::resolve(library, path)
    }

    fn find() -> Result<&'static Nccl, LoadError> {
        if let Some(path) = std::env::var_os(LIBRARY_VARIABLE).filter(|path| !path.is_empty()) {
            return Nccl::open(path);
        }
        // SAFETY: NCCL's initializers may run at any time.
        let found = unsafe { loading::first_of(&NAMES, &NAMES) };
        let (library, name) = found.map_err(|tried| LoadError::LibraryMissing { tried })?;
        Nccl::resolve(library, name)
    }

    fn resolve(library: libloading::Library, name: &OsStr) -> Result<&'static Nccl, LoadError> {
        // The library is never closed: its threads and the table below outlive every owner.
        let library: &'static libloading::Library = Box::leak(Box::new(library));
        let path = loading::path_of(library, "ncclGetVersion").unwrap_or_else(|| PathBuf::from(name));
        let shown = path.display().to_string();
        let version = Calls::version(library, &shown)?;
        if version < NcclVersion::OLDEST {
            return Err(LoadError::TooOld { path: shown, version });
        }
        let calls = Calls::resolve(library, &shown)?;
        tracing::debug!(name: "nccl.loaded", target: "symmalloc", %version, path = %shown);
        Ok(Box::leak(Box::new(Nccl { calls, version, path })))
    }

    /// Returns the library's version.
    pub fn version(&self) -> NcclVersion {
        self.version
    }

    /// Returns the path of the library's file, or its name if the system does not report the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns `true` if the library has the capability.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_with_the_systems_reason() {
        let Err(LoadError::LibraryMissing { tried }) = Nccl::open("/nowhere/libnccl.so.2") else {
            panic!("opened a missing library");
        };
        assert_eq!(tried.len(), 1);
        assert!(tried[0].contains("/nowhere/libnccl.so.2"), "{tried:?}");
    }
}
