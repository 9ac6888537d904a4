//! Options, faults, and the single state of a process, whose parts are in `memory.rs` and `streams.rs`.

use crate::abi::Hooks;
use crate::external::Notice;
use crate::log::Entry;
use crate::memory::Memory;
use crate::streams::{Capture, Event, Op, Stream};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;

/// Unit of physical memory, in bytes.
pub const GRANULARITY: u64 = 2 << 20;

/// A `CUresult`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub c_int);

/// Code of a call that must wait for work; see [`with_waiting`].
pub const WAIT: Code = Code(c_int::MIN);

const FIRST_CONTEXT: usize = 0x1_0000;
const CONTEXT_STEP: usize = 0x100;

/// Handles of streams, events, memory and pools count up from here, above the fixed handles of contexts and default pools.
const FIRST_HANDLE: u64 = 1 << 32;

/// Resources that `stub_live` counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Live {
    /// Bytes of device memory that are mapped, allocated, or held by a handle.
    DeviceBytes = 0,
    /// Address ranges.
    Ranges = 1,
    /// Events.
    Events = 2,
    /// Streams.
    Streams = 3,
    /// Bytes of pinned host memory.
    HostBytes = 4,
    /// Graphs, including instantiated ones.
    Graphs = 5,
    /// Physical chunks that are mapped.
    Mappings = 6,
}

/// State of a thread.
#[derive(Debug)]
pub struct Thread {
    /// Number of the thread, in the order of the threads' first calls.
    pub number: u64,
    /// Stack of current contexts.
    pub contexts: Vec<usize>,
    /// Capture interaction mode, which selects the captures that forbid this thread unsafe calls: 0, its own and global ones of others; 1,
    /// its own; 2, none.
    pub capture_mode: c_int,
    /// Number of times that the thread made each call.
    pub calls: BTreeMap<&'static str, u64>,
}

impl Default for Thread {
    fn default() -> Self {
        static THREADS: AtomicU64 = AtomicU64::new(0);
        let number = THREADS.fetch_add(1, Ordering::Relaxed);
        Thread { number, contexts: Vec::new(), capture_mode: 0, calls: BTreeMap::new() }
    }
}

impl Thread {
    /// Returns the device of the current context.
    pub fn device(&self) -> Option<c_int> {
        self.contexts.last().filter(|context| **context != 0).map(|context| device_of(*context))
    }
}

thread_local! {
    /// State of the current thread.
    pub static THREAD: RefCell<Thread> = RefCell::default();
}

/// Returns the primary context of a device.
pub fn context_of(device: c_int) -> usize {
    FIRST_CONTEXT + device as usize * CONTEXT_STEP
}

/// Returns the device of a context.
pub fn device_of(context: usize) -> c_int {
    ((context - FIRST_CONTEXT) / CONTEXT_STEP) as c_int
}

/// Returns the default memory pool of a device.
pub fn default_pool_of(device: c_int) -> u64 {
    0x8000 + device as u64
}

/// Properties of the devices, from the environment.
#[derive(Debug)]
pub struct Options {
    /// `STUB_NO_DEVICE`.
    pub no_device: bool,
    /// `STUB_DEVICES`: number of devices, by default 1.
    pub devices: c_int,
    /// `STUB_MEMORY_BYTES`: memory of each device, by default 1 GiB.
    pub memory_bytes: u64,
    /// `STUB_ADDRESS_BYTES`: address space of each device, and limit of the memory file, by default 32 TiB. Lower values suit a process
    /// with little address space, as under valgrind.
    pub address_bytes: u64,
    /// `STUB_DESCENDING_DEVICES`, such as `1,3`: devices that allocate their highest free addresses first.
    pub descending: BTreeSet<c_int>,
    /// `STUB_POLLS`: number of queries of an event that report its work as not ready, unless a wait covered it. 0, the default: all
    /// queries.
    pub polls: u64,
    /// `STUB_LAZY`: work takes effect only when something waits for it; see `streams.rs`.
    pub is_lazy: bool,
    /// `STUB_MAPPING_MICROSECONDS`: duration of each `cuMemCreate`, `cuMemMap` and `cuMemSetAccess`, by default 0.
    pub mapping_time: Duration,
    /// `STUB_REUSE_STREAMS`: a new stream gets the handle of a destroyed one.
    pub reuses_streams: bool,
    /// `STUB_TRAMPOLINES`: `cuGetProcAddress` returns different addresses from those of the exported calls.
    pub has_trampolines: bool,
    /// `STUB_FABRIC_REFUSED`: the device reports support for fabric handles, but fails to create them.
    pub fabric_refused: bool,
    /// `STUB_UUID`: first byte of each device's UUID.
    pub uuid: u8,
    no_vmm: bool,
    no_posix_fd: bool,
    no_fabric: bool,
    no_dma_buf: bool,
}

