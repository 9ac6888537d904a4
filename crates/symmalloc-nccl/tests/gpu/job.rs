//! Jobs whose ranks are threads, each with a device.

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};
use std::net::TcpListener;
use std::ops::Range;
use std::process::{Child, Command};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};
use symmalloc_core::PoolId;
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaDevice, DeviceBuffer};
use symmalloc_nccl::{Capability, Communicator, CommunicatorBuilder, Nccl, ReduceOp, Registrar, UniqueId};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// Number of ranks, if it is not the number of devices. More ranks than devices share them in turn, which needs NCCL 2.30 or later, and
/// `NCCL_MULTI_RANK_GPU_ENABLE=1`.
pub(crate) const RANKS: &str = "SYMMALLOC_TEST_RANKS";

/// Returns the number of ranks that take part. If there are fewer than two, prints the reason and returns `None`.
pub(crate) fn devices() -> Option<u32> {
    let count = match CudaDevice::count() {
        Ok(count) => std::env::var(RANKS).map_or(count as u32, |ranks| ranks.parse().expect("a number of ranks")),
        Err(error) => {
            println!("skipped, no device: {error}");
            return None;
        }
    };
    if let Err(error) = Nccl::load() {
        println!("skipped, no NCCL: {error}");
        return None;
    }
    if count < 2 {
        println!("skipped, {count} device: two are needed");
        return None;
    }
    Some(count)
}

/// Runs `body` on every rank and returns the results by rank.
pub(crate) fn ranks<T: Send>(count: u32, body: impl Fn(&Rank<'_>) -> T + Sync) -> Vec<T> {
    let barrier = Barrier::new(count as usize);
    let run = |rank| {
        let device = CudaDevice::for_local_rank(rank).expect("the device should be created");
        let stream = device.context().new_stream().expect("the driver should create a stream");
        body(&Rank { rank, ranks: count, device, stream, barrier: &barrier })
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count).map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("the rank does not panic")).collect()
    })
}

/// A rank's identity, device and stream.
pub(crate) struct Rank<'a> {
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    pub(crate) device: Arc<CudaDevice>,
    pub(crate) stream: Arc<CudaStream>,
    pub(crate) barrier: &'a Barrier,
}

/// Blocking mode of NCCL's calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Calls {
    Blocking,
    Nonblocking,
}

impl Rank<'_> {
    pub(crate) fn builder(&self, calls: Calls) -> CommunicatorBuilder {
        let builder = Communicator::builder(&self.device).deadline(DEADLINE);
        if calls == Calls::Nonblocking { builder.nonblocking() } else { builder }
    }

    pub(crate) fn connect(&self, id: UniqueId, calls: Calls) -> Communicator {
        self.builder(calls).connect(id, self.rank, self.ranks).expect("all ranks should arrive")
    }

    /// Creates an allocator whose default pool has this policy. Odd ranks allocate addresses in descending order.
    pub(crate) fn allocator(&self, pool: PoolConfig) -> CudaAllocator {
        let builder = CudaBackend::builder(&self.device);
        let builder = if self.rank % 2 == 1 { builder.descending_addresses(1 << 40) } else { builder };
        let config = Config::builder().default_pool(pool).build().expect("the configuration should be valid");
        let allocator = CudaAllocator::with_backend(builder.build().expect("the options should be supported"), config)
            .expect("the allocator is created");
        allocator.register_stream(&self.stream).expect("the stream should be registered");
        allocator
    }

    pub(crate) fn registrar(&self, allocator: &CudaAllocator) -> Registrar {
        Registrar::builder(allocator).build().expect("the registrar is created")
    }

    /// Waits at a barrier for all ranks.
    pub(crate) fn meet(&self) {
        self.barrier.wait();
    }

    pub(crate) fn is_first(&self) -> bool {
        self.rank == 0
    }

    /// Writes this rank's input for a round to the buffer.
    pub(crate) fn write<T: DevicePtrMut<f32>>(&self, buffer: &mut T, round: u64) {
        self.write_on(&self.stream, buffer, round);
    }

    /// Returns the number of elements that differ from the sum over all ranks.
    pub(crate) fn wrong_sums<T: DevicePtr<f32>>(&self, buffer: &T, round: u64) -> usize {
        self.wrong_sums_on(&self.stream, buffer, round)
    }

    pub(crate) fn write_on<T: DevicePtrMut<f32>>(&self, stream: &Arc<CudaStream>, buffer: &mut T, round: u64) {
        let host: Vec<f32> = (0..buffer.len()).map(|element| given(self.rank, round, element)).collect();
        stream.memcpy_htod(&host, buffer).expect("the copy should succeed");
    }

    pub(crate) fn wrong_sums_on<T: DevicePtr<f32>>(&self, stream: &Arc<CudaStream>, buffer: &T, round: u64) -> usize {
        wrong_sums(stream, 0..self.ranks, buffer, round)
    }

    /// Returns the number of elements that differ from the sum over these ranks.
    pub(crate) fn wrong_sums_over<T: DevicePtr<f32>>(&self, members: Range<u32>, buffer: &T, round: u64) -> usize {
        wrong_sums(&self.stream, members, buffer, round)
    }
}

