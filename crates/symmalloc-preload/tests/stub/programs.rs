//! C programs that look up calls in every possible way. Without a compiler, the tests print a message and pass.

use crate::environment::{Stage, compile};

/// Runs the lookup program with one way of looking up calls, and the arguments that it needs.
fn asked_by(way: &str, options: &[(&str, &str)]) {
    let stage = Stage::new();
    let flags = if way == "linked" { vec!["-DLINKED"] } else { vec![] };
    let Some(program) = compile(&stage, "ways", &flags, true) else { return };
    let version = if cfg!(target_arch = "aarch64") { "GLIBC_2.17" } else { "GLIBC_2.2.5" };
    let libcuda = stage.libcuda();
    let more = if way == "dlvsym" { version } else { libcuda.to_str().expect("the path should be UTF-8") };
    let output = stage.run(&program, &[way, more], options);
    assert_eq!(output.stdout.trim(), way, "{output:?}");
}

macro_rules! ways {
    ($($test:ident $way:literal;)*) => {
        $(
            #[test]
            fn $test() {
                asked_by($way, &[]);
            }
        )*
    };
}

ways! {
    a_linked_symbol_is_served "linked";
    a_symbol_of_an_opened_library_is_served "dlopen";
    a_symbol_of_the_default_scope_is_served "default";
    a_symbol_of_the_next_library_is_served "next";
    a_symbol_of_the_program_itself_is_served "program";
    a_version_finds_what_it_finds_without_us "dlvsym";
    an_address_by_the_first_call_is_served "proc";
    an_address_by_the_second_call_is_served "proc_v2";
}

#[test]
fn functions_without_exported_symbols_are_served_by_name() {
    asked_by("proc", &[("STUB_TRAMPOLINES", "1")]);
    asked_by("proc_v2", &[("STUB_TRAMPOLINES", "1")]);
}

/// The program does not handle the signals that these writes raise: SIGXFSZ beyond the limit, and SIGPIPE without a reader.
#[test]
fn a_recording_that_cannot_be_written_or_reported_does_not_end_the_program() {
    let stage = Stage::new();
    let Some(program) = compile(&stage, "limited", &[], true) else { return };
    let folder = tempfile::tempdir().expect("a folder should be created");
    for record in ["job.trace", "job.trace.zst"] {
        for is_closed in [false, true] {
            let (reader, writer) = std::io::pipe().expect("the system should create a pipe");
            let mut command = stage.command(&program);
            command.env("SYMMALLOC_RUN_RECORD", folder.path().join(record)).env("SYMMALLOC_RUN_FOLDER", folder.path());
            command.stderr(writer);
            let reader = (!is_closed).then_some(reader);
            let ended = command.output().expect("the program should start");
            drop(command);
            assert!(ended.status.success() && ended.stdout == b"done\n", "{record}: {}", ended.status);
            if let Some(reader) = reader {
                let text = std::io::read_to_string(reader).expect("the contents should be UTF-8");
                assert!(text.contains("symmalloc: ") && text.contains("File too large"), "{record}: {text}");
            }
        }
    }
}

/// Memory of `cuMemAlloc` has no stream, and memory of a context that was reset is gone at exit.
#[test]
fn damage_is_reported_for_every_kind_of_memory_and_before_a_reset() {
    let stage = Stage::new();
    let Some(program) = compile(&stage, "damaged", &[], true) else { return };
    for (how, is_damaged) in [("sync", true), ("async", true), ("reset", true), ("intact", false)] {
        let mut command = stage.command(&program);
        command.arg(how).env("SYMMALLOC_RUN_CONFIG", "debug:[canary,poison]");
        let ended = command.output().expect("started");
        let stderr = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.success() && ended.stdout == b"done\n", "{how}: {} {stderr}", ended.status);
        assert_eq!(
            stderr.contains("memory was damaged") && stderr.contains("was overrun"),
            is_damaged,
            "{how}: {stderr}"
        );
    }
}

#[test]
fn a_program_without_cuda_is_unaffected() {
    let stage = Stage::new();
    let Some(program) = compile(&stage, "no_cuda", &[], false) else { return };
    assert_eq!(stage.run(&program, &[], &[]).stdout, "without CUDA\n");
    let copy = stage.path("copy");
    let script = "echo a shell && cp /dev/null \"$0\" && ls \"$0\" >/dev/null";
    let output = stage.run("sh".as_ref(), &["-c", script, copy.to_str().expect("the path should be UTF-8")], &[]);
    assert_eq!(output.stdout, "a shell\n");
}
