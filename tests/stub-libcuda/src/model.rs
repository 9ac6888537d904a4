//! What the stub knows: memory in ranges and mappings, streams and events as counters, captures as lists of ops.
//!
//! Every piece of work has a number on its stream. Work takes effect when it is submitted; it is *complete* when somebody
//! waited for it, on the host, directly or through another stream. So a query says "not ready" as long as it can.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};
use std::thread::ThreadId;

/// Unit of physical memory, in bytes.
pub const GRANULARITY: u64 = 2 << 20;

/// A `CUresult`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub c_int);

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
#[derive(Debug, Default)]
pub struct Thread {
    /// Stack of current contexts.
    pub contexts: Vec<usize>,
    /// What captures forbid on this thread: 2 is nothing.
    pub capture_mode: c_int,
}

thread_local! {
    /// This thread.
    pub static THREAD: RefCell<Thread> = RefCell::default();
}

/// The primary context of a device.
pub fn context_of(device: c_int) -> usize {
    0x1_0000 + device as usize * 0x100
}

/// What the device is like, from the environment.
#[derive(Debug)]
pub struct Options {
    /// `STUB_NO_DEVICE`.
    pub no_device: bool,
    /// `STUB_DEVICES`: 1 by default.
    pub devices: c_int,
    /// `STUB_MEMORY_BYTES`: 1 GiB by default.
    pub memory_bytes: u64,
    /// `STUB_FABRIC_REFUSED`: the device says that it has fabric handles, and refuses to make them.
    pub fabric_refused: bool,
    no_vmm: bool,
    no_fabric: bool,
}

impl Options {
    fn from_environment() -> Self {
        let flag = |name| std::env::var_os(name).is_some();
        let number = |name, otherwise| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise);
        Options {
            no_device: flag("STUB_NO_DEVICE"),
            devices: number("STUB_DEVICES", 1) as c_int,
            memory_bytes: number("STUB_MEMORY_BYTES", 1 << 30),
            fabric_refused: flag("STUB_FABRIC_REFUSED"),
            no_vmm: flag("STUB_NO_VMM"),
            no_fabric: flag("STUB_NO_FABRIC"),
        }
    }

    /// Whether the device has an attribute.
    pub fn has(&self, attribute: c_int) -> bool {
        match attribute {
            102 => !self.no_vmm,
            128 => !self.no_fabric,
            103 | 110 | 115 => true,
            _ => false,
        }
    }
}

/// Work that has an effect.
#[derive(Clone, Copy, Debug)]
pub enum Op {
    /// Sets bytes.
    Set {
        /// First byte.
        address: u64,
        /// Their value.
        value: u8,
        /// How many.
        count: usize,
    },
    /// Copies bytes.
    Copy {
        /// First byte written.
        to: u64,
        /// First byte read.
        from: u64,
        /// How many.
        count: usize,
    },
}

impl Op {
    fn run(self) {
        match self {
            // SAFETY: the caller of the driver's call says that the bytes are there; where they are not, the test dies as a
            // kernel would.
            Op::Set { address, value, count } => unsafe { std::ptr::write_bytes(address as *mut u8, value, count) },
            // SAFETY: as above.
            Op::Copy { to, from, count } => unsafe { std::ptr::copy(from as *const u8, to as *mut u8, count) },
        }
    }
}

/// What may be done with mapped memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Nothing yet.
    None,
    /// Everything.
    ReadWrite,
}

#[derive(Clone, Copy, Debug)]
struct Mapping {
    size: u64,
    handle: u64,
    access: Access,
}

#[derive(Clone, Copy, Debug)]
struct Physical {
    size: u64,
    /// The handle itself and each mapping.
    owners: u32,
}

/// A stream.
#[derive(Clone, Debug, Default)]
pub struct Stream {
    /// Number of its last work.
    pub submitted: u64,
    completed: u64,
    /// (own work, stream waited for, its work).
    waits: Vec<(u64, u64, u64)>,
    /// The capture it is part of.
    pub capture: Option<u64>,
}

