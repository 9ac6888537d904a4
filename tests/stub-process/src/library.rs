//! What the process finds as a library.

use std::path::Path;

/// What the process finds under a library's name.
#[derive(Clone, Copy, Debug)]
pub enum Library {
    /// The stub.
    Stub,
    /// The stub without one of its calls.
    StubWithout(&'static str),
    /// The stub without some of its calls.
    StubWithoutAll(&'static [&'static str]),
    /// The stub under another name.
    Named(&'static str),
    /// Nothing.
    Missing,
}

impl Library {
    /// Puts it into a folder. Cargo puts the shared library of a dependency beside the test's executable.
    pub(crate) fn place(self, stub: &str, name: &str, folder: &Path) {
        let without: &[&str] = match &self {
            Library::StubWithout(symbol) => std::slice::from_ref(symbol),
            Library::StubWithoutAll(symbols) => symbols,
            Library::Stub | Library::Named(_) => &[],
            Library::Missing => return,
        };
        let exe = std::env::current_exe().expect("the test's executable");
        let stub = exe.parent().expect("a folder").join(stub);
        let mut bytes = std::fs::read(&stub).unwrap_or_else(|error| panic!("{}: {error}", stub.display()));
        for symbol in without {
            hide(&mut bytes, symbol);
        }
        let name = if let Library::Named(name) = self { name } else { name };
        std::fs::write(folder.join(name), bytes).expect("a file in the temporary folder");
    }
}

/// Returns the first of these libraries that the machine itself has, outside the test's folder.
///
/// # Safety
/// The initializers of the libraries have no preconditions.
pub(crate) unsafe fn installed(names: &[&'static str]) -> Option<&'static str> {
    let is_installed = |name: &&&str| {
        let name = std::ffi::CString::new(**name).expect("no zero byte");
        // SAFETY: a C string, and the caller's contract.
        !unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) }.is_null()
    };
    names.iter().find(is_installed).copied()
}

/// Changes a name in the table of symbols: what the loader compares with.
fn hide(bytes: &mut [u8], symbol: &str) {
    let name = [b"\0", symbol.as_bytes(), b"\0"].concat();
    let places: Vec<usize> = (0..bytes.len() - name.len()).filter(|at| bytes[*at..].starts_with(&name)).collect();
    assert!(!places.is_empty(), "{symbol} is not in the stub");
    places.into_iter().for_each(|at| bytes[at + 1] = b'x');
}

/// A symbol of a library that this process finds.
///
/// # Safety
/// `F` is the symbol's type.
pub(crate) unsafe fn symbol<F: Copy>(names: &[&str], symbol: &str) -> F {
    let name_of = |name: &str| std::ffi::CString::new(name).expect("no zero byte");
    let open = |name: &&str| {
        // SAFETY: a C string; the stubs have no initialisers.
        let library = unsafe { libc::dlopen(name_of(name).as_ptr(), libc::RTLD_NOW) };
        (!library.is_null()).then_some(library)
    };
    let library = names.iter().find_map(open).unwrap_or_else(|| panic!("{names:?} are not on the library path"));
    // SAFETY: a library that stays open, and a C string.
    let found = unsafe { libc::dlsym(library, name_of(symbol).as_ptr()) };
    assert!(!found.is_null() && size_of::<F>() == size_of_val(&found), "{symbol} is not in the stub");
    // SAFETY: the caller's contract, and the sizes are equal.
    unsafe { std::mem::transmute_copy(&found) }
}
