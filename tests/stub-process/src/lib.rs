//! Runs tests in processes that have the stubs on their library path.
//!
//! The library path is read when a process starts, and a stub has one state per process. Each test therefore starts its executable again,
//! restricted to that test, with the stubs in a fresh directory:
//!
//! ```text
//!  cargo test ── test `a` ── process: test `a` alone, libcuda.so and libnccl.so.2 are the stubs ── body
//!                                      ╰── ranks(4, ..) ── 4 processes: test `a` alone, rank 0 to 3 ── body of a rank
//! ```
//!
//! A body controls and queries the stubs through [`cuda`] and [`nccl`].

mod captures;
mod child;
pub mod cuda;
mod library;
mod machines;
pub mod nccl;
mod ranks;
mod refusal;
mod steady;
mod sweep;
mod threads;

pub use captures::{Captured, while_captured};
pub use child::in_child;
pub use library::Library;
pub use machines::{ADDRESSES, Machines, Quality};
pub use ranks::{RankOutput, RankProcess, ranks, ranks_of_machines, this_rank};
pub use refusal::refuse_threads;
pub use steady::{descriptors, difference, keeps_no_host_memory, steady};
pub use sweep::{Repeatable, sweep};
pub use threads::{Barrier, ExitOnPanic, WAIT_MAX, scaled_to_load, threads, until, until_some};

use child::Running;
use std::process::Command;

/// Returns `true` if tests may take long: with `SYMMALLOC_NIGHT=1` they repeat their work more often.
pub fn is_night() -> bool {
    std::env::var_os("SYMMALLOC_NIGHT").is_some()
}

/// Environment variable with the name of the test that this process runs.
const MARK: &str = "SYMMALLOC_STUB_TEST";

/// Defines a test on the stub of libcuda: `stub_test!(name, ["STUB_OPTION" = "value"], { body })`.
#[macro_export]
macro_rules! stub_test {
    ($name:ident, $body:block) => {
        $crate::stub_test!($name, $crate::Library::Stub, [], $body);
    };
    ($name:ident, [$($key:literal = $value:expr),*], $body:block) => {
        $crate::stub_test!($name, $crate::Library::Stub, [$($key = $value),*], $body);
    };
    ($name:ident, $library:expr, [$($key:literal = $value:expr),*], $body:block) => {
        #[test]
        fn $name() {
            let test = $crate::test_name(module_path!(), stringify!($name));
            $crate::run(&test, $library, None, &[$(($key, $value)),*], || $body);
        }
    };
}

/// Defines a test on both stubs: `nccl_test!(name, ["STUB_OPTION" = "value"], { body })`. There are eight devices unless `STUB_DEVICES`
/// overrides it. Polling an event eventually finds it complete, even without a wait.
#[macro_export]
macro_rules! nccl_test {
    ($name:ident, $body:block) => {
        $crate::nccl_test!($name, $crate::Library::Stub, [], $body);
    };
    ($name:ident, [$($key:literal = $value:expr),*], $body:block) => {
        $crate::nccl_test!($name, $crate::Library::Stub, [$($key = $value),*], $body);
    };
    ($name:ident, $library:expr, [$($key:literal = $value:expr),*], $body:block) => {
        #[test]
        fn $name() {
            let test = $crate::test_name(module_path!(), stringify!($name));
            let options = [("STUB_DEVICES", "8"), ("STUB_POLLS", "1") $(, ($key, $value))*];
            $crate::run(&test, $crate::Library::Stub, Some($library), &options, || $body);
        }
    };
}

/// Returns the name of a test in the test harness.
pub fn test_name(module: &str, test: &str) -> String {
    match module.split_once("::") {
        Some((_, inner)) => format!("{inner}::{test}"),
        None => test.to_owned(),
    }
}

/// Runs `body` in a separate process that loads these libraries. Later options override earlier ones.
///
/// # Panics
/// Panics if the process fails, or takes longer than ten minutes (`SYMMALLOC_STUB_LIMIT_SECONDS` overrides the limit).
pub fn run(test: &str, cuda: Library, nccl: Option<Library>, options: &[(&str, &str)], body: impl FnOnce()) {
    if std::env::var_os(MARK).is_some_and(|mark| mark == test) {
        let unwanted: &[&str] = match nccl {
            Some(Library::Missing) => &["libnccl.so.2", "libnccl.so"],
            Some(Library::Named("libnccl.so")) => &["libnccl.so.2"],
            _ => &[],
        };
        // SAFETY: a libnccl may be opened at any time.
        if let Some(name) = unsafe { library::installed(unwanted) } {
            println!("skipped: this machine has {name}, which the test must not find");
            return;
        }
        if matches!(nccl, Some(Library::Stub | Library::StubWithout(_) | Library::StubWithoutAll(_))) {
            nccl::watch_frees();
        }
        return body();
    }
    let folder = tempfile::tempdir().expect("a folder should be created");
    cuda.place("libstub_libcuda.so", "libcuda.so", folder.path());
    if let Some(nccl) = nccl {
        nccl.place("libstub_libnccl.so", "libnccl.so.2", folder.path());
    }
    let mut command = alone(test);
    command.env(MARK, test).env("LD_LIBRARY_PATH", folder.path()).env("SYMMALLOC_FLIGHT_RECORDS", folder.path());
    let limit = child::limit();
    let child::Ended { status, stdout, stderr, is_late } =
        Running::start(command.envs(options.iter().copied())).wait(limit);
    assert!(!is_late, "{test} did not end within {limit:?}\n{stdout}\n{stderr}");
    assert!(stdout.contains("1 passed") || !status.success(), "{test} did not run\n{stdout}\n{stderr}");
    assert!(status.success(), "{test} failed on the stub ({status})\n{stdout}\n{stderr}");
    print!("{stdout}");
}

/// Returns the options of a C or C++ compiler for the sanitizer that `SYMMALLOC_SANITIZER` names: `address` or `thread`.
pub fn sanitizer() -> Vec<String> {
    let name = std::env::var("SYMMALLOC_SANITIZER").ok();
    name.into_iter().flat_map(|name| [format!("-fsanitize={name}"), "-fno-omit-frame-pointer".to_owned()]).collect()
}

/// Returns a directory with the stub of libcuda, for the library path of a process.
///
/// # Panics
/// Panics if the directory cannot be created.
pub fn stub_of_libcuda() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder should be created");
    Library::Stub.place("libstub_libcuda.so", "libcuda.so", folder.path());
    folder
}

/// Returns a command that runs one test of this executable.
fn alone(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("the test's executable should be known"));
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]);
    command
}
