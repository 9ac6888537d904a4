//! Tests of communicators on the stub: connecting, collectives, splits and registrations.

mod endings;
mod library;

use cudarc::driver::{CudaStream, DevicePtr};
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use stub_process::{Barrier, ExitOnPanic, nccl, nccl_test, scaled_to_load};
use symmalloc_agreement::Transport;
use symmalloc_core::Config;
use symmalloc_core::config::PoolConfig;
use symmalloc_cuda::{CudaAllocator, CudaDevice, DeviceBuffer, GraphPool};
use symmalloc_nccl::{
    CommError, CommState, Communicator, CommunicatorBuilder, DataType, Group, NcclTransport, ReduceOp, Registered,
    UniqueId, Window,
};

/// A size in bytes that exceeds a large segment, so that an allocation of this size gets a dedicated segment.
const SEGMENT_BYTES: u64 = 32 << 20;
/// A deadline that is short for a test, and grows with the load of the machine.
static SHORT: LazyLock<Duration> = LazyLock::new(|| scaled_to_load(Duration::from_millis(400)));

/// A rank: a thread with a device, a stream, memory, and a communicator of all ranks.
struct Rank {
    comm: Communicator,
    allocator: CudaAllocator,
    stream: Arc<CudaStream>,
    barrier: Arc<Barrier>,
}

impl Rank {
    fn number(&self) -> u32 {
        self.comm.rank()
    }

    /// Waits at a barrier for the other threads.
    fn meet(&self) {
        self.barrier.wait();
    }

    fn buffer(&self, values: &[f32]) -> DeviceBuffer<f32> {
        let mut buffer = self.allocator.alloc_zeroed::<f32>(&self.stream, values.len()).expect("memory should suffice");
        self.stream.memcpy_htod(values, &mut buffer).expect("the copy should succeed");
        buffer
    }

    fn read(&self, buffer: &DeviceBuffer<f32>) -> Vec<f32> {
        let values = self.stream.clone_dtoh(buffer).expect("the copy should succeed");
        self.stream.synchronize().expect("the work should complete");
        values
    }

    /// Returns an allocation that fills a dedicated segment, and its address.
    fn segment(&self) -> (symmalloc_core::Allocation, u64) {
        let allocation = self.allocator.allocate(&self.stream, SEGMENT_BYTES).expect("memory should suffice");
        (allocation, allocation.address.0)
    }

    fn register(&self, base: u64) -> Result<Window, CommError> {
        match self.comm.register_window(base, SEGMENT_BYTES)? {
            Registered::Window(window) => Ok(window),
            Registered::Plain(plain) => panic!("{plain:?} is not a window"),
        }
    }
}

/// Returns a configuration with whole segments of 2 MiB and more, which NCCL can register as windows.
fn fixed() -> Config {
    Config::builder()
        .default_pool(PoolConfig::builder().fixed().build().expect("the configuration is valid"))
        .build()
        .expect("the configuration is valid")
}

fn builder(device: &Arc<CudaDevice>) -> CommunicatorBuilder {
    Communicator::builder(device).deadline(Duration::from_secs(20))
}

/// Runs `body` on one thread per rank, with a communicator built by `connect`.
fn ranks_with(
    ranks: u32,
    connect: impl Fn(CommunicatorBuilder) -> CommunicatorBuilder + Sync,
    body: impl Fn(&Rank) + Sync,
) {
    let id = UniqueId::new().expect("NCCL should create an id");
    let barrier = Arc::new(Barrier::new(ranks as usize));
    stub_process::threads(ranks as usize, |rank| {
        let device = CudaDevice::new(rank).expect("the stub should have a device");
        let comm = connect(builder(&device)).connect(id, rank as u32, ranks).expect("all ranks should connect");
        let allocator = CudaAllocator::new(&device, fixed()).expect("the allocator should be created");
        let stream = device.context().new_stream().expect("the driver should create a stream");
        body(&Rank { comm, allocator, stream, barrier: Arc::clone(&barrier) });
    });
}

fn ranks(count: u32, body: impl Fn(&Rank) + Sync) {
    ranks_with(count, |builder| builder, body);
}

/// Like [`ranks`], in blocking mode and then in nonblocking mode.
fn in_both_modes(count: u32, body: impl Fn(&Rank) + Sync) {
    ranks(count, &body);
    ranks_with(count, CommunicatorBuilder::nonblocking, &body);
}

