//! Compiles `examples/loop.c` and runs it on a stub of libcuda. Without a compiler, the test prints a note and passes.

use std::path::Path;
use std::process::Command;
use stub_process::{sanitizer, stub_test};

stub_test!(the_example_in_c_runs, {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let executable = std::env::current_exe().expect("the test's executable");
    let library = executable.parent().expect("a folder");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let program = folder.path().join("loop");
    let mut compiler = Command::new(std::env::var("CC").unwrap_or_else(|_| "cc".to_owned()));
    compiler.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic"]);
    compiler.args(sanitizer());
    compiler.arg("-I").arg(package.join("include")).arg(package.join("examples/loop.c"));
    compiler.arg("-L").arg(library).arg(format!("-Wl,-rpath,{}", library.display())).arg("-lsymmalloc_torch");
    let compiled = match compiler.arg("-o").arg(&program).output() {
        Ok(compiled) => compiled,
        Err(error) => {
            println!("skipped: no C compiler ({error}); set CC");
            return;
        }
    };
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let output = Command::new(&program).output().expect("the program starts");
    let text = [String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr)].concat();
    assert!(output.status.success(), "{}\n{text}", output.status);
    assert!(text.contains("100 steps with equal placements"), "{text}");
    assert!(text.contains("expected error: out of memory: 1.00 GiB on s0 in p0"), "{text}");
});
