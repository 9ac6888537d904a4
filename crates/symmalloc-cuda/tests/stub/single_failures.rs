//! Each driver call fails once, and the program continues as if nothing had happened: see `stub_process::sweep`.
//!
//! Drops of buffers cannot report an error, so most of these programs allocate and free by handle.

use crate::process::{Logged, begin_log, device, live, stub_test, take_log};
use cudarc::driver::{CudaStream, DevicePtr};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use stub_process::cuda::Live;
use stub_process::{Repeatable, sweep};
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::op::Contents;
use symmalloc_core::report::MemoryStats;
use symmalloc_core::sleep::Phase;
use symmalloc_core::{Allocation, PoolId, StreamId};
use symmalloc_cuda::{
    CudaAllocator, CudaBackend, CudaBackendBuilder, CudaError, CudaMemory, GraphPool, ImageStorage, LentStream, Pool,
};
use symmalloc_harness::levels::levels;

const MIB: u64 = 1 << 20;

/// A stream of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum On {
    /// A stream of the test.
    Stream(usize),
    /// The id of a lent stream.
    Lent,
    /// The host.
    Host,
}

/// A step of a program. Blocks have numbers.
#[derive(Clone, Debug)]
enum Step {
    CreatePool(&'static str),
    /// Drops the pool, and trims.
    DropPool,
    /// Allocates in the pool, if there is one, and fills the memory.
    Take(u8, On, u64),
    Use(u8, On),
    Free(u8),
    /// Makes a stream wait for another one.
    Wait(usize, usize),
    Trim,
    Synchronize(usize),
    /// Lends a stream of the test.
    Lend(usize),
    Return,
    Relend(usize),
    Sleep(Contents),
    Wake,
    SaveIn(ImageStorage),
    Retain(bool),
    ReserveHost(u64),
    ReleaseHost,
    Resize(u64),
    BeginPlanned,
    EndPlanned,
    /// Captures and launches a graph with memory of a graph pool, and drops both.
    Capture,
    DropCompletedFences,
}
use On::{Host, Lent, Stream};
use Step::*;

struct Job {
    streams: [Arc<CudaStream>; 3],
    allocator: CudaAllocator,
    pool: Option<Pool<CudaBackend>>,
    blocks: BTreeMap<u8, Allocation>,
    lent: Option<StreamId>,
    host: StreamId,
    has_captured: bool,
    /// The last work of the allocator's own streams that the host has not waited for.
    under_way: RefCell<BTreeMap<u64, u64>>,
}

#[derive(Debug, PartialEq)]
struct Held {
    /// Number of streams of the allocator whose work the host has not waited for. The memory of this work may be released next.
    unfinished: usize,
    live: Live,
    host_bytes: u64,
    idle_bytes: u64,
    phase: Option<Phase>,
    stats: MemoryStats,
    blocks: Vec<(u8, symmalloc_core::Placement)>,
    contents: Vec<(u8, u8)>,
    drop_errors: u64,
}

impl Job {
    fn new(backend: CudaBackendBuilder, config: &str) -> Self {
        let backend = backend.build().expect("the stub supports it");
        let allocator = CudaAllocator::with_backend(backend, config.parse::<Config>().expect("valid")).expect("made");
        let context = Arc::clone(allocator.device().context());
        let streams = [(); 3].map(|()| context.new_stream().expect("a stream"));
        let host = allocator.register_host_stream().expect("registered");
        for stream in &streams[..2] {
            allocator.register_stream(stream).expect("registered");
        }
        begin_log();
        // cudarc leaves its context current. Without a current context, each call must push and pop the context.
        // SAFETY: null resets the current context.
        unsafe { cudarc::driver::result::ctx::set_current(std::ptr::null_mut()) }.expect("set");
        Job {
            streams,
            allocator,
            pool: None,
            blocks: BTreeMap::new(),
            lent: None,
            host,
            has_captured: false,
            under_way: RefCell::default(),
        }
    }

