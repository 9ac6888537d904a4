//! Workloads: ops with dense numbers, and what they run on.
//!
//! A [`Workload`] is a program without everything rare: allocations, frees and uses on other streams, closed by freeing
//! what is left. Running it costs a match and a table lookup per op, the same for every [`Subject`].

use std::hint::black_box;
use symmalloc_core::backend::Backend;
use symmalloc_core::ids::{Placement, PoolId, StreamId};
use symmalloc_core::lock::Lock;
use symmalloc_core::op::Op;
use symmalloc_core::replay::Program;
use symmalloc_core::{Allocator, Handle};

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
    allocations: u32,
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

    /// Frees.
    fn free(&mut self, handle: Self::Handle);

    /// Notes a use on another stream.
    fn record_use(&mut self, handle: Self::Handle, stream: StreamId);

    /// Where an allocation lies.
    fn placement(&self, handle: Self::Handle) -> Placement;

    /// Device memory held, in bytes.
    fn reserved_bytes(&self) -> u64;
}

impl Workload {
    /// Adds a step. Allocations are numbered 0, 1, 2 ... in the order in which they are made.
    ///
    /// # Panics
    /// When the allocation is not the next one, or was not made before.
    pub fn push(&mut self, step: Step) {
        let (number, stream) = match step {
            Step::Allocate { number, stream, .. } => {
                assert_eq!(number, self.allocations, "allocations are numbered in order");
                self.allocations += 1;
                (number, Some(stream))
            }
            Step::Free { number } => (number, None),
            Step::RecordUse { number, stream } => (number, Some(stream)),
        };
        assert!(number < self.allocations, "allocation {number} was not made before");
        self.streams = self.streams.max(stream.map_or(1, |stream| stream.0 + 1));
        self.steps.push(step);
    }

    /// Frees what is still allocated, in the order in which it was made.
    pub fn close(&mut self) {
        let mut live = vec![false; self.allocations as usize];
        for step in &self.steps {
            match *step {
                Step::Allocate { number, .. } => live[number as usize] = true,
                Step::Free { number } => live[number as usize] = false,
                Step::RecordUse { .. } => {}
            }
        }
        for number in (0..self.allocations).filter(|number| live[*number as usize]) {
            self.push(Step::Free { number });
        }
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

    /// Number of allocations.
    pub fn allocations(&self) -> usize {
        self.allocations as usize
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
                Op::Allocate { id, stream, size_bytes, .. } => {
                    workload.push(Step::Allocate { number: id.0 as u32, stream, size_bytes });
                }
                Op::Free { id } => workload.push(Step::Free { number: id.0 as u32 }),
                Op::RecordUse { id, stream } => workload.push(Step::RecordUse { number: id.0 as u32, stream }),
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
                Step::Free { number } => {
                    if let Some(handle) = self.handles[number as usize] {
                        self.subject.free(handle);
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
                Step::Free { number } => self.subject.free(self.handles[number as usize].expect("made before")),
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

    /// Ops of one repeat.
    pub fn ops(&self) -> usize {
        self.workload.len()
    }
}

impl<B: Backend, L: Lock> Subject for Allocator<B, L> {
    type Handle = Handle;

    fn register_stream(&mut self) {
        Allocator::register_stream(self).expect("fewer than 65,535 streams");
    }

    #[inline]
    fn allocate(&mut self, stream: StreamId, size_bytes: u64) -> Handle {
        Allocator::allocate(self, PoolId::DEFAULT, stream, size_bytes).expect("memory is endless").handle
    }

    #[inline]
    fn free(&mut self, handle: Handle) {
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
