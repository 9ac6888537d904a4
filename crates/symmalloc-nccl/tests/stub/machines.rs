//! Jobs on two emulated machines: network namespaces with a proxy between them that delays, limits and cuts. The variables are torchrun's, and
//! nothing else is set.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use stub_process::{
    ExitOnPanic, Machines, Quality, RankOutput, nccl, nccl_test, ranks_of_machines, scaled_to_load, until, until_some,
};
use symmalloc_core::op::Contents;
use symmalloc_core::{Config, PoolConfig};
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaDevice, DeviceBuffer, GraphPool, Pool};
use symmalloc_nccl::{
    AllToAll, CommError, Communicator, FailureCause, Launch, ReduceOp, Registrar, Registration, UniqueId,
};

const RANKS: usize = 4;
/// Time for whatever succeeds.
const PATIENT: Duration = Duration::from_secs(60);
/// Deadline of collectives that other ranks miss.
const DEADLINE: Duration = Duration::from_secs(3);
/// Maximum time from the deadline to the end of a process, as documented.
const LATE: Duration = Duration::from_secs(3 + 1);
const SCENARIO: &str = "SYMMALLOC_TEST_SCENARIO";
const FOLDER: &str = "SYMMALLOC_FLIGHT_RECORDS";

fn folder() -> PathBuf {
    PathBuf::from(std::env::var(FOLDER).expect("it should be set"))
}

/// Leaves a mark of this rank that the others and the test can see.
/// Writes a file with the id of this process. A file that exists is complete.
fn mark(name: &str, rank: usize) {
    let (partial, path) = (folder().join(format!("partial.{rank}")), folder().join(format!("{name}.{rank}")));
    fs::write(&partial, std::process::id().to_string()).expect("the write should succeed");
    fs::rename(partial, path).expect("the folder should be writable");
}

fn is_marked(folder: &Path, name: &str, mut ranks: impl Iterator<Item = usize>) -> bool {
    ranks.all(|rank| folder.join(format!("{name}.{rank}")).exists())
}

/// A rank with a registered pool.
struct Rank {
    rank: usize,
    allocator: CudaAllocator,
    registrar: Registrar,
    stream: Arc<cudarc::driver::CudaStream>,
    pool: Pool<CudaBackend>,
    sums: DeviceBuffer<f32>,
    device: Arc<CudaDevice>,
}

impl Rank {
    fn new(rank: usize) -> Self {
        let device = CudaDevice::new(rank).expect("the stub should have a device");
        let allocator = CudaAllocator::new(&device, Config::default()).expect("the allocator is created");
        let registrar = Registrar::builder(&allocator).build().expect("the registrar is created");
        let stream = device.context().new_stream().expect("the driver should create a stream");
        let config = PoolConfig::builder().fixed().symmetric(true).build().expect("the configuration should be valid");
        let pool = allocator.create_pool(config).expect("the creation should succeed");
        let sums = allocator.with_pool(&pool).alloc_zeroed(&stream, 1 << 20).expect("the allocation should succeed");
        Rank { rank, allocator, registrar, stream, pool, sums, device }
    }

    fn connect(&self, deadline: Duration) -> Result<Communicator, CommError> {
        Communicator::builder(&self.device).deadline(deadline).connect_env()
    }

    fn register(&self, comm: &Communicator) {
        self.registrar
            .attach(comm, &[self.pool.id()], Registration::Windows)
            .expect("the pool should be symmetric and registrable");
        self.registrar.sync(&[comm]).expect("the ranks should agree");
    }

    fn write_one(&mut self) {
        self.stream.memcpy_htod(&vec![1.0; 1 << 20], &mut self.sums).expect("the copy should succeed");
    }

    /// Reduces in windows, and checks the sum.
    fn reduce(&mut self, comm: &Communicator) {
        self.registrar.window_of(comm, &self.sums).expect("the buffer should have been synced");
        self.write_one();
        comm.all_reduce_in_place(&mut self.sums, ReduceOp::Sum, &self.stream).expect("the work should be submitted");
        comm.synchronize(&self.stream).expect("all ranks should take part");
        self.check(comm);
    }

