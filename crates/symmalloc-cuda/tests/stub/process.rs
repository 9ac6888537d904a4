//! Runs a test in a process that has the stub on its library path.
//!
//! A library path counts when a process starts, and the stub keeps one state per process. So a test starts its own
//! executable again, for itself alone, with the stub under the name `libcuda.so` in a fresh folder.

use cudarc::driver::sys;
use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use symmalloc_cuda::CudaDevice;

const MARK: &str = "SYMMALLOC_STUB_TEST";

/// What the process finds as libcuda.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Library {
    /// The stub.
    Stub,
    /// The stub without one of its calls.
    StubWithout(&'static str),
    /// The stub under another name.
    Named(&'static str),
}

/// A test on the stub: `stub_test!(name, ["STUB_OPTION" = "value"], { body })`.
macro_rules! stub_test {
    ($name:ident, $body:block) => {
        stub_test!($name, crate::process::Library::Stub, [], $body);
    };
    ($name:ident, [$($key:literal = $value:literal),*], $body:block) => {
        stub_test!($name, crate::process::Library::Stub, [$($key = $value),*], $body);
    };
    ($name:ident, $library:expr, [$($key:literal = $value:literal),*], $body:block) => {
        #[test]
        fn $name() {
            let module = module_path!().split_once("::").expect("in a module").1;
            let test = format!("{module}::{}", stringify!($name));
            crate::process::run(&test, $library, &[$(($key, $value)),*], || $body);
        }
    };
}
pub(crate) use stub_test;

pub(crate) fn run(test: &str, library: Library, options: &[(&str, &str)], body: impl FnOnce()) {
    if std::env::var_os(MARK).is_some_and(|mark| mark == test) {
        return body();
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    place(library, folder.path());
    let exe = std::env::current_exe().expect("the test's executable");
    let output = Command::new(exe)
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(MARK, test)
        .env("LD_LIBRARY_PATH", folder.path())
        .envs(options.iter().copied())
        .output()
        .expect("the test can be started again");
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(stdout.contains("1 passed") || !output.status.success(), "{test} did not run\n{stdout}\n{stderr}");
    assert!(output.status.success(), "{test} failed on the stub ({})\n{stdout}\n{stderr}", output.status);
    print!("{stdout}");
}

fn place(library: Library, folder: &Path) {
    let stub = stub_path();
    let name = if let Library::Named(name) = library { name } else { "libcuda.so" };
    let mut bytes = std::fs::read(&stub).unwrap_or_else(|error| panic!("{}: {error}", stub.display()));
    if let Library::StubWithout(symbol) = library {
        // The name in the table of symbols: what the loader compares with.
        let name = [b"\0", symbol.as_bytes(), b"\0"].concat();
        let places: Vec<usize> = (0..bytes.len() - name.len()).filter(|at| bytes[*at..].starts_with(&name)).collect();
        assert!(!places.is_empty(), "{symbol} is not in the stub");
        places.into_iter().for_each(|at| bytes[at + 1] = b'x');
    }
    std::fs::write(folder.join(name), bytes).expect("a file in the temporary folder");
}

/// Cargo puts the shared library of a dependency beside the test's executable.
fn stub_path() -> PathBuf {
    let exe = std::env::current_exe().expect("the test's executable");
    exe.parent().expect("a folder").join("libstub_libcuda.so")
}

/// The stub's device.
pub(crate) fn device() -> Arc<CudaDevice> {
    CudaDevice::new(0).expect("the stub has a device")
}

fn control<F: Copy>(name: &str) -> F {
    // SAFETY: the stub is loaded, and the callers below name the symbols' types.
    let symbol = unsafe { sys::culib().get::<F>(name.as_bytes()) };
    *symbol.expect("the library is the stub")
}

/// The n-th call from now on fails once; with 0, every call does.
pub(crate) fn fail(call: &str, nth: u64, code: i32) {
    let call = CString::new(call).expect("no zero byte");
    // SAFETY: the symbol's type, and a C string.
    unsafe { control::<unsafe extern "C" fn(*const c_char, u64, c_int)>("stub_fail")(call.as_ptr(), nth, code) };
}

/// No call fails any more.
pub(crate) fn heal() {
    // SAFETY: the symbol's type.
    unsafe { control::<unsafe extern "C" fn()>("stub_heal")() };
}

/// How often a call was made.
pub(crate) fn calls(call: &str) -> u64 {
    let call = CString::new(call).expect("no zero byte");
    // SAFETY: the symbol's type, and a C string.
    unsafe { control::<unsafe extern "C" fn(*const c_char) -> u64>("stub_calls")(call.as_ptr()) }
}

/// How often any call was made.
pub(crate) fn all_calls() -> u64 {
    // SAFETY: the symbol's type; null asks for all.
    unsafe { control::<unsafe extern "C" fn(*const c_char) -> u64>("stub_calls")(std::ptr::null()) }
}

/// What the driver still has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Live {
    pub(crate) device_bytes: u64,
    pub(crate) ranges: u64,
    pub(crate) events: u64,
    pub(crate) streams: u64,
    pub(crate) host_bytes: u64,
    pub(crate) graphs: u64,
    pub(crate) mappings: u64,
}

pub(crate) fn live() -> Live {
    let of = |what: c_int| {
        // SAFETY: the symbol's type.
        unsafe { control::<unsafe extern "C" fn(c_int) -> u64>("stub_live")(what) }
    };
    Live {
        device_bytes: of(0),
        ranges: of(1),
        events: of(2),
        streams: of(3),
        host_bytes: of(4),
        graphs: of(5),
        mappings: of(6),
    }
}