/// An event.
#[derive(Clone, Copy, Debug, Default)]
pub struct Event {
    /// The stream it was recorded on; 0: never.
    pub stream: u64,
    /// After which of its work.
    pub seq: u64,
    /// In which capture.
    pub capture: Option<u64>,
}

/// A capture under way.
#[derive(Debug)]
pub struct Capture {
    /// Where it began.
    origin: u64,
    /// Who began it.
    pub thread: ThreadId,
    /// Whether nothing forbidden happened so far.
    pub is_valid: bool,
    /// What was captured.
    pub ops: Vec<Op>,
}

impl Capture {
    /// A capture of what is submitted to `origin`, by this thread.
    pub fn begin(origin: u64) -> Self {
        Capture { origin, thread: std::thread::current().id(), is_valid: true, ops: Vec::new() }
    }
}

#[derive(Debug)]
struct Fault {
    call: String,
    /// Calls until it strikes; 0: always.
    left: u64,
    code: Code,
}

/// The device and the driver.
#[derive(Debug)]
pub struct State {
    /// What the device is like.
    pub options: Options,
    /// How often each call was made.
    pub calls: BTreeMap<&'static str, u64>,
    /// References to primary contexts.
    pub retained: i64,
    /// Reserved addresses: base to size.
    pub ranges: BTreeMap<u64, u64>,
    /// Mapped memory, by address.
    mappings_by_address: BTreeMap<u64, Mapping>,
    physical: BTreeMap<u64, Physical>,
    /// Whole allocations: size, and whether of the host.
    allocations: BTreeMap<u64, (u64, bool)>,
    /// Streams by handle. 0 is the default stream.
    pub streams: BTreeMap<u64, Stream>,
    /// Events by handle.
    pub events: BTreeMap<u64, Event>,
    /// Captures under way by id.
    pub captures: BTreeMap<u64, Capture>,
    /// Graphs by handle.
    pub graphs: BTreeMap<u64, Vec<Op>>,
    faults: Vec<Fault>,
    next_handle: u64,
}

/// The one state of this process.
pub fn with<T>(act: impl FnOnce(&mut State) -> T) -> T {
    static STATE: Mutex<Option<State>> = Mutex::new(None);
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    act(state.get_or_insert_with(State::new))
}

impl State {
    fn new() -> Self {
        State {
            options: Options::from_environment(),
            calls: BTreeMap::new(),
            retained: 0,
            ranges: BTreeMap::new(),
            mappings_by_address: BTreeMap::new(),
            physical: BTreeMap::new(),
            allocations: BTreeMap::new(),
            streams: BTreeMap::from([(0, Stream::default())]),
            events: BTreeMap::new(),
            captures: BTreeMap::new(),
            graphs: BTreeMap::new(),
            faults: Vec::new(),
            next_handle: 0x1000,
        }
    }

