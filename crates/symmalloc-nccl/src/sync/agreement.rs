//! The message exchange of one sync: usually one collective, more only if ranks differ.
//!
//! ```text
//!   agreement's answer + SyncMessage ──► all-gather ─┬─ all equal ────────────────────────────► execute the actions
//!                                                    ├─ histories differ ─► the agreement's inquiry ─► Disagreed
//!                                                    └─ syncs differ ─► changes, page by page ──► Differ
//! ```
//!
//! All ranks receive the same messages and therefore reach the same result.

use crate::sync::actions::SyncActions;
use crate::sync::error::SyncError;
use crate::sync::groups;
use crate::sync::message::{CHANGES_PER_PAGE, ChangeDifference, ChangePage, SyncDifference, SyncField, SyncMessage};
use symmalloc_agreement::{Exchange, Gathered, ProtocolError, RankHistory, Transport};
use zerocopy::{FromBytes, IntoBytes};

/// The outcome of an exchange in which the ranks agree.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SyncAgreement {
    /// Number of collectives used.
    pub(crate) rounds: u64,
    /// Size of the symmetric space in bytes: the largest size that any rank configured.
    pub(crate) space_bytes: u64,
}

/// Checks that all ranks of a communicator have the same actions and, if histories are compared, the same history.
pub(crate) fn agree_on_sync(
    transport: &impl Transport,
    communicator: &str,
    history: Option<&RankHistory<'_>>,
    actions: &SyncActions,
    own: &SyncMessage,
) -> Result<SyncAgreement, SyncError> {
    let failed = |error| SyncError::of_exchange(communicator, error);
    let differ = |difference| SyncError::Differ { communicator: communicator.to_owned(), difference };

    let exchange = Exchange::begin(transport, history, own.as_bytes()).map_err(failed)?;
    if exchange.is_unanimous() {
        // Equal messages imply equal histories and equal actions.
        return Ok(SyncAgreement { rounds: 1, space_bytes: own.space_bytes() });
    }
    let decode = |(rank, message): (u32, &[u8])| {
        SyncMessage::read_from_bytes(message).map_err(|_| failed(ProtocolError::Garbled { rank }.into()))
    };
    let messages: Vec<SyncMessage> = (0..).zip(exchange.extras()).map(decode).collect::<Result<_, _>>()?;
    let difference = compare(&messages).err();
    if let Some(difference) = difference.as_ref().filter(|difference| difference.field.precludes_agreement()) {
        return Err(differ(difference.clone()));
    }
    let rounds = exchange.finish().map_err(failed)?.rounds;
    if let Some(mut difference) = difference {
        let mut search = ChangeSearch::default();
        while difference.field.is_about_changes() {
            let gathered = transport.all_gather(search.page(actions).as_bytes());
            let gathered = gathered.map_err(|error| failed(error.into()))?;
            match search.advance(&gathered).map_err(|error| failed(error.into()))? {
                Found::Equal => {}
                Found::Difference(found) => {
                    difference.first_change = Some(found);
                    break;
                }
                Found::End => break,
            }
        }
        tracing::error!(
            name: "sync.diverged",
            target: "symmalloc",
            communicator,
            rank = transport.rank(),
            field = %difference.field,
            %difference,
        );
        return Err(differ(difference));
    }
    Ok(SyncAgreement { rounds, space_bytes: messages.iter().map(SyncMessage::space_bytes).max().unwrap_or(0) })
}

/// Compares the syncs of all ranks. Returns the first field that differs.
fn compare(messages: &[SyncMessage]) -> Result<(), Box<SyncDifference>> {
    for field in SyncField::ALL {
        let groups = groups(messages.iter().map(|message| message.field(field)));
        if groups.len() > 1 {
            return Err(Box::new(SyncDifference { field, groups, first_change: None }));
        }
    }
    Ok(())
}

/// A search for the first change that differs, one page of every rank's changes at a time.
#[derive(Debug, Default)]
struct ChangeSearch {
    page: usize,
}

/// The result of comparing one page.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    /// The page is equal on all ranks. More pages follow.
    Equal,
    Difference(ChangeDifference),
    /// The changes of all ranks end here, without a difference.
    End,
}

impl ChangeSearch {
    /// Returns this rank's page.
    fn page(&self, actions: &SyncActions) -> ChangePage {
        ChangePage::new(actions, self.page)
    }

