//! The NCCL calls of this crate, with one function per call. All unsafe NCCL code is here.
//!
//! cudarc's bindings resolve a symbol on its first call and panic if it is missing, and their enums cannot represent newer codes. This
//! crate therefore has its own table: every symbol is resolved when the library is opened, calls newer than the oldest supported version
//! are optional, and codes are plain integers.
//!
//! # Contract
//! The functions are safe to call within this crate because the rest of the crate upholds these rules:
//! - **C1** A [`CommHandle`] comes from NCCL, or from the owner of a borrowed communicator, and is available only while the communicator is
//!   live: `communicator/shared.rs` clears it before [`destroy`](Calls::destroy) and [`abort`](Calls::abort).
//! - **C2** One thread at a time calls NCCL with a communicator: the one that holds its call lock, or the one that ends it. Only
//!   [`revoke`](Calls::revoke) may run concurrently, as NCCL allows.
//! - **C3** A [`NewHandle`] is kept alive until no operation can write to it.
//! - **C4** The memory of an [`Operation`] belongs to the communicator's device, is long enough, and is not accessed by other work until
//!   the operation's stream has completed the operation: `communicator/submission.rs` creates operations from borrowed buffers, and a
//!   caller that passes raw addresses guarantees the same. The operation's stream is live and belongs to the device.
//! - **C5** A window or registration is released once, on the communicator that made it.

use crate::ffi::error::{IN_PROGRESS, LoadError, NcclError};
use crate::ffi::handles::{CommHandle, NewHandle, RegistrationHandle, WindowHandle};
use crate::ffi::operation::{NcclCall, Operation};
use crate::ffi::version::{Capability, NcclVersion};
use crate::ffi::window_flags::WindowFlags;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// `ncclSuccess`.
const SUCCESS: c_int = 0;
/// Value that a rank of the old communicator passes to `ncclCommGrow` as its rank, in order to keep its number.
const GROW_KEEPS_RANK: c_int = -1;
/// `NCCL_SHRINK_DEFAULT`: the parent has no work in progress.
const SHRINK_DEFAULT: c_int = 0;
/// Required alignment of a window's base address (`NCCL_WIN_REQUIRED_ALIGNMENT`), in bytes.
pub const WINDOW_ALIGNMENT: u64 = 4096;
/// `NCCL_SUSPEND_MEM`.
const SUSPEND_MEMORY: c_int = 1;
/// `NCCL_SPLIT_NOCOLOR`.
pub(crate) const NO_COLOR: c_int = -1;

/// `ncclCommMemStat_t`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MemoryStat {
    /// Bytes that a suspension releases.
    Suspendable = 0,
    /// Bytes that a suspension does not release.
    Persistent = 2,
}

/// The progress of an accepted call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallProgress {
    /// The host has nothing left to do.
    Done,
    /// An NCCL thread is working on the call: poll `ncclCommGetAsyncError` until it is done.
    Underway,
}

/// The result of a call.
pub(crate) type Outcome = Result<CallProgress, NcclError>;

/// Storage for an id that a call on another thread creates.
pub(crate) type GrowId = OnceLock<[u8; 128]>;

type Comm = *mut c_void;
type Stream = *mut c_void;
type Send = *const c_void;
type Receive = *mut c_void;

macro_rules! nccl_calls {
    (
        required { $($name:ident = $symbol:ident ($($type:ty),*);)* }
        optional { $($o_name:ident = $o_symbol:ident ($($o_type:ty),*);)* }
    ) => {
        /// libnccl with every call resolved.
        pub(crate) struct Calls {
            $($name: unsafe extern "C" fn($($type),*) -> c_int,)*
            $($o_name: Option<unsafe extern "C" fn($($o_type),*) -> c_int>,)*
            last_error: Option<unsafe extern "C" fn(Comm) -> *const c_char>,
        }

        impl Calls {
            /// Resolves all calls without calling any of them.
            ///
            /// # Errors
            /// Returns an error that names the first required call that is missing.
            pub(crate) fn resolve(library: &libloading::Library, path: &str) -> Result<Self, LoadError> {
                let missing = |symbol| move |_| LoadError::SymbolMissing { path: path.to_owned(), symbol };
                Ok(Calls {
                    $($name: {
                        // SAFETY: the type is the symbol's signature in nccl.h with integers for enums, and the library
                        // stays open for the life of the process.
                        let found = unsafe { library.get::<unsafe extern "C" fn($($type),*) -> c_int>(stringify!($symbol)) };
                        *found.map_err(missing(stringify!($symbol)))?
                    },)*
                    $($o_name: {
                        // SAFETY: as above.
                        let found = unsafe { library.get::<unsafe extern "C" fn($($o_type),*) -> c_int>(stringify!($o_symbol)) };
                        found.ok().map(|call| *call)
                    },)*
                    last_error: {
                        // SAFETY: as above.
                        let found = unsafe { library.get::<unsafe extern "C" fn(Comm) -> *const c_char>("ncclGetLastError") };
                        found.ok().map(|call| *call)
                    },
                })
            }
        }
    };
}