impl Options {
    fn from_environment() -> Self {
        let flag = |name| std::env::var_os(name).is_some();
        let number = |name, otherwise| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise);
        let list = |name| std::env::var(name).unwrap_or_default();
        Options {
            no_device: flag("STUB_NO_DEVICE"),
            devices: number("STUB_DEVICES", 1) as c_int,
            memory_bytes: number("STUB_MEMORY_BYTES", 1 << 30),
            address_bytes: number("STUB_ADDRESS_BYTES", 32 << 40),
            descending: list("STUB_DESCENDING_DEVICES")
                .split(',')
                .filter_map(|text| text.trim().parse().ok())
                .collect(),
            polls: number("STUB_POLLS", 0),
            is_lazy: flag("STUB_LAZY"),
            mapping_time: Duration::from_micros(number("STUB_MAPPING_MICROSECONDS", 0)),
            reuses_streams: flag("STUB_REUSE_STREAMS"),
            has_trampolines: flag("STUB_TRAMPOLINES"),
            fabric_refused: flag("STUB_FABRIC_REFUSED"),
            uuid: number("STUB_UUID", u64::from(b's')) as u8,
            no_vmm: flag("STUB_NO_VMM"),
            no_posix_fd: flag("STUB_NO_POSIX_FD"),
            no_fabric: flag("STUB_NO_FABRIC"),
            no_dma_buf: flag("STUB_NO_DMA_BUF"),
        }
    }

    /// Returns `true` if the device has an attribute.
    pub fn has(&self, attribute: c_int) -> bool {
        match attribute {
            102 => !self.no_vmm,
            128 => !self.no_fabric,
            124 => !self.no_dma_buf,
            103 => !self.no_posix_fd,
            110 | 115 => true,
            _ => false,
        }
    }
}

#[derive(Debug)]
struct Fault {
    call: String,
    /// Number of calls until the fault occurs; 0: every call fails.
    left: u64,
    code: Code,
    /// The thread whose calls are exempt.
    spares: Option<ThreadId>,
}

/// Calls of any name that fail by chance.
#[derive(Debug)]
struct Chance {
    /// One call in this many fails, on average.
    one_in: u64,
    /// State of the random numbers (SplitMix64).
    random: u64,
    code: Code,
    /// Names of the calls that failed.
    failed: Vec<&'static str>,
}

impl Chance {
    /// Returns `true` if the next call fails.
    fn strikes(&mut self) -> bool {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)).is_multiple_of(self.one_in)
    }
}

/// A memory pool.
#[derive(Clone, Copy, Debug)]
pub struct Pool {
    /// Device of the pool.
    pub device: c_int,
    /// Bytes in use.
    pub used: u64,
    /// Maximum of `used`.
    pub used_peak: u64,
    /// The threshold that the program set.
    pub release_threshold: u64,
}

impl Pool {
    /// Creates a pool of a device.
    pub fn new(device: c_int) -> Self {
        Pool { device, used: 0, used_peak: 0, release_threshold: 0 }
    }
}

