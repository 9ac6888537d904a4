//! Happens-before between the accesses of streams, from the stub's log.
//!
//! The clock of work holds, for each stream, the number of the last work that is done before it. `+` takes the larger number of each stream:
//!
//! ```text
//!  clock(work) = clock(previous work of the stream) + clock(host) + itself
//!  clock(wait) = clock(previous work of the stream) + clock(host) + clock(work waited for) + itself
//!  clock(host) = clock(host) + clock(work waited for), at a wait of the host
//! ```
//! Two accesses are ordered if the clock of the later one covers the earlier one.

use crate::process::Logged;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

/// Number of the last work that is done, by stream.
type Clock = BTreeMap<u64, u64>;

/// An access to device memory.
#[derive(Debug)]
struct Access {
    /// Number of the step that made it.
    step: usize,
    bytes: Range<u64>,
    is_write: bool,
    stream: u64,
    seq: u64,
    /// `true` while later accesses need not be ordered after this one: its guard was forgotten, and the memory is still allocated.
    is_forgotten: bool,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Access { step, bytes, is_write, stream, seq, .. } = self;
        let kind = if *is_write { "write" } else { "read" };
        write!(f, "the {kind} of {bytes:x?} by step {step} (work {seq} of stream {stream:#x})")
    }
}

/// The accesses of a program, and the order between them.
#[derive(Debug, Default)]
pub(super) struct History {
    /// Memory whose accesses are not ordered.
    scratch: Range<u64>,
    accesses: Vec<Access>,
    /// Clocks of each stream's work in the order of the work.
    streams: BTreeMap<u64, Vec<(u64, Clock)>>,
    host: Clock,
    /// Conflicting accesses of two streams that were ordered.
    pub(super) ordered: u64,
}

impl History {
    pub(super) fn new(scratch: Range<u64>) -> Self {
        History { scratch, ..History::default() }
    }

    /// Appends the entries that a step caused. Returns an error if two conflicting accesses are not ordered.
    pub(super) fn append(&mut self, step: usize, is_forgotten: bool, entries: &[Logged]) -> Result<(), String> {
        for entry in entries {
            match *entry {
                Logged::StreamWait { stream, seq, other, last } => {
                    let waited_for = self.clock_of(other, last);
                    self.advance(stream, seq, &waited_for);
                }
                Logged::HostWait { stream, last } => {
                    let waited_for = self.clock_of(stream, last);
                    join(&mut self.host, &waited_for);
                }
                Logged::Work { stream, seq, from, to, count } => {
                    self.advance(stream, seq, &Clock::new());
                    for (start, is_write) in [(from, false), (to, true)] {
                        let bytes = start..start + count;
                        if start != 0 && count > 0 && !overlap(&bytes, &self.scratch) {
                            self.access(Access { step, bytes, is_write, stream, seq, is_forgotten })?;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Ends the ownership of these bytes. Accesses of the next owner are ordered after all earlier ones.
    pub(super) fn end_owner(&mut self, bytes: &Range<u64>) {
        for access in self.accesses.iter_mut().filter(|access| overlap(&access.bytes, bytes)) {
            access.is_forgotten = false;
        }
    }

    fn access(&mut self, later: Access) -> Result<(), String> {
        let clock = self.clock_of(later.stream, later.seq);
        let conflicting = |earlier: &&Access| {
            (earlier.is_write || later.is_write) && !earlier.is_forgotten && overlap(&earlier.bytes, &later.bytes)
        };
        for earlier in self.accesses.iter().filter(conflicting) {
            if clock.get(&earlier.stream).is_none_or(|last| *last < earlier.seq) {
                return Err(format!("{later} is not ordered after {earlier}"));
            }
            self.ordered += u64::from(earlier.stream != later.stream);
        }
        self.accesses.push(later);
        Ok(())
    }

    /// Computes the clock of a stream's next work.
    fn advance(&mut self, stream: u64, seq: u64, waited_for: &Clock) {
        let clocks = self.streams.entry(stream).or_default();
        let mut clock = clocks.last().map(|(_, clock)| clock.clone()).unwrap_or_default();
        join(&mut clock, &self.host);
        join(&mut clock, waited_for);
        clock.insert(stream, seq);
        clocks.push((seq, clock));
    }

    /// Returns the clock at a position of a stream. The position may be an event, which is not logged.
    fn clock_of(&self, stream: u64, seq: u64) -> Clock {
        let clocks = self.streams.get(&stream).map_or(&[][..], Vec::as_slice);
        let covered = clocks.partition_point(|(number, _)| *number <= seq);
        let mut clock = covered.checked_sub(1).map(|last| clocks[last].1.clone()).unwrap_or_default();
        clock.insert(stream, seq);
        clock
    }
}

fn join(clock: &mut Clock, other: &Clock) {
    for (stream, seq) in other {
        let known = clock.entry(*stream).or_default();
        *known = (*known).max(*seq);
    }
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}
