//! The environment of test programs: a folder with the stub of libcuda, and this package's library preloaded.

use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// Returns the path of the library, which cargo puts next to the test's executable.
pub(crate) fn preload() -> String {
    let executable = std::env::current_exe().expect("the test's executable should be known");
    let library = executable.parent().expect("the path should be below a folder").join("libsymmalloc_preload.so");
    assert!(library.exists(), "{} was not built", library.display());
    library.to_str().expect("the path should be UTF-8").to_owned()
}

/// A folder with the stub in which programs run.
pub(crate) struct Stage(TempDir);

/// Output of a successful program.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) stdout: String,
}

impl Stage {
    pub(crate) fn new() -> Self {
        Stage(stub_process::stub_of_libcuda())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn libcuda(&self) -> PathBuf {
        self.path("libcuda.so")
    }

    /// Returns a command in this environment.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env("LD_LIBRARY_PATH", self.0.path()).env("LD_PRELOAD", preload());
        command
    }

    /// Runs a program, which must succeed.
    #[track_caller]
    pub(crate) fn run(&self, program: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Said {
        let output = self.command(program).args(arguments).envs(variables.iter().copied()).output();
        let output = output.expect("the program should start");
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        let name = program.display();
        assert!(output.status.success(), "{name} {arguments:?}: {}\n{stdout}{stderr}", output.status);
        Said { stdout }
    }
}

/// Compiles a program of `tests/programs`, linked with libcuda if requested. Returns `None` if there is no compiler.
pub(crate) fn compile(stage: &Stage, name: &str, flags: &[&str], is_linked: bool) -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(format!("{name}.c"));
    let program = stage.path(name);
    let mut compiler = Command::new(std::env::var("CC").unwrap_or_else(|_| "cc".to_owned()));
    compiler
        .args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror"])
        .args(flags)
        .args(stub_process::sanitizer())
        .arg(&source)
        .arg("-o")
        .arg(&program);
    if is_linked {
        compiler.arg("-L").arg(stage.0.path()).args(["-Wl,--no-as-needed", "-lcuda"]);
    }
    compiler.args(["-ldl", "-lpthread"]);
    match compiler.output() {
        Ok(compiled) => {
            assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
            Some(program)
        }
        Err(error) => {
            println!("skipped: no C compiler ({error}); set CC");
            None
        }
    }
}