    fn id(&self, on: On) -> StreamId {
        match on {
            Stream(index) => self.allocator.stream_id(&self.streams[index]).expect("registered"),
            Lent => self.lent.expect("lent"),
            Host => self.host,
        }
    }

    fn pool_id(&self) -> PoolId {
        self.pool.as_ref().map_or(PoolId::DEFAULT, Pool::id)
    }

    /// The first and the last page of a block, which the stub maps at its address.
    fn ends(allocation: &Allocation) -> [*mut [u8; 64]; 2] {
        let (first, size) = (allocation.address.0, allocation.size_bytes);
        [first, first + size - 64].map(|address| address as *mut [u8; 64])
    }

    /// Returns the number of the allocator's streams with work that the host has not waited for.
    fn unfinished(&self) -> usize {
        let mut under_way = self.under_way.borrow_mut();
        let own: Vec<u64> = self.streams.iter().map(|stream| stream.cu_stream() as u64).collect();
        for entry in take_log() {
            match entry {
                Logged::Work { stream, seq, .. } if !own.contains(&stream) => _ = under_way.insert(stream, seq),
                Logged::HostWait { stream, last } => under_way.retain(|known, seq| *known != stream || *seq > last),
                Logged::Work { .. } | Logged::StreamWait { .. } => {}
            }
        }
        under_way.len()
    }

    fn phase(&self) -> Option<Phase> {
        self.allocator.phase(self.pool_id()).ok()
    }

    fn capture(&self) -> Result<(), Box<dyn Error>> {
        let graphs = GraphPool::new(&self.allocator, "segments:reserved,segment_mb:32".parse().expect("valid"))?;
        let stream = &self.streams[0];
        let capture = graphs.begin(stream)?;
        let inside = self.allocator.allocate(stream, 3 * MIB)?;
        self.allocator.free(inside.handle)?;
        let graph = capture.end()?;
        graph.launch(stream)?;
        drop((graph, graphs));
        self.allocator.trim_all()?;
        Ok(())
    }
}

impl Repeatable for Job {
    type Step = Step;
    type Error = Box<dyn Error>;
    type Held = Held;

    fn run(&mut self, step: &Step) -> Result<(), Box<dyn Error>> {
        let core = self.allocator.core();
        match step {
            CreatePool(text) => {
                self.pool = Some(self.allocator.create_pool(text.parse::<PoolConfig>().expect("valid"))?);
            }
            DropPool => {
                self.pool = None;
                self.allocator.trim_all()?;
            }
            Take(block, on, size) => {
                let made = core.allocate(self.pool_id(), self.id(*on), *size)?;
                for end in Job::ends(&made) {
                    // SAFETY: the stub's device memory is memory of this process.
                    unsafe { end.write([*block; 64]) };
                }
                self.blocks.insert(*block, made);
            }
            Use(block, on) => core.record_use(self.blocks[block].handle, self.id(*on))?,
            Free(block) => {
                core.free(self.blocks[block].handle)?;
                self.blocks.remove(block);
            }
            Wait(stream, on) => self.allocator.wait(&self.streams[*stream], &self.streams[*on])?,
            Trim => _ = self.allocator.trim_all()?,
            Synchronize(index) => self.allocator.synchronize(&self.streams[*index])?,
            Lend(index) => {
                let raw = LentStream::of(self.streams[*index].cu_stream());
                // SAFETY: returned before it is destroyed.
                self.lent = Some(unsafe { self.allocator.lend_stream(raw) }?);
            }
            Return => self.allocator.return_stream(self.id(Lent))?,
            Relend(index) => {
                let raw = LentStream::of(self.streams[*index].cu_stream());
                // SAFETY: alive until the allocator ends.
                unsafe { self.allocator.relend_stream(self.id(Lent), raw) }?;
            }
            Sleep(contents) => _ = self.allocator.sleep(self.pool_id(), *contents)?,
            Wake => _ = self.allocator.wake(self.pool_id())?,
            SaveIn(place) => self.allocator.save_in(self.pool_id(), place.clone()),
            Retain(is_retained) => self.allocator.retain_saved(self.pool_id(), *is_retained),
            ReserveHost(bytes) => self.allocator.reserve_host_memory(*bytes)?,
            ReleaseHost => _ = self.allocator.release_host_memory()?,
            Resize(bytes) => _ = self.allocator.resize(self.pool_id(), &self.streams[0], *bytes)?,
            BeginPlanned => core.begin_step(self.pool_id(), 0)?,
            EndPlanned => _ = core.end_step(self.pool_id())?,
            Capture => {
                self.has_captured = true;
                self.capture()?;
            }
            DropCompletedFences => _ = core.drop_completed_fences()?,
        }
        Ok(())
    }