/// The state of the devices and the driver.
#[derive(Debug)]
pub struct State {
    /// Properties of the devices.
    pub options: Options,
    /// Number of times that each call was made.
    pub calls: BTreeMap<&'static str, u64>,
    /// References to primary contexts.
    pub retained: i64,
    /// References to the primary context of each device.
    pub retained_of: BTreeMap<c_int, i64>,
    /// Memory pools by handle.
    pub pools: BTreeMap<u64, Pool>,
    /// The pool that the program selected for a device.
    pub current_pools: BTreeMap<c_int, u64>,
    /// Pool of each allocation from a pool, by address.
    pub pooled: BTreeMap<u64, u64>,
    /// Number of contexts that the program has created itself.
    pub own_contexts: usize,
    /// Handles of destroyed streams that may be reused, newest last, each with the number of its last work.
    pub gone_streams: Vec<(u64, u64)>,
    /// Pairs of a device and a peer whose memory it may access.
    pub peers: BTreeSet<(c_int, c_int)>,
    /// Memory of all devices.
    pub memory: Memory,
    /// Streams by key: the handle of a created stream, or the device number for a default stream.
    pub streams: BTreeMap<u64, Stream>,
    /// Events by handle.
    pub events: BTreeMap<u64, Event>,
    /// Active captures by id.
    pub captures: BTreeMap<u64, Capture>,
    /// Graphs by handle.
    pub graphs: BTreeMap<u64, Vec<Op>>,
    /// Another library's work that has not taken effect, with its stream.
    pub external_streams: BTreeMap<u64, u64>,
    /// The part of that work that is done as soon as it reaches the front of its stream.
    pub external_done: BTreeSet<u64>,
    /// The other library's hooks.
    pub hooks: Option<Hooks>,
    /// Notices that have not been delivered to it.
    pub notices: Vec<Notice>,
    /// `true` while a notice is being delivered.
    pub is_delivering: bool,
    /// The log, once it has begun; see `log.rs`.
    pub log: Option<Vec<Entry>>,
    /// Guarded memory: base and size by guard.
    pub guards: BTreeMap<u64, (u64, u64)>,
    faults: Vec<Fault>,
    chance: Option<Chance>,
    next_handle: u64,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);
/// Notified when work takes effect.
static CHANGED: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, Option<State>> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `act` with the state of this process.
pub fn with<T>(act: impl FnOnce(&mut State) -> T) -> T {
    act(lock().get_or_insert_with(State::new))
}

