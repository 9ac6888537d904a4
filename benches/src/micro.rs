//! Micro cases: workloads that repeatedly exercise one part of the allocator.
//!
//! The cases with many free blocks keep the number of free blocks constant: live blocks of one unit separate all other
//! blocks, so that no free blocks can merge.
//!
//! ```text
//!  a│s│ f │s│ a  │s│ f │s│ f│s│ a ...     a allocated, f free, s separator, all in random order; as many a as f
//! ```
//!
//! A pair of ops frees a random allocated block, which inserts a key into the middle of the index, and allocates again,
//! which searches the index and removes a key.

use crate::workload::{Subject, Workload};
use symmalloc_core::ids::StreamId;
use symmalloc_sim::SplitMix64;

const S0: StreamId = StreamId(0);
const S1: StreamId = StreamId(1);

/// Number of op pairs in one repeat of a micro case.
pub const PAIRS: u32 = 1000;

/// Allocates and frees one block.
pub fn pair(size_bytes: u64) -> Workload {
    let mut workload = Workload::default();
    for number in 0..PAIRS {
        workload.allocate(S0, size_bytes);
        workload.free(number);
    }
    workload
}

/// Keeps 1,000 blocks of 512 B to 4 MiB and replaces a random one at a time, 10,000 times.
pub fn replacement() -> Workload {
    let mut random = SplitMix64::new(1);
    let mut workload = Workload::default();
    let mut live = Vec::new();
    for number in 0..11_000 {
        if live.len() == 1000 {
            let victim = live.swap_remove(random.below(1000) as usize);
            workload.free(victim);
        }
        workload.allocate(S0, log_uniform(&mut random));
        live.push(number);
    }
    workload.close();
    workload
}

/// Allocates, uses on another stream and frees, so that every allocation waits for a fence.
pub fn cross_stream(size_bytes: u64) -> Workload {
    let mut workload = Workload::default();
    for number in 0..PAIRS {
        workload.allocate(S0, size_bytes);
        workload.record_use(number, S1);
        workload.free(number);
    }
    workload
}

/// The sizes of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// All blocks have 4 KiB.
    One,
    /// Sizes from 512 B to 4 MiB, with every power of two equally likely.
    Spread,
}

/// An allocator with many free blocks, and the replacements to run on it.
#[derive(Clone, Debug)]
pub struct ManyFree<S: Subject> {
    subject: S,
    live: Vec<S::Handle>,
    /// The replacements: index of the live block to free, and size in bytes to allocate instead.
    replacements: Vec<(usize, u64)>,
}

impl<S: Subject> ManyFree<S> {
    /// Creates `count` free blocks, and as many allocated ones, that cannot merge. Runs `count` replacements, so that
    /// the state is that of a program that has run for a while, without work left over from the initial frees.
    pub fn new(mut subject: S, count: usize, sizes: Sizes) -> Self {
        let mut random = SplitMix64::new(count as u64);
        let size = |random: &mut SplitMix64| match sizes {
            Sizes::One => 4096,
            Sizes::Spread => log_uniform(random),
        };
        subject.register_stream();
        let mut live = Vec::with_capacity(2 * count);
        for _ in 0..2 * count {
            live.push(subject.allocate(S0, size(&mut random)));
            subject.allocate(S0, 512);
        }
        for _ in 0..count {
            let victim = live.swap_remove(random.below(live.len() as u64) as usize);
            subject.free(S0, victim);
        }
        let mut replacements =
            |pairs: usize| (0..pairs).map(|_| (random.below(count as u64) as usize, size(&mut random))).collect();
        let mut many = ManyFree { subject, live, replacements: replacements(count) };
        many.replace();
        many.replacements = replacements(PAIRS as usize);
        many
    }

    /// Runs the replacements: [`PAIRS`] frees and as many allocations. This is the measured part.
    #[inline]
    pub fn replace(&mut self) {
        for &(victim, size_bytes) in &self.replacements {
            self.subject.free(S0, self.live[victim]);
            self.live[victim] = self.subject.allocate(S0, size_bytes);
        }
    }
}

/// Draws a size from 512 B to 4 MiB in steps of 512 B, with every power of two equally likely.
fn log_uniform(random: &mut SplitMix64) -> u64 {
    let power = 512 << random.below(13);
    power + random.below(power) / 512 * 512
}
