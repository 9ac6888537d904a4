//! Registrars: pools registered on communicators that other code owns, and scopes that register new segments at their end.

use super::arguments::{living, not_forked, not_null, text, write};
use crate::device::DeviceAllocator;
use crate::error::Error;
use crate::guard::{release, report};
use crate::handles::{hand_out, take_back};
use crate::process;
use crate::registrations::{PoolRegistration, RegistrationOptions, SyncCounts};
use crate::status::symmalloc_status;
use std::ffi::{c_char, c_void};
use std::num::NonZeroU32;
use std::time::Duration;
use symmalloc_agreement::Mode;
use symmalloc_core::PoolId;
use symmalloc_files::is_forked;
use symmalloc_nccl::{Attachment, Communicator, Registration};

/// `symmalloc_registrar_options.registration`: all ranks together create a symmetric window over each segment of a symmetric pool.
pub const SYMMALLOC_REGISTER_WINDOWS: u32 = 0;

/// `symmalloc_registrar_options.registration`: each rank calls `ncclCommRegister` for each piece of its memory, independently of the other
/// ranks. Works for any pool, including pools whose segments grow.
pub const SYMMALLOC_REGISTER_BUFFERS: u32 = 1;

/// `symmalloc_registrar_options.agree_every`: the ranks compare their histories only in `symmalloc_registrar_agree` and
/// `symmalloc_pool_agree`, and never in a sync.
pub const SYMMALLOC_AGREE_BY_HAND: u32 = u32::MAX;

/// Options of a registration. If all are zero, they select windows, a comparison at every sync, and a deadline of five minutes. All ranks
/// pass the same values, except for `rank`.
#[allow(non_camel_case_types, reason = "C's names")]
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct symmalloc_registrar_options {
    /// The timeout of every wait for other ranks, in milliseconds; 0 means five minutes.
    pub deadline_ms: u32,
    /// `SYMMALLOC_REGISTER_WINDOWS` or `SYMMALLOC_REGISTER_BUFFERS`.
    pub registration: u32,
    /// The number of syncs per comparison of the ranks' histories. With 0 or 1, every sync compares them; with `SYMMALLOC_AGREE_BY_HAND`,
    /// none does. A sync that neither compares nor finds new segments returns immediately. If only some ranks find new segments in a sync
    /// that does not compare, these ranks time out.
    pub agree_every: u32,
    /// The expected rank in the communicator. A mismatch with NCCL's value is an error.
    pub rank: u32,
    /// The expected number of ranks of the communicator. 0 disables the checks of this number and of `rank`.
    pub world: u32,
    /// "host:port": a free port on the machine of the communicator's rank 0. The ranks connect there and keep the connections, to detect
    /// which rank died, is stopped or is missing. With NULL, errors do not identify that rank.
    pub rendezvous: *const c_char,
    /// The communicator's name in errors and flight records; NULL means "borrowed". A pool on several communicators can sleep only if each
    /// of them has a name that is equal on all of the communicator's ranks and unique in the job.
    pub name: *const c_char,
}

/// Attaches a symmetric pool to a communicator that other code owns. The first sync registers the pool's segments. Every rank of the
/// communicator calls this function. Every wait for other ranks times out after `deadline_ms` milliseconds; 0 means five minutes.
/// `rendezvous` is as in `symmalloc_registrar_options`.
///
/// # Safety
/// `rendezvous` is a C string or NULL; `allocator` is live; `nccl_comm` is a live and ready `ncclComm_t` of this process's NCCL library, on
/// the allocator's device; it lives until the registrar is destroyed, and no other thread uses it during a call of this library; `out` is
/// valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_registrar_create(
    allocator: *mut DeviceAllocator,
    pool: u32,
    nccl_comm: *mut c_void,
    deadline_ms: u32,
    rendezvous: *const c_char,
    out: *mut *mut PoolRegistration,
) -> symmalloc_status {
    let options = symmalloc_registrar_options {
        deadline_ms,
        rendezvous,
        registration: SYMMALLOC_REGISTER_WINDOWS,
        agree_every: 0,
        rank: 0,
        world: 0,
        name: std::ptr::null(),
    };
    // SAFETY: the caller's contract.
    unsafe { symmalloc_registrar_create_with(allocator, pool, nccl_comm, &raw const options, out) }
}

