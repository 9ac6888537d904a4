//! Registration and deregistration of windows and buffers. Their handles have different types, so that each handle is deregistered by the
//! matching call.

use crate::communicator::Communicator;
use crate::communicator::call::{CallThread, HostEntry, perform};
use crate::communicator::error::{CommError, CommState, Stage};
use crate::communicator::shared::{Access, Handles, lock};
use crate::communicator::threads::KeepAlive;
use crate::ffi::calls::{Calls, Outcome, WINDOW_ALIGNMENT};
use crate::ffi::handles::{CommHandle, NewHandle, RegistrationHandle, WindowHandle};
use crate::ffi::version::Capability;
use crate::ffi::window_flags::WindowFlags;
use std::fmt;
use std::slice::from_mut;
use std::sync::Arc;

/// The result of a window registration.
#[derive(Debug)]
#[must_use = "deregister it before the memory is released"]
pub enum Registered {
    /// A window, through which kernels access the peers' memory.
    Window(Window),
    /// A plain registration, which is local to this rank, because the ranks cannot access each other's memory (no NVLink, no peer access).
    Plain(BufferRegistration),
}

/// A window over a whole segment, registered on all ranks of one communicator.
///
/// Deregister it with [`Communicator::deregister_window`](crate::Communicator::deregister_window) before the memory is unmapped. If the
/// communicator ends first, no call is needed.
#[must_use = "deregister it before the memory is released"]
pub struct Window {
    pub(crate) raw: WindowHandle,
    pub(crate) memory: Memory,
}

/// A registration of memory that is local to this rank.
///
/// Deregister it with [`Communicator::deregister_buffer`](crate::Communicator::deregister_buffer) before the memory is unmapped. If the
/// communicator ends first, no call is needed.
#[must_use = "deregister it before the memory is released"]
pub struct BufferRegistration {
    pub(crate) raw: RegistrationHandle,
    pub(crate) memory: Memory,
}

/// The memory of a registration, and its communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    pub(crate) base: u64,
    pub(crate) size_bytes: u64,
    /// [`Communicator::serial`](crate::Communicator) of the owner.
    pub(crate) owner: u64,
    pub(crate) owner_name: Arc<str>,
}

impl Registered {
    pub(crate) fn base(&self) -> u64 {
        match self {
            Registered::Window(window) => window.base(),
            Registered::Plain(registration) => registration.base(),
        }
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        match self {
            Registered::Window(window) => window.size_bytes(),
            Registered::Plain(registration) => registration.size_bytes(),
        }
    }

    pub(crate) fn has_handle(&self) -> bool {
        match self {
            Registered::Window(_) => true,
            Registered::Plain(registration) => registration.has_handle(),
        }
    }
}

impl Window {
    /// Returns NCCL's handle, which is valid until the window is deregistered or its communicator ends.
    pub fn handle(&self) -> WindowHandle {
        self.raw
    }

    /// Returns the address of the window's first byte on this rank.
    pub fn base(&self) -> u64 {
        self.memory.base
    }

    /// Returns the size of the registered memory in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.memory.size_bytes
    }
}

impl BufferRegistration {
    /// Returns the address of the memory's first byte.
    pub fn base(&self) -> u64 {
        self.memory.base
    }

    /// Returns the size of the registered memory in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.memory.size_bytes
    }

    /// Returns `true` if NCCL registered the memory, and `false` if `NCCL_LOCAL_REGISTER=0` disables such registrations.
    pub(crate) fn has_handle(&self) -> bool {
        !self.raw.is_null()
    }
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Window").field("handle", &self.raw).field("memory", &self.memory).finish()
    }
}

impl fmt::Debug for BufferRegistration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferRegistration").field("memory", &self.memory).finish_non_exhaustive()
    }
}