nccl_test!(ranks_connect_and_know_themselves, {
    for count in [1, 2, 3, 8] {
        in_both_modes(count, |rank| {
            assert_eq!((rank.comm.ranks(), rank.comm.name()), (count, "world"));
            assert_eq!(rank.comm.device().ordinal() as u32, rank.number());
            assert_eq!(rank.comm.state(), CommState::Ready);
            assert!(rank.comm.cause().is_none() && !rank.comm.raw().is_null());
            rank.comm.check().expect("the call succeeds");
        });
    }
    assert_eq!(nccl::live().communicators, 0, "dropped communicators are destroyed");
    nccl::assert_clean();
});

nccl_test!(every_collective_computes_its_result, {
    in_both_modes(4, |rank| {
        let (comm, stream, r) = (&rank.comm, &rank.stream, rank.number() as f32);
        let mine = rank.buffer(&[r, 10.0 * r]);

        let mut sum = rank.buffer(&[-1.0; 2]);
        comm.all_reduce(&mine, &mut sum, ReduceOp::Sum, stream).expect("the work should be submitted");
        assert_eq!(rank.read(&sum), [6.0, 60.0]);
        let mut max = rank.buffer(&[r, -r]);
        comm.all_reduce_in_place(&mut max, ReduceOp::Max, stream).expect("the work should be submitted");
        assert_eq!(rank.read(&max), [3.0, 0.0]);
        let mut mean = rank.buffer(&[r]);
        comm.all_reduce_in_place(&mut mean, ReduceOp::Average, stream).expect("the work should be submitted");
        assert_eq!(rank.read(&mean), [1.5]);

        let mut all = rank.buffer(&[-1.0; 8]);
        comm.all_gather(&mine, &mut all, stream).expect("the work should be submitted");
        assert_eq!(rank.read(&all), [0.0, 0.0, 1.0, 10.0, 2.0, 20.0, 3.0, 30.0]);

        let parts = rank.buffer(&[r, r + 1.0, r + 2.0, r + 3.0]);
        let mut part = rank.buffer(&[-1.0]);
        comm.reduce_scatter(&parts, &mut part, ReduceOp::Sum, stream).expect("the work should be submitted");
        assert_eq!(rank.read(&part), [6.0 + 4.0 * r]);

        let mut received = rank.buffer(&[r]);
        comm.broadcast(&mut received, 2, stream).expect("the work should be submitted");
        assert_eq!(rank.read(&received), [2.0]);

        let mut product = rank.buffer(&[-1.0]);
        let factor = rank.buffer(&[r + 1.0]);
        comm.reduce(&factor, &mut product, ReduceOp::Product, 1, stream).expect("the work should be submitted");
        assert_eq!(rank.read(&product), [if rank.number() == 1 { 24.0 } else { -1.0 }]);

        if rank.number() == 0 {
            comm.send(&mine, 3, stream).expect("the work should be submitted");
        } else if rank.number() == 3 {
            let mut theirs = rank.buffer(&[-1.0; 2]);
            comm.receive(&mut theirs, 0, stream).expect("the work should be submitted");
            assert_eq!(rank.read(&theirs), [0.0, 0.0]);
        }
    });
    nccl::assert_clean();
});

nccl_test!(a_group_sends_and_receives_concurrently, {
    in_both_modes(3, |rank| {
        let (comm, stream, r) = (&rank.comm, &rank.stream, rank.number());
        let mine = rank.buffer(&[r as f32; 5]);
        let mut theirs = rank.buffer(&[-1.0; 5]);
        let mut sum = rank.buffer(&[-1.0; 5]);
        let mut group = Group::new();
        group.send(comm, &mine, (r + 1) % 3, stream).expect("the peer should take part");
        group.receive(comm, &mut theirs, (r + 2) % 3, stream).expect("the peer should take part");
        group.all_reduce(comm, &mine, &mut sum, ReduceOp::Sum, stream).expect("the lengths should match");
        group.submit().expect("the work should be submitted");
        assert_eq!(rank.read(&theirs), [((r + 2) % 3) as f32; 5]);
        assert_eq!(rank.read(&sum), [3.0; 5]);
        Group::new().submit().expect("an empty group is valid");
    });
    nccl::assert_clean();
});

