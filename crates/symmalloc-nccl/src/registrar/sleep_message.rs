//! The messages that ranks exchange in a sleep or wake.
//!
//! ```text
//!   Agree    agreement, 64 bytes │ head, 12 words       same length as a sync's, so that a mismatched sync is detected
//!            pages: communicators                       if any rank has another one than that of the exchange
//!   Decide   verdict: success or obstacle, 4 words
//!   Check    of a sleep: failure flag, 1 word;  of a wake: pages: changed windows, lost communicators
//!   page     total number of rows │ 8 rows of 4 words   repeated until all rows of all ranks are sent
//! ```

use crate::registrar::sleep_error::{Obstacle, SleepDifference, SleepField};
use crate::registrar::sync_actions::SegmentName;
use crate::registrar::sync_summary::{SyncSummary, groups};
use std::collections::BTreeMap;
use std::time::Duration;
use symmalloc_agreement::Gathered;
use symmalloc_core::op::Contents;
use symmalloc_core::sleep::Phase;
use symmalloc_core::{SegmentId, StreamId};

/// Distinct from every value that a sync sends in this position.
const PROTOCOL: u64 = 1 << 32 | 1;
/// Number of words of a head, equal to that of a sync's summary.
const HEAD_WORDS: usize = SyncSummary::BYTES / 8;
/// Rows per page.
const PAGE_ROWS: usize = 8;

/// The first message of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    protocol: u64,
    /// See [`SleepField::Call`].
    pub(super) call: u64,
    pub(super) number: u64,
    pub(super) pool: u64,
    pub(super) phase: u64,
    /// Digest of the windows on the communicator of the exchange.
    pub(super) windows: u64,
    /// Number of rows in the pages of communicators.
    pub(super) communicators: u64,
}

pub(super) const WAKE: u64 = 4;

pub(super) fn call_of(contents: Contents) -> u64 {
    match contents {
        Contents::Keep => 1,
        Contents::Drop => 2,
        Contents::Zero => 3,
        // A kind of contents that this version does not know.
        _ => u64::MAX,
    }
}

pub(super) fn word_of(phase: Phase) -> u64 {
    match phase {
        Phase::Awake => 0,
        Phase::Asleep => 1,
        Phase::Failed => 2,
    }
}

impl Head {
    pub(super) fn new(call: u64, number: u64, pool: u64) -> Self {
        Head { protocol: PROTOCOL, call, number, pool, phase: 0, windows: 0, communicators: 0 }
    }

    pub(super) fn write(&self, message: &mut Vec<u8>) {
        let Head { protocol, call, number, pool, phase, windows, communicators } = *self;
        let mut words = [0; HEAD_WORDS];
        words[..7].copy_from_slice(&[protocol, call, number, pool, phase, windows, communicators]);
        write(&words, message);
    }

    pub(super) fn read(bytes: &[u8]) -> Self {
        let mut words = read(bytes);
        let mut next = || words.next().unwrap_or(0);
        Head {
            protocol: next(),
            call: next(),
            number: next(),
            pool: next(),
            phase: next(),
            windows: next(),
            communicators: next(),
        }
    }

    /// Returns the first difference in the fields that must be equal in every call. The phase may differ.
    pub(super) fn compare(heads: &[Head]) -> Option<SleepDifference> {
        type Of = fn(&Head) -> u64;
        let fields: [(SleepField, Of); 5] = [
            (SleepField::Protocol, |head| head.protocol),
            (SleepField::Call, |head| head.call),
            (SleepField::Pool, |head| head.pool),
            (SleepField::Number, |head| head.number),
            (SleepField::Windows, |head| head.windows),
        ];
        fields.into_iter().find_map(|(field, of)| differ(field, heads.iter().map(of)))
    }

    pub(super) fn compare_phases(heads: &[Head]) -> Option<SleepDifference> {
        differ(SleepField::Phase, heads.iter().map(|head| head.phase))
    }
}

