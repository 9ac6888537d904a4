//! Programs with all-to-all-v that every rank runs. They run both on stubs and on GPUs.

use cudarc::driver::{CudaStream, DeviceRepr, ValidAsZeroBits};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;
use symmalloc_core::{Config, PoolConfig};
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaDevice, DeviceBuffer, GraphPool, Pool};
use symmalloc_nccl::{
    AllToAll, AllToAllError, Communicator, CommunicatorBuilder, Registrar, Registration, Side, Splits, UniqueId,
};

/// Bytes of registered memory on each rank.
const POOL_BYTES: u64 = 16 << 20;

/// A rank with registered memory.
pub(crate) struct Rank {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    pub(crate) comm: Communicator,
    pub(crate) stream: Arc<CudaStream>,
    _pool: Pool<CudaBackend>,
    /// Allocator of the registered pool.
    pub(crate) allocator: CudaAllocator,
    pub(crate) registrar: Arc<Registrar>,
}

/// Runs a program on every rank, each with a thread and a device. Returns the results by rank.
pub(crate) fn on_ranks<R: Send>(ranks: u32, program: impl Fn(&Rank) -> R + Sync) -> Vec<R> {
    on_ranks_with(ranks, |builder| builder, program)
}

/// Like [`on_ranks`], with other options for the communicators.
pub(crate) fn on_ranks_with<R: Send>(
    ranks: u32,
    options: impl Fn(CommunicatorBuilder) -> CommunicatorBuilder + Sync,
    program: impl Fn(&Rank) -> R + Sync,
) -> Vec<R> {
    let id = UniqueId::new().expect("NCCL creates an id");
    let (options, program) = (&options, &program);
    std::thread::scope(|scope| {
        let run = |rank| {
            scope.spawn(move || {
                let device = CudaDevice::for_local_rank(rank).expect("a device for every rank");
                let builder = Communicator::builder(&device).deadline(Duration::from_secs(60));
                let comm = options(builder).connect(id, rank, ranks).expect("the connection should succeed");
                program(&Rank::new(comm))
            })
        };
        let threads: Vec<_> = (0..ranks).map(run).collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank should panic")).collect()
    })
}

impl Rank {
    fn new(comm: Communicator) -> Self {
        let stream = comm.device().context().new_stream().expect("the driver should create a stream");
        let allocator = CudaAllocator::new(comm.device(), Config::default()).expect("the allocator should be created");
        allocator.register_stream(&stream).expect("the stream should be registered");
        let config =
            PoolConfig::builder().reserved(POOL_BYTES).symmetric(true).build().expect("the configuration is valid");
        let pool = allocator.create_pool(config).expect("the pool should be created");
        let registrar = Arc::new(Registrar::builder(&allocator).build().expect("the registrar should be created"));
        registrar.attach(&comm, &[pool.id()], Registration::Windows).expect("the pool should be attachable");
        let allocator = allocator.with_pool(&pool);
        let (rank, ranks) = (comm.rank() as usize, comm.ranks() as usize);
        let it = Rank { rank, ranks, comm, stream, _pool: pool, allocator, registrar };
        // Creates the pool's only segment and its window.
        drop(it.zeros::<u8>(1));
        it.registrar.sync(&[&it.comm]).expect("the ranks should agree");
        it
    }

    /// Creates an all-to-all that requires registered memory.
    pub(crate) fn all_to_all(&self) -> AllToAll {
        AllToAll::builder(&self.comm).require_registered(&self.registrar).build().expect("the build should succeed")
    }

    /// Returns a zeroed buffer in registered memory.
    pub(crate) fn zeros<T: DeviceRepr + ValidAsZeroBits>(&self, len: usize) -> DeviceBuffer<T> {
        self.allocator.alloc_zeroed(&self.stream, len).expect("the allocation should succeed")
    }

    /// Returns a buffer in registered memory that contains these elements.
    pub(crate) fn buffer<T: Element>(&self, elements: &[T]) -> DeviceBuffer<T> {
        let mut buffer = self.zeros(elements.len());
        self.stream.memcpy_htod(elements, &mut buffer).expect("the copy should succeed");
        buffer
    }

    /// Returns the contents of a buffer after all preceding work has finished.
    pub(crate) fn read<T: Element>(&self, buffer: &DeviceBuffer<T>) -> Vec<T> {
        let elements = self.stream.clone_dtoh(buffer).expect("the copy should succeed");
        self.stream.synchronize().expect("the work should complete");
        elements
    }

