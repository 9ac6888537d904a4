//! A job on a timeline, as Chrome trace events, for <https://ui.perfetto.dev> and other tools that read them.
//!
//! ```text
//!  job                            trim ◆            out of memory ◆                          instants
//!  pool 0, stream 0   live        ▁▂▃▅▆▆▅▃▂▂▅▇▇▅                                             counters
//!                     allocated, reserved                                                    counters
//!                     map ◆   map ◆        ◆ unmap                                           instants
//!                     weights     ├───────────────────────────────────────────┤              a slice per allocation:
//!                     activations    ├────┤  ├─────┤   ├──┤                                 a track per name
//!                     unnamed          ├─┤ ├┤   ├──────┤
//!  pool 0, stream 1   ...
//! ```
//!
//! Each heap is shown as a process, and so is the job as a whole. Time is measured in ops, at one microsecond per op: events of op 17 of
//! the program, counted from 0, are at 17 µs. Equal jobs under equal configurations therefore produce equal bytes.
//!
//! | `ph` | `name` | `args` |
//! |---|---|---|
//! | `C` | `live`, `allocated`, `reserved` | `bytes`: requested by live allocations; in their blocks; reserved from the device |
//! | `b`, `e` | the allocation's name, or `unnamed`; `cat` is `allocation`, `id2.local` is its index in the program | `requested_bytes`, `block_bytes`, `segment`, `offset_bytes` |
//! | `i` | `map`, `unmap` | `bytes` and `address`, which ascends in the order in which segments are obtained, as in [`export`](mod@crate::export) |
//! | `i` | `out of memory` | `pool`, `stream`, `requested_bytes`, `left_bytes`, the remainder of the limit |
//! | `i` | `trim`, `reserve`, `sync`, `pool destroyed` | the op's operands |
//! | `M` | `process_name`, `process_sort_index` | |
//!
//! The slice of an allocation that is live at the end of the job ends there. A large job would produce a file that no viewer can open.
//! [`TimelineOptions`] therefore limits the number of slices, keeping the largest allocations, and the number of points per counter, where
//! each point is the highest value of several consecutive ops. Memory: proportional to the live allocations, and a few numbers per heap.

mod heap;

pub(crate) use heap::heap_words;
mod writer;

use std::collections::BTreeMap;
use std::io::Write;
use symmalloc_core::ids::HeapId;

use symmalloc_core::AllocationId;
use symmalloc_core::config::Config;
use symmalloc_core::op::Op;
use symmalloc_trace::replay::Program;

use crate::export::ExportError;
use crate::rerun::{Happened, Live, Moment, Rerun};
use heap::{HeapTrack, Quantity};
use writer::{Args, EventWriter};

/// Limits on the level of detail of a timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TimelineOptions {
    /// Maximum number of slices. The largest allocations are drawn; if several are equally large, the first ones. `None` draws all
    /// allocations.
    pub slices_max: Option<u64>,
    /// Maximum number of points per counter. If there are more ops than points, each point is the highest value of several consecutive ops.
    /// `None` draws a point for every op.
    pub points_max: Option<u64>,
}

impl Default for TimelineOptions {
    /// Returns limits of 100,000 slices and 100,000 points.
    fn default() -> Self {
        TimelineOptions { slices_max: Some(100_000), points_max: Some(100_000) }
    }
}

/// Counts over a drawn timeline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TimelineSummary {
    /// Number of heaps that held memory.
    pub heaps: u64,
    /// Number of allocations drawn as slices.
    pub slices: u64,
    /// Number of allocations of at least one byte that were not drawn, because there are enough larger ones.
    pub left_out: u64,
    /// Number of counter values written.
    pub points: u64,
    /// Number of ops per counter value.
    pub ops_per_point: u64,
    /// Number of instants: memory mapped or unmapped, refused requests, trims and similar events.
    pub instants: u64,
}

/// Executes a program under a configuration, and writes its events as Chrome trace events. It writes to `sink` in many small pieces, so
/// `sink` should be buffered.
///
/// # Errors
/// Returns an error if the program cannot be executed, or `sink` cannot be written.
///
/// # Examples
/// ```
/// use symmalloc_core::config::Config;
/// use symmalloc_trace::replay::Program;
/// use symmalloc_import::perfetto::{TimelineOptions, timeline};
/// use symmalloc_import::{ReadOptions, read_bytes};
///
/// let trace = b"symmalloc-trace 1\nstream s0\na 0 1048576 s0 \"weights\"\nend 2\n";
/// let recording = read_bytes(trace, &ReadOptions::default())?;
/// let mut json = Vec::new();
/// let program = Program::new(&recording.records)?;
/// let summary = timeline(&program, &Config::default(), &TimelineOptions::default(), &mut json)?;
/// assert_eq!((summary.slices, summary.heaps), (1, 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn timeline(
    program: &Program,
    config: &Config,
    options: &TimelineOptions,
    sink: impl Write,
) -> Result<TimelineSummary, ExportError> {
    let ops = program.ops().len();
    let mut timeline = TimelineWriter {
        events: EventWriter::new(sink)?,
        program,
        drawn: Drawn::of(program, options.slices_max.unwrap_or(u64::MAX)),
        open: BTreeMap::new(),
        heaps: Vec::new(),
        changed: Vec::new(),
        summary: TimelineSummary {
            ops_per_point: ops_per_point(ops, options.points_max),
            ..TimelineSummary::default()
        },
    };
    timeline.events.process(JOB, "job")?;
    Rerun::new(program, config)?.run(ops, |moment| timeline.moment(moment))?;
    timeline.finish(ops)
}

