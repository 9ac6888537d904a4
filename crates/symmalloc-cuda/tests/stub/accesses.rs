//! Generated accesses to buffers: registered and unregistered streams read, write, split, share, lend, copy and drop buffers, and the memory
//! is reused. Every two conflicting accesses must be ordered by the waits that the stub received. Two accesses conflict if they overlap and
//! one of them writes, whichever buffers they belong to.

mod clocks;

use crate::process::{begin_log, device, stub_test, take_log};
use clocks::History;
use cudarc::driver::result::{malloc_sync, memcpy_dtod_async, memset_d8_async};
use cudarc::driver::{CudaFunction, CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, PushKernelArg};
use cudarc::nvrtc::Ptx;
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
use std::cell::Cell;
use std::mem::forget;
use std::ops::Range;
use std::sync::Arc;
use symmalloc_core::config::{Config, PoolConfig, StreamPolicy};
use symmalloc_cuda::{BufferPart, BufferView, BufferViewMut, CudaAllocator, DeviceBuffer, SharedPart};

const PROGRAMS: u32 = 1000;
const STEPS_MAX: usize = 40;
/// Streams `0..REGISTERED` are registered at the start, and the others unless a step registers them.
const REGISTERED: usize = 3;
const STREAMS: usize = 5;
const BUFFER_BYTES_MAX: usize = 2048;

/// A step of a program. Numbers select a buffer or a stream, modulo their count. A step that does not apply to a buffer does nothing.
#[derive(Clone, Debug)]
enum Step {
    Allocate {
        on: usize,
        size: usize,
    },
    Read {
        buffer: usize,
        on: usize,
        part: Part,
        is_forgotten: bool,
    },
    Write {
        buffer: usize,
        on: usize,
        part: Part,
        is_forgotten: bool,
    },
    /// Two pointers are alive at the same time.
    ReadTwice {
        buffer: usize,
        on: [usize; 2],
    },
    /// Two streams write one half each.
    WriteHalves {
        buffer: usize,
        on: [usize; 2],
    },
    /// The work is submitted to another stream than the one that the buffer is lent on.
    Lend {
        buffer: usize,
        on: usize,
        user: usize,
        is_write: bool,
        is_forgotten: bool,
    },
    /// A kernel on the buffer's stream takes the buffer itself.
    Kernel {
        buffer: usize,
        is_write: bool,
    },
    Copy {
        buffer: usize,
        on: usize,
    },
    ReadBack {
        buffer: usize,
        on: usize,
    },
    Split {
        buffer: usize,
    },
    Share {
        buffer: usize,
    },
    Unshare {
        buffer: usize,
    },
    Drop {
        buffer: usize,
    },
    Register {
        stream: usize,
    },
    Synchronize {
        stream: usize,
    },
}

/// The accessed part of a buffer.
#[derive(Clone, Copy, Debug)]
enum Part {
    All,
    Front,
    Back,
}

impl Part {
    fn of(self, len: usize) -> Range<usize> {
        match self {
            Part::All => 0..len,
            Part::Front => 0..len / 2,
            Part::Back => len / 2..len,
        }
    }
}

fn step() -> impl Strategy<Value = Step> {
    let buffer = || any::<usize>();
    let on = || 0..STREAMS;
    let part = || prop_oneof![Just(Part::All), Just(Part::Front), Just(Part::Back)];
    let rarely = || prop::bool::weighted(0.1);
    prop_oneof![
        3 => (on(), 1_usize..=4).prop_map(|(on, size)| Step::Allocate { on, size }),
        6 => (buffer(), on(), part(), rarely())
            .prop_map(|(buffer, on, part, is_forgotten)| Step::Read { buffer, on, part, is_forgotten }),
        6 => (buffer(), on(), part(), rarely())
            .prop_map(|(buffer, on, part, is_forgotten)| Step::Write { buffer, on, part, is_forgotten }),
        1 => (buffer(), [on(), on()]).prop_map(|(buffer, on)| Step::ReadTwice { buffer, on }),
        1 => (buffer(), [on(), on()]).prop_map(|(buffer, on)| Step::WriteHalves { buffer, on }),
        2 => (buffer(), on(), on(), any::<bool>(), rarely()).prop_map(|(buffer, on, user, is_write, is_forgotten)| {
            Step::Lend { buffer, on, user, is_write, is_forgotten }
        }),
        1 => (buffer(), any::<bool>()).prop_map(|(buffer, is_write)| Step::Kernel { buffer, is_write }),
        1 => (buffer(), on()).prop_map(|(buffer, on)| Step::Copy { buffer, on }),
        1 => (buffer(), on()).prop_map(|(buffer, on)| Step::ReadBack { buffer, on }),
        1 => buffer().prop_map(|buffer| Step::Split { buffer }),
        1 => buffer().prop_map(|buffer| Step::Share { buffer }),
        1 => buffer().prop_map(|buffer| Step::Unshare { buffer }),
        3 => buffer().prop_map(|buffer| Step::Drop { buffer }),
        1 => (REGISTERED..STREAMS).prop_map(|stream| Step::Register { stream }),
        1 => on().prop_map(|stream| Step::Synchronize { stream }),
    ]
}