    /// Counts a call, and says whether it is to fail.
    pub fn enter(&mut self, name: &'static str) -> Result<(), Code> {
        *self.calls.entry(name).or_default() += 1;
        let struck = self.faults.iter_mut().position(|fault| {
            if fault.call != name {
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

    /// See `stub_fail`.
    pub fn fail(&mut self, call: String, nth: u64, code: Code) {
        self.faults.push(Fault { call, left: nth, code });
    }

    /// See `stub_heal`.
    pub fn heal(&mut self) {
        self.faults.clear();
    }

    /// A handle that was never given before.
    pub fn handle(&mut self) -> u64 {
        self.next_handle += 0x10;
        self.next_handle
    }

    /// See `stub_live`.
    pub fn live(&self, what: c_int) -> u64 {
        let allocated =
            |host| self.allocations.values().filter(|(_, of)| *of == host).map(|(size, _)| size).sum::<u64>();
        match what {
            0 => self.physical_bytes(),
            1 => self.ranges.len() as u64,
            2 => self.events.len() as u64,
            3 => self.streams.len() as u64 - 1,
            4 => allocated(true),
            5 => self.graphs.len() as u64,
            6 => self.mappings_by_address.len() as u64,
            _ => 0,
        }
    }

    /// Device memory in use, in bytes.
    pub fn physical_bytes(&self) -> u64 {
        let allocated = self.allocations.values().filter(|(_, host)| !host).map(|(size, _)| size).sum::<u64>();
        self.physical.values().map(|physical| physical.size).sum::<u64>() + allocated
    }

    /// Reserves addresses.
    pub fn reserve(&mut self, size: u64) -> Option<u64> {
        // Room to align the base: the rest is never used, and costs addresses only.
        let base = mmap(0, size + GRANULARITY, libc::PROT_NONE, 0)?.next_multiple_of(GRANULARITY);
        self.ranges.insert(base, size);
        Some(base)
    }

    /// Gives addresses up.
    pub fn unreserve(&mut self, base: u64) {
        if let Some(size) = self.ranges.remove(&base) {
            // SAFETY: reserved with this size, and nothing is mapped there.
            unsafe { libc::munmap(base as *mut _, size as usize) };
        }
    }

    /// Takes physical memory.
    pub fn create(&mut self, size: u64) -> Option<u64> {
        if size > self.options.memory_bytes - self.physical_bytes() {
            return None;
        }
        let handle = self.handle();
        self.physical.insert(handle, Physical { size, owners: 1 });
        Some(handle)
    }

    /// Gives a handle, or a mapping of it, up.
    pub fn release(&mut self, handle: u64) -> Option<()> {
        let physical = self.physical.get_mut(&handle)?;
        physical.owners -= 1;
        if physical.owners == 0 {
            self.physical.remove(&handle);
        }
        Some(())
    }

    /// Maps all of a handle into a free part of a range.
    pub fn map(&mut self, address: u64, size: u64, handle: u64) -> Option<()> {
        let (base, range) = self.ranges.range(..=address).next_back()?;
        let is_inside = address + size <= base + range;
        let is_free = self.mappings(address, size).is_empty();
        let physical = self.physical.get_mut(&handle)?;
        if !is_inside || !is_free || physical.size != size {
            return None;
        }
        physical.owners += 1;
        self.mappings_by_address.insert(address, Mapping { size, handle, access: Access::None });
        Some(())
    }

    /// Makes mapped memory accessible, all of it.
    pub fn set_access(&mut self, address: u64, size: u64, access: Access) -> Option<()> {
        let parts = self.mappings(address, size);
        if !tile(&parts, address, size) {
            return None;
        }
        mmap(address, size, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_FIXED)?;
        for (at, _) in parts {
            self.mappings_by_address.get_mut(&at).expect("just found").access = access;
        }
        Some(())
    }

    /// Unmaps whole mappings.
    pub fn unmap(&mut self, address: u64, size: u64) -> Option<()> {
        let parts = self.mappings(address, size);
        if !tile(&parts, address, size) {
            return None;
        }
        for (at, _) in parts {
            let mapping = self.mappings_by_address.remove(&at).expect("just found");
            self.release(mapping.handle)?;
        }
        mmap(address, size, libc::PROT_NONE, libc::MAP_FIXED)?;
        Some(())
    }

    /// Mappings that share a byte with the part: address and size.
    fn mappings(&self, address: u64, size: u64) -> Vec<(u64, u64)> {
        let all = self.mappings_by_address.iter().map(|(at, mapping)| (*at, mapping.size));
        all.filter(|(at, length)| *at < address + size && address < at + length).collect()
    }

    /// Addresses of all mappings.
    pub fn mapping_addresses(&self) -> BTreeSet<u64> {
        self.mappings_by_address.keys().copied().collect()
    }

    /// A whole allocation, aligned to 512 bytes and, on purpose, not always to a granule.
    pub fn allocate(&mut self, size: u64, host: bool) -> Option<u64> {
        if !host && size > self.options.memory_bytes - self.physical_bytes() {
            return None;
        }
        let shift = 512 * (self.allocations.len() as u64 % 2);
        let address = mmap(0, size + GRANULARITY, libc::PROT_READ | libc::PROT_WRITE, 0)?;
        let address = address.next_multiple_of(GRANULARITY) + shift;
        self.allocations.insert(address, (size, host));
        Some(address)
    }

    /// Gives an allocation up. Its addresses are not used again.
    pub fn free(&mut self, address: u64) -> Option<()> {
        let (size, _) = self.allocations.remove(&address)?;
        mmap(address / 4096 * 4096, size, libc::PROT_NONE, libc::MAP_FIXED).map(|_| ())
    }

    /// A stream.
    pub fn stream(&mut self, stream: u64) -> Option<&mut Stream> {
        self.streams.get_mut(&stream)
    }

    /// Submits work: runs it, or captures it.
    pub fn submit(&mut self, stream: u64, op: Op) -> Result<(), Code> {
        let known = self.streams.get_mut(&stream).ok_or(Code(400))?;
        known.submitted += 1;
        match known.capture {
            Some(capture) => self.captures.get_mut(&capture).expect("under way").ops.push(op),
            None => op.run(),
        }
        Ok(())
    }

    /// Makes later work of the stream wait.
    pub fn wait(&mut self, stream: u64, event: Event) {
        let known = self.streams.get_mut(&stream).expect("known");
        known.submitted += 1;
        known.waits.push((known.submitted, event.stream, event.seq));
    }

    /// Whether the work before the event counts as done.
    pub fn is_complete(&self, event: Event) -> bool {
        self.streams.get(&event.stream).is_none_or(|stream| event.seq <= stream.completed)
    }

    /// Completes work of a stream, and what it waited for.
    pub fn complete(&mut self, stream: u64, seq: u64) {
        let Some(known) = self.streams.get_mut(&stream) else { return };
        if seq <= known.completed {
            return;
        }
        known.completed = seq;
        let (due, later) = std::mem::take(&mut known.waits).into_iter().partition(|(own, _, _)| *own <= seq);
        known.waits = later;
        let due: Vec<_> = due;
        due.into_iter().for_each(|(_, other, work)| self.complete(other, work));
    }

    /// Completes all work.
    pub fn complete_all(&mut self) {
        self.streams.values_mut().for_each(|stream| {
            stream.completed = stream.submitted;
            stream.waits.clear();
        });
    }

    /// Whether the origin of a capture waits for the last work of every other stream of it.
    pub fn is_joined(&self, capture: u64) -> bool {
        let origin = self.captures[&capture].origin;
        let waits = &self.streams[&origin].waits;
        let others = self.streams.iter().filter(|(id, stream)| stream.capture == Some(capture) && **id != origin);
        others.into_iter().all(|(id, stream)| waits.contains(&(waits_at(waits, *id), *id, stream.submitted)))
    }
}

/// Which of the origin's own works is its last wait for `stream`.
fn waits_at(waits: &[(u64, u64, u64)], stream: u64) -> u64 {
    waits.iter().rev().find(|(_, other, _)| *other == stream).map_or(0, |(own, _, _)| *own)
}

/// Whether mappings cover the part exactly.
fn tile(parts: &[(u64, u64)], address: u64, size: u64) -> bool {
    let inside = parts.iter().all(|(at, length)| *at >= address && at + length <= address + size);
    size > 0 && inside && parts.iter().map(|(_, length)| length).sum::<u64>() == size
}

fn mmap(address: u64, size: u64, protection: c_int, flags: c_int) -> Option<u64> {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a fixed address is one that this file has reserved before.
    let mapped = unsafe { libc::mmap(address as *mut _, size as usize, protection, flags, -1, 0) };
    (mapped != libc::MAP_FAILED).then_some(mapped as u64)
}
