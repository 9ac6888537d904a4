//! A system that creates no more threads, or that lets no file grow. Commands need neither more than one thread nor a signal to fail.

use super::{CommandOutput, Folder, busy_trace, command, symmalloc};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use stub_process::refuse_threads;

/// All commands that execute a recording.
const COMMANDS: [&str; 9] = [
    "replay {} --ranks 4",
    "replay {} --ranks 4 --json",
    "simulate {} --ranks 4 --json",
    "simulate {} --ranks 4 --runs 5",
    "plan {}",
    "report {} --json -o report.html",
    "chart {} --json -o chart.svg",
    "import {} -",
    "diff {} {}",
];

fn of(args: &str, job: &Path) -> Command {
    let mut command = command();
    command.args(args.split(' ').map(|arg| if arg == "{}" { job.as_os_str() } else { arg.as_ref() }));
    command
}

fn without_threads(command: &mut Command) -> CommandOutput {
    // SAFETY: the function makes two system calls and allocates nothing.
    unsafe {
        command.pre_exec(|| {
            refuse_threads();
            Ok(())
        })
    };
    command.output().expect("the program should start").into()
}

#[test]
fn without_threads_commands_have_the_same_results() {
    let folder = Folder::new();
    let job = busy_trace(&folder);
    for args in COMMANDS {
        let run = || {
            let mut command = of(args, &job);
            command.current_dir(folder.0.path());
            command
        };
        let (usual, refused) = (CommandOutput::from(run().output().unwrap()), without_threads(&mut run()));
        assert_eq!(refused.code, usual.code, "{args}: {}", refused.stderr);
        assert!(usual.code.is_some_and(|code| code != 2), "{args}: {}", usual.stderr);
        assert_eq!(without_times(&refused.stdout), without_times(&usual.stdout), "{args}");
    }
}

/// Removes lines with measured times.
fn without_times(text: &str) -> Vec<&str> {
    text.lines()
        .filter(|line| {
            let units = ["seconds", " ns", "ns_per", "state_bytes_per_rank", "ms"];
            !line.trim_start().starts_with("time ") && !units.iter().any(|unit| line.contains(unit))
        })
        .collect()
}

#[test]
fn a_program_that_would_run_without_its_signals_is_not_started() {
    let folder = Folder::new();
    let library = folder.file("libsymmalloc_preload.so", "");
    let mut run = command();
    run.args(["run", "--stats", "--library"]).arg(library).args(["--", "touch"]).arg(folder.path("ran"));
    let printed = without_threads(&mut run);
    assert_eq!(printed.code, Some(126), "{}", printed.stderr);
    assert!(
        printed.stderr.contains("no thread can be started") && printed.stderr.contains("ulimit -u"),
        "{}",
        printed.stderr
    );
    assert!(!folder.path("ran").exists());
}

#[test]
fn a_pipe_that_no_thread_can_wait_for_is_an_error_with_a_remedy() {
    let folder = Folder::new();
    let pipe = folder.path("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let printed = without_threads(command().arg("replay").arg(&pipe));
    assert_eq!(printed.code, Some(2), "{}", printed.stderr);
    assert!(printed.stderr.contains("ulimit -u"), "{}", printed.stderr);
}

/// Regression test: a write to standard output beyond the limit on file sizes ended the process with SIGXFSZ.
#[test]
fn standard_output_that_cannot_grow_is_an_error_like_a_full_disk() {
    let folder = Folder::new();
    let job = busy_trace(&folder);
    for args in COMMANDS.into_iter().chain(["--help", "--version", "replay --help", "completions bash", "man"]) {
        for stdout in ["exec > /dev/full", "ulimit -f 0; exec > out"] {
            let mut limited = Command::new("sh");
            limited.args(["-c", &format!("{stdout}; exec \"$0\" \"$@\"")]).arg(command().get_program());
            limited.args(of(args, &job).get_args()).current_dir(folder.0.path());
            let printed = CommandOutput::from(limited.output().unwrap());
            assert_eq!(printed.code, Some(2), "{args}, {stdout}: {}", printed.stderr);
            assert!(printed.stderr.contains("disk"), "{args}, {stdout}: {}", printed.stderr);
        }
    }
}

/// A message that cannot be written does not change how a command ends.
#[test]
fn standard_error_that_cannot_grow_changes_no_exit_code() {
    let folder = Folder::new();
    for args in ["replay /missing", "unknown", "run --stats -- /missing", "run -- /missing"] {
        let mut limited = Command::new("sh");
        limited.args(["-c", "ulimit -f 0; exec 2> err; exec \"$0\" \"$@\""]).arg(command().get_program());
        limited.args(args.split(' ')).current_dir(folder.0.path());
        let usual = symmalloc(args, &[]).code;
        assert_eq!(limited.output().unwrap().status.code(), usual, "{args}");
    }
}

/// The program of `run` has the signals of its caller.
#[test]
fn a_program_inherits_no_blocked_signals() {
    let folder = Folder::new();
    let library = folder.file("libsymmalloc_preload.so", "");
    let masks = |command: &mut Command| {
        let text = CommandOutput::from(command.stderr(Stdio::null()).output().unwrap()).stdout;
        text.lines().filter(|line| line.starts_with("SigBlk")).map(str::to_owned).collect::<Vec<_>>()
    };
    let expected = masks(Command::new("cat").arg("/proc/self/status"));
    assert_eq!(expected.len(), 1);
    for flags in [&[][..], &["--stats"]] {
        let mut run = command();
        run.arg("run").args(flags).arg("--library").arg(&library).args(["--", "cat", "/proc/self/status"]);
        assert_eq!(masks(&mut run), expected, "{flags:?}");
    }
}
