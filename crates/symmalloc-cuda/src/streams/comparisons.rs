//! Fills and comparisons of device memory, for the [debugging options](symmalloc_core::debug) of pools.
//!
//! ```text
//!  compare ─► copy to a slot of pinned memory, on the stream ─► event
//!  compared ─► event done? ─► the host compares the slot with the pattern ─► the slot is reused
//! ```
//! The device needs no kernel for this, so no module is loaded. A slot is taken for the time of one comparison.

use super::BackendStreams;
use crate::device::CudaDevice;
use crate::driver::HOST_PORTABLE;
use crate::error::DriverError;
use cudarc::driver::sys::CUstream;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use symmalloc_core::backend::{BackendError, Bytes, COMPARED_BYTES_MAX, Compared, Comparison, Event};
use symmalloc_core::ids::StreamId;

/// Size of a block of pinned memory, which is divided into slots of one size.
const SLAB_BYTES: usize = 1 << 20;
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
    running: BTreeMap<u64, Running>,
    next: u64,
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
        let driver = self.device.driver();
        let (start, end) = (bytes.address.0, bytes.address.0 + bytes.size_bytes);
        let (words_start, words_end) = (start.next_multiple_of(4).min(end), end / 4 * 4);
        let fill = |raw: CUstream| {
            for at in (start..words_start).chain(words_end.max(words_start)..end) {
                // SAFETY: by the contract of `Backend::fill`, the byte is mapped, and the stream is alive.
                unsafe { driver.memset_async(at, byte_at(pattern, at), 1, raw) }?;
            }
            let words = words_end.saturating_sub(words_start) as usize / 4;
            if words == 0 {
                return Ok(());
            }
            // SAFETY: as above, and the address is a multiple of 4.
            unsafe { driver.memset32_async(words_start, pattern, words, raw) }
        };
        Ok(streams.with_raw(stream, "cuMemsetD32Async", |raw| self.device.call_about(raw, || fill(raw)))?)
    }

    /// Implements [`Backend::compare`](symmalloc_core::backend::Backend::compare).
    pub(crate) fn compare(
        &self,
        streams: &BackendStreams,
        stream: StreamId,
        bytes: Bytes,
        pattern: u32,
    ) -> Result<Comparison, BackendError> {
        let driver = self.device.driver();
        let (class, slot) = self.take_slot(bytes.size_bytes as usize)?;
        let copy = |raw: CUstream| {
            let (to, len) = (slot as *mut c_void, bytes.size_bytes as usize);
            // SAFETY: by the contract of `Backend::compare`, the bytes are mapped and the stream is alive. The slot has room for them and
            // is taken until the copy is done.
            unsafe { driver.copy_to_host(to, bytes.address.0, len, raw) }
        };
        let submitted = streams.with_raw(stream, "cuMemcpyDtoHAsync_v2", |raw| {
            self.device.call_about(raw, || copy(raw))?;
            streams.record_raw(raw)
        });
        // If the event fails, the copy may still write to the slot, which is therefore not reused.
        let event = submitted?;
        let mut state = self.state();
        let id = state.next;
        state.next += 1;
        state.running.insert(id, Running { class, slot, bytes, pattern, event });
        Ok(Comparison(id))
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
        // After an error, the copy may still run.
        done?;
        let Running { class, slot, bytes, pattern, .. } = running;
        // SAFETY: the slot is initialized pinned memory of at least this size, and the copy into it is done.
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
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        let mut address = std::ptr::null_mut();
        // SAFETY: `address` is valid for writing, and a context is current.
        unsafe { self.device.driver().host_allocate(&raw mut address, SLAB_BYTES, HOST_PORTABLE) }?;
        let slab = address as usize;
        // SAFETY: the driver returned this memory, which nothing else uses. Now all of it is initialized.
        unsafe { std::ptr::write_bytes(address.cast::<u8>(), 0, SLAB_BYTES) };
        state.slabs.push(slab);
        state.free[class].extend((slab..slab + SLAB_BYTES).step_by(SLOT_BYTES[class]));
        let slot = state.free[class].pop().expect("the slab has slots");
        Ok((class, slot))
    }
}

impl Drop for Comparisons {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        // The allocator has collected all comparisons, unless the device is lost. Memory that a copy may still use is kept.
        if state.slabs.is_empty() || !state.running.is_empty() {
            return;
        }
        let Ok(_current) = self.device.enter() else { return };
        let _relaxed = self.device.driver().relax_capture();
        for slab in state.slabs.drain(..) {
            // SAFETY: the memory came from `host_allocate`, is freed once, and no copy uses it. Memory that the driver fails to free is
            // released with its context.
            let _freed = unsafe { self.device.driver().host_free(slab as *mut c_void) };
        }
    }
}

/// Returns the byte of the pattern that belongs to an address.
fn byte_at(pattern: u32, address: u64) -> u8 {
    pattern.to_le_bytes()[(address % 4) as usize]
}
