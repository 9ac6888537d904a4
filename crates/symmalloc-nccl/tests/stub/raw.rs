//! Raw NCCL calls for tests of the stub itself, and a rank that makes them on a separate thread.

use cudarc::driver::{CudaContext, CudaStream};
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use stub_process::Barrier;

/// `ncclUniqueId`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct UniqueId(pub(crate) [u8; 128]);

/// `ncclConfig_t` of 2.18.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    rest: [c_int; 3],
    net_name: usize,
    split_share: c_int,
}

/// `ncclFloat32`.
pub(crate) const F32: c_int = 7;
/// `ncclSum`.
pub(crate) const SUM: c_int = 0;
pub(crate) const SUCCESS: c_int = 0;
pub(crate) const IN_PROGRESS: c_int = 7;
pub(crate) const MIB: usize = 1 << 20;

macro_rules! calls {
    ($($name:ident = $symbol:ident ($($arg:ident: $type:ty),*);)*) => {
        $(
            #[allow(clippy::too_many_arguments, reason = "NCCL's signature")]
            pub(crate) fn $name($($arg: $type),*) -> c_int {
                // SAFETY: the symbol has this type, and the arguments are valid unless the call must refuse them.
                unsafe {
                    let call: unsafe extern "C" fn($($type),*) -> c_int = symbol(concat!(stringify!($symbol), "\0"));
                    call($($arg),*)
                }
            }
        )*
    };
}

calls! {
    version = ncclGetVersion(version: *mut c_int);
    unique_id_into = ncclGetUniqueId(id: *mut UniqueId);
    memory_allocate = ncclMemAlloc(base: *mut u64, size: usize);
    memory_free = ncclMemFree(base: u64);
    init_config = ncclCommInitRankConfig(comm: *mut u64, ranks: c_int, id: UniqueId, rank: c_int, config: *mut c_void);
    destroy = ncclCommDestroy(comm: u64);
    abort = ncclCommAbort(comm: u64);
    split_into = ncclCommSplit(comm: u64, color: c_int, key: c_int, new: *mut u64, config: *mut c_void);
    async_error_into = ncclCommGetAsyncError(comm: u64, code: *mut c_int);
    buffer_register = ncclCommRegister(comm: u64, base: u64, size: usize, handle: *mut u64);
    buffer_deregister = ncclCommDeregister(comm: u64, handle: u64);
    window_register = ncclCommWindowRegister(comm: u64, base: u64, size: usize, window: *mut u64, flags: c_int);
    window_deregister = ncclCommWindowDeregister(comm: u64, window: u64);
    group_start = ncclGroupStart();
    group_end = ncclGroupEnd();
    all_reduce = ncclAllReduce(send: u64, receive: u64, count: usize, data_type: c_int, op: c_int, comm: u64, stream: u64);
    all_gather = ncclAllGather(send: u64, receive: u64, count: usize, data_type: c_int, comm: u64, stream: u64);
    revoke = ncclCommRevoke(comm: u64, flags: c_int);
    grow_id_into = ncclCommGetUniqueId(comm: u64, id: *mut UniqueId);
    grow_into = ncclCommGrow(comm: u64, ranks: c_int, id: *const UniqueId, rank: c_int, new: *mut u64, config: *mut c_void);
}

/// # Safety
/// `F` must be the type of the symbol, and `name` must end in a zero byte.
unsafe fn symbol<F: Copy>(name: &str) -> F {
    // SAFETY: both are C strings, and the library stays open.
    let found = unsafe {
        let library = libc::dlopen(c"libnccl.so.2".as_ptr(), libc::RTLD_NOW);
        libc::dlsym(library, name.as_ptr().cast())
    };
    assert!(!found.is_null(), "{name}");
    // SAFETY: the caller guarantees the type.
    unsafe { std::mem::transmute_copy(&found) }
}

pub(crate) fn unique_id() -> UniqueId {
    let mut id = UniqueId([0; 128]);
    assert_eq!(unique_id_into(&raw mut id), SUCCESS);
    id
}