/// Attaches a pool like `symmalloc_registrar_create`. The options select the kind of registration, the rate of comparisons, and the name.
///
/// # Safety
/// Same as for `symmalloc_registrar_create`; `options` is valid for reading, and its texts are C strings or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_registrar_create_with(
    allocator: *mut DeviceAllocator,
    pool: u32,
    nccl_comm: *mut c_void,
    options: *const symmalloc_registrar_options,
    out: *mut *mut PoolRegistration,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let allocator = unsafe { living(allocator) }?;
        not_null(out, "out")?;
        not_null(nccl_comm, "nccl_comm")?;
        // SAFETY: the caller's contract.
        let options = unsafe { options.as_ref() }.ok_or(Error::Null { argument: "options" })?;
        let pool = allocator.known_pool(pool)?;
        // SAFETY: the caller's contract.
        let options = unsafe { read(options) }?;
        // SAFETY: the caller's contract.
        let registration = unsafe { PoolRegistration::new(&allocator.registrations, pool, nccl_comm, &options) }?;
        // SAFETY: the caller's contract.
        unsafe { write(out, "out", hand_out(registration)) }
    })
}

/// # Safety
/// The texts of the options are NULL, or C strings that live while the result is used.
unsafe fn read(options: &symmalloc_registrar_options) -> Result<RegistrationOptions<'_>, Error> {
    let registration = match options.registration {
        SYMMALLOC_REGISTER_WINDOWS => Registration::Windows,
        SYMMALLOC_REGISTER_BUFFERS => Registration::Buffers,
        value => {
            let expected = "SYMMALLOC_REGISTER_WINDOWS or SYMMALLOC_REGISTER_BUFFERS";
            return Err(Error::Argument { argument: "registration", value: value.into(), expected });
        }
    };
    let agreement = match options.agree_every {
        0 | 1 => Mode::AtSync,
        SYMMALLOC_AGREE_BY_HAND => Mode::Off,
        syncs => NonZeroU32::new(syncs).map_or(Mode::AtSync, Mode::EverySyncs),
    };
    let deadline = match options.deadline_ms {
        0 => Communicator::DEFAULT_DEADLINE,
        milliseconds => Duration::from_millis(milliseconds.into()),
    };
    Ok(RegistrationOptions {
        deadline,
        attachment: Attachment { registration, agreement, ..Attachment::default() },
        // SAFETY: the caller's contract.
        rendezvous: unsafe { text(options.rendezvous, "rendezvous") }?,
        // SAFETY: the caller's contract.
        name: unsafe { text(options.name, "name") }?,
        rank_and_world: (options.world > 0).then_some((options.rank, options.world)),
    })
}

/// Compares the histories of all ranks of the communicator, then registers the pool's new segments and deregisters those that it has
/// released. The call is collective. `registered` and `deregistered` may be NULL.
///
/// # Safety
/// The registrar is live; the counts are NULL or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_registrar_sync(
    registrar: *mut PoolRegistration,
    registered: *mut u64,
    deregistered: *mut u64,
) -> symmalloc_status {
    // SAFETY: the caller guarantees that the counts are NULL or valid for writing, and that the registrar is live.
    unsafe { counted(registered, deregistered, || open(registrar)?.sync()) }
}

/// Syncs like `symmalloc_registrar_sync`, but compares the ranks' histories regardless of `agree_every`.
///
/// # Safety
/// Same as for `symmalloc_registrar_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_registrar_agree(
    registrar: *mut PoolRegistration,
    registered: *mut u64,
    deregistered: *mut u64,
) -> symmalloc_status {
    // SAFETY: the caller guarantees that the counts are NULL or valid for writing, and that the registrar is live.
    unsafe { counted(registered, deregistered, || open(registrar)?.agree()) }
}

/// Writes this rank and the number of ranks of the registrar's communicator, as NCCL reports them.
///
/// # Safety
/// The registrar is live; `rank` and `world` are valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_registrar_rank(
    registrar: *mut PoolRegistration,
    rank: *mut u32,
    world: *mut u32,
) -> symmalloc_status {
    report(|| {
        not_null(rank, "rank")?;
        not_null(world, "world")?;
        // SAFETY: the caller's contract.
        let (own, ranks) = unsafe { open(registrar) }?.rank_and_world();
        // SAFETY: the caller's contract.
        unsafe {
            write(rank, "rank", own)?;
            write(world, "world", ranks)
        }
    })
}

/// Writes the window that contains all of the `bytes` bytes at `pointer`, and the offset of `pointer` in the window. The window is an
/// `ncclWindow_t` of the registrar's communicator, and the offset is equal on every rank. Returns `SYMMALLOC_INVALID_STATE` if no window
/// contains these bytes.
///
/// # Safety
/// The registrar is live; `window` and `offset_bytes` are valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_registrar_window(
    registrar: *mut PoolRegistration,
    pointer: *const c_void,
    bytes: usize,
    window: *mut *mut c_void,
    offset_bytes: *mut u64,
) -> symmalloc_status {
    report(|| {
        not_null(window, "window")?;
        not_null(offset_bytes, "offset_bytes")?;
        // SAFETY: the caller's contract.
        let span = unsafe { open(registrar) }?.window_at(pointer, bytes as u64)?;
        // SAFETY: the caller's contract.
        unsafe {
            write(window, "window", span.window.as_ptr())?;
            write(offset_bytes, "offset_bytes", span.offset_bytes)
        }
    })
}

