//! Sharing of tensors with other processes: a socket transfers file descriptors of the memory.
//!
//! ```text
//!  owner                                                     another process
//!  share(pointer) ─► "symmalloc 1 SOCKET number:bytes ..."  ═══ a channel of the program ═══►  open(text)
//!  threads at SOCKET   ◄─────────────────────────── numbers ──────────────────────────────────  connects
//!        └─ exports the chunks ─────────────────── descriptors ─────────────────────────────►  maps them
//! ```
//!
//! A chunk's number is valid until its memory is released. Descriptors exist only while they are sent, so
//! they do not keep memory alive. The socket is abstract, and serves processes of the same user only. PyTorch counts the users of a tensor,
//! and keeps it alive for them.

use super::channel;
use crate::c_interface::arguments::{hand_out_text, not_null, required_text, write};
use crate::device::DeviceAllocator;
use crate::error::Error;
use crate::guard::report;
use crate::process;
use crate::shared_chunks::{self, Ticket};
use crate::status::symmalloc_status;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_void};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use symmalloc_cuda::{Access, CudaDevice, CudaError, ImportedMemory};
use symmalloc_files::is_forked;

/// Exports the memory of a live allocation: writes a text with which another process can open the memory, and the allocation's offset in
/// that memory. Release the text with `symmalloc_release_bytes`.
///
/// # Safety
/// `text` and `offset` are valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_torch_share(
    pointer: *mut c_void,
    text: *mut *mut c_char,
    offset: *mut u64,
) -> symmalloc_status {
    report(|| {
        not_null(text, "text")?;
        not_null(offset, "offset")?;
        let unknown = Error::UnknownPointer { address: pointer as u64, device: 0 };
        let allocator = process::all().find(|allocator| allocator.owns(pointer)).ok_or(unknown)?;
        let (shared, offset_bytes) = share(allocator, pointer)?;
        // SAFETY: the caller's contract.
        unsafe {
            write(offset, "offset", offset_bytes)?;
            hand_out_text(text, "text", &shared)
        }
    })
}

fn share(allocator: &DeviceAllocator, pointer: *mut c_void) -> Result<(String, u64), Error> {
    let found = allocator.find(pointer)?;
    let address = pointer as u64;
    let chunks = allocator.core().backend().chunks_behind(address, found.allocation.size_bytes);
    let Some(&(first, _)) = chunks.first() else { return Err(Error::NotShareable { address }) };
    let socket = channel::serve(export)?;
    let tickets = shared_chunks::tickets(allocator.ordinal(), &chunks);
    let listed: Vec<String> = tickets.iter().map(Ticket::to_string).collect();
    Ok((format!("symmalloc 1 {socket} {}", listed.join(" ")), address - first))
}

/// Memory of another process that this process opened.
pub struct OpenedMemory {
    memory: ImportedMemory,
}

/// The opened memory, by device and text of the export.
static OPEN: Mutex<BTreeMap<(i32, String), Weak<OpenedMemory>>> = Mutex::new(BTreeMap::new());

/// Opens memory by the text that `symmalloc_torch_share` wrote in another process. Close it with `symmalloc_torch_close`.
///
/// # Safety
/// `text` is a C string; `base` and `out` are valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_torch_open(
    device: i32,
    text: *const c_char,
    base: *mut *mut c_void,
    out: *mut *const OpenedMemory,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let text = unsafe { required_text(text, "text") }?;
        not_null(base, "base")?;
        not_null(out, "out")?;
        let opened = open(device, text)?;
        let address = opened.memory.address();
        // SAFETY: the caller's contract.
        unsafe {
            write(base, "base", address as *mut c_void)?;
            write(out, "out", Arc::into_raw(opened))
        }
    })
}

fn open(device: i32, text: &str) -> Result<Arc<OpenedMemory>, Error> {
    let key = (device, text.to_owned());
    if let Some(opened) = lock().get(&key).and_then(Weak::upgrade) {
        return Ok(opened);
    }
    // The lock is not held here, because the owner may be slow and other threads should not wait for it.
    let opened = Arc::new(OpenedMemory { memory: import(device, text)? });
    let mut open = lock();
    open.retain(|_, opened| opened.strong_count() > 0);
    if let Some(first) = open.get(&key).and_then(Weak::upgrade) {
        // Another thread opened it first. Release the lock before dropping this copy, which waits for the device.
        drop(open);
        return Ok(first);
    }
    open.insert(key, Arc::downgrade(&opened));
    Ok(opened)
}

fn lock() -> MutexGuard<'static, BTreeMap<(i32, String), Weak<OpenedMemory>>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Requests, from its owner, the memory that the text describes, and maps it.
fn import(device: i32, text: &str) -> Result<ImportedMemory, Error> {
    let not_ours = || Error::NotSharedMemory { text: text.chars().take(40).collect() };
    let mut words = text.split(' ');
    if (words.next(), words.next()) != (Some("symmalloc"), Some("1")) {
        return Err(not_ours());
    }
    let socket = words.next().ok_or_else(not_ours)?;
    let tickets = words.map(str::parse::<Ticket>).collect::<Result<Vec<_>, _>>().map_err(|()| not_ours())?;
    let size_bytes = tickets.iter().try_fold(0_u64, |sum, ticket| sum.checked_add(ticket.bytes));
    let size_bytes = size_bytes.filter(|sum| *sum > 0).ok_or_else(not_ours)?;
    let ordinal = usize::try_from(device).map_err(|_| not_ours())?;
    let mut memory = ImportedMemory::reserve(&CudaDevice::new(ordinal)?, size_bytes).map_err(CudaError::from)?;
    let mut at = 0;
    channel::fetch(socket, &tickets, |ticket, file| {
        memory.map_file(&(at..at + ticket.bytes), &file).map_err(CudaError::from)?;
        at += ticket.bytes;
        Ok(())
    })?;
    memory.set_access(Access::ReadWrite).map_err(CudaError::from)?;
    Ok(memory)
}

/// Releases one use of opened memory. After the last release, the memory is unmapped once all work of the device has completed. Never
/// fails, because PyTorch calls it in destructors.
///
/// # Safety
/// The opened memory came from `symmalloc_torch_open` and is not used after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_torch_close(opened: *const OpenedMemory) {
    if !opened.is_null() && !is_forked() {
        // SAFETY: the caller's contract.
        drop(unsafe { Arc::from_raw(opened) });
    }
}

/// Exports a chunk if its number is still valid.
fn export(ticket: Ticket) -> Result<OwnedFd, Error> {
    let gone = || Error::SharedMemoryGone { bytes: ticket.bytes };
    let (device, address) = shared_chunks::find(ticket).ok_or_else(gone)?;
    let allocator = process::allocator(device as i32)?;
    let file = allocator.core().backend().export_chunk(address, ticket.bytes)?;
    // A number is removed before its memory is unmapped. If the number is still valid after the export, the exported memory is therefore
    // the right one.
    shared_chunks::find(ticket).ok_or_else(gone)?;
    Ok(file)
}
