//! Another library's work on the stub's streams, and that library's queries about memory.
//!
//! ```text
//!  libnccl: stub_external_submit(stream, template) ─► queue ... │ instance │ ...
//!  libnccl: submitted(template, instance)  ◄──────────────────────╯   │
//!  libnccl: arrived(instance)              ◄── it is at the front ─────╯
//!  libnccl: moves data once all ranks arrived, then stub_external_complete(instance) ─► the stream continues
//! ```
//!
//! A captured submission is an op of the graph: each launch creates an instance. Hooks are called without the stub's lock, one at a time,
//! in order.

use crate::abi::{Hooks, Region};
use crate::model::{Code, State, THREAD, notify, with};
use crate::streams::Op;
use std::cell::Cell;
use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};

/// A pending call of a hook.
#[derive(Clone, Copy, Debug)]
pub enum Notice {
    /// See [`Hooks::submitted`].
    Submitted {
        /// The library's handle of the work.
        template: u64,
        /// Handle of this submission of the work.
        instance: u64,
    },
    /// See [`Hooks::arrived`].
    Arrived {
        /// Handle of the submission.
        instance: u64,
    },
    /// See [`Hooks::unmapped`].
    Unmapped {
        /// The guard.
        guard: u64,
    },
}

thread_local! {
    /// `true` while this thread is inside a hook; it handles subsequent notices once the hook returns.
    static IS_DELIVERING: Cell<bool> = const { Cell::new(false) };
}

/// Calls the hooks for all pending notices, and for those that the hooks themselves cause.
pub(crate) fn deliver() {
    static TURN: Mutex<()> = Mutex::new(());
    // If another thread is delivering a notice that this thread caused, waits for it.
    if IS_DELIVERING.get() || with(|state| state.notices.is_empty() && !state.is_delivering) {
        return;
    }
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    IS_DELIVERING.set(true);
    loop {
        let (hooks, notices) = with(|state| {
            state.is_delivering = !state.notices.is_empty();
            (state.hooks, std::mem::take(&mut state.notices))
        });
        let Some(hooks) = hooks.filter(|_| !notices.is_empty()) else { break };
        for notice in notices {
            match notice {
                Notice::Submitted { template, instance } => (hooks.submitted)(template, instance),
                Notice::Arrived { instance } => (hooks.arrived)(instance),
                Notice::Unmapped { guard } => (hooks.unmapped)(guard),
            }
        }
    }
    IS_DELIVERING.set(false);
}

impl State {
    /// Notifies the library about guards that overlap memory to be unmapped or freed.
    pub fn note_unmapped(&mut self, address: u64, size: u64) {
        let hit = self.guards.iter().filter(|(_, (at, length))| *at < address + size && address < at + length);
        self.notices.extend(hit.map(|(guard, _)| Notice::Unmapped { guard: *guard }));
    }

    fn region(&self, address: u64) -> Option<Region> {
        let memory = &self.memory;
        let Some((base, mapping)) =
            memory.mappings.range(..=address).next_back().filter(|(base, mapping)| address < *base + mapping.size)
        else {
            let (base, size, device) = memory.allocation(address)?;
            return Some(Region { base, size, device, run_base: base, run_end: base + size, ..Region::default() });
        };
        let physical = memory.physical[&mapping.handle];
        let range = memory.ranges.range(..=address).next_back().map(|(base, (size, _))| (*base, base + size));
        let (range_base, range_end) = range.expect("mapped into a range");
        let (mut run_base, mut run_end) = (*base, *base + mapping.size);
        for (at, mapping) in memory.mappings.range(run_end..range_end) {
            if *at != run_end {
                break;
            }
            run_end += mapping.size;
        }
        for (at, mapping) in memory.mappings.range(range_base..run_base).rev() {
            if at + mapping.size != run_base {
                break;
            }
            run_base = *at;
        }
        Some(Region {
            base: *base,
            size: mapping.size,
            range_base,
            run_base,
            run_end,
            handle: mapping.handle,
            handle_types: physical.handle_types,
            device: physical.device,
        })
    }
}

/// Sets the hooks.
///
/// # Safety
/// The hooks must remain callable for the life of the process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_hooks(hooks: Hooks) {
    with(|state| state.hooks = Some(hooks));
}

/// Submits work of the library to a stream. Returns 0 if it was queued, 1 if it was captured, and a negated error code otherwise.
#[unsafe(no_mangle)]
pub extern "C" fn stub_external_submit(stream: u64, template: u64) -> c_int {
    let stream = stream_key(stream);
    let submitted = with(|state| {
        let is_captured = state.stream(stream).ok_or(Code(400))?.capture.is_some();
        state.submit(stream, Op::External { template })?;
        Ok(c_int::from(is_captured))
    });
    deliver();
    submitted.unwrap_or_else(|Code(code): Code| -code)
}