/// The process of events that belong to no heap. Viewers reserve number 0 for the system.
const JOB: usize = 1;
/// The process of the first heap.
const FIRST_HEAP: usize = 2;

fn ops_per_point(ops: usize, points_max: Option<u64>) -> u64 {
    points_max.map_or(1, |most| (ops as u64).div_ceil(most.max(1)).max(1))
}

/// Selects the allocations to draw: all that are larger than a threshold, and the first of those that are exactly as
/// large.
struct Drawn {
    /// The threshold: all larger allocations are drawn.
    above_bytes: u64,
    /// Number of allocations of exactly the threshold's size that may still be drawn.
    left: u64,
}

impl Drawn {
    fn of(program: &Program, slices_max: u64) -> Self {
        let mut by_size: BTreeMap<u64, u64> = BTreeMap::new();
        for op in program.ops() {
            if let Op::Allocate { size_bytes: size_bytes @ 1.., .. } = op {
                *by_size.entry(*size_bytes).or_default() += 1;
            }
        }
        let mut left = slices_max;
        for (size_bytes, count) in by_size.into_iter().rev() {
            if count > left {
                return Drawn { above_bytes: size_bytes, left };
            }
            left -= count;
        }
        Drawn { above_bytes: 0, left }
    }

    fn takes(&mut self, live: &Live) -> bool {
        if live.requested_bytes > self.above_bytes {
            return true;
        }
        let is_taken = live.requested_bytes == self.above_bytes && self.left > 0;
        self.left -= u64::from(is_taken);
        is_taken
    }
}

struct TimelineWriter<'p, W> {
    events: EventWriter<W>,
    program: &'p Program,
    drawn: Drawn,
    /// Open slices: the allocation, and the process in which its slice is drawn.
    open: BTreeMap<AllocationId, usize>,
    /// Heaps in the order in which they first held memory: the n-th is process `FIRST_HEAP` + n.
    heaps: Vec<HeapTrack>,
    /// Heaps with a counter that has changed since it was last written.
    changed: Vec<usize>,
    summary: TimelineSummary,
}

