//! The last collectives of a communicator, and how far the device is with them.
//!
//! ```text
//!  submitting thread    one entry per collective: number, call, size, stream; rarely an event behind it
//!  marker thread        now and then an event behind the last entry of each stream, and a question whether it is done
//!  watchdog thread      what is not done, and for how long nothing got on
//! ```
//!
//! An event for each collective would cost more than all the rest (130 ns of the host). One for each stream and tick says as much
//! within the tick.

use super::clock::Tick;
use crate::communicator::operation::{NcclCall, Operation};
use crate::data_type::DataType;
use cudarc::driver::CudaStream;
use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use symmalloc_watchdog::{CollectiveRecord, CollectiveState, Progress, Signature};

/// Collectives that are remembered.
const REMEMBERED: usize = 256;

/// So many entries of a stream after the last mark, the thread that submits makes one itself: a program that runs far ahead of the
/// device is seen to get on all the same.
const MARK_EVERY: u64 = 64;

/// What a program gives to a communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// A collective of NCCL's.
    Call { call: NcclCall, count: usize, data_type: DataType },
    /// Something else that all ranks do together: a registration, a split, what the program announced.
    Named { kind: Cow<'static, str>, elements: Option<u64> },
}

/// The stream of an entry, by the order in which streams were first used with the communicator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct StreamNumber(u32);

/// An entry, counted from 1 over everything that was given to the communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct EntryNumber(u64);

#[derive(Default)]
pub(crate) struct Flight {
    ring: Mutex<Ring>,
}

#[derive(Default)]
struct Ring {
    /// The last ones, oldest first.
    entries: VecDeque<Entry>,
    /// How many there were.
    given: u64,
    /// How many of them all ranks give alike.
    collectives: u64,
    streams: Vec<Followed>,
    /// When something was done last, or nothing was left to do.
    moved: Tick,
    /// Whether a graph has any of it. What is forgotten may be among that.
    has_captured: bool,
}

struct Entry {
    /// The number of the collective; of a send or receive, that of the last one before it.
    number: u64,
    work: Work,
    stream: Option<StreamNumber>,
    given: Tick,
    stage: EntryStage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EntryStage {
    /// The call has not returned.
    Submitting,
    /// In its stream.
    InStream,
    /// In a graph.
    Captured,
    /// Nothing is left of it: it was done on the host, or refused.
    Over,
}

/// A stream that has collectives of the communicator.
struct Followed {
    stream: Arc<CudaStream>,
    /// Its last entry.
    last: EntryNumber,
    /// The last entry with a mark behind it.
    marked: EntryNumber,
    /// All entries up to here are done.
    done: EntryNumber,
    /// The number of the last one of these.
    done_number: u64,
}

/// A stream with entries that have no mark behind them.
pub(crate) struct Unmarked {
    pub(crate) stream: Arc<CudaStream>,
    pub(crate) upto: Marked,
}

/// An entry of a stream with a mark behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Marked {
    stream: StreamNumber,
    entry: EntryNumber,
    /// The number of its collective.
    number: u64,
}

/// What is not done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Undone {
    /// The first of it.
    pub(crate) first: CollectiveRecord,
    /// The number of the last collective that was given.
    pub(crate) last: u64,
    /// The other rank of a send or receive.
    pub(crate) peer: Option<u32>,
    /// Since when nothing got on.
    pub(crate) since: Tick,
}

impl Flight {
    /// Notes work that is about to be given to NCCL.
    pub(crate) fn begin(&self, work: Work, stream: Option<&Arc<CudaStream>>, now: Tick) -> EntryNumber {
        let mut ring = self.lock();
        let stream = stream.map(|stream| ring.number_of(stream));
        if ring.is_idle() {
            ring.moved = now;
        }
        ring.given += 1;
        ring.collectives += u64::from(work.is_collective());
        let entry = Entry { number: ring.collectives, work, stream, given: now, stage: EntryStage::Submitting };
        if ring.entries.len() == REMEMBERED {
            ring.entries.pop_front();
        }
        ring.entries.push_back(entry);
        EntryNumber(ring.given)
    }

    /// It is in its stream, or in a graph. Says where a mark is due.
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

    /// It is done on the host, or was refused: nothing of it is on the device.
    pub(crate) fn over(&self, entry: EntryNumber, now: Tick) {
        let mut ring = self.lock();
        if let Some(at) = ring.place(entry) {
            ring.entries[at].stage = EntryStage::Over;
            ring.moved = now;
        }
    }

    /// Streams with entries that have no mark behind them. They count as marked from here on, until [`lost`](Self::lost).
    pub(crate) fn unmarked(&self) -> Vec<Unmarked> {
        let mut ring = self.lock();
        (0..ring.streams.len()).filter_map(|stream| ring.unmarked(stream)).collect()
    }

    /// The end of what is in a stream, for a thread that waits for it.
    pub(crate) fn end_of(&self, stream: &Arc<CudaStream>) -> Marked {
        let mut ring = self.lock();
        let stream = ring.number_of(stream);
        ring.end_of(stream)
    }

    /// There is no mark behind it after all.
    pub(crate) fn lost(&self, Marked { stream: StreamNumber(stream), .. }: Marked) {
        let mut ring = self.lock();
        let followed = &mut ring.streams[stream as usize];
        followed.marked = followed.done;
    }

    /// The device is past the mark.
    pub(crate) fn done(&self, Marked { stream: StreamNumber(stream), entry, number }: Marked, now: Tick) {
        let mut ring = self.lock();
        let followed = &mut ring.streams[stream as usize];
        if followed.done < entry {
            (followed.done, followed.done_number) = (entry, number);
            ring.moved = now;
        }
    }

