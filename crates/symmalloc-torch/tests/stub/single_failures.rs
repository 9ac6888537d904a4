//! Each driver call fails once, and the program continues as if nothing had happened: see `stub_process::sweep`.

use crate::library::*;
use std::collections::BTreeMap;
use std::ffi::c_void;
use stub_process::cuda::Live;
use stub_process::{Repeatable, sweep};
use symmalloc_torch::*;

/// A step of a program. Blocks have numbers, and streams and mempools too.
#[derive(Clone, Copy, Debug)]
enum Step {
    CreatePool(&'static str),
    /// Destroys the pool, and trims.
    DestroyPool,
    /// Allocates in the pool, if there is one.
    Take(u8, usize, usize),
    Use(u8, usize),
    Free(u8),
    Reserve(usize, usize),
    Trim,
    Sleep(u32),
    Wake,
    Resize(usize),
    /// Begins to allocate in a mempool.
    Begin(u64),
    /// Allocates through PyTorch's entry points.
    Torch(u8, usize, usize),
    End(u64),
    Release(u64),
}
use Step::*;

struct Program {
    allocator: Allocator,
    streams: &'static Streams,
    pool: u32,
    blocks: BTreeMap<u8, Pointer>,
    /// Uses of mempools that the program has to release.
    uses: Vec<u64>,
    is_destroyed: bool,
}

#[derive(Debug, PartialEq)]
struct State {
    live: Live,
    pools: String,
    blocks: Vec<u8>,
}

/// A filter that accepts all streams.
unsafe extern "C-unwind" fn accepts(_context: *mut c_void, _stream: *mut c_void) -> bool {
    true
}

fn outcome(status: symmalloc_status) -> Result<(), String> {
    if status == SYMMALLOC_OK { Ok(()) } else { Err(message()) }
}

impl Program {
    fn new() -> Self {
        let (allocator, streams) = (Allocator::of_torch(), lasting_streams());
        for index in 0..2 {
            allocator.free(allocator.allocate(0, 512, streams.get(index)));
        }
        allocator.trim();
        Program { allocator, streams, pool: 0, blocks: BTreeMap::new(), uses: Vec::new(), is_destroyed: false }
    }

    /// Returns current memory of the pools, without totals and counts of errors.
    fn pools(&self) -> String {
        let stats = self.allocator.stats();
        let total = ["allocated_bytes", "reserved_bytes", "requested_bytes", "active_bytes", "segment"];
        let of = |stats: &serde_json::Value| total.map(|name| stats[name]["all"]["current"].to_string()).join(" ");
        let pools = stats["pools"].as_array().expect("a list").iter();
        let pools = pools.map(|pool| format!("{} {}: {}", pool["kind"], pool["phase"], of(&pool["stats"])));
        format!("{}\n{}", of(&stats["total"]), pools.collect::<Vec<_>>().join("\n"))
    }
}

impl Repeatable for Program {
    type Step = Step;
    type Error = String;
    type Held = State;