pub(crate) fn init(ranks: usize, id: UniqueId, rank: usize, is_blocking: bool) -> (c_int, u64) {
    let mut config = Config {
        size: size_of::<Config>(),
        magic: 0xcafe_beef,
        version: 21_800,
        blocking: c_int::from(is_blocking),
        rest: [c_int::MIN; 3],
        net_name: 0,
        split_share: c_int::MIN,
    };
    let mut comm = 0;
    let code = init_config(&raw mut comm, ranks as c_int, id, rank as c_int, (&raw mut config).cast());
    (code, comm)
}

pub(crate) fn async_error(comm: u64) -> c_int {
    let mut code = 0;
    assert_eq!(async_error_into(comm, &raw mut code), SUCCESS);
    code
}

/// A rank with its stream and a communicator of all ranks.
pub(crate) struct Rank {
    pub(crate) rank: usize,
    pub(crate) comm: u64,
    pub(crate) stream: Arc<CudaStream>,
    barrier: Arc<Barrier>,
}

impl Rank {
    /// Joins as a rank, on the calling thread.
    pub(crate) fn join(ranks: usize, id: UniqueId, rank: usize, barrier: &Arc<Barrier>) -> Rank {
        let context = CudaContext::new(rank).expect("the stub should have a device");
        let stream = context.new_stream().expect("the driver should create a stream");
        let (code, comm) = init(ranks, id, rank, true);
        assert_eq!(code, SUCCESS, "rank {rank} joins");
        Rank { rank, comm, stream, barrier: Arc::clone(barrier) }
    }

    /// Waits at a barrier for the other threads.
    pub(crate) fn meet(&self) {
        self.barrier.wait();
    }

    pub(crate) fn raw_stream(&self) -> u64 {
        self.stream.cu_stream() as u64
    }

    /// Allocates a dedicated segment with NCCL.
    pub(crate) fn segment(&self, size: usize) -> u64 {
        let mut base = 0;
        assert_eq!(memory_allocate(&raw mut base, size), SUCCESS);
        base
    }

    /// Registers a window. Returns the result code and the handle.
    pub(crate) fn window(&self, base: u64, size: usize) -> (c_int, u64) {
        let mut window = 0;
        (window_register(self.comm, base, size, &raw mut window, 1), window)
    }

    /// Creates the id of a grow. Returns the result code and the id.
    pub(crate) fn grow_id(&self) -> (c_int, UniqueId) {
        let mut id = UniqueId([0; 128]);
        (grow_id_into(self.comm, &raw mut id), id)
    }

    pub(crate) fn write<T: Copy>(&self, address: u64, values: &[T]) {
        // SAFETY: the memory belongs to this rank, has this size, and is not in use.
        unsafe { cudarc::driver::result::memcpy_htod_async(address, values, self.stream.cu_stream()) }
            .expect("the copy should succeed");
        self.stream.synchronize().expect("the stream should complete");
    }

    pub(crate) fn read<T: Copy + Default>(&self, address: u64, count: usize) -> Vec<T> {
        let mut values = vec![T::default(); count];
        // SAFETY: the memory belongs to this rank and has this size.
        unsafe { cudarc::driver::result::memcpy_dtoh_async(&mut values, address, self.stream.cu_stream()) }
            .expect("the copy should succeed");
        self.stream.synchronize().expect("the stream should complete");
        values
    }

    /// Sums `count` floats over all ranks.
    pub(crate) fn sum(&self, send: u64, receive: u64, count: usize) -> c_int {
        all_reduce(send, receive, count, F32, SUM, self.comm, self.raw_stream())
    }
}

/// Runs `body` on one thread per rank, each with a communicator of all ranks.
pub(crate) fn ranks(ranks: usize, body: impl Fn(&Rank) + Sync) {
    let id = unique_id();
    let barrier = Arc::new(Barrier::new(ranks));
    stub_process::threads(ranks, |rank| body(&Rank::join(ranks, id, rank, &barrier)));
}
