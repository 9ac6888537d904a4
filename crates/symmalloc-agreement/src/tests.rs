//! Tests of the protocol with ranks that send wrong answers, forget their history or send garbage.

use super::message::HEAPS_PER_PAGE;
use super::question::Ask;
use super::*;
use proptest::prelude::*;
use symmalloc_core::Allocator;
use symmalloc_core::config::{Config, PoolConfig, StreamPolicy};
use symmalloc_core::histories::HistorySource;
use symmalloc_core::ids::{PoolId, StreamId};
use symmalloc_sim::{SimBackend, SplitMix64};

#[test]
fn a_limit_that_one_rank_changed_is_a_difference_of_configurations() {
    let ranks = [0, 1].map(|rank| {
        let pool = PoolConfig::builder().symmetric(true).build().expect("the configuration should be valid");
        let config = Config::builder()
            .default_pool(pool)
            .total_limit_bytes(Some(64 << 20))
            .build()
            .expect("the configuration should be valid");
        Allocator::<_>::new(SimBackend::builder().rank(rank).build(), config).expect("the arguments should be valid")
    });
    let compare = || agree_in_lockstep(&ranks.each_ref().map(|allocator| RankHistory::new(allocator, Point::Sync)));
    ranks.iter().for_each(|allocator| allocator.set_total_limit_bytes(Some(32 << 20)));
    assert_eq!(compare().map(|agreed| agreed.ops), Ok(0));
    ranks[1].set_total_limit_bytes(None);
    let Err(AgreementError::Disagreed(disagreement)) = compare() else { panic!("the limits differ") };
    let text = disagreement.to_string();
    assert!(text.contains("total_limit_bytes") && text.contains("33554432") && text.contains("none"), "{text}");
}

#[test]
fn ranks_may_agree_on_some_pools_and_exclude_the_others() {
    let alike = PoolConfig::builder().symmetric(true).build().expect("the configuration should be valid");
    let ranks = [1, 2].map(|rank| {
        let allocator: Allocator<_> = Allocator::new(SimBackend::builder().rank(rank).build(), Config::default())
            .expect("the arguments should be valid");
        let stream = allocator.register_stream().expect("the first stream should be registered");
        // The first pool differs between ranks in both its configuration and its use.
        let other = PoolConfig::builder().symmetric(true).limit_bytes(Some(u64::from(rank) << 30)).build();
        let other = allocator
            .create_pool(other.expect("the input should be valid"))
            .expect("the pool should fit into the device");
        let shared = allocator.create_pool(alike.clone()).expect("the pool should fit into the device");
        let _live = allocator.allocate(other, stream, u64::from(rank) << 20).expect("the allocation should fit");
        let _live = allocator.allocate(shared, stream, 3 << 20).expect("the allocation should fit");
        (allocator, other, shared)
    });
    let histories = ranks.each_ref().map(|(allocator, _, shared)| {
        // A private pool is ignored.
        RankHistory::of_pools(allocator, Point::Sync, &[*shared, PoolId::DEFAULT])
    });
    assert_eq!(agree_in_lockstep(&histories), Ok(Agreed { ops: 2 }));
    let histories =
        ranks.each_ref().map(|(allocator, other, _)| RankHistory::of_pools(allocator, Point::Sync, &[*other]));
    let Err(AgreementError::Disagreed(disagreement)) = agree_in_lockstep(&histories) else { panic!("limits differ") };
    assert!(disagreement.to_string().contains("symmetric pool 0"), "{disagreement}");
    let nothing = ranks.each_ref().map(|(allocator, _, _)| RankHistory::of_pools(allocator, Point::Sync, &[]));
    assert_eq!(agree_in_lockstep(&nothing), Ok(Agreed { ops: 0 }));
}

