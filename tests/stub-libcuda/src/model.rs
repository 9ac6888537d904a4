//! What the stub knows: options, faults, and the one state of a process, whose parts are in `memory.rs` and `streams.rs`.

use crate::abi::Hooks;
use crate::external::Notice;
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

/// What an act returns that has to wait for work, see [`with_waiting`].
pub const WAIT: Code = Code(c_int::MIN);

const FIRST_CONTEXT: usize = 0x1_0000;
const CONTEXT_STEP: usize = 0x100;

/// What `stub_live` counts.
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
    /// Graphs, ready ones included.
    Graphs = 5,
    /// Number of physical chunks mapped.
    Mappings = 6,
}

/// What a thread knows.
#[derive(Debug)]
pub struct Thread {
    /// Its number, of all threads that called.
    pub number: u64,
    /// Stack of current contexts.
    pub contexts: Vec<usize>,
    /// Which captures forbid this thread anything: 0, also global ones of others; 1, its own; 2, none.
    pub capture_mode: c_int,
    /// How often it made each call.
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
    /// The device of the current context.
    pub fn device(&self) -> Option<c_int> {
        self.contexts.last().filter(|context| **context != 0).map(|context| device_of(*context))
    }
}

thread_local! {
    /// This thread.
    pub static THREAD: RefCell<Thread> = RefCell::default();
}

/// The primary context of a device.
pub fn context_of(device: c_int) -> usize {
    FIRST_CONTEXT + device as usize * CONTEXT_STEP
}

/// The device of a context.
pub fn device_of(context: usize) -> c_int {
    ((context - FIRST_CONTEXT) / CONTEXT_STEP) as c_int
}

/// The default memory pool of a device.
pub fn default_pool_of(device: c_int) -> u64 {
    0x8000 + device as u64
}

/// What the device is like, from the environment.
#[derive(Debug)]
pub struct Options {
    /// `STUB_NO_DEVICE`.
    pub no_device: bool,
    /// `STUB_DEVICES`: 1 by default.
    pub devices: c_int,
    /// `STUB_MEMORY_BYTES`: of each device, 1 GiB by default.
    pub memory_bytes: u64,
    /// `STUB_ADDRESS_BYTES`: addresses of each device, and at most of the memory file, 32 TiB by default; fewer where a
    /// process has few, as under valgrind.
    pub address_bytes: u64,
    /// `STUB_DESCENDING_DEVICES`, as `1,3`: devices that hand out their highest free addresses first.
    pub descending: BTreeSet<c_int>,
    /// `STUB_POLLS`: so many queries find work not ready that took effect and that nobody waited for. 0, the default: all.
    pub polls: u64,
    /// `STUB_MAPPING_MICROSECONDS`: how long `cuMemCreate`, `cuMemMap` and `cuMemSetAccess` take, each. 0 by default.
    pub mapping_time: Duration,
    /// `STUB_REUSE_STREAMS`: the handle of a destroyed stream is the next stream's.
    pub reuses_streams: bool,
    /// `STUB_TRAMPOLINES`: `cuGetProcAddress` answers with other addresses than those of the exported calls.
    pub has_trampolines: bool,
    /// `STUB_FABRIC_REFUSED`: the device says that it has fabric handles, and refuses to make them.
    pub fabric_refused: bool,
    /// `STUB_UUID`: the first byte of each device's UUID.
    pub uuid: u8,
    no_vmm: bool,
    no_posix_fd: bool,
    no_fabric: bool,
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
            mapping_time: Duration::from_micros(number("STUB_MAPPING_MICROSECONDS", 0)),
            reuses_streams: flag("STUB_REUSE_STREAMS"),
            has_trampolines: flag("STUB_TRAMPOLINES"),
            fabric_refused: flag("STUB_FABRIC_REFUSED"),
            uuid: number("STUB_UUID", u64::from(b's')) as u8,
            no_vmm: flag("STUB_NO_VMM"),
            no_posix_fd: flag("STUB_NO_POSIX_FD"),
            no_fabric: flag("STUB_NO_FABRIC"),
        }
    }

    /// Whether the device has an attribute.
    pub fn has(&self, attribute: c_int) -> bool {
        match attribute {
            102 => !self.no_vmm,
            128 => !self.no_fabric,
            103 => !self.no_posix_fd,
            110 | 115 => true,
            _ => false,
        }
    }
}

#[derive(Debug)]
struct Fault {
    call: String,
    /// Calls until it strikes; 0: always.
    left: u64,
    code: Code,
    /// The thread whose calls it leaves alone.
    spares: Option<ThreadId>,
}

/// A memory pool.
#[derive(Clone, Copy, Debug)]
pub struct Pool {
    /// Of which device.
    pub device: c_int,
    /// Bytes in use.
    pub used: u64,
    /// The most at any time.
    pub used_peak: u64,
    /// What the program set.
    pub release_threshold: u64,
}

impl Pool {
    /// A pool of a device.
    pub fn new(device: c_int) -> Self {
        Pool { device, used: 0, used_peak: 0, release_threshold: 0 }
    }
}