    /// Whether nothing of it is known to run on the device: a graph may.
    pub(crate) fn is_off_device(&self) -> bool {
        let ring = self.lock();
        let is_done = |followed: &Followed| followed.done == followed.last;
        !ring.has_captured && ring.streams.iter().all(is_done)
    }

    pub(crate) fn progress(&self) -> Progress {
        let ring = self.lock();
        let first_open = ring.records().find(|(_, state)| is_open(*state)).map(|(entry, _)| entry);
        let finished =
            first_open.map_or(ring.collectives, |entry| entry.number - u64::from(entry.work.is_collective()));
        // What is open and forgotten comes before all that is remembered.
        let forgotten = EntryNumber(ring.given - ring.entries.len() as u64);
        let open = ring.streams.iter().filter(|it| it.done < it.last && it.done < forgotten);
        let finished = open.map(|followed| followed.done_number).fold(finished, u64::min);
        Progress { submitted: ring.collectives, finished }
    }

    /// What is not done; `None` when everything is.
    pub(crate) fn standing(&self, now: Tick) -> Option<Undone> {
        let ring = self.lock();
        let (entry, state) = ring.records().find(|(_, state)| is_open(*state))?;
        let (first, peer) = (entry.record(state, now), entry.work.peer());
        Some(Undone { first, last: ring.collectives, peer, since: ring.moved })
    }

    /// The collective with this number, if it is remembered.
    pub(crate) fn numbered(&self, number: u64, now: Tick) -> Option<CollectiveRecord> {
        let ring = self.lock();
        let (entry, state) = ring.records().find(|(entry, _)| entry.number == number && entry.work.is_collective())?;
        Some(entry.record(state, now))
    }

    /// The last collectives, oldest first.
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
            self.streams.push(Followed { stream, last: none, marked: none, done: none, done_number: 0 });
            self.streams.len() - 1
        });
        StreamNumber(number as u32)
    }

    fn is_idle(&self) -> bool {
        self.entries.back().is_none_or(|entry| entry.stage != EntryStage::Submitting)
            && self.streams.iter().all(|followed| followed.done == followed.last)
    }

    /// What of a stream has no mark behind it. It counts as marked from here on.
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

    /// With how far each is.
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

    /// Whether all ranks give it alike.
    fn is_collective(&self) -> bool {
        match self {
            Work::Call { call, .. } => call.collective().is_some(),
            Work::Named { .. } => true,
        }
    }

    /// The other rank of a send or receive.
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
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data_type::ReduceOp;

    fn all_reduce(count: usize) -> Work {
        Work::Call { call: NcclCall::AllReduce { op: ReduceOp::Sum }, count, data_type: DataType::Float32 }
    }

    fn send() -> Work {
        Work::Call { call: NcclCall::Send { peer: 1 }, count: 1, data_type: DataType::Uint8 }
    }

    fn states(flight: &Flight) -> Vec<(u64, CollectiveState)> {
        flight.collectives(Tick::default()).iter().map(|record| (record.number, record.state)).collect()
    }

    #[test]
    fn what_has_no_stream_is_done_when_the_call_is() {
        let (flight, now) = (Flight::default(), Tick::default());
        let window = flight.begin(Work::Named { kind: "window_register".into(), elements: None }, None, now);
        assert_eq!(states(&flight), [(1, CollectiveState::Submitting)]);
        assert_eq!(flight.progress(), Progress { submitted: 1, finished: 0 });
        assert!(flight.standing(now).is_some());
        flight.over(window, now);
        assert_eq!(states(&flight), [(1, CollectiveState::Finished)]);
        assert_eq!(flight.progress(), Progress { submitted: 1, finished: 1 });
        assert_eq!(flight.standing(now), None);
    }

    #[test]
    fn a_send_has_no_number_of_its_own() {
        let (flight, now) = (Flight::default(), Tick::default());
        let first = flight.begin(all_reduce(4), None, now);
        flight.submitted(first, false);
        flight.begin(send(), None, now);
        flight.begin(all_reduce(4), None, now);
        let records = flight.collectives(now);
        assert_eq!(
            records.iter().map(|it| (it.number, it.is_point_to_point)).collect::<Vec<_>>(),
            [(1, false), (1, true), (2, false)]
        );
        assert_eq!(flight.progress(), Progress { submitted: 2, finished: 1 });
    }

    #[test]
    fn what_is_captured_holds_nobody_up() {
        let (flight, now) = (Flight::default(), Tick::default());
        let entry = flight.begin(all_reduce(4), None, now);
        flight.submitted(entry, true);
        assert_eq!((states(&flight), flight.standing(now)), (vec![(1, CollectiveState::Captured)], None));
        for _ in 0..REMEMBERED {
            let entry = flight.begin(all_reduce(4), None, now);
            flight.submitted(entry, false);
        }
        assert!(!flight.is_off_device(), "the graph may run, remembered or not");
    }

    #[test]
    fn only_the_last_are_remembered_and_all_are_counted() {
        let (flight, now) = (Flight::default(), Tick::default());
        for _ in 0..REMEMBERED + 10 {
            let entry = flight.begin(all_reduce(4), None, now);
            assert!(flight.submitted(entry, false).is_none(), "without a stream there is nothing to mark");
        }
        let records = flight.collectives(now);
        assert_eq!((records.len(), records[0].number), (REMEMBERED, 11));
        // What is forgotten may still be reported as over.
        flight.over(EntryNumber(3), now);
        assert_eq!(flight.progress(), Progress { submitted: 266, finished: 266 });
    }
}