impl<W: Write> TimelineWriter<'_, W> {
    fn moment(&mut self, moment: &Moment<'_>) -> Result<(), ExportError> {
        let at = moment.number;
        for change in moment.memory {
            let heap = self.heap(change.heap)?;
            self.heaps[heap].add(Quantity::Reserved, change.is_mapped, change.size_bytes);
            let args = Args::new().number("bytes", change.size_bytes).address("address", change.address.0);
            self.instant(if change.is_mapped { "map" } else { "unmap" }, FIRST_HEAP + heap, at, &args)?;
        }
        match &moment.happened {
            Happened::Allocated(live) => self.begin(live, at)?,
            Happened::Freed(live) => self.end(live, at)?,
            Happened::Refused { requested_bytes, stream, left_bytes } => {
                let mut args = Args::new();
                if let Op::Allocate { pool, .. } = moment.op {
                    args = args.number("pool", pool.0.into());
                }
                let args = args.number("stream", stream.0.into()).number("requested_bytes", *requested_bytes);
                self.instant("out of memory", JOB, at, &args.number("left_bytes", *left_bytes))?;
            }
            Happened::WasRefused { requested_bytes, stream, left_bytes } => {
                let mut args = Args::new();
                if let Op::Refuse { pool, .. } = moment.op {
                    args = args.number("pool", pool.0.into());
                }
                args = args.number("stream", stream.0.into()).number("requested_bytes", *requested_bytes);
                if let Some(left_bytes) = left_bytes {
                    args = args.number("left_bytes", *left_bytes);
                }
                self.instant("out of memory", JOB, at, &args)?;
            }
            _ => {}
        }
        match moment.op {
            Op::Trim { pool } => {
                let args = pool.map_or_else(Args::new, |pool| Args::new().number("pool", pool.0.into()));
                self.instant("trim", JOB, at, &args)?;
            }
            Op::Reserve { pool, stream, size_bytes } => {
                let args = Args::new().number("pool", pool.0.into()).number("stream", stream.0.into());
                self.instant("reserve", JOB, at, &args.number("size_bytes", *size_bytes))?;
            }
            Op::DestroyPool { pool } => {
                self.instant("pool destroyed", JOB, at, &Args::new().number("pool", pool.0.into()))?;
            }
            Op::Sync => self.instant("sync", JOB, at, &Args::new())?,
            Op::BeginStep { pool, key } => {
                let args = Args::new().number("pool", pool.0.into()).number("key", *key);
                self.instant("step begins", JOB, at, &args)?;
            }
            Op::EndStep { pool } => {
                self.instant("step ends", JOB, at, &Args::new().number("pool", pool.0.into()))?;
            }
            _ => {}
        }
        if (at as u64 + 1).is_multiple_of(self.summary.ops_per_point) {
            self.points(at)?;
        } else {
            self.settle();
        }
        Ok(())
    }

    fn begin(&mut self, live: &Live, at: usize) -> Result<(), ExportError> {
        let heap = self.heap(live.heap)?;
        self.heaps[heap].add(Quantity::Live, true, live.requested_bytes);
        self.heaps[heap].add(Quantity::Allocated, true, live.block_bytes);
        if !self.drawn.takes(live) {
            self.summary.left_out += 1;
            return Ok(());
        }
        self.summary.slices += 1;
        let process = FIRST_HEAP + heap;
        self.open.insert(live.id, process);
        let args = Args::new()
            .number("requested_bytes", live.requested_bytes)
            .number("block_bytes", live.block_bytes)
            .number("segment", live.placement.segment.0.into())
            .number("offset_bytes", live.placement.offset_bytes);
        let name = self.program.name(live.id).unwrap_or(UNNAMED);
        Ok(self.events.begin_slice(name, live.id, process, at, &args)?)
    }

    fn end(&mut self, live: &Live, at: usize) -> Result<(), ExportError> {
        let heap = self.heap(live.heap)?;
        self.heaps[heap].add(Quantity::Live, false, live.requested_bytes);
        self.heaps[heap].add(Quantity::Allocated, false, live.block_bytes);
        let Some(process) = self.open.remove(&live.id) else { return Ok(()) };
        let name = self.program.name(live.id).unwrap_or(UNNAMED);
        Ok(self.events.end_slice(name, live.id, process, at)?)
    }

    fn instant(&mut self, name: &str, process: usize, at: usize, args: &Args) -> Result<(), ExportError> {
        self.summary.instants += 1;
        Ok(self.events.instant(name, process, at, args)?)
    }

    /// Returns the index of the heap of an owner, and marks the heap as changed.
    fn heap(&mut self, owner: HeapId) -> Result<usize, ExportError> {
        let known = self.heaps.iter().position(|heap| heap.owner == owner);
        let heap = match known {
            Some(heap) => heap,
            None => {
                self.heaps.push(HeapTrack::new(owner));
                self.summary.heaps += 1;
                let heap = self.heaps.len() - 1;
                self.events.process(FIRST_HEAP + heap, &self.heaps[heap].name())?;
                heap
            }
        };
        if !std::mem::replace(&mut self.heaps[heap].has_changed, true) {
            self.changed.push(heap);
        }
        Ok(heap)
    }

    /// Records the current values of the changed heaps, at the end of an op.
    fn settle(&mut self) {
        self.changed.iter().for_each(|heap| self.heaps[*heap].settle());
    }

    /// Writes a point for each changed counter, after the op at `at`.
    fn points(&mut self, at: usize) -> Result<(), ExportError> {
        self.settle();
        self.changed.sort_unstable();
        let (events, heaps, points) = (&mut self.events, &mut self.heaps, &mut self.summary.points);
        for &heap in &self.changed {
            for (name, bytes) in heaps[heap].take_points() {
                events.counter(name, FIRST_HEAP + heap, at, bytes)?;
                *points += 1;
            }
        }
        self.changed.retain(|heap| heaps[*heap].has_changed);
        Ok(())
    }

    fn finish(mut self, ops: usize) -> Result<TimelineSummary, ExportError> {
        // Writes points twice: first the highest values of the last ops, then the final values.
        self.points(ops.saturating_sub(1))?;
        self.points(ops)?;
        for (id, process) in std::mem::take(&mut self.open) {
            self.events.end_slice(self.program.name(id).unwrap_or(UNNAMED), id, process, ops)?;
        }
        self.events.finish(self.summary.ops_per_point)?;
        Ok(self.summary)
    }
}

/// The name of slices whose allocations have no name.
const UNNAMED: &str = "unnamed";

#[cfg(test)]
mod tests;
