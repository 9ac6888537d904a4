//! The NCCL calls of this crate, resolved once, and what goes in and out of them.
//!
//! cudarc's bindings resolve a symbol when it is first called and panic when it is not there, and their enums have no value
//! for a code that is newer than they are. So this crate has a table of its own: every symbol is looked up when the library
//! is opened, calls that came after the oldest supported version are optional, and codes are plain integers.

use crate::error::{LoadError, NcclError};
use crate::library::NcclVersion;
use cudarc::driver::sys::CUstream;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// `ncclComm_t`.
pub(crate) type RawComm = *mut c_void;
/// `ncclWindow_t`.
pub(crate) type RawWindow = *mut c_void;
/// What `ncclCommRegister` gives.
pub(crate) type RawRegistration = *mut c_void;

/// `ncclSuccess`.
pub(crate) const SUCCESS: c_int = 0;
/// `ncclInProgress`.
pub(crate) const IN_PROGRESS: c_int = 7;
/// `NCCL_WIN_COLL_SYMMETRIC`.
pub(crate) const WINDOW_SYMMETRIC: c_int = 1;
/// `NCCL_SPLIT_NOCOLOR`.
pub(crate) const NO_COLOR: c_int = -1;
/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: c_int = c_int::MIN;

/// Whether a call that was accepted is through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Nothing is left to do on the host.
    Done,
    /// A thread of NCCL's works on it: ask `ncclCommGetAsyncError` until it does not.
    Underway,
}

/// `ncclUniqueId`, which is passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct RawUniqueId {
    pub(crate) internal: [u8; 128],
}

/// `ncclConfig_t` as of NCCL 2.27.
///
/// The struct only ever grew at its end. A library copies `size` bytes, but no more than its own struct has, and fills in
/// defaults for fields that `version` did not have. So this one layout serves 2.18, which reads it up to `split_share`, and
/// everything newer, which takes what it lacks as not set.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct RawConfig {
    size: usize,
    magic: c_uint,
    version: c_uint,
    pub(crate) blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
    pub(crate) comm_name: *const c_char,
    collnet_enable: c_int,
    cta_policy: c_int,
    shrink_share: c_int,
    nvls_ctas: c_int,
}

impl RawConfig {
    /// Nothing set but whether calls block, and the name.
    ///
    /// NCCL keeps the pointer to the name: it must live as long as the communicator.
    pub(crate) fn new(blocking: bool, comm_name: *const c_char) -> Self {
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
            comm_name,
            collnet_enable: UNDEFINED,
            cta_policy: UNDEFINED,
            shrink_share: UNDEFINED,
            nvls_ctas: UNDEFINED,
        }
    }
}

macro_rules! nccl_calls {
    (
        required { $($name:ident = $symbol:ident ($($arg:ident: $type:ty),*);)* }
        optional { $($o_name:ident = $o_symbol:ident ($($o_arg:ident: $o_type:ty),*);)* }
    ) => {
        /// libnccl, with every call resolved.
        pub(crate) struct Calls {
            $($name: unsafe extern "C" fn($($type),*) -> c_int,)*
            $(pub(crate) $o_name: Option<unsafe extern "C" fn($($o_type),*) -> c_int>,)*
            last_error: Option<unsafe extern "C" fn(RawComm) -> *const c_char>,
        }

        impl Calls {
            /// Looks all calls up. Nothing is called.
            ///
            /// # Errors
            /// Names the first required call that is missing.
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
                        let found = unsafe { library.get::<unsafe extern "C" fn(RawComm) -> *const c_char>("ncclGetLastError") };
                        found.ok().map(|call| *call)
                    },
                })
            }

            $(
                /// The call's code, which may be [`IN_PROGRESS`].
                ///
                /// # Safety
                /// As the call of this name in nccl.h: handles live, pointers valid, one thread at a time per communicator.
                #[allow(clippy::too_many_arguments, reason = "NCCL's signature")]
                pub(crate) unsafe fn $name(&self, $($arg: $type),*) -> Result<Progress, NcclError> {
                    // SAFETY: the caller's contract.
                    let code = unsafe { (self.$name)($($arg),*) };
                    self.outcome(stringify!($symbol), code)
                }
            )*
            $(
                /// The call's code, which may be [`IN_PROGRESS`]; `None` where the library has no such call.
                ///
                /// # Safety
                /// As the call of this name in nccl.h: handles live, pointers valid, one thread at a time per communicator.
                pub(crate) unsafe fn $o_name(&self, $($o_arg: $o_type),*) -> Option<Result<Progress, NcclError>> {
                    let call = self.$o_name?;
                    // SAFETY: the caller's contract.
                    let code = unsafe { call($($o_arg),*) };
                    Some(self.outcome(stringify!($o_symbol), code))
                }
            )*
        }
    };
}

