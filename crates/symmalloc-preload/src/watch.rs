//! Recording of a program that keeps its own allocator. This works for any CUDA program.
//!
//! ```text
//!  cuMemAlloc, cuMemAllocAsync ... ─► the driver ── succeeded ──► record: a id size stream      ─► trace of the device
//!  cuMemFree, cuMemFreeAsync ...   ─► the driver ── succeeded ──► record: u id stream?, f id
//! ```
//!
//! Streams are numbered in the same way as when the program is served. Allocations in a capture are part of its graph, and are not
//! recorded.

use crate::numbers::{Number, Numbers, StreamName};
use crate::outcome::SUCCESS;
use crate::streams;
use crate::{captures, forks, libcuda, recordings, settings, tally};
use rustc_hash::{FxBuildHasher, FxHashMap};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use symmalloc_core::op::{Op, Record};
use symmalloc_core::recording::Sink;
use symmalloc_core::{AllocationId, PoolId, StreamId};
use symmalloc_import::TraceFile;

/// Data of a watched allocation of the driver.
#[derive(Clone, Copy)]
struct Watched {
    size_bytes: u64,
    device: c_int,
    id: AllocationId,
    stream: StreamId,
}

/// The state of all devices.
struct Watching {
    devices: BTreeMap<c_int, WatchedDevice>,
    /// Live allocations by address. A program can free an allocation only by its first address, so a map by first address suffices.
    live: FxHashMap<u64, Watched>,
}

struct WatchedDevice {
    ordinal: usize,
    /// `None` if recording is disabled or has stopped.
    file: Option<TraceFile>,
    numbers: Numbers<StreamName>,
    /// The stream of the last lookup, and its number.
    last: Option<(StreamName, StreamId)>,
    streams: u16,
    allocations: u64,
}

/// One lock for all devices, because records have a total order.
static WATCHING: Mutex<Watching> =
    Mutex::new(Watching { devices: BTreeMap::new(), live: FxHashMap::with_hasher(FxBuildHasher) });

fn watching() -> MutexGuard<'static, Watching> {
    WATCHING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the devices with allocations, and the sizes of the allocations that are still live.
pub(crate) fn all_devices() -> BTreeMap<c_int, Vec<u64>> {
    let watching = watching();
    let mut sizes: BTreeMap<c_int, Vec<u64>> = watching.devices.keys().map(|device| (*device, Vec::new())).collect();
    for found in watching.live.values() {
        sizes.entry(found.device).or_default().push(found.size_bytes);
    }
    sizes
}

impl WatchedDevice {
    fn new(device: c_int) -> Self {
        forks::watch();
        let (ordinal, settings) = (usize::try_from(device).unwrap_or(0), settings::settings());
        let file = settings.and_then(|settings| {
            let mut file = recordings::create(ordinal, settings)?;
            let begun = file.begin(&settings.config).map_err(recordings::refused);
            begun.inspect_err(|error| recordings::failed(ordinal, error)).ok()?;
            Some(file)
        });
        WatchedDevice { ordinal, file, numbers: Numbers::new(), last: None, streams: 0, allocations: 0 }
    }

    fn record(&mut self, op: Op) {
        let Some(file) = &mut self.file else { return };
        if let Err(error) = file.record(Record::from(op)) {
            recordings::failed(self.ordinal, &*error);
            self.file = None;
        }
    }

    /// Returns the number of a stream. All streams beyond 65,535 share the last number.
    fn number(&mut self, name: StreamName) -> StreamId {
        match self.last {
            Some((last, stream)) if last == name => stream,
            _ => {
                let stream = self.find_number(name);
                self.last = Some((name, stream));
                stream
            }
        }
    }

    fn find_number(&mut self, name: StreamName) -> StreamId {
        let number = match self.numbers.number_for(name) {
            Number::Known(number) => return StreamId(number),
            Number::Reused(number) => number,
            Number::New if self.streams > StreamId::MAX.0 => return StreamId::MAX,
            Number::New => {
                self.streams += 1;
                self.record(Op::register(StreamId(self.streams - 1)));
                self.streams - 1
            }
        };
        self.numbers.give(name, number);
        StreamId(number)
    }
}

