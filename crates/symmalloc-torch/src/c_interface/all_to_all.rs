//! All-to-all-v on a registrar's communicator: PyTorch's `all_to_all_single`, with an explicit exchange of the splits.

use super::arguments::{not_forked, not_null, write};
use crate::error::Error;
use crate::guard::{release, report};
use crate::handles::{hand_out, take_back};
use crate::registrations::{Calls, Memory, PoolRegistration};
use crate::status::symmalloc_status;
use crate::streams::RawStream;
use std::ffi::c_void;
use std::slice;
use symmalloc_nccl::{AllToAll, Splits};

/// Option of `symmalloc_all_to_all_create`: rejects buffers that are not registered on the communicator. NCCL could move the data of such
/// buffers, too, through its internal buffers.
pub const SYMMALLOC_ALL_TO_ALL_REGISTERED: u32 = 1;

/// Option of `symmalloc_all_to_all_create`: the ranks compare their splits before each call, and all return the same error if they
/// disagree. This is for debugging, because each call then blocks the host for an exchange.
pub const SYMMALLOC_ALL_TO_ALL_CHECKED: u32 = 2;

/// All-to-all-v on one communicator.
pub struct RankAllToAll {
    all_to_all: AllToAll,
}

impl RankAllToAll {
    fn ranks(&self) -> usize {
        self.all_to_all.communicator().ranks() as usize
    }
}

/// Creates an all-to-all-v on the registrar's communicator. This call does not communicate. `options` is a sum of
/// `SYMMALLOC_ALL_TO_ALL_...` and must be equal on every rank; 0 accepts any memory and checks nothing. Destroy the all-to-all-v before the
/// registrar.
///
/// # Safety
/// The registrar is live; `out` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_all_to_all_create(
    registrar: *mut PoolRegistration,
    options: u32,
    out: *mut *mut RankAllToAll,
) -> symmalloc_status {
    report(|| {
        not_forked()?;
        not_null(out, "out")?;
        // SAFETY: the caller's contract.
        let registrar = unsafe { registrar.as_ref() }.ok_or(Error::Null { argument: "registrar" })?;
        if options & !(SYMMALLOC_ALL_TO_ALL_REGISTERED | SYMMALLOC_ALL_TO_ALL_CHECKED) != 0 {
            let expected = "a sum of SYMMALLOC_ALL_TO_ALL_...";
            return Err(Error::Argument { argument: "options", value: options.into(), expected });
        }
        let is_registered = options & SYMMALLOC_ALL_TO_ALL_REGISTERED != 0;
        let is_checked = options & SYMMALLOC_ALL_TO_ALL_CHECKED != 0;
        let memory = if is_registered { Memory::Registered } else { Memory::Any };
        let calls = if is_checked { Calls::Checked } else { Calls::Trusted };
        let all_to_all = RankAllToAll { all_to_all: registrar.all_to_all(memory, calls)? };
        // SAFETY: the caller's contract.
        unsafe { write(out, "out", hand_out(all_to_all)) }
    })
}

/// Exchanges splits: sends the number of rows for each rank (`sent`), and writes the number of rows from each rank (`received`). All ranks
/// call this function after the splits of any rank have changed, and at no other time. Blocks the host until the exchange is done. If this
/// rank has no valid splits, pass NULL as `sent`. All ranks then return an error instead of waiting for this rank.
///
/// # Safety
/// `all_to_all` is live; `sent` is NULL or valid for reading as many numbers as the communicator has ranks, and `received` is valid for
/// writing them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_all_to_all_exchange(
    all_to_all: *mut RankAllToAll,
    sent: *const u64,
    received: *mut u64,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let it = unsafe { open(all_to_all) }?;
        not_null(received, "received")?;
        // SAFETY: the caller's contract.
        let sent = unsafe { rows(sent, it.ranks()) };
        // An empty list is invalid, which the exchange reports to the other ranks.
        let splits = it.all_to_all.exchange_splits(sent.unwrap_or_default())?;
        let rows = splits.output().rows();
        // SAFETY: the caller's contract; the new buffer does not overlap the caller's.
        unsafe { std::ptr::copy_nonoverlapping(rows.as_ptr(), received, rows.len()) };
        Ok(())
    })
}

/// Sends rows of the input to all ranks, and receives their rows in the output, in rank order. A row has `row_bytes` bytes. `sent` and
/// `received` are the numbers of rows to and from each rank. If both are NULL, each buffer is split equally among the ranks. This call does
/// not exchange splits, so every rank must already know both `sent` and `received`. A buffer may be longer than its rows. Returns after
/// submitting the work to the stream. A graph can capture the work.
///
/// # Safety
/// `all_to_all` is live; `stream` belongs to its device and lives as long as the communicator; the buffers are memory of the device until
/// the stream has executed the call, and until then no other work writes to the buffers or reads the output; `sent` and `received` are NULL
/// or valid for reading as many numbers as the communicator has ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_all_to_all_run(
    all_to_all: *mut RankAllToAll,
    stream: *mut c_void,
    input: *const c_void,
    input_bytes: usize,
    output: *mut c_void,
    output_bytes: usize,
    row_bytes: usize,
    sent: *const u64,
    received: *const u64,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let it = unsafe { open(all_to_all) }?;
        // SAFETY: the caller's contract.
        let (sent, received) = unsafe { (rows(sent, it.ranks()), rows(received, it.ranks())) };
        let splits = match (sent, received) {
            (None, None) => None,
            (Some(sent), Some(received)) => Some(Splits::sending(sent).receiving(received)?),
            (None, Some(_)) => return Err(Error::Null { argument: "sent" }),
            (Some(_), None) => return Err(Error::Null { argument: "received" }),
        };
        let context = it.all_to_all.communicator().device().context();
        // SAFETY: the caller's contract.
        let stream = unsafe { context.wrap_borrowed_stream(RawStream::new(stream).handle().cast()) };
        let (input, output) = ((input as u64, input_bytes), (output as u64, output_bytes));
        // SAFETY: the caller's contract.
        Ok(unsafe { it.all_to_all.run_raw(&stream, input, output, row_bytes, &splits) }?)
    })
}

/// Destroys an all-to-all-v. Work that was already submitted still runs. NULL has no effect.
///
/// # Safety
/// The all-to-all-v is live and not used after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_all_to_all_destroy(all_to_all: *mut RankAllToAll) -> symmalloc_status {
    release(|| take_back(all_to_all, "all_to_all").map(drop))
}

/// # Safety
/// The pointer is NULL, or live while the result is used.
unsafe fn open<'a>(all_to_all: *mut RankAllToAll) -> Result<&'a RankAllToAll, Error> {
    not_forked()?;
    // SAFETY: the caller's contract.
    unsafe { all_to_all.as_ref() }.ok_or(Error::Null { argument: "all_to_all" })
}

/// # Safety
/// The pointer is NULL, or valid for reading that many numbers while the result is used.
unsafe fn rows<'a>(rows: *const u64, ranks: usize) -> Option<&'a [u64]> {
    // SAFETY: the caller's contract.
    (!rows.is_null()).then(|| unsafe { slice::from_raw_parts(rows, ranks) })
}