nccl_test!(a_group_accepts_raw_addresses, {
    ranks(2, |rank| {
        let (comm, stream, r) = (&rank.comm, &rank.stream, rank.number());
        let (mine, theirs) = (rank.buffer(&[r as f32; 3]), rank.buffer(&[-1.0; 3]));
        let [from, to] = [&mine, &theirs].map(|buffer| buffer.device_ptr(stream).0);
        let mut group = Group::new();
        // SAFETY: the addresses are those of three floats each, on this device and written on this stream. The floats stay allocated until
        // the stream is read.
        unsafe {
            group.send_raw(comm, from, 3, DataType::Float32, 1 - r, stream).expect("the peer should take part");
            group.receive_raw(comm, to, 3, DataType::Float32, 1 - r, stream).expect("the peer should take part");
            group.send_raw(comm, from, 3, DataType::Float32, 2, stream).expect_err("there are two ranks");
        }
        group.submit().expect("the work should be submitted");
        assert_eq!(rank.read(&theirs), [(1 - r) as f32; 3]);
    });
    nccl::assert_clean();
});

nccl_test!(an_abandoned_group_makes_no_call, {
    ranks(2, |rank| {
        let buffer = rank.buffer(&[1.0]);
        let before = nccl::calls("ncclSend") + nccl::calls("ncclGroupStart");
        let mut group = Group::new();
        group.send(&rank.comm, &buffer, 0, &rank.stream).expect("the peer should take part");
        drop(group);
        assert_eq!(nccl::calls("ncclSend") + nccl::calls("ncclGroupStart"), before);
    });
});

nccl_test!(one_thread_drives_several_devices_with_a_group, {
    let id = UniqueId::new().expect("NCCL should create an id");
    let devices = [0, 1].map(|ordinal| CudaDevice::new(ordinal).expect("the stub should have a device"));
    let comms: Vec<Communicator> = std::thread::scope(|scope| {
        let _exit = ExitOnPanic;
        let connecting: Vec<_> = (0..2_u32)
            .map(|rank| {
                let device = &devices[rank as usize];
                scope.spawn(move || builder(device).connect(id, rank, 2).expect("both connect"))
            })
            .collect();
        connecting.into_iter().map(|thread| thread.join().expect("the thread does not panic")).collect()
    });
    let streams =
        [0, 1].map(|rank: usize| devices[rank].context().new_stream().expect("the driver should create a stream"));
    let allocators =
        [0, 1].map(|rank: usize| CudaAllocator::new(&devices[rank], fixed()).expect("the allocator should be created"));
    let ones = [0, 1].map(|rank: usize| {
        let mut buffer = allocators[rank].alloc_zeroed::<f32>(&streams[rank], 3).expect("memory should suffice");
        streams[rank].memcpy_htod(&[1.0; 3], &mut buffer).expect("the copy should succeed");
        buffer
    });
    let mut sums = [0, 1]
        .map(|rank: usize| allocators[rank].alloc_zeroed::<f32>(&streams[rank], 3).expect("memory should suffice"));
    let mut group = Group::new();
    for (rank, sum) in sums.iter_mut().enumerate() {
        group
            .all_reduce(&comms[rank], &ones[rank], sum, ReduceOp::Sum, &streams[rank])
            .expect("the lengths should match");
    }
    group.submit().expect("the work should be submitted");
    for rank in [0, 1] {
        assert_eq!(streams[rank].clone_dtoh(&sums[rank]).expect("the copy should succeed"), [2.0; 3]);
    }
    nccl::assert_clean();
});

nccl_test!(parts_of_a_split_have_names_and_an_order, {
    in_both_modes(4, |rank| {
        let r = rank.number();
        // Ranks 0 and 2 form a part, 3 is alone, and 1 is in no part. The keys reverse the order of the first part.
        let color = [Some(0), None, Some(0), Some(7)][r as usize];
        let part = rank.comm.split(color, 10 - r).expect("all ranks should split");
        let Some(part) = part else {
            assert_eq!(r, 1);
            return;
        };
        let expected = [("world/1.0", 1, 2), ("", 0, 0), ("world/1.0", 0, 2), ("world/1.7", 0, 1)][r as usize];
        assert_eq!((part.name(), part.rank(), part.ranks()), expected);
        assert!(rank.comm.order() < part.order());
        assert_eq!(part.deadline(), rank.comm.deadline());
        let mut sum = rank.buffer(&[r as f32]);
        part.all_reduce_in_place(&mut sum, ReduceOp::Sum, &rank.stream).expect("the work should be submitted");
        assert_eq!(rank.read(&sum), [[2.0, -1.0, 2.0, 3.0][r as usize]]);
        part.destroy().expect("the communicator is idle");
        assert_eq!((part.state(), rank.comm.state()), (CommState::Destroyed, CommState::Ready));
    });
    nccl::assert_clean();
});

