//! The C++ side, with a real compiler: filters that throw, fork, exit, the memory resource. Without a compiler, these tests print a note
//! and pass.
//!
//! `SYMMALLOC_SANITIZER=address`, or `thread`, instruments the C++ code.

use std::path::{Path, PathBuf};
use std::process::Command;
use stub_process::{sanitizer, stub_test};

fn package() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the folder of the test's executable, which also contains the library.
fn library_folder() -> PathBuf {
    std::env::current_exe().expect("the test's executable").parent().expect("a folder").to_owned()
}

/// Runs the compiler. Returns `None` without a compiler.
fn compile(folder: &Path, arguments: &[&str], output: &str) -> Option<PathBuf> {
    let output = folder.join(output);
    let mut command = Command::new(std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned()));
    command.args(["-std=c++17", "-Wall", "-Werror", "-g"]).args(sanitizer()).args(arguments).arg("-o").arg(&output);
    let compiled = match command.output() {
        Ok(compiled) => compiled,
        Err(error) => {
            println!("skipped: no C++ compiler ({error}); set CXX");
            return None;
        }
    };
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    Some(output)
}

fn program(folder: &Path) -> Option<PathBuf> {
    let (source, include, library) =
        (package().join("tests/cxx/torch.cc"), package().join("include"), library_folder());
    let text = |path: &Path| path.to_str().expect("text").to_owned();
    let arguments = [
        text(&source),
        format!("-I{}", text(&include)),
        format!("-L{}", text(&library)),
        format!("-Wl,-rpath,{}", text(&library)),
        "-lsymmalloc_torch".to_owned(),
        "-ldl".to_owned(),
        "-lpthread".to_owned(),
    ];
    compile(folder, &arguments.each_ref().map(String::as_str), "torch")
}

/// Runs a case of the program. It inherits the library path with the stub from the test's process.
fn run(case: &str) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let Some(program) = program(folder.path()) else { return };
    let output = Command::new(program).arg(case).output().expect("the program starts");
    let text = [String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr)].concat();
    assert!(output.status.success() && text.contains("passed"), "{case}: {}\n{text}", output.status);
}

stub_test!(filters_are_called_may_throw_and_are_destroyed, {
    run("scopes");
});

stub_test!(a_forked_child_frees_nothing_and_allocates_nothing, {
    run("fork");
});

stub_test!(an_unread_error_message_does_not_end_the_process, {
    run("unread");
});

stub_test!(memory_can_be_freed_while_the_process_ends, {
    run("late");
});

/// Compiles a program against `symmalloc.hpp`, with these header folders and this C++ standard.
fn memory_resource(standard: &str, headers: &[&Path]) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (source, include, library) =
        (package().join("tests/cxx/resource.cc"), package().join("include"), library_folder());
    let mut arguments = vec![standard.to_owned(), "-Wextra".to_owned(), format!("-I{}", include.display())];
    arguments.extend(headers.iter().map(|folder| format!("-isystem{}", folder.display())));
    arguments.extend([source.display().to_string(), format!("-L{}", library.display())]);
    arguments.extend([format!("-Wl,-rpath,{}", library.display()), "-lsymmalloc_torch".to_owned(), "-ldl".to_owned()]);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let Some(program) = compile(folder.path(), &arguments, "resource") else { return };
    let output = Command::new(program).output().expect("the program starts");
    let [text, printed] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(output.status.success() && text.contains("a memory resource"), "{}\n{text}{printed}", output.status);
    assert_eq!(printed.matches("is not a live allocation of device 0").count(), 1, "{printed}");
    assert!(!printed.contains("fork"), "{printed}");
}

stub_test!(the_header_for_cxx_is_a_memory_resource, {
    let mock = package().join("tests/cxx/mock");
    memory_resource("-std=c++17", &[&mock]);
    memory_resource("-std=c++20", &[&mock]);
});

// `SYMMALLOC_CCCL_INCLUDE` names folders with the headers of CCCL and CUDA's runtime, from wheels or toolkits.
stub_test!(the_header_for_cxx_is_a_memory_resource_of_a_real_cccl_too, {
    let Some(folders) = std::env::var_os("SYMMALLOC_CCCL_INCLUDE") else {
        println!("skipped: SYMMALLOC_CCCL_INCLUDE does not name folders with CCCL's headers");
        return;
    };
    let folders: Vec<PathBuf> = std::env::split_paths(&folders).collect();
    let folders: Vec<&Path> = folders.iter().map(PathBuf::as_path).collect();
    memory_resource("-std=c++17", &folders);
    memory_resource("-std=c++20", &folders);
});