/// The devices and the driver.
#[derive(Debug)]
pub struct State {
    /// What the devices are like.
    pub options: Options,
    /// How often each call was made.
    pub calls: BTreeMap<&'static str, u64>,
    /// References to primary contexts.
    pub retained: i64,
    /// The same, of each device.
    pub retained_of: BTreeMap<c_int, i64>,
    /// Memory pools by handle.
    pub pools: BTreeMap<u64, Pool>,
    /// Which pool serves a device, where the program has set one.
    pub current_pools: BTreeMap<c_int, u64>,
    /// Which pool an allocation came from.
    pub pooled: BTreeMap<u64, u64>,
    /// Contexts that the program made itself, so far.
    pub own_contexts: usize,
    /// Handles of destroyed streams that may be given again, newest last, and the number of their last work.
    pub gone_streams: Vec<(u64, u64)>,
    /// Which device may use whose memory.
    pub peers: BTreeSet<(c_int, c_int)>,
    /// Memory of all devices.
    pub memory: Memory,
    /// Streams by key: handles of those that were made, and for each device its number, the default stream.
    pub streams: BTreeMap<u64, Stream>,
    /// Events by handle.
    pub events: BTreeMap<u64, Event>,
    /// Captures under way by id.
    pub captures: BTreeMap<u64, Capture>,
    /// Graphs by handle.
    pub graphs: BTreeMap<u64, Vec<Op>>,
    /// Work of another library that did not take effect yet, and its stream.
    pub external_streams: BTreeMap<u64, u64>,
    /// Of that, what is done as soon as its turn comes.
    pub external_done: BTreeSet<u64>,
    /// That library's hooks.
    pub hooks: Option<Hooks>,
    /// What it was not told yet.
    pub notices: Vec<Notice>,
    /// It is being told something.
    pub is_delivering: bool,
    /// Memory that it wants to know about: base and size.
    pub guards: BTreeMap<u64, (u64, u64)>,
    faults: Vec<Fault>,
    next_handle: u64,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);
/// Work took effect.
static CHANGED: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, Option<State>> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The one state of this process.
pub fn with<T>(act: impl FnOnce(&mut State) -> T) -> T {
    act(lock().get_or_insert_with(State::new))
}

/// As [`with`], again and again until `act` need not wait for work.
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

/// Wakes those who wait for work.
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
            guards: BTreeMap::new(),
            faults: Vec::new(),
            next_handle: 0x1000,
        }
    }

    /// Counts a call, and says whether it is to fail.
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
        let Some(index) = struck else { return Ok(()) };
        let code = self.faults[index].code;
        if self.faults[index].left == 1 {
            self.faults.remove(index);
        }
        Err(code)
    }

    /// See `stub_fail` and `stub_fail_elsewhere`.
    pub fn fail(&mut self, call: String, nth: u64, code: Code, spares: Option<ThreadId>) {
        self.faults.push(Fault { call, left: nth, code, spares });
    }

    /// See `stub_heal`.
    pub fn heal(&mut self) {
        self.faults.clear();
    }

    /// How long a call takes.
    pub fn time_of(&self, name: &str) -> Duration {
        match name {
            "cuMemCreate" | "cuMemMap" | "cuMemSetAccess" => self.options.mapping_time,
            _ => Duration::ZERO,
        }
    }

    /// A handle that was never given before.
    pub fn handle(&mut self) -> u64 {
        self.next_handle += 0x10;
        self.next_handle
    }

    /// Whether captures forbid this thread what is no work of a stream. They are spoilt then.
    pub fn spoil_captures(&mut self) -> bool {
        let mode = THREAD.with_borrow(|thread| thread.capture_mode);
        let mut is_forbidden = false;
        for capture in self.captures.values_mut().filter(|capture| capture.forbids(mode)) {
            capture.is_valid = false;
            is_forbidden = true;
        }
        is_forbidden
    }

    /// Whether streams of the device are captured, which nobody may wait for then, in whatever mode. Their captures are spoilt.
    pub fn spoil_captures_of(&mut self, device: c_int) -> bool {
        let of_device = |stream: &&Stream| stream.device == device;
        let captures: Vec<u64> = self.streams.values().filter(of_device).filter_map(|stream| stream.capture).collect();
        for id in &captures {
            self.captures.get_mut(id).expect("under way").is_valid = false;
        }
        !captures.is_empty()
    }

    /// Makes a stream, and gives its handle. Work of a stream that had the handle before counts as done.
    pub fn make_stream(&mut self, device: c_int) -> u64 {
        let again = if self.options.reuses_streams { self.gone_streams.pop() } else { None };
        let (handle, done) = again.unwrap_or_else(|| (self.handle(), 0));
        self.streams.insert(handle, Stream::after(device, done));
        handle
    }

    /// See `stub_live`.
    pub fn live(&self, what: c_int) -> u64 {
        match what {
            0 => self.memory.device_bytes(),
            1 => self.memory.ranges.len() as u64,
            2 => self.events.len() as u64,
            3 => self.stream_count(),
            4 => self.memory.host_bytes(),
            5 => self.graphs.len() as u64,
            6 => self.memory.mappings.len() as u64,
            _ => 0,
        }
    }
}