impl Communicator {
    /// Registers a window over a whole segment. All ranks must make this call together, with segments of the same size in the same order.
    ///
    /// The memory must belong to the communicator's device and be a single `cuMemCreate` allocation with a shareable handle. If the ranks
    /// cannot access each other's memory, NCCL rejects the window (2.29 and later), and this function makes a plain registration instead.
    /// Earlier versions of NCCL return a plain registration that looks like a window.
    ///
    /// # Memory of a registrar's pool
    /// A [`Registrar`](crate::Registrar) registers the segments of its pools by itself, and does not know this window. In such a pool:
    ///
    /// - [`window_of`](crate::Registrar::window_of) does not return this window, and the next sync registers another one over the segment.
    /// - The registrar does not count this window when it computes offsets in the symmetric address space. If a window of a sync does not
    ///   fit next to it, NCCL fails in the sync, which ends the communicator.
    /// - Before a segment is removed and before the pool sleeps, the registrar deregisters only its own windows. NCCL then keeps the memory
    ///   of this window: the device does not get it back, and after a wake, collectives through this window use the old memory. Deregister
    ///   this window first, on all ranks.
    /// - The communicator cannot be [suspended](Self::suspend) while this window is registered.
    ///
    /// Use this function for memory of other allocators, on a separate communicator. When the communicator ends, its windows end with it.
    ///
    /// # Errors
    /// Returns an error without any effect if the communicator has ended, the library does not support windows, the base is not a multiple
    /// of [`WINDOW_ALIGNMENT`], or a capture is in progress (before 2.30.7). If ranks do not arrive within the deadline or NCCL fails, the
    /// communicator is ended, because a failed registration leaves unfinished tasks in it.
    pub fn register_window(&self, base: u64, size_bytes: u64) -> Result<Registered, CommError> {
        self.register_window_with(base, size_bytes, WindowFlags::NONE)
    }

    /// Like [`register_window`](Self::register_window), with flags.
    ///
    /// # Errors
    /// Same as [`register_window`](Self::register_window). Also returns [`CommError::Unsupported`], without any effect, if the library does
    /// not have one of the flags.
    pub fn register_window_with(
        &self,
        base: u64,
        size_bytes: u64,
        flags: WindowFlags,
    ) -> Result<Registered, CommError> {
        self.require(Capability::Windows)?;
        flags.required().try_for_each(|capability| self.require(capability))?;
        if size_bytes == 0 {
            return Err(CommError::Empty);
        }
        if !base.is_multiple_of(WINDOW_ALIGNMENT) {
            return Err(CommError::Unaligned { base });
        }
        if self.shared.device.is_capturing() && !self.shared.nccl.supports(Capability::RegistrationInCapture) {
            return Err(CommError::Capturing);
        }
        let mut access = self.shared.access_active()?;
        let (comm, new) = (access.comm, NewHandle::unnamed());
        let (kept, out): (KeepAlive, _) = (Some(Arc::clone(&new) as _), Arc::clone(&new));
        let route = CallThread::when_blocking(self.shared.mode, CallThread::Separate);
        let _entry = HostEntry::begin(self.watched(), Stage::Register, Some(size_bytes));
        perform(from_mut(&mut access), Stage::Register, route, &kept, move |calls| {
            calls.register_window(comm, (base, size_bytes), flags, &out)
        })?;
        let Some(raw) = new.window() else {
            return Ok(Registered::Plain(self.register_buffer_with(&mut access, base, size_bytes)?));
        };
        lock(&access.inner.windows).push(raw);
        lock(&access.shared.usage).registrations += 1;
        Ok(Registered::Window(Window { raw, memory: self.owned(base, size_bytes) }))
    }

    /// Deregisters a window. The call is local, but all ranks must make it at the same point, because no rank may use the window
    /// afterwards. Waits for kernels that run on the device.
    ///
    /// # Errors
    /// Returns an error if the communicator has ended (and the window with it), if the window belongs to another communicator, or if NCCL
    /// fails. After an error, the window is released together with its communicator.
    pub fn deregister_window(&self, window: Window) -> Result<(), CommError> {
        let Window { raw, memory } = window;
        self.check_owner(&memory)?;
        deregister_window(&mut self.shared.access()?, raw)
    }

    /// Registers memory of any kind and size on this rank only. Takes microseconds.
    ///
    /// # Errors
    /// Returns an error if the communicator has ended, the library is too old, or NCCL fails.
    pub fn register_buffer(&self, base: u64, size_bytes: u64) -> Result<BufferRegistration, CommError> {
        self.require(Capability::BufferRegistration)?;
        if size_bytes == 0 {
            return Err(CommError::Empty);
        }
        let mut access = self.shared.access_active()?;
        self.register_buffer_with(&mut access, base, size_bytes)
    }