/// Groups ranks by their value. Returns `None` if all values are equal.
pub(super) fn differ(field: SleepField, said: impl Iterator<Item = u64>) -> Option<SleepDifference> {
    let groups: Vec<_> = groups(said).into_iter().map(|(value, ranks)| (ranks, value)).collect();
    (groups.len() > 1).then_some(SleepDifference { field, groups })
}

fn write(words: &[u64], message: &mut Vec<u8>) {
    message.extend(words.iter().flat_map(|word| word.to_le_bytes()));
}

fn read(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()))
}

/// A row of a page.
pub(super) type Row = [u64; 4];

/// Sends all rows of this rank to all ranks and returns the rows of every rank, indexed by rank. All ranks must call it at the same point.
/// The number of rows may differ between ranks.
pub(super) fn exchange<E>(
    rows: &[Row],
    mut all_gather: impl FnMut(&[u8]) -> Result<Gathered, E>,
) -> Result<Vec<Vec<Row>>, E> {
    let mut told: Vec<Vec<Row>> = Vec::new();
    let mut page = 0;
    loop {
        let mut message = Vec::new();
        let first = rows.len().min(page * PAGE_ROWS);
        let mut words = [0; 1 + 4 * PAGE_ROWS];
        words[0] = rows.len() as u64;
        for (row, words) in rows[first..].iter().zip(words[1..].chunks_exact_mut(4)) {
            words.copy_from_slice(row);
        }
        write(&words, &mut message);
        let gathered = all_gather(&message)?;
        told.resize(gathered.len(), Vec::new());
        let mut most = 0;
        for (message, told) in gathered.iter().zip(&mut told) {
            let words: Vec<u64> = read(message).collect();
            let count = words.first().copied().unwrap_or(0) as usize;
            most = most.max(count);
            let rows = words.get(1..).unwrap_or_default().chunks_exact(4);
            let wanted = count.saturating_sub(told.len()).min(PAGE_ROWS);
            told.extend(rows.take(wanted).map(|row| [row[0], row[1], row[2], row[3]]));
        }
        page += 1;
        if most <= page * PAGE_ROWS {
            return Ok(told);
        }
    }
}

/// A communicator of the pool, as one rank reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Named {
    pub(super) communicator: u64,
    pub(super) ranks: u32,
    /// `true` if the communicator is usable.
    pub(super) is_ready: bool,
    pub(super) windows: u64,
}

impl Named {
    pub(super) fn row(&self) -> Row {
        [self.communicator, u64::from(self.ranks), u64::from(self.is_ready), self.windows]
    }

    fn of(row: &Row) -> Self {
        Named { communicator: row[0], ranks: row[1] as u32, is_ready: row[2] == 1, windows: row[3] }
    }
}

/// The combined reports of all ranks on one communicator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Known {
    ranks: u32,
    named: u32,
    ready: u32,
}

impl Known {
    /// Returns `true` if all of the communicator's ranks have reported it, as usable or not.
    pub(super) fn is_whole(self) -> bool {
        self.named == self.ranks
    }

    /// Returns `true` if all of the communicator's ranks have reported it as usable.
    pub(super) fn is_ready(self) -> bool {
        self.ready == self.ranks
    }

    /// Returns `true` if all of the communicator's ranks have reported that it ended.
    pub(super) fn is_over(self) -> bool {
        self.is_whole() && self.ready == 0
    }
}

/// Combines the reports of all ranks on all communicators.
pub(super) fn known(told: &[Vec<Row>]) -> BTreeMap<u64, Known> {
    let mut all: BTreeMap<u64, Known> = BTreeMap::new();
    for named in told.iter().flatten().map(Named::of) {
        let known = all.entry(named.communicator).or_default();
        known.ranks = known.ranks.max(named.ranks);
        known.named += 1;
        known.ready += u32::from(named.is_ready);
    }
    all
}

