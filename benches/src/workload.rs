//! Workloads: ops with densely numbered allocations, and the allocators that they run on.
//!
//! A [`Workload`] is a program without rare ops: allocations, frees and uses on other streams, followed by frees of all
//! remaining allocations. Running it costs a match and a table lookup per op, the same for every [`Subject`].

use std::hint::black_box;
use symmalloc_core::backend::Backend;
use symmalloc_core::ids::{AllocationId, Placement, PoolId, StreamId};
use symmalloc_core::op::Op;
use symmalloc_core::{Allocator, Handle};
use symmalloc_trace::Trace;
use symmalloc_trace::replay::Program;

/// One op of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Makes the allocation with this number.
    Allocate {
        /// The allocation.
        number: u32,
        /// The stream.
        stream: StreamId,
        /// Requested bytes.
        size_bytes: u64,
    },
    /// Frees the allocation with this number.
    Free {
        /// The allocation.
        number: u32,
        /// The stream of the allocation. Real runtimes store it in the buffer.
        stream: StreamId,
    },
    /// Another stream uses the allocation with this number.
    RecordUse {
        /// The allocation.
        number: u32,
        /// The stream.
        stream: StreamId,
    },
}

/// A list of steps that leaves nothing allocated.
#[derive(Clone, Debug, Default)]
pub struct Workload {
    steps: Vec<Step>,
    /// The stream of each allocation.
    owners: Vec<StreamId>,
    streams: u16,
}

/// An allocator under measurement.
pub trait Subject {
    /// The handle of an allocation.
    type Handle: Copy;

    /// Registers the next stream.
    fn register_stream(&mut self);

    /// Allocates for work on a stream.
    fn allocate(&mut self, stream: StreamId, size_bytes: u64) -> Self::Handle;

    /// Frees an allocation that was created for work on a stream.
    fn free(&mut self, stream: StreamId, handle: Self::Handle);

    /// Records a use on another stream.
    fn record_use(&mut self, handle: Self::Handle, stream: StreamId);

    /// Returns the placement of an allocation.
    fn placement(&self, handle: Self::Handle) -> Placement;

    /// Returns the reserved device memory in bytes.
    fn reserved_bytes(&self) -> u64;
}

impl Workload {
    /// Adds an allocation. Allocations are numbered 0, 1, 2, ... in order.
    pub fn allocate(&mut self, stream: StreamId, size_bytes: u64) {
        let number = self.owners.len() as u32;
        self.streams = self.streams.max(stream.0 + 1);
        self.owners.push(stream);
        self.steps.push(Step::Allocate { number, stream, size_bytes });
    }

    /// Adds the free of an allocation.
    ///
    /// # Panics
    /// Panics if there is no allocation with this number.
    pub fn free(&mut self, number: u32) {
        let stream = self.owners[number as usize];
        self.steps.push(Step::Free { number, stream });
    }

    /// Adds the use of an allocation on another stream.
    pub fn record_use(&mut self, number: u32, stream: StreamId) {
        self.streams = self.streams.max(stream.0 + 1);
        self.steps.push(Step::RecordUse { number, stream });
    }

    /// Adds frees of all remaining allocations, in allocation order.
    pub fn close(&mut self) {
        let mut live = vec![false; self.owners.len()];
        for step in &self.steps {
            match *step {
                Step::Allocate { number, .. } => live[number as usize] = true,
                Step::Free { number, .. } => live[number as usize] = false,
                Step::RecordUse { .. } => {}
            }
        }
        (0..live.len()).filter(|number| live[*number]).for_each(|number| self.free(number as u32));
    }

    /// Returns the steps.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Returns the number of ops.
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Returns `true` if there are no ops.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Returns the peak of bytes that are requested and not yet freed.
    pub fn live_bytes_peak(&self) -> u64 {
        let mut sizes = vec![0; self.allocations()];
        let (mut live, mut peak) = (0, 0);
        for step in &self.steps {
            match *step {
                Step::Allocate { number, size_bytes, .. } => {
                    sizes[number as usize] = size_bytes;
                    live += size_bytes;
                    peak = peak.max(live);
                }
                Step::Free { number, .. } => live -= sizes[number as usize],
                Step::RecordUse { .. } => {}
            }
        }
        peak
    }

    /// Returns the number of allocations.
    pub fn allocations(&self) -> usize {
        self.owners.len()
    }

    /// Returns the number of streams.
    pub fn streams(&self) -> u16 {
        self.streams
    }

    /// Returns the workload as a trace without a configuration.
    pub fn trace(&self) -> Trace {
        let id = |number: u32| AllocationId(number.into());
        let streams = (0..self.streams).map(|stream| Op::register(StreamId(stream)));
        let ops = self.steps.iter().map(|step| match *step {
            Step::Allocate { number, stream, size_bytes } => {
                Op::Allocate { id: id(number), pool: PoolId::DEFAULT, stream, size_bytes }
            }
            Step::Free { number, .. } => Op::Free { id: id(number) },
            Step::RecordUse { number, stream } => Op::RecordUse { id: id(number), stream },
        });
        Trace::new(None, streams.chain(ops).map(Into::into).collect()).expect("the ops of a workload are consistent")
    }
}