    /// Compares the pages of all ranks and proceeds to the next page.
    fn advance(&mut self, gathered: &Gathered) -> Result<Found, ProtocolError> {
        let decode = |(rank, message): (u32, &[u8])| {
            ChangePage::read_from_bytes(message).map_err(|_| ProtocolError::Garbled { rank })
        };
        let pages: Vec<ChangePage> = (0..).zip(gathered.iter()).map(decode).collect::<Result<_, _>>()?;
        for at in 0..CHANGES_PER_PAGE {
            let groups = groups(pages.iter().map(|page| page.change(at)));
            if groups.len() > 1 {
                return Ok(Found::Difference(ChangeDifference { index: self.page * CHANGES_PER_PAGE + at, groups }));
            }
            if groups.iter().all(|(_, change)| change.is_none()) {
                return Ok(Found::End);
            }
        }
        self.page += 1;
        Ok(Found::Equal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::actions::{ChangeKind, PoolEvents, SyncAction, WindowChange};
    use crate::sync::message::SyncContext;
    use crate::windows::registrations::Registrations;
    use crate::windows::segment::{HeapSegment, SymmetricSegment};
    use crate::windows::table::SegmentTable;
    use std::thread;
    use std::time::Duration;
    use symmalloc_agreement::{Point, ThreadTransport};
    use symmalloc_core::config::{Config, PoolConfig};
    use symmalloc_core::ids::HeapId;
    use symmalloc_core::ids::StreamGroup;
    use symmalloc_core::{PoolId, SegmentId, SharedAllocator, StreamId};
    use symmalloc_sim::SimBackend;

    /// The operations of one of two ranks before the exchange.
    struct Program {
        sizes: &'static [u64],
        /// Set if histories are compared.
        agrees: bool,
        space_bytes: u64,
    }

    fn run(programs: [Program; 2]) -> Vec<Result<SyncAgreement, SyncError>> {
        let ends = ThreadTransport::group(2, Duration::from_secs(60));
        thread::scope(|scope| {
            let threads: Vec<_> = programs
                .into_iter()
                .zip(ends)
                .map(|(program, transport)| {
                    scope.spawn(move || {
                        let pool = PoolConfig::builder()
                            .fixed()
                            .symmetric(true)
                            .build()
                            .expect("the configuration should be valid");
                        let config =
                            Config::builder().default_pool(pool).build().expect("the configuration should be valid");
                        let allocator = SharedAllocator::new(SimBackend::builder().build(), config)
                            .expect("the arguments should be valid");
                        allocator.register_stream().expect("the first stream should be registered");
                        let (observer, _) = allocator.observe(PoolId::DEFAULT).expect("the pool should exist");
                        for size in program.sizes {
                            let _live = allocator
                                .allocate(PoolId::DEFAULT, StreamId(0), *size)
                                .expect("the allocation should fit");
                        }
                        let actions = {
                            let events = PoolEvents { events: allocator.unread(observer).events, leaving: Vec::new() };
                            let (segments, registered) = (SegmentTable::default(), Registrations::default());
                            SyncActions::new(&segments, &registered, &events, &PoolEvents::default(), |_| 0)
                        };
                        let context = SyncContext {
                            mode: 1,
                            compared: program.agrees,
                            offset_checks: false,
                            library: 22809,
                            sync_number: 0,
                            attached: 0,
                            windows: 0,
                            window_bytes: 0,
                            space_bytes: program.space_bytes,
                        };
                        let history = program.agrees.then(|| RankHistory::new(&allocator, Point::Sync));
                        agree_on_sync(
                            &transport,
                            "tp",
                            history.as_ref(),
                            &actions,
                            &SyncMessage::new(&actions, &context),
                        )
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("the thread should not panic")).collect()
        })
    }

    fn program(sizes: &'static [u64], agrees: bool) -> Program {
        Program { sizes, agrees, space_bytes: 1 }
    }

    #[test]
    fn ranks_that_did_the_same_need_one_collective_and_take_the_largest_space() {
        for agrees in [false, true] {
            let outcomes =
                run([Program { space_bytes: 9, ..program(&[1 << 20], agrees) }, program(&[1 << 20], agrees)]);
            for outcome in outcomes {
                let agreed = outcome.expect("they agree");
                assert_eq!((agreed.rounds, agreed.space_bytes), (1, 9));
            }
        }
    }

    #[test]
    fn a_difference_of_histories_is_reported_first() {
        for outcome in run([program(&[1 << 20, 30 << 20], true), program(&[1 << 20, 40 << 20], true)]) {
            let Err(SyncError::Disagreed { disagreement, .. }) = outcome else { panic!("{outcome:?}") };
            assert_eq!(disagreement.first_heap().expect("a heap should differ").first_op, 2);
        }
    }

    #[test]
    fn without_agreement_the_actions_are_still_compared() {
        for outcome in run([program(&[30 << 20, 30 << 20], false), program(&[30 << 20, 40 << 20], false)]) {
            let Err(SyncError::Differ { difference, .. }) = outcome else { panic!("{outcome:?}") };
            assert_eq!(difference.field, SyncField::Changes);
            assert_eq!(difference.first_change.expect("was searched").index, 1);
        }
    }

    #[test]
    fn a_rank_that_compares_alone_is_reported() {
        for outcome in run([program(&[1 << 20], true), program(&[1 << 20], false)]) {
            let Err(SyncError::Differ { difference, .. }) = outcome else { panic!("{outcome:?}") };
            assert_eq!(difference.field, SyncField::Compared);
        }
    }

    const CONTEXT: SyncContext = SyncContext {
        mode: 1,
        compared: true,
        offset_checks: false,
        library: 22809,
        sync_number: 3,
        attached: 7,
        windows: 2,
        window_bytes: 4 << 20,
        space_bytes: 144 << 30,
    };

    /// Returns actions that register this many segments, the one with index `other` with a different size.
    fn actions(segments: u32, other: u32) -> SyncActions {
        let windows = (0..segments)
            .map(|segment| SyncAction {
                change: WindowChange {
                    kind: ChangeKind::Register,
                    segment: SymmetricSegment { pool: 0, group: StreamGroup::All, id: SegmentId(segment) },
                    size_bytes: if segment == other { 1 } else { 2 },
                },
                segment: HeapSegment {
                    heap: HeapId { pool: PoolId::DEFAULT, group: StreamGroup::All },
                    id: SegmentId(segment),
                },
                base: 0,
            })
            .collect();
        SyncActions { windows, ..SyncActions::default() }
    }

    fn search(ranks: &[SyncActions]) -> Option<ChangeDifference> {
        let mut search = ChangeSearch::default();
        loop {
            let pages: Vec<u8> = ranks.iter().flat_map(|actions| search.page(actions).as_bytes().to_vec()).collect();
            match search.advance(&Gathered::new(pages, size_of::<ChangePage>())).expect("whole pages") {
                Found::Equal => {}
                Found::Difference(found) => return Some(found),
                Found::End => return None,
            }
        }
    }

    #[test]
    fn the_space_that_a_rank_configures_may_differ() {
        let one = SyncMessage::new(&actions(3, 9), &CONTEXT);
        let other = SyncMessage::new(&actions(3, 9), &SyncContext { space_bytes: 1, ..CONTEXT });
        assert_eq!(compare(&[one, other]), Ok(()));
    }

    #[test]
    fn the_most_informative_field_is_named_with_its_ranks() {
        let one = SyncMessage::new(&actions(3, 9), &CONTEXT);
        let other = SyncMessage::new(&actions(4, 9), &SyncContext { library: 23007, ..CONTEXT });
        let difference = compare(&[one, one, other]).expect_err("they differ");
        assert_eq!(
            difference.to_string(),
            "the ranks differ in the version of libnccl; ranks 0-1: 22809; rank 2: 23007"
        );
    }

    #[test]
    fn another_version_of_the_protocol_is_reported_first() {
        let own = SyncMessage::new(&actions(1, 9), &CONTEXT);
        let mut other = SyncMessage::new(&actions(4, 9), &SyncContext { mode: 2, ..CONTEXT });
        other.as_mut_bytes()[0] += 1;
        let difference = compare(&[own, other]).expect_err("they differ");
        assert_eq!(difference.field, SyncField::Protocol);
        assert!(difference.field.precludes_agreement());
    }

    #[test]
    fn the_first_change_that_differs_is_found_on_any_page() {
        let found = search(&[actions(100, 999), actions(100, 57), actions(100, 999)]).expect("the ranks should differ");
        assert_eq!(found.index, 57);
        assert_eq!(found.groups.len(), 2);
        let found = search(&[actions(80, 999), actions(81, 999)]).expect("one has more");
        assert_eq!((found.index, found.groups[0].1), (80, None));
        assert_eq!(search(&[actions(80, 999), actions(80, 999)]), None);
    }

    #[test]
    fn a_difference_in_changes_reads_as_a_sentence() {
        let ranks = [actions(1, 9), actions(2, 9)];
        let messages = ranks.each_ref().map(|actions| SyncMessage::new(actions, &CONTEXT));
        let mut difference = compare(&messages).expect_err("they differ");
        assert!(difference.field.is_about_changes());
        difference.first_change = search(&ranks);
        assert_eq!(
            difference.to_string(),
            "the ranks differ in the number of windows to register; rank 0: 1; rank 1: 2; the first difference is change 1; \
             rank 0: nothing; rank 1: register segment 1 of symmetric pool 0 (2 bytes)"
        );
    }
}