    fn held(&self) -> Held {
        self.allocator.core().check().unwrap_or_else(|violation| panic!("{violation}"));
        let mut contents = Vec::new();
        let asleep = self.pool.is_some() && self.phase() != Some(Phase::Awake);
        for (block, made) in self.blocks.iter().filter(|_| !asleep) {
            for end in Job::ends(made) {
                // SAFETY: the memory is mapped, and on the stub that is not lazy, all work has taken effect.
                let bytes = unsafe { end.read() };
                assert!(bytes.iter().all(|byte| *byte == bytes[0]));
                contents.push((*block, bytes[0]));
            }
        }
        let mut stats = levels(self.allocator.stats());
        // The failed call itself.
        stats.out_of_memory_count = 0;
        // A capture is repeated as a whole, next to memory of the attempt that failed.
        if self.has_captured {
            stats.reserved_bytes.peak = 0;
            for class in [&mut stats.usage.all, &mut stats.usage.small, &mut stats.usage.large] {
                class.allocations.peak = 0;
                class.allocated_bytes.peak = 0;
                class.requested_bytes.peak = 0;
            }
        }
        Held {
            unfinished: self.unfinished(),
            live: live(),
            host_bytes: self.allocator.host_bytes(),
            idle_bytes: self.allocator.core().backend().idle_bytes(),
            phase: self.phase(),
            stats,
            blocks: self.blocks.iter().map(|(block, made)| (*block, made.placement)).collect(),
            contents,
            drop_errors: self.allocator.drop_errors().count,
        }
    }