nccl_calls! {
    required {
        get_unique_id = ncclGetUniqueId(*mut RawUniqueId);
        init = ncclCommInitRankConfig(*mut Comm, c_int, RawUniqueId, c_int, *mut RawConfig);
        finalize = ncclCommFinalize(Comm);
        destroy = ncclCommDestroy(Comm);
        abort = ncclCommAbort(Comm);
        split = ncclCommSplit(Comm, c_int, c_int, *mut Comm, *mut RawConfig);
        async_error = ncclCommGetAsyncError(Comm, *mut c_int);
        count = ncclCommCount(Comm, *mut c_int);
        user_rank = ncclCommUserRank(Comm, *mut c_int);
        cu_device = ncclCommCuDevice(Comm, *mut c_int);
        group_start = ncclGroupStart();
        group_end = ncclGroupEnd();
        all_reduce = ncclAllReduce(Send, Receive, usize, c_int, c_int, Comm, Stream);
        all_gather = ncclAllGather(Send, Receive, usize, c_int, Comm, Stream);
        reduce_scatter = ncclReduceScatter(Send, Receive, usize, c_int, c_int, Comm, Stream);
        broadcast = ncclBroadcast(Send, Receive, usize, c_int, c_int, Comm, Stream);
        reduce = ncclReduce(Send, Receive, usize, c_int, c_int, c_int, Comm, Stream);
        send = ncclSend(Send, usize, c_int, c_int, Comm, Stream);
        receive = ncclRecv(Receive, usize, c_int, c_int, Comm, Stream);
    }
    optional {
        buffer_register = ncclCommRegister(Comm, *mut c_void, usize, *mut *mut c_void);
        buffer_deregister = ncclCommDeregister(Comm, *mut c_void);
        window_register = ncclCommWindowRegister(Comm, *mut c_void, usize, *mut *mut c_void, c_int);
        window_deregister = ncclCommWindowDeregister(Comm, *mut c_void);
        revoke = ncclCommRevoke(Comm, c_int);
        suspend = ncclCommSuspend(Comm, c_int);
        resume = ncclCommResume(Comm);
        memory_stat = ncclCommMemStats(Comm, c_int, *mut u64);
        shrink = ncclCommShrink(Comm, *mut c_int, c_int, *mut Comm, *mut RawConfig, c_int);
        grow_id = ncclCommGetUniqueId(Comm, *mut RawUniqueId);
        grow = ncclCommGrow(Comm, c_int, *const RawUniqueId, c_int, *mut Comm, *mut RawConfig);
    }
}

impl Calls {
    /// Returns the library's version. Does not require the other calls.
    pub(crate) fn version(library: &libloading::Library, path: &str) -> Result<NcclVersion, LoadError> {
        let symbol = "ncclGetVersion";
        // SAFETY: the type is the symbol's signature in nccl.h with integers for enums.
        let call = unsafe { library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(symbol) };
        let call = call.map_err(|_| LoadError::SymbolMissing { path: path.to_owned(), symbol })?;
        let mut code = 0;
        // SAFETY: `code` is valid for writing.
        let answer = unsafe { call(&raw mut code) };
        match u32::try_from(code) {
            Ok(code) if answer == SUCCESS => Ok(NcclVersion::from_code(code)),
            _ => Err(LoadError::NoVersion { path: path.to_owned(), code: answer }),
        }
    }

    /// Returns `true` if the library has the calls of this capability.
    pub(crate) fn has(&self, capability: Capability) -> bool {
        match capability {
            Capability::BufferRegistration => self.buffer_register.is_some() && self.buffer_deregister.is_some(),
            Capability::Windows => self.window_register.is_some() && self.window_deregister.is_some(),
            Capability::Revoke => self.revoke.is_some(),
            Capability::Suspension => self.suspend.is_some() && self.resume.is_some() && self.memory_stat.is_some(),
            Capability::Shrink => self.shrink.is_some(),
            Capability::Grow => self.grow_id.is_some() && self.grow.is_some(),
            Capability::WindowRefusal
            | Capability::RegistrationInCapture
            | Capability::StrictOrderingWindows
            | Capability::NetworkOnlyWindows => true,
        }
    }

