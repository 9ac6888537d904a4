//! The last collectives of a communicator, and the progress of the device in them.
//!
//! ```text
//!  submitting thread    one entry per collective: number, call, size, stream; occasionally a mark after it
//!  marker thread        periodically a mark after the last entry of each stream, which it polls
//!  watchdog thread      unfinished work, and the time without progress
//! ```
//!
//! A mark is an event of the driver. The code that calls the driver records the mark in the [`Unmarked`] stream, and calls
//! [`done`](FlightRecorder::done) once the device has passed the mark. A mark after every collective would cost 130 ns of host time, more
//! than the rest of the recording. One mark per stream and tick gives the same information with the resolution of a tick.

use crate::flight_record::{CollectiveRecord, CollectiveState};
use crate::ids::Progress;
use crate::watching::clock::Tick;
use crate::watching::work::Work;
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Number of collectives kept.
const ENTRIES_MAX: usize = 256;

/// After this many entries of a stream since the last mark, the submitting thread records a mark itself, so that
/// progress is visible even in a program that runs far ahead of the device.
const MARK_EVERY: u64 = 64;

/// The progress of a communicator and its last collectives, as the watchdog reads them.
pub trait Flight: Send + Sync {
    /// Returns this rank's progress.
    fn progress(&self) -> Progress;

    /// Returns the unfinished work, or `None` if everything has completed.
    fn unfinished(&self, now: Tick) -> Option<UnfinishedWork>;

    /// Returns the collective with this number, if it is still kept.
    fn find_collective(&self, number: u64, now: Tick) -> Option<CollectiveRecord>;

    /// Returns the last collectives, oldest first.
    fn collectives(&self, now: Tick) -> Vec<CollectiveRecord>;

    /// Returns `true` if no work can be running on the device. Returns `false` once work was captured in a graph or a call failed, because
    /// work may then run unnoticed.
    fn is_off_device(&self) -> bool;
}

/// A stream of the device, with a number that identifies it as long as it exists.
#[derive(Clone, Copy, Debug)]
pub struct StreamRef<'a, S> {
    /// The number that identifies the stream while it exists.
    pub key: u64,
    /// The stream. The recorder keeps a clone, so that no other stream gets its number.
    pub stream: &'a S,
}

/// The number of an entry's stream. Streams are numbered in the order of their first use with the communicator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct StreamNumber(u32);

/// The number of an entry, counted from 1 over everything submitted to the communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EntryNumber(u64);

/// The recorder of a communicator's last collectives. `S` is the type of the stream handles.
pub struct FlightRecorder<S> {
    ring: Mutex<Ring<S>>,
}

struct Ring<S> {
    /// The last entries, oldest first.
    entries: VecDeque<Entry>,
    /// Total number of entries, including dropped ones.
    given: u64,
    /// Number of entries that are collectives, which every rank submits.
    collectives: u64,
    is_destroying: bool,
    streams: Vec<StreamProgress<S>>,
    /// The last time at which work completed, or at which work was submitted while none was pending.
    moved: Tick,
    /// `true` if a graph contains entries, possibly including dropped ones.
    has_captured: bool,
    /// `true` once a call has failed that may have submitted work before the failure.
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
struct StreamProgress<S> {
    key: u64,
    stream: S,
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
#[derive(Clone, Copy, Debug)]
pub struct Unmarked<S> {
    /// The stream in which to record the mark.
    pub stream: S,
    /// Its last entry.
    pub upto: Marked,
}

/// The last entry of a stream before a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marked {
    stream: StreamNumber,
    entry: EntryNumber,
    /// The number of the entry's collective.
    number: u64,
}

/// The unfinished work of a communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnfinishedWork {
    /// The first unfinished collective.
    pub first: CollectiveRecord,
    /// The number of the last submitted collective.
    pub last: u64,
    /// The other rank of a send or receive; `None` for a collective.
    pub peer: Option<u32>,
    /// `true` if the first unfinished work is the communicator's destruction.
    pub is_destruction: bool,
    /// Time of the last progress.
    pub since: Tick,
}

