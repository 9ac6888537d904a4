//! Tests of `symmalloc run` with a CUDA program in C, on a stub of libcuda. They are skipped if there is no C compiler.

use crate::{CommandOutput, Folder, symmalloc};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// The stub, the program, and its working folder.
struct Job {
    stub: TempDir,
    folder: Folder,
    program: PathBuf,
}

impl Job {
    fn new() -> Option<Self> {
        let (stub, folder) = (stub_process::stub_of_libcuda(), Folder::new());
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/job.c");
        let program = folder.path("job");
        let mut compiler = Command::new(std::env::var("CC").unwrap_or_else(|_| "cc".to_owned()));
        compiler.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror"]).arg(source).arg("-o").arg(&program);
        compiler.arg("-L").arg(stub.path()).arg("-lcuda");
        match compiler.output() {
            Ok(compiled) => {
                assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
                Some(Job { stub, folder, program })
            }
            Err(error) => {
                println!("skipped: no C compiler ({error}); set CC");
                None
            }
        }
    }

    fn command(&self, flags: &str, what: &str) -> Command {
        let executable = std::env::current_exe().expect("the test's executable should be known");
        let library = executable.parent().expect("the path should be below a folder").join("libsymmalloc_preload.so");
        let mut command = crate::command();
        command.args(["run", "--library"]).arg(library).args(flags.split_whitespace()).arg("--").arg(&self.program);
        command.arg(what).current_dir(self.folder.0.path()).env("LD_LIBRARY_PATH", self.stub.path());
        for name in ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "WORLD_SIZE"] {
            command.env_remove(name);
        }
        command
    }

    fn run(&self, flags: &str, what: &str) -> CommandOutput {
        self.command(flags, what).output().expect("the program should start").into()
    }

    /// Runs two ranks, started by a shell script.
    fn ranks(&self, flags: &str, what: &str) -> CommandOutput {
        self.launched("RANK=0 WORLD_SIZE=2 \"$@\" & RANK=1 WORLD_SIZE=2 \"$@\" & wait", flags, what)
    }

    /// Runs a script that starts the program as `"$@"`.
    fn launched(&self, script: &str, flags: &str, what: &str) -> CommandOutput {
        let command = self.command(flags, what);
        let launcher = self.folder.file("launcher", format!("{script}\n"));
        let arguments: Vec<_> = command.get_args().map(std::ffi::OsStr::to_owned).collect();
        let at = arguments.iter().position(|argument| argument == "--").expect("a program") + 1;
        let mut wrapped = crate::command();
        wrapped.args(&arguments[..at]).arg("sh").arg(launcher).args(&arguments[at..]);
        wrapped.current_dir(self.folder.0.path()).env("LD_LIBRARY_PATH", self.stub.path());
        wrapped.output().expect("the program should start").into()
    }
}

#[test]
fn a_program_is_served_and_its_exit_code_is_forwarded() {
    let Some(job) = Job::new() else { return };
    let printed = job.run("", "");
    assert_eq!((printed.exited(0).stdout.as_str(), printed.stderr.as_str()), ("driver 0\n", ""));
    job.run("", "exit").exited(7);
    assert_eq!(job.run("--limit 100MiB", "limit").code, Some(2), "CUDA_ERROR_OUT_OF_MEMORY");
    assert_eq!(job.run("--limit 300MiB", "limit").code, Some(0));
}

#[test]
fn statistics_are_printed_at_the_end() {
    let Some(job) = Job::new() else { return };
    let printed = job.run("--stats", "exit");
    assert_eq!(printed.code, Some(7));
    assert!(printed.stderr.contains("82 allocations, 81 frees"), "{}", printed.stderr);
    for line in ["peak live", "peak reserved, device 0", "without symmalloc, at least", "ns per call"] {
        assert!(printed.stderr.contains(line), "{line} is missing:\n{}", printed.stderr);
    }
    assert!(
        printed.stderr.contains("never freed, device 0: 3.00 MiB in 1 allocation: 1 of 3.00 MiB"),
        "{}",
        printed.stderr
    );
    // A step allocates 9 MiB at once; 4 MiB follow after ten steps.
    assert!(printed.stderr.contains("9.00 MiB"), "{}", printed.stderr);
}

