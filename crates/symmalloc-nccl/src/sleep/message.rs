//! The messages that ranks exchange in a sleep or wake. All integers are little-endian.
//!
//! ```text
//!   Agree    agreement's answer, 64 bytes │ AgreeMessage, 104 bytes    as long as a sync's, so that a rank in a sync is detected
//!            pages of CommunicatorRow                                  if a rank has a communicator besides that of the exchange
//!   Decide   VerdictMessage, 32 bytes
//!   Check    of a sleep: failure flag, 8 bytes;  of a wake: pages of FindingRow
//!   page     total number of rows, 8 bytes │ 8 rows of 32 bytes     repeated until all rows of all ranks are sent
//! ```
//!
//! A message from another rank is untrusted, so every bit pattern is a valid struct. The documentation of each number states how unknown
//! values are decoded.

use crate::sleep::error::{Obstacle, SleepDifference, SleepField};
use crate::sync::groups;
use crate::sync::message::{SegmentMessage, SyncMessage, VERSION};
use crate::windows::segment::SymmetricSegment;
use std::time::Duration;
use symmalloc_agreement::{Gathered, ProtocolError};
use symmalloc_core::backend::Reason;
use symmalloc_core::op::Contents;
use symmalloc_core::sleep::Phase;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// [`VERSION`], combined with a number that no sync sends in this position.
const PROTOCOL: u64 = 1 << 32 | VERSION as u64;
/// Rows per page.
const PAGE_ROWS: usize = 8;
/// Maximum number of rows of one rank. No real pool has this many windows. The bound prevents a rank from keeping the others in an
/// exchange that never ends.
const ROWS_MAX: u64 = 1 << 20;

/// The first message of a rank. It is as long as a [`SyncMessage`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct AgreeMessage {
    protocol: U64,
    call: U64,
    number: U64,
    pool: U64,
    phase: U64,
    windows: U64,
    communicators: U64,
    /// 1 if the rank compares histories.
    compared: U64,
    reserved: [U64; 5],
}

const _: () = assert!(size_of::<AgreeMessage>() == SyncMessage::BYTES);

/// The number of a wake in [`SleepField::Call`]. [`call_of`] returns the numbers of sleeps.
pub(super) const WAKE: u64 = 4;
/// Added to the number of a sleep that also suspends the communicators.
pub(super) const SUSPENDING: u64 = 4;

pub(super) fn call_of(contents: Contents) -> u64 {
    match contents {
        Contents::Keep => 1,
        Contents::Drop => 2,
        Contents::Zero => 3,
        // A kind that this version does not know.
        _ => u64::MAX,
    }
}

fn number_of_reason(reason: Reason) -> u64 {
    match reason {
        Reason::OutOfMemory => 1,
        Reason::DeviceLost => 2,
        Reason::BadRange => 3,
        Reason::File => 4,
        Reason::Modified => 5,
        // Includes a reason that this version does not know.
        _ => 0,
    }
}

/// Decodes an unknown number as [`Reason::Refused`].
fn reason_of(number: u64) -> Reason {
    match number {
        1 => Reason::OutOfMemory,
        2 => Reason::DeviceLost,
        3 => Reason::BadRange,
        4 => Reason::File,
        5 => Reason::Modified,
        _ => Reason::Refused,
    }
}

fn number_of(phase: Phase) -> u64 {
    match phase {
        Phase::Awake => 0,
        Phase::Asleep => 1,
        Phase::Held => 2,
    }
}

/// The fields of this rank's [`AgreeMessage`].
#[derive(Clone, Copy, Debug)]
pub(super) struct AgreeFields {
    /// See [`SleepField::Call`].
    pub(super) call: u64,
    /// Number of this sleep or wake on the communicator of the exchange.
    pub(super) number: u64,
    /// Ordinal of the pool among symmetric pools; `None` for a private pool.
    pub(super) pool: Option<u32>,
    /// Phase of the pool on this rank; `None` if the pool was destroyed meanwhile.
    pub(super) phase: Option<Phase>,
    /// Digest of the windows on the communicator of the exchange.
    pub(super) windows: u64,
    /// Number of rows in the pages of communicators.
    pub(super) communicators: usize,
    /// Set if this rank compares histories.
    pub(super) compared: bool,
}

impl AgreeMessage {
    pub(super) fn new(fields: &AgreeFields) -> Self {
        AgreeMessage {
            protocol: PROTOCOL.into(),
            call: fields.call.into(),
            number: fields.number.into(),
            pool: fields.pool.map_or(u64::MAX, u64::from).into(),
            phase: fields.phase.map_or(u64::MAX, number_of).into(),
            windows: fields.windows.into(),
            communicators: (fields.communicators as u64).into(),
            compared: u64::from(fields.compared).into(),
            reserved: [U64::ZERO; 5],
        }
    }

