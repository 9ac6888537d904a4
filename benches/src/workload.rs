//! Workloads: ops with dense numbers, and what they run on.
//!
//! A [`Workload`] is a program without everything rare: allocations, frees and uses on other streams, closed by freeing
//! what is left. Running it costs a match and a table lookup per op, the same for every [`Subject`].

use std::hint::black_box;
use symmalloc_core::backend::Backend;
use symmalloc_core::ids::{Placement, PoolId, StreamId};
use symmalloc_core::op::Op;
use symmalloc_core::{Allocator, Handle};
use symmalloc_trace::replay::Program;

/// One op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Makes the allocation of this number.
    Allocate {
        /// The allocation.
        number: u32,
        /// The stream.
        stream: StreamId,
        /// Bytes asked for.
        size_bytes: u64,
    },
    /// Frees the allocation of this number.
    Free {
        /// The allocation.
        number: u32,
        /// The stream that it was made for, which a runtime's buffer knows.
        stream: StreamId,
    },
    /// Another stream uses the allocation of this number.
    RecordUse {
        /// The allocation.
        number: u32,
        /// The stream.
        stream: StreamId,
    },
}

/// Steps that leave nothing allocated.
#[derive(Clone, Debug, Default)]
pub struct Workload {
    steps: Vec<Step>,
    /// The stream of each allocation.
    owners: Vec<StreamId>,
    streams: u16,
}

/// An allocator under measurement.
pub trait Subject {
    /// How it names an allocation.
    type Handle: Copy;

    /// Makes the next stream.
    fn register_stream(&mut self);

    /// Allocates for work on a stream.
    fn allocate(&mut self, stream: StreamId, size_bytes: u64) -> Self::Handle;

    /// Frees what was allocated for work on a stream.
    fn free(&mut self, stream: StreamId, handle: Self::Handle);

    /// Notes a use on another stream.
    fn record_use(&mut self, handle: Self::Handle, stream: StreamId);

    /// Where an allocation lies.
    fn placement(&self, handle: Self::Handle) -> Placement;

    /// Device memory held, in bytes.
    fn reserved_bytes(&self) -> u64;
}

impl Workload {
    /// Makes the next allocation. They are numbered 0, 1, 2 ... in the order in which they are made.
    pub fn allocate(&mut self, stream: StreamId, size_bytes: u64) {
        let number = self.owners.len() as u32;
        self.streams = self.streams.max(stream.0 + 1);
        self.owners.push(stream);
        self.steps.push(Step::Allocate { number, stream, size_bytes });
    }

    /// Frees an allocation.
    ///
    /// # Panics
    /// When it was not made before.
    pub fn free(&mut self, number: u32) {
        let stream = self.owners[number as usize];
        self.steps.push(Step::Free { number, stream });
    }

    /// Uses an allocation on another stream.
    pub fn record_use(&mut self, number: u32, stream: StreamId) {
        self.streams = self.streams.max(stream.0 + 1);
        self.steps.push(Step::RecordUse { number, stream });
    }

    /// Frees what is still allocated, in the order in which it was made.
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

    /// The steps.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Number of ops.
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// The most bytes that are requested and not freed at any time.
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

    /// Number of allocations.
    pub fn allocations(&self) -> usize {
        self.owners.len()
    }

    /// Number of streams.
    pub fn streams(&self) -> u16 {
        self.streams
    }
}

impl From<&Program> for Workload {
    /// The allocations, frees and uses of a program that has no other pool than the default one, closed.
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

/// A subject with a workload and room for its handles: everything that a repeat needs, made before it is measured.
#[derive(Clone, Debug)]
pub struct Bench<S: Subject> {
    subject: S,
    workload: Workload,
    handles: Vec<Option<S::Handle>>,
}

impl<S: Subject> Bench<S> {
    /// In steady state: the streams are registered and the workload has run once.
    pub fn warm(mut subject: S, workload: Workload) -> Self {
        (0..workload.streams()).for_each(|_| subject.register_stream());
        let handles = vec![None; workload.allocations()];
        let mut bench = Bench { subject, workload, handles };
        bench.repeat();
        bench
    }

    /// Runs the workload once. What is measured.
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

    /// Runs the workload once and gives the placement of each allocation, in order. Not for measuring.
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
                    self.subject.free(stream, self.handles[number as usize].expect("made before"));
                }
                Step::RecordUse { number, stream } => {
                    self.subject.record_use(self.handles[number as usize].expect("made before"), stream);
                }
            }
        }
        placements
    }

    /// The allocator.
    pub fn subject(&self) -> &S {
        &self.subject
    }

    /// The allocator, to be told something.
    pub fn subject_mut(&mut self) -> &mut S {
        &mut self.subject
    }

    /// Ops of one repeat.
    pub fn ops(&self) -> usize {
        self.workload.len()
    }
}

impl<B: Backend> Subject for Allocator<B> {
    type Handle = Handle;

    fn register_stream(&mut self) {
        Allocator::register_stream(self).expect("fewer than 65,535 streams");
    }

    #[inline]
    fn allocate(&mut self, stream: StreamId, size_bytes: u64) -> Handle {
        Allocator::allocate(self, PoolId::DEFAULT, stream, size_bytes).expect("memory is endless").handle
    }

    #[inline]
    fn free(&mut self, _: StreamId, handle: Handle) {
        Allocator::free(self, handle).expect("freed once");
    }

    #[inline]
    fn record_use(&mut self, handle: Handle, stream: StreamId) {
        Allocator::record_use(self, handle, stream).expect("live");
    }

    fn placement(&self, handle: Handle) -> Placement {
        self.allocation(handle).expect("live").placement
    }

    fn reserved_bytes(&self) -> u64 {
        self.stats().reserved_bytes.current
    }
}

/// No allocator at all: what is measured on it is the driver, which the other figures contain.
///
/// It does what a driver must do to reach an allocator, and has handles of the size of ours.
#[derive(Clone, Debug, Default)]
pub struct Nothing {
    /// By stream, in place of a heap: the last handle given.
    heaps: Vec<NoHandle>,
}

/// As large as a handle.
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
