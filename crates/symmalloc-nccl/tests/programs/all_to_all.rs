//! Programs with all-to-all-v that every rank runs, on stubs and on GPUs alike.

use cudarc::driver::{CudaStream, DeviceRepr, ValidAsZeroBits};
use std::fmt::Debug;
use std::sync::{Arc, Barrier};
use std::time::Duration;
use symmalloc_core::{Config, PoolConfig};
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaDevice, DeviceBuffer, Pool};
use symmalloc_nccl::{AllToAll, Communicator, CommunicatorBuilder, Registrar, Registration, Splits, UniqueId};

/// Registered memory of every rank.
const POOL_BYTES: u64 = 16 << 20;

/// A rank with registered memory.
pub(crate) struct Rank {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    pub(crate) comm: Communicator,
    pub(crate) stream: Arc<CudaStream>,
    pub(crate) pool: Pool<CudaBackend>,
    /// Of the pool.
    pub(crate) allocator: CudaAllocator,
    pub(crate) registrar: Arc<Registrar>,
}

/// Runs a program on every rank, a thread and a device each; returns what they returned, by rank.
pub(crate) fn on_ranks<R: Send>(ranks: u32, program: impl Fn(Rank) -> R + Sync) -> Vec<R> {
    on_ranks_with(ranks, |builder| builder, program)
}

/// As [`on_ranks`], with communicators of another kind.
pub(crate) fn on_ranks_with<R: Send>(
    ranks: u32,
    options: impl Fn(CommunicatorBuilder) -> CommunicatorBuilder + Sync,
    program: impl Fn(Rank) -> R + Sync,
) -> Vec<R> {
    let id = UniqueId::new().expect("NCCL gives an id");
    let (options, program) = (&options, &program);
    std::thread::scope(|scope| {
        let run = |rank| {
            scope.spawn(move || {
                let device = CudaDevice::new(rank as usize).expect("a device for every rank");
                let builder = Communicator::builder(&device).deadline(Duration::from_secs(60));
                let comm = options(builder).connect(id, rank, ranks).expect("connected");
                program(Rank::new(comm))
            })
        };
        let threads: Vec<_> = (0..ranks).map(run).collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    })
}

impl Rank {
    fn new(comm: Communicator) -> Self {
        let stream = comm.device().context().new_stream().expect("a stream");
        let allocator = CudaAllocator::new(comm.device(), Config::default()).expect("an allocator");
        allocator.register_stream(&stream).expect("registered");
        let config = PoolConfig::builder().reserved(POOL_BYTES).symmetric(true).build().expect("it fits");
        let pool = allocator.create_pool(config).expect("a pool");
        let registrar = Arc::new(Registrar::builder(&allocator).build().expect("a registrar"));
        registrar.attach(&comm, &[pool.id()], Registration::Windows).expect("attached");
        let allocator = allocator.with_pool(&pool);
        let (rank, ranks) = (comm.rank() as usize, comm.ranks() as usize);
        let it = Rank { rank, ranks, comm, stream, pool, allocator, registrar };
        // The pool's only segment is born, and gets its window.
        drop(it.zeros::<u8>(1));
        it.registrar.sync(&[&it.comm]).expect("in step");
        it
    }

    pub(crate) fn all_to_all(&self) -> AllToAll {
        AllToAll::builder(&self.comm).require_registered(&self.registrar).build().expect("built")
    }

    /// A buffer in registered memory.
    pub(crate) fn zeros<T: DeviceRepr + ValidAsZeroBits>(&self, len: usize) -> DeviceBuffer<T> {
        self.allocator.alloc_zeroed(&self.stream, len).expect("allocated")
    }

    pub(crate) fn buffer<T: Element>(&self, elements: &[T]) -> DeviceBuffer<T> {
        let mut buffer = self.zeros(elements.len());
        self.stream.memcpy_htod(elements, &mut buffer).expect("copied");
        buffer
    }

    pub(crate) fn read<T: Element>(&self, buffer: &DeviceBuffer<T>) -> Vec<T> {
        let elements = self.stream.clone_dtoh(buffer).expect("copied");
        self.stream.synchronize().expect("done");
        elements
    }

    /// What this rank sends with these splits, and what it receives, in rows of `row_elements`.
    pub(crate) fn elements<T: Element>(&self, seed: u64, splits: &Splits, row_elements: usize) -> (Vec<T>, Vec<T>) {
        let rows = |from: usize, to: usize, rows: u64| {
            (0..rows as usize * row_elements)
                .map(move |at| T::of(mix(seed ^ mix((from << 32 | to) as u64) ^ at as u64)))
        };
        let sent = splits.input().rows().iter().enumerate().flat_map(|(to, count)| rows(self.rank, to, *count));
        let received =
            splits.output().rows().iter().enumerate().flat_map(|(from, count)| rows(from, self.rank, *count));
        (sent.collect(), received.collect())
    }