    fn run(&mut self, step: &Step) -> Result<(), String> {
        let (allocator, pool) = (self.allocator, self.pool);
        match *step {
            CreatePool(conf) => {
                let conf = c_text(conf);
                // SAFETY: a live allocator, a C string, and an output pointer.
                outcome(unsafe { symmalloc_pool_create(allocator.0, conf.as_ptr(), &raw mut self.pool) })
            }
            DestroyPool => {
                if !std::mem::replace(&mut self.is_destroyed, true) {
                    outcome(allocator.destroy_pool(pool))?;
                }
                // SAFETY: a live allocator.
                outcome(unsafe { symmalloc_trim(allocator.0, std::ptr::null_mut()) })
            }
            Take(block, stream, size) => {
                let made = allocator.try_allocate(pool, size, self.streams.get(stream)).map_err(|_| message())?;
                self.blocks.insert(block, made);
                Ok(())
            }
            Use(block, stream) => outcome(allocator.try_record_use(self.blocks[&block], self.streams.get(stream))),
            Free(block) => {
                outcome(allocator.try_free(self.blocks[&block]))?;
                self.blocks.remove(&block);
                Ok(())
            }
            Reserve(stream, size) => {
                let stream = self.streams.get(stream);
                // SAFETY: a live allocator and stream.
                outcome(unsafe { symmalloc_reserve(allocator.0, pool, stream, size) })
            }
            // SAFETY: a live allocator.
            Trim => outcome(unsafe { symmalloc_trim(allocator.0, std::ptr::null_mut()) }),
            // SAFETY: a live allocator.
            Sleep(contents) => outcome(unsafe { symmalloc_sleep(allocator.0, pool, contents, std::ptr::null_mut()) }),
            // SAFETY: a live allocator.
            Wake => outcome(unsafe { symmalloc_wake(allocator.0, pool, std::ptr::null_mut()) }),
            Resize(size) => {
                // SAFETY: a live allocator and stream.
                outcome(unsafe { symmalloc_resize(allocator.0, pool, self.streams.get(0), size, std::ptr::null_mut()) })
            }
            Begin(id) => {
                let mut number = 0;
                // SAFETY: a filter without a context, and an output pointer.
                outcome(unsafe {
                    symmalloc_torch_begin_scope(0, id, 0, Some(accepts), std::ptr::null_mut(), None, &raw mut number)
                })?;
                self.uses.push(id);
                Ok(())
            }
            Torch(block, stream, size) => {
                let mut made = std::ptr::null_mut();
                // SAFETY: a live stream, and an output pointer.
                outcome(unsafe {
                    symmalloc_torch_allocate(0, self.streams.get(stream), size, 0, std::ptr::null(), &raw mut made)
                })?;
                self.blocks.insert(block, made as Pointer);
                Ok(())
            }
            End(id) => outcome(symmalloc_torch_end_scope(0, id, 0)),
            Release(id) => {
                torch::release((id, 0));
                self.uses.retain(|known| *known != id);
                Ok(())
            }
        }
    }

    fn held(&self) -> State {
        // Events are created when they are first needed.
        State { live: live(), pools: self.pools(), blocks: self.blocks.keys().copied().collect() }
    }

    fn end(mut self) -> State {
        std::mem::take(&mut self.blocks).into_values().for_each(|block| self.allocator.free(block));
        self.uses.drain(..).for_each(|id| torch::release((id, 0)));
        if self.pool != 0 && !self.is_destroyed {
            done(self.allocator.destroy_pool(self.pool));
        }
        self.allocator.trim();
        // The allocator and its events remain.
        let State { live, .. } = self.held();
        State { live: Live { events: 0, ..live }, pools: String::new(), blocks: Vec::new() }
    }
}

/// Calls whose failure may have no consequence: they restore a context or a mode, release a reference, or destroy an object.
const SILENT: [&str; 7] = [
    "cuCtxGetCurrent",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuMemRelease",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuThreadExchangeStreamCaptureMode",
];

fn check(what: &str, steps: &[Step]) {
    let mut unreported = sweep(what, steps, &["cuStreamDestroy_v2"], Program::new);
    unreported.retain(|name| !SILENT.contains(&name.as_str()));
    assert!(unreported.is_empty(), "{what}: failures of these calls must be reported: {unreported:?}");
}

stub_test!(pools_survive_any_failed_call, {
    check(
        "a pool",
        &[
            CreatePool("segments:expandable"),
            Take(1, 0, 3 * MIB),
            Use(1, 1),
            Take(2, 0, 5 * MIB),
            Free(1),
            Take(3, 0, 2 * MIB),
            Reserve(1, 20 * MIB),
            Free(2),
            Trim,
            Sleep(SYMMALLOC_CONTENTS_KEEP),
            Wake,
            Sleep(SYMMALLOC_CONTENTS_DROP),
            Wake,
            Free(3),
            DestroyPool,
        ],
    );
    check(
        "a quota",
        &[
            CreatePool("segments:expandable,growth_mb:0,streams:shared,range_mb:96"),
            Resize(64 * MIB),
            Take(1, 0, 5 * MIB),
            Resize(6 * MIB),
            Free(1),
            Resize(0),
            DestroyPool,
        ],
    );
});

stub_test!(mempools_survive_any_failed_call, ["SYMMALLOC_CONF" = "stitching:false"], {
    check(
        "mempools",
        &[
            Begin(1),
            Torch(1, 0, 8 * MIB),
            Torch(2, 1, 3 * MIB),
            Use(1, 1),
            End(1),
            Begin(2),
            Torch(3, 0, 5 * MIB),
            End(2),
            Torch(4, 0, 2 * MIB),
            Free(1),
            Free(3),
            Trim,
            Release(1),
            Trim,
            Free(2),
            Free(4),
            Release(2),
            Trim,
        ],
    );
});