/// Memory in one of its forms.
enum Memory {
    Whole(DeviceBuffer<u8>),
    Part(BufferPart<u8>),
    Shared(SharedPart<u8>),
}

impl Memory {
    fn view(&self) -> BufferView<'_, u8> {
        match self {
            Memory::Whole(buffer) => buffer.as_view(),
            Memory::Part(part) => part.as_view(),
            Memory::Shared(part) => part.as_view(),
        }
    }

    fn view_mut(&mut self) -> Option<BufferViewMut<'_, u8>> {
        match self {
            Memory::Whole(buffer) => Some(buffer.as_view_mut()),
            Memory::Part(part) => Some(part.as_view_mut()),
            Memory::Shared(_) => None,
        }
    }
}

/// A buffer, or a part of one.
struct Buffer {
    memory: Memory,
    /// Address of the first byte.
    pointer: u64,
    /// The bytes of the whole allocation, which its parts share.
    allocation: Range<u64>,
}

/// Parts of the stub that all programs share.
struct Machine {
    streams: Vec<Arc<CudaStream>>,
    kernel: CudaFunction,
    /// Target of reads. It is not an allocator's memory.
    scratch: u64,
}

struct Program<'m> {
    machine: &'m Machine,
    allocator: CudaAllocator,
    is_registered: [bool; STREAMS],
    buffers: Vec<Buffer>,
}