    /// Exchanges rows of this type with these splits and checks every element, also of what lies behind the rows. The buffers
    /// are as long on every rank, as symmetric memory wants it.
    pub(crate) fn round<T: Element>(&self, all_to_all: &AllToAll, seed: u64, splits: &Splits, row_elements: usize) {
        let (mut sent, mut expected) = self.elements::<T>(seed, splits, row_elements);
        let len = self.ranks * ROWS_MAX as usize * row_elements + seed as usize % 5;
        sent.resize(len, T::of(!seed));
        let input = self.buffer(&sent);
        let mut output = self.buffer(&vec![T::of(!seed); len]);
        all_to_all.run(&self.stream, &input, &mut output, row_elements, splits).expect("exchanged");
        expected.resize(len, T::of(!seed));
        assert_eq!(self.read(&output), expected, "rank {}, seed {seed}, {splits:?}", self.rank);
    }
}

/// The most rows from one rank to another.
const ROWS_MAX: u64 = 22;

/// Rows that every rank sends to every other, as a function of a seed: none for some, many for others.
pub(crate) fn counts(seed: u64, ranks: usize) -> Vec<Vec<u64>> {
    let count = |from: usize, to: usize| {
        let drawn = mix(seed ^ mix((from << 16 | to) as u64));
        if drawn % 3 == 0 { 0 } else { (drawn >> 8) % (ROWS_MAX + 1) }
    };
    (0..ranks).map(|from| (0..ranks).map(|to| count(from, to)).collect()).collect()
}

/// The splits of a rank that knows what all of them send.
pub(crate) fn known_splits(counts: &[Vec<u64>], rank: usize) -> Splits {
    let received: Vec<u64> = counts.iter().map(|row| row[rank]).collect();
    Splits::sending(&counts[rank]).receiving(&received).expect("they fit")
}

/// A type of elements.
pub(crate) trait Element: DeviceRepr + ValidAsZeroBits + Copy + PartialEq + Debug + Send {
    /// An element of any bits.
    fn of(bits: u64) -> Self;
}

macro_rules! elements {
    ($($type:ty),*) => {
        $(impl Element for $type {
            fn of(bits: u64) -> Self {
                // Also for floats: whole numbers, which compare as they are.
                (bits >> 40) as $type
            }
        })*
    };
}

elements!(u8, i8, u16, u32, i32, u64, f32, f64);

/// SplitMix64's finaliser.
pub(crate) fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Calls of [`many_calls`] before anything is counted.
const WARM_UP_CALLS: u64 = 1_000;

/// What a process and its driver hold, as far as a program may leak it.
pub(crate) trait Holdings: Copy + Debug + PartialEq {
    fn now() -> Self;
}

/// Makes many calls, with splits that change with each of them, and compares what there is before and after. Buffers are
/// taken and dropped for each call. Returns what is left of the resident memory of the process, in bytes, between the first
/// and the second half of the calls.
pub(crate) fn many_calls<H: Holdings>(calls: u64, ranks: u32) -> i64 {
    let barrier = Barrier::new(ranks as usize);
    let grown = on_ranks(ranks, |it| {
        let all_to_all = it.all_to_all();
        let call = |seed| {
            let counts = counts(seed, it.ranks);
            let splits = all_to_all.exchange_splits(&counts[it.rank]).expect("exchanged");
            it.round::<u32>(&all_to_all, seed, &splits, 1 + seed as usize % 3);
        };
        let held = || {
            barrier.wait();
            let held = (
                H::now(),
                it.registrar.stats(),
                it.allocator.stats().segments_born,
                all_to_all.segments(),
                open_files(),
            );
            let resident = resident_bytes();
            barrier.wait();
            (held, resident)
        };
        (0..WARM_UP_CALLS).for_each(call);
        let (before, _) = held();
        (WARM_UP_CALLS..WARM_UP_CALLS + calls / 2).for_each(call);
        let (half, resident_half) = held();
        (WARM_UP_CALLS + calls / 2..WARM_UP_CALLS + calls).for_each(call);
        let (after, resident_after) = held();
        assert_eq!(half, before, "rank {} after half of the calls", it.rank);
        assert_eq!(after, before, "rank {} after all calls", it.rank);
        assert_eq!(it.allocator.drop_errors().count, 0);
        resident_after as i64 - resident_half as i64
    });
    grown[0]
}

/// Open file descriptors of this process.
fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("Linux").count()
}

/// Memory of this process that is in RAM.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages = statm.split_whitespace().nth(1).expect("the second field").parse::<u64>().expect("a number");
    pages * 4096
}