    pub(super) fn is_in(&self, phase: Phase) -> bool {
        self.phase.get() == number_of(phase)
    }

    /// Returns `true` if pages of communicators follow.
    pub(super) fn has_communicators(&self) -> bool {
        self.communicators.get() > 0
    }

    /// Returns the first difference in the fields that must be equal in every call. The phase may differ.
    pub(super) fn compare(messages: &[AgreeMessage]) -> Option<SleepDifference> {
        type Of = fn(&AgreeMessage) -> U64;
        let fields: [(SleepField, Of); 6] = [
            (SleepField::Protocol, |message| message.protocol),
            (SleepField::Call, |message| message.call),
            (SleepField::Pool, |message| message.pool),
            (SleepField::Compared, |message| message.compared),
            (SleepField::Number, |message| message.number),
            (SleepField::Windows, |message| message.windows),
        ];
        fields.into_iter().find_map(|(field, of)| differ(field, messages.iter().map(|message| of(message).get())))
    }

    pub(super) fn compare_phases(messages: &[AgreeMessage]) -> Option<SleepDifference> {
        differ(SleepField::Phase, messages.iter().map(|message| message.phase.get()))
    }
}

/// Groups ranks by their value. Returns `None` if all values are equal.
fn differ(field: SleepField, values: impl Iterator<Item = u64>) -> Option<SleepDifference> {
    let groups = groups(values);
    (groups.len() > 1).then_some(SleepDifference { field, groups })
}

/// A row of a page.
pub(super) trait Row: FromBytes + IntoBytes + Immutable + KnownLayout + Unaligned + Copy {}

/// A page of one rank's rows.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Page<R> {
    /// Number of rows on all pages of this rank.
    total: U64,
    rows: [R; PAGE_ROWS],
}

/// An error of [`exchange`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExchangeError<E> {
    Transport(E),
    Protocol(ProtocolError),
}

/// Sends all rows of this rank to all ranks and returns the rows of every rank, indexed by rank. All ranks must call it at the same point.
/// The number of rows may differ between ranks.
pub(super) fn exchange<R: Row, E>(
    rows: &[R],
    mut all_gather: impl FnMut(&[u8]) -> Result<Gathered, E>,
) -> Result<Vec<Vec<R>>, ExchangeError<E>> {
    let mut received: Vec<Vec<R>> = Vec::new();
    let mut pages = 0;
    loop {
        let mut own = rows.iter().skip(pages * PAGE_ROWS);
        let page: Page<R> = Page {
            total: (rows.len() as u64).into(),
            rows: std::array::from_fn(|_| own.next().copied().unwrap_or_else(R::new_zeroed)),
        };
        let gathered = all_gather(page.as_bytes()).map_err(ExchangeError::Transport)?;
        received.resize(gathered.len(), Vec::new());
        let mut longest = 0;
        for ((rank, message), received) in (0..).zip(gathered.iter()).zip(&mut received) {
            let garbled = ExchangeError::Protocol(ProtocolError::Garbled { rank });
            let page = Page::<R>::read_from_bytes(message).ok().filter(|page| page.total.get() <= ROWS_MAX);
            let page = page.ok_or(garbled)?;
            let total = page.total.get() as usize;
            longest = longest.max(total);
            received.extend(page.rows.iter().take(total.saturating_sub(received.len())));
        }
        pages += 1;
        if longest <= pages * PAGE_ROWS {
            return Ok(received);
        }
    }
}

/// One rank's report on a communicator of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct CommunicatorRow {
    communicator: U64,
    ranks: U64,
    /// 1 if the communicator is usable.
    ready: U64,
    windows: U64,
}

impl Row for CommunicatorRow {}

impl CommunicatorRow {
    /// Creates the report on a communicator. `windows` is the digest of its windows if the communicator is usable, and `None` if it has
    /// ended.
    pub(super) fn new(communicator: u64, ranks: u32, windows: Option<u64>) -> Self {
        CommunicatorRow {
            communicator: communicator.into(),
            ranks: u64::from(ranks).into(),
            ready: u64::from(windows.is_some()).into(),
            windows: windows.unwrap_or(0).into(),
        }
    }

    pub(super) fn communicator(&self) -> u64 {
        self.communicator.get()
    }

    pub(super) fn ranks(&self) -> u32 {
        self.ranks.get() as u32
    }

    pub(super) fn is_ready(&self) -> bool {
        self.ready.get() == 1
    }

    pub(super) fn windows(&self) -> u64 {
        self.windows.get()
    }
}

/// A rank's verdict: success, or an obstacle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct VerdictMessage {
    /// 0 for success. An unknown number is decoded as [`Obstacle::Other`].
    number: U64,
    first: U64,
    second: U64,
    third: U64,
}

