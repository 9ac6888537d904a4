//! Messages on standard error that can neither fail nor block the process.
//!
//! The reader of standard error may be gone, its disk may be full, or it may have stopped reading. `eprintln!` then panics or blocks, and
//! would keep a process alive that is about to end because of another failure.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::time::{Duration, Instant};

/// Number of bytes that a pipe accepts without blocking once it is writable (POSIX's minimum of `PIPE_BUF`).
const CHUNK_BYTES: usize = 512;

/// Writes text to standard error, for at most about `limit`. Ignores errors and drops what could not be written in time.
///
/// Does not use the lock of [`std::io::stderr`], which another thread may hold while it blocks.
pub fn write_stderr(text: &str, limit: Duration) {
    let stderr = rustix::stdio::stderr();
    let begun = Instant::now();
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        let left = limit.saturating_sub(begun.elapsed());
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
