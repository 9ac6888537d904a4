//! The variants of a library that a test's process can load.

use std::path::Path;

/// The file that a process finds under a library's name.
#[derive(Clone, Copy, Debug)]
pub enum Library {
    /// The stub.
    Stub,
    /// The stub without one of its calls.
    StubWithout(&'static str),
    /// The stub without several of its calls.
    StubWithoutAll(&'static [&'static str]),
    /// The stub under another name.
    Named(&'static str),
    /// No file.
    Missing,
}

impl Library {
    /// Places the library in a directory: as a link, or as a changed copy. Cargo places the shared library of a dependency next to the
    /// test's executable.
    pub(crate) fn place(self, stub: &str, name: &str, folder: &Path) {
        let without: &[&str] = match &self {
            Library::StubWithout(symbol) => std::slice::from_ref(symbol),
            Library::StubWithoutAll(symbols) => symbols,
            Library::Stub | Library::Named(_) => &[],
            Library::Missing => return,
        };
        let exe = std::env::current_exe().expect("the test's executable should be known");
        let stub = exe.parent().expect("the path should be below a folder").join(stub);
        let name = if let Library::Named(name) = self { name } else { name };
        let placed = folder.join(name);
        if without.is_empty() {
            assert!(stub.exists(), "{} does not exist", stub.display());
            return std::os::unix::fs::symlink(stub, placed).expect("a link in the temporary folder");
        }
        let mut bytes = std::fs::read(&stub).unwrap_or_else(|error| panic!("{}: {error}", stub.display()));
        for symbol in without {
            hide(&mut bytes, symbol);
        }
        std::fs::write(placed, bytes).expect("a file in the temporary folder");
    }
}

/// Returns the first of these libraries that the machine itself has, outside the test's folder.
///
/// # Safety
/// The initializers of the libraries have no preconditions.
pub(crate) unsafe fn installed(names: &[&'static str]) -> Option<&'static str> {
    let is_installed = |name: &&&str| {
        let name = std::ffi::CString::new(**name).expect("the text should contain no zero byte");
        // SAFETY: a C string, and the caller's contract.
        !unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) }.is_null()
    };
    names.iter().find(is_installed).copied()
}

/// Hides a symbol from the loader by changing its name in the symbol table.
fn hide(bytes: &mut [u8], symbol: &str) {
    let name = [b"\0", symbol.as_bytes(), b"\0"].concat();
    let places: Vec<usize> = (0..bytes.len() - name.len()).filter(|at| bytes[*at..].starts_with(&name)).collect();
    assert!(!places.is_empty(), "{symbol} is not in the stub");
    places.into_iter().for_each(|at| bytes[at + 1] = b'x');
}

/// Returns a symbol of a library on this process's library path.
///
/// # Safety
/// `F` must be the type of the symbol.
pub(crate) unsafe fn symbol<F: Copy>(names: &[&str], symbol: &str) -> F {
    let name_of = |name: &str| std::ffi::CString::new(name).expect("the text should contain no zero byte");
    let open = |name: &&str| {
        // SAFETY: the pointer is a C string, and the stubs have no initializers.
        let library = unsafe { libc::dlopen(name_of(name).as_ptr(), libc::RTLD_NOW) };
        (!library.is_null()).then_some(library)
    };
    let library = names.iter().find_map(open).unwrap_or_else(|| panic!("{names:?} are not on the library path"));
    // SAFETY: the library stays open, and the pointer is a C string.
    let found = unsafe { libc::dlsym(library, name_of(symbol).as_ptr()) };
    assert!(!found.is_null() && size_of::<F>() == size_of_val(&found), "{symbol} is not in the stub");
    // SAFETY: the caller guarantees the type, and the sizes are equal.
    unsafe { std::mem::transmute_copy(&found) }
}
