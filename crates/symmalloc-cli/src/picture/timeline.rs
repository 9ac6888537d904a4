//! Memory of a job over its ops, in bounded space: a fixed number of columns, each with the minimum and maximum of each quantity.
//!
//! ```text
//! ops      0 ........ k | k+1 ....... 2k | ...
//! column   min, max     | min, max       |
//! ```
//!
//! Regardless of the number of ops, a peak keeps its exact height in its column. The exact op of each peak is stored separately.

use super::Selection;
use crate::error::CliError;
use crate::recorded::Recorded;
use symmalloc_core::ids::HeapId;
use symmalloc_core::work::{self, Allowance};
use symmalloc_import::rerun::{Happened, Moment, Rerun, RerunError};

/// Maximum number of columns. A job with fewer ops has one column per op.
const COLUMNS: usize = 400;

/// Units of work that a heap costs per column, for its three spans and the memory that they take.
const WORK_PER_COLUMN: usize = 2;

/// Quantities: requested bytes, bytes of the blocks that serve them, bytes reserved from the device.
pub(crate) const LIVE: usize = 0;
pub(crate) const ALLOCATED: usize = 1;
pub(crate) const RESERVED: usize = 2;

/// Maximum of a quantity, and the first op that reached it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Peak {
    pub(crate) bytes: u64,
    pub(crate) op: usize,
}

/// Minimum and maximum of a quantity within a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) least: u64,
    pub(crate) most: u64,
}

/// Quantities of one heap, or of all heaps, over the columns.
#[derive(Clone, Debug, Default)]
pub(crate) struct Curve {
    /// Spans by quantity, and then by column.
    pub(crate) spans: [Vec<Span>; 3],
    pub(crate) peaks: [Peak; 3],
    now: [u64; 3],
}

impl Curve {
    /// Returns the curve of a heap that did not exist during the first columns.
    fn after(columns: usize) -> Self {
        let nothing = Span { least: 0, most: 0 };
        Curve { spans: [0; 3].map(|_| vec![nothing; columns]), ..Curve::default() }
    }

    fn begin_column(&mut self) {
        for (spans, now) in self.spans.iter_mut().zip(self.now) {
            spans.push(Span { least: now, most: now });
        }
    }

    fn change(&mut self, quantity: usize, value: u64, op: usize) {
        self.now[quantity] = value;
        if value > self.peaks[quantity].bytes {
            self.peaks[quantity] = Peak { bytes: value, op };
        }
        if let Some(span) = self.spans[quantity].last_mut() {
            *span = Span { least: span.least.min(value), most: span.most.max(value) };
        }
    }
}

/// Curves of a job over its ops.
#[derive(Clone, Debug)]
pub(crate) struct JobCurves {
    pub(crate) op_count: usize,
    pub(crate) columns: usize,
    /// Curves of the heaps, by pool and stream.
    pub(crate) heaps: Vec<(HeapId, Curve)>,
    pub(crate) total: Curve,
    /// For each column, the allocated bytes of every heap, after the op at which their sum was greatest.
    pub(crate) stacks: Vec<Vec<u64>>,
    /// Number of allocations refused by a limit.
    pub(crate) refused: u64,
    /// Curve of the job with a plan, if it is drawn.
    pub(crate) planned: Option<PlannedCurve>,
}

/// Reserved bytes with a plan.
#[derive(Clone, Debug, Default)]
pub(crate) struct PlannedCurve {
    /// Maximum of each column.
    pub(crate) reserved: Vec<u64>,
    pub(crate) peak: Peak,
}

impl PlannedCurve {
    /// Records the bytes reserved after an op.
    pub(super) fn see(&mut self, op: usize, op_count: usize, bytes: u64) {
        self.reserved.resize(column_of(op, op_count) + 1, bytes);
        let last = self.reserved.last_mut().expect("the column should have been added above");
        *last = bytes.max(*last);
        if bytes > self.peak.bytes {
            self.peak = Peak { bytes, op };
        }
    }
}

/// Returns the column of an op.
fn column_of(op: usize, op_count: usize) -> usize {
    op * op_count.min(COLUMNS) / op_count
}

