//! Messages of a library on standard error.

use crate::signals::without_signals;
use std::fmt;

/// Writes a line to standard error, after the name of the project.
///
/// Ignores errors, and drops the rest of a line that cannot be written within about a second: the program may have closed standard error,
/// its pipe may have lost its reader, its disk may be full, or nobody may read. `eprintln!` would panic or block, and in a program that
/// does not ignore SIGPIPE or SIGXFSZ, a plain write would end the process.
///
/// Also drops the line if descriptor 2 closes on exec: the program has closed standard error, and the descriptor now belongs to a file that
/// a library has opened since.
pub fn say(line: fmt::Arguments<'_>) {
    let line = format!("symmalloc: {line}\n");
    without_signals(|| write(line.as_bytes()));
}

/// Writes in pieces that do not block once standard error is writable, unless another process fills the same pipe at that moment. Does not
/// use the lock of [`std::io::stderr`], which another thread may hold while it blocks.
#[cfg(unix)]
fn write(mut rest: &[u8]) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::io::{Errno, FdFlags};
    use std::time::{Duration, Instant};

    const LIMIT: Duration = Duration::from_secs(1);
    /// Number of bytes that a writable pipe accepts without blocking: POSIX's minimum of `PIPE_BUF`.
    const CHUNK_BYTES: usize = 512;

    let (stderr, begun) = (rustix::stdio::stderr(), Instant::now());
    if rustix::io::fcntl_getfd(stderr).is_ok_and(|flags| flags.contains(FdFlags::CLOEXEC)) {
        return;
    }
    while !rest.is_empty() {
        let left = LIMIT.saturating_sub(begun.elapsed());
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        let mut descriptors = [PollFd::new(&stderr, PollFlags::OUT)];
        match poll(&mut descriptors, Some(&timeout)) {
            Ok(1..) if descriptors[0].revents().contains(PollFlags::OUT) => {}
            Err(Errno::INTR) if !left.is_zero() => continue,
            _ => return,
        }
        match rustix::io::write(stderr, &rest[..rest.len().min(CHUNK_BYTES)]) {
            Ok(count) => rest = &rest[count..],
            Err(Errno::INTR | Errno::AGAIN) if !left.is_zero() => {}
            Err(_) => return,
        }
    }
}

#[cfg(not(unix))]
fn write(line: &[u8]) {
    use std::io::Write;

    let _unread = std::io::stderr().write_all(line);
}
