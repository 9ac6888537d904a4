//! Calls that are rejected change nothing. Everything that a program can observe of two devices is compared around each call.

use crate::library::*;
use serde_json::Value;
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use stub_process::cuda::Live;
use symmalloc_torch::*;

/// Everything that a call could change.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Observed {
    stats: Vec<Value>,
    digests: Vec<u64>,
    live: Live,
    descriptors: usize,
    uses: Vec<u32>,
}

/// Observes allocators, without the counts of errors and driver calls.
pub(crate) fn observe(allocators: &[Allocator]) -> Observed {
    let mut digests = Vec::new();
    let stats = allocators.iter().map(|allocator| {
        let mut stats = allocator.stats();
        let pools = stats["pools"].as_array().expect("a list").len() as u32;
        digests.extend((0..pools).filter_map(|pool| allocator.try_digest(pool)));
        let fields = stats.as_object_mut().expect("an object");
        for counted in ["errors", "driver_calls"] {
            fields.remove(counted);
        }
        without_failures(&mut stats);
        stats
    });
    let stats = stats.collect();
    let uses = (0..3).map(|id| symmalloc_torch_pool_uses(0, id, 0)).collect();
    // Events are created when they are first needed.
    Observed { stats, digests, live: Live { events: 0, ..live() }, descriptors: stub_process::descriptors(), uses }
}

/// Removes the counts of failed allocations.
fn without_failures(stats: &mut Value) {
    if let Some(fields) = stats.as_object_mut() {
        ["num_ooms", "num_alloc_retries"].into_iter().for_each(|name| drop(fields.remove(name)));
        fields.values_mut().for_each(without_failures);
    } else if let Some(list) = stats.as_array_mut() {
        list.iter_mut().for_each(without_failures);
    }
}

impl Allocator {
    fn try_digest(self, pool: u32) -> Option<u64> {
        let mut out = 0;
        // SAFETY: a live allocator, and an output pointer.
        (unsafe { symmalloc_digest(self.0, pool, &raw mut out) } == SYMMALLOC_OK).then_some(out)
    }
}

struct Program {
    /// PyTorch's allocators of two devices, and one that the program created on the first device.
    allocators: [Allocator; 3],
    streams: Streams,
    pool: u32,
    sleeping: u32,
    destroyed: u32,
    quota: u32,
    block: Pointer,
    freed: Pointer,
    others: Pointer,
    asleep: Pointer,
}

impl Program {
    fn new() -> Self {
        let mut second = null_mut();
        // SAFETY: an output pointer.
        done(unsafe { symmalloc_process_allocator(1, &raw mut second) });
        let allocators = [Allocator::of_torch(), Allocator(second), Allocator::new("")];
        let [one, _, own] = allocators;
        let streams = Streams::new(1);
        let stream = streams.get(0);
        let pools = ["", "segments:expandable", "", "segments:expandable,growth_mb:0,streams:shared,range_mb:64"];
        let [pool, sleeping, destroyed, quota] = pools.map(|conf| one.create_pool(Some(conf)));
        // SAFETY: a live allocator and stream.
        done(unsafe { symmalloc_resize(one.0, quota, stream, 8 * MIB, null_mut()) });
        let asleep = one.allocate(sleeping, 3 * MIB, stream);
        let freed = one.allocate(pool, 5 * MIB, stream);
        let program = Program {
            block: one.allocate(pool, MIB, stream),
            others: own.allocate(0, MIB, stream),
            allocators,
            pool,
            sleeping,
            destroyed,
            quota,
            freed,
            asleep,
            streams,
        };
        one.allocate(quota, 6 * MIB, program.stream());
        one.free(freed);
        // SAFETY: a live allocator.
        done(unsafe { symmalloc_sleep(one.0, sleeping, SYMMALLOC_CONTENTS_KEEP, null_mut()) });
        done(one.destroy_pool(destroyed));
        one.trim();
        // This thread allocates in a pool, with a name, and another pool belongs to a graph.
        torch::begin((1, 0));
        torch::free(torch::allocate(MIB, program.stream()));
        torch::end((1, 0));
        done(symmalloc_torch_push_pool(0, pool));
        // SAFETY: a C string.
        done(unsafe { symmalloc_torch_push_name(0, c"layer".as_ptr()) });
        program
    }

    fn stream(&self) -> *mut c_void {
        self.streams.get(0)
    }

    fn one(&self) -> *mut DeviceAllocator {
        self.allocators[0].0
    }

    /// Returns the places of allocations of this thread on both devices, and their names.
    fn probes(&self) -> [(u32, u64, bool); 2] {
        let probe = |device: usize| {
            let mut out = null_mut();
            // SAFETY: the default stream, and an output pointer.
            done(unsafe { symmalloc_torch_allocate(device as i32, null_mut(), 700, 0, null(), &raw mut out) });
            let placement = self.allocators[device].placement(out as Pointer);
            let mut text = null_mut();
            // SAFETY: a live allocator, and an output pointer.
            done(unsafe { symmalloc_leak_report(self.allocators[device].0, &raw mut text) });
            let is_named = taken(text).contains("layer");
            self.allocators[device].free(out as Pointer);
            (placement.pool, placement.offset_bytes, is_named)
        };
        [0, 1].map(probe)
    }
}

