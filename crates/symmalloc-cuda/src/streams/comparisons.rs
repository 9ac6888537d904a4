//! Fills and comparisons of device memory, for the [debugging options](symmalloc_core::debug) of pools.
//!
//! ```text
//!  compare ─► copy to a slot of pinned memory, on the stream ─► event
//!  compared ─► event done? ─► the host compares the slot with the pattern ─► the slot is reused
//! ```
//! The device needs no kernel for this, so no module is loaded. A slot is taken for the time of one comparison.
//!
//! Memory of the host as a stream (`cudaMalloc` under `symmalloc run`) may be used by every stream at once, and `cudaFree` waits for all of
//! them before it frees. It is therefore filled and compared on a separate stream. The host waits for this work, which waits for no
//! other.

use super::BackendStreams;
use crate::device::CudaDevice;
use crate::driver::{HOST_PORTABLE, STREAM_NON_BLOCKING};
use crate::error::{DriverError, OUT_OF_MEMORY};
use cudarc::driver::sys::CUstream;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use symmalloc_core::backend::{BackendError, Bytes, COMPARED_BYTES_MAX, Compared, Comparison, Event};
use symmalloc_core::ids::StreamId;

/// Size of a block of pinned memory, which is divided into slots of one size.
const SLAB_BYTES: usize = 1 << 20;
/// Maximum number of slabs, by the size of their slots. The allocator waits for its comparisons once they take 16 MiB, but not within one
/// op, which may free thousands of blocks. Each size has its own maximum, so neither takes the memory of the other.
const SLABS_MAX: [usize; 2] = [16, 256];
/// The sizes of slots: guards are short, and freed blocks are compared in larger parts.
const SLOT_BYTES: [usize; 2] = [1 << 10, COMPARED_BYTES_MAX as usize];

/// The comparisons of one backend in progress. Takes no memory before the first one.
pub(crate) struct Comparisons {
    device: Arc<CudaDevice>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Addresses of free slots, by size.
    free: [Vec<usize>; SLOT_BYTES.len()],
    /// Addresses of pinned memory.
    slabs: Vec<usize>,
    /// The number of slabs, by the size of their slots.
    slab_counts: [usize; SLOT_BYTES.len()],
    running: BTreeMap<u64, Running>,
    next: u64,
    /// Number of slots that a copy may still write to, because its event failed or belongs to a capture. They are not reused.
    lost_slots: usize,
    /// The stream for memory of the host as a stream. Created at the first such fill.
    of_host: Option<usize>,
}

/// A comparison in progress.
#[derive(Clone, Copy)]
struct Running {
    /// Index of the slot's size.
    class: usize,
    slot: usize,
    bytes: Bytes,
    pattern: u32,
    event: Event,
}