impl From<&Program> for Workload {
    /// Collects the allocations, frees and uses of a program that has only the default pool, and closes the workload.
    fn from(program: &Program) -> Self {
        let mut workload = Workload::default();
        for op in program.ops() {
            match *op {
                Op::Allocate { stream, size_bytes, .. } => workload.allocate(stream, size_bytes),
                Op::Free { id } => workload.free(id.0 as u32),
                Op::RecordUse { id, stream } => workload.record_use(id.0 as u32, stream),
                _ => {}
            }
        }
        workload.close();
        workload
    }
}

/// A subject with a workload and space for its handles, all created before the measurement.
#[derive(Clone, Debug)]
pub struct Bench<S: Subject> {
    subject: S,
    workload: Workload,
    handles: Vec<Option<S::Handle>>,
}

impl<S: Subject> Bench<S> {
    /// Brings a subject to steady state: registers the streams and runs the workload once.
    pub fn warm(mut subject: S, workload: Workload) -> Self {
        (0..workload.streams()).for_each(|_| subject.register_stream());
        let handles = vec![None; workload.allocations()];
        let mut bench = Bench { subject, workload, handles };
        bench.repeat();
        bench
    }

    /// Runs the workload once. This is the measured part.
    #[inline]
    pub fn repeat(&mut self) {
        for step in &self.workload.steps {
            match *step {
                Step::Allocate { number, stream, size_bytes } => {
                    self.handles[number as usize] = Some(self.subject.allocate(stream, size_bytes));
                }
                Step::Free { number, stream } => {
                    if let Some(handle) = self.handles[number as usize] {
                        self.subject.free(stream, handle);
                    }
                }
                Step::RecordUse { number, stream } => {
                    if let Some(handle) = self.handles[number as usize] {
                        self.subject.record_use(handle, stream);
                    }
                }
            }
        }
        black_box(&mut self.handles);
    }

    /// Runs the workload once and returns the placement of each allocation, in order. Not for measurements.
    pub fn placements(&mut self) -> Vec<Placement> {
        let mut placements = Vec::with_capacity(self.workload.allocations());
        for step in self.workload.steps.clone() {
            match step {
                Step::Allocate { number, stream, size_bytes } => {
                    let handle = self.subject.allocate(stream, size_bytes);
                    placements.push(self.subject.placement(handle));
                    self.handles[number as usize] = Some(handle);
                }
                Step::Free { number, stream } => {
                    self.subject.free(
                        stream,
                        self.handles[number as usize].expect("the allocation should have been made before"),
                    );
                }
                Step::RecordUse { number, stream } => {
                    self.subject.record_use(
                        self.handles[number as usize].expect("the allocation should have been made before"),
                        stream,
                    );
                }
            }
        }
        placements
    }

    /// Returns the allocator.
    pub fn subject(&self) -> &S {
        &self.subject
    }

    /// Returns a mutable reference to the allocator.
    pub fn subject_mut(&mut self) -> &mut S {
        &mut self.subject
    }

    /// Returns the number of ops of one repeat.
    pub fn ops(&self) -> usize {
        self.workload.len()
    }
}

impl<B: Backend> Subject for Allocator<B> {
    type Handle = Handle;

    fn register_stream(&mut self) {
        Allocator::register_stream(self).expect("at most 65,535 streams");
    }

    #[inline]
    fn allocate(&mut self, stream: StreamId, size_bytes: u64) -> Handle {
        Allocator::allocate(self, PoolId::DEFAULT, stream, size_bytes)
            .expect("the simulated device has unlimited memory")
            .handle
    }

    #[inline]
    fn free(&mut self, _: StreamId, handle: Handle) {
        Allocator::free(self, handle).expect("freed once");
    }

    #[inline]
    fn record_use(&mut self, handle: Handle, stream: StreamId) {
        Allocator::record_use(self, handle, stream).expect("the allocation should be live");
    }

    fn placement(&self, handle: Handle) -> Placement {
        self.allocation(handle).expect("the allocation should be live").placement
    }

    fn reserved_bytes(&self) -> u64 {
        self.stats().reserved_bytes.current
    }
}

/// A subject without an allocator, which measures the benchmark loop alone. All other results include the loop.
///
/// It looks up a stream's last handle, as the loop does to reach an allocator. Its handles have the size of [`Handle`].
#[derive(Clone, Debug, Default)]
pub struct Nothing {
    /// Last handle by stream, in place of a heap.
    heaps: Vec<NoHandle>,
}

/// A stand-in for [`Handle`], of the same size.
pub type NoHandle = [u64; size_of::<Handle>() / size_of::<u64>()];

impl Subject for Nothing {
    type Handle = NoHandle;

    fn register_stream(&mut self) {
        self.heaps.push(NoHandle::default());
    }

    #[inline]
    fn allocate(&mut self, stream: StreamId, size_bytes: u64) -> NoHandle {
        black_box(size_bytes);
        *black_box(&mut self.heaps[stream.index()])
    }

    #[inline]
    fn free(&mut self, stream: StreamId, handle: NoHandle) {
        black_box((&mut self.heaps[stream.index()], handle));
    }

    #[inline]
    fn record_use(&mut self, handle: NoHandle, stream: StreamId) {
        black_box((handle, stream));
    }

    fn placement(&self, _: NoHandle) -> Placement {
        Placement::NOWHERE
    }

    fn reserved_bytes(&self) -> u64 {
        0
    }
}