#[test]
fn recording_alone_leaves_allocations_to_the_driver() {
    let Some(job) = Job::new() else { return };
    let printed = job.run("--record job.trace.zst", "");
    assert_eq!((printed.code, printed.stdout.as_str()), (Some(0), "driver 82\n"));
    let trace = job.folder.path("job.trace.zst");
    assert_eq!(printed.stderr, format!("symmalloc: recorded {}\n", trace.display()));
    let replayed = symmalloc("replay {} --json", &[&trace]).json(0);
    assert_eq!((&replayed[0]["allocs"], &replayed[0]["aligned"]), (&82.into(), &true.into()));
    symmalloc("report {} -o {} --json", &[&trace, &job.folder.path("job.html")]).json(0);
    symmalloc("plan {} --json", &[&trace]).json(0);
    job.run("--record text.trace", "");
    let text = fs::read_to_string(job.folder.path("text.trace")).expect("the trace should be readable");
    assert!(text.starts_with("symmalloc-trace 2\nconfig "), "{text}");
    // Streams are numbered in the order of their first use. A free on another stream is a use by that stream.
    assert!(text.contains("\nstream s0\na 0 262144 s0\nstream s1\na 1 524288 s1\n"), "{text}");
    assert!(text.contains("\nu 1 s0\nf 1\n"), "{text}");
}

#[test]
fn a_recording_of_a_served_program_has_its_placements() {
    let Some(job) = Job::new() else { return };
    let printed = job.run("--record job.trace --serve", "");
    assert_eq!((printed.code, printed.stdout.as_str()), (Some(0), "driver 0\n"));
    let text = fs::read_to_string(job.folder.path("job.trace")).expect("the trace should be readable");
    assert!(text.contains(" -> 0@0\n"), "{text}");
    symmalloc("replay {} --json", &[&job.folder.path("job.trace")]).json(0);
    let printed = job.run("--report page.html", "");
    assert_eq!((printed.code, printed.stdout.as_str(), printed.stderr.as_str()), (Some(0), "driver 0\n", ""));
    let page = fs::read_to_string(job.folder.path("page.html")).expect("a page");
    assert!(page.contains("</html>"), "{page}");
}

#[test]
fn ranks_are_recorded_and_compared() {
    let Some(job) = Job::new() else { return };
    let printed = job.ranks("--check", "");
    assert!(
        printed.code == Some(0) && printed.stderr.contains("2 ranks, digests are equal: p0 "),
        "{}",
        printed.stderr
    );
    let printed = job.ranks("--check", "differ");
    assert!(printed.code == Some(3) && printed.stderr.contains("rank 1 differs from rank 0"), "{}", printed.stderr);
    let printed = job.ranks("--check --serve --record served.trace", "differ");
    assert!(printed.code == Some(3) && printed.stderr.contains("size_bytes: 1576960"), "{}", printed.stderr);
    let printed = job.ranks("--check --record job.trace", "");
    assert!(printed.code == Some(0) && printed.stderr.contains("2 ranks, the same calls"), "{}", printed.stderr);
    let printed = job.ranks("--check --record job.trace", "differ");
    assert!(printed.code == Some(3) && printed.stderr.contains("size_bytes: 1576960"), "{}", printed.stderr);
    let traces = [job.folder.path("job.rank0.trace"), job.folder.path("job.rank1.trace")];
    let differs = symmalloc("diff {} {}", &[&traces[0], &traces[1]]);
    assert!(differs.exited(3).stdout.contains("1,576,960"), "{}", differs.stdout);
}

#[test]
fn each_process_writes_its_own_file() {
    let Some(job) = Job::new() else { return };
    let printed = job.launched("\"$@\"; \"$@\"", "--record job.trace", "");
    assert_eq!(printed.code, Some(0), "{}", printed.stderr);
    let recorded: Vec<&str> =
        printed.stderr.lines().filter_map(|line| line.strip_prefix("symmalloc: recorded ")).collect();
    assert_eq!(recorded.len(), 2, "{}", printed.stderr);
    assert!(recorded.iter().any(|path| path.ends_with("/job.trace")), "{recorded:?}");
    assert!(recorded.iter().any(|path| path.contains("/job.process")), "{recorded:?}");
    let differs = symmalloc("diff {} {}", &[Path::new(recorded[0]), Path::new(recorded[1])]);
    differs.exited(0);
}

#[test]
fn a_check_needs_ranks() {
    let Some(job) = Job::new() else { return };
    let printed = job.run("--check", "");
    assert!(printed.code == Some(2) && printed.stderr.contains("torchrun"), "{}", printed.stderr);
    let printed: CommandOutput =
        job.command("--check", "").env("RANK", "0").output().expect("the program should start").into();
    assert!(printed.code == Some(2) && printed.stderr.contains("cannot see the other ranks"), "{}", printed.stderr);
}