    fn check(&self, comm: &Communicator) {
        let sums = self.stream.clone_dtoh(&self.sums).expect("the copy should succeed");
        assert!(sums.iter().all(|sum| *sum == comm.ranks() as f32), "{} on rank {}", sums[0], self.rank);
    }

    /// Each rank sends its number to each other one, as often as the number of the receiver.
    fn exchange(&self, comm: &Communicator) {
        let (ranks, own) = (comm.ranks() as usize, comm.rank() as usize);
        let all_to_all = AllToAll::new(comm).expect("the connection should succeed");
        let rows: Vec<u64> = (0..ranks as u64).collect();
        let splits = all_to_all.exchange_splits(&rows).expect("the ranks should exchange their splits");
        let zeros = |rows: usize| {
            self.allocator.alloc_zeroed::<u32>(&self.stream, rows).expect("the allocation should succeed")
        };
        let mut input = zeros(rows.iter().sum::<u64>() as usize);
        self.stream.memcpy_htod(&vec![own as u32; input.len()], &mut input).expect("the copy should succeed");
        let mut output = zeros(own * ranks);
        all_to_all.run(&self.stream, &input, &mut output, 1, &splits).expect("the work should be submitted");
        comm.synchronize(&self.stream).expect("all ranks should take part");
        let received = self.stream.clone_dtoh(&output).expect("the copy should succeed");
        let expected: Vec<u32> = (0..ranks as u32).flat_map(|from| vec![from; own]).collect();
        assert_eq!(received, expected);
    }

    /// Captures a collective, and launches it again after a sleep of the pool.
    fn sleep_and_wake(&mut self, comm: &Communicator) {
        let graphs = GraphPool::new(&self.allocator, PoolConfig::default()).expect("there should be a pool");
        let capture = graphs.begin(&self.stream).expect("the capture should begin");
        comm.all_reduce_in_place(&mut self.sums, ReduceOp::Sum, &self.stream).expect("the call should be captured");
        let graph = capture.end().expect("the capture should end");
        for _ in 0..2 {
            self.write_one();
            comm.announce("graph", None, &self.stream, || graph.launch(&self.stream))
                .expect("ready")
                .expect("the graph should be launched");
            comm.synchronize(&self.stream).expect("all ranks should take part");
            self.check(comm);
            self.registrar.sleep(comm, self.pool.id(), Contents::Keep).expect("all ranks should sleep together");
            let woken = self.registrar.wake(comm, self.pool.id()).expect("all ranks should wake together");
            assert_eq!((woken.registrations, woken.changed), (1, vec![]), "the graph is still valid");
            self.check(comm);
        }
    }
}

/// Distributes the id of a grown communicator through a file, as a scheduler does.
fn grow_id(old: Option<&Communicator>) -> UniqueId {
    let file = folder().join("grow.id");
    if let Some(old) = old.filter(|old| old.rank() == 0) {
        let id = old.grow_id().expect("rank 0 creates an id");
        fs::write(file.with_extension("new"), id.as_bytes()).expect("the write should succeed");
        fs::rename(file.with_extension("new"), &file).expect("the rename should succeed");
        return id;
    }
    UniqueId::from_bytes(until_some(|| fs::read(&file).ok()?.try_into().ok()))
}

fn assert_success(outputs: &[RankOutput], of: impl Fn(usize) -> bool) {
    let failed = outputs.iter().filter(|output| of(output.rank) && !output.is_success);
    let texts: Vec<String> = failed.map(|output| format!("rank {}:\n{}", output.rank, output.text)).collect();
    assert!(texts.is_empty(), "{}", texts.join("\n"));
}

/// A link of 20 Mbit/s between cities.
const SLOW: Quality = Quality { delay: Duration::from_millis(10), bytes_per_second: Some(2_500_000), is_cut: false };

