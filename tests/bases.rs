//! Pools with a base: the same program gets the same addresses on every rank and in every process, and a base that cannot be used is an
//! error that leaves nothing behind.

use symmalloc_core::base::{Base, BaseError, Occupant, SLOT_BYTES};
use symmalloc_core::config::{Config, ConfigError, PoolConfig};
use symmalloc_core::errors::{AllocateError, OutOfMemoryCause, PoolError};
use symmalloc_core::lock::{Exclusive, Lock, Shared};
use symmalloc_core::restore::RestoreError;
use symmalloc_core::units::{GIB, MIB};
use symmalloc_core::{Allocator, Digest, Op, PoolId, StreamId, generic};
use symmalloc_harness::checker::{DeviceWork, compare_with_oracle};
use symmalloc_harness::generate::Scenario;
use symmalloc_harness::run::Run;
use symmalloc_sim::{Addresses, Call, Fault, FaultRule, SimBackend};
use symmalloc_trace::layout;

const S0: StreamId = StreamId(0);
const S1: StreamId = StreamId(1);

fn slot(slot: u32) -> Base {
    Base::slot(slot).expect("it exists")
}

fn based(slot_number: u32) -> PoolConfig {
    PoolConfig::builder().base(slot(slot_number)).build().expect("valid")
}

fn with_default_pool(pool: PoolConfig) -> Config {
    Config::builder().default_pool(pool).build().expect("valid")
}

/// Gives every pool of a generated program a slot of its own, in the order of creation.
fn with_bases(scenario: &Scenario) -> Scenario {
    let based = |pool: &PoolConfig, number: u32| pool.to_builder().base(slot(number)).build().expect("valid");
    let config = with_base_of_default_pool(&scenario.config, &based(scenario.config.default_pool(), 0));
    let mut pools = 0;
    let ops = scenario.ops().map(|(op, access)| match op {
        Op::CreatePool { pool, config } => {
            pools += 1;
            (Op::CreatePool { pool, config: Box::new(based(&config, pools % 60)) }, access)
        }
        op => (op, access),
    });
    Scenario::new(config, scenario.granularity_bytes, ops.collect::<Vec<_>>())
}

fn with_base_of_default_pool(config: &Config, pool: &PoolConfig) -> Config {
    config.to_builder().default_pool(pool.clone()).build().expect("valid")
}

/// Runs a program. Returns the address of every allocation, with `None` for ops that made none, and the digests of the pools.
fn addresses<L: Lock>(scenario: &Scenario, device: &SimBackend) -> (Vec<Option<u64>>, Vec<Digest>) {
    let allocator = generic::Allocator::<_, L>::with_lock(device, scenario.config.clone()).expect("the slot is free");
    let mut run = Run::new(&allocator, scenario);
    let mut work = DeviceWork::new(device);
    let step = |(index, (op, _)): (usize, (Op, _))| {
        let result = run.step(index);
        work.submit(&op, &result);
        result.ok().flatten().map(|allocation| allocation.address.0)
    };
    let addresses = scenario.ops().enumerate().map(step).collect();
    allocator.check().expect("consistent");
    let digests = allocator.pools().into_iter().map(|pool| allocator.digest(pool).expect("it exists")).collect();
    (addresses, digests)
}

#[test]
fn ranks_get_the_same_addresses_for_ten_thousand_ops() {
    let (mut ops, mut made, mut elsewhere) = (0, 0, 0);
    for seed in 0..30 {
        let plain = Scenario::from_seed(seed, 400);
        ops += plain.program.ops().len();
        let scenario = with_bases(&plain);
        let rank = |scenario: &Scenario, rank: u32, order: Addresses| {
            let device = scenario.device_builder(seed).rank(rank).addresses(order).build();
            let run = addresses::<Exclusive>(scenario, &device);
            assert!(device.leaks().is_empty(), "seed {seed}: {}", device.leaks());
            run
        };
        let first = rank(&scenario, 0, Addresses::default());
        made += first.0.iter().flatten().filter(|address| **address >= slot(0).address()).count();
        for (other, order) in [(1, Addresses::default()), (2, Addresses::Ascending)] {
            assert!(rank(&scenario, other, order) == first, "seed {seed}: rank {other} and rank 0 differ");
        }
        let device = scenario.device_builder(seed).rank(3).build();
        assert!(addresses::<Shared>(&scenario, &device) == first, "seed {seed}: with locks");
        // Without bases, the ranks get the same placements at other addresses.
        let (one, other) = (rank(&plain, 0, Addresses::default()), rank(&plain, 1, Addresses::default()));
        assert_eq!(one.1, other.1);
        elsewhere += one.0.iter().zip(&other.0).filter(|(one, other)| one != other).count();
    }
    assert!(ops >= 10_000, "{ops} ops");
    assert!(made > 3_000 && elsewhere > 3_000, "{made} allocations in slots, {elsewhere} differ without");
}

