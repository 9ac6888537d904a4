//! The message exchange of one sync. It takes one collective, or more if ranks differ.
//!
//! ```text
//!   agreement's answer + plan's summary ──► all-gather ─┬─ all equal ─────────────────────────► carry the plan out
//!                                                       ├─ histories differ ─► the core's inquiry ─► Disagreed
//!                                                       └─ plans differ ─► steps, page by page ─► PlansDiffer
//! ```
//!
//! All ranks see the same messages and therefore reach the same result.

use crate::registrar::error::SyncError;
use crate::registrar::sync_actions::SyncActions;
use crate::registrar::sync_summary::{StepSearch, SyncSummary, compare};
use symmalloc_agreement::{Gathered, Inquiry, Progress, ProtocolError, RankHistory, Transport};

/// The outcome of an exchange in which the ranks agree.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SyncAgreement {
    /// Number of collectives used.
    pub(crate) rounds: u64,
    /// Size of the symmetric space in bytes: the largest of all ranks.
    pub(crate) space_bytes: u64,
}

/// Checks that all ranks of a communicator have the same plan and, if histories are compared, the same history.
pub(crate) fn agree_on_sync(
    transport: &impl Transport,
    communicator: &str,
    history: Option<&RankHistory<'_>>,
    plan: &SyncActions,
    summary: &SyncSummary,
) -> Result<SyncAgreement, SyncError> {
    let communicator = || communicator.to_owned();
    let lost = |error| SyncError::Transport { communicator: communicator(), error };
    let nonsense = |error| SyncError::Protocol { communicator: communicator(), error };
    let differ = |difference| SyncError::PlansDiffer { communicator: communicator(), difference };

    let mut inquiry = Inquiry::new(transport.ranks());
    let answer_bytes = inquiry.question().message_bytes();
    let mut message = Vec::with_capacity(answer_bytes + SyncSummary::BYTES);
    match history {
        Some(history) => history.answer(inquiry.question(), &mut message),
        None => message.resize(answer_bytes, 0),
    }
    summary.write(&mut message);
    let gathered = transport.all_gather(&message).map_err(lost)?;
    let (messages, message_bytes, ranks) = (gathered.len(), gathered.message_bytes(), transport.ranks());
    if messages != ranks as usize || message_bytes != message.len() {
        return Err(nonsense(ProtocolError::WrongShape { messages, message_bytes, ranks }));
    }
    if gathered.iter().all(|other| other == message) {
        // Equal messages imply equal histories and equal plans.
        return Ok(SyncAgreement { rounds: 1, space_bytes: summary.space_bytes });
    }
    let summaries: Vec<SyncSummary> =
        gathered.iter().map(|message| SyncSummary::read(&message[answer_bytes..])).collect();
    let difference = compare(&summaries).err();
    if let Some(difference) = difference.as_ref().filter(|difference| difference.precludes_agreement()) {
        return Err(differ(difference.clone()));
    }
    let mut rounds = 1;
    if let Some(history) = history {
        let answers: Vec<u8> = gathered.iter().flat_map(|message| &message[..answer_bytes]).copied().collect();
        let mut gathered = Gathered::new(answers, answer_bytes);
        while let Progress::Asked = match inquiry.advance(&gathered).map_err(nonsense)? {
            Progress::Disagreed(disagreement) => {
                disagreement.tell(transport.rank());
                return Err(SyncError::Disagreed { communicator: communicator(), disagreement });
            }
            progress => progress,
        } {
            message.clear();
            history.answer(inquiry.question(), &mut message);
            gathered = transport.all_gather(&message).map_err(lost)?;
            rounds += 1;
        }
    }
    if let Some(mut difference) = difference {
        if difference.is_about_steps() {
            let mut search = StepSearch::default();
            loop {
                message.clear();
                search.write(plan, &mut message);
                let gathered = transport.all_gather(&message).map_err(lost)?;
                match search.advance(&gathered) {
                    Ok(None) => {}
                    Ok(found) => break difference.first_step = found,
                    Err(()) => break,
                }
            }
        }
        tracing::error!(
            name: "plans.diverged",
            target: "symmalloc",
            communicator = communicator(),
            rank = transport.rank(),
            field = %difference.field,
            %difference,
        );
        return Err(differ(difference));
    }
    Ok(SyncAgreement { rounds, space_bytes: summaries.iter().map(|summary| summary.space_bytes).max().unwrap_or(0) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registrar::sync_actions::SegmentTable;
    use crate::registrar::sync_summary::{PlanField, SyncContext};
    use std::thread;
    use std::time::Duration;
    use symmalloc_agreement::{Point, ThreadTransport};
    use symmalloc_core::config::{Config, PoolConfig};
    use symmalloc_core::{PoolId, SharedAllocator, StreamId};
    use symmalloc_sim::SimBackend;

    /// The operations that one of two ranks performs before the exchange.
    struct Program {
        sizes: &'static [u64],
        /// `true` if histories are compared.
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
                        let pool = PoolConfig::builder().fixed().symmetric(true).build().expect("valid");
                        let config = Config::builder().default_pool(pool).build().expect("valid");
                        let allocator =
                            SharedAllocator::with_lock(SimBackend::builder().build(), config).expect("valid");
                        allocator.register_stream().expect("stream ids are available");
                        let (observer, _) = allocator.observe(PoolId::DEFAULT).expect("the pool exists");
                        for size in program.sizes {
                            allocator.allocate(PoolId::DEFAULT, StreamId(0), *size).expect("the allocation fits");
                        }
                        let plan =
                            SyncActions::new(&SegmentTable::new(), &allocator.unread(observer).events, &[], |_| 0);
                        let context = SyncContext {
                            mode: program.agrees.into(),
                            offset_checks: false,
                            library: 22809,
                            sync_number: 0,
                            attached: 0,
                            windows: 0,
                            window_bytes: 0,
                            space_bytes: program.space_bytes,
                        };
                        let history = program.agrees.then(|| RankHistory::new(&allocator, Point::Sync));
                        agree_on_sync(&transport, "tp", history.as_ref(), &plan, &SyncSummary::new(&plan, &context))
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("the thread does not panic")).collect()
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
                let agreed = outcome.expect("the ranks agree");
                assert_eq!((agreed.rounds, agreed.space_bytes), (1, 9));
            }
        }
    }

    #[test]
    fn the_cores_report_comes_first() {
        for outcome in run([program(&[1 << 20, 30 << 20], true), program(&[1 << 20, 40 << 20], true)]) {
            let Err(SyncError::Disagreed { disagreement, .. }) = outcome else { panic!("{outcome:?}") };
            assert_eq!(disagreement.first_heap().expect("a heap differs").first_op, 2);
        }
    }

    #[test]
    fn without_agreement_the_plans_are_compared_all_the_same() {
        for outcome in run([program(&[30 << 20, 30 << 20], false), program(&[30 << 20, 40 << 20], false)]) {
            let Err(SyncError::PlansDiffer { difference, .. }) = outcome else { panic!("{outcome:?}") };
            assert_eq!(difference.field, PlanField::Steps);
            assert_eq!(difference.first_step.expect("the steps were compared").step, 1);
        }
    }

    #[test]
    fn ranks_with_other_modes_are_told_so() {
        for outcome in run([program(&[1 << 20], true), program(&[1 << 20], false)]) {
            let Err(SyncError::PlansDiffer { difference, .. }) = outcome else { panic!("{outcome:?}") };
            assert_eq!(difference.field, PlanField::Mode);
        }
    }
}
