//! Tests that a write of this crate never ends the program, and that the program's own handling of signals stays as it was.
#![cfg(target_os = "linux")]

use libc::{RLIMIT_FSIZE, SIG_BLOCK, SIG_DFL, SIG_UNBLOCK, SIGPIPE, SIGXFSZ, c_int, sighandler_t};
use std::fs::File;
use std::io::{self, ErrorKind, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use symmalloc_files::{Draft, say, without_signals, write_whole};

/// The limit on file sizes in the tests, in bytes.
const LIMIT_BYTES: u64 = 64 << 10;

/// A write that fails, the signal that it raises otherwise, and its error; `None` if it returns no error.
type FailingWrite = (&'static str, fn(&Path) -> io::Result<()>, c_int, Option<ErrorKind>);

const WRITES: [FailingWrite; 6] = [
    ("a whole file", |folder| write_whole(&folder.join("whole"), &too_much()), SIGXFSZ, Some(ErrorKind::FileTooLarge)),
    (
        "a public draft",
        |folder| Draft::public(&folder.join("draft"))?.write_all(&too_much()),
        SIGXFSZ,
        Some(ErrorKind::FileTooLarge),
    ),
    (
        "another file",
        |folder| write_to(&mut File::create(folder.join("file"))?),
        SIGXFSZ,
        Some(ErrorKind::FileTooLarge),
    ),
    ("a closed pipe", |_| write_to(&mut closed_pipe()), SIGPIPE, Some(ErrorKind::BrokenPipe)),
    ("standard error at the limit", say_at_the_limit, SIGXFSZ, None),
    ("closed standard error", say_to_nobody, SIGPIPE, None),
];

fn too_much() -> Vec<u8> {
    vec![0; 2 * LIMIT_BYTES as usize]
}

fn write_to(file: &mut File) -> io::Result<()> {
    without_signals(|| file.write_all(&too_much()))
}

fn closed_pipe() -> File {
    let (reader, writer) = io::pipe().expect("the system should create a pipe");
    drop(reader);
    File::from(std::os::fd::OwnedFd::from(writer))
}

fn say_at_the_limit(folder: &Path) -> io::Result<()> {
    let mut log = File::create(folder.join("log"))?;
    log.seek(SeekFrom::Start(LIMIT_BYTES))?;
    say_to(&log);
    assert_eq!(log.metadata()?.len(), 0, "nothing fits");
    Ok(())
}

fn say_to_nobody(_: &Path) -> io::Result<()> {
    say_to(&closed_pipe());
    Ok(())
}

/// Writes a message while standard error is this file.
fn say_to(file: &File) {
    // SAFETY: both descriptors are open, and the previous one is restored.
    unsafe {
        let before = libc::dup(2);
        libc::dup2(file.as_raw_fd(), 2);
        say(format_args!("a message that nobody can read"));
        libc::dup2(before, 2);
        libc::close(before);
    }
}

static HANDLED: AtomicU32 = AtomicU32::new(0);

extern "C" fn count(_: c_int) {
    HANDLED.fetch_add(1, Ordering::Relaxed);
}

fn handle(signal: c_int, handler: sighandler_t) {
    // SAFETY: the handler is a default one, or only adds to an atomic.
    unsafe { libc::signal(signal, handler) };
}

fn mask(how: c_int, signal: c_int) {
    // SAFETY: the set is initialized before it is used.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, signal);
        libc::pthread_sigmask(how, &raw const set, std::ptr::null_mut());
    }
}

fn raise(signal: c_int) {
    // SAFETY: the signal is handled or blocked.
    unsafe { libc::raise(signal) };
}

/// A way in which a program may handle the signal, with its checks around the write.
type Program = (&'static str, fn(c_int, &dyn Fn()));

const PROGRAMS: [Program; 4] = [
    ("does not handle the signal", |signal, write| {
        handle(signal, SIG_DFL);
        write();
    }),
    ("handles the signal", |signal, write| {
        handle(signal, count as *const () as sighandler_t);
        write();
        assert_eq!(HANDLED.load(Ordering::Relaxed), 0, "the handler ran");
        raise(signal);
        assert_eq!(HANDLED.load(Ordering::Relaxed), 1, "the program's own signal is lost");
    }),
    ("blocks the signal", |signal, write| {
        handle(signal, count as *const () as sighandler_t);
        mask(SIG_BLOCK, signal);
        write();
        mask(SIG_UNBLOCK, signal);
        assert_eq!(HANDLED.load(Ordering::Relaxed), 0, "the signal of the write was pending");
    }),
    ("has a pending signal", |signal, write| {
        handle(signal, count as *const () as sighandler_t);
        mask(SIG_BLOCK, signal);
        raise(signal);
        write();
        assert_eq!(HANDLED.load(Ordering::Relaxed), 0, "still blocked");
        mask(SIG_UNBLOCK, signal);
        assert_eq!(HANDLED.load(Ordering::Relaxed), 1, "the program's own signal is lost");
    }),
];

#[test]
fn a_failing_write_returns_an_error_and_leaves_signals_to_the_program() {
    for (number, (what, ..)) in WRITES.iter().enumerate() {
        for (program, (handling, _)) in PROGRAMS.iter().enumerate() {
            let mut child = Command::new(std::env::current_exe().expect("it should be known"));
            child.args(["--exact", "a_program_writes", "--ignored"]).env("CASE", format!("{number} {program}"));
            let ended = child.output().expect("the program should start");
            let text = String::from_utf8_lossy(&ended.stdout);
            assert!(ended.status.success(), "{what}, in a program that {handling}: {}\n{text}", ended.status);
        }
    }
}

#[test]
#[ignore = "run by another test, in a separate process"]
fn a_program_writes() {
    let case = std::env::var("CASE").expect("it should be set");
    let (number, program) = case.split_once(' ').expect("two numbers");
    let (_, write, signal, expected) = WRITES[number.parse::<usize>().expect("it should be a number")];
    let (_, run) = PROGRAMS[program.parse::<usize>().expect("it should be a number")];
    let folder = tempfile::tempdir().expect("a folder should be created");
    let limit = libc::rlimit { rlim_cur: LIMIT_BYTES, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: a valid limit, in a process that runs only this test.
    assert_eq!(unsafe { libc::setrlimit(RLIMIT_FSIZE, &raw const limit) }, 0);
    run(signal, &|| {
        assert_eq!(write(folder.path()).err().map(|error| error.kind()), expected);
    });
    let kept: Vec<_> = folder
        .path()
        .read_dir()
        .expect("it should be readable")
        .map(|entry| entry.expect("the read should succeed").path())
        .collect();
    assert!(kept.iter().all(|path| path.ends_with("file") || path.ends_with("log")), "{kept:?}");
}