#[test]
fn pools_that_are_not_settled_keep_their_history() {
    let pool = PoolConfig::builder().symmetric(true).build().expect("the configuration should be valid");
    let config = Config::builder().default_pool(pool.clone()).build().expect("the configuration should be valid");
    let allocator: Allocator<_> =
        Allocator::new(SimBackend::builder().build(), config).expect("the arguments should be valid");
    let stream = allocator.register_stream().expect("the first stream should be registered");
    let second = allocator.create_pool(pool).expect("the pool should fit into the device");
    for pool in [PoolId::DEFAULT, second] {
        let _live = allocator.allocate(pool, stream, 1 << 20).expect("the allocation should fit");
    }
    let oldest = || {
        let heaps = allocator.heap_histories();
        heaps.iter().map(|heap| (heap.pool, heap.oldest)).collect::<Vec<_>>()
    };
    assert_eq!(oldest(), [(0, 0), (1, 0)]);
    RankHistory::new(&allocator, Point::Sync).settle_pools(|ordinal| ordinal == 1);
    assert_eq!(oldest(), [(0, 0), (1, 2)]);
}

/// A rank that registers a stream in another group has no heap that the others have.
#[test]
fn ranks_with_different_groups_disagree_and_name_the_group() {
    let ranks = [0, 1].map(|rank| {
        let pool = PoolConfig::builder()
            .symmetric(true)
            .streams(StreamPolicy::Grouped)
            .build()
            .expect("the configuration should be valid");
        let config = Config::builder().default_pool(pool).build().expect("the configuration should be valid");
        let allocator: Allocator<_> =
            Allocator::new(SimBackend::builder().rank(rank).build(), config).expect("the arguments should be valid");
        let groups = [(); 2].map(|()| allocator.register_stream().expect("a stream id is available"));
        let member = allocator.register_stream_in(groups[rank as usize]).expect("the group should exist");
        let _live = allocator.allocate(PoolId::DEFAULT, groups[1], 1 << 20).expect("the allocation should fit");
        (allocator, member)
    });
    let agree = || agree_in_lockstep(&ranks.each_ref().map(|(allocator, _)| RankHistory::new(allocator, Point::Sync)));
    assert_eq!(agree(), Ok(Agreed { ops: 2 }), "no op depends on the group so far");
    for (allocator, member) in &ranks {
        let _live = allocator.allocate(PoolId::DEFAULT, *member, 3 << 20).expect("the allocation should fit");
    }
    let Err(AgreementError::Disagreed(disagreement)) = agree() else { panic!("the groups differ") };
    assert!(disagreement.to_string().contains("the group of stream 0"), "{disagreement}");
}

/// In a pool with a base, other requests lead to ranges of other sizes. The requests are the cause.
#[test]
fn different_requests_in_a_pool_with_a_base_are_the_cause() {
    let ranks = [0, 1, 2].map(|rank| {
        let pool: PoolConfig = "base:slot:0,symmetric:true,segments:fixed".parse().expect("valid");
        let config = Config::builder().default_pool(pool).build().expect("valid");
        let allocator: Allocator<_> = Allocator::new(SimBackend::builder().rank(rank).build(), config).expect("valid");
        let stream = allocator.register_stream().expect("the first");
        for size_mib in [30, if rank == 1 { 70 } else { 50 }, 1, 2, 3] {
            let _live = allocator.allocate(PoolId::DEFAULT, stream, size_mib << 20).expect("fits");
        }
        allocator
    });
    let agreed = agree_in_lockstep(&ranks.each_ref().map(|allocator| RankHistory::new(allocator, Point::Sync)));
    let Err(AgreementError::Disagreed(disagreement)) = agreed else { panic!("the requests differ") };
    let first = disagreement.first_heap().expect("the histories differ");
    assert_eq!(first.cause, Cause::DifferentRequest, "{disagreement}");
}

fn symmetric_allocator(rank: u32) -> Allocator<SimBackend> {
    let pool = PoolConfig::builder().symmetric(true).build().expect("the configuration should be valid");
    let config = Config::builder().default_pool(pool).build().expect("the configuration should be valid");
    Allocator::new(SimBackend::builder().rank(rank).build(), config).expect("the arguments should be valid")
}

/// Returns three ranks with 40 heaps of 20 allocations each, where rank 1 differs in every heap.
fn differing_ranks() -> Vec<Allocator<SimBackend>> {
    let rank = |rank| {
        let allocator = symmetric_allocator(rank);
        for _ in 0..40 {
            let stream = allocator.register_stream().expect("a stream id is available");
            for op in 0..20 {
                let size_bytes = 512 + u64::from(rank == 1 && op == 10);
                let _live = allocator
                    .allocate_named(PoolId::DEFAULT, stream, size_bytes, "block")
                    .expect("the allocation should fit");
            }
        }
        allocator
    };
    (0..3).map(rank).collect()
}