impl VerdictMessage {
    pub(super) fn new(obstacle: Option<Obstacle>) -> Self {
        let code = |code: i32| u64::from(code as u32);
        let third = match obstacle {
            Some(Obstacle::Save { reason, .. } | Obstacle::Load { reason, .. }) => number_of_reason(reason),
            _ => 0,
        };
        let (number, first, second): (u64, u64, u64) = match obstacle {
            None => (0, 0, 0),
            Some(Obstacle::Capturing) => (1, 0, 0),
            Some(Obstacle::Work { waited }) => (2, waited.as_millis() as u64, 0),
            Some(Obstacle::StepOpen) => (3, 0, 0),
            Some(Obstacle::Busy) => (4, 0, 0),
            Some(Obstacle::Stream { code: of }) => (5, 0, code(of)),
            Some(Obstacle::Save { live_bytes, code: of, .. }) => (6, live_bytes, code(of)),
            Some(Obstacle::Lost) => (7, 0, 0),
            Some(Obstacle::Memory { needed_bytes, code: of }) => (8, needed_bytes, code(of)),
            Some(Obstacle::Limit { needed_bytes, limit_bytes }) => (9, needed_bytes, limit_bytes),
            Some(Obstacle::Load { code: of, .. }) => (10, 0, code(of)),
            Some(Obstacle::SymmetricSpace { needed_bytes }) => (11, needed_bytes, 0),
            Some(Obstacle::Other { number }) => (12, number, 0),
            Some(Obstacle::Retired) => (13, 0, 0),
            Some(Obstacle::NoSuspension) => (14, 0, 0),
            Some(Obstacle::WindowsOfOtherPools) => (15, 0, 0),
            Some(Obstacle::Held) => (16, 0, 0),
        };
        VerdictMessage { number: number.into(), first: first.into(), second: second.into(), third: third.into() }
    }

    pub(super) fn obstacle(&self) -> Option<Obstacle> {
        let (first, second) = (self.first.get(), self.second.get());
        let code = second as u32 as i32;
        let reason = reason_of(self.third.get());
        Some(match self.number.get() {
            0 => return None,
            1 => Obstacle::Capturing,
            2 => Obstacle::Work { waited: Duration::from_millis(first) },
            3 => Obstacle::StepOpen,
            4 => Obstacle::Busy,
            5 => Obstacle::Stream { code },
            6 => Obstacle::Save { live_bytes: first, reason, code },
            7 => Obstacle::Lost,
            8 => Obstacle::Memory { needed_bytes: first, code },
            9 => Obstacle::Limit { needed_bytes: first, limit_bytes: second },
            10 => Obstacle::Load { reason, code },
            11 => Obstacle::SymmetricSpace { needed_bytes: first },
            12 => Obstacle::Other { number: first },
            13 => Obstacle::Retired,
            14 => Obstacle::NoSuspension,
            15 => Obstacle::WindowsOfOtherPools,
            16 => Obstacle::Held,
            number => Obstacle::Other { number },
        })
    }
}

/// A finding that a rank reports once its pool is awake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Finding {
    /// A communicator that has ended.
    Lost { communicator: u64 },
    /// A window whose handle changed.
    Changed { communicator: u64, segment: SymmetricSegment },
}

/// The message of a [`Finding`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct FindingRow {
    communicator: U64,
    segment: SegmentMessage,
    /// 1: lost, 2: changed.
    kind: U32,
    reserved: U64,
}

impl Row for FindingRow {}

impl From<Finding> for FindingRow {
    fn from(finding: Finding) -> Self {
        let none = FindingRow::new_zeroed();
        match finding {
            Finding::Lost { communicator } => FindingRow { communicator: communicator.into(), kind: 1.into(), ..none },
            Finding::Changed { communicator, segment } => {
                FindingRow { communicator: communicator.into(), segment: segment.into(), kind: 2.into(), ..none }
            }
        }
    }
}