// Windows, agreement, all-to-all-v, captured collectives, sleep and wake, a smaller and a larger communicator.
nccl_test!(a_job_does_everything_over_a_slow_link, ["STUB_NCCL_VERSION" = "23203", "STUB_NCCL_REUSE_WINDOWS" = "1"], {
    let shared = tempfile::tempdir().expect("a folder should be created");
    let options = [(FOLDER, &*shared.path().to_string_lossy())];
    let outputs = ranks_of_machines(
        RANKS,
        &options,
        |rank| {
            let mut it = Rank::new(rank);
            let world = it.connect(PATIENT).expect("all ranks should meet");
            it.register(&world);
            it.reduce(&world);
            it.registrar.agree(&[&world]).expect("the ranks should agree");
            it.exchange(&world);
            it.sleep_and_wake(&world);
            // Rank 3 leaves, and joins again.
            let rest = (rank < 3).then(|| world.shrink(&[3]).expect("the remaining ranks shrink"));
            if let Some(rest) = &rest {
                it.register(rest);
                it.reduce(rest);
            }
            let id = grow_id(rest.as_ref());
            let builder = Communicator::builder(&it.device).deadline(PATIENT).name("grown");
            let grown = match &rest {
                Some(rest) => builder.grow(rest, id, 4),
                None => builder.join(id, 3, 4),
            };
            let grown = grown.expect("all ranks should arrive");
            it.register(&grown);
            it.reduce(&grown);
            it.exchange(&grown);
            [rest, Some(grown), Some(world)]
                .into_iter()
                .flatten()
                .for_each(|comm| comm.destroy().expect("the communicator should be idle"));
            nccl::assert_clean();
            // NCCL needs all processes until every rank has destroyed its communicators.
            mark("done", rank);
            until(|| is_marked(&folder(), "done", 0..RANKS));
        },
        |machines| machines.set(SLOW),
    );
    if let Some(outputs) = outputs {
        assert_success(&outputs, |_| true);
    }
});

/// A fault of a job whose ranks reduce repeatedly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// The process of a rank is killed.
    Killed(usize),
    /// The process of a rank is stopped.
    Stopped(usize),
    /// All packets are lost.
    Cut,
    /// All packets from a machine are lost.
    CutFrom(usize),
    /// Packets arrive later than the deadline.
    Late,
}

const EVENTS: [Event; 8] = [
    Event::Killed(2),
    Event::Killed(0),
    Event::Stopped(3),
    Event::Stopped(0),
    Event::Cut,
    Event::CutFrom(0),
    Event::CutFrom(1),
    Event::Late,
];

impl Event {
    fn happen(self, machines: &Machines, folder: &Path) {
        let signal = |rank: usize, signal| {
            let pid = fs::read_to_string(folder.join(format!("reduced.{rank}"))).expect("marked");
            // SAFETY: the call only ends or stops a rank of this test.
            unsafe { libc::kill(pid.parse().expect("it should be a number"), signal) };
        };
        let cut = Quality { is_cut: true, ..Quality::default() };
        match self {
            Event::Killed(rank) => signal(rank, libc::SIGKILL),
            Event::Stopped(rank) => signal(rank, libc::SIGSTOP),
            Event::Cut => machines.cut(),
            Event::CutFrom(machine) => machines.set_from(machine, cut),
            Event::Late => machines.set(Quality { delay: 4 * DEADLINE, ..Quality::default() }),
        }
    }

    /// Returns `true` if the rank survives.
    fn is_survivor(self, rank: usize) -> bool {
        !matches!(self, Event::Killed(victim) | Event::Stopped(victim) if victim == rank)
    }

    /// Returns the ranks that the error of a rank may name first.
    fn blamed(self, rank: usize) -> Vec<usize> {
        match self {
            Event::Killed(victim) | Event::Stopped(victim) => vec![victim],
            // Each side names the other one. Ranks of machine 1 know of machine 0 from rank 0.
            _ if rank < RANKS / 2 => vec![2, 3],
            _ => vec![0],
        }
    }

    /// Returns what is wrong with the end of the job.
    fn complaints(self) -> Vec<String> {
        let folder = tempfile::tempdir().expect("a folder should be created");
        let options = [(FOLDER, &*folder.path().to_string_lossy()), (SCENARIO, &*format!("{self:?}"))];
        let mut since = None;
        let outputs = ranks_of_machines(
            RANKS,
            &options,
            |_| unreachable!("a rank has a scenario"),
            |machines| {
                until(|| is_marked(folder.path(), "reduced", 0..RANKS));
                since = Some(std::time::SystemTime::now());
                self.happen(machines, folder.path());
                if let Event::Stopped(rank) = self {
                    until(|| is_marked(folder.path(), "ended", (0..RANKS).filter(|other| *other != rank)));
                    Event::Killed(rank).happen(machines, folder.path());
                }
            },
        );
        let limit = scaled_to_load(DEADLINE + LATE);
        let mut wrong = Vec::new();
        for output in outputs.iter().flatten().filter(|output| self.is_survivor(output.rank)) {
            let (named, said) = said(output);
            let took = output.ended.duration_since(since.expect("it happened")).unwrap_or_default();
            println!("{self:?}: rank {} ended after {took:?}: {said}", output.rank);
            if named.is_none_or(|rank| !self.blamed(output.rank).contains(&rank)) || took > limit {
                wrong.push(format!("{self:?}: rank {} after {took:?}: {said}\n{}", output.rank, output.text));
            }
        }
        wrong
    }
}