/// Returns `true` if heaps without a base begin with less than a granule. With a base, they do not.
fn has_first_segments(scenario: &Scenario) -> bool {
    let is_larger = |pool: &PoolConfig| {
        pool.stitching().is_some_and(|stitching| stitching.granule_bytes > scenario.granularity_bytes)
    };
    let created = |(op, _)| matches!(op, Op::CreatePool { config, .. } if is_larger(&config));
    is_larger(scenario.config.default_pool()) || scenario.ops().any(created)
}

#[test]
fn a_base_changes_no_other_decision() {
    let scenarios = (0..120).map(|seed| (seed, Scenario::from_seed(seed, 150)));
    let compared: Vec<_> = scenarios.filter(|(_, scenario)| !has_first_segments(scenario)).collect();
    assert!(compared.len() > 40, "{} programs", compared.len());
    for (seed, scenario) in compared {
        let (device, other) = (scenario.device(seed), scenario.device(seed));
        let (plain, based) =
            (compare_with_oracle(&scenario, &device), compare_with_oracle(&with_bases(&scenario), &other));
        assert_eq!(plain.outcomes, based.outcomes, "seed {seed}");
    }
}

/// The ranges of a pool with a base are few, so none is used up by a small segment.
#[test]
fn a_pool_with_a_base_begins_with_the_range_that_grows() {
    let config: PoolConfig = "base:slot:3,range_mb:1048576,stitching:true".parse().expect("the text should be valid");
    let allocator: Allocator<_> =
        Allocator::new(SimBackend::builder().build(), with_default_pool(config)).expect("the slot should be free");
    let stream = allocator.register_stream().expect("a stream id should be available");
    for size_bytes in [512, 12 * MIB] {
        let made = allocator.allocate(PoolId::DEFAULT, stream, size_bytes).expect("the range should have room");
        assert_eq!(made.placement.segment.0, 0);
    }
}

#[test]
fn every_range_of_the_pool_lies_in_its_slot() {
    let stitched = "streams:shared,stitching_granule_mb:2,stitching_least_mb:4";
    for config in ["", "segments:fixed", "segments:reserved,segment_mb:64", stitched] {
        let config: PoolConfig = format!("base:slot:3,{config}").parse().expect("valid");
        let device = SimBackend::builder().build();
        let allocator: Allocator<_> = Allocator::new(&device, with_default_pool(config.clone())).expect("free");
        let (s0, s1) = (allocator.register_stream().expect("one"), allocator.register_stream().expect("two"));
        let parts: Vec<_> = (0..8).map(|_| allocator.allocate(PoolId::DEFAULT, s0, 3 * MIB).expect("fits")).collect();
        let _kept = allocator.allocate(PoolId::DEFAULT, s1, 3 * MIB).expect("fits");
        for part in parts.iter().step_by(2) {
            allocator.free(part.handle).expect("live");
        }
        let _kept = allocator.allocate(PoolId::DEFAULT, s0, 11 * MIB).expect("fits");
        for segment in allocator.snapshot().segments {
            let offset = segment.base.0 - slot(3).address();
            assert!(offset + segment.size_bytes <= SLOT_BYTES, "{config}: {segment:?}");
        }
        // Nothing was reserved outside of the slot.
        assert_eq!(device.calls().of(Call::Reserve), 1, "{config}");
        drop(allocator);
        assert!(device.leaks().is_empty(), "{config}: {}", device.leaks());
    }
}

