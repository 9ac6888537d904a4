//! Options for replaying a job.

use clap::ValueEnum;
use std::num::NonZeroU32;
use std::sync::Arc;
use symmalloc_core::config::StreamPolicy;
use symmalloc_trace::plan::PlanFile;

/// Order of free blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Order {
    /// By size, sequence and offset; other streams' uses are fenced (symmalloc)
    #[default]
    Sequence,
    /// By size and address; events are polled (the model of PyTorch 2.11)
    Address,
}

/// Policy by which the default pool obtains memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Segments {
    /// One growing range per heap
    Expandable,
    /// PyTorch's size rules
    Fixed,
}

/// Options for replaying a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Number of simulated ranks.
    pub ranks: NonZeroU32,
    /// Placement rule.
    pub order: Order,
    /// Segments of the default pool. `None`: the recording's policy, or else expandable.
    pub segments: Option<Segments>,
    /// Separate or shared free blocks for the streams of the default pool. `None`: the recording's policy, or else separate. The
    /// model of address order always keeps streams separate.
    pub streams: Option<StreamPolicy>,
    /// Seed of the simulated job. It determines the addresses and timings of each rank, which differ between ranks.
    pub seed: u64,
    /// Number of passes over the program on each rank. Everything is freed between passes. The first pass alone is optimistic: a
    /// later pass starts with all the memory reserved so far, and best fit may break up the part that a large request needs. In the
    /// model of address order, rank 0 runs all passes and the other ranks run one.
    pub passes: NonZeroU32,
    /// Plans for this job and its configuration, for our rule to follow; `None` to run without plans. Each pass is a step, unless the
    /// program has its own steps.
    pub plan: Option<Arc<PlanFile>>,
}

impl Default for Options {
    /// Returns options for eight ranks, our rule, the recording's configuration, seed 0, and five passes: the first
    /// starts without memory, and the other four reuse the memory reserved before.
    fn default() -> Self {
        Options {
            ranks: NonZeroU32::new(8).expect("8 is not zero"),
            order: Order::Sequence,
            segments: None,
            streams: None,
            seed: 0,
            passes: NonZeroU32::new(5).expect("5 is not zero"),
            plan: None,
        }
    }
}
