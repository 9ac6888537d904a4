//! Windows and registered buffers of one rank's communicator.
//!
//! ```text
//!  symmetric address space of the rank:  │ memory of round 0 │ memory of round 2 │      hole      │
//!  window ──────────────────────────────── base ► space offset, and the round in which all ranks registered it
//! ```
//!
//! A registration retains the physical memory behind it, on every rank, until all ranks have deregistered it. Unmapping memory before that
//! is a violation, and kernels continue to see the old memory.

use crate::codes::{CUDA_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, SUCCESS};
use crate::cuda;
use crate::ledger::violate;
use crate::member::{Inner, Member, Step, fresh};
use crate::messages::{Round, ToJob, WindowPlace};
use crate::options::options;
use crate::space::{End, Space};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};

/// NCCL's `NCCL_WIN_REQUIRED_ALIGNMENT`.
const ALIGNMENT: u64 = 4096;
/// `NCCL_WIN_COLL_SYMMETRIC`.
const SYMMETRIC: c_int = 1;
/// `NCCL_WIN_GIN_ONLY` and `NCCL_WIN_CFT_COUNTED`, which restrict what a window can be used for.
const RESTRICTIONS: c_int = 0x04 | 0x08;

/// Returns the flags that this version knows.
fn known_flags() -> c_int {
    match options().version {
        ..22_907 => SYMMETRIC,
        // `NCCL_WIN_STRICT_ORDERING`.
        22_907..23_203 => SYMMETRIC | 0x02,
        23_203.. => SYMMETRIC | 0x02 | RESTRICTIONS,
    }
}

/// A pending registration.
#[derive(Debug)]
pub struct PendingWindow {
    base: u64,
    size: u64,
    flags: c_int,
    /// Address of the caller's output for the handle.
    pub out: usize,
    memory: Memory,
}

/// The memory that NCCL maps for a window.
#[derive(Clone, Debug)]
struct Memory {
    /// First address and size in bytes.
    base: u64,
    size: u64,
    /// Handles of the retained physical memory.
    handles: Vec<u64>,
    space_offset: u64,
    round: u64,
    /// Number of windows over it: 2.28 maps the same physical memory only once.
    windows: u32,
}

#[derive(Debug)]
struct Window {
    base: u64,
    size: u64,
    flags: c_int,
    /// `None` for a plain registration that NCCL returns as a window.
    memory: Option<u64>,
    guard: u64,
}

/// The windows and registered buffers of a communicator.
#[derive(Debug, Default)]
pub struct Windows {
    windows: BTreeMap<u64, Window>,
    /// Mapped memory by space offset.
    memories: BTreeMap<u64, Memory>,
    space: Option<Space>,
    /// Retained physical memory by round, until no rank maps it.
    kept: BTreeMap<u64, Vec<u64>>,
    /// Number of handles of physical memory that will never be released.
    leaked: u64,
    /// Guards of registered buffers, by handle.
    buffers: BTreeMap<u64, u64>,
    /// Handles of former windows.
    freed: BTreeSet<u64>,
    /// Handles of former windows, by round.
    former: BTreeMap<u64, u64>,
}

/// Descriptions of the guarded memory of all communicators, by guard.
static GUARDS: Mutex<BTreeMap<u64, String>> = Mutex::new(BTreeMap::new());

fn guard(base: u64, size: u64, what: String) -> u64 {
    let guard = cuda::guard(base, size);
    GUARDS.lock().unwrap_or_else(PoisonError::into_inner).insert(guard, what);
    guard
}

fn unguard(guard: u64) {
    cuda::unguard(guard);
    GUARDS.lock().unwrap_or_else(PoisonError::into_inner).remove(&guard);
}

/// Called by the stub of libcuda when memory under a guard is unmapped or freed.
pub extern "C" fn unmapped(guard: u64) {
    let what = GUARDS.lock().unwrap_or_else(PoisonError::into_inner).get(&guard).cloned();
    if let Some(what) = what {
        violate(format!("memory was unmapped or freed under {what}"));
    }
}

impl Windows {
    /// Returns the numbers of windows, registered buffers, rounds whose memory is retained, and leaked pieces of physical memory.
    pub fn counts(&self) -> [u64; 4] {
        [self.windows.len() as u64, self.buffers.len() as u64, self.kept.len() as u64, self.leaked]
    }

    /// Returns the rounds whose memory is retained.
    pub fn kept_rounds(&self) -> Vec<u64> {
        self.kept.keys().copied().collect()
    }

    /// Returns the symmetric address space in use, in bytes.
    pub fn space_used(&self) -> u64 {
        self.memories.values().map(|memory| memory.size).sum()
    }

    /// Returns `true` if the rank still maps the memory of a round.
    pub fn has_round(&self, round: u64) -> bool {
        self.memories.values().any(|memory| memory.round == round)
    }

    /// Returns the position of an address in a window, for symmetric kernels.
    pub fn place(&self, address: u64) -> Option<WindowPlace> {
        let inside = |window: &&Window| window.base <= address && address - window.base < window.size;
        let window = self.windows.values().filter(inside).max_by_key(|window| window.base)?;
        let memory = &self.memories[&window.memory.filter(|_| window.flags & SYMMETRIC != 0)?];
        let offset = address - memory.base;
        Some(WindowPlace { round: memory.round, space_offset: memory.space_offset, offset })
    }

