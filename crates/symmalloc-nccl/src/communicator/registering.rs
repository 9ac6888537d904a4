//! The registration interface of communicators: windows and buffers.

use crate::communicator::Communicator;
use crate::communicator::call::{Route, perform};
use crate::communicator::deregister::{deregister_buffer, deregister_window};
use crate::communicator::error::CommError;
use crate::communicator::error::Stage;
use crate::communicator::host_entry::HostEntry;
use crate::communicator::registration::{BufferRegistration, Memory, Registered, WINDOW_ALIGNMENT, Window};
use crate::communicator::shared::{Access, lock};
use crate::communicator::threads::Kept;
use crate::ffi::handles::NewHandle;
use crate::ffi::version::Capability;
use std::slice::from_mut;
use std::sync::Arc;

impl Communicator {
    /// Registers a window over a whole segment, together with all other ranks, which must pass segments of the same size in the same
    /// order.
    ///
    /// The memory must belong to the communicator's device and be a single `cuMemCreate` allocation with a shareable handle. If the ranks
    /// cannot access each other's memory, NCCL rejects the window (2.29 and later), and this function makes a plain registration instead.
    /// Earlier versions return a plain registration that looks like a window.
    ///
    /// # Errors
    /// Returns an error without any effect if the communicator has ended, the library does not support windows, the base is not a multiple
    /// of [`WINDOW_ALIGNMENT`], or a capture is in progress (before 2.30.7). If ranks do not arrive within the deadline or NCCL fails, the
    /// communicator is ended, because a failed registration leaves unfinished tasks in it.
    pub fn register_window(&self, base: u64, size_bytes: u64) -> Result<Registered, CommError> {
        self.require(Capability::Windows)?;
        if size_bytes == 0 {
            return Err(CommError::Empty);
        }
        if !base.is_multiple_of(WINDOW_ALIGNMENT) {
            return Err(CommError::Unaligned { base });
        }
        if self.shared.device.is_capturing() && !self.shared.nccl.supports(Capability::RegistrationInCapture) {
            return Err(CommError::Capturing);
        }
        let mut access = self.shared.access()?;
        let (comm, new) = (access.comm, NewHandle::unnamed());
        let (kept, out): (Kept, _) = (Some(Arc::clone(&new) as _), Arc::clone(&new));
        let route = Route::when_blocking(self.shared.mode, Route::Apart);
        let _entry = HostEntry::begin(self.watched(), Stage::Register, Some(size_bytes));
        perform(from_mut(&mut access), Stage::Register, route, &kept, move |calls| {
            calls.register_window(comm, base, size_bytes, &out)
        })?;
        let Some(raw) = new.window() else {
            return Ok(Registered::Plain(self.register_buffer_with(&mut access, base, size_bytes)?));
        };
        lock(&access.inner.windows).push(raw);
        Ok(Registered::Window(Window { raw, memory: self.memory(base, size_bytes) }))
    }

    /// Deregisters a window. The call is local, but all ranks must make it at the same point, because no rank may use the window
    /// afterwards. Waits for kernels that run on the device.
    ///
    /// # Errors
    /// Returns an error if the communicator has ended, and the window with it; if the window belongs to another communicator; or if NCCL
    /// fails. The window is then released with the communicator.
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
        let mut access = self.shared.access()?;
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
        let (kept, out): (Kept, _) = (Some(Arc::clone(&new) as _), Arc::clone(&new));
        perform(from_mut(access), Stage::RegisterBuffer, Route::Here, &kept, move |calls| {
            calls.register_buffer(comm, base, size_bytes, &out)
        })?;
        let raw = new.registration();
        if !raw.is_null() {
            // With NCCL_LOCAL_REGISTER=0 the handle is null: nothing was registered, so there is nothing to deregister.
            lock(&access.inner.buffers).push(raw);
        }
        Ok(BufferRegistration { raw, memory: self.memory(base, size_bytes) })
    }

    /// Deregisters a buffer. If peers have mapped the memory, waits for kernels that run on the device.
    ///
    /// # Errors
    /// Returns an error if the communicator has ended, and the registration with it; if the registration belongs to another communicator;
    /// or if NCCL fails. The registration is then released with the communicator.
    pub fn deregister_buffer(&self, registration: BufferRegistration) -> Result<(), CommError> {
        let BufferRegistration { raw, memory } = registration;
        self.check_owner(&memory)?;
        let mut access = self.shared.access()?;
        if raw.is_null() {
            return Ok(());
        }
        deregister_buffer(&mut access, raw)
    }

    fn memory(&self, base: u64, size_bytes: u64) -> Memory {
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
