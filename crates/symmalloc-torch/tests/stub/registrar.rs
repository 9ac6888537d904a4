//! Windows over a pool, on communicators that other code owns: two ranks as two threads, on the stub of libnccl.

use crate::library::*;
use std::ffi::{CStr, CString, c_void};
use std::ptr::{null, null_mut};
use std::time::Duration;
use stub_process::{Barrier, nccl, nccl_test, scaled_to_load, until};
use symmalloc_core::Config;
use symmalloc_cuda::{CudaAllocator, CudaDevice};
use symmalloc_nccl::{Communicator, ReduceOp, UniqueId};
use symmalloc_torch::*;

/// A rank's registrar through its C functions.
pub(crate) struct Windows(pub(crate) *mut PoolRegistration);

impl Windows {
    pub(crate) fn new(allocator: Allocator, pool: u32, comm: *mut c_void) -> Self {
        let mut out = null_mut();
        // SAFETY: a live allocator and communicator, and an output pointer.
        done(unsafe { symmalloc_registrar_create(allocator.0, pool, comm, 5000, null(), &raw mut out) });
        Windows(out)
    }

    pub(crate) fn sync(&self) -> (u64, u64) {
        let (mut registered, mut deregistered) = (0, 0);
        // SAFETY: a live registrar, and output pointers.
        done(unsafe { symmalloc_registrar_sync(self.0, &raw mut registered, &raw mut deregistered) });
        (registered, deregistered)
    }

    pub(crate) fn try_sync(&self) -> symmalloc_status {
        // SAFETY: a live registrar; null outputs.
        unsafe { symmalloc_registrar_sync(self.0, null_mut(), null_mut()) }
    }

    fn announce(&self, kind: &CStr, elements: u64, stream: *mut c_void, submit: impl FnOnce()) {
        let mut announcement = null_mut();
        // SAFETY: a live registrar, a C string, a stream that outlives it, and an output pointer.
        done(unsafe { symmalloc_announce_begin(self.0, kind.as_ptr(), elements, stream, &raw mut announcement) });
        submit();
        // SAFETY: it came from the previous call, and is not used after this.
        done(unsafe { symmalloc_announce_end(announcement) });
    }

    pub(crate) fn destroy(self) -> symmalloc_status {
        // SAFETY: not used after this.
        unsafe { symmalloc_registrar_destroy(self.0) }
    }
}

/// Runs two ranks, each with an allocator on a separate device and a communicator that it owns.
pub(crate) fn ranks(body: impl Fn(u32, Allocator, &Communicator, &Barrier) + Sync) {
    ranks_of(2, allocator_of_its_own, body);
}

/// Returns an allocator that the program created.
fn allocator_of_its_own(device: i32) -> Allocator {
    let mut out = null_mut();
    // SAFETY: no text, and an output pointer.
    done(unsafe { symmalloc_create(device, null(), &raw mut out) });
    Allocator(out)
}

/// Returns the allocator behind PyTorch's entry points.
pub(crate) fn allocator_of_torch(device: i32) -> Allocator {
    let mut out = null_mut();
    // SAFETY: an output pointer.
    done(unsafe { symmalloc_process_allocator(device, &raw mut out) });
    Allocator(out)
}

/// Runs any number of ranks as [`ranks`], with other allocators.
pub(crate) fn ranks_of(
    count: u32,
    allocator: impl Fn(i32) -> Allocator + Sync,
    body: impl Fn(u32, Allocator, &Communicator, &Barrier) + Sync,
) {
    let (id, barrier) = (UniqueId::new().expect("the stub gives ids"), Barrier::new(count as usize));
    stub_process::threads(count as usize, |rank| {
        let device = CudaDevice::new(rank).expect("a device for every rank");
        let comm = Communicator::builder(&device).connect(id, rank as u32, count).expect("connected");
        body(rank as u32, allocator(rank as i32), &comm, &barrier);
    });
}

pub(crate) const POOL: &str = "symmetric:true,segments:fixed";

nccl_test!(segments_get_windows_and_lose_them_on_every_rank, {
    ranks(|_, allocator, comm, barrier| {
        let pool = allocator.create_pool(Some(POOL));
        let windows = Windows::new(allocator, pool, comm.raw());
        let held = allocator.allocate(pool, 4 * MIB, null_mut());
        assert_eq!(windows.sync(), (1, 0));
        assert_eq!(windows.sync(), (0, 0), "there are no new segments");
        barrier.wait();
        assert_eq!(nccl::live().windows, 2);
        allocator.free(held);
        allocator.trim();
        assert_eq!(windows.sync(), (0, 1));
        allocator.allocate(pool, 4 * MIB, null_mut());
        assert_eq!(windows.sync(), (1, 0));
        done(windows.destroy());
        barrier.wait();
        assert_eq!((nccl::live().windows, nccl::live().communicators), (0, 2), "the communicators still exist");
        barrier.wait();
    });
    nccl::assert_clean();
});