/// Runs an inquiry with messages that `tamper` modifies.
fn interrogate(
    allocators: &[Allocator<SimBackend>],
    mut tamper: impl FnMut(u32, &Question, &mut Vec<u8>),
) -> Result<Progress, ProtocolError> {
    let histories: Vec<RankHistory<'_>> =
        allocators.iter().map(|allocator| RankHistory::new(allocator, Point::Sync)).collect();
    let mut inquiry = Inquiry::new(histories.len() as u32);
    loop {
        let mut messages = Vec::new();
        histories.iter().for_each(|history| history.answer(inquiry.question(), &mut messages));
        tamper(inquiry.rounds(), inquiry.question(), &mut messages);
        let progress = inquiry.advance(&Gathered::new(messages, inquiry.question().message_bytes()))?;
        if progress != Progress::Asked {
            return Ok(progress);
        }
    }
}

#[test]
fn all_differing_heaps_are_found_beyond_one_page_and_one_batch() {
    let allocators = differing_ranks();
    let Ok(Progress::Disagreed(disagreement)) = interrogate(&allocators, |_, _, _| {}) else { panic!("they differ") };
    let Difference::History { first, others } = &disagreement.difference else { panic!("{disagreement}") };
    const { assert!(40 > HEAPS_PER_PAGE) };
    let found: Vec<_> = std::iter::once(first).chain(others).collect();
    assert_eq!(found.len(), 40);
    for (difference, stream) in found.into_iter().zip(0..) {
        // Program order is stream by stream. The first allocation of each stream acquires memory, which is an op.
        assert_eq!(
            (difference.streams.stream(), difference.first_op, difference.last_op),
            (Some(StreamId(stream)), 11, 11)
        );
        assert_eq!(difference.order, Some(u64::from(stream) * 21 + 11));
    }
    assert_eq!(first.cause, Cause::DifferentRequest);
}

#[test]
fn garbage_yields_a_typed_error_or_a_report_and_never_a_panic() {
    let allocators = differing_ranks();
    let (mut errors, mut reports) = (0, 0);
    for seed in 0..3000 {
        let mut random = SplitMix64::new(seed);
        let from = random.below(8) as u32;
        let outcome = interrogate(&allocators, |round, question, messages| {
            if round != from {
                return;
            }
            let bytes = question.message_bytes();
            let liar = random.below(3) as usize * bytes;
            // Overwrites a few bytes, or as many as the message contains.
            let count = if random.below(8) == 0 { bytes } else { 1 + random.below(4) as usize };
            for _ in 0..count {
                messages[liar + random.below(bytes.min(200) as u64) as usize] = random.next_u64() as u8;
            }
        });
        match outcome {
            Err(_) => errors += 1,
            Ok(progress) => {
                let Progress::Disagreed(disagreement) = progress else {
                    panic!("the inquiry must report a difference")
                };
                assert!(!disagreement.to_string().is_empty());
                reports += 1;
            }
        }
    }
    assert!(errors > 100 && reports > 100, "{errors} errors, {reports} reports");
}

#[test]
fn messages_of_another_shape_or_version_are_rejected() {
    let mut inquiry = Inquiry::new(2);
    let short = Gathered::new(vec![0; 64], 64);
    assert_eq!(inquiry.advance(&short), Err(ProtocolError::WrongShape { messages: 1, message_bytes: 64, ranks: 2 }));
    let allocators = [symmetric_allocator(0), symmetric_allocator(1)];
    let version = |number: u8| interrogate(&allocators, |_, _, messages| messages[64 + 4] = number);
    assert_eq!(version(1), Err(ProtocolError::VersionMismatch { rank: 1, version: 1 }));
    assert!(matches!(version(2), Ok(Progress::Agreed(_))));
    assert_eq!(interrogate(&allocators, |_, _, messages| messages[64] ^= 1), Err(ProtocolError::Garbled { rank: 1 }));
}