    /// Calls `ncclGetUniqueId`.
    pub(crate) fn unique_id(&self) -> Result<[u8; 128], NcclError> {
        let mut raw = RawUniqueId { internal: [0; 128] };
        // SAFETY: `raw` is valid for writing.
        self.outcome("ncclGetUniqueId", unsafe { (self.get_unique_id)(&raw mut raw) })?;
        Ok(raw.internal)
    }

    /// Creates a named communicator in the current context (`ncclCommInitRankConfig`).
    pub(crate) fn init(&self, new: &NewHandle, ranks: c_int, id: [u8; 128], rank: c_int, blocking: bool) -> Outcome {
        let (mut config, id) = (RawConfig::new(blocking, new.name()), RawUniqueId { internal: id });
        // SAFETY: C3; the configuration is valid, and NCCL copies it.
        let code = unsafe { (self.init)(new.out(), ranks, id, rank, &raw mut config) };
        self.outcome("ncclCommInitRankConfig", code)
    }

    /// Calls `ncclCommSplit`.
    pub(crate) fn split(&self, comm: CommHandle, color: c_int, key: c_int, new: &NewHandle, blocking: bool) -> Outcome {
        let mut config = RawConfig::new(blocking, new.name());
        // SAFETY: C1, C2, C3; the configuration is valid, and NCCL copies it.
        let code = unsafe { (self.split)(comm.as_ptr(), color, key, new.out(), &raw mut config) };
        self.outcome("ncclCommSplit", code)
    }

    /// Creates a communicator without the excluded ranks, which do not take part (`ncclCommShrink`). The parent must be idle.
    pub(crate) fn shrink(
        &self,
        comm: CommHandle,
        mut excluded: Vec<c_int>,
        new: &NewHandle,
        blocking: bool,
    ) -> Outcome {
        let mut config = RawConfig::new(blocking, new.name());
        let count = excluded.len() as c_int;
        // SAFETY: C1, C2, C3; the configuration and the list are valid, and NCCL copies both.
        let call = |call: unsafe extern "C" fn(_, _, _, _, _, _) -> _| unsafe {
            call(comm.as_ptr(), excluded.as_mut_ptr(), count, new.out(), &raw mut config, SHRINK_DEFAULT)
        };
        self.optional("ncclCommShrink", self.shrink.map(call))
    }

    /// Creates the id with which ranks join a grown communicator (`ncclCommGetUniqueId`). Writes it to `id`.
    pub(crate) fn grow_id(&self, comm: CommHandle, id: &GrowId) -> Outcome {
        let mut raw = RawUniqueId { internal: [0; 128] };
        // SAFETY: C1, C2; `raw` is valid for writing.
        let call = |call: unsafe extern "C" fn(_, _) -> _| unsafe { call(comm.as_ptr(), &raw mut raw) };
        let outcome = self.optional("ncclCommGetUniqueId", self.grow_id.map(call))?;
        let _first = id.set(raw.internal);
        Ok(outcome)
    }

    /// Creates a communicator with more ranks, on a rank of the old one (`ncclCommGrow`). Only the rank that created the id passes it.
    pub(crate) fn grow(
        &self,
        comm: CommHandle,
        ranks: c_int,
        id: Option<[u8; 128]>,
        new: &NewHandle,
        blocking: bool,
    ) -> Outcome {
        self.grow_call(comm, ranks, id, GROW_KEEPS_RANK, new, blocking)
    }

    /// Joins a communicator that grows, on a new rank (`ncclCommGrow`).
    pub(crate) fn join(&self, new: &NewHandle, ranks: c_int, id: [u8; 128], rank: c_int, blocking: bool) -> Outcome {
        self.grow_call(CommHandle::NULL, ranks, Some(id), rank, new, blocking)
    }

