//! Registrars: pools registered on communicators that other code owns, and scopes at whose end that is brought up to date.

use super::arguments::{living, not_forked, not_null, text, write};
use crate::device::DeviceAllocator;
use crate::error::Error;
use crate::guard::report;
use crate::process;
use crate::registrations::{AgreementMode, PoolRegistration, RegistrationOptions, SyncCounts};
use crate::status::symmalloc_status;
use std::ffi::{c_char, c_void};
use std::num::NonZeroU32;
use std::time::Duration;
use symmalloc_core::PoolId;
use symmalloc_nccl::{Communicator, Registration};

/// `symmalloc_registrar_options.registration`: a symmetric window over each segment of a symmetric pool, made by all ranks together.
pub const SYMMALLOC_REGISTER_WINDOWS: u32 = 0;

/// `symmalloc_registrar_options.registration`: `ncclCommRegister` for each piece of memory, which is this rank's own matter. For any
/// pool, also one whose segments grow.
pub const SYMMALLOC_REGISTER_BUFFERS: u32 = 1;

/// `symmalloc_registrar_options.agree_every`: the ranks compare their histories when `symmalloc_registrar_agree` or
/// `symmalloc_pool_agree` is called, and never in a sync.
pub const SYMMALLOC_AGREE_BY_HAND: u32 = u32::MAX;

/// How a pool is registered. All zero: windows, compared at every sync, with a deadline of five minutes. All ranks give the same, but
/// for `rank`.
#[allow(non_camel_case_types, reason = "C's names")]
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct symmalloc_registrar_options {
    /// Milliseconds after which anything that waits for other ranks ends; 0: five minutes.
    pub deadline_ms: u32,
    /// `SYMMALLOC_REGISTER_WINDOWS` or `SYMMALLOC_REGISTER_BUFFERS`.
    pub registration: u32,
    /// The ranks compare their histories at every so many syncs: 0 and 1 mean each one, `SYMMALLOC_AGREE_BY_HAND` none. A sync that
    /// compares nothing and finds nothing new returns at once; that ranks differ in *whether* there is something new is noticed by the
    /// deadline then.
    pub agree_every: u32,
    /// What the program takes this rank of the communicator for. Refused when NCCL says another one.
    pub rank: u32,
    /// What it takes the communicator's number of ranks for; 0: neither is compared.
    pub world: u32,
    /// "host:port", a free port of the machine of the communicator's rank 0: there the ranks meet, and keep connections by which each
    /// learns which rank died, is stopped or does not come. NULL: nothing tells which rank it is.
    pub rendezvous: *const c_char,
    /// The communicator's name in errors and flight records; NULL: "borrowed". A pool that is on several communicators sleeps where each of
    /// them has a name of its own, the same on all of its ranks and another one than that of any communicator of the job.
    pub name: *const c_char,
}

/// Attaches a symmetric pool to a communicator that other code owns. Nothing is registered before the first sync. Every rank
/// of the communicator calls it. Anything that waits for other ranks ends after `deadline_ms` milliseconds; 0: after
/// five minutes. `rendezvous` is as in `symmalloc_registrar_options`.
///
/// # Safety
/// `rendezvous` is a C string or NULL; `allocator` is live; `nccl_comm` is a live and ready `ncclComm_t` on its device, of the NCCL library of this process, which
/// lives until the registrar is destroyed and is not used by other threads while a call of this library uses it; `out` is valid
/// for writing.
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

/// As `symmalloc_registrar_create`, for any kind of registration, agreement and name.
///
/// # Safety
/// As `symmalloc_registrar_create`; `options` is valid for reading, and its texts are C strings or NULL.
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
        unsafe { write(out, "out", Box::into_raw(Box::new(registration))) }
    })
}

/// # Safety
/// The texts of the options are C strings that live as long as the answer is used, or NULL.
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
        0 | 1 => AgreementMode::AtSync,
        SYMMALLOC_AGREE_BY_HAND => AgreementMode::ByHand,
        syncs => NonZeroU32::new(syncs).map_or(AgreementMode::AtSync, AgreementMode::EverySyncs),
    };
    let deadline = match options.deadline_ms {
        0 => Communicator::DEFAULT_DEADLINE,
        milliseconds => Duration::from_millis(milliseconds.into()),
    };
    Ok(RegistrationOptions {
        deadline,
        registration,
        agreement,
        // SAFETY: the caller's contract.
        rendezvous: unsafe { text(options.rendezvous, "rendezvous") }?,
        // SAFETY: the caller's contract.
        name: unsafe { text(options.name, "name") }?,
        place: (options.world > 0).then_some((options.rank, options.world)),
    })
}