/// Like [`with`], but repeats `act` until it does not have to wait for work.
pub fn with_waiting(mut act: impl FnMut(&mut State) -> Result<(), Code>) -> Result<(), Code> {
    let mut state = lock();
    loop {
        let outcome = act(state.get_or_insert_with(State::new));
        if outcome != Err(WAIT) {
            return outcome;
        }
        state = CHANGED.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Wakes the threads that wait for work.
pub fn notify() {
    CHANGED.notify_all();
}

impl State {
    fn new() -> Self {
        let options = Options::from_environment();
        let default_stream = |device| (device as u64, Stream::new(device));
        State {
            streams: (0..options.devices).map(default_stream).collect(),
            calls: BTreeMap::new(),
            retained: 0,
            retained_of: BTreeMap::new(),
            pools: (0..options.devices).map(|device| (default_pool_of(device), Pool::new(device))).collect(),
            current_pools: BTreeMap::new(),
            pooled: BTreeMap::new(),
            own_contexts: 0,
            gone_streams: Vec::new(),
            peers: BTreeSet::new(),
            memory: Memory::empty(&options),
            options,
            events: BTreeMap::new(),
            captures: BTreeMap::new(),
            graphs: BTreeMap::new(),
            external_streams: BTreeMap::new(),
            external_done: BTreeSet::new(),
            hooks: None,
            notices: Vec::new(),
            is_delivering: false,
            log: None,
            guards: BTreeMap::new(),
            faults: Vec::new(),
            chance: None,
            next_handle: FIRST_HANDLE,
        }
    }

    /// Counts a call. Returns an error if it must fail.
    pub fn enter(&mut self, name: &'static str) -> Result<(), Code> {
        *self.calls.entry(name).or_default() += 1;
        THREAD.with_borrow_mut(|thread| *thread.calls.entry(name).or_default() += 1);
        let struck = self.faults.iter_mut().position(|fault| {
            if fault.call != name || fault.spares.is_some_and(|spared| spared == thread::current().id()) {
                return false;
            }
            let strikes = fault.left <= 1;
            fault.left -= u64::from(fault.left > 1);
            strikes
        });
        let Some(index) = struck else { return self.enter_by_chance(name) };
        let code = self.faults[index].code;
        if self.faults[index].left == 1 {
            self.faults.remove(index);
        }
        Err(code)
    }

    /// Adds a fault; see `stub_fail` and `stub_fail_elsewhere`.
    pub fn fail(&mut self, call: String, nth: u64, code: Code, spares: Option<ThreadId>) {
        self.faults.push(Fault { call, left: nth, code, spares });
    }

    /// Returns an error if the call fails by chance.
    fn enter_by_chance(&mut self, name: &'static str) -> Result<(), Code> {
        let Some(chance) = &mut self.chance else { return Ok(()) };
        if !chance.strikes() {
            return Ok(());
        }
        chance.failed.push(name);
        Err(chance.code)
    }

    /// Makes calls of any name fail by chance; see `stub_fail_by_chance`.
    pub fn fail_by_chance(&mut self, one_in: u64, seed: u64, code: Code) {
        self.chance = Some(Chance { one_in: one_in.max(1), random: seed, code, failed: Vec::new() });
    }

    /// Returns the names of the calls that have failed by chance since the last `stub_fail_by_chance`.
    pub fn failed_by_chance(&self) -> &[&'static str] {
        self.chance.as_ref().map_or(&[], |chance| &chance.failed)
    }

    /// Removes all faults; see `stub_heal`.
    pub fn heal(&mut self) {
        self.faults.clear();
        self.chance = None;
    }

    /// Returns the duration of a call.
    pub fn time_of(&self, name: &str) -> Duration {
        match name {
            "cuMemCreate" | "cuMemMap" | "cuMemSetAccess" => self.options.mapping_time,
            _ => Duration::ZERO,
        }
    }

    /// Returns a handle that was never used before.
    pub fn handle(&mut self) -> u64 {
        self.next_handle += 0x10;
        self.next_handle
    }

    /// Returns `true` if captures forbid this thread calls that are not stream work, and invalidates these captures.
    pub fn spoil_captures(&mut self) -> bool {
        let mode = THREAD.with_borrow(|thread| thread.capture_mode);
        let mut is_forbidden = false;
        for capture in self.captures.values_mut().filter(|capture| capture.forbids(mode)) {
            capture.is_valid = false;
            is_forbidden = true;
        }
        is_forbidden
    }

    /// Returns `true` if streams of the device are being captured, which forbids waiting for the device in every mode. Invalidates these
    /// captures.
    pub fn spoil_captures_of(&mut self, device: c_int) -> bool {
        let of_device = |stream: &&Stream| stream.device == device;
        let captures: Vec<u64> = self.streams.values().filter(of_device).filter_map(|stream| stream.capture).collect();
        for id in &captures {
            self.captures.get_mut(id).expect("the capture is in progress").is_valid = false;
        }
        !captures.is_empty()
    }

    /// Creates a stream and returns its handle. Work of a previous stream with the same handle counts as done.
    pub fn make_stream(&mut self, device: c_int) -> u64 {
        let again = if self.options.reuses_streams { self.gone_streams.pop() } else { None };
        let (handle, done) = again.unwrap_or_else(|| (self.handle(), 0));
        self.streams.insert(handle, Stream::after(device, done));
        handle
    }

    /// Returns the number of live resources of a kind; see `stub_live`.
    pub fn live(&self, what: c_int) -> u64 {
        match what {
            0 => self.memory.device_bytes(),
            1 => self.memory.ranges.len() as u64,
            2 => self.events.len() as u64,
            3 => self.stream_count(),
            4 => self.memory.host_bytes(),
            5 => self.graphs.len() as u64,
            6 => self.memory.mappings.len() as u64,
            7 => self.memory.host_allocations(),
            _ => 0,
        }
    }
}