/// Marks work of the library as finished.
#[unsafe(no_mangle)]
pub extern "C" fn stub_external_complete(instance: u64) {
    with(|state| state.external_is_done(instance));
    notify();
    deliver();
}

/// Returns the device of the current context; -1 if there is none.
#[unsafe(no_mangle)]
pub extern "C" fn stub_device() -> c_int {
    THREAD.with_borrow(crate::model::Thread::device).unwrap_or(-1)
}

/// Returns the device of a stream; -1 if the stream does not exist.
#[unsafe(no_mangle)]
pub extern "C" fn stub_stream_device(stream: u64) -> c_int {
    let stream = stream_key(stream);
    with(|state| state.stream(stream).map_or(-1, |stream| stream.device))
}

/// Returns the number of devices, and writes the memory of each in bytes.
///
/// # Safety
/// `memory_bytes` must be valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_devices(memory_bytes: *mut u64) -> c_int {
    let (devices, bytes) = with(|state| (state.options.devices, state.options.memory_bytes));
    // SAFETY: guaranteed by the caller.
    unsafe { memory_bytes.write(bytes) };
    devices
}

/// Describes the memory at an address. Returns 0 if there is none.
///
/// # Safety
/// `region` must be valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_region(address: u64, region: *mut Region) -> c_int {
    let Some(found) = with(|state| state.region(address)) else { return 0 };
    // SAFETY: guaranteed by the caller.
    unsafe { region.write(found) };
    1
}

/// Writes the parts of the memory file behind an address range, as (offset, length). Returns their number; -1 if any byte is not accessible
/// memory.
///
/// # Safety
/// `extents` must be valid for writing `capacity` pairs; no more are written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_extents(address: u64, size: u64, extents: *mut [u64; 2], capacity: usize) -> isize {
    let Some(found) = with(|state| state.memory.extents(address, size)) else { return -1 };
    for (index, (offset, length)) in found.iter().take(capacity).enumerate() {
        // SAFETY: guaranteed by the caller.
        unsafe { extents.add(index).write([*offset, *length]) };
    }
    found.len() as isize
}

/// Returns the memory file of this process, and writes the address at which all of it is mapped.
///
/// # Safety
/// `base` must be valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_memory_file(base: *mut u64) -> c_int {
    let (file, at) = with(|state| (state.memory.file, state.memory.base));
    // SAFETY: guaranteed by the caller.
    unsafe { base.write(at) };
    file
}

/// Retains physical memory until [`stub_drop`]. Returns its offset in the memory file; -1 if the handle does not exist.
#[unsafe(no_mangle)]
pub extern "C" fn stub_retain(handle: u64) -> i64 {
    with(|state| state.retain(handle).map_or(-1, |()| state.memory.physical[&handle].offset as i64))
}

/// Releases memory that [`stub_retain`] retained.
#[unsafe(no_mangle)]
pub extern "C" fn stub_drop(handle: u64) {
    with(|state| state.release(handle)).expect("retained");
}

/// Registers a guard, whose hook is called when memory in this range is unmapped or freed. Returns its handle.
#[unsafe(no_mangle)]
pub extern "C" fn stub_guard(base: u64, size: u64) -> u64 {
    with(|state| {
        let guard = state.handle();
        state.guards.insert(guard, (base, size));
        guard
    })
}

/// Removes a guard.
#[unsafe(no_mangle)]
pub extern "C" fn stub_unguard(guard: u64) {
    with(|state| state.guards.remove(&guard));
}

/// Returns 1 if captures forbid this thread calls that are not stream work. The captures are then invalidated.
#[unsafe(no_mangle)]
pub extern "C" fn stub_capture_forbids() -> c_int {
    c_int::from(with(State::spoil_captures))
}

/// Bit that marks the key of a per-thread default stream.
pub(crate) const PER_THREAD: u64 = 1 << 62;

/// Returns the key of a stream. Handles 0 and 1 denote the default stream of the current device, and handle 2 the default stream of the
/// thread.
pub(crate) fn stream_key(stream: u64) -> u64 {
    let device = stub_device().max(0) as u64;
    match stream {
        0 | 1 => device,
        2 => THREAD.with_borrow(|thread| PER_THREAD | thread.number << 16 | device),
        stream => stream,
    }
}