nccl_test!(orders_are_equal_on_all_ranks, {
    let orders = std::sync::Mutex::new(vec![]);
    ranks(3, |rank| {
        let parts = [0, 1].map(|_| {
            rank.comm.split(Some(0), 0).expect("all ranks should split").expect("the rank should be in a part")
        });
        let order = [rank.comm.order(), parts[0].order(), parts[1].order()].map(|order| order.as_bytes().to_vec());
        assert!(order[0] < order[1] && order[1] < order[2]);
        orders.lock().expect("the lock is not poisoned").push(order);
    });
    let orders = orders.into_inner().expect("the lock is not poisoned");
    assert!(orders.iter().all(|order| *order == orders[0]));
});

nccl_test!(windows_and_buffers_are_registered_and_deregistered, {
    in_both_modes(2, |rank| {
        let (_allocation, base) = rank.segment();
        let window = rank.register(base).expect("the memory should have a window");
        assert_eq!((window.base(), window.size_bytes()), (base, SEGMENT_BYTES));
        assert!(!window.handle().as_ptr().is_null());
        let buffer = rank.comm.register_buffer(base + 512, 1000).expect("buffers can be in any memory");
        assert_eq!((buffer.base(), buffer.size_bytes()), (base + 512, 1000));
        rank.meet();
        assert_eq!((nccl::live().windows, nccl::live().buffers), (2, 2));
        rank.meet();
        rank.comm.deregister_buffer(buffer).expect("the buffer is registered");
        rank.comm.deregister_window(window).expect("the buffer is registered");
        rank.meet();
        assert_eq!((nccl::live().windows, nccl::live().buffers), (0, 0));
        rank.meet();
    });
    nccl::assert_clean();
});

nccl_test!(destroying_deregisters_windows_first, {
    in_both_modes(2, |rank| {
        let (allocation, base) = rank.segment();
        let window = rank.register(base).expect("the memory should have a window");
        let _buffer = rank.comm.register_buffer(base, 4096).expect("buffers can be in any memory");
        rank.meet();
        rank.comm.destroy().expect("the communicator is idle");
        rank.comm.destroy().expect("a second call does nothing");
        rank.meet();
        assert_eq!((nccl::live().windows, nccl::live().buffers, nccl::live().kept_rounds), (0, 0, 0));
        let calls = nccl::calls("ncclCommWindowDeregister");
        assert!(matches!(
            rank.comm.deregister_window(window),
            Err(CommError::Gone { state: CommState::Destroyed, .. })
        ));
        assert_eq!(
            nccl::calls("ncclCommWindowDeregister"),
            calls,
            "NCCL is not called for a window of an ended communicator"
        );
        rank.allocator.free(allocation.handle).expect("the allocation is live");
        rank.meet();
    });
    nccl::assert_clean();
});

nccl_test!(an_ended_communicator_is_an_error, {
    ranks(2, |rank| {
        rank.comm.destroy().expect("the communicator is idle");
        assert!(rank.comm.raw().is_null());
        let mut buffer = rank.buffer(&[1.0]);
        let refused = rank.comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum, &rank.stream);
        let Err(error) = refused else { panic!("a collective on a destroyed communicator succeeded") };
        assert_eq!(error.to_string(), "communicator \"world\" is destroyed: connect a new one");
        assert!(matches!(rank.comm.split(None, 0), Err(CommError::Gone { .. })));
        assert!(matches!(rank.comm.register_buffer(4096, 1), Err(CommError::Gone { .. })));
        rank.comm.abort().expect("the call should have nothing to do");
    });
    nccl::assert_clean();
});