/// Returns the first communicator with missing ranks, or with windows that differ between ranks.
pub(super) fn compare_communicators(told: &[Vec<Row>]) -> Option<SleepDifference> {
    for (communicator, known) in known(told) {
        let find = |rows: &Vec<Row>| rows.iter().map(Named::of).find(|named| named.communicator == communicator);
        let named: Vec<(u32, Named)> = (0..).zip(told).filter_map(|(rank, rows)| Some((rank, find(rows)?))).collect();
        if !known.is_whole() {
            let ranks = named.iter().map(|(rank, _)| *rank).collect();
            return Some(SleepDifference {
                field: SleepField::Communicators,
                groups: vec![(ranks, u64::from(known.ranks))],
            });
        }
        let mut windows: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
        for (rank, named) in named.iter().filter(|(_, named)| named.is_ready) {
            windows.entry(named.windows).or_default().push(*rank);
        }
        if windows.len() > 1 {
            let groups = windows.into_iter().map(|(digest, ranks)| (ranks.into_iter().collect(), digest)).collect();
            return Some(SleepDifference { field: SleepField::Windows, groups });
        }
    }
    None
}

/// Encodes this rank's verdict.
pub(super) fn write_verdict(obstacle: Option<Obstacle>) -> Vec<u8> {
    let code = |code: i32| u64::from(code as u32);
    let words = match obstacle {
        None => [0; 4],
        Some(Obstacle::Capturing) => [1, 0, 0, 0],
        Some(Obstacle::Work { waited }) => [2, waited.as_millis() as u64, 0, 0],
        Some(Obstacle::StepOpen) => [3, 0, 0, 0],
        Some(Obstacle::Busy) => [4, 0, 0, 0],
        Some(Obstacle::Stream { code: of }) => [5, 0, code(of), 0],
        Some(Obstacle::Save { live_bytes, code: of }) => [6, live_bytes, code(of), 0],
        Some(Obstacle::Lost) => [7, 0, 0, 0],
        Some(Obstacle::Memory { needed_bytes, code: of }) => [8, needed_bytes, code(of), 0],
        Some(Obstacle::Limit { needed_bytes, limit_bytes }) => [9, needed_bytes, limit_bytes, 0],
        Some(Obstacle::Load { code: of }) => [10, 0, code(of), 0],
        Some(Obstacle::SymmetricSpace { needed_bytes }) => [11, needed_bytes, 0, 0],
        Some(Obstacle::Retired) => [13, 0, 0, 0],
        Some(Obstacle::Other { number }) => [12, number, 0, 0],
    };
    let mut message = Vec::new();
    write(&words, &mut message);
    message
}

/// Decodes a rank's verdict.
pub(super) fn read_verdict(message: &[u8]) -> Option<Obstacle> {
    let words: Vec<u64> = read(message).collect();
    let [number, first, second, _] = *words.as_slice() else { return Some(Obstacle::Other { number: u64::MAX }) };
    let code = second as u32 as i32;
    Some(match number {
        0 => return None,
        1 => Obstacle::Capturing,
        2 => Obstacle::Work { waited: Duration::from_millis(first) },
        3 => Obstacle::StepOpen,
        4 => Obstacle::Busy,
        5 => Obstacle::Stream { code },
        6 => Obstacle::Save { live_bytes: first, code },
        7 => Obstacle::Lost,
        8 => Obstacle::Memory { needed_bytes: first, code },
        9 => Obstacle::Limit { needed_bytes: first, limit_bytes: second },
        10 => Obstacle::Load { code },
        11 => Obstacle::SymmetricSpace { needed_bytes: first },
        12 => Obstacle::Other { number: first },
        13 => Obstacle::Retired,
        number => Obstacle::Other { number },
    })
}

/// A finding that a rank reports after it has woken the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Finding {
    /// A communicator that has ended.
    Lost { communicator: u64 },
    /// A window whose handle changed.
    Changed { communicator: u64, segment: SegmentName },
}

impl Finding {
    pub(super) fn row(self) -> Row {
        match self {
            Finding::Lost { communicator } => [1, communicator, 0, 0],
            Finding::Changed { communicator, segment: SegmentName { pool, stream, segment } } => {
                let stream = stream.map_or(u32::MAX, |stream| stream.0.into());
                [2, communicator, u64::from(pool) << 32 | u64::from(stream), u64::from(segment.0)]
            }
        }
    }

