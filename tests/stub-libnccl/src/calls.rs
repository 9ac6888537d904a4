//! The calls of nccl.h.

use crate::arithmetic::{can_reduce, element_bytes, is_symmetric_sum};
use crate::codes::{CUDA_ERROR, IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, SUCCESS, SYSTEM_ERROR, text};
use crate::group::{self, Action};
use crate::ledger::{self, Verdict, violate};
use crate::member::{Life, Member, Step, check};
use crate::messages::{Join, Kind, Round, Signature};
use crate::options::options;
use crate::outputs::Pending;
use crate::streams::{Kernel, Launch};
use crate::{cuda, grow, registry, shrink, suspension, window};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

/// `ncclUniqueId`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId {
    /// Opaque bytes.
    pub internal: [u8; 128],
}

/// The first fields of `ncclConfig_t`, which are the same in all versions.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Config {
    /// Size of the caller's struct in bytes.
    pub size: usize,
    /// 0xcafebeef.
    pub magic: c_uint,
    /// The caller's version.
    pub version: c_uint,
    /// 0 if calls do not block.
    pub blocking: c_int,
}

/// Text of the last error.
static LAST_ERROR: AtomicPtr<c_char> = AtomicPtr::new(c"".as_ptr().cast_mut());

fn failed(code: c_int) -> c_int {
    if code != SUCCESS && code != IN_PROGRESS {
        LAST_ERROR.store(text(code).as_ptr().cast_mut(), Ordering::Relaxed);
        group::note(code);
    }
    code
}

/// Makes a call without a communicator.
fn plain(call: &'static str, act: impl FnOnce() -> c_int) -> c_int {
    failed(match ledger::enter(call, None) {
        Verdict::Fail(code) => code,
        Verdict::Go | Verdict::Hang => act(),
    })
}

/// Makes a call on a communicator. Only one thread at a time may do so, and only after the previous call has completed.
pub(crate) fn on(call: &'static str, handle: u64, act: impl FnOnce(&Arc<Member>, bool) -> c_int) -> c_int {
    let member = match check(call, handle) {
        Ok(member) => member,
        Err(code) => {
            ledger::enter(call, None);
            return failed(code);
        }
    };
    suspension::check(call, &member);
    let verdict = ledger::enter(call, Some(member.world));
    if let Verdict::Fail(code) = verdict {
        return failed(code);
    }
    if !member.occupy() {
        violate(format!("{call} on a communicator of rank {} while another thread is in a call on it", member.world));
        return failed(act(&member, verdict == Verdict::Hang));
    }
    let code = if member.is_blocking || member.is_ready() {
        act(&member, verdict == Verdict::Hang)
    } else {
        // NCCL: "Attempt to use communicator before the previous operation returned ncclSuccess".
        violate(format!("{call} on a communicator of rank {} before its previous call completed", member.world));
        INVALID_ARGUMENT
    };
    member.vacate();
    failed(code)
}

/// Makes a query, an abort or a revoke, which are allowed on any thread at any time. Of these, only a revoke can fail or hang.
pub(crate) fn ask(call: &'static str, handle: u64, act: impl FnOnce(&Arc<Member>) -> c_int) -> c_int {
    let member = check(call, handle);
    match ledger::enter(call, member.as_ref().ok().map(|member| member.world)) {
        Verdict::Fail(code) if call == "ncclCommRevoke" => return failed(code),
        Verdict::Hang if call == "ncclCommRevoke" => ledger::wait_for_heal(),
        _ => {}
    }
    failed(member.map_or_else(|code| code, |member| act(&member)))
}

/// Returns `blocking` of a configuration; the default is `otherwise`.
pub(crate) unsafe fn is_blocking(config: *const Config, otherwise: bool) -> Result<bool, c_int> {
    if config.is_null() {
        return Ok(otherwise);
    }
    // SAFETY: the caller meets the contract of nccl.h.
    let config = unsafe { config.read() };
    if config.magic != 0xcafe_beef || config.size < size_of::<Config>() {
        return Err(INVALID_ARGUMENT);
    }
    match config.blocking {
        c_int::MIN => Ok(otherwise),
        blocking @ 0..=1 => Ok(blocking == 1),
        _ => Err(INVALID_ARGUMENT),
    }
}

