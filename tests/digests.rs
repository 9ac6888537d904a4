//! Contents of digests: every decision that later ones depend on. `golden/digests.txt` pins the digest of each decision. If two histories
//! can differ in that decision alone, the tests also check that their digests differ.
//!
//! `SYMMALLOC_BLESS=1 cargo test -p symmalloc-harness --test digests` regenerates the file. A changed digest affects everyone who compares
//! ranks of two versions.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use symmalloc_core::config::{Config, PoolConfig, Reclaim, StreamPolicy};
use symmalloc_core::errors::{AllocateError, UnknownError};
use symmalloc_core::histories::{HistorySource, Mark, unpack_op, unpack_placement};
use symmalloc_core::ids::{AllocationId, ObserverId, StreamGroup};
use symmalloc_core::op::{Contents, Op, Record, Refusal};
use symmalloc_core::units::{KIB, MIB};
use symmalloc_core::{Allocator, Digest, PoolId, SegmentId, StreamId};
use symmalloc_harness::hooked::{DeviceCall, Hooked};
use symmalloc_sim::{Call, Fault, FaultRule, SimBackend, SplitMix64};
use symmalloc_trace::replay::{Program, Replay};

const POOL: PoolId = PoolId::DEFAULT;
const S0: StreamId = StreamId(0);
const S1: StreamId = StreamId(1);

type Rank<'a> = Allocator<&'a SimBackend>;

