//! Work of another library on the stub's streams, and what that library asks about memory.
//!
//! ```text
//!  libnccl: stub_external_submit(stream, template) ─► queue ... │ instance │ ...
//!  libnccl: submitted(template, instance)  ◄──────────────────────╯   │
//!  libnccl: arrived(instance)              ◄── it is at the front ─────╯
//!  libnccl: moves data once all ranks arrived, then stub_external_complete(instance) ─► the stream goes on
//! ```
//!
//! A captured submission is an op of the graph: each launch makes an instance. Hooks are called without the stub's lock, one
//! at a time, in order.

use crate::abi::{Hooks, Region};
use crate::model::{Code, State, THREAD, notify, with};
use crate::streams::Op;
use std::cell::Cell;
use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};

/// What a hook is to be called for.
#[derive(Clone, Copy, Debug)]
pub enum Notice {
    /// See [`Hooks::submitted`].
    Submitted {
        /// The library's name for the work.
        template: u64,
        /// This submission of it.
        instance: u64,
    },
    /// See [`Hooks::arrived`].
    Arrived {
        /// The submission.
        instance: u64,
    },
    /// See [`Hooks::unmapped`].
    Unmapped {
        /// The guard.
        guard: u64,
    },
}

thread_local! {
    /// This thread is in a hook, and goes on with what hooks cause once it returns.
    static IS_DELIVERING: Cell<bool> = const { Cell::new(false) };
}

/// Calls the hooks for what happened, and for what that causes.
pub(crate) fn deliver() {
    static TURN: Mutex<()> = Mutex::new(());
    // Another thread may be delivering what this one caused: then it is waited for.
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
    /// Tells the library whose guards lie in memory that goes.
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

/// Says which hooks to call from now on.
///
/// # Safety
/// The hooks stay callable for the life of the process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_hooks(hooks: Hooks) {
    with(|state| state.hooks = Some(hooks));
}

/// Puts work of the library on a stream. 0: queued; 1: captured; else minus an error code.
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

/// Says that work of the library took effect.
#[unsafe(no_mangle)]
pub extern "C" fn stub_external_complete(instance: u64) {
    with(|state| state.external_is_done(instance));
    notify();
    deliver();
}

/// The device of the current context; -1: there is none.
#[unsafe(no_mangle)]
pub extern "C" fn stub_device() -> c_int {
    THREAD.with_borrow(crate::model::Thread::device).unwrap_or(-1)
}

/// The device of a stream; -1: there is no such stream.
#[unsafe(no_mangle)]
pub extern "C" fn stub_stream_device(stream: u64) -> c_int {
    let stream = stream_key(stream);
    with(|state| state.stream(stream).map_or(-1, |stream| stream.device))
}

/// How many devices there are, and the memory of each in bytes.
///
/// # Safety
/// `memory_bytes` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_devices(memory_bytes: *mut u64) -> c_int {
    let (devices, bytes) = with(|state| (state.options.devices, state.options.memory_bytes));
    // SAFETY: the caller's contract.
    unsafe { memory_bytes.write(bytes) };
    devices
}

/// What lies at an address. 0: nothing.
///
/// # Safety
/// `region` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_region(address: u64, region: *mut Region) -> c_int {
    let Some(found) = with(|state| state.region(address)) else { return 0 };
    // SAFETY: the caller's contract.
    unsafe { region.write(found) };
    1
}

/// The parts of the memory file behind some addresses, as (offset, length). How many; -1: not all is accessible memory.
///
/// # Safety
/// `extents` is valid for writing `capacity` pairs; no more are written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_extents(address: u64, size: u64, extents: *mut [u64; 2], capacity: usize) -> isize {
    let Some(found) = with(|state| state.memory.extents(address, size)) else { return -1 };
    for (index, (offset, length)) in found.iter().take(capacity).enumerate() {
        // SAFETY: the caller's contract.
        unsafe { extents.add(index).write([*offset, *length]) };
    }
    found.len() as isize
}

/// The memory file of this process, and where all of it is mapped.
///
/// # Safety
/// `base` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_memory_file(base: *mut u64) -> c_int {
    let (file, at) = with(|state| (state.memory.file, state.memory.base));
    // SAFETY: the caller's contract.
    unsafe { base.write(at) };
    file
}

/// Keeps physical memory until [`stub_drop`]. Its place in the memory file; -1: there is no such handle.
#[unsafe(no_mangle)]
pub extern "C" fn stub_retain(handle: u64) -> i64 {
    with(|state| state.retain(handle).map_or(-1, |()| state.memory.physical[&handle].offset as i64))
}

/// Gives up what [`stub_retain`] kept.
#[unsafe(no_mangle)]
pub extern "C" fn stub_drop(handle: u64) {
    with(|state| state.release(handle)).expect("retained");
}

/// Wants to know when memory in a part is unmapped or freed.
#[unsafe(no_mangle)]
pub extern "C" fn stub_guard(base: u64, size: u64) -> u64 {
    with(|state| {
        let guard = state.handle();
        state.guards.insert(guard, (base, size));
        guard
    })
}

/// Wants to know no longer.
#[unsafe(no_mangle)]
pub extern "C" fn stub_unguard(guard: u64) {
    with(|state| state.guards.remove(&guard));
}

/// Whether captures forbid this thread calls that are no work of a stream, which spoil them. 1: yes.
#[unsafe(no_mangle)]
pub extern "C" fn stub_capture_forbids() -> c_int {
    c_int::from(with(State::spoil_captures))
}

/// Marks the keys of default streams that are one thread's own.
pub(crate) const PER_THREAD: u64 = 1 << 62;

/// The key of a stream: each device has a default stream of its own under the handles 0 and 1, and each thread under 2.
pub(crate) fn stream_key(stream: u64) -> u64 {
    let device = stub_device().max(0) as u64;
    match stream {
        0 | 1 => device,
        2 => THREAD.with_borrow(|thread| PER_THREAD | thread.number << 16 | device),
        stream => stream,
    }
}