fn init(out: *mut u64, ranks: c_int, id: &UniqueId, rank: c_int, device: c_int, is_blocking: bool) -> c_int {
    let (Ok(ranks), Ok(rank)) = (usize::try_from(ranks), usize::try_from(rank)) else { return INVALID_ARGUMENT };
    if out.is_null() || rank >= ranks {
        return INVALID_ARGUMENT;
    }
    let _output = Pending::new(out);
    let member = Member::create(rank, device, is_blocking);
    // SAFETY: `out` is valid for writing.
    unsafe { out.write(member.handle) };
    let join = Join {
        id: id.internal.to_vec(),
        rank,
        ranks,
        world: rank,
        device,
        process: std::process::id(),
        file: cuda::memory_file().0,
        member: member.handle,
    };
    let is_hung = match ledger::enter("ncclCommInitRankConfig", Some(rank)) {
        Verdict::Go => false,
        Verdict::Hang => true,
        Verdict::Fail(code) => {
            member.lock().life = Life::Refused(code);
            return code;
        }
    };
    if is_hung && is_blocking && !group::is_open() {
        ledger::wait_for_heal();
        member.lock().life = Life::Refused(SYSTEM_ERROR);
        return SYSTEM_ERROR;
    }
    group::submit(member, Action::Init((!is_hung).then_some(join)))
}

/// Returns the size of `count` elements in bytes.
fn bytes(count: usize, data_type: c_int) -> Option<u64> {
    Some((count * element_bytes(data_type)?) as u64)
}

/// Checks the arguments of a collective and launches it.
fn collective(call: &'static str, comm: u64, stream: u64, signature: Signature, send: u64, receive: u64) -> c_int {
    on(call, comm, |member, is_hung| {
        let (rank, ranks) = {
            let inner = member.lock();
            if inner.error != SUCCESS {
                return inner.error;
            }
            if inner.life != Life::Live {
                violate(format!("{call} on a communicator of rank {} that is {:?}", member.world, inner.life));
                return INVALID_ARGUMENT;
            }
            (inner.rank, inner.ranks)
        };
        let Some(bytes) = bytes(signature.count, signature.data_type) else { return INVALID_ARGUMENT };
        let reduces = matches!(signature.kind, Kind::AllReduce | Kind::ReduceScatter | Kind::Reduce);
        if reduces && !can_reduce(signature.data_type, signature.op) || !(0..ranks as c_int).contains(&signature.root) {
            return INVALID_ARGUMENT;
        }
        let is_root = rank == signature.root as usize;
        let all = bytes * ranks as u64;
        let (sent, received) = match signature.kind {
            Kind::AllReduce => (bytes, bytes),
            Kind::AllGather => (bytes, all),
            Kind::ReduceScatter => (all, bytes),
            Kind::AllToAll => (all, all),
            Kind::Broadcast => (if is_root { bytes } else { 0 }, bytes),
            Kind::Reduce => (bytes, if is_root { bytes } else { 0 }),
            Kind::Gather => (bytes, if is_root { all } else { 0 }),
            Kind::Scatter => (if is_root { all } else { 0 }, bytes),
        };
        let used = |address: u64, bytes: u64| if bytes == 0 { (0, 0) } else { (address, bytes) };
        let (send, receive) = (used(send, sent), used(receive, received));
        if (send.1 > 0 && send.0 == 0) || (receive.1 > 0 && receive.0 == 0) {
            return INVALID_ARGUMENT;
        }
        let has_kernel = match signature.kind {
            Kind::AllGather => true,
            Kind::AllReduce | Kind::ReduceScatter => is_symmetric_sum(signature.data_type, signature.op),
            _ => false,
        };
        let symmetric = {
            let windows = &member.lock().windows;
            windows.place(send.0).zip(windows.place(receive.0)).filter(|_| has_kernel && ranks > 1)
        };
        let kernel = Kernel::Collective { signature, send, receive, symmetric };
        group::submit(Arc::clone(member), Action::Launch(Launch { kernel, stream, is_hung }))
    })
}

fn transfer(
    call: &'static str,
    buffer: u64,
    count: usize,
    data_type: c_int,
    peer: c_int,
    comm: u64,
    stream: u64,
) -> c_int {
    on(call, comm, |member, is_hung| {
        let ranks = member.lock().ranks;
        let (Some(bytes), Ok(peer)) = (bytes(count, data_type), usize::try_from(peer)) else { return INVALID_ARGUMENT };
        if peer >= ranks || (bytes > 0 && buffer == 0) {
            return INVALID_ARGUMENT;
        }
        let kernel = Kernel::Transfers(vec![(peer, call == "ncclSend", (buffer, bytes))]);
        group::submit(Arc::clone(member), Action::Launch(Launch { kernel, stream, is_hung }))
    })
}