impl Program<'_> {
    fn new(machine: &Machine, streams: StreamPolicy) -> Program<'_> {
        let pool = PoolConfig::builder().streams(streams).build().expect("valid");
        let config = Config::builder().default_pool(pool).build().expect("valid");
        let allocator = CudaAllocator::new(&device(), config).expect("the stub supports it");
        let mut program = Program { machine, allocator, is_registered: [false; STREAMS], buffers: Vec::new() };
        (0..REGISTERED).for_each(|stream| program.register(stream));
        program
    }

    fn register(&mut self, stream: usize) {
        self.allocator.register_stream(&self.machine.streams[stream]).expect("registered");
        self.is_registered[stream] = true;
    }

    /// Returns the selected stream, or another one if the selected stream is not registered.
    fn registered(&self, stream: usize) -> &Arc<CudaStream> {
        &self.machine.streams[if self.is_registered[stream] { stream } else { stream % REGISTERED }]
    }

    fn write(&self, pointer: u64, len: usize, stream: &CudaStream) {
        // SAFETY: the bytes are part of a live buffer, which orders the work.
        unsafe { memset_d8_async(pointer, 1, len, stream.cu_stream()) }.expect("submitted");
    }

    fn read(&self, pointer: u64, len: usize, stream: &CudaStream) {
        // SAFETY: as above; the scratch memory is as large as the largest buffer.
        unsafe { memcpy_dtod_async(self.machine.scratch, pointer, len, stream.cu_stream()) }.expect("submitted");
    }

    fn add(&mut self, buffer: DeviceBuffer<u8>) {
        let pointer = buffer.device_ptr(buffer.stream()).0;
        let allocation = pointer..pointer + buffer.len() as u64;
        self.buffers.push(Buffer { memory: Memory::Whole(buffer), pointer, allocation });
    }

    /// Runs a step. Returns `true` if its accesses are forgotten, and the bytes that no longer have an owner.
    fn run(&mut self, step: &Step) -> (bool, Option<Range<u64>>) {
        let selected = match *step {
            Step::Allocate { on, size } => {
                let buffer = self.allocator.alloc_zeroed(self.registered(on), size * BUFFER_BYTES_MAX / 4);
                self.add(buffer.expect("allocated"));
                return (false, None);
            }
            Step::Register { stream } => {
                self.register(stream);
                return (false, None);
            }
            Step::Synchronize { stream } => {
                self.machine.streams[stream].synchronize().expect("done");
                return (false, None);
            }
            Step::Read { buffer, .. }
            | Step::Write { buffer, .. }
            | Step::ReadTwice { buffer, .. }
            | Step::WriteHalves { buffer, .. }
            | Step::Lend { buffer, .. }
            | Step::Kernel { buffer, .. }
            | Step::Copy { buffer, .. }
            | Step::ReadBack { buffer, .. }
            | Step::Split { buffer }
            | Step::Share { buffer }
            | Step::Unshare { buffer }
            | Step::Drop { buffer } => buffer,
        };
        if self.buffers.is_empty() {
            return (false, None);
        }
        let index = selected % self.buffers.len();
        let mut buffer = self.buffers.swap_remove(index);
        let is_forgotten = self.access(step, &mut buffer);
        match step {
            Step::Drop { .. } => (false, self.drop(buffer)),
            Step::Copy { on, .. } => {
                let copy = self.allocator.clone_dtod(self.registered(*on), &buffer.memory.view()).expect("copied");
                self.buffers.push(buffer);
                self.add(copy);
                (false, None)
            }
            Step::Split { .. } | Step::Share { .. } | Step::Unshare { .. } => {
                self.reshape(step, buffer);
                (false, None)
            }
            _ => {
                self.buffers.push(buffer);
                (is_forgotten, None)
            }
        }
    }

    /// Accesses a buffer. Returns `true` if the end of the access is unknown to the buffer.
    fn access(&self, step: &Step, buffer: &mut Buffer) -> bool {
        let stream = |index: usize| &self.machine.streams[index];
        match *step {
            Step::Read { on, part, is_forgotten, .. } => {
                let view = buffer.memory.view();
                let view = view.slice(part.of(view.len()));
                let (pointer, guard) = view.view_ptr(stream(on));
                self.read(pointer, view.len(), stream(on));
                return end(guard, is_forgotten) && !self.is_registered[on];
            }
            Step::Write { on, part, is_forgotten, .. } => {
                let Some(mut view) = buffer.memory.view_mut() else { return false };
                let mut view = view.slice_mut(part.of(view.len()));
                let len = view.len();
                let (pointer, guard) = view.device_ptr_mut(stream(on));
                self.write(pointer, len, stream(on));
                return end(guard, is_forgotten) && !self.is_registered[on];
            }
            Step::ReadTwice { on, .. } => {
                let view = buffer.memory.view();
                let guards = on.map(|on| view.view_ptr(stream(on)));
                on.iter().zip(&guards).for_each(|(on, (pointer, _))| self.read(*pointer, view.len(), stream(*on)));
            }
            Step::WriteHalves { on, .. } => {
                let Some(view) = buffer.memory.view_mut() else { return false };
                let middle = view.len() / 2;
                let (front, back) = view.into_split_at(middle);
                for (half, on) in [front, back].into_iter().zip(on) {
                    let len = half.len();
                    let (pointer, _guard) = half.view_ptr_mut(stream(on));
                    self.write(pointer, len, stream(on));
                }
            }
            Step::Lend { on, user, is_write, is_forgotten, .. } => {
                let is_covered = on == user && self.is_registered[on];
                return self.lend(buffer, [on, user].map(stream), is_write, is_forgotten) && !is_covered;
            }
            Step::Kernel { is_write, .. } => self.launch(buffer, is_write),
            Step::ReadBack { on, .. } => drop(stream(on).clone_dtoh(&buffer.memory.view()).expect("copied")),
            _ => {}
        }
        false
    }

    /// Lends a buffer on the first stream, and accesses it on the second one.
    fn lend(&self, buffer: &mut Buffer, [on, user]: [&Arc<CudaStream>; 2], is_write: bool, is_forgotten: bool) -> bool {
        if !is_write {
            let lent = buffer.memory.view().lend_on(on).expect("lent");
            let (pointer, guard) = lent.device_ptr(user);
            self.read(pointer, lent.len(), user);
            drop(guard);
            return end(lent, is_forgotten);
        }
        let Some(view) = buffer.memory.view_mut() else { return false };
        // SAFETY: the slice stays in the guard.
        let mut lent = unsafe { view.lend_mut_on(on) }.expect("lent");
        let len = lent.len();
        let (pointer, guard) = lent.device_ptr_mut(user);
        self.write(pointer, len, user);
        drop(guard);
        end(lent, is_forgotten)
    }

    /// Launches a kernel on the buffer's stream. Work stands for its accesses, because the stub's kernels do nothing. The argument alone
    /// orders the stream.
    fn launch(&self, buffer: &mut Buffer, is_write: bool) {
        let view = buffer.memory.view();
        let (stream, len, pointer) = (Arc::clone(DeviceSlice::stream(&view)), view.len(), buffer.pointer);
        let mut launch = stream.launch_builder(&self.machine.kernel);
        match (&mut buffer.memory, is_write) {
            (Memory::Whole(buffer), false) => launch.arg(&*buffer),
            (Memory::Whole(buffer), true) => launch.arg(buffer),
            (Memory::Part(part), false) => launch.arg(&*part),
            (Memory::Part(part), true) => launch.arg(part),
            (Memory::Shared(part), _) => launch.arg(&*part),
        };
        drop(launch);
        match (&buffer.memory, is_write) {
            (Memory::Whole(_) | Memory::Part(_), true) => self.write(pointer, len, &stream),
            _ => self.read(pointer, len, &stream),
        }
    }

    fn reshape(&mut self, step: &Step, Buffer { memory, pointer, allocation }: Buffer) {
        let middle = memory.view().len() / 2;
        let of = |memory, offset| Buffer { memory, pointer: pointer + offset as u64, allocation: allocation.clone() };
        match (step, memory) {
            (Step::Split { .. }, Memory::Whole(buffer)) => self.buffers.push(of(Memory::Part(buffer.into_part()), 0)),
            (Step::Split { .. }, Memory::Part(mut front)) => {
                let back = front.split_off(middle);
                self.buffers.extend([of(Memory::Part(front), 0), of(Memory::Part(back), middle)]);
            }
            (Step::Split { .. }, Memory::Shared(part)) => {
                let (front, back) = part.split_at(middle);
                self.buffers.extend([of(Memory::Shared(front), 0), of(Memory::Shared(back), middle)]);
            }
            (Step::Share { .. }, Memory::Whole(buffer)) => {
                self.buffers.push(of(Memory::Shared(buffer.into_part().into_shared()), 0));
            }
            (Step::Share { .. }, Memory::Part(part)) => self.buffers.push(of(Memory::Shared(part.into_shared()), 0)),
            (Step::Share { .. }, Memory::Shared(part)) => {
                self.buffers.extend([part.clone(), part].map(|part| of(Memory::Shared(part), 0)));
            }
            (_, Memory::Shared(part)) => {
                let memory = part.try_into_part().map_or_else(Memory::Shared, Memory::Part);
                self.buffers.push(of(memory, 0));
            }
            (_, memory) => self.buffers.push(of(memory, 0)),
        }
    }

    /// Drops a buffer. Returns the bytes of its allocation if it was the last part.
    fn drop(&self, buffer: Buffer) -> Option<Range<u64>> {
        let allocation = buffer.allocation.clone();
        drop(buffer);
        (!self.buffers.iter().any(|other| other.allocation == allocation)).then_some(allocation)
    }
}

