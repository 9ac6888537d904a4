//! A log of submitted work and of the waits that order it.
//!
//! ```text
//!  stub_log_begin ── work of stream 5 ── stream 7 waits for stream 5 ── the host waits for stream 7 ── stub_log_take
//! ```
//! Work is identified by its stream and its number on that stream, as in `streams.rs`. Events do not appear: a wait names the work before
//! the event.

use crate::model::{State, with};

/// An entry of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Entry {
    /// Kind of the entry, one of the constants below.
    pub kind: u64,
    /// Stream of the work or of the wait.
    pub stream: u64,
    /// Number of the work or of the wait on that stream. For a host wait, number of the last work that it covers.
    pub seq: u64,
    /// First byte that the work reads, or 0. For a stream wait, the other stream.
    pub from: u64,
    /// First byte that the work writes. For a stream wait, number of the last work of the other stream that it covers.
    pub to: u64,
    /// Number of bytes that the work reads, and of those that it writes.
    pub count: u64,
}

/// Work that reads or writes memory.
pub const WORK: u64 = 0;
/// A wait of a stream for another stream.
pub const STREAM_WAIT: u64 = 1;
/// A wait of the host for a stream.
pub const HOST_WAIT: u64 = 2;

impl State {
    /// Appends an entry, if the log has begun.
    pub fn log(&mut self, entry: Entry) {
        if let Some(log) = &mut self.log {
            log.push(entry);
        }
    }

    /// Appends a wait of the host.
    pub fn log_host_wait(&mut self, stream: u64, seq: u64) {
        self.log(Entry { kind: HOST_WAIT, stream, seq, from: 0, to: 0, count: 0 });
    }
}

/// Begins an empty log. Entries of an earlier log are dropped.
#[unsafe(no_mangle)]
pub extern "C" fn stub_log_begin() {
    with(|state| state.log = Some(Vec::new()));
}

/// Moves up to `capacity` entries, oldest first, from the log to `to`. Returns their number.
///
/// # Safety
/// `to` must be valid for writing `capacity` entries.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_log_take(to: *mut Entry, capacity: usize) -> usize {
    let moved = with(|state| {
        let log = state.log.get_or_insert_default();
        let count = capacity.min(log.len());
        log.drain(..count).collect::<Vec<_>>()
    });
    // SAFETY: guaranteed by the caller.
    unsafe { std::ptr::copy_nonoverlapping(moved.as_ptr(), to, moved.len()) };
    moved.len()
}