/// A transport that relays messages, such as a ring, can replace those of all ranks.
#[test]
fn heaps_without_ops_are_garbled() {
    let outcome = interrogate(&differing_ranks(), |_, question, messages| {
        if let Ask::Heaps { .. } = question.0 {
            for (rank, message) in (0..).zip(messages.chunks_exact_mut(question.message_bytes())) {
                // One heap of pool 0 and stream 0, with no ops and another digest on each rank.
                message.fill(0);
                (message[0], message[4 + 24]) = (1, rank);
            }
        }
    });
    assert_eq!(outcome, Err(ProtocolError::Garbled { rank: 0 }));
}

#[test]
fn a_rank_that_sends_endless_heaps_is_stopped() {
    let allocators = differing_ranks();
    let mut next = 100_u32;
    let outcome = interrogate(&allocators, |_, question, messages| {
        if let Ask::Heaps { .. } = question.0 {
            // Rank 2 answers with a full page of heaps in pools that no other rank has.
            let message = &mut messages[2 * question.message_bytes()..];
            message[..4].copy_from_slice(&(HEAPS_PER_PAGE as u32).to_le_bytes());
            for heap in message[4..].chunks_exact_mut(32).take(HEAPS_PER_PAGE) {
                heap.fill(0);
                heap[..4].copy_from_slice(&next.to_le_bytes());
                heap[8] = 1;
                next += 1;
            }
        }
    });
    assert!(matches!(outcome, Err(ProtocolError::TooManyRounds { .. })), "{outcome:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
    /// For any two histories, history lengths and previous agreements, the reported interval contains the first
    /// difference.
    #[test]
    fn the_first_difference_is_found_or_bounded(
        lens in prop::array::uniform2(1..400_u64),
        memories in prop::array::uniform2(1..300_u32),
        at in 0..400_u64,
        agreed in 0..200_u64,
    ) {
        let agreed = agreed.min(at).min(lens[0]).min(lens[1]);
        let rank = |rank: usize| {
            let pool = PoolConfig::builder().symmetric(true).build().expect("the configuration should be valid");
            let config = Config::builder().default_pool(pool).history_ops(memories[rank]).build().expect("the configuration should be valid");
            let allocator: Allocator<SimBackend> =
                Allocator::new(SimBackend::builder().rank(rank as u32).build(), config).expect("the arguments should be valid");
            allocator.register_stream().expect("the first stream should be registered");
            allocator
        };
        let allocators = [rank(0), rank(1)];
        let allocate = |rank: usize, ops: std::ops::Range<u64>| {
            for op in ops {
                let size_bytes = 512 + u64::from(rank == 1 && op == at);
                let _live = allocators[rank].allocate(PoolId::DEFAULT, StreamId(0), size_bytes).expect("the allocation should fit");
            }
        };
        let histories = || [0, 1].map(|rank| RankHistory::new(&allocators[rank], Point::Sync));
        allocate(0, 0..agreed);
        allocate(1, 0..agreed);
        agree_in_lockstep(&histories()).expect("nothing differs yet");
        allocate(0, agreed..lens[0]);
        allocate(1, agreed..lens[1]);
        // The first allocation also acquires memory, which counts as an op.
        let number = |op: u64| op + u64::from(op > 0);
        let (ends, agreed) = (lens.map(number), number(agreed));
        let first = number(if at < lens[1] { at.min(lens[0]) } else { lens[0].min(lens[1]) });
        match agree_in_lockstep(&histories()) {
            Ok(_) => prop_assert!(lens[0] == lens[1] && at >= lens[1]),
            Err(AgreementError::Disagreed(disagreement)) => {
                let heap = disagreement.first_heap().expect("a heap should differ");
                prop_assert!((heap.first_op..=heap.last_op).contains(&first), "{first}: {disagreement}");
                prop_assert!(heap.first_op >= agreed, "{agreed}: {disagreement}");
                let oldest = ends[0].saturating_sub(memories[0].into()).max(ends[1].saturating_sub(memories[1].into()));
                if oldest.max(agreed) <= first {
                    prop_assert_eq!(heap.first_op, heap.last_op, "the difference is exact if all ranks remember it");
                    prop_assert!(heap.cause != Cause::OlderThanHistory);
                }
            }
            Err(error) => prop_assert!(false, "{error}"),
        }
    }
}