    fn end(mut self) -> Held {
        for (_, made) in std::mem::take(&mut self.blocks) {
            self.allocator.free(made.handle).expect("the driver works again");
        }
        self.pool = None;
        self.allocator.trim_all().expect("the driver works again");
        let held = self.held();
        drop((self.allocator, self.streams));
        Held { live: live(), ..held }
    }
}

/// Calls whose failure may have no consequence: they restore a context or a mode, or release a reference.
const SILENT: [&str; 5] = [
    "cuCtxGetCurrent",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuMemRelease",
    "cuThreadExchangeStreamCaptureMode",
];

/// A stream or graph that the driver does not destroy is lost.
const LOST: [&str; 3] = ["cuGraphDestroy", "cuGraphExecDestroy", "cuStreamDestroy_v2"];

fn check(what: &str, steps: &[Step], config: &str, backend: fn() -> CudaBackendBuilder) {
    let mut unreported = sweep(what, steps, &LOST, || Job::new(backend(), config));
    // If a stream for copies cannot be created in advance, the wake creates it.
    let may_be_early = steps.iter().any(|step| matches!(step, Wake));
    // The end of a capture is attempted again.
    let captures = steps.iter().any(|step| matches!(step, Capture));
    unreported.retain(|name| match name.as_str() {
        "cuStreamCreate" => !may_be_early,
        "cuCtxSetCurrent" | "cuStreamEndCapture" => !captures,
        name => !SILENT.contains(&name),
    });
    assert_eq!(unreported, BTreeSet::new(), "{what}: failures of these calls must be reported");
}

fn plain() -> CudaBackendBuilder {
    CudaBackend::builder(&device()).plain()
}

fn virtual_memory() -> CudaBackendBuilder {
    CudaBackend::builder(&device()).chunk_bytes(2 * MIB)
}

fn reuse() -> Vec<Step> {
    vec![
        Take(1, Stream(0), 200 << 10),
        Use(1, Stream(1)),
        Use(1, Host),
        Take(2, Stream(0), 3 * MIB),
        Take(3, Stream(0), 5 * MIB),
        Use(2, Stream(1)),
        Use(3, Stream(1)),
        Free(2),
        Free(1),
        Free(3),
        Take(4, Stream(0), 7 * MIB),
        Wait(1, 0),
        DropCompletedFences,
        Take(5, Stream(1), MIB),
        Use(5, Stream(0)),
        Free(5),
        Take(6, Stream(1), MIB / 2),
        Take(7, Host, 5000),
        Use(7, Stream(0)),
        Free(7),
        Take(8, Host, 4000),
        Synchronize(0),
        Free(4),
        Trim,
        Take(9, Stream(0), 9 * MIB),
        Free(9),
        Free(6),
        Trim,
    ]
}

stub_test!(reuse_survives_any_failed_call, {
    for config in ["segments:expandable", "segments:fixed", "segments:expandable,streams:shared"] {
        check(config, &reuse(), config, virtual_memory);
    }
    check("plain", &reuse(), "segments:fixed", plain);
    let pool = [&[CreatePool("segments:fixed")][..], &reuse(), &[DropPool]].concat();
    check("a pool", &pool, "", virtual_memory);
});

stub_test!(stitched_memory_survives_any_failed_call, {
    let mut steps: Vec<Step> = (1..5).map(|block| Take(block, Stream(0), 4 * MIB)).collect();
    steps.extend([
        Free(2),
        Free(4),
        Take(5, Stream(0), 8 * MIB),
        Use(5, Stream(1)),
        Free(5),
        Take(6, Stream(0), 8 * MIB),
        Free(6),
        Take(7, Stream(0), 12 * MIB),
        Take(8, Stream(0), 4 * MIB),
        Free(7),
        Free(1),
        Take(9, Stream(0), 16 * MIB),
        Free(8),
        Free(9),
        Trim,
        Free(3),
        Trim,
    ]);
    let config = "stitching:true,stitching_granule_mb:2,stitching_least_mb:4";
    check("stitching", &steps, config, || CudaBackend::builder(&device()));
});

stub_test!(lent_streams_survive_any_failed_call, {
    let steps = [
        Lend(2),
        Take(1, Lent, MIB),
        Take(2, Stream(0), MIB),
        Use(2, Lent),
        Free(1),
        Return,
        Free(2),
        Take(3, Stream(0), MIB),
        Relend(1),
        Take(4, Lent, MIB),
        Free(4),
        Return,
        Relend(2),
        Free(3),
        Trim,
    ];
    for config in ["streams:shared", "streams:separate"] {
        check(config, &steps, config, virtual_memory);
    }
});

stub_test!(sleeping_pools_survive_any_failed_call, {
    let folder = tempfile::tempdir().expect("a folder");
    let folder: PathBuf = folder.path().into();
    for place in [ImageStorage::Pinned, ImageStorage::Pageable, ImageStorage::Folder(folder)] {
        let steps = [
            CreatePool("segments:expandable"),
            SaveIn(place.clone()),
            Take(1, Stream(0), 100),
            Take(2, Stream(0), 2 * MIB),
            Take(3, Stream(1), 3 * MIB),
            Free(2),
            Sleep(Contents::Keep),
            Wake,
            Retain(true),
            Sleep(Contents::Keep),
            Wake,
            Sleep(Contents::Zero),
            ReleaseHost,
            Wake,
            Retain(false),
            Sleep(Contents::Drop),
            Wake,
        ];
        check(&format!("{place:?}"), &steps, "", virtual_memory);
    }
    // Several chunks of an image.
    check("reserved images", &[ReserveHost(33 * MIB), ReleaseHost], "", virtual_memory);
    let steps = [
        CreatePool("segments:fixed"),
        Take(1, Stream(0), 100),
        Take(2, Stream(1), 33 * MIB),
        Sleep(Contents::Keep),
        Wake,
    ];
    check("several chunks", &steps, "", || CudaBackend::builder(&device()));
});

stub_test!(quotas_survive_any_failed_call, {
    let steps = [
        CreatePool("segments:expandable,growth_mb:0,streams:shared,range_mb:96"),
        Resize(40 * MIB),
        Take(1, Stream(0), 5 * MIB),
        Take(2, Stream(0), 5 * MIB),
        Take(3, Stream(0), 5 * MIB),
        Free(2),
        Resize(16 * MIB),
        Resize(96 * MIB),
        Take(4, Stream(1), 20 * MIB),
        Free(4),
        Resize(14 * MIB),
        Free(1),
        Free(3),
        Resize(0),
        DropPool,
    ];
    check("quota", &steps, "", virtual_memory);
});

stub_test!(plans_and_graphs_survive_any_failed_call, {
    let mut steps = vec![CreatePool("segments:expandable,plan:learn")];
    for _ in 0..3 {
        steps.extend([
            BeginPlanned,
            Take(1, Stream(0), 3 * MIB),
            Take(2, Stream(0), MIB),
            Use(1, Stream(1)),
            Free(1),
            Take(3, Stream(0), 2 * MIB),
            Free(2),
            Free(3),
            EndPlanned,
        ]);
    }
    steps.push(DropPool);
    check("plan", &steps, "", virtual_memory);
    let steps = [Take(1, Stream(0), MIB), Capture, Take(2, Stream(0), 4 * MIB), Capture, Free(1), Free(2), Trim];
    check("graph", &steps, "", virtual_memory);
});

/// A program with buffers, whose drops report no errors. A failure may cost the memory of a buffer until the allocator ends.
struct Buffers {
    streams: [Arc<CudaStream>; 2],
    allocator: CudaAllocator,
}

impl Repeatable for Buffers {
    type Step = ();
    type Error = CudaError;
    type Held = (u64, u64, u64);