    fn grow_call(
        &self,
        comm: CommHandle,
        ranks: c_int,
        id: Option<[u8; 128]>,
        rank: c_int,
        new: &NewHandle,
        blocking: bool,
    ) -> Outcome {
        let mut config = RawConfig::new(blocking, new.name());
        let id = id.map(|internal| RawUniqueId { internal });
        let id = id.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: C1, C2, C3; the configuration and the id are valid, and NCCL copies both.
        let call = |call: unsafe extern "C" fn(_, _, _, _, _, _) -> _| unsafe {
            call(comm.as_ptr(), ranks, id, rank, new.out(), &raw mut config)
        };
        self.optional("ncclCommGrow", self.grow.map(call))
    }

    /// Calls `ncclCommFinalize`. Afterwards the communicator may only be polled and destroyed.
    pub(crate) fn finalize(&self, comm: CommHandle) -> Outcome {
        // SAFETY: C1, C2.
        self.outcome("ncclCommFinalize", unsafe { (self.finalize)(comm.as_ptr()) })
    }

    /// Calls `ncclCommDestroy`. Invalidates the handle.
    pub(crate) fn destroy(&self, comm: CommHandle) -> Outcome {
        // SAFETY: C1, C2.
        self.outcome("ncclCommDestroy", unsafe { (self.destroy)(comm.as_ptr()) })
    }

    /// Calls `ncclCommAbort`. Invalidates the handle. NCCL joins its own threads.
    pub(crate) fn abort(&self, comm: CommHandle) -> Outcome {
        // SAFETY: C1, C2.
        self.outcome("ncclCommAbort", unsafe { (self.abort)(comm.as_ptr()) })
    }

    /// Stops operations in flight, including those that another thread waits for inside a call (`ncclCommRevoke`).
    pub(crate) fn revoke(&self, comm: CommHandle) -> Outcome {
        // SAFETY: C1, C2.
        self.optional("ncclCommRevoke", self.revoke.map(|call| unsafe { call(comm.as_ptr(), 0) }))
    }

    /// Returns the result of the communicator's NCCL threads, or `Ok(Underway)` while one is working (`ncclCommGetAsyncError`). Attributes
    /// an error to `call`.
    pub(crate) fn poll(&self, call: &'static str, comm: CommHandle) -> Outcome {
        let code = self.number(comm, "ncclCommGetAsyncError", self.async_error)?;
        self.outcome(call, code)
    }

    /// Returns this rank's number and the number of ranks (`ncclCommUserRank`, `ncclCommCount`).
    pub(crate) fn rank_of_ranks(&self, comm: CommHandle) -> Result<(u32, u32), NcclError> {
        let rank = self.number(comm, "ncclCommUserRank", self.user_rank)?;
        Ok((rank as u32, self.number(comm, "ncclCommCount", self.count)? as u32))
    }

    /// Returns the ordinal of the communicator's device (`ncclCommCuDevice`).
    pub(crate) fn device_of(&self, comm: CommHandle) -> Result<c_int, NcclError> {
        self.number(comm, "ncclCommCuDevice", self.cu_device)
    }

    /// Registers a window together with all other ranks (`ncclCommWindowRegister`). NCCL validates the memory.
    pub(crate) fn register_window(
        &self,
        comm: CommHandle,
        (base, size_bytes): (u64, u64),
        flags: WindowFlags,
        new: &NewHandle,
    ) -> Outcome {
        let (base, size) = (base as *mut c_void, size_bytes as usize);
        // SAFETY: C1, C2, C3.
        let call = |call: unsafe extern "C" fn(_, _, _, _, _) -> _| unsafe {
            call(comm.as_ptr(), base, size, new.out(), flags.raw())
        };
        self.optional("ncclCommWindowRegister", self.window_register.map(call))
    }

    /// Calls `ncclCommWindowDeregister`.
    pub(crate) fn deregister_window(&self, comm: CommHandle, window: WindowHandle) -> Outcome {
        // SAFETY: C1, C2, C5.
        let call = |call: unsafe extern "C" fn(_, _) -> _| unsafe { call(comm.as_ptr(), window.as_ptr()) };
        self.optional("ncclCommWindowDeregister", self.window_deregister.map(call))
    }

    /// Calls `ncclCommRegister`. NCCL records the range and inspects the memory when a collective uses it.
    pub(crate) fn register_buffer(&self, comm: CommHandle, base: u64, size_bytes: u64, new: &NewHandle) -> Outcome {
        let (base, size) = (base as *mut c_void, size_bytes as usize);
        // SAFETY: C1, C2, C3.
        let call = |call: unsafe extern "C" fn(_, _, _, _) -> _| unsafe { call(comm.as_ptr(), base, size, new.out()) };
        self.optional("ncclCommRegister", self.buffer_register.map(call))
    }