impl<S: Clone> FlightRecorder<S> {
    /// Records work that is about to be submitted to NCCL.
    pub fn begin(&self, work: Work, stream: Option<StreamRef<'_, S>>, now: Tick) -> EntryNumber {
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
    pub fn submitted(&self, entry: EntryNumber, is_captured: bool) -> Option<Unmarked<S>> {
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
    pub fn complete_on_host(&self, entry: EntryNumber, now: Tick) {
        let mut ring = self.lock();
        if let Some(at) = ring.place(entry) {
            ring.entries[at].stage = EntryStage::Over;
            ring.moved = now;
        }
    }

    /// Records that the call of an entry was rejected and had no effect. If no later collective exists, the next collective gets the number
    /// of the entry, as on the other ranks.
    pub fn rejected(&self, entry: EntryNumber, now: Tick) {
        self.complete_on_host(entry, now);
        let mut ring = self.lock();
        if let Some(at) = ring.place(entry)
            && ring.entries[at].work.is_collective()
            && ring.entries[at].number == ring.collectives
        {
            ring.collectives -= 1;
        }
    }

    /// Records that the call of an entry failed. NCCL may have submitted a part of the work before the failure.
    pub fn call_failed(&self, entry: EntryNumber, now: Tick) {
        self.lock().has_failed_call = true;
        self.complete_on_host(entry, now);
    }

    /// Returns the streams with entries that no mark follows. From then on, the entries count as marked, unless
    /// [`mark_failed`](Self::mark_failed) is called.
    pub fn unmarked(&self) -> Vec<Unmarked<S>> {
        let mut ring = self.lock();
        (0..ring.streams.len()).filter_map(|stream| ring.unmarked(stream)).collect()
    }

    /// Returns the last entry of a stream, for a thread that waits for it.
    pub fn end_of(&self, stream: StreamRef<'_, S>) -> Marked {
        let mut ring = self.lock();
        let stream = ring.number_of(stream);
        ring.end_of(stream)
    }

    /// Records that a mark could not be recorded. The stream's unfinished entries count as unmarked again.
    pub fn mark_failed(&self, Marked { stream: StreamNumber(stream), .. }: Marked) {
        let mut ring = self.lock();
        let followed = &mut ring.streams[stream as usize];
        followed.marked = followed.done;
    }

    /// Records that the device has passed a mark.
    pub fn done(&self, Marked { stream: StreamNumber(stream), entry, number }: Marked, now: Tick) {
        let mut ring = self.lock();
        let followed = &mut ring.streams[stream as usize];
        if followed.done < entry {
            (followed.done, followed.done_number) = (entry, number);
            ring.moved = now;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Ring<S>> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: Clone + Send> Flight for FlightRecorder<S> {
    fn progress(&self) -> Progress {
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

    fn unfinished(&self, now: Tick) -> Option<UnfinishedWork> {
        let ring = self.lock();
        let (entry, state) = ring.records().find(|(_, state)| is_open(*state))?;
        let (first, peer) = (entry.record(state, now), entry.work.peer());
        let is_destruction = entry.work == Work::Destruction;
        Some(UnfinishedWork { first, last: ring.collectives, peer, is_destruction, since: ring.moved })
    }

    fn find_collective(&self, number: u64, now: Tick) -> Option<CollectiveRecord> {
        let ring = self.lock();
        // A rejected call may have the same number as the collective after it, so take the last entry.
        let is_it = |(entry, _): &(&Entry, CollectiveState)| entry.number == number && entry.work.is_collective();
        let (entry, state) = ring.records().filter(is_it).last()?;
        Some(entry.record(state, now))
    }

    fn collectives(&self, now: Tick) -> Vec<CollectiveRecord> {
        self.lock().records().map(|(entry, state)| entry.record(state, now)).collect()
    }

    fn is_off_device(&self) -> bool {
        let ring = self.lock();
        let is_done = |followed: &StreamProgress<S>| followed.done == followed.last;
        !ring.has_captured && !ring.has_failed_call && ring.streams.iter().all(is_done)
    }
}

impl<S> Default for FlightRecorder<S> {
    fn default() -> Self {
        FlightRecorder {
            ring: Mutex::new(Ring {
                entries: VecDeque::new(),
                given: 0,
                collectives: 0,
                is_destroying: false,
                streams: Vec::new(),
                moved: Tick::default(),
                has_captured: false,
                has_failed_call: false,
            }),
        }
    }
}

impl<S> fmt::Debug for FlightRecorder<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FlightRecorder").finish_non_exhaustive()
    }
}

fn is_open(state: CollectiveState) -> bool {
    !matches!(state, CollectiveState::Finished | CollectiveState::Captured)
}

impl<S: Clone> Ring<S> {
    fn place(&self, EntryNumber(entry): EntryNumber) -> Option<usize> {
        let age = self.given.checked_sub(entry)? as usize;
        self.entries.len().checked_sub(age + 1)
    }

    fn number_of(&mut self, StreamRef { key, stream }: StreamRef<'_, S>) -> StreamNumber {
        let known = self.streams.iter().position(|followed| followed.key == key);
        let number = known.unwrap_or_else(|| {
            let none = EntryNumber(0);
            let stream = stream.clone();
            self.streams.push(StreamProgress { key, stream, last: none, marked: none, done: none, done_number: 0 });
            self.streams.len() - 1
        });
        StreamNumber(number as u32)
    }

    fn is_idle(&self) -> bool {
        self.entries.back().is_none_or(|entry| entry.stage != EntryStage::Submitting)
            && self.streams.iter().all(|followed| followed.done == followed.last)
    }

    /// Returns the last entry of a stream, if no mark follows it. From then on, the stream's entries count as marked.
    fn unmarked(&mut self, at: usize) -> Option<Unmarked<S>> {
        let followed = &mut self.streams[at];
        if followed.marked >= followed.last {
            return None;
        }
        followed.marked = followed.last;
        let stream = followed.stream.clone();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watching::work::{Call, NamedRank};

    /// A recorder for streams that are numbers.
    type FlightRecorder = super::FlightRecorder<u64>;

    fn all_reduce(count: u64) -> Work {
        let call = Call { symbol: "ncclAllReduce", count, data_type: "float32", reduction: Some("sum"), rank: None };
        Work::Call(call)
    }

    fn send() -> Work {
        let rank = Some(NamedRank::To(1));
        Work::Call(Call { symbol: "ncclSend", count: 1, data_type: "uint8", reduction: None, rank })
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