impl JobCurves {
    /// Runs a job, and records the memory of the selected heaps.
    pub(crate) fn of(recorded: &Recorded, selection: Selection) -> Result<Self, CliError> {
        let op_count = recorded.op_count();
        let mut watcher = Watcher {
            selection,
            timeline: JobCurves {
                op_count,
                columns: op_count.min(COLUMNS),
                heaps: Vec::new(),
                total: Curve::default(),
                stacks: Vec::new(),
                refused: 0,
                planned: None,
            },
            column: None,
            stacked_bytes: 0,
            allowance: Allowance::default(),
        };
        let failed = |error| recorded.failed(error);
        let mut rerun = Rerun::new(recorded.program(), &recorded.config).map_err(failed)?;
        rerun
            .run(op_count, |moment| {
                let mut allowance = watcher.allowance;
                let seen = allowance.charge(|| watcher.see(moment));
                watcher.allowance = allowance;
                seen.map_err(|error| RerunError::Step { op: moment.number, error: error.into() })
            })
            .map_err(failed)?;
        Ok(watcher.timeline)
    }
}

struct Watcher {
    selection: Selection,
    timeline: JobCurves,
    column: Option<usize>,
    /// Sum of the current column's stack.
    stacked_bytes: u64,
    /// Bounds the work, because every op may change the stack of all heaps.
    allowance: Allowance,
}

impl Watcher {
    fn see(&mut self, moment: &Moment<'_>) {
        let op = moment.number;
        let column = column_of(op, self.timeline.op_count);
        if self.column != Some(column) {
            self.column = Some(column);
            self.begin_column();
        }
        for change in moment.memory {
            let bytes = change.size_bytes;
            self.change(change.heap, RESERVED, op, |now| if change.is_mapped { now + bytes } else { now - bytes });
        }
        match &moment.happened {
            Happened::Allocated(live) => {
                self.change(live.heap, LIVE, op, |now| now + live.requested_bytes);
                self.change(live.heap, ALLOCATED, op, |now| now + live.block_bytes);
            }
            Happened::Freed(live) => {
                self.change(live.heap, LIVE, op, |now| now - live.requested_bytes);
                self.change(live.heap, ALLOCATED, op, |now| now - live.block_bytes);
            }
            Happened::Refused { .. } => self.timeline.refused += 1,
            _ => {}
        }
        if self.timeline.total.now[ALLOCATED] > self.stacked_bytes {
            self.timeline.stacks.pop();
            self.push_stack();
        }
    }

    fn change(&mut self, owner: HeapId, quantity: usize, op: usize, value: impl Fn(u64) -> u64) {
        if !self.selection.has(owner) {
            return;
        }
        let heaps = &mut self.timeline.heaps;
        let index = heaps.binary_search_by_key(&owner, |(owner, _)| *owner).unwrap_or_else(|index| {
            let columns = self.timeline.stacks.len();
            work::count(WORK_PER_COLUMN * columns + heaps.len());
            let mut curve = Curve::after(columns - 1);
            curve.begin_column();
            heaps.insert(index, (owner, curve));
            self.timeline.stacks.iter_mut().for_each(|stack| stack.insert(index, 0));
            index
        });
        let curve = &mut heaps[index].1;
        curve.change(quantity, value(curve.now[quantity]), op);
        let total = &mut self.timeline.total;
        total.change(quantity, value(total.now[quantity]), op);
    }

    fn begin_column(&mut self) {
        work::count(WORK_PER_COLUMN * self.timeline.heaps.len());
        let curves = self.timeline.heaps.iter_mut().map(|(_, curve)| curve);
        curves.chain([&mut self.timeline.total]).for_each(Curve::begin_column);
        self.push_stack();
    }

    fn push_stack(&mut self) {
        work::count(self.timeline.heaps.len());
        self.stacked_bytes = self.timeline.total.now[ALLOCATED];
        self.timeline.stacks.push(self.timeline.heaps.iter().map(|(_, curve)| curve.now[ALLOCATED]).collect());
    }
}
