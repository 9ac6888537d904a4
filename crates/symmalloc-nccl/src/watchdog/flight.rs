//! The last collectives of a communicator, and the progress of the device in them.
//!
//! ```text
//!  submitting thread    one entry per collective: number, call, size, stream; occasionally an event after it
//!  marker thread        periodically an event after the last entry of each stream, which it polls
//!  watchdog thread      unfinished work, and the time without progress
//! ```
//!
//! An event per collective would cost more than everything else (130 ns of host time). One event per stream and tick gives the same
//! information with the resolution of a tick.

use crate::ffi::operation::DataType;
use crate::ffi::operation::{NcclCall, Operation};
use crate::watchdog::clock::Tick;
use cudarc::driver::CudaStream;
use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use symmalloc_watchdog::{CollectiveRecord, CollectiveState, Progress, Signature};

/// Number of collectives kept.
const ENTRIES_MAX: usize = 256;

/// After this many entries of a stream since the last mark, the submitting thread records a mark itself, so that
/// progress is visible even in a program that runs far ahead of the device.
const MARK_EVERY: u64 = 64;

/// Work submitted to a communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// An NCCL collective.
    Call { call: NcclCall, count: usize, data_type: DataType },
    /// Another operation that every rank performs: a registration, a split, or work that the program announced.
    Named { kind: Cow<'static, str>, elements: Option<u64> },
    /// The destruction of the communicator. It has the next collective's number and does not count: another rank may still submit that
    /// collective.
    Destruction,
}

/// The number of an entry's stream, in the order in which streams were first used with the communicator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct StreamNumber(u32);

/// The number of an entry, counted from 1 over everything submitted to the communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct EntryNumber(u64);

#[derive(Default)]
pub(crate) struct FlightRecorder {
    ring: Mutex<Ring>,
}

#[derive(Default)]
struct Ring {
    /// The last entries, oldest first.
    entries: VecDeque<Entry>,
    /// Total number of entries.
    given: u64,
    /// Number of entries that every rank submits.
    collectives: u64,
    is_destroying: bool,
    streams: Vec<StreamProgress>,
    /// Time at which work last completed, or at which no work was pending.
    moved: Tick,
    /// `true` if a graph contains entries, possibly including dropped ones.
    has_captured: bool,
    /// `true` once a call failed that may have submitted work before.
    has_failed_call: bool,
}

struct Entry {
    /// The number of the collective. A send or receive has the number of the last collective before it.
    number: u64,
    work: Work,
    stream: Option<StreamNumber>,
    given: Tick,
    stage: EntryStage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EntryStage {
    /// The call has not returned yet.
    Submitting,
    /// Submitted to its stream.
    InStream,
    /// Captured in a graph.
    Captured,
    /// Completed on the host, or failed to be submitted.
    Over,
}

/// A stream with collectives of the communicator.
struct StreamProgress {
    stream: Arc<CudaStream>,
    /// Its last entry.
    last: EntryNumber,
    /// The last entry that a mark follows.
    marked: EntryNumber,
    /// All entries up to this one have completed.
    done: EntryNumber,
    /// The number of the last completed collective.
    done_number: u64,
}

/// A stream with entries that no mark follows.
pub(crate) struct Unmarked {
    pub(crate) stream: Arc<CudaStream>,
    pub(crate) upto: Marked,
}

/// An entry of a stream that a mark follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Marked {
    stream: StreamNumber,
    entry: EntryNumber,
    /// The number of the entry's collective.
    number: u64,
}

/// Unfinished work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UnfinishedWork {
    /// The first unfinished collective.
    pub(crate) first: CollectiveRecord,
    /// The number of the last submitted collective.
    pub(crate) last: u64,
    /// The other rank of a send or receive.
    pub(crate) peer: Option<u32>,
    /// `true` if the first unfinished work is the communicator's destruction.
    pub(crate) is_destruction: bool,
    /// Time of the last progress.
    pub(crate) since: Tick,
}