    /// Returns the position that a captured kernel uses now. It has the handle of its window, which may be that of a later registration.
    /// Returns `None` if there is no window with this handle.
    pub fn current(&self, place: WindowPlace) -> Option<WindowPlace> {
        if self.has_round(place.round) {
            return Some(place);
        }
        let memory = &self.memories[&self.windows.get(self.former.get(&place.round)?)?.memory?];
        Some(WindowPlace { round: memory.round, space_offset: memory.space_offset, ..place })
    }

    fn next_handle(&mut self) -> u64 {
        let again = if options().reuses_windows { self.freed.pop_first() } else { None };
        again.unwrap_or_else(fresh)
    }

    /// Completes a registration: all ranks have registered, or it failed with `code`.
    pub fn install(&mut self, pending: PendingWindow, round: u64, code: c_int) {
        let PendingWindow { base, size, flags, out, mut memory } = pending;
        let mut handle = 0;
        if code == SUCCESS {
            handle = self.next_handle();
            let guard = guard(base, size, format!("window {base:#x}+{size:#x}"));
            let key = memory.space_offset;
            self.windows.insert(handle, Window { base, size, flags, memory: Some(key), guard });
            if let Some(known) = self.memories.get_mut(&key) {
                known.windows += 1;
            } else {
                memory.round = round;
                self.kept.insert(round, memory.handles.clone());
                self.memories.insert(key, memory);
            }
        } else {
            self.give_up(&memory);
        }
        // SAFETY: the caller of `ncclCommWindowRegister` keeps the output valid until the call completes.
        unsafe { (out as *mut u64).write(handle) };
    }

    /// Cancels a registration, because the communicator ended first.
    pub fn cancel(&mut self, pending: &PendingWindow) {
        self.give_up(&pending.memory);
    }

    fn give_up(&mut self, memory: &Memory) {
        if !self.memories.contains_key(&memory.space_offset) {
            memory.handles.iter().for_each(|handle| cuda::release_retained(*handle));
            self.space.as_mut().expect("the memory came from this space").give(memory.space_offset, memory.size);
        }
    }

    /// Releases the memory of a round, because no rank maps it any longer.
    pub fn free(&mut self, round: u64) {
        for handle in self.kept.remove(&round).unwrap_or_default() {
            cuda::release_retained(handle);
        }
    }

    /// Drops all windows of an ended communicator. Before 2.29, NCCL fails to release their physical memory.
    pub fn forget(&mut self) {
        if options().version < 22_900 {
            for memory in self.memories.values() {
                self.leaked += self.kept.remove(&memory.round).map_or(0, |handles| handles.len() as u64);
            }
        }
        let guards = self.windows.values().map(|window| window.guard).chain(self.buffers.values().copied());
        guards.for_each(unguard);
        self.windows.clear();
        self.memories.clear();
        self.buffers.clear();
    }
}

/// Returns the memory that NCCL maps for a window: the mapping at its start, and since 2.30.3 all mappings.
fn take_memory(inner: &mut Inner, base: u64, size: u64) -> Result<Memory, c_int> {
    let first = cuda::region(base).filter(|region| region.handle != 0);
    let Some(first) = first else {
        violate(format!("a window over {base:#x}, which is not virtual memory management memory"));
        return Err(CUDA_ERROR);
    };
    if !(base - first.base).is_multiple_of(ALIGNMENT) {
        violate(format!(
            "a window at {base:#x}, which is not at a multiple of {ALIGNMENT} bytes from its mapping's start"
        ));
        return Err(INVALID_ARGUMENT);
    }
    let last = cuda::region(base + size - 1);
    if base != first.base || last.is_none_or(|last| last.base + last.size != base + size) {
        violate(format!("window {base:#x}+{size:#x} does not cover whole mappings"));
    }
    let takes_all = options().version >= 23_003;
    let mut memory = Memory { base: first.base, size: 0, handles: Vec::new(), space_offset: 0, round: 0, windows: 1 };
    while memory.size == 0 || memory.base + memory.size < base + size {
        if memory.size > 0 && !takes_all {
            violate(format!("window {base:#x}+{size:#x} covers several mappings: NCCL uses only the first"));
            break;
        }
        let Some(region) = cuda::region(memory.base + memory.size).filter(|region| region.handle != 0) else {
            return Err(CUDA_ERROR);
        };
        if region.handle_types & 1 == 0 {
            violate(format!("a window over {base:#x}, whose memory cannot be exported as a file descriptor"));
            return Err(CUDA_ERROR);
        }
        memory.handles.push(region.handle);
        memory.size += region.size;
    }
    if options().version < 23_007
        && let Some(known) = inner.windows.memories.values().find(|known| known.handles == memory.handles)
    {
        return Ok(known.clone());
    }
    let space = inner.windows.space.get_or_insert_with(|| {
        let bytes = options().stride_bytes.unwrap_or_else(|| cuda::devices().1);
        Space::new(bytes.next_multiple_of(4 << 30))
    });
    memory.space_offset = space.take(memory.size.next_multiple_of(2 << 20), End::Lowest).ok_or(INTERNAL_ERROR)?;
    for handle in &memory.handles {
        cuda::retain(*handle).expect("it is mapped");
    }
    Ok(memory)
}