#[test]
fn two_pools_cannot_have_overlapping_bases() {
    let device = SimBackend::builder().build();
    let allocator: Allocator<_> = Allocator::new(&device, Config::default()).expect("valid");
    let first = allocator.create_pool(based(0)).expect("free");
    let in_the_middle = Base::at(slot(0).address() + SLOT_BYTES / 2).expect("aligned");
    for base in [slot(0), in_the_middle] {
        let config = PoolConfig::builder().base(base).build().expect("valid");
        let Err(PoolError::Base(error)) = allocator.create_pool(config) else { panic!("{base} is occupied") };
        let occupant = Occupant::Pool { pool: first, device: 0, base: slot(0) };
        assert_eq!(*error, BaseError::Occupied { base, occupant, free_slot: Some(1) });
    }
    assert_eq!((allocator.pool_count(), device.leaks().ranges), (2, 1), "neither attempt left anything");
    allocator.destroy_pool(first).expect("unused");
    assert_eq!(device.leaks().ranges, 0, "a destroyed pool has no addresses");
    assert_eq!(allocator.create_pool(based(0)), Ok(PoolId(2)), "the slot is free again");
}

#[test]
fn an_occupied_base_of_the_default_pool_is_an_error() {
    let device = SimBackend::builder().build();
    let _first: Allocator<_> = Allocator::new(&device, with_default_pool(based(5))).expect("free");
    let second = Allocator::<_>::new(&device, with_default_pool(based(5)));
    let Err(ConfigError::Base(error)) = second.map(drop) else { panic!("the slot is occupied") };
    assert_eq!(
        error.to_string(),
        "base:slot:5 is occupied: p0 of device 0 in this process has base:slot:5; use base:slot:0, which is free in this \
         process"
    );
}

#[test]
fn a_failed_call_is_an_error_and_a_trim_retries_the_release() {
    let device = SimBackend::builder().build();
    let allocator: Allocator<_> = Allocator::new(&device, Config::default()).expect("valid");
    let stream = allocator.register_stream().expect("the first");
    device.inject(Some(Call::Reserve), FaultRule::At { ordinal: device.calls().of(Call::Reserve) }, Fault::Refused);
    let refused = allocator.create_pool(based(0));
    assert!(
        matches!(&refused, Err(PoolError::Base(error)) if matches!(**error, BaseError::Driver { .. })),
        "{refused:?}"
    );
    assert_eq!((allocator.pool_count(), device.leaks().ranges), (1, 0));
    let pool = allocator.create_pool(based(0)).expect("free");
    let made = allocator.allocate(pool, stream, MIB).expect("fits");
    allocator.free(made.handle).expect("live");
    // The segment is released, and the addresses are not.
    device.inject(Some(Call::Release), FaultRule::At { ordinal: device.calls().of(Call::Release) + 1 }, Fault::Refused);
    let destroyed = allocator.destroy_pool(pool);
    assert!(matches!(destroyed, Err(PoolError::Backend(_))), "{destroyed:?}");
    assert!(matches!(allocator.create_pool(based(0)), Err(PoolError::Base(_))), "the addresses are still reserved");
    device.inject(Some(Call::Release), FaultRule::At { ordinal: device.calls().of(Call::Release) }, Fault::Refused);
    allocator.trim_all().expect_err("the driver fails again");
    allocator.trim_all().expect("no further fault");
    assert_eq!(device.leaks().ranges, 0);
    let _kept = allocator.create_pool(based(0)).expect("free again");
}

#[test]
fn a_full_slot_is_an_error_on_every_rank() {
    for rank in 0..3 {
        let device = SimBackend::builder().rank(rank).build();
        let config: PoolConfig = "base:slot:0,range_mb:409600".parse().expect("valid");
        let allocator: Allocator<_> = Allocator::new(&device, with_default_pool(config)).expect("free");
        let streams: Vec<_> = (0..3).map(|_| allocator.register_stream().expect("few")).collect();
        for stream in &streams[..2] {
            let _kept = allocator.allocate(PoolId::DEFAULT, *stream, MIB).expect("fits");
        }
        let error = allocator.allocate(PoolId::DEFAULT, streams[2], MIB).expect_err("two ranges fit into a slot");
        let AllocateError::OutOfMemory(error) = error else { panic!("{error}") };
        let (needed_bytes, largest_free_bytes) = (400 * GIB, 224 * GIB);
        assert_eq!(error.cause, OutOfMemoryCause::AddressesFull { needed_bytes, largest_free_bytes });
        assert_eq!(device.mapped_bytes(), 4 * MIB, "nothing was mapped for it");
        // The refused heap works again once addresses are free.
        let freed = allocator.snapshot().segments.len();
        assert_eq!(freed, 2);
        allocator.reset_pool(PoolId::DEFAULT).expect("it exists");
        allocator.trim_all().expect("no faults");
        let _kept = allocator.allocate(PoolId::DEFAULT, streams[2], MIB).expect("fits now");
    }
}