fn wrong_sums<T: DevicePtr<f32>>(stream: &Arc<CudaStream>, members: Range<u32>, buffer: &T, round: u64) -> usize {
    let host = stream.clone_dtoh(buffer).expect("the copy should succeed");
    stream.synchronize().expect("the work should complete");
    let sum = |element| members.clone().map(|rank| given(rank, round, element)).sum::<f32>();
    host.iter().enumerate().filter(|(element, value)| **value != sum(*element)).count()
}

/// Returns one input element: a small whole number, so that sums are exact.
fn given(rank: u32, round: u64, element: usize) -> f32 {
    (1000 * rank as usize + (round % 100) as usize + element % 613) as f32
}

/// Returns the policy of a symmetric pool with one segment, reserved up front.
pub(crate) fn reserved(segment_bytes: u64) -> PoolConfig {
    PoolConfig::builder().reserved(segment_bytes).symmetric(true).build().expect("the configuration should be valid")
}

/// Returns the policy of a symmetric pool with PyTorch's segment sizes.
pub(crate) fn fixed() -> PoolConfig {
    PoolConfig::builder().fixed().symmetric(true).build().expect("the configuration should be valid")
}

/// Returns a command that runs this test in a separate process. NCCL reads its environment only once, and a kernel that never ends
/// disappears only with its process.
pub(crate) fn again(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("the test's executable should be known"));
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]);
    command
}

/// Starts this test again with one process per rank, with the environment variables of torchrun and `variable`.
pub(crate) fn processes(test: &str, ranks: u32, variable: (&str, &str)) -> Vec<Child> {
    let free =
        TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port should be free");
    let world = ranks.to_string();
    let start = |rank: u32| {
        let rank = rank.to_string();
        again(test)
            .envs([("RANK", &rank), ("LOCAL_RANK", &rank), ("WORLD_SIZE", &world), ("LOCAL_WORLD_SIZE", &world)])
            .env("SYMMALLOC_RENDEZVOUS", free.to_string())
            .env(variable.0, variable.1)
            .spawn()
            .expect("the process should start again")
    };
    (0..ranks).map(start).collect()
}

/// Waits up to 30 seconds for a child's exit status.
pub(crate) fn status_of(child: &mut Child) -> Option<i32> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("the child can be queried") {
            return status.code();
        }
        if begun.elapsed() > Duration::from_secs(30) {
            child.kill().expect("the process should be killed");
            panic!("the child did not end within 30 seconds");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Allocates a tensor, and frees one if there are several.
pub(crate) fn take(rank: &Rank<'_>, allocator: &CudaAllocator, tensors: &mut Vec<DeviceBuffer<f32>>, round: u64) {
    let length = 1000 + 90_001 * (round as usize % 13);
    // SAFETY: the memory is written before it is read.
    tensors.push(unsafe { allocator.alloc(&rank.stream, length) }.expect("the allocation should succeed"));
    if tensors.len() > 4 {
        drop(tensors.swap_remove(round as usize % 3));
    }
}

/// Reduces every tensor over the members of a communicator and checks every element.
pub(crate) fn reduce_and_check(
    rank: &Rank<'_>,
    comm: &Communicator,
    members: Range<u32>,
    mut tensors: Vec<&mut DeviceBuffer<f32>>,
    round: u64,
) {
    for (index, tensor) in tensors.iter_mut().enumerate() {
        rank.write(*tensor, round + index as u64);
        comm.all_reduce_in_place(*tensor, ReduceOp::Sum, &rank.stream).expect("the work should be submitted");
    }
    comm.synchronize(&rank.stream).expect("every member arrives");
    for (index, tensor) in tensors.iter().enumerate() {
        let wrong = rank.wrong_sums_over(members.clone(), &**tensor, round + index as u64);
        assert_eq!(wrong, 0, "round {round}, tensor {index}, members {members:?}");
    }
}

/// Returns the number of devices, or prints the reason and returns `None` if there are too few, or NCCL lacks a capability.
pub(crate) fn devices_with(capabilities: &[Capability]) -> Option<u32> {
    let count = devices()?;
    let nccl = Nccl::load().expect("libnccl should be available");
    if let Some(missing) = capabilities.iter().find(|capability| !nccl.supports(**capability)) {
        println!("skipped: NCCL {} has no {missing}", nccl.version());
        return None;
    }
    Some(count)
}

/// Deregisters the windows of all ranks together, and destroys the communicator.
pub(crate) fn leave(registrar: &Registrar, comm: &Communicator) {
    registrar.detach(comm, &[PoolId::DEFAULT]).expect("the pool should be detached");
    registrar.sync(&[comm]).expect("the members should agree");
    comm.destroy().expect("the communicator should be destroyed");
}

/// Returns the number of open file descriptors. Counting them opens one, so ranks count in turns.
pub(crate) fn descriptors() -> usize {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().expect("the lock is not poisoned");
    std::fs::read_dir("/proc/self/fd").expect("the folder should be readable").count()
}