/// Prints the error of a rank, after the rank that it names first.
fn say(error: &CommError) {
    println!("\nERROR {} {error}", first_rank(error).map_or(-1, i64::from));
}

/// Returns the rank that the error of a rank names first, and the error.
fn said(output: &RankOutput) -> (Option<usize>, &str) {
    let line = output.text.lines().find_map(|line| line.strip_prefix("ERROR "));
    let (rank, error) = line.and_then(|line| line.split_once(' ')).unwrap_or_default();
    (rank.parse().ok(), error)
}

/// Returns the rank that a failure names first.
fn first_rank(error: &CommError) -> Option<u32> {
    match error {
        CommError::Failed(failure) => match &failure.cause {
            FailureCause::RankGone { rank, .. } | FailureCause::RankStopped { rank, .. } => Some(*rank),
            FailureCause::RankFailed { rank, report } => Some(report.first_rank.unwrap_or(*rank)),
            _ => None,
        },
        CommError::Gone { cause: Some(cause), .. } => first_rank(cause),
        _ => None,
    }
}

// A rank that cannot be reached and one that is dead end the same way within the deadline, on both sides.
nccl_test!(each_side_of_a_partition_names_the_other_as_if_it_were_dead, {
    if std::env::var_os(SCENARIO).is_some() {
        ranks_of_machines(
            RANKS,
            &[],
            |rank| {
                let mut it = Rank::new(rank);
                let world = it.connect(DEADLINE).expect("all ranks should meet");
                let mut step = || {
                    world.all_reduce_in_place(&mut it.sums, ReduceOp::Sum, &it.stream)?;
                    world.synchronize(&it.stream)
                };
                step().expect("all ranks should take part");
                mark("reduced", rank);
                let error = until_some(|| step().err());
                say(&error);
                mark("ended", rank);
            },
            |_| (),
        );
    }
    let complaints: Vec<String> = std::thread::scope(|scope| {
        let start = |event: Event| {
            scope.spawn(move || {
                let _exit = ExitOnPanic;
                event.complaints()
            })
        };
        let threads = EVENTS.map(start);
        threads.into_iter().flat_map(|thread| thread.join().expect("a panic ends the process")).collect()
    });
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
});

// The link is cut between the meeting and the creation of a communicator, which NCCL does not bound.
nccl_test!(each_side_of_a_partition_names_the_other_while_ranks_connect, {
    let shared = tempfile::tempdir().expect("a folder should be created");
    let options = [(FOLDER, &*shared.path().to_string_lossy())];
    let outputs = ranks_of_machines(
        RANKS,
        &options,
        |rank| {
            let device = CudaDevice::new(rank).expect("the stub should have a device");
            let id =
                UniqueId::for_job(&Launch::from_env().expect("torchrun's"), PATIENT).expect("all ranks should meet");
            mark("met", rank);
            until(|| is_marked(&folder(), "cut", 0..1));
            let error = Communicator::builder(&device).deadline(DEADLINE).connect(id, rank as u32, RANKS as u32);
            let error = error.map(|_| ()).expect_err("the other machine cannot be reached");
            say(&error);
        },
        |machines| {
            until(|| is_marked(shared.path(), "met", 0..RANKS));
            machines.cut();
            fs::write(shared.path().join("cut.0"), "").expect("the write should succeed");
        },
    );
    for output in outputs.iter().flatten() {
        let said = said(output);
        println!("rank {}: {}", output.rank, said.1);
        assert!(said.0.is_some_and(|rank| Event::Cut.blamed(output.rank).contains(&rank)), "{outputs:#?}");
    }
});