#[test]
fn a_restored_pool_has_the_saved_addresses_in_another_process() {
    let streams =
        |allocator: &Allocator<&SimBackend>| (0..2).for_each(|_| assert!(allocator.register_stream().is_ok()));
    let policy = PoolConfig::builder().fixed().base(slot(7)).build().expect("valid");
    let device = SimBackend::builder().build();
    let old: Allocator<_> = Allocator::new(&device, with_default_pool(policy.clone())).expect("free");
    streams(&old);
    let pool = PoolId::DEFAULT;
    let made: Vec<_> = (0..6).map(|index| old.allocate(pool, [S0, S1][index % 2], 15 * MIB).expect("fits")).collect();
    // The ranges of the first and the fourth segment become free, so offsets no longer follow from the order of the segments.
    for index in [0, 3] {
        old.free(made[index].handle).expect("live");
    }
    old.trim_all().expect("no faults");
    let again = old.allocate(pool, S1, 13 * MIB).expect("fits");
    assert!(again.address < made[1].address, "it fills the first gap");
    let saved = old.save_layout(pool).expect("nothing is retired");
    let text = layout::to_text(&saved);
    let read = layout::parse(&text).expect("a written layout can be read");
    assert_eq!(read, saved);

    let other = SimBackend::builder().rank(1).seed(9).build();
    let new: Allocator<_> = Allocator::new(&other, with_default_pool(policy)).expect("free");
    streams(&new);
    new.restore_layout(pool, &read).expect("fresh");
    assert_eq!(layout::to_text(&new.save_layout(pool).expect("restored")), text);
    let bases = |allocator: &Allocator<&SimBackend>| {
        allocator
            .snapshot()
            .segments
            .iter()
            .map(|segment| (segment.heap, segment.segment, segment.base))
            .collect::<Vec<_>>()
    };
    assert_eq!(bases(&new), bases(&old));
    for stream in [S0, S1, S0] {
        let next =
            |allocator: &Allocator<&SimBackend>| allocator.allocate(pool, stream, 11 * MIB).expect("fits").address;
        assert_eq!(next(&new), next(&old));
    }
    assert_eq!(new.digest(pool), old.digest(pool));

    let elsewhere: Allocator<_> =
        Allocator::new(SimBackend::builder().build(), with_default_pool(based(8))).expect("free");
    elsewhere.register_stream().expect("the first");
    assert!(matches!(elsewhere.restore_layout(pool, &read), Err(RestoreError::Config { .. })), "another base");
}

#[test]
fn impossible_offsets_in_a_layout_are_rejected() {
    let head =
        "symmalloc-layout 1\npool segments:fixed,base:slot:0\ngranularity 2097152\nheap s0 9 00000000000000aF 3\n";
    let parse = |segments: &str| layout::parse(&format!("{head}{segments}end {}\n", 3 + segments.lines().count()));
    let (one, other) = ("segment 0 large 0\nmemory 0 2097152\n", "segment 1 large 2097152\nmemory 0 2097152\n");
    parse(&format!("{one}{other}")).expect("possible");
    for second in
        ["segment 1 large\n", "segment 1 large 0\n", "segment 1 large 4096\n", "segment 1 large 1099511627776\n"]
    {
        let error = parse(&format!("{one}{second}memory 0 2097152\n")).expect_err(second);
        assert!(error.to_string().contains("g1 must have its own offset from the base"), "{second}: {error}");
    }
    // Ranges that overlap are found when the pool is restored.
    let overlapping = "segment 0 large 0\nmemory 0 4194304\nsegment 1 large 2097152\nmemory 0 2097152\n";
    let layout = parse(overlapping).expect("each segment is possible");
    let device = SimBackend::builder().build();
    let allocator: Allocator<_> = Allocator::new(&device, with_default_pool(layout.config().clone())).expect("free");
    allocator.register_stream().expect("the first");
    let error = allocator.restore_layout(PoolId::DEFAULT, &layout).expect_err("the segments overlap");
    assert!(matches!(error, RestoreError::Backend(_)), "{error}");
    assert_eq!(device.mapped_bytes(), 0);
    allocator.check().expect("consistent");
}