    /// Returns the elements that this rank sends and those that it receives with these splits, in rows of `row_elements`.
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

    /// Exchanges rows of this type with these splits and checks every element, including those after the rows. The buffers have the same
    /// length on every rank, as symmetric memory requires.
    pub(crate) fn round<T: Element>(&self, all_to_all: &AllToAll, seed: u64, splits: &Splits, row_elements: usize) {
        let (mut sent, mut expected) = self.elements::<T>(seed, splits, row_elements);
        let len = self.ranks * ROWS_MAX as usize * row_elements + seed as usize % 5;
        sent.resize(len, T::of(!seed));
        let input = self.buffer(&sent);
        let mut output = self.buffer(&vec![T::of(!seed); len]);
        all_to_all
            .run(&self.stream, &input, &mut output, row_elements, splits)
            .expect("the ranks should exchange their splits");
        expected.resize(len, T::of(!seed));
        assert_eq!(self.read(&output), expected, "rank {}, seed {seed}, {splits:?}", self.rank);
    }
}

/// Limit on the rows from one rank to another.
const ROWS_MAX: u64 = 22;

/// Returns the rows that each rank sends to each other rank, as a function of a seed: no rows for some pairs, many for others.
pub(crate) fn counts(seed: u64, ranks: usize) -> Vec<Vec<u64>> {
    let count = |from: usize, to: usize| {
        let drawn = mix(seed ^ mix((from << 16 | to) as u64));
        if drawn.is_multiple_of(3) { 0 } else { (drawn >> 8) % (ROWS_MAX + 1) }
    };
    (0..ranks).map(|from| (0..ranks).map(|to| count(from, to)).collect()).collect()
}

/// Returns the splits of a rank that knows all counts.
pub(crate) fn known_splits(counts: &[Vec<u64>], rank: usize) -> Splits {
    let received: Vec<u64> = counts.iter().map(|row| row[rank]).collect();
    Splits::sending(&counts[rank]).receiving(&received).expect("the splits are valid")
}

/// An element type.
pub(crate) trait Element: DeviceRepr + ValidAsZeroBits + Copy + PartialEq + Debug + Send {
    /// Converts these bits to an element.
    fn of(bits: u64) -> Self;
}

macro_rules! elements {
    ($($type:ty),*) => {
        $(impl Element for $type {
            fn of(bits: u64) -> Self {
                // Floats are whole numbers as well, so they compare exactly.
                (bits >> 40) as $type
            }
        })*
    };
}

elements!(u8, i8, u16, u32, i32, u64, f32, f64);

/// Returns SplitMix64's finalizer of a value.
pub(crate) fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Exchanges rows of various types and sizes, with known splits.
pub(crate) fn uneven_rows(it: &Rank) {
    let all_to_all = it.all_to_all();
    for seed in 0..40 {
        let splits = known_splits(&counts(seed, it.ranks), it.rank);
        it.round::<u8>(&all_to_all, seed, &splits, 1);
        it.round::<u16>(&all_to_all, seed, &splits, 3);
        it.round::<f32>(&all_to_all, seed, &splits, 17);
        it.round::<f64>(&all_to_all, seed, &splits, 2);
        it.round::<i32>(&all_to_all, seed, &splits.reversed(), 5);
    }
    assert_eq!(all_to_all.segments().len(), 1, "one segment is used, regardless of the sizes");
}

/// Exchanges equal numbers of rows with every rank, without splits.
pub(crate) fn equal_parts(it: &Rank) {
    let all_to_all = it.all_to_all();
    let part = |from: usize, to: usize| (0..4).map(move |at| (from * 1000 + to * 10 + at) as u32);
    let sent: Vec<u32> = (0..it.ranks).flat_map(|to| part(it.rank, to)).collect();
    let (input, mut output) = (it.buffer(&sent), it.zeros::<u32>(sent.len()));
    all_to_all.run(&it.stream, &input, &mut output, 2, None).expect("the ranks should exchange their splits");
    assert_eq!(it.read(&output), (0..it.ranks).flat_map(|from| part(from, it.rank)).collect::<Vec<_>>());
}