/// A call that is rejected.
type Rejected = (&'static str, fn(&Program) -> symmalloc_status);

const UNKNOWN: u32 = 99;

fn allocated(program: &Program, pool: u32, bytes: usize, stream: *mut c_void) -> symmalloc_status {
    program.allocators[0].try_allocate(pool, bytes, stream).err().unwrap_or(SYMMALLOC_OK)
}

/// All calls are made with live allocators and streams, valid texts, and null for optional outputs.
const REJECTED: &[Rejected] = &[
    ("allocate in no pool", |it| allocated(it, UNKNOWN, MIB, it.stream())),
    ("allocate in a destroyed pool", |it| allocated(it, it.destroyed, MIB, it.stream())),
    ("allocate in a sleeping pool", |it| allocated(it, it.sleeping, MIB, it.stream())),
    ("allocate too much", |it| allocated(it, it.pool, usize::MAX / 2, it.stream())),
    ("allocate on a thread's default stream", |it| allocated(it, it.pool, MIB, 2 as *mut c_void)),
    ("free an interior pointer", |it| it.allocators[0].try_free(it.block + 512)),
    ("free twice", |it| it.allocators[0].try_free(it.freed)),
    ("free another allocator's memory", |it| it.allocators[0].try_free(it.others)),
    ("free memory of another device", |it| it.allocators[1].try_free(it.block)),
    ("use freed memory", |it| it.allocators[0].try_record_use(it.freed, it.stream())),
    ("use another allocator's memory", |it| it.allocators[0].try_record_use(it.others, it.stream())),
    ("use memory on a thread's default stream", |it| it.allocators[0].try_record_use(it.block, 2 as *mut c_void)),
    ("destroy the default pool", |it| it.allocators[0].destroy_pool(0)),
    ("destroy no pool", |it| it.allocators[0].destroy_pool(UNKNOWN)),
    ("destroy a destroyed pool", |it| it.allocators[0].destroy_pool(it.destroyed)),
    ("destroy a pool of another allocator", |it| it.allocators[1].destroy_pool(it.pool)),
    // SAFETY: see above.
    ("create a pool of an unknown policy", |it| unsafe {
        symmalloc_pool_create(it.one(), c"segments:pears".as_ptr(), &raw mut *Box::leak(Box::new(0)))
    }),
    // SAFETY: see above.
    ("create a pool without an output", |it| unsafe { symmalloc_pool_create(it.one(), null(), null_mut()) }),
    // SAFETY: see above.
    ("reserve in no pool", |it| unsafe { symmalloc_reserve(it.one(), UNKNOWN, it.stream(), MIB) }),
    // SAFETY: see above.
    ("reserve in a sleeping pool", |it| unsafe { symmalloc_reserve(it.one(), it.sleeping, it.stream(), 64 * MIB) }),
    // SAFETY: see above.
    ("reserve too much", |it| unsafe { symmalloc_reserve(it.one(), it.pool, it.stream(), usize::MAX / 2) }),
    // SAFETY: see above.
    ("put no pool to sleep", |it| unsafe { symmalloc_sleep(it.one(), UNKNOWN, SYMMALLOC_CONTENTS_KEEP, null_mut()) }),
    // SAFETY: see above.
    ("put a pool to sleep with unknown contents", |it| unsafe { symmalloc_sleep(it.one(), it.pool, 7, null_mut()) }),
    // SAFETY: see above.
    ("wake no pool", |it| unsafe { symmalloc_wake(it.one(), UNKNOWN, null_mut()) }),
    // SAFETY: see above.
    ("put no tag to sleep", |it| unsafe {
        symmalloc_sleep_tagged(it.one(), c"nothing".as_ptr(), SYMMALLOC_CONTENTS_KEEP, null_mut())
    }),
    // SAFETY: see above.
    ("wake no tag", |it| unsafe { symmalloc_wake_tagged(it.one(), c"nothing".as_ptr(), null_mut()) }),
    // SAFETY: see above.
    ("save in no place", |it| unsafe { symmalloc_save_in(it.one(), it.pool, 9, null()) }),
    // SAFETY: see above.
    ("save in no folder", |it| unsafe { symmalloc_save_in(it.one(), it.pool, SYMMALLOC_STORAGE_FOLDER, null()) }),
    // SAFETY: see above.
    ("save no pool", |it| unsafe { symmalloc_save_in(it.one(), UNKNOWN, SYMMALLOC_STORAGE_PAGEABLE, null()) }),
    // SAFETY: see above.
    ("retain no pool", |it| unsafe { symmalloc_retain_saved(it.one(), UNKNOWN, 1) }),
    // SAFETY: see above.
    ("resize no pool", |it| unsafe { symmalloc_resize(it.one(), UNKNOWN, it.stream(), MIB, null_mut()) }),
    // SAFETY: see above.
    ("resize without a quota", |it| unsafe { symmalloc_resize(it.one(), it.pool, it.stream(), MIB, null_mut()) }),
    // SAFETY: see above.
    ("resize below live memory", |it| unsafe { symmalloc_resize(it.one(), it.quota, it.stream(), MIB, null_mut()) }),
    // SAFETY: see above.
    ("resize beyond the range", |it| unsafe {
        symmalloc_resize(it.one(), it.quota, it.stream(), 65 * MIB, null_mut())
    }),
    // SAFETY: see above.
    ("end no step", |it| unsafe { symmalloc_step_end(it.one(), it.pool, null_mut()) }),
    // SAFETY: see above.
    ("begin a step of no pool", |it| unsafe { symmalloc_step_begin(it.one(), UNKNOWN, 0) }),
    // SAFETY: see above.
    ("adopt no plans", |it| unsafe { symmalloc_plans_adopt(it.one(), it.pool, c"/nowhere".as_ptr(), null_mut()) }),
    // SAFETY: see above.
    ("grant access to no device", |it| unsafe { symmalloc_grant_access(it.one(), -1) }),
    // SAFETY: see above.
    ("read the contents of a pool that is awake", |it| unsafe {
        symmalloc_saved_copy(it.one(), it.asleep as *const c_void, 8, null_mut(), null_mut())
    }),
    // SAFETY: see above.
    ("find the placement of freed memory", |it| unsafe {
        symmalloc_placement_of(it.one(), it.freed as *const c_void, &raw mut *Box::leak(Box::default()))
    }),
    ("push no pool", |_| symmalloc_torch_push_pool(0, UNKNOWN)),
    ("push a destroyed pool", |it| symmalloc_torch_push_pool(0, it.destroyed)),
    ("pop no pool of the second device", |_| symmalloc_torch_pop_pool(1)),
    ("pop no name of the second device", |_| symmalloc_torch_pop_name(1)),
    // SAFETY: see above.
    ("push no name", |_| unsafe { symmalloc_torch_push_name(0, null()) }),
    ("push a pool of no device", |_| symmalloc_torch_push_pool(9, 0)),
    ("end no scope", |_| symmalloc_torch_end_scope(0, 77, 0)),
    ("end a scope of the second device", |_| symmalloc_torch_end_scope(1, 1, 0)),
    // SAFETY: see above.
    ("configure too late", |_| unsafe { symmalloc_torch_configure(c"total_limit_mb:16".as_ptr()) }),
    // SAFETY: see above.
    ("record no trace", |it| unsafe { symmalloc_trace_start(it.one(), c"/nowhere/x.trace".as_ptr()) }),
    // SAFETY: see above.
    ("stop no trace", |it| unsafe { symmalloc_trace_stop(it.one()) }),
];

stub_test!(rejected_calls_change_nothing, ["STUB_DEVICES" = "2", "SYMMALLOC_CONF" = "stitching:false"], {
    let program = Program::new();
    let probes = program.probes();
    // The scopes of one device do not apply to the other.
    assert_eq!(probes.map(|(pool, _, is_named)| (pool, is_named)), [(program.pool, true), (0, false)]);
    for (what, call) in REJECTED {
        let before = observe(&program.allocators);
        let status = call(&program);
        assert!(status != SYMMALLOC_OK && status != SYMMALLOC_INTERNAL, "{what}: {status:?}, {}", message());
        let after = observe(&program.allocators);
        assert_eq!(after, before, "{what}");
        assert_eq!(program.probes(), probes, "{what}: the scopes of this thread");
    }
    // Not even if it has scopes of its own.
    done(symmalloc_torch_push_pool(1, 0));
    assert_eq!(program.probes(), probes);
    done(symmalloc_torch_pop_pool(1));
    // A pool that gets the number is like any other: nothing was kept for it.
    let [other, named] = [UNKNOWN - 1, UNKNOWN].map(|key| new_pool(&program, key));
    assert_eq!(named, other, "pool {UNKNOWN} was named by rejected calls");
});

/// Creates a pool with a number, and returns what it does: its phase, host memory for its contents during and after a sleep, and its digest.
fn new_pool(program: &Program, key: u32) -> (u32, [u64; 3], Option<u64>) {
    let (allocator, mut phase) = (program.allocators[0], 9);
    let release = || {
        let mut bytes = 0;
        // SAFETY: a live allocator, and an output pointer.
        done(unsafe { symmalloc_release_host_memory(allocator.0, &raw mut bytes) });
        bytes
    };
    // SAFETY: a live allocator, and an output pointer.
    unsafe {
        done(symmalloc_pool_create_with_key(allocator.0, key, null()));
        done(symmalloc_phase(allocator.0, key, &raw mut phase));
    }
    allocator.allocate(key, MIB, program.stream());
    let digest = allocator.try_digest(key);
    release();
    let before = live().host_bytes;
    // SAFETY: a live allocator.
    done(unsafe { symmalloc_sleep(allocator.0, key, SYMMALLOC_CONTENTS_KEEP, null_mut()) });
    let asleep = live().host_bytes - before;
    // SAFETY: as above.
    done(unsafe { symmalloc_wake(allocator.0, key, null_mut()) });
    (phase, [asleep, release(), live().host_bytes - before], digest)
}