/// Number of destroyed streams. A lookup that a thread has cached is valid until this number changes.
static DESTROYED: AtomicU64 = AtomicU64::new(0);

/// Returns the device of a stream's context, or the current device for a default stream or `None`. Each thread caches its last result.
fn device_of(stream: Option<usize>) -> Option<c_int> {
    thread_local! {
        /// A stream handle, the value of `DESTROYED` at the time of the lookup, and the stream's device.
        static STREAM: Cell<(usize, u64, c_int)> = const { Cell::new((0, 0, 0)) };
    }
    let driver = libcuda::driver()?;
    let Some(stream) = stream.filter(|stream| *stream > streams::PER_THREAD) else {
        // Not cached: a context of another device may reuse the handle of a destroyed context.
        return driver.current_device();
    };
    let destroyed = DESTROYED.load(Ordering::Acquire);
    let (known, when, device) = STREAM.get();
    if known == stream && when == destroyed {
        return Some(device);
    }
    let mut context = 0;
    // SAFETY: the pointer is valid for writing, and the driver has just accepted the stream.
    unsafe { driver.stream_context(stream, &raw mut context) }.ok()?;
    let device = driver.device_of(context)?;
    STREAM.set((stream, destroyed, device));
    Some(device)
}

/// Records an allocation if the driver's call succeeded. `stream` is `None` for `cuMemAlloc`.
///
/// # Safety
/// The driver wrote to `address` if it succeeded.
pub(crate) unsafe fn allocated(code: c_int, address: *mut u64, size_bytes: u64, stream: Option<usize>) -> c_int {
    if code != SUCCESS || size_bytes == 0 || address.is_null() {
        return code;
    }
    if stream.is_some_and(captures::has) {
        return code;
    }
    let Some(device) = device_of(stream) else { return code };
    // SAFETY: the caller's contract.
    let address = unsafe { address.read() };
    let name = streams::name_of(stream.unwrap_or(0));
    let mut watching = watching();
    let Watching { devices, live } = &mut *watching;
    let known = devices.entry(device).or_insert_with(|| WatchedDevice::new(device));
    let stream = known.number(name);
    let id = AllocationId(known.allocations);
    known.allocations += 1;
    known.record(Op::Allocate { id, pool: PoolId::DEFAULT, stream, size_bytes });
    // Inserted before another thread can free it, and before the driver can reuse the address.
    live.insert(address, Watched { size_bytes, device, id, stream });
    drop(watching);
    tally::allocated(size_bytes);
    code
}

/// Frees an allocation and records it. `stream` is `None` for `cuMemFree`.
pub(crate) fn freed(address: u64, stream: Option<usize>, call: impl FnOnce() -> c_int) -> c_int {
    // Removed before the driver can reuse the address for another thread.
    let Some(found) = watching().live.remove(&address) else { return call() };
    let code = call();
    if code != SUCCESS {
        watching().live.insert(address, found);
        return code;
    }
    let Watched { device, id, stream: owner, .. } = found;
    let name = stream.map(streams::name_of);
    if let Some(known) = watching().devices.get_mut(&device) {
        let user = name.map(|name| known.number(name));
        if let Some(user) = user.filter(|user| *user != owner) {
            known.record(Op::RecordUse { id, stream: user });
        }
        known.record(Op::Free { id });
    }
    tally::freed(found.size_bytes);
    code
}

/// Invalidates cached lookups after a context reset, because the reset destroys the context's streams.
pub(crate) fn reset() {
    DESTROYED.fetch_add(1, Ordering::AcqRel);
}

/// Releases the number of a stream that the program is about to destroy.
pub(crate) fn destroyed(stream: usize) {
    DESTROYED.fetch_add(1, Ordering::AcqRel);
    for device in watching().devices.values_mut() {
        device.numbers.take_back(StreamName::Handle(stream));
        device.last = None;
    }
}

/// Completes the traces.
pub(crate) fn finish() {
    for device in watching().devices.values_mut() {
        if let Some(mut file) = device.file.take()
            && let Err(error) = file.finish()
        {
            recordings::failed(device.ordinal, &*error);
        }
    }
}