    fn register_buffer_with(
        &self,
        access: &mut Access<'_>,
        base: u64,
        size_bytes: u64,
    ) -> Result<BufferRegistration, CommError> {
        self.require(Capability::BufferRegistration)?;
        let (comm, new) = (access.comm, NewHandle::unnamed());
        let (kept, out): (KeepAlive, _) = (Some(Arc::clone(&new) as _), Arc::clone(&new));
        perform(from_mut(access), Stage::RegisterBuffer, CallThread::Current, &kept, move |calls| {
            calls.register_buffer(comm, base, size_bytes, &out)
        })?;
        let raw = new.registration();
        if !raw.is_null() {
            // With NCCL_LOCAL_REGISTER=0 the handle is null: nothing was registered, so there is nothing to deregister.
            lock(&access.inner.buffers).push(raw);
            lock(&access.shared.usage).registrations += 1;
        }
        Ok(BufferRegistration { raw, memory: self.owned(base, size_bytes) })
    }

    /// Deregisters a buffer. If peers have mapped the memory, waits for kernels that run on the device.
    ///
    /// # Errors
    /// Returns an error if the communicator has ended (and the registration with it), if the registration belongs to another communicator,
    /// or if NCCL fails. After an error, the registration is released together with its communicator.
    pub fn deregister_buffer(&self, registration: BufferRegistration) -> Result<(), CommError> {
        let BufferRegistration { raw, memory } = registration;
        self.check_owner(&memory)?;
        let mut access = self.shared.access()?;
        if raw.is_null() {
            return Ok(());
        }
        deregister_buffer(&mut access, raw)
    }

    fn owned(&self, base: u64, size_bytes: u64) -> Memory {
        Memory { base, size_bytes, owner: self.serial(), owner_name: Arc::clone(&self.shared.name) }
    }

    fn check_owner(&self, memory: &Memory) -> Result<(), CommError> {
        if memory.owner == self.serial() {
            return Ok(());
        }
        let (name, owner) = (Arc::clone(&self.shared.name), Arc::clone(&memory.owner_name));
        Err(CommError::ForeignRegistration { name, owner })
    }
}

/// Deregisters all remaining windows and buffers, in order. Continues after an error as long as the communicator is ready, and returns the
/// first error.
pub(super) fn deregister_all(access: &mut Access<'_>) -> Result<(), CommError> {
    let mut outcome = Ok(());
    let (windows, buffers) = (lock(&access.inner.windows).clone(), lock(&access.inner.buffers).clone());
    for window in windows {
        outcome = outcome.and(deregister_window(access, window));
    }
    for buffer in buffers {
        outcome = outcome.and(deregister_buffer(access, buffer));
    }
    outcome
}

fn deregister_window(access: &mut Access<'_>, window: WindowHandle) -> Result<(), CommError> {
    deregister(Arc::clone(&access.inner.windows), access, window, Calls::deregister_window)
}

fn deregister_buffer(access: &mut Access<'_>, buffer: RegistrationHandle) -> Result<(), CommError> {
    deregister(Arc::clone(&access.inner.buffers), access, buffer, Calls::deregister_buffer)
}

fn deregister<Handle: Copy + PartialEq + Send + 'static>(
    known: Handles<Handle>,
    access: &mut Access<'_>,
    handle: Handle,
    call: fn(&Calls, CommHandle, Handle) -> Outcome,
) -> Result<(), CommError> {
    if access.shared.state() != CommState::Ready {
        return Err(access.shared.gone());
    }
    let (comm, usage) = (access.comm, Arc::clone(&access.shared.usage));
    perform(from_mut(access), Stage::Deregister, CallThread::Separate, &None, move |calls| {
        // The communicator may end in the meantime, so remove the handle only after NCCL has accepted the call.
        call(calls, comm, handle).inspect(|_| {
            let mut known = lock(&known);
            let before = known.len();
            known.retain(|known| *known != handle);
            let mut usage = lock(&usage);
            usage.registrations -= before - known.len();
        })
    })
}