    /// Calls `ncclCommDeregister`.
    pub(crate) fn deregister_buffer(&self, comm: CommHandle, buffer: RegistrationHandle) -> Outcome {
        // SAFETY: C1, C2, C5.
        let call = |call: unsafe extern "C" fn(_, _) -> _| unsafe { call(comm.as_ptr(), buffer.as_ptr()) };
        self.optional("ncclCommDeregister", self.buffer_deregister.map(call))
    }

    /// Releases the communicator's memory together with all other ranks (`ncclCommSuspend`).
    pub(crate) fn suspend(&self, comm: CommHandle) -> Outcome {
        // SAFETY: C1, C2.
        self.optional("ncclCommSuspend", self.suspend.map(|call| unsafe { call(comm.as_ptr(), SUSPEND_MEMORY) }))
    }

    /// Restores the communicator's memory together with all other ranks (`ncclCommResume`).
    pub(crate) fn resume(&self, comm: CommHandle) -> Outcome {
        // SAFETY: C1, C2.
        self.optional("ncclCommResume", self.resume.map(|call| unsafe { call(comm.as_ptr()) }))
    }

    /// Returns a statistic of the communicator's memory, or 0 if the library lacks the call (`ncclCommMemStats`).
    pub(crate) fn memory_stat(&self, comm: CommHandle, stat: MemoryStat) -> Result<u64, NcclError> {
        let mut value = 0;
        // SAFETY: C1, C2; `value` is valid for writing.
        let call =
            |call: unsafe extern "C" fn(_, _, _) -> _| unsafe { call(comm.as_ptr(), stat as c_int, &raw mut value) };
        self.optional("ncclCommMemStats", self.memory_stat.map(call))?;
        Ok(value)
    }

    /// Submits collectives to NCCL: a single one directly, several as a group.
    pub(crate) fn issue(&self, operations: &[(CommHandle, Operation)]) -> Outcome {
        if let [(comm, operation)] = operations {
            return self.issue_one(*comm, operation);
        }
        // SAFETY: the call has no arguments.
        self.outcome("ncclGroupStart", unsafe { (self.group_start)() })?;
        let issued =
            operations.iter().try_fold(CallProgress::Done, |_, (comm, operation)| self.issue_one(*comm, operation));
        // The group must be ended on this thread even after an error; NCCL then discards its contents.
        // SAFETY: the call has no arguments.
        let ended = self.outcome("ncclGroupEnd", unsafe { (self.group_end)() });
        issued.and(ended)
    }

    fn issue_one(&self, comm: CommHandle, operation: &Operation) -> Outcome {
        let (from, to) = (operation.send as Send, operation.receive as Receive);
        let (count, data_type) = (operation.count, operation.data_type.raw());
        let (comm, stream) = (comm.as_ptr(), operation.stream.as_ptr());
        // SAFETY: C1, C2, C4, for every call below.
        let code = unsafe {
            match operation.call {
                NcclCall::AllReduce { op } => (self.all_reduce)(from, to, count, data_type, op.raw(), comm, stream),
                NcclCall::AllGather => (self.all_gather)(from, to, count, data_type, comm, stream),
                NcclCall::ReduceScatter { op } => {
                    (self.reduce_scatter)(from, to, count, data_type, op.raw(), comm, stream)
                }
                NcclCall::Broadcast { root } => {
                    (self.broadcast)(from, to, count, data_type, root as c_int, comm, stream)
                }
                NcclCall::Reduce { op, root } => {
                    (self.reduce)(from, to, count, data_type, op.raw(), root as c_int, comm, stream)
                }
                NcclCall::Send { peer } => (self.send)(from, count, data_type, peer as c_int, comm, stream),
                NcclCall::Receive { peer } => (self.receive)(to, count, data_type, peer as c_int, comm, stream),
            }
        };
        self.outcome(operation.call.symbol(), code)
    }

    /// Calls a function that returns an integer property of a communicator.
    fn number(
        &self,
        comm: CommHandle,
        symbol: &'static str,
        call: unsafe extern "C" fn(Comm, *mut c_int) -> c_int,
    ) -> Result<c_int, NcclError> {
        let mut number = 0;
        // SAFETY: C1, C2; `number` is valid for writing.
        self.outcome(symbol, unsafe { call(comm.as_ptr(), &raw mut number) })?;
        Ok(number)
    }