    fn run(&mut self, (): &()) -> Result<(), CudaError> {
        let Buffers { streams: [a, b], allocator } = self;
        let pool = allocator.create_pool(PoolConfig::builder().fixed().build()?)?;
        let inside = allocator.with_pool(&pool);
        for size in [200 << 10, 3 << 20] {
            let buffer = allocator.alloc_zeroed::<u8>(a, size)?;
            let other = inside.alloc_zeroed::<u8>(b, size / 2)?;
            drop(buffer.device_ptr(b));
            drop(other.device_ptr(a));
            drop((buffer, other));
            allocator.wait(a, b)?;
            drop(inside.alloc_zeroed::<u8>(b, size / 3)?);
        }
        drop((inside, pool));
        allocator.trim_all()?;
        allocator.core().check().unwrap_or_else(|violation| panic!("{violation}"));
        allocator.synchronize(a)
    }

    fn held(&self) -> (u64, u64, u64) {
        (0, 0, 0)
    }

    fn end(self) -> (u64, u64, u64) {
        drop((self.allocator, self.streams));
        (live().device_bytes, live().ranges, live().mappings)
    }
}

stub_test!(programs_with_buffers_continue_after_any_failed_call, {
    let device = device();
    let begin = || {
        let allocator = CudaAllocator::new(&device, Config::default()).expect("made");
        let streams = [(); 2].map(|()| device.context().new_stream().expect("a stream"));
        // SAFETY: null resets the current context.
        unsafe { cudarc::driver::result::ctx::set_current(std::ptr::null_mut()) }.expect("set");
        Buffers { streams, allocator }
    };
    sweep("buffers", &[()], &LOST, begin);
});