nccl_test!(ranks_that_differ_register_nothing, {
    ranks(|rank, allocator, comm, barrier| {
        let pool = allocator.create_pool(Some(POOL));
        let windows = Windows::new(allocator, pool, comm.raw());
        allocator.allocate(pool, 4 * MIB + rank as usize * 512, null_mut());
        assert_eq!(windows.try_sync(), SYMMALLOC_MISALIGNED);
        assert!(message().contains("4,194,304") && message().contains("4,194,816"), "{}", message());
        barrier.wait();
        assert_eq!(nccl::live().windows, 0);
        barrier.wait();
    });
    nccl::assert_clean();
});

nccl_test!(a_pool_that_is_not_symmetric_is_refused, {
    ranks(|_, allocator, comm, _| {
        let pool = allocator.create_pool(None);
        let mut out = null_mut();
        // SAFETY: a live allocator and communicator, and an output pointer.
        let status = unsafe { symmalloc_registrar_create(allocator.0, pool, comm.raw(), 0, null(), &raw mut out) };
        assert_eq!(status, SYMMALLOC_NCCL);
        assert!(message().contains("symmetric") && out.is_null(), "{}", message());
    });
});

pub(crate) fn flight_record() -> String {
    let mut json = null_mut();
    // SAFETY: a C string, and an output pointer.
    done(unsafe { symmalloc_flight_record(c"asked for".as_ptr(), &raw mut json) });
    // SAFETY: a C string of the library.
    let record = unsafe { CStr::from_ptr(json) }.to_str().expect("text").to_owned();
    // SAFETY: it came from the library.
    unsafe { symmalloc_release_bytes(json.cast()) };
    record
}

pub(crate) fn free_address() -> CString {
    let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    CString::new(free.expect("a free port").to_string()).expect("no zero byte")
}

/// Returns the deadline of a registrar whose other rank is late on purpose.
fn deadline_ms() -> u32 {
    scaled_to_load(Duration::from_millis(800)).as_millis() as u32
}

nccl_test!(a_rank_that_misses_announced_work_is_named, {
    let address = free_address();
    ranks(|rank, allocator, comm, barrier| {
        let (pool, mut registrar) = (allocator.create_pool(Some(POOL)), null_mut());
        // SAFETY: a live allocator and communicator, a C string, and an output pointer.
        done(unsafe {
            symmalloc_registrar_create(
                allocator.0,
                pool,
                comm.raw(),
                deadline_ms(),
                address.as_ptr(),
                &raw mut registrar,
            )
        });
        let (windows, stream) = (Windows(registrar), comm.device().context().new_stream().expect("a stream"));
        // The first sync waits for the device, because it creates a stream. After the missed collective it would hang. Its gather is collective 1.
        assert_eq!(windows.sync(), (0, 0));
        let raw = stream.cu_stream().cast();
        let values = CudaAllocator::new(comm.device(), Config::default()).expect("made");
        let mut values = values.alloc_zeroed::<f32>(&stream, 64).expect("allocated");
        let mut reduce = || comm.all_reduce_in_place(&mut values, ReduceOp::Sum, &stream).expect("submitted");
        windows.announce(c"theirs", 64, raw, &mut reduce);
        comm.synchronize(&stream).expect("both came");
        barrier.wait();
        if rank == 0 {
            windows.announce(c"missed", 0, raw, &mut reduce);
            until(|| flight_record().contains("ranks are alive but missed the collective: rank 1"));
            let record = flight_record();
            assert!(record.contains("collective 3 (missed) was "), "{record}");
            assert!(record.contains("\"kind\": \"theirs\"") && record.contains("\"elements\": 64"), "{record}");
            assert_eq!(windows.try_sync(), SYMMALLOC_NCCL);
            assert!(message().contains("rank 1"), "{}", message());
            let mut announcement = null_mut();
            // SAFETY: a live registrar, a C string, a live stream, and an output pointer.
            let refused =
                unsafe { symmalloc_announce_begin(windows.0, c"late".as_ptr(), 0, raw, &raw mut announcement) };
            assert!(refused == SYMMALLOC_NCCL && announcement.is_null(), "{}", message());
        }
        barrier.wait();
        // SAFETY: null is no op.
        done(unsafe { symmalloc_announce_end(null_mut()) });
        windows.destroy();
        comm.abort().expect("in time");
    });
});

nccl_test!(ranks_that_met_name_the_one_that_misses_a_sync, {
    let address = free_address();
    ranks(|rank, allocator, comm, barrier| {
        let (pool, mut registrar) = (allocator.create_pool(Some(POOL)), null_mut());
        // SAFETY: a live allocator and communicator, a C string, and an output pointer.
        done(unsafe {
            symmalloc_registrar_create(
                allocator.0,
                pool,
                comm.raw(),
                deadline_ms(),
                address.as_ptr(),
                &raw mut registrar,
            )
        });
        let windows = Windows(registrar);
        assert_eq!(windows.sync(), (0, 0));
        if rank == 0 {
            assert_eq!(windows.try_sync(), SYMMALLOC_NCCL);
            assert!(message().contains("rank 1"), "{}", message());
            let record = flight_record();
            assert!(record.contains("\"reason\": \"asked for\"") && record.contains("ncclAllGather"), "{record}");
        }
        barrier.wait();
        windows.destroy();
        // The owner aborts the communicator, including its pending work.
        comm.abort().expect("in time");
    });
});
