//! Dma-bufs of device memory, for libraries that register it with network cards.

use super::arguments::{living, not_forked, not_null, write};
use crate::device::DeviceAllocator;
use crate::error::Error;
use crate::guard::{release, report};
use crate::handles::{hand_out, take_back};
use crate::status::symmalloc_status;
use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd};
use symmalloc_cuda::{DmaBuf, ExportState};

/// A dma-buf, and the memory that it holds.
pub struct HeldDmaBuf {
    dma_buf: DmaBuf,
}

/// Creates a dma-buf of the `size_bytes` bytes of device memory that begin at `pointer`, for `ibv_reg_dmabuf_mr` and similar calls. The
/// range may be an allocation of any pool, a part of an allocation, or any part of one segment. Writes the file descriptor and the offset
/// of `pointer` in the dma-buf. The offset may be greater than 0, because a dma-buf consists of whole host pages.
///
/// Until `symmalloc_dma_buf_close`, the memory does not return to the device, even if its pool is trimmed, sleeps or is destroyed. The
/// memory of a destroyed allocator stays until its last dma-buf is closed. Do not close the descriptor yourself. Deregister the memory
/// before it is freed, because the allocator reuses freed memory immediately.
///
/// Fails with `SYMMALLOC_INVALID_STATE` if the device does not support dma-bufs, or if the driver refuses a range of several physical
/// chunks. In the latter case, use a pool with `segments:reserved` or `segments:fixed`. Fails with `SYMMALLOC_UNKNOWN_POINTER` if an
/// address in the range has no memory.
///
/// # Safety
/// `allocator` is live; `fd`, `offset_bytes` and `out` are valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_dma_buf_open(
    allocator: *mut DeviceAllocator,
    pointer: *const c_void,
    size_bytes: usize,
    fd: *mut i32,
    offset_bytes: *mut u64,
    out: *mut *mut HeldDmaBuf,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let allocator = unsafe { living(allocator) }?;
        not_null(fd, "fd")?;
        not_null(offset_bytes, "offset_bytes")?;
        not_null(out, "out")?;
        let dma_buf = allocator.allocator().dma_buf(pointer as u64, size_bytes as u64)?;
        let (descriptor, offset) = (dma_buf.as_fd().as_raw_fd(), dma_buf.offset_bytes());
        // SAFETY: the caller's contract.
        unsafe {
            write(fd, "fd", descriptor)?;
            write(offset_bytes, "offset_bytes", offset)?;
            write(out, "out", hand_out(HeldDmaBuf { dma_buf }))
        }
    })
}

/// Writes 1 if the pool still uses the memory of a dma-buf, and 0 once the pool has released it, by a trim, a sleep or its destruction. The
/// addresses may then map to different memory: deregister the old memory, close the dma-buf, and create a new one. This call does not
/// detect frees.
///
/// # Safety
/// The dma-buf is live; `is_current` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_dma_buf_is_current(
    dma_buf: *const HeldDmaBuf,
    is_current: *mut u32,
) -> symmalloc_status {
    report(|| {
        not_forked()?;
        // SAFETY: the caller's contract.
        let held = unsafe { dma_buf.as_ref() }.ok_or(Error::Null { argument: "dma_buf" })?;
        let answer = u32::from(held.dma_buf.state() == ExportState::Live);
        // SAFETY: the caller's contract.
        unsafe { write(is_current, "is_current", answer) }
    })
}

/// Closes the descriptor of a dma-buf. Memory that its pool no longer uses returns to the device. NULL has no effect.
///
/// # Safety
/// The dma-buf came from `symmalloc_dma_buf_open` and is not used after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_dma_buf_close(dma_buf: *mut HeldDmaBuf) -> symmalloc_status {
    release(|| take_back(dma_buf, "dma_buf").map(drop))
}