impl Comparisons {
    pub(crate) fn new(device: Arc<CudaDevice>) -> Self {
        Comparisons { device, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Implements [`Backend::fill`](symmalloc_core::backend::Backend::fill).
    pub(crate) fn fill(
        &self,
        streams: &BackendStreams,
        stream: StreamId,
        bytes: Bytes,
        pattern: u32,
    ) -> Result<(), BackendError> {
        let fill = |raw: CUstream| self.device.call_about(raw, || self.fill_on(raw, bytes, pattern));
        if !streams.is_host(stream) {
            return Ok(streams.with_raw(stream, "cuMemsetD32Async", fill)?);
        }
        let raw = self.host_stream()?;
        fill(raw)?;
        let event = streams.record_raw(raw)?;
        let waited = streams.wait_for(event);
        streams.recycle(event);
        Ok(waited?)
    }

    fn fill_on(&self, raw: CUstream, bytes: Bytes, pattern: u32) -> Result<(), DriverError> {
        let driver = self.device.driver();
        let (start, end) = (bytes.address.0, bytes.address.0 + bytes.size_bytes);
        let (words_start, words_end) = (start.next_multiple_of(4).min(end), end / 4 * 4);
        for at in (start..words_start).chain(words_end.max(words_start)..end) {
            // SAFETY: the byte is one of `bytes`. By the contract of `Backend::fill`, these are mapped until the stream has reached this
            // call: the heap's lock is held, and memory is unmapped only after the host has waited for the streams that used it. The stream
            // is alive: the caller holds its lock if it is lent, and all other registered streams and `of_host` live as long as the backend.
            unsafe { driver.memset_async(at, byte_at(pattern, at), 1, raw) }?;
        }
        let words = words_end.saturating_sub(words_start) as usize / 4;
        if words == 0 {
            return Ok(());
        }
        // SAFETY: `words` words from `words_start`, a multiple of 4, are part of `bytes`. For the memory and the stream, see above.
        unsafe { driver.memset32_async(words_start, pattern, words, raw) }
    }

    /// Implements [`Backend::compare`](symmalloc_core::backend::Backend::compare).
    pub(crate) fn compare(
        &self,
        streams: &BackendStreams,
        stream: StreamId,
        bytes: Bytes,
        pattern: u32,
    ) -> Result<Option<Comparison>, BackendError> {
        let driver = self.device.driver();
        let (class, slot) = self.take_slot(bytes.size_bytes as usize)?;
        let copy = |raw: CUstream| {
            let (to, len) = (slot as *mut c_void, bytes.size_bytes as usize);
            // SAFETY: the source is mapped and the stream alive, as in `fill_on`. The destination is a slot of at least `len` bytes of
            // pinned memory: `take_slot` chose its class by this size, and returned it to this call alone. Nothing reads it, and no other
            // copy writes to it, before `compared` has found that the event after the copy is done. Slabs are freed in `drop`, and only if
            // no slot is in use.
            self.device.call_about(raw, || unsafe { driver.copy_to_host(to, bytes.address.0, len, raw) })?;
            streams.record_raw(raw)
        };
        let submitted = match streams.is_host(stream) {
            // Nobody can wait for this stream later, and its work is short.
            true => self.host_stream().and_then(copy).and_then(|event| {
                streams.wait_for(event).inspect_err(|_| streams.recycle(event))?;
                Ok(event)
            }),
            false => streams.with_raw(stream, "cuMemcpyDtoHAsync_v2", copy),
        };
        let mut state = self.state();
        match submitted {
            Ok(event) if !streams.is_of_capture(event) => {
                let id = state.next;
                state.next += 1;
                state.running.insert(id, Running { class, slot, bytes, pattern, event });
                Ok(Some(Comparison(id)))
            }
            // Another thread began a capture after the allocator had looked. Each launch of the graph writes to the slot.
            Ok(event) => {
                state.lost_slots += 1;
                drop(state);
                streams.recycle(event);
                Ok(None)
            }
            // The copy may have been submitted.
            Err(error) => {
                state.lost_slots += 1;
                Err(error.into())
            }
        }
    }

    /// Implements [`Backend::compared`](symmalloc_core::backend::Backend::compared).
    pub(crate) fn compared(
        &self,
        streams: &BackendStreams,
        Comparison(id): Comparison,
    ) -> Result<Compared, BackendError> {
        let running = *self.state().running.get(&id).expect("a comparison ends once");
        let done = streams.query(running.event);
        if done == Ok(false) {
            return Ok(Compared::Pending);
        }
        streams.recycle(running.event);
        let mut state = self.state();
        state.running.remove(&id);
        if let Err(error) = done {
            // The copy may still run.
            state.lost_slots += 1;
            return Err(error);
        }
        let Running { class, slot, bytes, pattern, .. } = running;
        // SAFETY: the slot belongs to this comparison until it is returned to `free` below, and is at least this long. It was initialized
        // when its slab was allocated, and the only copy into it is done, because the event after it is.
        let copied = unsafe { std::slice::from_raw_parts(slot as *const u8, bytes.size_bytes as usize) };
        let is_other = |(at, byte): (u64, &u8)| *byte != byte_at(pattern, bytes.address.0 + at);
        let first_other = (0..).zip(copied).position(is_other);
        state.free[class].push(slot);
        Ok(first_other.map_or(Compared::Equal, |at| Compared::Different { offset_bytes: at as u64 }))
    }

    /// Returns a free slot for `size_bytes`, and the index of its size.
    fn take_slot(&self, size_bytes: usize) -> Result<(usize, usize), DriverError> {
        let class = usize::from(size_bytes > SLOT_BYTES[0]);
        let mut state = self.state();
        if let Some(slot) = state.free[class].pop() {
            return Ok((class, slot));
        }
        if state.slab_counts[class] == SLABS_MAX[class] {
            return Err(DriverError { call: "cuMemHostAlloc", code: OUT_OF_MEMORY });
        }
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        let mut address = std::ptr::null_mut();
        // SAFETY: `address` is valid for writing, and a context is current.
        unsafe { self.device.driver().host_allocate(&raw mut address, SLAB_BYTES, HOST_PORTABLE) }?;
        let slab = address as usize;
        // SAFETY: the driver returned `SLAB_BYTES` of writable memory, which nothing else uses yet. Now all of it is initialized.
        unsafe { std::ptr::write_bytes(address.cast::<u8>(), 0, SLAB_BYTES) };
        state.slabs.push(slab);
        state.slab_counts[class] += 1;
        state.free[class].extend((slab..slab + SLAB_BYTES).step_by(SLOT_BYTES[class]));
        let slot = state.free[class].pop().expect("the slab has slots");
        Ok((class, slot))
    }

    /// Returns the stream on which memory of the host as a stream is filled and compared.
    fn host_stream(&self) -> Result<CUstream, DriverError> {
        let mut state = self.state();
        if let Some(stream) = state.of_host {
            return Ok(std::ptr::without_provenance_mut(stream));
        }
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        let mut stream: CUstream = std::ptr::null_mut();
        // SAFETY: `stream` is valid for writing, and a context is current.
        unsafe { self.device.driver().stream_create(&raw mut stream, STREAM_NON_BLOCKING) }?;
        state.of_host = Some(stream as usize);
        Ok(stream)
    }
}

impl Drop for Comparisons {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let has_nothing = state.slabs.is_empty() && state.of_host.is_none();
        let Some(_current) = (!has_nothing).then(|| self.device.enter().ok()).flatten() else { return };
        let _relaxed = self.device.driver().relax_capture();
        if let Some(stream) = state.of_host.take() {
            // SAFETY: created by `host_stream`, and not used anymore. Work on it completes before the driver frees it.
            let _refused = unsafe { self.device.driver().stream_destroy(std::ptr::without_provenance_mut(stream)) };
        }
        // The allocator has collected all comparisons, unless the device is lost. Memory that a copy may still use is kept.
        if state.running.is_empty() && state.lost_slots == 0 {
            for slab in state.slabs.drain(..) {
                // SAFETY: the memory came from `host_allocate` and is freed once. No copy uses it: every slot was returned to `free` after
                // its copy was done. Memory that the driver fails to free is released with its context.
                let _freed = unsafe { self.device.driver().host_free(slab as *mut c_void) };
            }
        }
    }
}

/// Returns the byte of the pattern that belongs to an address.
fn byte_at(pattern: u32, address: u64) -> u8 {
    pattern.to_le_bytes()[(address % 4) as usize]
}
