//! libcuda: where it is, and what it has.
//!
//! ```text
//!  $SYMMALLOC_CUDA_LIBRARY ── a libcuda that this process has opened already ── libcuda.so ── libcuda.so.1
//!         set: this one or none        linked, PyTorch's, cudarc's                cudarc's order
//! ```
//! The look-up is this crate's own, so it is the same whether other crates make cudarc link libcuda or open it. A process has one
//! libcuda: it is taken from memory if it is there.

use crate::error::LoadError;
use crate::loading;
use libloading::Library;
use std::ffi::OsStr;
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
        // SAFETY: libcuda's initialisers may run at any time.
        let opened = unsafe { loading::named(path) }.map_err(|tried| LoadError::LibraryMissing { tried })?;
        Self::installed()?;
        Ok(Self::of(opened, path))
    }

    fn installed() -> Result<Libcuda, LoadError> {
        // SAFETY: libcuda's initialisers may run at any time.
        let found = unsafe { loading::first_of(NAMES.iter().rev(), NAMES) };
        found.map(|(library, name)| Self::of(library, name)).map_err(|tried| LoadError::LibraryMissing { tried })
    }

    fn of(library: Library, name: &OsStr) -> Libcuda {
        // Never closed: the driver does not support it, and the calls that were resolved outlive every owner.
        let library: &'static Library = Box::leak(Box::new(library));
        Libcuda { library, path: loading::path_of(library, "cuInit").unwrap_or_else(|| PathBuf::from(name)) }
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