/// Begins a registration, like `ncclCommWindowRegister`. Returns the host step of all ranks, or `None` if there is nothing to wait for.
///
/// # Safety
/// `out` must be valid for writing until the step completes.
pub unsafe fn register(
    member: &Member,
    base: u64,
    size: u64,
    out: *mut u64,
    flags: c_int,
) -> Result<Option<(Step, Round)>, c_int> {
    if options().version < 22_700 {
        return Err(INVALID_ARGUMENT);
    }
    if flags & !known_flags() != 0 {
        violate(format!("rank {}: NCCL {} has no window flags {flags:#x}", member.world, options().version));
        return Err(INVALID_ARGUMENT);
    }
    if flags & SYMMETRIC != 0 && flags & RESTRICTIONS != 0 {
        violate(format!("rank {}: a symmetric window with restrictions {flags:#x}", member.world));
        return Err(INVALID_ARGUMENT);
    }
    if base == 0 || size == 0 {
        return Ok(None);
    }
    if options().version < 23_007 && cuda::capture_forbids() {
        violate(format!("rank {}: a window is registered during a capture", member.world));
        return Err(CUDA_ERROR);
    }
    let mut inner = member.lock();
    if inner.windows.windows.values().any(|window| window.base < base + size && base < window.base + window.size) {
        violate(format!("rank {}: {base:#x}+{size:#x} is registered twice on one communicator", member.world));
    }
    if options().no_symmetric {
        let mut handle = 0;
        if options().version < 22_900 {
            handle = inner.windows.next_handle();
            let guard = guard(base, size, format!("a registration posing as window {base:#x}+{size:#x}"));
            inner.windows.windows.insert(handle, Window { base, size, flags, memory: None, guard });
        }
        // SAFETY: guaranteed by the caller.
        unsafe { out.write(handle) };
        return Ok(None);
    }
    let memory = take_memory(&mut inner, base, size)?;
    let is_shared = inner.windows.memories.contains_key(&memory.space_offset);
    let extents = if is_shared { None } else { cuda::extents(memory.base, memory.size) };
    if !is_shared && extents.is_none() {
        violate(format!("a window over {base:#x}, which the device may not access"));
        inner.windows.give_up(&memory);
        return Err(CUDA_ERROR);
    }
    let round = Round::Window { memory: extents.unwrap_or_default(), size, flags };
    Ok(Some((Step::Window(PendingWindow { base, size, flags, out: out as usize, memory }), round)))
}

/// Deregisters a window, like `ncclCommWindowDeregister`.
pub fn deregister(member: &Member, handle: u64) -> c_int {
    if handle == 0 {
        return SUCCESS;
    }
    let mut inner = member.lock();
    let windows = &mut inner.windows;
    let Some(window) = windows.windows.remove(&handle) else {
        let what = if windows.buffers.contains_key(&handle) { "a registered buffer" } else { "an unknown handle" };
        violate(format!("rank {}: ncclCommWindowDeregister of {what}", member.world));
        return INVALID_ARGUMENT;
    };
    unguard(window.guard);
    windows.freed.insert(handle);
    let Some(key) = window.memory else { return SUCCESS };
    let memory = windows.memories.get_mut(&key).expect("a window uses the memory");
    memory.windows -= 1;
    windows.former.insert(memory.round, handle);
    if memory.windows > 0 {
        return SUCCESS;
    }
    let memory = windows.memories.remove(&key).expect("the element should exist, because it was seen above");
    windows.space.as_mut().expect("the memory came from this space").give(key, memory.size.next_multiple_of(2 << 20));
    drop(inner);
    member.send(ToJob::Drop { round: memory.round });
    SUCCESS
}

/// Registers a buffer, like `ncclCommRegister`.
pub fn register_buffer(member: &Member, base: u64, size: u64) -> Result<u64, c_int> {
    if base == 0 || size == 0 {
        return Err(INVALID_ARGUMENT);
    }
    if cuda::region(base).is_none() {
        violate(format!("rank {}: ncclCommRegister of {base:#x}, which is not allocated", member.world));
        return Err(INVALID_ARGUMENT);
    }
    let handle = fresh();
    let guard = guard(base, size, format!("registered buffer {base:#x}+{size:#x}"));
    member.lock().windows.buffers.insert(handle, guard);
    Ok(handle)
}

/// Deregisters a buffer, like `ncclCommDeregister`.
pub fn deregister_buffer(member: &Member, handle: u64) -> c_int {
    let mut inner = member.lock();
    let Some(guard) = inner.windows.buffers.remove(&handle) else {
        let what = if inner.windows.windows.contains_key(&handle) { "a window" } else { "an unknown handle" };
        violate(format!("rank {}: ncclCommDeregister of {what}", member.world));
        return INVALID_ARGUMENT;
    };
    unguard(guard);
    SUCCESS
}