/// Ranks whose threads acquired memory in another order have equal placements at other addresses, and their digests differ.
#[test]
fn another_order_of_heaps_shows_in_the_digests() {
    let run = |order: [StreamId; 2], base: Option<Base>| {
        let config = PoolConfig::builder().base(base).build().expect("valid");
        let allocator: Allocator<_> =
            Allocator::new(SimBackend::builder().build(), with_default_pool(config)).expect("free");
        (0..2).for_each(|_| assert!(allocator.register_stream().is_ok()));
        for stream in order {
            let _kept = allocator.allocate(PoolId::DEFAULT, stream, MIB).expect("fits");
        }
        allocator.digest(PoolId::DEFAULT).expect("it exists")
    };
    assert_eq!(run([S0, S1], None), run([S1, S0], None));
    assert_ne!(run([S0, S1], Some(slot(0))), run([S1, S0], Some(slot(0))));
}

/// The heap's range leaves 32 MiB of the slot to stitched ranges.
#[test]
fn unused_stitched_ranges_make_room_in_a_full_slot() {
    let config = "base:slot:0,streams:shared,growth_mb:2,range_mb:1048544,stitching_granule_mb:2,stitching_least_mb:4";
    let device = SimBackend::builder().build();
    let allocator: Allocator<_> =
        Allocator::new(&device, with_default_pool(config.parse().expect("valid"))).expect("free");
    let stream = allocator.register_stream().expect("the first");
    let take = |mib: u64| allocator.allocate(PoolId::DEFAULT, stream, mib * MIB).expect("fits").handle;
    let mut parts: Vec<_> = (0..32).map(|_| take(2)).collect();
    for at in (0..16).rev() {
        allocator.free(parts.remove(2 * at)).expect("live");
    }
    let reserved_bytes = allocator.stats().reserved_bytes.current;
    // The free granules are apart, so each of these is a stitched range: 8, 12 and 4 of the 16 granules that fit, then more.
    for mib in [16, 8, 24, 30, 20] {
        allocator.free(take(mib)).expect("live");
        // Other memory at home changes, so that no range can be used again.
        let small = take(2);
        allocator.free(parts.remove(0)).expect("live");
        parts.push(small);
        assert_eq!(allocator.stats().reserved_bytes.current, reserved_bytes, "{mib} MiB were not stitched");
    }
    assert_eq!(device.calls().of(Call::Reserve), 1);
    allocator.check().expect("consistent");
}

/// A pool that inherits the settings of a pool with a base, but not the base, has the range of every other pool.
#[test]
fn without_its_base_a_pool_has_the_default_range() {
    let plain = PoolConfig::builder().symmetric(true).build().expect("valid");
    let with_base = plain.to_builder().base(slot(0)).build().expect("valid");
    assert_ne!(with_base.segments(), plain.segments());
    assert_eq!(with_base.to_builder().base(None).build(), Ok(plain));
    let chosen: PoolConfig = "base:slot:0,range_mb:1024".parse().expect("valid");
    let kept = chosen.to_builder().base(None).build().expect("valid");
    assert_eq!(kept.segments(), chosen.segments(), "a range that the program chose stays");
    let moved = with_base.to_builder().base(slot(1)).build().expect("valid");
    assert_eq!(moved.segments(), with_base.segments());
}

#[test]
fn an_idle_device_has_each_address_once() {
    let device = symmalloc_sim::IdleBackend::default();
    let allocator: Allocator<_> = Allocator::new(&device, with_default_pool(based(1))).expect("free");
    let in_the_middle = Base::at(slot(1).address() + SLOT_BYTES / 2).expect("aligned");
    for base in [slot(1), in_the_middle] {
        let config = PoolConfig::builder().base(base).build().expect("valid");
        let Err(PoolError::Base(error)) = allocator.create_pool(config) else { panic!("{base} is occupied") };
        let occupant = Occupant::Pool { pool: PoolId::DEFAULT, device: 0, base: slot(1) };
        assert_eq!(*error, BaseError::Occupied { base, occupant, free_slot: Some(0) });
    }
    drop(allocator);
    let _kept: Allocator<_> = Allocator::new(&device, with_default_pool(based(1))).expect("free again");
}
