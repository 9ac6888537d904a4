//! The compiled PyTorch class under a real libc10, without a device: `cxx/class.cc` makes the calls of C++ extensions, on the stub of
//! libcuda and a runtime over it (`cxx/cudart.c`).
//!
//! `SYMMALLOC_TORCH_LIB` names the folder of PyTorch's libraries (`.../site-packages/torch/lib`), `SYMMALLOC_CUDA_INCLUDE` a folder
//! with `cuda_runtime_api.h`. Without them or a C++ compiler, these tests print a note and pass.

use std::path::{Path, PathBuf};
use std::process::Command;
use stub_process::stub_of_libcuda;
use tempfile::TempDir;

/// The compiled files: the class, the program, and the stand-ins for CUDA's libraries.
struct Built {
    folder: TempDir,
    stub: TempDir,
}

fn package() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the folders of PyTorch's libraries and CUDA's headers, or the reason why one is missing.
fn surroundings() -> Result<(PathBuf, PathBuf), &'static str> {
    let folder = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let torch = folder("SYMMALLOC_TORCH_LIB").ok_or("SYMMALLOC_TORCH_LIB is not a folder with PyTorch's libraries")?;
    let cuda = folder("SYMMALLOC_CUDA_INCLUDE").ok_or("SYMMALLOC_CUDA_INCLUDE is not a folder with CUDA's headers")?;
    Ok((torch, cuda))
}

fn compile(compiler: &str, arguments: &[String]) {
    let output = Command::new(compiler).args(arguments).output().expect("a compiler");
    assert!(output.status.success(), "{arguments:?}\n{}", String::from_utf8_lossy(&output.stderr));
}

fn build(torch: &Path, cuda: &Path) -> Built {
    let built = Built { folder: tempfile::tempdir().expect("a temporary folder"), stub: stub_of_libcuda() };
    let text = |path: PathBuf| path.to_str().expect("text").to_owned();
    let out = |name: &str| text(built.folder.path().join(name));
    let sources = package().join("python/symmalloc/pytorch");
    let mut headers = vec![format!("-I{}", text(package().join("include"))), format!("-I{}", text(sources.clone()))];
    if !cuda.join("crt/host_defines.h").exists() {
        headers.extend(["-isystem".to_owned(), text(sources.join("cuda"))]);
    }
    headers.extend(["-isystem".to_owned(), text(torch.join("../include")), "-isystem".to_owned(), text(cuda.into())]);
    let version = std::fs::read_to_string(cuda.join("cuda_runtime_api.h")).expect("CUDA's headers");
    let version = version.lines().find_map(|line| line.strip_prefix("#define CUDART_VERSION")).expect("a version");
    let major = version.trim().parse::<u32>().expect("a number") / 1000;
    let runtime = format!("libcudart.so.{major}");
    std::fs::write(built.folder.path().join("map"), format!("{runtime} {{ global: *; }};")).expect("a place");
    let cxx = |name: &str| text(package().join("tests/cxx").join(name));
    let mut arguments = vec!["-shared".to_owned(), "-fPIC".to_owned(), "-w".to_owned()];
    arguments.extend(headers.iter().cloned());
    arguments.extend([cxx("cudart.c"), cxx("cudart_refused.c"), "-o".to_owned(), out(&runtime)]);
    arguments.extend([format!("-Wl,-soname,{runtime}"), format!("-Wl,--version-script={}", out("map"))]);
    arguments.extend([format!("-L{}", text(built.stub.path().into())), "-lcuda".to_owned()]);
    compile("cc", &arguments);
    let libraries = [
        format!("-L{}", text(torch.into())),
        "-lc10_cuda".to_owned(),
        "-lc10".to_owned(),
        out(&runtime),
        "-ldl".to_owned(),
        "-lpthread".to_owned(),
        format!("-Wl,-rpath,{}", text(torch.into())),
        "-Wl,--allow-shlib-undefined".to_owned(),
    ];
    let flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror"].map(str::to_owned);
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let with = |more: &[String]| [&flags[..], &headers, more, &libraries].concat();
    compile(
        &compiler,
        &with(&[
            text(sources.join("allocator.cpp")),
            "-shared".to_owned(),
            "-fPIC".to_owned(),
            "-fvisibility=hidden".to_owned(),
            "-o".to_owned(),
            out("class.so"),
        ]),
    );
    compile(&compiler, &with(&[cxx("class.cc"), "-o".to_owned(), out("class")]));
    built
}

/// Runs a case of the program.
fn run(built: &Built, case: &str) {
    let library = std::env::current_exe().expect("the test's executable");
    let library = library.parent().expect("a folder").join("libsymmalloc_torch.so");
    let paths = [built.stub.path(), built.folder.path()].map(|path| path.to_str().expect("text")).join(":");
    let output = Command::new(built.folder.path().join("class"))
        .arg(case)
        .arg(built.folder.path().join("class.so"))
        .arg(library)
        .env("LD_LIBRARY_PATH", paths)
        // The program counts reserved bytes in units of 2 MiB.
        .env("SYMMALLOC_CONF", if case == "fixed registrations" { "segments:fixed" } else { "stitching:false" })
        .env("STUB_DEVICES", if case == "devices" { "2" } else { "1" })
        .output()
        .expect("the program starts");
    let text = [String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr)].concat();
    assert!(output.status.success() && text.contains("passed"), "{case}: {}\n{text}", output.status);
}

#[test]
fn the_class_behaves_under_libc10_as_extensions_expect() {
    let (torch, cuda) = match surroundings() {
        Ok(folders) => folders,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let built = build(&torch, &cuda);
    for case in [
        "memory",
        "trackers",
        "registrations",
        "fixed registrations",
        "histories",
        "refusals",
        "uncached",
        "additions",
        "checkpoints",
        "threads",
        "devices",
        "destructors",
    ] {
        run(&built, case);
    }
}