impl FlightRecorder {
    /// Records work that is about to be submitted to NCCL.
    pub(crate) fn begin(&self, work: Work, stream: Option<&Arc<CudaStream>>, now: Tick) -> EntryNumber {
        let mut ring = self.lock();
        let stream = stream.map(|stream| ring.number_of(stream));
        if ring.is_idle() {
            ring.moved = now;
        }
        ring.given += 1;
        let is_destruction = work == Work::Destruction;
        ring.is_destroying |= is_destruction;
        ring.collectives += u64::from(work.is_collective() && !is_destruction);
        let number = ring.collectives + u64::from(is_destruction);
        let entry = Entry { number, work, stream, given: now, stage: EntryStage::Submitting };
        if ring.entries.len() == ENTRIES_MAX {
            ring.entries.pop_front();
        }
        ring.entries.push_back(entry);
        EntryNumber(ring.given)
    }

    /// Records that work was submitted to its stream, or captured. Returns the position of a mark if one is due.
    pub(crate) fn submitted(&self, entry: EntryNumber, is_captured: bool) -> Option<Unmarked> {
        let mut ring = self.lock();
        let at = ring.place(entry)?;
        ring.entries[at].stage = if is_captured { EntryStage::Captured } else { EntryStage::InStream };
        ring.has_captured |= is_captured;
        let StreamNumber(stream) = ring.entries[at].stream.filter(|_| !is_captured)?;
        let followed = &mut ring.streams[stream as usize];
        followed.last = followed.last.max(entry);
        let is_due = followed.last.0 >= followed.marked.0 + MARK_EVERY;
        if is_due { ring.unmarked(stream as usize) } else { None }
    }

    /// Records that work completed on the host or was not submitted: none of it is on the device.
    pub(crate) fn complete_on_host(&self, entry: EntryNumber, now: Tick) {
        let mut ring = self.lock();
        if let Some(at) = ring.place(entry) {
            ring.entries[at].stage = EntryStage::Over;
            ring.moved = now;
        }
    }

    /// Records that the call of an entry was rejected and had no effect. If no later collective exists, the next one gets its number, as on the
    /// other ranks.
    pub(crate) fn rejected(&self, entry: EntryNumber, now: Tick) {
        self.complete_on_host(entry, now);
        let mut ring = self.lock();
        if let Some(at) = ring.place(entry)
            && ring.entries[at].work.is_collective()
            && ring.entries[at].number == ring.collectives
        {
            ring.collectives -= 1;
        }
    }

    /// Records that the call of an entry failed. NCCL may have submitted a part of the work before.
    pub(crate) fn call_failed(&self, entry: EntryNumber, now: Tick) {
        self.lock().has_failed_call = true;
        self.complete_on_host(entry, now);
    }

    /// Returns the streams with entries that no mark follows. They count as marked until [`mark_failed`](Self::mark_failed).
    pub(crate) fn unmarked(&self) -> Vec<Unmarked> {
        let mut ring = self.lock();
        (0..ring.streams.len()).filter_map(|stream| ring.unmarked(stream)).collect()
    }

    /// Returns the last entry of a stream, for a thread that waits for it.
    pub(crate) fn end_of(&self, stream: &Arc<CudaStream>) -> Marked {
        let mut ring = self.lock();
        let stream = ring.number_of(stream);
        ring.end_of(stream)
    }

    /// Handles a mark that could not be recorded.
    pub(crate) fn mark_failed(&self, Marked { stream: StreamNumber(stream), .. }: Marked) {
        let mut ring = self.lock();
        let followed = &mut ring.streams[stream as usize];
        followed.marked = followed.done;
    }

    /// Records that the device has passed a mark.
    pub(crate) fn done(&self, Marked { stream: StreamNumber(stream), entry, number }: Marked, now: Tick) {
        let mut ring = self.lock();
        let followed = &mut ring.streams[stream as usize];
        if followed.done < entry {
            (followed.done, followed.done_number) = (entry, number);
            ring.moved = now;
        }
    }