/// A short sequence of ops that ends in the decision under test.
struct Story {
    name: &'static str,
    pool: &'static str,
    ops: fn(&Rank<'_>, &SimBackend),
}

/// Injects a fault into the next call of a kind.
fn refuse(device: &SimBackend, call: Call, fault: Fault) {
    device.inject(Some(call), FaultRule::At { ordinal: device.calls().of(call) }, fault);
}

/// Frees a block of `size_bytes` bytes that another stream used: its next user must wait.
fn leave_fenced(rank: &Rank<'_>, size_bytes: u64) {
    let made = rank.allocate(POOL, S0, size_bytes).expect("memory should suffice");
    rank.record_use(made.handle, S1).expect("the allocation should be live");
    rank.free(made.handle).expect("the allocation should be live");
}

/// Grows the heap after a fenced block, and then fails to wait.
fn grow_in_vain(rank: &Rank<'_>, device: &SimBackend) {
    leave_fenced(rank, 2 * MIB);
    refuse(device, Call::Wait, Fault::Refused);
    let refused = rank.allocate(POOL, S0, 5 * MIB);
    assert!(matches!(refused, Err(AllocateError::Fence { .. })), "{refused:?}");
    assert_eq!(device.mapped_bytes(), 6 * MIB);
}

/// Frees all but one of several allocations, so that a trim creates holes.
fn leave_room_around_one(rank: &Rank<'_>) {
    let made =
        [3 * MIB, MIB, 6 * MIB].map(|size_bytes| rank.allocate(POOL, S0, size_bytes).expect("memory should suffice"));
    rank.free(made[0].handle).expect("the allocation should be live");
    rank.free(made[2].handle).expect("the allocation should be live");
}

const STORIES: &[Story] = &[
    Story { name: "nothing", pool: "", ops: |_, _| () },
    Story {
        name: "allocate",
        pool: "",
        ops: |rank, _| {
            let _live = rank.allocate(POOL, S0, 3 * MIB + 1).expect("memory should suffice");
        },
    },
    Story {
        name: "allocate-nothing",
        pool: "",
        ops: |rank, _| {
            let made = rank.allocate(POOL, S0, 0).expect("zero bytes never fail");
            rank.free(made.handle).expect("the allocation should be live");
        },
    },
    Story {
        name: "use-and-wait",
        pool: "",
        ops: |rank, _| {
            leave_fenced(rank, MIB);
            let _live = rank.allocate(POOL, S0, MIB).expect("memory should suffice");
        },
    },
    Story {
        name: "reserve-expandable",
        pool: "",
        ops: |rank, _| rank.reserve(POOL, S0, 5 * MIB).expect("memory should suffice"),
    },
    Story {
        name: "reserve-what-is-there",
        pool: "",
        ops: |rank, _| {
            rank.reserve(POOL, S0, 8 * MIB).expect("memory should suffice");
            rank.reserve(POOL, S0, 5 * MIB).expect("memory should suffice");
        },
    },
    Story {
        name: "reserve-fixed",
        pool: "fixed",
        ops: |rank, _| rank.reserve(POOL, S0, 5 * MIB).expect("memory should suffice"),
    },
    Story {
        name: "reserve-reserved",
        pool: "reserved",
        ops: |rank, _| rank.reserve(POOL, S0, 5 * MIB).expect("memory should suffice"),
    },
    Story {
        name: "trim-death",
        pool: "",
        ops: |rank, _| {
            rank.reserve(POOL, S0, 8 * MIB).expect("memory should suffice");
            rank.trim_all().expect("no fault should be injected");
        },
    },
    Story {
        name: "trim-death-kept-by-driver",
        pool: "",
        ops: |rank, device| {
            rank.reserve(POOL, S0, 8 * MIB).expect("memory should suffice");
            refuse(device, Call::Unmap, Fault::Refused);
            rank.trim_all().expect_err("refused");
        },
    },
    Story {
        name: "trim-shrink",
        pool: "",
        ops: |rank, _| {
            leave_room_around_one(rank);
            rank.trim_all().expect("no fault should be injected");
        },
    },
    Story {
        name: "trim-shrink-refused-first",
        pool: "",
        ops: |rank, device| {
            leave_room_around_one(rank);
            refuse(device, Call::Unmap, Fault::Refused);
            rank.trim_all().expect_err("refused");
        },
    },
    Story {
        name: "trim-observed",
        pool: "",
        ops: |rank, _| {
            leave_room_around_one(rank);
            rank.observe(POOL).expect("the pool should exist");
            rank.trim_all().expect("nothing is released");
        },
    },
    Story {
        name: "refused-by-pool-limit",
        pool: "limited",
        ops: |rank, _| {
            let _live = rank.allocate(POOL, S0, 5 * MIB).expect("memory should suffice");
            rank.allocate(POOL, S0, 30 * MIB).expect_err("more than the limit");
        },
    },
    Story {
        name: "refused-by-segment",
        pool: "reserved",
        ops: |rank, _| {
            let _live = rank.allocate(POOL, S0, 5 * MIB).expect("memory should suffice");
            rank.allocate(POOL, S0, 30 * MIB).expect_err("more than the segment");
        },
    },
    Story {
        name: "refused-by-driver",
        pool: "",
        ops: |rank, device| {
            let _live = rank.allocate(POOL, S0, 5 * MIB).expect("memory should suffice");
            refuse(device, Call::Map, Fault::OutOfMemory);
            rank.allocate(POOL, S0, 30 * MIB).expect_err("refused");
        },
    },
    Story {
        name: "reserve-refused-by-driver",
        pool: "",
        ops: |rank, device| {
            refuse(device, Call::Map, Fault::OutOfMemory);
            rank.reserve(POOL, S0, 30 * MIB).expect_err("refused");
        },
    },
    Story {
        name: "reclaim-in-vain",
        pool: "limited",
        ops: |rank, _| {
            let made = [S0, S1].map(|stream| rank.allocate(POOL, stream, 7 * MIB).expect("memory should suffice"));
            rank.free(made[0].handle).expect("the allocation should be live");
            rank.allocate(POOL, S0, 15 * MIB).expect_err("the other stream holds too much");
        },
    },
    Story {
        name: "reclaim-helps",
        pool: "limited",
        ops: |rank, _| {
            let made = [S0, S1].map(|stream| rank.allocate(POOL, stream, 7 * MIB).expect("memory should suffice"));
            rank.free(made[1].handle).expect("the allocation should be live");
            let _live = rank.allocate(POOL, S0, 9 * MIB).expect("the other stream's memory was released");
        },
    },
    Story { name: "growth-behind-a-failed-wait", pool: "", ops: grow_in_vain },
    Story {
        name: "growth-behind-a-failed-wait-again",
        pool: "",
        ops: |rank, device| {
            grow_in_vain(rank, device);
            let _live = rank.allocate(POOL, S0, 5 * MIB).expect("the driver works again");
        },
    },
    Story {
        name: "release-threshold",
        pool: "threshold",
        ops: |rank, _| {
            let made = rank.allocate(POOL, S0, 9 * MIB).expect("memory should suffice");
            let _live = rank.allocate(POOL, S0, 100 * KIB).expect("memory should suffice");
            rank.free(made.handle).expect("the allocation should be live");
        },
    },
    Story {
        name: "shared-streams",
        pool: "shared",
        ops: |rank, _| {
            let made = rank.allocate(POOL, S0, MIB).expect("memory should suffice");
            rank.record_use(made.handle, S1).expect("the allocation should be live");
            rank.free(made.handle).expect("the allocation should be live");
            let _live = rank.allocate(POOL, S1, MIB).expect("memory should suffice");
        },
    },
    Story {
        name: "fill-a-hole",
        pool: "",
        ops: |rank, _| {
            leave_room_around_one(rank);
            rank.trim_all().expect("no fault should be injected");
            let _live = rank.allocate(POOL, S0, 2 * MIB).expect("memory should suffice");
        },
    },
];

fn pool_config(name: &str) -> PoolConfig {
    let pool = PoolConfig::builder();
    match name {
        "fixed" => pool.fixed(),
        "reserved" => return "segments:reserved,segment_bytes:16777216".parse().expect("the text should be valid"),
        "limited" => pool.limit_bytes(Some(16 * MIB)).reclaim(Reclaim::Pool),
        "gives-nothing-back" => pool.reclaim(Reclaim::Never),
        "threshold" => pool.release_threshold_bytes(Some(4 * MIB)),
        "shared" => pool.streams(StreamPolicy::Shared),
        _ => pool,
    }
    .build()
    .expect("the configuration should be valid")
}

fn digest(story: &Story, rank: u32) -> Digest {
    let device = SimBackend::builder().seed(1).rank(rank).build();
    let config =
        Config::builder().default_pool(pool_config(story.pool)).build().expect("the configuration should be valid");
    let allocator = Allocator::new(&device, config).expect("the arguments should be valid");
    allocator.register_stream().expect("a stream id is available");
    allocator.register_stream().expect("a stream id is available");
    (story.ops)(&allocator, &device);
    allocator.check().expect("the invariants should hold");
    allocator.digest(POOL).expect("the pool should exist")
}

fn of(name: &str) -> Digest {
    digest(STORIES.iter().find(|story| story.name == name).expect("a story"), 0)
}

#[test]
fn digests_equal_the_golden_file() {
    let mut table = String::new();
    for story in STORIES {
        let found = digest(story, 0);
        assert_eq!(digest(story, 1), found, "{}: on another rank", story.name);
        writeln!(table, "{:<34} {:>3} ops {found}", story.name, found.ops).expect("writing to memory cannot fail");
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/digests.txt");
    if std::env::var_os("SYMMALLOC_BLESS").is_some() {
        std::fs::write(&path, &table).expect("the golden file can be written");
    }
    let golden = std::fs::read_to_string(&path).expect("the golden file exists");
    for (found, expected) in table.lines().zip(golden.lines()) {
        assert_eq!(found, expected, "set SYMMALLOC_BLESS=1 if this is intended");
    }
    assert_eq!(table.lines().count(), golden.lines().count());
}

#[test]
fn every_story_has_a_distinct_digest() {
    let distinct: BTreeSet<_> = STORIES.iter().map(|story| digest(story, 0).value).collect();
    assert_eq!(distinct.len(), STORIES.len());
}

/// Pairs of histories that can occur on two ranks of a job if only one rank meets a certain event.
#[test]
fn histories_that_differ_in_one_decision_have_different_digests() {
    // The layout is the same; either the driver failed to unmap the memory, or an observer holds it.
    assert_ne!(of("trim-shrink-refused-first"), of("trim-observed"));
    assert_ne!(of("trim-shrink-refused-first"), of("trim-shrink"));
    // A dead segment whose memory the driver kept, which counts toward the limits from then on.
    assert_ne!(of("trim-death-kept-by-driver"), of("trim-death"));
    // A heap that grew before a failed wait, and one that did not grow.
    assert_ne!(of("growth-behind-a-failed-wait-again").value, of("growth-behind-a-failed-wait").value);
    let before = Story { name: "", pool: "", ops: |rank, _| leave_fenced(rank, 2 * MIB) };
    assert_ne!(of("growth-behind-a-failed-wait"), digest(&before, 0));
    // The same request, refused by the same heap for each reason.
    let by = |ops| digest(&Story { name: "", pool: "gives-nothing-back", ops }, 0);
    let by_limit = by(|rank, _| {
        let _live = rank.allocate(POOL, S0, 8 * MIB).expect("memory should suffice");
        rank.set_total_limit_bytes(Some(8 * MIB));
        rank.allocate(POOL, S0, 6 * MIB).expect_err("beyond the limit");
    });
    let by_driver = by(|rank, device| {
        let _live = rank.allocate(POOL, S0, 8 * MIB).expect("memory should suffice");
        refuse(device, Call::Map, Fault::OutOfMemory);
        rank.allocate(POOL, S0, 6 * MIB).expect_err("refused");
    });
    assert_eq!(by_limit.ops, by_driver.ops);
    assert_ne!(by_limit, by_driver);
    // Allocations of zero bytes, for one stream of a shared heap and for the other.
    let nothing_for = |ops| digest(&Story { name: "", pool: "shared", ops }, 0);
    let for_one = nothing_for(|rank, _| _ = rank.allocate(POOL, S0, 0).expect("zero bytes never fail"));
    assert_ne!(for_one, nothing_for(|rank, _| _ = rank.allocate(POOL, S1, 0).expect("zero bytes never fail")));
}

/// Heaps with different granularities eventually make different decisions.
#[test]
fn the_granularity_is_in_every_digest() {
    let digest = |granularity_bytes| {
        let device = SimBackend::builder().granularity_bytes(granularity_bytes).build();
        let allocator: Rank<'_> = Allocator::new(&device, Config::default()).expect("the arguments should be valid");
        allocator.register_stream().expect("a stream id is available");
        let _live = allocator.allocate(POOL, S0, 0).expect("zero bytes never fail");
        allocator.digest(POOL).expect("the pool should exist")
    };
    assert_ne!(digest(MIB), digest(2 * MIB));
}

/// A rank that destroyed a pool and one that keeps it never agree, even if there is no memory left to release.
#[test]
fn the_end_of_a_pool_is_in_its_digest() {
    let histories = |is_destroyed| {
        let device = SimBackend::builder().build();
        let allocator: Rank<'_> = Allocator::new(&device, Config::default()).expect("the arguments should be valid");
        allocator.register_stream().expect("a stream id is available");
        let symmetric = PoolConfig::builder().symmetric(true).build().expect("the configuration should be valid");
        let pool = allocator.create_pool(symmetric).expect("the configuration should be valid");
        let made = allocator.allocate(pool, S0, MIB).expect("memory should suffice");
        allocator.free(made.handle).expect("the allocation should be live");
        allocator.trim_all().expect("no fault should be injected");
        if is_destroyed {
            allocator.destroy_pool(pool).expect("the pool should be empty");
        }
        allocator.heap_histories()
    };
    assert_ne!(histories(true), histories(false));
}

/// A free block may begin and end inside a granule. The history contains the released part: only the whole granules in it.
#[test]
fn the_history_of_a_shrink_equals_the_unmapped_ranges() {
    let device = SimBackend::builder().build();
    let taken_back = RefCell::new(Vec::new());
    let log = |call| {
        if let DeviceCall::Unmap { offset_bytes, size_bytes } = call {
            taken_back.borrow_mut().push((SegmentId(0), offset_bytes, size_bytes));
        }
    };
    let pool = PoolConfig::builder().symmetric(true).build().expect("the configuration should be valid");
    let config = Config::builder().default_pool(pool).build().expect("the configuration should be valid");
    let allocator: Allocator<_> =
        Allocator::new(Hooked { inner: &device, hook: log }, config).expect("the arguments should be valid");
    allocator.register_stream().expect("a stream id is available");
    let take = |size_bytes| allocator.allocate(POOL, S0, size_bytes).expect("memory should suffice");
    let _holds_the_segment = take(KIB);
    let (mut random, mut live) = (SplitMix64::new(1), Vec::new());
    for _ in 0..20 {
        live.extend((0..10).map(|_| take(1 + random.below(9 * MIB))));
        for _ in 0..8 {
            let victim = random.below(live.len() as u64) as usize;
            allocator.free(live.swap_remove(victim).handle).expect("the allocation should be live");
        }
        allocator.trim_all().expect("no fault should be injected");
    }
    let mut reported = Vec::new();
    allocator.look_back(0, StreamGroup::One(S0), &mut |journal| {
        for entry in (0..).map_while(|op| journal.entry(op)) {
            if let Some((Mark::Shrink, _, size_bytes)) = unpack_op(entry.op) {
                let placement = unpack_placement(entry.decision);
                reported.push((placement.segment, placement.offset_bytes, size_bytes));
            }
        }
    });
    assert_eq!(reported, *taken_back.borrow());
    assert!(reported.len() > 50, "{} shrinks", reported.len());
}

const S2: StreamId = StreamId(2);
const A: PoolId = PoolId(1);
const B: PoolId = PoolId(2);
/// Pool without allocations.
const EMPTY: PoolId = PoolId(3);

/// A program with every op that decides something. Each op can be changed without making the later ones invalid.
fn every_op() -> Vec<Op> {
    let id = AllocationId;
    let allocate = |number, pool, stream, size_bytes| Op::Allocate { id: id(number), pool, stream, size_bytes };
    let create = |pool| Op::CreatePool {
        pool,
        config: "symmetric:true".parse::<PoolConfig>().expect("the text should be valid").into(),
    };
    vec![
        Op::register(S0),
        Op::register(S1),
        Op::register(S2),
        create(A),
        create(B),
        create(EMPTY),
        create(PoolId(4)),
        allocate(0, POOL, S0, 3 * MIB + 1),
        allocate(1, POOL, S0, 3 * MIB + 1),
        allocate(2, A, S0, MIB),
        allocate(3, A, S1, 5 * MIB),
        allocate(4, B, S0, 2 * MIB),
        allocate(5, B, S1, 0),
        Op::RecordUse { id: id(0), stream: S1 },
        Op::RecordUse { id: id(2), stream: S1 },
        Op::Wait { stream: S0, on: S1 },
        Op::Synchronize { stream: S1 },
        Op::Free { id: id(1) },
        Op::Reserve { pool: A, stream: S0, size_bytes: 40 * MIB },
        Op::Reserve { pool: B, stream: S1, size_bytes: 20 * MIB },
        Op::BeginStep { pool: A, key: 3 },
        allocate(6, A, S0, 7 * MIB),
        Op::EndStep { pool: A },
        Op::BeginStep { pool: A, key: 0 },
        Op::EndStep { pool: A },
        Op::Sync,
        Op::Stay { pool: B, asked: None },
        Op::Stay { pool: B, asked: Some(Contents::Keep) },
        Op::Sleep { pool: B, contents: Contents::Keep },
        Op::Wake { pool: B },
        Op::Observe { observer: ObserverId(0), pool: POOL },
        Op::Acknowledge { observer: ObserverId(0) },
        Op::Forget { observer: ObserverId(0) },
        Op::Trim { pool: Some(A) },
        Op::Reserve { pool: A, stream: S0, size_bytes: 40 * MIB },
        Op::Reclaim { pool: A, stream: S0, size_bytes: 6 * MIB },
        Op::Refuse { pool: A, stream: S0, size_bytes: 100 * MIB, refusal: Refusal::Limit },
        Op::Trim { pool: None },
        Op::DestroyPool { pool: EMPTY },
    ]
}

/// Returns ops that differ from this one in one argument. All of them decide something else.
fn changed(op: &Op) -> Vec<Op> {
    let pools = |of: PoolId| [POOL, A, B].into_iter().filter(move |pool| *pool != of);
    let streams = |of: StreamId| [S0, S1, S2].into_iter().filter(move |stream| *stream != of);
    match *op {
        // Ids are dense. A policy is compared before the ranks begin, and here only by its decisions.
        Op::RegisterStream { .. } | Op::CreatePool { .. } => vec![],
        // What a stream waited for decides which later fences are necessary, and no placement.
        Op::Wait { .. } | Op::Synchronize { .. } => vec![],
        // Points at which ranks compare their histories.
        Op::Sync => vec![],
        // An observer keeps memory from being released. It decides nothing until then.
        Op::Observe { .. } | Op::Acknowledge { .. } | Op::Forget { .. } => vec![],
        // They end what an earlier op began, in the same pool.
        Op::EndStep { .. } | Op::Wake { .. } => vec![],
        Op::Allocate { id, pool, stream, size_bytes } => {
            let sizes = [size_bytes + 1, size_bytes + 511, size_bytes + 2 * MIB];
            let sizes = sizes.map(|size_bytes| Op::Allocate { id, pool, stream, size_bytes });
            let moved = pools(pool).map(|pool| Op::Allocate { id, pool, stream, size_bytes });
            let others = streams(stream).map(|stream| Op::Allocate { id, pool, stream, size_bytes });
            sizes.into_iter().chain(moved).chain(others).collect()
        }
        Op::Free { .. } => [0, 2, 3, 4].map(|id| Op::Free { id: AllocationId(id) }).into(),
        Op::RecordUse { id, stream } => {
            let others = [0, 1, 2, 3, 4].into_iter().map(AllocationId).filter(|other| *other != id);
            let others = others.map(|id| Op::RecordUse { id, stream });
            others.chain(streams(stream).map(|stream| Op::RecordUse { id, stream })).collect()
        }
        Op::Reserve { pool, stream, size_bytes } => {
            let moved = pools(pool).map(|pool| Op::Reserve { pool, stream, size_bytes });
            let others = streams(stream).map(|stream| Op::Reserve { pool, stream, size_bytes });
            moved.chain(others).chain([Op::Reserve { pool, stream, size_bytes: size_bytes + 2 * MIB }]).collect()
        }
        Op::Trim { pool } => {
            let all = [None, Some(POOL), Some(A), Some(B)];
            all.into_iter().filter(|other| *other != pool).map(|pool| Op::Trim { pool }).collect()
        }
        Op::BeginStep { pool, key } => {
            [1, 1 << 16, 1 << 32, 1 << 63].map(|bit| Op::BeginStep { pool, key: key ^ bit }).into()
        }
        Op::Sleep { pool, contents } => {
            let others = Contents::ALL.into_iter().filter(|other| *other != contents);
            others.map(|contents| Op::Sleep { pool, contents }).collect()
        }
        Op::Stay { pool, asked } => {
            let others = [None].into_iter().chain(Contents::ALL.map(Some)).filter(|other| *other != asked);
            let moved = pools(pool).map(|pool| Op::Stay { pool, asked });
            others.map(|asked| Op::Stay { pool, asked }).chain(moved).collect()
        }
        Op::Reclaim { pool, stream, size_bytes } => {
            let moved = [POOL, B].map(|pool| Op::Reclaim { pool, stream, size_bytes });
            moved.into_iter().chain([Op::Reclaim { pool, stream: S1, size_bytes }]).collect()
        }
        Op::Refuse { pool, stream, size_bytes, refusal } => {
            let all = [Refusal::Limit, Refusal::Segment, Refusal::Driver];
            let others = all.into_iter().filter(|other| *other != refusal);
            let others = others.map(|refusal| Op::Refuse { pool, stream, size_bytes, refusal });
            let moved = pools(pool).map(|pool| Op::Refuse { pool, stream, size_bytes, refusal });
            let streams = streams(stream).map(|stream| Op::Refuse { pool, stream, size_bytes, refusal });
            let size = Op::Refuse { pool, stream, size_bytes: size_bytes + 1, refusal };
            others.chain(moved).chain(streams).chain([size]).collect()
        }
        Op::DestroyPool { .. } => vec![Op::DestroyPool { pool: PoolId(4) }],
        // It follows the frees of all allocations of its pool, so no other pool can replace this one.
        Op::ResetPool { .. } => vec![],
    }
}

/// Returns the digests of all pools after a program.
fn digests_after(ops: &[Op]) -> Vec<Result<Digest, UnknownError>> {
    let records: Vec<Record> = ops.iter().cloned().map(Record::from).collect();
    let program = Program::new(&records).expect("the arguments should be valid");
    let device = SimBackend::builder().build();
    let config: Config = "symmetric:true".parse().expect("the text should be valid");
    let allocator: Rank<'_> = Allocator::new(&device, config).expect("the arguments should be valid");
    let mut replay = Replay::new(&allocator, &program);
    for op in program.ops() {
        replay.step(op).unwrap_or_else(|error| panic!("{op:?}: {error}"));
    }
    (0..5).map(|pool| allocator.digest(PoolId(pool))).collect()
}

/// Two ranks whose calls differ in one argument never agree.
#[test]
fn each_argument_of_each_op_is_in_a_digest() {
    let ops = every_op();
    let expected = digests_after(&ops);
    assert_eq!(digests_after(&ops), expected);
    let mut compared = 0;
    for at in 0..ops.len() {
        for other in changed(&ops[at]) {
            let mut changed = ops.clone();
            changed[at] = other.clone();
            assert_ne!(digests_after(&changed), expected, "op {at}: {:?} became {other:?}", ops[at]);
            compared += 1;
        }
    }
    assert!(compared > 100, "{compared} changes");
}
