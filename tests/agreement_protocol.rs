//! The agreement protocol: its cost, its side effects, and its behavior when ranks die, skip an agreement or reach one at another time.

use std::num::{NonZeroU32, NonZeroU64};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use symmalloc_agreement::{
    Action, Agreement, AgreementError, Cause, Difference, Disagreement, Gathered, Mode, Point, RankHistory,
    ThreadTransport, Transport, TransportError, agree, agree_in_lockstep,
};
use symmalloc_core::config::PointerLookup;
use symmalloc_core::units::MIB;
use symmalloc_core::{Allocation, Allocator, Config, PoolConfig, PoolId, StreamId};
use symmalloc_sim::SimBackend;

const LONG: Duration = Duration::from_secs(60);

fn symmetric() -> PoolConfig {
    PoolConfig::builder().symmetric(true).build().expect("the configuration should be valid")
}

/// Creates a rank whose default pool is symmetric, with one stream.
fn rank_that_remembers(rank: u32, history_ops: u32) -> Allocator<SimBackend> {
    let config = Config::builder()
        .default_pool(symmetric())
        .history_ops(history_ops)
        .build()
        .expect("the configuration should be valid");
    let allocator =
        Allocator::new(SimBackend::builder().rank(rank).build(), config).expect("the arguments should be valid");
    allocator.register_stream().expect("the first stream should be registered");
    allocator
}

/// Allocates blocks of 512 bytes, except for the allocation with the index `other`.
fn allocate(allocator: &Allocator<SimBackend>, ops: u64, other: Option<u64>) {
    for op in 0..ops {
        let size_bytes = 512 - u64::from(other == Some(op));
        let _live = allocator
            .allocate_named(PoolId::DEFAULT, StreamId(0), size_bytes, "block")
            .expect("the allocation should fit");
    }
}

/// Returns the op number of a 512-byte allocation in its heap. The numbering includes an op for each time that an
/// earlier allocation obtained memory.
fn number_in_heap(allocation: u64) -> u64 {
    allocation + (allocation * 512).div_ceil(2 << 20)
}