    /// Returns `true` if no work can run on the device. A graph may be running, and so may work whose call failed.
    pub(crate) fn is_off_device(&self) -> bool {
        let ring = self.lock();
        let is_done = |followed: &StreamProgress| followed.done == followed.last;
        !ring.has_captured && !ring.has_failed_call && ring.streams.iter().all(is_done)
    }

    pub(crate) fn progress(&self) -> Progress {
        let ring = self.lock();
        let first_open = ring.records().find(|(_, state)| is_open(*state)).map(|(entry, _)| entry);
        let finished =
            first_open.map_or(ring.collectives, |entry| entry.number - u64::from(entry.work.is_collective()));
        // Unfinished entries that were dropped come before all remaining ones.
        let forgotten = EntryNumber(ring.given - ring.entries.len() as u64);
        let open = ring.streams.iter().filter(|it| it.done < it.last && it.done < forgotten);
        let finished = open.map(|followed| followed.done_number).fold(finished, u64::min);
        Progress { submitted: ring.collectives, finished, is_destroying: ring.is_destroying }
    }

    /// Returns the unfinished work, or `None` if everything has completed.
    pub(crate) fn unfinished(&self, now: Tick) -> Option<UnfinishedWork> {
        let ring = self.lock();
        let (entry, state) = ring.records().find(|(_, state)| is_open(*state))?;
        let (first, peer) = (entry.record(state, now), entry.work.peer());
        let is_destruction = entry.work == Work::Destruction;
        Some(UnfinishedWork { first, last: ring.collectives, peer, is_destruction, since: ring.moved })
    }

    /// Returns the collective with this number, if it is still kept.
    pub(crate) fn find_collective(&self, number: u64, now: Tick) -> Option<CollectiveRecord> {
        let ring = self.lock();
        // A rejected call before it has the same number.
        let is_it = |(entry, _): &(&Entry, CollectiveState)| entry.number == number && entry.work.is_collective();
        let (entry, state) = ring.records().filter(is_it).last()?;
        Some(entry.record(state, now))
    }