    pub(super) fn of(row: &Row) -> Option<Self> {
        let [kind, communicator, heap, segment] = *row;
        match kind {
            1 => Some(Finding::Lost { communicator }),
            2 => {
                let stream = u16::try_from(heap as u32).ok().map(StreamId);
                let segment = SegmentName { pool: (heap >> 32) as u32, stream, segment: SegmentId(segment as u32) };
                Some(Finding::Changed { communicator, segment })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;
    use symmalloc_agreement::{ThreadTransport, Transport};

    #[test]
    fn every_rank_hears_every_row_whatever_their_number() {
        for counts in [[0, 0, 0], [1, 0, 8], [9, 3, 17], [16, 16, 16]] {
            let ends = ThreadTransport::group(3, Duration::from_secs(60));
            let rows = |rank: usize| -> Vec<Row> { (0..counts[rank]).map(|row| [rank as u64, row, 0, 7]).collect() };
            let told = thread::scope(|scope| {
                let threads: Vec<_> = ends
                    .into_iter()
                    .enumerate()
                    .map(|(rank, end)| scope.spawn(move || exchange(&rows(rank), |message| end.all_gather(message))))
                    .collect();
                threads
                    .into_iter()
                    .map(|thread| thread.join().expect("the thread does not panic").expect("all ranks arrive"))
                    .collect::<Vec<_>>()
            });
            for told in told {
                assert_eq!(told, [rows(0), rows(1), rows(2)], "{counts:?}");
            }
        }
    }

    #[test]
    fn what_is_said_is_heard() {
        let obstacles = [
            Obstacle::Capturing,
            Obstacle::Work { waited: Duration::from_millis(7) },
            Obstacle::StepOpen,
            Obstacle::Busy,
            Obstacle::Stream { code: -1 },
            Obstacle::Save { live_bytes: 1 << 40, code: 2 },
            Obstacle::Lost,
            Obstacle::Retired,
            Obstacle::Memory { needed_bytes: 9, code: 2 },
            Obstacle::Limit { needed_bytes: 9, limit_bytes: 8 },
            Obstacle::Load { code: 700 },
            Obstacle::SymmetricSpace { needed_bytes: 5 },
        ];
        for obstacle in obstacles {
            assert_eq!(read_verdict(&write_verdict(Some(obstacle))), Some(obstacle));
        }
        assert_eq!(read_verdict(&write_verdict(None)), None);
        let segment = SegmentName { pool: 3, stream: Some(StreamId(2)), segment: SegmentId(7) };
        for segment in [segment, SegmentName { stream: None, ..segment }] {
            let finding = Finding::Changed { communicator: 9, segment };
            assert_eq!(Finding::of(&finding.row()), Some(finding));
        }
        let mut message = Vec::new();
        let head = Head { phase: 2, windows: 5, communicators: 1, ..Head::new(WAKE, 3, 1) };
        head.write(&mut message);
        assert_eq!((message.len(), Head::read(&message)), (SyncSummary::BYTES, head));
    }

    #[test]
    fn a_communicator_whose_ranks_are_not_all_here_is_found() {
        let named = |is_ready, windows| Named { communicator: 5, ranks: 2, is_ready, windows }.row();
        assert_eq!(compare_communicators(&[vec![named(true, 1)], vec![named(true, 1)], vec![]]), None);
        assert_eq!(
            compare_communicators(&[vec![named(true, 1)], vec![named(false, 0)], vec![]]),
            None,
            "it ended on one"
        );
        let missing =
            compare_communicators(&[vec![named(true, 1)], vec![], vec![]]).expect("one of two ranks is missing");
        assert_eq!((missing.field, missing.groups), (SleepField::Communicators, vec![([0].into_iter().collect(), 2)]));
        let other =
            compare_communicators(&[vec![named(true, 1)], vec![], vec![named(true, 2)]]).expect("other windows");
        assert_eq!(other.field, SleepField::Windows);
        let known = known(&[vec![named(false, 0)], vec![named(false, 0)]])[&5];
        assert!(known.is_over() && known.is_whole() && !known.is_ready());
    }
}