fn compare(allocators: &[Allocator<SimBackend>]) -> Option<Disagreement> {
    let histories: Vec<_> = allocators.iter().map(|allocator| RankHistory::new(allocator, Point::Sync)).collect();
    match agree_in_lockstep(&histories) {
        Ok(_) => None,
        Err(AgreementError::Disagreed(disagreement)) => Some(*disagreement),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn four_thousand_ranks_agree_or_name_the_rank_that_differs() {
    const RANKS: u32 = 4096;
    let allocators: Vec<_> = (0..RANKS).map(|rank| rank_that_remembers(rank, 64)).collect();
    for (rank, allocator) in (0..).zip(&allocators) {
        allocate(allocator, 100, None);
        assert!(allocator.history_bytes() <= 64 * (32 + 112) + 16 * 64, "rank {rank}");
    }
    assert_eq!(compare(&allocators), None);
    allocators.iter().for_each(|allocator| allocate(allocator, 10, None));
    allocate(&allocators[2077], 1, None);
    allocators.iter().for_each(|allocator| allocate(allocator, 10, None));
    // The requests are equal, so the last one is missing on the other ranks.
    let disagreement = compare(&allocators).expect("one rank made more requests");
    let first = disagreement.first_heap().expect("a heap should differ");
    assert_eq!((first.first_op, first.last_op), (number_in_heap(120), number_in_heap(120)));
    assert_eq!(first.groups[0].ranks.to_string(), "0-2076,2078-4095");
    assert_eq!((first.groups[0].action, first.groups[1].ranks.to_string()), (Action::Nothing, "2077".to_owned()));
    assert_eq!(disagreement.ranks, RANKS);
}

#[test]
fn rounds_grow_with_the_logarithm_of_the_history() {
    for ops in [10, 100, 1000, 10_000, 100_000] {
        let allocators = [0, 1].map(|rank| rank_that_remembers(rank, 1 << 20));
        allocate(&allocators[0], ops, None);
        allocate(&allocators[1], ops, Some(ops / 3));
        let disagreement = compare(&allocators).expect("the ranks should differ");
        assert_eq!(disagreement.first_heap().expect("a heap should differ").first_op, number_in_heap(ops / 3));
        // Four rounds: compare, heaps, ops, details. Then a search that cuts into 97 parts.
        let searches = (1..).find(|rounds| 97_u64.pow(*rounds) >= ops).expect("a few rounds suffice");
        assert!(disagreement.rounds <= 4 + searches, "{} rounds for {ops} ops", disagreement.rounds);
    }
}

/// A transport on which every rank sends the message of this one.
struct Echo {
    ranks: u32,
    bytes: AtomicUsize,
}

impl Transport for Echo {
    fn rank(&self) -> u32 {
        0
    }
    fn ranks(&self) -> u32 {
        self.ranks
    }
    fn all_gather(&self, message: &[u8]) -> Result<Gathered, TransportError> {
        let all = message.repeat(self.ranks as usize);
        self.bytes.fetch_add(all.len(), Ordering::Relaxed);
        Ok(Gathered::new(all, message.len()))
    }
}

/// Ranks that agree exchange 64 bytes each in one round. Ranks that differ need the same number of rounds for any number of ranks.
/// Prints the time on the host of one rank, without the exchange itself.
#[test]
fn the_cost_of_an_agreement_by_number_of_ranks() {
    const TIMES: usize = 200;
    let mut rounds = None;
    for ranks in [2, 4, 8, 64, 512, 4096] {
        let (rank, transport) = (rank_that_remembers(0, 64), Echo { ranks, bytes: AtomicUsize::new(0) });
        allocate(&rank, 100, None);
        let mut times: Vec<Duration> = (0..TIMES)
            .map(|_| {
                let begun = Instant::now();
                agree(&rank, &transport, Point::Sync).expect("the messages are equal");
                begun.elapsed()
            })
            .collect();
        times.sort();
        assert_eq!(transport.bytes.into_inner(), TIMES * 64 * ranks as usize);

        let allocators: Vec<_> = (0..ranks).map(|rank| rank_that_remembers(rank, 128)).collect();
        for (rank, allocator) in (0..).zip(&allocators) {
            allocate(allocator, 100, (rank == ranks / 2).then_some(70));
        }
        let begun = Instant::now();
        let disagreement = compare(&allocators).expect("one rank differs");
        let found = begun.elapsed() / ranks;
        assert_eq!(*rounds.get_or_insert(disagreement.rounds), disagreement.rounds, "{ranks} ranks");
        println!(
            "{ranks:>4} ranks: {:.1?} of one rank's host to agree (median), {} rounds to name an op that differs, {found:.1?} per rank",
            times[TIMES / 2],
            disagreement.rounds
        );
    }
}

#[test]
fn agreed_history_is_discarded() {
    let allocators = [0, 1].map(|rank| rank_that_remembers(rank, 100));
    for _ in 0..50 {
        allocators.iter().for_each(|allocator| allocate(allocator, 90, None));
        assert_eq!(compare(&allocators), None);
    }
    allocate(&allocators[0], 90, None);
    allocate(&allocators[1], 90, Some(0));
    let disagreement = compare(&allocators).expect("the ranks should differ");
    let first = disagreement.first_heap().expect("a heap should differ");
    assert_eq!((first.first_op, first.last_op, first.order), (number_in_heap(4500), number_in_heap(4500), Some(0)));
    assert_eq!(first.cause, Cause::DifferentRequest);
    assert_eq!(first.groups[1].name.as_deref(), Some("block"));
}

#[test]
fn a_difference_in_an_allocation_is_reported_with_its_name() {
    type Act = fn(&Allocator<SimBackend>, &Allocation);
    const OWN: StreamId = StreamId(0);
    const OTHER: StreamId = StreamId(1);
    let acts: [(&str, Act); 6] = [
        ("use", |rank, made| rank.record_use(made.handle, OWN).expect("the allocation should be live")),
        ("use by another stream", |rank, made| {
            rank.record_use(made.handle, OTHER).expect("the allocation should be live");
        }),
        ("free", |rank, made| rank.free(made.handle).expect("the allocation should be live")),
        ("use at", |rank, made| rank.record_use_at(made.address, OWN).expect("the allocation should be live")),
        ("use at by another stream", |rank, made| {
            rank.record_use_at(made.address, OTHER).expect("the allocation should be live");
        }),
        ("free at", |rank, made| _ = rank.free_at(made.address).expect("the allocation should be live")),
    ];
    for (act, carry_out) in acts {
        for streams in ["streams:separate", "streams:shared"] {
            let pool: PoolConfig = format!("symmetric:true,{streams}").parse().expect("the text should be valid");
            let config = Config::builder().default_pool(pool).pointer_lookup(PointerLookup::Exact).build();
            let ranks = [0, 1].map(|rank| {
                let device = SimBackend::builder().rank(rank).build();
                let allocator: Allocator<_> =
                    Allocator::new(device, config.clone().expect("the input should be valid"))
                        .expect("the arguments should be valid");
                allocator.register_stream().expect("a stream id is available");
                allocator.register_stream().expect("a stream id is available");
                allocator
            });
            let made = ranks.each_ref().map(|rank| {
                let named =
                    |name| rank.allocate_named(PoolId::DEFAULT, OWN, 4096, name).expect("the allocation should fit");
                let made = [named("weights"), named("bias")];
                [made[0], made[1], rank.allocate(PoolId::DEFAULT, OWN, 4096).expect("the allocation should fit")]
            });
            for (allocation, name) in [(1, Some("bias")), (0, Some("weights")), (2, None)] {
                assert_eq!(compare(&ranks), None);
                carry_out(&ranks[1], &made[1][allocation]);
                let disagreement = compare(&ranks).expect("one rank made more requests");
                let groups = &disagreement.first_heap().expect("a heap should differ").groups;
                let names = [0, 1].map(|group: usize| groups[group].name.as_deref());
                assert_eq!(names, [None, name], "{act}, {streams}");
                assert_eq!(groups[0].action, Action::Nothing);
                carry_out(&ranks[0], &made[0][allocation]);
            }
        }
    }
}

/// Regression test, found by the job simulator: a restarted rank recreates and destroys the pools that were destroyed earlier, so that its
/// pool ids match. Their heaps have no history on that rank, which was reported as a difference.
#[test]
fn a_pool_is_not_compared_after_its_end_was_agreed_on() {
    let rank = |rank| {
        let allocator = rank_that_remembers(rank, 64);
        allocator.create_pool(symmetric()).expect("the pool should be created");
        allocator
    };
    let gone = PoolId(1);
    let mut ranks = vec![rank(0), rank(1)];
    for allocator in &ranks {
        allocate(allocator, 3, None);
        let made = allocator.allocate(gone, StreamId(0), 1 << 20).expect("the allocation should fit");
        allocator.free(made.handle).expect("the allocation should be live");
        allocator.destroy_pool(gone).expect("it is empty");
    }
    assert_eq!(compare(&ranks), None);
    let layout = ranks[0].save_layout(PoolId::DEFAULT).expect("no segment should be retired");
    let restarted = rank(2);
    restarted.destroy_pool(gone).expect("it is empty");
    restarted.restore_layout(PoolId::DEFAULT, &layout).expect("an unchanged pool");
    ranks.push(restarted);
    assert_eq!(compare(&ranks), None);
    // A trim of all pools also reaches destroyed ones.
    ranks.iter().for_each(|allocator| drop(allocator.trim_all()));
    assert_eq!(compare(&ranks), None);
    // Other pools are still compared.
    ranks[1].trim_pool(PoolId::DEFAULT).expect("no fault was injected");
    assert!(compare(&ranks).is_some());
}

#[test]
fn a_difference_that_is_older_than_the_history_is_bounded() {
    let allocators = [0, 1, 2].map(|rank| rank_that_remembers(rank, 256));
    allocators.iter().for_each(|allocator| allocate(allocator, 1000, None));
    assert_eq!(compare(&allocators), None);
    let other = 12_345;
    allocate(&allocators[0], 50_000, None);
    allocate(&allocators[1], 50_000, Some(other));
    allocate(&allocators[2], 50_000, None);
    let disagreement = compare(&allocators).expect("the ranks should differ");
    let first = disagreement.first_heap().expect("a heap should differ");
    assert!((first.first_op..=first.last_op).contains(&(1000 + other)), "{disagreement}");
    assert!(first.last_op - first.first_op <= 50_000 / 8, "{disagreement}");
    assert_eq!(first.cause, Cause::OlderThanHistory);
    let groups: Vec<_> = first.groups.iter().map(|group| group.ranks.to_string()).collect();
    assert_eq!(groups, ["0,2", "1"]);
    assert!(disagreement.to_string().contains("agree more often"), "{disagreement}");
}

#[test]
fn without_a_history_a_difference_is_still_caught() {
    let allocators = [0, 1].map(|rank| rank_that_remembers(rank, 0));
    allocate(&allocators[0], 20, None);
    allocate(&allocators[1], 20, Some(7));
    assert!(allocators.iter().all(|allocator| allocator.history_bytes() == 0));
    let disagreement = compare(&allocators).expect("the ranks should differ");
    let first = disagreement.first_heap().expect("a heap should differ");
    assert_eq!((first.first_op, first.last_op, first.cause), (0, number_in_heap(19), Cause::OlderThanHistory));
}

#[test]
fn private_pools_are_not_compared() {
    let rank = |rank: u32| {
        let allocator: Allocator<SimBackend> =
            Allocator::new(SimBackend::builder().rank(rank).build(), Config::default())
                .expect("the arguments should be valid");
        let stream = allocator.register_stream().expect("a stream id is available");
        let mut private = vec![PoolId::DEFAULT];
        let mut create = |count: u32| {
            private.extend(
                (0..count).map(|_| allocator.create_pool(PoolConfig::default()).expect("the pool should be created")),
            );
        };
        create(rank);
        let one = allocator.create_pool(symmetric()).expect("the pool should be created");
        create(3 * rank);
        let other = allocator.create_pool(symmetric()).expect("the pool should be created");
        let logging =
            (0..=rank).map(|_| allocator.register_stream().expect("a stream id is available")).collect::<Vec<_>>();
        let mut placed = Vec::new();
        for op in 0..200_u64 {
            for (index, pool) in private.iter().enumerate() {
                let size_bytes = 1 + op * 1000 * u64::from(rank) + index as u64;
                let made = allocator
                    .allocate(*pool, logging[index % logging.len()], size_bytes)
                    .expect("the allocation should fit");
                if op % 3 == u64::from(rank % 3) {
                    allocator.free(made.handle).expect("the allocation should be live");
                }
            }
            let pool = if op % 2 == 0 { one } else { other };
            let made = allocator.allocate(pool, stream, 1 + op * 5000).expect("the allocation should fit");
            placed.push(made.placement);
            if op % 5 == 0 {
                allocator.free(made.handle).expect("the allocation should be live");
            }
        }
        assert_eq!(allocator.symmetric_pool(1), Some(other));
        (allocator, placed)
    };
    let (allocators, placed): (Vec<_>, Vec<_>) = (0..5).map(rank).unzip();
    assert_eq!(compare(&allocators), None);
    assert!(placed.iter().all(|placements| *placements == placed[0]));
    // The pools with this ordinal have different ids on the ranks, but are still compared.
    let other = allocators[3].symmetric_pool(1).expect("the pool was created");
    let _live = allocators[3].allocate(other, StreamId(0), 1).expect("the allocation should fit");
    let disagreement = compare(&allocators).expect("the ranks should differ");
    let first = disagreement.first_heap().expect("a heap should differ");
    assert_eq!((first.pool, first.groups[1].ranks.to_string()), (1, "3".to_owned()));
}

#[test]
fn configurations_that_differ_are_named_by_pool_key_and_rank() {
    let rank = |rank: u32| {
        let granularity_bytes = if rank == 3 { 64 << 10 } else { 2 * MIB };
        let device = SimBackend::builder().rank(rank).granularity_bytes(granularity_bytes).build();
        let config = Config::builder()
            .retries_max(if rank == 0 { 5 } else { 3 })
            .build()
            .expect("the configuration should be valid");
        let allocator = Allocator::new(device, config).expect("the arguments should be valid");
        allocator.create_pool(symmetric()).expect("the pool should be created");
        let limit = Some(if rank < 2 { 8 * MIB } else { 9 * MIB });
        allocator
            .create_pool(
                symmetric().to_builder().limit_bytes(limit).build().expect("the configuration should be valid"),
            )
            .expect("the pool should be created");
        if rank != 1 {
            allocator.create_pool(symmetric()).expect("the pool should be created");
        }
        allocator
    };
    let disagreement = compare(&[0, 1, 2, 3].map(rank)).expect("the ranks should differ");
    let lines: Vec<_> = disagreement.to_string().lines().map(str::to_owned).collect();
    assert_eq!(
        lines,
        [
            "the 4 ranks are configured differently",
            "  all pools, granularity_bytes: 2097152 on ranks 0-2; 65536 on rank 3",
            "  all pools, retries_max: 5 on rank 0; 3 on ranks 1-3",
            "  symmetric pool 1, limit_bytes: 8388608 on ranks 0-1; 9437184 on ranks 2-3",
            "  symmetric pool 2, pool: created on ranks 0,2-3; not set on rank 1",
        ]
    );
    assert!(matches!(disagreement.difference, Difference::Configuration(policies) if policies.len() == 4));
}

/// A transport that counts its rounds, and leaves before a given one.
struct Leaving {
    transport: Mutex<Option<ThreadTransport>>,
    rank: u32,
    ranks: u32,
    rounds: Mutex<u32>,
    leaves_after: u32,
}

impl Leaving {
    fn new(transport: ThreadTransport, leaves_after: u32) -> Self {
        let (rank, ranks) = (transport.rank(), transport.ranks());
        Leaving { transport: Mutex::new(Some(transport)), rank, ranks, rounds: Mutex::new(0), leaves_after }
    }
}

impl Transport for Leaving {
    fn rank(&self) -> u32 {
        self.rank
    }
    fn ranks(&self) -> u32 {
        self.ranks
    }
    fn all_gather(&self, message: &[u8]) -> Result<Gathered, TransportError> {
        let mut transport = self.transport.lock().expect("no thread should panic");
        let mut rounds = self.rounds.lock().expect("no thread should panic");
        if *rounds == self.leaves_after {
            *transport = None;
        }
        *rounds += 1;
        let gone = TransportError::Failed { call: "all_gather", code: -1 };
        transport.as_ref().ok_or(gone)?.all_gather(message)
    }
}

#[test]
fn a_rank_that_dies_in_any_round_is_named_to_the_others() {
    for leaves_after in 0..4 {
        thread::scope(|scope| {
            for transport in ThreadTransport::group(4, LONG) {
                scope.spawn(move || {
                    let rank = transport.rank();
                    let transport = Leaving::new(transport, if rank == 2 { leaves_after } else { u32::MAX });
                    let allocator = rank_that_remembers(rank, 4096);
                    allocate(&allocator, 50, (rank == 1).then_some(20));
                    let error = agree(&allocator, &transport, Point::Sync).expect_err("one leaves");
                    let lost = TransportError::RankLost { rank: 2 };
                    let own = TransportError::Failed { call: "all_gather", code: -1 };
                    assert_eq!(error, AgreementError::Transport(if rank == 2 { own } else { lost }));
                });
            }
        });
    }
}

/// Runs two ranks that allocate 60 times and sync after every 20 allocations; rank 1 makes one different request. Returns, for each rank,
/// the number of ops after which it detected the difference, and the number of rounds.
fn with_mode(mode: Mode, other: u64) -> Vec<(Option<u64>, u32)> {
    let run = |transport: ThreadTransport| {
        let rank = transport.rank();
        let transport = Leaving::new(transport, u32::MAX);
        let allocator = rank_that_remembers(rank, 4096);
        let mut agreement = Agreement::new(mode, &transport);
        let mut caught = None;
        for op in 0..60 {
            let size_bytes = 512 - u64::from(rank == 1 && op == other);
            let _live =
                allocator.allocate(PoolId::DEFAULT, StreamId(0), size_bytes).expect("the allocation should fit");
            let outcome = agreement.after_op(&allocator).and_then(|agreed| match op % 20 {
                19 => agreement.at_sync(&allocator),
                _ => Ok(agreed),
            });
            if let Err(error) = outcome {
                let AgreementError::Disagreed(disagreement) = error else { panic!("{error}") };
                assert_eq!(disagreement.first_heap().expect("a heap should differ").first_op, number_in_heap(other));
                caught = Some(op + 1);
                break;
            }
        }
        let rounds = *transport.rounds.lock().expect("no thread should panic");
        (caught, rounds)
    };
    thread::scope(|scope| {
        let ranks = ThreadTransport::group(2, LONG).into_iter().map(|transport| scope.spawn(|| run(transport)));
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().expect("the thread should not panic")).collect()
    })
}

#[test]
fn each_mode_compares_at_its_interval() {
    let never = 1000;
    let every = |ops| Mode::EveryOps(NonZeroU64::new(ops).expect("the number should not be zero"));
    let syncs = |syncs| Mode::EverySyncs(NonZeroU32::new(syncs).expect("the number should not be zero"));
    // An agreement without a difference takes one round.
    assert_eq!(with_mode(Mode::Off, never), [(None, 0); 2]);
    assert_eq!(with_mode(syncs(1), never), [(None, 3); 2]);
    assert_eq!(with_mode(syncs(2), never), [(None, 1); 2]);
    assert_eq!(with_mode(Mode::AtSync, never), [(None, 3); 2]);
    assert_eq!(with_mode(every(7), never), [(None, 3 + 8); 2]);
    assert_eq!(with_mode(Mode::EachOp, never), [(None, 3 + 60); 2]);
    // Number of ops after which a difference at op 25 is detected.
    let caught = |mode| with_mode(mode, 25).into_iter().map(|(caught, _)| caught).collect::<Vec<_>>();
    assert_eq!(caught(Mode::Off), [None; 2]);
    assert_eq!(caught(Mode::AtSync), [Some(40); 2]);
    assert_eq!(caught(syncs(3)), [Some(60); 2]);
    assert_eq!(caught(every(7)), [Some(28); 2]);
    assert_eq!(caught(Mode::EachOp), [Some(26); 2]);
    assert_eq!(Mode::default(), Mode::AtSync);
}

#[test]
fn a_different_number_of_agreements_is_an_error() {
    thread::scope(|scope| {
        for transport in ThreadTransport::group(2, LONG) {
            scope.spawn(move || {
                let rank = transport.rank();
                let allocator = rank_that_remembers(rank, 4096);
                let mut agreement = Agreement::new(Mode::EachOp, transport);
                // Rank 1 omits an op: its sync meets the other rank's agreement after that op.
                if rank == 0 {
                    allocate(&allocator, 1, None);
                    let error = agreement.after_op(&allocator).expect_err("the other rank is at its sync");
                    let AgreementError::Disagreed(disagreement) = error else { panic!("{error}") };
                    let Difference::Point(points) = &disagreement.difference else { panic!("{disagreement}") };
                    assert_eq!(points.len(), 2);
                    let text = disagreement.to_string();
                    assert!(text.ends_with("\n  rank 1: a sync\n  rank 0: an op"), "{text}");
                    // It tries again, without the other rank.
                    let error = agreement.at_sync(&allocator).expect_err("the other rank is gone");
                    assert_eq!(error, AgreementError::Transport(TransportError::RankLost { rank: 1 }));
                } else {
                    allocate(&allocator, 1, None);
                    agreement.at_sync(&allocator).expect_err("the other rank is at an op");
                }
            });
        }
    });
}
