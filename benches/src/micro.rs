//! Micro cases: workloads that go through one part of the allocator again and again.
//!
//! The cases with many free blocks are built so that the number of free blocks stays what it is called: live blocks of
//! one unit stand between all others, so nothing can merge.
//!
//! ```text
//!  a│s│ f │s│ a  │s│ f │s│ f│s│ a ...     a allocated, f free, s separator, all in random order; as many a as f
//! ```
//!
//! An op pair frees a random allocated block, which puts a key into the middle of the index, and allocates again, which
//! searches it and takes one out.

use crate::workload::{Subject, Workload};
use symmalloc_core::ids::StreamId;
use symmalloc_sim::SplitMix64;

const S0: StreamId = StreamId(0);
const S1: StreamId = StreamId(1);

/// Number of op pairs in a repeat of a micro case.
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

/// Which sizes blocks have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// All the same: 4 KiB.
    One,
    /// From 512 B to 4 MiB, every power of two equally often.
    Spread,
}

/// An allocator that holds many free blocks, with the replacements to carry out on it.
#[derive(Clone, Debug)]
pub struct ManyFree<S: Subject> {
    subject: S,
    live: Vec<S::Handle>,
    /// Which live block is freed, and how much is allocated then.
    replacements: Vec<(usize, u64)>,
}

impl<S: Subject> ManyFree<S> {
    /// `count` free blocks, and as many allocated ones, that cannot merge. As many replacements were carried out, as in a
    /// program that has run for a while: what the frees left to the next search is done.
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

    /// Carries the replacements out: [`PAIRS`] frees and as many allocations. What is measured.
    #[inline]
    pub fn replace(&mut self) {
        for &(victim, size_bytes) in &self.replacements {
            self.subject.free(S0, self.live[victim]);
            self.live[victim] = self.subject.allocate(S0, size_bytes);
        }
    }
}

/// From 512 B to 4 MiB in steps of 512, every power of two equally often.
fn log_uniform(random: &mut SplitMix64) -> u64 {
    let power = 512 << random.below(13);
    power + random.below(power) / 512 * 512
}
