//! Locates libcuda and resolves its symbols.
//!
//! ```text
//!  $SYMMALLOC_CUDA_LIBRARY ── a libcuda that this process has opened already ── libcuda.so ── libcuda.so.1
//!         set: this one or none        linked, PyTorch's, cudarc's                cudarc's order
//! ```
//! The lookup does not depend on cudarc, so it gives the same result whether other crates make cudarc link libcuda or open it at run time.
//! A process has only one libcuda, so a library that is already loaded takes precedence.

use crate::error::LoadError;
use crate::loading;
use libloading::Library;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// Environment variable that names the file to open instead of the usual names.
const LIBRARY_VARIABLE: &str = "SYMMALLOC_CUDA_LIBRARY";

/// Names under which the driver is installed. When cudarc opens libcuda itself, it tries the same names in this order.
const NAMES: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so", "libcuda.so.1"] };

/// An opened libcuda. It is never closed.
pub(crate) struct Libcuda {
    library: &'static Library,
    path: PathBuf,
}

impl Libcuda {
    /// Returns the libcuda of this process.
    pub(crate) fn find() -> Result<Libcuda, LoadError> {
        match std::env::var_os(LIBRARY_VARIABLE).filter(|path| !path.is_empty()) {
            Some(path) => Self::named(&path),
            None => Self::installed(),
        }
    }

    /// Opens the file of this name. cudarc searches for libcuda separately, so one of the usual names must also resolve: either to an
    /// installed library, or to this file after it is open, if its soname is the driver's (`libcuda.so.1`).
    fn named(path: &OsStr) -> Result<Libcuda, LoadError> {
        // SAFETY: libcuda's initializers may run at any time.
        let opened = unsafe { loading::named(path) }.map_err(|tried| LoadError::LibraryMissing { tried })?;
        Self::installed()?;
        Ok(Self::of(opened, path))
    }

    fn installed() -> Result<Libcuda, LoadError> {
        // SAFETY: libcuda's initializers may run at any time.
        let found = unsafe { loading::first_of(NAMES.iter().rev(), NAMES) };
        found.map(|(library, name)| Self::of(library, name)).map_err(|tried| LoadError::LibraryMissing { tried })
    }

    fn of(library: Library, name: &OsStr) -> Libcuda {
        // Never closed: the driver does not support it, and the resolved calls outlive every owner.
        let library: &'static Library = Box::leak(Box::new(library));
        Libcuda { library, path: loading::path_of(library, "cuInit").unwrap_or_else(|| PathBuf::from(name)) }
    }

    /// Returns the path of the library's file if the system reports it, and the name of the file otherwise.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Resolves a symbol of the library.
    ///
    /// # Safety
    /// `F` is a function pointer type with the symbol's signature.
    pub(crate) unsafe fn symbol<F: Copy>(&self, name: &'static str) -> Result<F, LoadError> {
        // SAFETY: the caller's contract.
        let symbol = unsafe { self.library.get::<F>(name) };
        let missing = |_| LoadError::SymbolMissing { path: self.path.display().to_string(), symbol: name };
        symbol.map(|symbol| *symbol).map_err(missing)
    }
}