nccl_test!(invalid_lengths_are_refused_before_nccl_is_called, {
    ranks(2, |rank| {
        let (comm, stream) = (&rank.comm, &rank.stream);
        let before = nccl::calls("ncclAllReduce") + nccl::calls("ncclAllGather") + nccl::calls("ncclBroadcast");
        let (one, mut two) = (rank.buffer(&[1.0]), rank.buffer(&[1.0; 2]));
        let length = comm.all_reduce(&one, &mut two, ReduceOp::Sum, stream);
        let expected = CommError::Length { collective: "ncclAllReduce", role: "receive", actual: 2, expected: 1 };
        assert_eq!(length, Err(expected));
        let mut three = rank.buffer(&[1.0; 3]);
        assert!(matches!(comm.all_gather(&one, &mut three, stream), Err(CommError::Length { expected: 2, .. })));
        assert_eq!(comm.broadcast(&mut two, 2, stream), Err(CommError::NoSuchRank { rank: 2, ranks: 2 }));
        assert!(matches!(comm.send(&one, 5, stream), Err(CommError::NoSuchRank { rank: 5, .. })));
        let other = CudaDevice::new(5)
            .expect("the stub should have a device")
            .context()
            .new_stream()
            .expect("the driver should create a stream");
        assert!(matches!(comm.broadcast(&mut two, 0, &other), Err(CommError::ForeignStream { .. })));
        let after = nccl::calls("ncclAllReduce") + nccl::calls("ncclAllGather") + nccl::calls("ncclBroadcast");
        assert_eq!(before, after);

        assert_eq!(comm.register_window(4097, 4096).map(|_| ()), Err(CommError::Unaligned { base: 4097 }));
        assert_eq!(comm.register_window(4096, 0).map(|_| ()), Err(CommError::Empty));
        assert_eq!(comm.register_buffer(4096, 0).map(|_| ()), Err(CommError::Empty));
        assert_eq!(comm.state(), CommState::Ready);
        rank.meet();
    });
    assert_eq!(nccl::calls("ncclCommWindowRegister"), 0);
});

nccl_test!(a_registration_is_deregistered_on_its_own_communicator, {
    ranks(2, |rank| {
        let other = rank.comm.split(Some(0), 0).expect("all ranks should split").expect("the rank should be in a part");
        let (_allocation, base) = rank.segment();
        let buffer = rank.comm.register_buffer(base, 4096).expect("buffers can be in any memory");
        let refused = other.deregister_buffer(buffer);
        let expected = CommError::ForeignRegistration { name: "world/1.0".into(), owner: "world".into() };
        assert_eq!(refused, Err(expected));
    });
});

nccl_test!(ranks_out_of_range_are_refused, {
    let id = UniqueId::new().expect("NCCL should create an id");
    let device = CudaDevice::new(0).expect("the stub should have a device");
    for (rank, ranks) in [(0, 0), (2, 2), (u32::MAX, u32::MAX), (0, u32::MAX)] {
        let refused = builder(&device).connect(id, rank, ranks).map(|_| ());
        assert_eq!(refused, Err(CommError::NoSuchRank { rank, ranks }));
    }
    assert_eq!(builder(&device).name("").connect(id, 0, 1).map(|_| ()), Err(CommError::Name));
    assert_eq!(builder(&device).name("a\0b").connect(id, 0, 1).map(|_| ()), Err(CommError::Name));
    assert_eq!(nccl::calls("ncclCommInitRankConfig"), 0);
});

nccl_test!(blocking_and_nonblocking_do_not_mix_in_a_group, {
    let id = UniqueId::new().expect("NCCL should create an id");
    let device = CudaDevice::new(0).expect("the stub should have a device");
    let blocking = builder(&device).name("b").connect(id, 0, 1).expect("a single rank connects");
    let id = UniqueId::new().expect("NCCL should create an id");
    let nonblocking = builder(&device).name("n").nonblocking().connect(id, 0, 1).expect("a single rank connects");
    let stream = device.context().new_stream().expect("the driver should create a stream");
    let allocator = CudaAllocator::new(&device, fixed()).expect("the allocator should be created");
    let [one, two] = [0, 1].map(|_| allocator.alloc_zeroed::<f32>(&stream, 1).expect("memory should suffice"));
    let mut group = Group::new();
    group.send(&blocking, &one, 0, &stream).expect("the peer should take part");
    group.send(&nonblocking, &two, 0, &stream).expect("the peer should take part");
    assert_eq!(group.submit(), Err(CommError::MixedGroup { blocking: "b".into(), nonblocking: "n".into() }));
    nccl::assert_clean();
});