/// Sends everything from the first rank to the last.
pub(crate) fn one_way(it: &Rank) {
    let all_to_all = it.all_to_all();
    let mut rows = vec![0; it.ranks];
    if it.rank == 0 {
        rows[it.ranks - 1] = 6;
    }
    let splits = all_to_all.exchange_splits(&rows).expect("the ranks should exchange their splits");
    let sent = it.buffer::<u64>(&vec![7; splits.input().total() as usize]);
    let mut received = it.zeros::<u64>(splits.output().total() as usize);
    all_to_all.run(&it.stream, &sent, &mut received, 1, &splits).expect("the ranks should exchange their splits");
    let expected = if it.rank == it.ranks - 1 { vec![7; 6] } else { vec![] };
    assert_eq!(it.read(&received), expected);
}

/// Makes calls that differ between ranks, with checks: all ranks get the error and can continue.
pub(crate) fn disagreements(it: &Rank) {
    let all_to_all = AllToAll::builder(&it.comm).check_calls().build().expect("the build should succeed");
    let counts = counts(5, it.ranks);
    let right = known_splits(&counts, it.rank);
    it.round::<u32>(&all_to_all, 5, &right, 2);
    let (input, mut output) = (it.zeros::<u32>(4000), it.zeros::<u32>(4000));
    let last = it.ranks - 1;

    // The splits change on the last rank only.
    let mut changed = counts.clone();
    changed[last][0] += 1;
    let splits = if it.rank == last { known_splits(&changed, it.rank) } else { right.clone() };
    let refused = all_to_all.run(&it.stream, &input, &mut output, 2, &splits).expect_err("the ranks' calls differ");
    let AllToAllError::Disagreement { from, to: 0, sent_rows, expected_rows, .. } = refused else {
        panic!("{refused}")
    };
    assert_eq!((from, sent_rows, expected_rows), (last, counts[last][0] + 1, counts[last][0]));

    // Only rank 1 has longer rows.
    let row = if it.rank == 1 { 3 } else { 2 };
    let refused = all_to_all.run(&it.stream, &input, &mut output, row, &right).expect_err("the ranks' calls differ");
    assert!(matches!(refused, AllToAllError::Disagreement { sent_row_bytes: 8 | 12, .. }), "{refused}");

    // Rank 0 passes a buffer that is too short.
    let len = if it.rank == 0 { 0 } else { 4000 };
    let refused = all_to_all.run(&it.stream, &input.slice(..len), &mut output, 2, &right).expect_err("refused");
    match it.rank {
        0 => assert!(matches!(refused, AllToAllError::BufferTooShort { side: Side::Input, len: 0, .. }), "{refused}"),
        _ => assert_eq!(refused, AllToAllError::Refused { rank: 0 }),
    }

    // Rank 1 exchanges splits while the others move rows.
    let refused = match it.rank {
        1 => all_to_all.exchange_splits(&counts[1]).map(|_| ()),
        _ => all_to_all.run(&it.stream, &input, &mut output, 2, &right),
    };
    assert_eq!(refused, Err(AllToAllError::DifferentCalls { rank: usize::from(it.rank != 1) }));
    it.round::<u32>(&all_to_all, 6, &right, 2);
}

/// Captures a call and launches it repeatedly, with different rows each time.
pub(crate) fn captured(it: &Rank) {
    let all_to_all = it.all_to_all();
    let counts = counts(8, it.ranks);
    let splits = all_to_all.exchange_splits(&counts[it.rank]).expect("the ranks should exchange their splits");
    let rows_max =
        splits.input_rows_max().max(splits.output_rows_max()).expect("the ranks should exchange their splits");
    let (mut input, mut output) = (it.zeros::<u32>(3 * rows_max as usize), it.zeros::<u32>(3 * rows_max as usize));
    // The first call connects the ranks.
    all_to_all.run(&it.stream, &input, &mut output, 3, &splits).expect("the ranks should exchange their splits");

    let graphs = GraphPool::new(it.registrar.allocator(), PoolConfig::default()).expect("there should be a pool");
    let capture = graphs.begin(&it.stream).expect("the capture should begin");
    assert_eq!(all_to_all.exchange_splits(&counts[it.rank]), Err(AllToAllError::Capturing));
    all_to_all.run(&it.stream, &input, &mut output, 3, &splits).expect("the call should be captured");
    let graph = capture.end().expect("the capture should end");
    for seed in 0..5 {
        let (sent, received) = it.elements::<u32>(seed, &splits, 3);
        it.stream.memcpy_htod(&sent, &mut input).expect("the copy should succeed");
        graph.launch(&it.stream).expect("the graph should be launched");
        assert_eq!(it.read(&output)[..received.len()], received, "launch {seed}");
    }
}