#[test]
fn signals_are_forwarded_to_the_program() {
    let Some(job) = Job::new() else { return };
    for (flags, signal, code) in [("--stats", "-USR1", 11), ("--stats", "-TERM", 12), ("", "-USR1", 11)] {
        let mut command = job.command(flags, "wait");
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the program should start");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("the stream should be piped"))
            .read_line(&mut line)
            .expect("it should be readable");
        assert_eq!(line, "ready\n");
        let sent = Command::new("kill").args([signal, &child.id().to_string()]).status().expect("kill starts");
        assert!(sent.success());
        assert_eq!(child.wait().expect("the program should end").code(), Some(code));
    }
}

#[test]
fn a_program_that_dies_leaves_a_recording() {
    let Some(job) = Job::new() else { return };
    let printed = job.run("--record job.trace.zst --stats", "abort");
    assert_eq!(printed.code, Some(128 + 6));
    assert!(
        printed.stderr.contains("terminated by signal 6") && printed.stderr.contains("--accept-torn"),
        "{}",
        printed.stderr
    );
    let trace = job.folder.path("job.trace.zst");
    assert_eq!(symmalloc("replay {}", &[&trace]).code, Some(2));
    let replayed = symmalloc("replay {} --accept-torn --json", &[&trace]).json(0);
    assert_eq!(replayed[0]["allocs"], 82);
}

#[test]
fn a_program_that_cannot_be_started_is_reported() {
    let Some(job) = Job::new() else { return };
    let started = |program: &str, flags: &str| -> CommandOutput {
        let mut command = job.command(flags, "");
        let arguments: Vec<_> = command.get_args().map(std::ffi::OsStr::to_owned).collect();
        command = crate::command();
        command.args(&arguments[..3]).args(flags.split_whitespace()).arg("--").arg(program);
        command.output().expect("symmalloc starts").into()
    };
    for flags in ["", "--stats"] {
        let printed = started("/no/such/program", flags);
        assert!(
            printed.code == Some(127) && printed.stderr.contains("/no/such/program cannot be started"),
            "{}",
            printed.stderr
        );
        assert_eq!(started("/etc/passwd", flags).code, Some(126));
    }
    let printed = symmalloc("run --library {} -- true", &[Path::new("/no/library.so")]);
    assert!(printed.code == Some(2) && printed.stderr.contains("SYMMALLOC_PRELOAD"), "{}", printed.stderr);
    let printed = symmalloc("run --report page.txt -- true", &[]);
    assert!(printed.code == Some(2) && printed.stderr.contains(".html"), "{}", printed.stderr);
    assert_eq!(symmalloc("run --limit much -- true", &[]).code, Some(2));
    assert_eq!(symmalloc("run --config segment:fixed -- true", &[]).code, Some(2));
    let help = symmalloc("run --help", &[]).exited(0).stdout.clone();
    for of_recordings in ["--device", "--accept-torn", "--memory-limit-mb"] {
        assert!(!help.contains(&format!("  {of_recordings}")), "run reads no recordings of others: {help}");
        assert_eq!(symmalloc(&format!("run {of_recordings}=1 -- true"), &[]).code, Some(2));
    }
    assert_eq!(symmalloc("run", &[]).code, Some(2));
    let printed = started("true", "--stats");
    assert!(printed.code == Some(0) && printed.stderr.contains("no process allocated"), "{}", printed.stderr);
}

/// Regression test: the run succeeded, and its recording lacked everything after the disk was full.
#[test]
fn a_recording_on_a_full_disk_fails_with_the_cause() {
    let Some(job) = Job::new() else { return };
    for flags in ["--record /dev/full", "--serve --record /dev/full"] {
        let printed = job.run(flags, "");
        assert_eq!(printed.code, Some(2), "{flags}: {}", printed.stderr);
        let line = "symmalloc: the recording /dev/full is incomplete: ";
        let cause = printed.stderr.lines().find_map(|text| text.strip_prefix(line));
        assert!(cause.is_some_and(|cause| cause.contains("No space left on device")), "{flags}: {}", printed.stderr);
        assert!(!printed.stderr.contains("recorded /dev/full"), "{flags}: {}", printed.stderr);
    }
    let printed = job.run("--record /dev/full", "exit");
    assert_eq!(printed.code, Some(7), "the program's own failure is kept: {}", printed.stderr);
    // The file cannot be created.
    let printed = job.run("--record missing/job.trace", "");
    assert_eq!(printed.code, Some(2), "{}", printed.stderr);
    assert!(
        printed.stderr.contains("is incomplete: ") && printed.stderr.contains("No such file"),
        "{}",
        printed.stderr
    );
}