macro_rules! nccl {
    ($($name:ident($($arg:ident: $type:ty),*) $body:expr;)*) => {
        $(
            /// See nccl.h.
            #[unsafe(no_mangle)]
            #[allow(unused_variables, unused_unsafe, reason = "not every call uses all arguments")]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
                if !cuda::is_there() {
                    return CUDA_ERROR;
                }
                // SAFETY: the caller meets the contract of nccl.h: pointers are valid, and handles are live.
                unsafe { $body }
            }
        )*
    };
}

nccl! {
    ncclGetVersion(version: *mut c_int) plain("ncclGetVersion", || { version.write(options().version); SUCCESS });
    ncclGetUniqueId(id: *mut UniqueId) plain("ncclGetUniqueId", || { id.write(registry::unique_id()); SUCCESS });
    ncclMemAlloc(out: *mut u64, size: usize) plain("ncclMemAlloc", || match cuda::allocate(size) {
        Some(base) => { out.write(base); SUCCESS }
        None => CUDA_ERROR,
    });
    ncclMemFree(base: u64) plain("ncclMemFree", || cuda::free(base).map_or(INVALID_USAGE, |()| SUCCESS));

    ncclCommInitRank(comm: *mut u64, ranks: c_int, id: UniqueId, rank: c_int)
        failed(init(comm, ranks, &id, rank, cuda::device().unwrap_or(0), true));
    ncclCommInitRankConfig(comm: *mut u64, ranks: c_int, id: UniqueId, rank: c_int, config: *const Config)
        failed(match is_blocking(config, true) {
            Ok(blocking) => init(comm, ranks, &id, rank, cuda::device().unwrap_or(0), blocking),
            Err(code) => code,
        });
    ncclCommInitAll(comms: *mut u64, devices: c_int, list: *const c_int) plain("ncclCommInitAll", || {
        let id = registry::unique_id();
        group::start();
        for rank in 0..devices {
            let device = if list.is_null() { rank } else { list.add(rank as usize).read() };
            init(comms.add(rank as usize), devices, &id, rank, device, true);
        }
        group::end()
    });
    ncclCommFinalize(comm: u64) on("ncclCommFinalize", comm, |member, is_hung| {
        let mut inner = member.lock();
        if inner.life != Life::Live { return INVALID_ARGUMENT; }
        inner.life = Life::Finalized;
        drop(inner);
        if member.is_blocking { member.drain(); }
        if member.is_blocking { SUCCESS } else { IN_PROGRESS }
    });
    ncclCommDestroy(comm: u64) on("ncclCommDestroy", comm, |member, is_hung| {
        let pending = member.lock().queue.len();
        if pending > 0 {
            violate(format!("rank {}: a communicator is destroyed with {pending} pending collectives", member.world));
        }
        member.drain();
        member.end(Life::Destroyed);
        SUCCESS
    });
    ncclCommAbort(comm: u64) ask("ncclCommAbort", comm, |member| { member.end(Life::Aborted); SUCCESS });
    ncclCommRevoke(comm: u64, flags: c_int) ask("ncclCommRevoke", comm, |member| {
        if flags == 0 && options().version >= 22_807 { member.revoke() } else { INVALID_ARGUMENT }
    });
    ncclCommSplit(comm: u64, color: c_int, key: c_int, out: *mut u64, config: *const Config)
        on("ncclCommSplit", comm, |member, is_hung| {
            let blocking = match is_blocking(config, member.is_blocking) {
                Ok(blocking) => blocking,
                Err(code) => return code,
            };
            if color < -1 { return INVALID_ARGUMENT; }
            out.write(0);
            let child = (color >= 0).then(|| Member::create(member.world, member.device, blocking));
            let round = Round::Split { color, key, member: child.as_ref().map_or(0, |child| child.handle) };
            let step = Step::Split { child, out: out as usize };
            group::submit(Arc::clone(member), Action::Step(step, (!is_hung).then_some(round)))
        });
    ncclCommShrink(comm: u64, list: *const c_int, count: c_int, out: *mut u64, config: *const Config, flags: c_int)
        shrink::shrink(comm, (list, count), out, config, flags);
    ncclCommGetUniqueId(comm: u64, id: *mut UniqueId) grow::unique_id(comm, id);
    ncclCommGrow(comm: u64, ranks: c_int, id: *const UniqueId, rank: c_int, out: *mut u64, config: *const Config)
        failed(grow::grow(comm, ranks, id, rank, out, config));
    ncclCommGetAsyncError(comm: u64, code: *mut c_int) ask("ncclCommGetAsyncError", comm, |member| {
        code.write(member.poll());
        SUCCESS
    });
    ncclCommCount(comm: u64, count: *mut c_int) ask("ncclCommCount", comm, |member| {
        count.write(member.lock().ranks as c_int);
        SUCCESS
    });
    ncclCommUserRank(comm: u64, rank: *mut c_int) ask("ncclCommUserRank", comm, |member| {
        rank.write(member.lock().rank as c_int);
        SUCCESS
    });
    ncclCommCuDevice(comm: u64, device: *mut c_int) ask("ncclCommCuDevice", comm, |member| {
        device.write(member.device);
        SUCCESS
    });

    ncclCommRegister(comm: u64, base: u64, size: usize, out: *mut u64) on("ncclCommRegister", comm, |member, is_hung| {
        match window::register_buffer(member, base, size as u64) {
            Ok(handle) => { out.write(handle); SUCCESS }
            Err(code) => code,
        }
    });
    ncclCommDeregister(comm: u64, handle: u64) on("ncclCommDeregister", comm, |member, is_hung| {
        window::deregister_buffer(member, handle)
    });
    ncclCommWindowRegister(comm: u64, base: u64, size: usize, out: *mut u64, flags: c_int)
        on("ncclCommWindowRegister", comm, |member, is_hung| {
            match window::register(member, base, size as u64, out, flags) {
                Ok(Some((step, round))) => {
                    group::submit(Arc::clone(member), Action::Step(step, (!is_hung).then_some(round)))
                }
                Ok(None) => SUCCESS,
                Err(code) => code,
            }
        });
    ncclCommWindowDeregister(comm: u64, window: u64) on("ncclCommWindowDeregister", comm, |member, is_hung| {
        window::deregister(member, window)
    });

    ncclAllReduce(send: u64, receive: u64, count: usize, data_type: c_int, op: c_int, comm: u64, stream: u64)
        collective("ncclAllReduce", comm, stream, Signature { kind: Kind::AllReduce, count, data_type, op, root: 0 }, send, receive);
    ncclAllGather(send: u64, receive: u64, count: usize, data_type: c_int, comm: u64, stream: u64)
        collective("ncclAllGather", comm, stream, Signature { kind: Kind::AllGather, count, data_type, op: 0, root: 0 }, send, receive);
    ncclReduceScatter(send: u64, receive: u64, count: usize, data_type: c_int, op: c_int, comm: u64, stream: u64)
        collective("ncclReduceScatter", comm, stream, Signature { kind: Kind::ReduceScatter, count, data_type, op, root: 0 }, send, receive);
    ncclBroadcast(send: u64, receive: u64, count: usize, data_type: c_int, root: c_int, comm: u64, stream: u64)
        collective("ncclBroadcast", comm, stream, Signature { kind: Kind::Broadcast, count, data_type, op: 0, root }, send, receive);
    ncclBcast(buffer: u64, count: usize, data_type: c_int, root: c_int, comm: u64, stream: u64)
        collective("ncclBcast", comm, stream, Signature { kind: Kind::Broadcast, count, data_type, op: 0, root }, buffer, buffer);
    ncclReduce(send: u64, receive: u64, count: usize, data_type: c_int, op: c_int, root: c_int, comm: u64, stream: u64)
        collective("ncclReduce", comm, stream, Signature { kind: Kind::Reduce, count, data_type, op, root }, send, receive);
    ncclAlltoAll(send: u64, receive: u64, count: usize, data_type: c_int, comm: u64, stream: u64)
        collective("ncclAlltoAll", comm, stream, Signature { kind: Kind::AllToAll, count, data_type, op: 0, root: 0 }, send, receive);
    ncclGather(send: u64, receive: u64, count: usize, data_type: c_int, root: c_int, comm: u64, stream: u64)
        collective("ncclGather", comm, stream, Signature { kind: Kind::Gather, count, data_type, op: 0, root }, send, receive);
    ncclScatter(send: u64, receive: u64, count: usize, data_type: c_int, root: c_int, comm: u64, stream: u64)
        collective("ncclScatter", comm, stream, Signature { kind: Kind::Scatter, count, data_type, op: 0, root }, send, receive);
    ncclSend(send: u64, count: usize, data_type: c_int, peer: c_int, comm: u64, stream: u64)
        transfer("ncclSend", send, count, data_type, peer, comm, stream);
    ncclRecv(receive: u64, count: usize, data_type: c_int, peer: c_int, comm: u64, stream: u64)
        transfer("ncclRecv", receive, count, data_type, peer, comm, stream);

    ncclGroupStart() plain("ncclGroupStart", group::start);
    ncclGroupEnd() plain("ncclGroupEnd", group::end);
}

/// See nccl.h.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    text(code).as_ptr()
}

/// See nccl.h.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_comm: *mut c_void) -> *const c_char {
    LAST_ERROR.load(Ordering::Relaxed)
}
