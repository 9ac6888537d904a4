//! Serves allocations and frees.
//!
//! ```text
//!  cuMemAlloc ──────── host's stream, p0 ─┐                    ┌─ LIVE: address ─► context, handle, stream
//!  cuMemAllocAsync ─── stream ─► number ──┴─► symmalloc-cuda ──┘
//!  cuMemFree ──────── LIVE ─► waits for the context's work ─► free
//!  cuMemFreeAsync ─── LIVE ─► records a use by the freeing stream if it differs ─► free
//! ```
//!
//! Requests for other memory are passed to the driver: [`Outcome::Driver`]. A free removes the allocation from [`LIVE`] first. If two
//! threads free it, one of them gets the driver's error for an unknown address. If the free fails, the allocation is restored.

use crate::captures;
use crate::context::Context;
use crate::contexts;
use crate::ledger::Found;
use crate::libcuda;
use crate::live::{LIVE, Live};
use crate::outcome::{self, code_of_allocate, code_of_free};
use crate::pools::MemPool;
use crate::streams::{self, NotServed};
use crate::tally;
use std::ffi::c_int;
use symmalloc_core::errors::{AllocateError, RecordUseError, UnknownError};
use symmalloc_core::{Allocation, PoolId, StreamId};
use symmalloc_import::OnOutOfMemory;

/// The outcome of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome<T> {
    Done(T),
    /// The call failed with this driver code.
    Failed(c_int),
    /// The driver must serve the call.
    Driver,
}

impl<T> From<NotServed> for Outcome<T> {
    fn from(reason: NotServed) -> Self {
        match reason {
            NotServed::Driver => Outcome::Driver,
            NotServed::Refused(code) => Outcome::Failed(code),
        }
    }
}

/// Serves `cuMemAlloc`.
#[inline]
pub(crate) fn allocate(size_bytes: u64) -> Outcome<u64> {
    let Some(context) = contexts::current() else { return Outcome::Driver };
    answer(take(context, Context::SYNCHRONOUS, context.host, None, size_bytes))
}

/// Serves `cuMemAllocAsync`, or an allocation from a pool.
///
/// Another thread can destroy the device's current pool between the selection of the pool and the allocation. The pool is then selected
/// again, as the driver does. Each repetition follows the end of a different pool, because ids are not reused.
#[inline]
pub(crate) fn allocate_async(size_bytes: u64, stream: usize, pool: Option<usize>) -> Outcome<u64> {
    if captures::has(stream) {
        // The graph allocates the memory when it runs.
        return Outcome::Driver;
    }
    let stream = match streams::find(stream) {
        Ok(stream) => stream,
        Err(reason) => return reason.into(),
    };
    let mut destroyed = None;
    loop {
        let known = match pool {
            None => stream.context.current_pool(),
            Some(raw) => MemPool::find(raw),
        };
        let Some(known) = known else { return Outcome::Driver };
        let Some(id) = known.id_in(stream.context.id(), stream.context.device(), stream.context.allocator()) else {
            return Outcome::Driver;
        };
        // The driver resolves a pool that stays selected after its end.
        if destroyed == Some(id) {
            return Outcome::Driver;
        }
        match take(stream.context, id, stream.id, Some(known), size_bytes) {
            Err(AllocateError::Unknown(UnknownError::DestroyedPool { .. })) => {
                destroyed = Some(id);
                if let Some(driver) = libcuda::driver() {
                    stream.context.find_current_pool(driver);
                }
            }
            outcome => return answer(outcome),
        }
    }
}

#[inline]
fn take(
    context: &'static Context,
    pool: PoolId,
    stream: StreamId,
    of: Option<&'static MemPool>,
    size_bytes: u64,
) -> Result<u64, AllocateError> {
    let core = context.allocator().core();
    let allocated = core.allocate(pool, stream, size_bytes);
    if let Err(AllocateError::OutOfMemory(error)) = &allocated
        && let Some(action) = OnOutOfMemory::of_process()
    {
        action.report(core, error, usize::try_from(context.device()).unwrap_or(0));
    }
    let Allocation { address, handle, .. } = allocated?;
    LIVE.insert(address.0, size_bytes, Live { context, handle, stream, pool: of });
    tally::allocated(size_bytes);
    Ok(address.0)
}

#[inline]
fn answer(allocated: Result<u64, AllocateError>) -> Outcome<u64> {
    match allocated {
        Ok(address) => Outcome::Done(address),
        Err(error) => Outcome::Failed(code_of_allocate(&error)),
    }
}

/// Serves `cuMemFree`. Like the driver's call, it returns after all work submitted to the context is done.
pub(crate) fn free(address: u64) -> Outcome<()> {
    let Some(found) = LIVE.take(address) else { return Outcome::Driver };
    if let Err(error) = found.known.context.allocator().device().synchronize() {
        return put_back(found, error.code);
    }
    give_back(found)
}

/// Serves `cuMemFreeAsync`.
#[inline]
pub(crate) fn free_async(address: u64, stream: usize) -> Outcome<()> {
    let Some(found) = LIVE.take(address) else { return Outcome::Driver };
    if captures::has(stream) {
        // A graph can only free memory that a graph allocated. The driver returns its own error.
        LIVE.insert(found.address, found.size_bytes, found.known);
        return Outcome::Driver;
    }
    let stream = match streams::find(stream) {
        Ok(stream) => stream,
        Err(NotServed::Refused(code)) => return put_back(found, code),
        Err(NotServed::Driver) => return free_behind(found, stream),
    };
    let Live { context, handle, stream: owner, .. } = found.known;
    if !std::ptr::eq(stream.context, context) {
        return free_behind(found, stream.raw());
    }
    if stream.id != owner {
        match context.allocator().core().record_use(handle, stream.id) {
            Ok(()) => {}
            Err(RecordUseError::Handle(_)) => return put_back(found, outcome::INVALID_VALUE),
            Err(_) => return put_back(found, outcome::UNKNOWN),
        }
    }
    give_back(found)
}

/// Frees an allocation after the work of a stream of another context. The host waits for that work.
#[cold]
fn free_behind(found: Found<Live>, stream: usize) -> Outcome<()> {
    let Some(driver) = libcuda::driver() else { return put_back(found, outcome::UNKNOWN) };
    // SAFETY: the program passed the stream, and the driver checks it.
    match unsafe { driver.stream_synchronize(stream) } {
        Ok(()) => give_back(found),
        Err(code) => put_back(found, code),
    }
}

#[inline]
fn give_back(found: Found<Live>) -> Outcome<()> {
    match found.known.context.allocator().core().free(found.known.handle) {
        Ok(()) => {
            tally::freed(found.size_bytes);
            Outcome::Done(())
        }
        Err(error) => put_back(found, code_of_free(&error)),
    }
}

/// Restores the allocation after a failed free.
#[cold]
fn put_back<T>(found: Found<Live>, code: c_int) -> Outcome<T> {
    LIVE.insert(found.address, found.size_bytes, found.known);
    Outcome::Failed(code)
}