nccl_test!(nccls_variable_selects_the_blocking_mode, ["NCCL_COMM_BLOCKING" = "0"], {
    ranks(2, |rank| assert!(!rank.comm.is_blocking()));
});

nccl_test!(a_borrowed_communicator_is_left_to_its_owner, {
    ranks(2, |rank| {
        let raw = rank.comm.raw();
        // SAFETY: the owner keeps the communicator until the end of this body, and does not call NCCL with it in the meantime.
        let borrowed = unsafe { builder(rank.comm.device()).name("theirs").borrow(raw) }.expect("a communicator");
        assert_eq!((borrowed.rank(), borrowed.ranks(), borrowed.name()), (rank.number(), 2, "theirs"));
        let mut buffer = rank.buffer(&[1.0]);
        borrowed.all_reduce_in_place(&mut buffer, ReduceOp::Sum, &rank.stream).expect("the work should be submitted");
        assert_eq!(rank.read(&buffer), [2.0]);
        let (_allocation, base) = rank.segment();
        let _window = borrowed.register_window(base, SEGMENT_BYTES).expect("the memory should have a window");
        rank.meet();
        drop(borrowed);
        rank.meet();
        assert_eq!(
            (nccl::live().windows, nccl::live().communicators),
            (0, 2),
            "the borrowed communicator's windows are deregistered, but it is not destroyed"
        );
        rank.comm.check().expect("the borrowed communicator still works");

        let elsewhere = CudaDevice::new(7).expect("the stub should have a device");
        // SAFETY: as above.
        let refused = unsafe { builder(&elsewhere).borrow(raw) }.map(|_| ());
        let expected = CommError::DeviceMismatch { ordinal: 7, actual: rank.number() as i32 };
        assert_eq!(refused, Err(expected));
        rank.meet();
    });
    nccl::assert_clean();
});

nccl_test!(an_agreement_runs_over_the_communicator, {
    in_both_modes(3, |rank| {
        let transport = NcclTransport::new(&rank.comm).expect("memory should suffice");
        assert_eq!((transport.rank(), transport.ranks()), (rank.number(), 3));
        for bytes in [1_usize, 64, 1024, 5000] {
            let message = vec![rank.number() as u8 + 1; bytes];
            let gathered = transport.all_gather(&message).expect("all ranks send");
            assert_eq!((gathered.len(), gathered.message_bytes()), (3, bytes));
            for (speaker, output) in gathered.iter().enumerate() {
                assert!(output.iter().all(|byte| usize::from(*byte) == speaker + 1));
            }
        }
        assert!(transport.all_gather(&[]).expect("an empty message").is_empty());
    });
    nccl::assert_clean();
});

nccl_test!(registering_in_a_capture_is_an_error_with_a_remedy, {
    ranks(1, |rank| {
        let (_allocation, base) = rank.segment();
        let pool = GraphPool::new(&rank.allocator, PoolConfig::default()).expect("there should be a pool");
        let capture = pool.begin(&rank.stream).expect("the capture should begin");
        let refused = rank.comm.register_window(base, SEGMENT_BYTES).map(|_| ());
        assert_eq!(refused, Err(CommError::Capturing));
        drop(capture);
        let window = rank.register(base).expect("after the capture");
        rank.comm.deregister_window(window).expect("the window is registered");
    });
});

nccl_test!(
    without_nvlink_newer_libraries_register_plainly,
    ["STUB_NCCL_NO_SYMMETRIC" = "1", "STUB_NCCL_VERSION" = "22907"],
    {
        ranks(2, |rank| {
            let (_allocation, base) = rank.segment();
            let Registered::Plain(plain) =
                rank.comm.register_window(base, SEGMENT_BYTES).expect("the registration should succeed")
            else {
                panic!("a window was registered without NVLink");
            };
            assert_eq!((plain.base(), plain.size_bytes()), (base, SEGMENT_BYTES));
            rank.comm.deregister_buffer(plain).expect("the buffer is registered");
        });
        nccl::assert_clean();
    }
);