    /// Returns the last collectives, oldest first.
    pub(crate) fn collectives(&self, now: Tick) -> Vec<CollectiveRecord> {
        self.lock().records().map(|(entry, state)| entry.record(state, now)).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_open(state: CollectiveState) -> bool {
    !matches!(state, CollectiveState::Finished | CollectiveState::Captured)
}

impl Ring {
    fn place(&self, EntryNumber(entry): EntryNumber) -> Option<usize> {
        let age = self.given.checked_sub(entry)? as usize;
        self.entries.len().checked_sub(age + 1)
    }

    fn number_of(&mut self, stream: &Arc<CudaStream>) -> StreamNumber {
        let known = self.streams.iter().position(|followed| followed.stream.cu_stream() == stream.cu_stream());
        let number = known.unwrap_or_else(|| {
            let none = EntryNumber(0);
            let stream = Arc::clone(stream);
            self.streams.push(StreamProgress { stream, last: none, marked: none, done: none, done_number: 0 });
            self.streams.len() - 1
        });
        StreamNumber(number as u32)
    }

    fn is_idle(&self) -> bool {
        self.entries.back().is_none_or(|entry| entry.stage != EntryStage::Submitting)
            && self.streams.iter().all(|followed| followed.done == followed.last)
    }

    /// Returns the entries of a stream that no mark follows. They count as marked from here on.
    fn unmarked(&mut self, at: usize) -> Option<Unmarked> {
        let followed = &mut self.streams[at];
        if followed.marked >= followed.last {
            return None;
        }
        followed.marked = followed.last;
        let stream = Arc::clone(&followed.stream);
        Some(Unmarked { stream, upto: self.end_of(StreamNumber(at as u32)) })
    }

    fn end_of(&self, stream: StreamNumber) -> Marked {
        let entry = self.streams[stream.0 as usize].last;
        let number = self.place(entry).map_or(self.collectives, |place| self.entries[place].number);
        Marked { stream, entry, number }
    }

    /// Returns the entries with their states.
    fn records(&self) -> impl Iterator<Item = (&Entry, CollectiveState)> {
        let first = self.given - self.entries.len() as u64 + 1;
        let mut is_next = vec![true; self.streams.len()];
        self.entries.iter().enumerate().map(move |(at, entry)| {
            let state = match (entry.stage, entry.stream) {
                (EntryStage::Submitting, _) => CollectiveState::Submitting,
                (EntryStage::Captured, _) => CollectiveState::Captured,
                (EntryStage::Over, _) | (EntryStage::InStream, None) => CollectiveState::Finished,
                (EntryStage::InStream, Some(StreamNumber(stream))) => {
                    let stream = stream as usize;
                    if EntryNumber(first + at as u64) <= self.streams[stream].done {
                        CollectiveState::Finished
                    } else if std::mem::take(&mut is_next[stream]) {
                        CollectiveState::Running
                    } else {
                        CollectiveState::Submitted
                    }
                }
            };
            (entry, state)
        })
    }
}

impl Entry {
    fn record(&self, state: CollectiveState, now: Tick) -> CollectiveRecord {
        CollectiveRecord {
            number: self.number,
            is_point_to_point: !self.work.is_collective(),
            signature: self.work.signature(),
            stream: self.stream.map(|StreamNumber(stream)| stream),
            state,
            age_ms: now.since(self.given).as_millis() as u64,
        }
    }
}

impl Work {
    pub(crate) fn of(operation: &Operation) -> Self {
        let Operation { call, count, data_type, .. } = *operation;
        Work::Call { call, count, data_type }
    }

    /// Returns `true` if every rank submits the entry.
    fn is_collective(&self) -> bool {
        match self {
            Work::Call { call, .. } => call.collective().is_some(),
            Work::Named { .. } | Work::Destruction => true,
        }
    }

    /// Returns the other rank of a send or receive.
    fn peer(&self) -> Option<u32> {
        match self {
            Work::Call { call, .. } if call.collective().is_none() => call.named_rank(),
            _ => None,
        }
    }

    fn signature(&self) -> Signature {
        match self {
            Work::Call { call, count, data_type } => Signature {
                kind: call.symbol().to_owned(),
                elements: Some(*count as u64),
                data_type: Some(data_type.word()),
                detail: call.detail(),
            },
            Work::Named { kind, elements } => {
                Signature { kind: kind.clone().into_owned(), elements: *elements, data_type: None, detail: None }
            }
            Work::Destruction => {
                let kind = "ncclCommFinalize".to_owned();
                Signature { kind, elements: None, data_type: None, detail: None }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::operation::ReduceOp;

    fn all_reduce(count: usize) -> Work {
        Work::Call { call: NcclCall::AllReduce { op: ReduceOp::Sum }, count, data_type: DataType::Float32 }
    }

    fn send() -> Work {
        Work::Call { call: NcclCall::Send { peer: 1 }, count: 1, data_type: DataType::Uint8 }
    }

    fn states(flight: &FlightRecorder) -> Vec<(u64, CollectiveState)> {
        flight.collectives(Tick::default()).iter().map(|record| (record.number, record.state)).collect()
    }

    #[test]
    fn the_next_collective_gets_the_number_of_a_rejected_one() {
        let (flight, now) = (FlightRecorder::default(), Tick::default());
        let progress = |submitted| Progress { submitted, finished: submitted, is_destroying: false };
        let accepted = flight.begin(all_reduce(1), None, now);
        flight.complete_on_host(accepted, now);
        let rejected = flight.begin(all_reduce(2), None, now);
        flight.rejected(rejected, now);
        assert_eq!(flight.progress(), progress(1));
        let sent = flight.begin(send(), None, now);
        flight.rejected(sent, now);
        assert_eq!(flight.progress(), progress(1), "a send does not count");
        let [first, second] = [(); 2].map(|()| flight.begin(all_reduce(3), None, now));
        assert_eq!(flight.progress().submitted, 3);
        [second, first].into_iter().for_each(|entry| flight.rejected(entry, now));
        assert_eq!(flight.progress().submitted, 1, "a rejected group gives all of its numbers back");
        flight.begin(Work::Destruction, None, now);
        assert_eq!((flight.progress().submitted, flight.progress().is_destroying), (1, true));
    }

    #[test]
    fn work_without_a_stream_completes_with_its_call() {
        let (flight, now) = (FlightRecorder::default(), Tick::default());
        let window = flight.begin(Work::Named { kind: "window_register".into(), elements: None }, None, now);
        assert_eq!(states(&flight), [(1, CollectiveState::Submitting)]);
        assert_eq!(flight.progress(), Progress { submitted: 1, finished: 0, is_destroying: false });
        assert!(flight.unfinished(now).is_some());
        flight.complete_on_host(window, now);
        assert_eq!(states(&flight), [(1, CollectiveState::Finished)]);
        assert_eq!(flight.progress(), Progress { submitted: 1, finished: 1, is_destroying: false });
        assert_eq!(flight.unfinished(now), None);
    }

    #[test]
    fn sends_are_not_numbered() {
        let (flight, now) = (FlightRecorder::default(), Tick::default());
        let first = flight.begin(all_reduce(4), None, now);
        flight.submitted(first, false);
        flight.begin(send(), None, now);
        flight.begin(all_reduce(4), None, now);
        let records = flight.collectives(now);
        assert_eq!(
            records.iter().map(|it| (it.number, it.is_point_to_point)).collect::<Vec<_>>(),
            [(1, false), (1, true), (2, false)]
        );
        assert_eq!(flight.progress(), Progress { submitted: 2, finished: 1, is_destroying: false });
    }

    #[test]
    fn captured_work_is_not_awaited() {
        let (flight, now) = (FlightRecorder::default(), Tick::default());
        let entry = flight.begin(all_reduce(4), None, now);
        flight.submitted(entry, true);
        assert_eq!((states(&flight), flight.unfinished(now)), (vec![(1, CollectiveState::Captured)], None));
        for _ in 0..ENTRIES_MAX {
            let entry = flight.begin(all_reduce(4), None, now);
            flight.submitted(entry, false);
        }
        assert!(!flight.is_off_device(), "the graph may run even if its entry was dropped");
    }

    #[test]
    fn work_whose_call_failed_may_run_and_rejected_work_does_not() {
        for (has_failed, is_off_device) in [(false, true), (true, false)] {
            let (flight, now) = (FlightRecorder::default(), Tick::default());
            let entry = flight.begin(all_reduce(4), None, now);
            if has_failed {
                flight.call_failed(entry, now);
            } else {
                flight.complete_on_host(entry, now);
            }
            assert_eq!(flight.is_off_device(), is_off_device);
            assert!(flight.unfinished(now).is_none(), "nobody waits for it");
        }
    }

    #[test]
    fn only_recent_entries_are_kept_and_all_are_counted() {
        let (flight, now) = (FlightRecorder::default(), Tick::default());
        for _ in 0..ENTRIES_MAX + 10 {
            let entry = flight.begin(all_reduce(4), None, now);
            assert!(flight.submitted(entry, false).is_none(), "without a stream there is nothing to mark");
        }
        let records = flight.collectives(now);
        assert_eq!((records.len(), records[0].number), (ENTRIES_MAX, 11));
        // A dropped entry may still be reported as completed.
        flight.complete_on_host(EntryNumber(3), now);
        assert_eq!(flight.progress(), Progress { submitted: 266, finished: 266, is_destroying: false });
    }
}