impl FindingRow {
    /// Returns the finding, or `None` for an unknown kind.
    pub(super) fn decode(&self) -> Option<Finding> {
        let communicator = self.communicator.get();
        match self.kind.get() {
            1 => Some(Finding::Lost { communicator }),
            2 => Some(Finding::Changed { communicator, segment: self.segment.into() }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;
    use symmalloc_agreement::{ThreadTransport, Transport};
    use symmalloc_core::ids::StreamGroup;
    use symmalloc_core::{SegmentId, StreamId};
    use zerocopy::transmute;

    #[test]
    fn messages_have_the_documented_layout() {
        assert_eq!(size_of::<VerdictMessage>(), 32);
        assert_eq!((size_of::<CommunicatorRow>(), size_of::<FindingRow>()), (32, 32));
        assert_eq!(size_of::<Page<FindingRow>>(), 8 + 8 * 32);
        let fields = AgreeFields {
            call: WAKE,
            number: 3,
            pool: Some(1),
            phase: Some(Phase::Held),
            windows: 5,
            communicators: 6,
            compared: true,
        };
        let words: [[u8; 8]; 13] = transmute!(AgreeMessage::new(&fields));
        assert_eq!(words.map(u64::from_le_bytes), [PROTOCOL, 4, 3, 1, 2, 5, 6, 1, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn every_rank_receives_every_row_for_any_number_of_rows() {
        for counts in [[0, 0, 0], [1, 0, 8], [9, 3, 17], [16, 16, 16]] {
            let ends = ThreadTransport::group(3, Duration::from_secs(60));
            let rows = |rank: usize| -> Vec<CommunicatorRow> {
                (0..counts[rank]).map(|row| CommunicatorRow::new(row, rank as u32, Some(7))).collect()
            };
            let received = thread::scope(|scope| {
                let threads: Vec<_> = ends
                    .into_iter()
                    .enumerate()
                    .map(|(rank, end)| scope.spawn(move || exchange(&rows(rank), |message| end.all_gather(message))))
                    .collect();
                threads
                    .into_iter()
                    .map(|thread| thread.join().expect("the thread should not panic").expect("all ranks should arrive"))
                    .collect::<Vec<_>>()
            });
            for received in received {
                assert_eq!(received, [rows(0), rows(1), rows(2)], "{counts:?}");
            }
        }
    }

    #[test]
    fn a_page_of_another_length_is_an_error() {
        let outcome = exchange::<FindingRow, ()>(&[], |_| Ok(Gathered::new(vec![0; 16], 16)));
        assert_eq!(outcome, Err(ExchangeError::Protocol(ProtocolError::Garbled { rank: 0 })));
    }

    #[test]
    fn a_number_of_rows_that_no_rank_has_is_an_error() {
        let page = Page { total: u64::MAX.into(), rows: [FindingRow::new_zeroed(); PAGE_ROWS] };
        let endless = exchange::<FindingRow, ()>(&[], |_| Ok(Gathered::new(page.as_bytes(), size_of_val(&page))));
        assert_eq!(endless, Err(ExchangeError::Protocol(ProtocolError::Garbled { rank: 0 })));
    }

    #[test]
    fn decoding_a_verdict_inverts_encoding_it() {
        let obstacles = [
            Obstacle::Capturing,
            Obstacle::Work { waited: Duration::from_millis(7) },
            Obstacle::StepOpen,
            Obstacle::Busy,
            Obstacle::Stream { code: -1 },
            Obstacle::Save { live_bytes: 1 << 40, reason: Reason::OutOfMemory, code: 2 },
            Obstacle::Save { live_bytes: 1, reason: Reason::File, code: 28 },
            Obstacle::Lost,
            Obstacle::Held,
            Obstacle::Retired,
            Obstacle::Memory { needed_bytes: 9, code: 2 },
            Obstacle::Limit { needed_bytes: 9, limit_bytes: 8 },
            Obstacle::Load { reason: Reason::DeviceLost, code: 700 },
            Obstacle::Load { reason: Reason::BadRange, code: 0 },
            Obstacle::Load { reason: Reason::Refused, code: 1 },
            Obstacle::Load { reason: Reason::Modified, code: 0 },
            Obstacle::NoSuspension,
            Obstacle::WindowsOfOtherPools,
            Obstacle::SymmetricSpace { needed_bytes: 5 },
            Obstacle::Other { number: 4 },
        ];
        for obstacle in obstacles {
            assert_eq!(VerdictMessage::new(Some(obstacle)).obstacle(), Some(obstacle));
        }
        assert_eq!(VerdictMessage::new(None).obstacle(), None);
        let unknown: VerdictMessage = transmute!([U64::new(99), U64::ZERO, U64::ZERO, U64::ZERO]);
        assert_eq!(unknown.obstacle(), Some(Obstacle::Other { number: 99 }));
    }

    #[test]
    fn decoding_a_finding_inverts_encoding_it() {
        let segment = SymmetricSegment { pool: 3, group: StreamGroup::One(StreamId(2)), id: SegmentId(7) };
        let findings = [
            Finding::Lost { communicator: 9 },
            Finding::Changed { communicator: 9, segment },
            Finding::Changed { communicator: 9, segment: SymmetricSegment { group: StreamGroup::All, ..segment } },
        ];
        for finding in findings {
            assert_eq!(FindingRow::from(finding).decode(), Some(finding));
        }
        assert_eq!(FindingRow::new_zeroed().decode(), None);
    }
}