/// Deregisters all segments on every rank of the communicator, and destroys the registrar. The registrar is destroyed even if the call
/// returns an error. NULL has no effect.
///
/// # Safety
/// The registrar is live and not used after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_registrar_destroy(registrar: *mut PoolRegistration) -> symmalloc_status {
    release(|| take_back(registrar, "registrar")?.map_or(Ok(()), |registrar| registrar.end()))
}

/// Syncs all registrars of a pool in the order of their creation, which must be the same on every rank. If one registrar fails, the call
/// still syncs the others, because their ranks wait for this rank, and then returns the first error. `registered` and `deregistered` may be
/// NULL.
///
/// # Safety
/// `allocator` is live; the counts are NULL or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_pool_sync(
    allocator: *mut DeviceAllocator,
    pool: u32,
    registered: *mut u64,
    deregistered: *mut u64,
) -> symmalloc_status {
    let sync = || {
        // SAFETY: the caller's contract.
        let allocator = unsafe { living(allocator) }?;
        allocator.registrations.sync(allocator.known_pool(pool)?)
    };
    // SAFETY: the caller's contract.
    unsafe { counted(registered, deregistered, sync) }
}

/// Syncs like `symmalloc_pool_sync`, but compares the ranks' histories regardless of `agree_every`.
///
/// # Safety
/// Same as for `symmalloc_pool_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_pool_agree(
    allocator: *mut DeviceAllocator,
    pool: u32,
    registered: *mut u64,
    deregistered: *mut u64,
) -> symmalloc_status {
    let agree = || {
        // SAFETY: the caller's contract.
        let allocator = unsafe { living(allocator) }?;
        allocator.registrations.agree(allocator.known_pool(pool)?)
    };
    // SAFETY: the caller's contract.
    unsafe { counted(registered, deregistered, agree) }
}

/// Directs the allocations that this thread makes on the device through PyTorch's entry points to the pool, until `symmalloc_scope_end`, as
/// `symmalloc_torch_push_pool` does.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_scope_begin(device: i32, pool: u32) -> symmalloc_status {
    report(|| {
        let allocator = process::allocator(device)?;
        allocator.scopes().push_pool(allocator.known_pool(pool)?);
        Ok(())
    })
}

/// Ends this thread's innermost scope on the device, and registers the pool's new segments: syncs all registrars of the pool like
/// `symmalloc_pool_sync`. The call is collective. During a graph capture, ranks can neither register segments nor communicate. The scope
/// then ends without a sync if there are no new segments. If there are, the call returns an error: reserve and sync before the capture.
/// `registered` and `deregistered` may be NULL.
///
/// # Safety
/// The counts are NULL or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_scope_end(
    device: i32,
    pool: u32,
    registered: *mut u64,
    deregistered: *mut u64,
) -> symmalloc_status {
    let end = || {
        if is_forked() {
            return Ok(SyncCounts::default());
        }
        let allocator = process::allocator(device)?;
        allocator.scopes().pop_pool(allocator.ordinal())?;
        // An unknown pool has no registrations.
        allocator.registrations.sync_at_scope_end(PoolId(pool))
    };
    // SAFETY: the caller's contract.
    unsafe { counted(registered, deregistered, end) }
}

/// # Safety
/// The registrar is NULL, or live while the result is used.
unsafe fn open<'a>(registrar: *mut PoolRegistration) -> Result<&'a PoolRegistration, Error> {
    not_forked()?;
    // SAFETY: the caller's contract.
    unsafe { registrar.as_ref() }.ok_or(Error::Null { argument: "registrar" })
}

/// Runs an operation that syncs, and writes its counts.
///
/// # Safety
/// Both pointers are NULL or valid for writing.
unsafe fn counted(
    registered: *mut u64,
    deregistered: *mut u64,
    sync: impl FnOnce() -> Result<SyncCounts, Error>,
) -> symmalloc_status {
    report(|| {
        let counts = sync()?;
        for (out, count) in [(registered, counts.registered), (deregistered, counts.deregistered)] {
            if !out.is_null() {
                // SAFETY: the caller's contract.
                unsafe { out.write(count) };
            }
        }
        Ok(())
    })
}