    /// Returns the result of an optional call, which has no effect in libraries that lack it.
    fn optional(&self, call: &'static str, code: Option<c_int>) -> Outcome {
        code.map_or(Ok(CallProgress::Done), |code| self.outcome(call, code))
    }

    fn outcome(&self, call: &'static str, code: c_int) -> Outcome {
        match code {
            SUCCESS => Ok(CallProgress::Done),
            IN_PROGRESS => Ok(CallProgress::Underway),
            code => Err(NcclError { call, code, detail: self.last_error_text() }),
        }
    }

    fn last_error_text(&self) -> Option<Box<str>> {
        // SAFETY: NCCL documents that the argument is unused and may be null.
        let text = unsafe { self.last_error?(std::ptr::null_mut()) };
        if text.is_null() {
            return None;
        }
        // SAFETY: a C string that lives as long as the library; NCCL overwrites it in place and keeps it terminated.
        let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
        let text = text.trim();
        (!text.is_empty()).then(|| text.into())
    }
}

/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: c_int = c_int::MIN;

/// `ncclUniqueId`, which is passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct RawUniqueId {
    pub(super) internal: [u8; 128],
}

/// `ncclConfig_t` as of NCCL 2.27.
///
/// NCCL only ever appends fields. A library copies the first `size` bytes, or its own struct if that is smaller, and uses defaults for
/// fields that `version` does not have. This layout therefore works with 2.18, which reads it up to `split_share`, and with all later
/// versions, which treat the missing fields as unset.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct RawConfig {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
    comm_name: *const c_char,
    collnet_enable: c_int,
    cta_policy: c_int,
    shrink_share: c_int,
    nvls_ctas: c_int,
}

impl RawConfig {
    /// Sets only the blocking flag and the name.
    ///
    /// NCCL keeps the pointer to the name, which must live as long as the communicator.
    pub(super) fn new(blocking: bool, comm_name: Option<&CStr>) -> Self {
        RawConfig {
            size: size_of::<RawConfig>(),
            magic: 0xcafe_beef,
            version: 22_700,
            blocking: c_int::from(blocking),
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
            comm_name: comm_name.map_or(std::ptr::null(), CStr::as_ptr),
            collnet_enable: UNDEFINED,
            cta_policy: UNDEFINED,
            shrink_share: UNDEFINED,
            nvls_ctas: UNDEFINED,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn the_configuration_is_laid_out_as_in_nccl_h() {
        // From nccl.h of 2.27.3, on a 64-bit machine; 2.18 ends before traffic_class.
        assert_eq!(offset_of!(RawConfig, size), 0);
        assert_eq!(offset_of!(RawConfig, magic), 8);
        assert_eq!(offset_of!(RawConfig, version), 12);
        assert_eq!(offset_of!(RawConfig, blocking), 16);
        assert_eq!(offset_of!(RawConfig, cga_cluster_size), 20);
        assert_eq!(offset_of!(RawConfig, min_ctas), 24);
        assert_eq!(offset_of!(RawConfig, max_ctas), 28);
        assert_eq!(offset_of!(RawConfig, net_name), 32);
        assert_eq!(offset_of!(RawConfig, split_share), 40);
        assert_eq!(offset_of!(RawConfig, traffic_class), 44);
        assert_eq!(offset_of!(RawConfig, comm_name), 48);
        assert_eq!(offset_of!(RawConfig, collnet_enable), 56);
        assert_eq!(offset_of!(RawConfig, cta_policy), 60);
        assert_eq!(offset_of!(RawConfig, shrink_share), 64);
        assert_eq!(offset_of!(RawConfig, nvls_ctas), 68);
        assert_eq!(size_of::<RawConfig>(), 72);
        assert_eq!((size_of::<RawUniqueId>(), align_of::<RawUniqueId>()), (128, 1));
    }

    #[test]
    fn a_configuration_sets_only_the_mode_and_the_name() {
        let config = RawConfig::new(false, None);
        assert_eq!((config.size, config.magic, config.version), (72, 0xcafe_beef, 22_700));
        assert_eq!(config.blocking, 0);
        assert!(config.net_name.is_null() && config.comm_name.is_null());
        let unset = [
            config.cga_cluster_size,
            config.min_ctas,
            config.max_ctas,
            config.split_share,
            config.traffic_class,
            config.collnet_enable,
            config.cta_policy,
            config.shrink_share,
            config.nvls_ctas,
        ];
        assert_eq!(unset, [c_int::MIN; 9]);
    }
}