nccl_calls! {
    required {
        get_unique_id = ncclGetUniqueId(id: *mut RawUniqueId);
        init = ncclCommInitRankConfig(comm: *mut RawComm, ranks: c_int, id: RawUniqueId, rank: c_int, config: *mut RawConfig);
        finalize = ncclCommFinalize(comm: RawComm);
        destroy = ncclCommDestroy(comm: RawComm);
        abort = ncclCommAbort(comm: RawComm);
        split = ncclCommSplit(comm: RawComm, color: c_int, key: c_int, new: *mut RawComm, config: *mut RawConfig);
        async_error = ncclCommGetAsyncError(comm: RawComm, code: *mut c_int);
        count = ncclCommCount(comm: RawComm, ranks: *mut c_int);
        user_rank = ncclCommUserRank(comm: RawComm, rank: *mut c_int);
        cu_device = ncclCommCuDevice(comm: RawComm, device: *mut c_int);
        group_start = ncclGroupStart();
        group_end = ncclGroupEnd();
        all_reduce = ncclAllReduce(send: *const c_void, receive: *mut c_void, count: usize, data_type: c_int, op: c_int, comm: RawComm, stream: CUstream);
        all_gather = ncclAllGather(send: *const c_void, receive: *mut c_void, count: usize, data_type: c_int, comm: RawComm, stream: CUstream);
        reduce_scatter = ncclReduceScatter(send: *const c_void, receive: *mut c_void, count: usize, data_type: c_int, op: c_int, comm: RawComm, stream: CUstream);
        broadcast = ncclBroadcast(send: *const c_void, receive: *mut c_void, count: usize, data_type: c_int, root: c_int, comm: RawComm, stream: CUstream);
        reduce = ncclReduce(send: *const c_void, receive: *mut c_void, count: usize, data_type: c_int, op: c_int, root: c_int, comm: RawComm, stream: CUstream);
        send = ncclSend(send: *const c_void, count: usize, data_type: c_int, peer: c_int, comm: RawComm, stream: CUstream);
        receive = ncclRecv(receive: *mut c_void, count: usize, data_type: c_int, peer: c_int, comm: RawComm, stream: CUstream);
    }
    optional {
        buffer_register = ncclCommRegister(comm: RawComm, base: *mut c_void, size: usize, registration: *mut RawRegistration);
        buffer_deregister = ncclCommDeregister(comm: RawComm, registration: RawRegistration);
        window_register = ncclCommWindowRegister(comm: RawComm, base: *mut c_void, size: usize, window: *mut RawWindow, flags: c_int);
        window_deregister = ncclCommWindowDeregister(comm: RawComm, window: RawWindow);
        revoke = ncclCommRevoke(comm: RawComm, flags: c_int);
    }
}

impl Calls {
    /// The library's version, before anything else is asked of it.
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

    fn outcome(&self, call: &'static str, code: c_int) -> Result<Progress, NcclError> {
        match code {
            SUCCESS => Ok(Progress::Done),
            IN_PROGRESS => Ok(Progress::Underway),
            code => Err(self.error(call, code)),
        }
    }

    /// An error with what NCCL has to say about it.
    pub(crate) fn error(&self, call: &'static str, code: c_int) -> NcclError {
        NcclError { call, code, detail: self.last_error_text() }
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

    /// What the communicator's threads have come to: `Ok(Underway)` while one works.
    ///
    /// # Safety
    /// The communicator lives.
    pub(crate) unsafe fn poll(&self, call: &'static str, comm: RawComm) -> Result<Progress, NcclError> {
        let mut code = SUCCESS;
        // SAFETY: the caller's contract; `code` is valid for writing.
        unsafe { self.async_error(comm, &raw mut code) }?;
        self.outcome(call, code)
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
    fn a_configuration_sets_nothing_but_what_it_is_told() {
        let config = RawConfig::new(false, std::ptr::null());
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