/// Ends the use of a guard. Returns `true` if the guard is forgotten.
fn end<G>(guard: G, is_forgotten: bool) -> bool {
    if is_forgotten {
        forget(guard);
    }
    is_forgotten
}

/// Runs a program, frees its buffers and reuses their memory. Returns the number of ordered conflicts between streams.
fn run(machine: &Machine, streams: StreamPolicy, steps: &[Step]) -> Result<u64, String> {
    begin_log();
    let mut history = History::new(machine.scratch..machine.scratch + BUFFER_BYTES_MAX as u64);
    let mut program = Program::new(machine, streams);
    let reuses = (0..REGISTERED).flat_map(|on| (1..=4).map(move |size| Step::Allocate { on, size }));
    let mut number = 0;
    let mut take = |program: &mut Program<'_>, step: &Step| {
        let (is_forgotten, unowned) = program.run(step);
        history.append(number, is_forgotten, &take_log())?;
        unowned.iter().for_each(|bytes| history.end_owner(bytes));
        number += 1;
        Ok::<_, String>(history.ordered)
    };
    for step in steps {
        take(&mut program, step)?;
    }
    while !program.buffers.is_empty() {
        take(&mut program, &Step::Drop { buffer: 0 })?;
    }
    let mut ordered = 0;
    for step in reuses {
        ordered = take(&mut program, &step)?;
    }
    assert_eq!(program.allocator.drop_errors().count, 0);
    program.allocator.core().check().expect("consistent");
    Ok(ordered)
}

stub_test!(conflicting_accesses_of_generated_programs_are_ordered, {
    let context = Arc::clone(device().context());
    let streams = (0..STREAMS).map(|_| context.new_stream().expect("a stream")).collect();
    let module = context.load_module(Ptx::from_src("")).expect("loaded");
    let kernel = module.load_function("kernel").expect("the stub accepts any kernel name");
    // SAFETY: nothing reads the memory.
    let scratch = unsafe { malloc_sync(BUFFER_BYTES_MAX) }.expect("memory");
    let machine = Machine { streams, kernel, scratch };
    let (steps, ordered) = (prop::collection::vec(step(), 1..STEPS_MAX), Cell::new(0));
    let config = ProptestConfig { cases: PROGRAMS, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let outcome = runner.run(&(any::<bool>(), steps), |(is_shared, steps)| {
        let policy = if is_shared { StreamPolicy::Shared } else { StreamPolicy::Separate };
        ordered.set(ordered.get() + run(&machine, policy, &steps).map_err(TestCaseError::fail)?);
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
    assert!(ordered.get() > 10 * u64::from(PROGRAMS), "only {} conflicts between streams", ordered.get());
});