/// Registers new segments of the pool and deregisters dead ones, on every rank of the communicator, after the ranks have
/// compared what they did. Both counts may be NULL.
///
/// # Safety
/// The registrar is live; the counts are NULL or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_registrar_sync(
    registrar: *mut PoolRegistration,
    registered: *mut u64,
    deregistered: *mut u64,
) -> symmalloc_status {
    // SAFETY: the caller's contract, in both.
    unsafe { counted(registered, deregistered, || open(registrar)?.sync()) }
}

/// As `symmalloc_registrar_sync`, and the ranks compare their histories also where `agree_every` would not have it.
///
/// # Safety
/// As `symmalloc_registrar_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_registrar_agree(
    registrar: *mut PoolRegistration,
    registered: *mut u64,
    deregistered: *mut u64,
) -> symmalloc_status {
    // SAFETY: the caller's contract, in both.
    unsafe { counted(registered, deregistered, || open(registrar)?.agree()) }
}

/// What NCCL says of the registrar's communicator: this rank, and how many ranks there are.
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
        let place = unsafe { open(registrar) }?.place();
        // SAFETY: the caller's contract.
        unsafe {
            write(rank, "rank", place.0)?;
            write(world, "world", place.1)
        }
    })
}

/// The window that all of these bytes lie in, an `ncclWindow_t` of the registrar's communicator, and where they begin in it: at the
/// same offset on every rank. `SYMMALLOC_INVALID_STATE` when they are in none.
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

/// Deregisters everything, on every rank of the communicator, and lets go of it. NULL is no op. The registrar is gone also when
/// an error is returned.
///
/// # Safety
/// The registrar is live and not used after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_registrar_destroy(registrar: *mut PoolRegistration) -> symmalloc_status {
    report(|| {
        not_forked()?;
        if registrar.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's contract; it came from `Box::into_raw`.
        unsafe { Box::from_raw(registrar) }.end()
    })
}

/// Syncs all registrars of a pool, in the order in which they were made, which is the same on every rank. When one fails, the others
/// are synced all the same, since their ranks wait for this one; the first error is returned. Both counts may be NULL.
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

/// As `symmalloc_pool_sync`, and the ranks compare their histories.
///
/// # Safety
/// As `symmalloc_pool_sync`.
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

/// What this thread allocates through PyTorch's entry points on the device goes to the pool until `symmalloc_scope_end`, as by
/// `symmalloc_torch_push_pool`.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_scope_begin(device: i32, pool: u32) -> symmalloc_status {
    report(|| {
        let allocator = process::allocator(device)?;
        allocator.scopes().push_pool(allocator.known_pool(pool)?);
        Ok(())
    })
}

/// Ends the scope that this thread began last on the device, and syncs all registrars of the pool, as `symmalloc_pool_sync`: what was
/// allocated inside is registered then. Every rank does the same. While a graph is captured nothing can be registered and the ranks
/// cannot talk: the scope ends quietly when it finds nothing new, and with an error otherwise. Reserve and sync before the capture.
/// Both counts may be NULL.
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
        let allocator = process::allocator(device)?;
        allocator.scopes().pop_pool(allocator.ordinal())?;
        // Nothing is registered of a pool that is unknown.
        allocator.registrations.sync_at_scope_end(PoolId(pool))
    };
    // SAFETY: the caller's contract.
    unsafe { counted(registered, deregistered, end) }
}

/// # Safety
/// The registrar is NULL or live for as long as the answer is used.
unsafe fn open<'a>(registrar: *mut PoolRegistration) -> Result<&'a PoolRegistration, Error> {
    not_forked()?;
    // SAFETY: the caller's contract.
    unsafe { registrar.as_ref() }.ok_or(Error::Null { argument: "registrar" })
}

/// Does something that syncs, and tells what came of it.
///
/// # Safety
/// Both places are NULL or valid for writing.
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
