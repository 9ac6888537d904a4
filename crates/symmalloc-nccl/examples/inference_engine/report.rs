//! A rank's results, as lines of a table.

use std::fmt;
use symmalloc_core::Digest;
use symmalloc_cuda::CudaAllocator;
use symmalloc_nccl::{Communicator, Registrar};

/// One round in which all requests were served.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    /// Time from the first request to the last token, in seconds.
    pub(crate) seconds: f64,
    /// Tokens that differ from the reference, including extra and missing ones.
    pub(crate) wrong_tokens: usize,
    /// Number of graph launches.
    pub(crate) launches: u64,
    /// Maximum number of concurrent requests.
    pub(crate) most_at_once: usize,
}

/// Counts that must not grow while requests are served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Holdings {
    /// Driver calls that reserve, map, unmap or release memory.
    pub(crate) memory_calls: u64,
    /// Registrations and deregistrations with NCCL.
    pub(crate) registrations: u64,
}

impl Holdings {
    /// Returns the counts of an allocator and its registrar.
    pub(crate) fn now(allocator: &CudaAllocator, registrar: &Registrar) -> Self {
        let (calls, stats) = (allocator.device_calls(), registrar.stats());
        Holdings {
            memory_calls: calls.reserves + calls.maps + calls.unmaps + calls.releases,
            registrations: stats.registrations + stats.deregistrations,
        }
    }

    /// Returns the growth since `before`.
    pub(crate) fn since(self, before: Holdings) -> Self {
        Holdings {
            memory_calls: self.memory_calls - before.memory_calls,
            registrations: self.registrations - before.registrations,
        }
    }
}

/// A rank's results.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    rank: u32,
    ranks: u32,
    /// Total tokens of the answers.
    tokens: usize,
    /// Rounds of the engine on symmalloc.
    pub(crate) symmalloc: Vec<Run>,
    /// Rounds of the same engine on cudarc's own allocator.
    pub(crate) cudarc: Vec<Run>,
    /// Growth after the warm-up.
    pub(crate) grown: Holdings,
    /// Digest of the ops of this rank's private pool: equal on all ranks.
    pub(crate) digest: Option<Digest>,
}

impl Report {
    /// Creates a report without rounds.
    pub(crate) fn new(comm: &Communicator, tokens: usize) -> Self {
        Report {
            rank: comm.rank(),
            ranks: comm.ranks(),
            tokens,
            symmalloc: Vec::new(),
            cudarc: Vec::new(),
            grown: Holdings::default(),
            digest: None,
        }
    }

    /// Returns `true` if every token was correct and nothing grew after the warm-up.
    pub(crate) fn is_right(&self) -> bool {
        let mut runs = self.symmalloc.iter().chain(&self.cudarc);
        runs.all(|run| run.wrong_tokens == 0) && self.grown == Holdings::default()
    }
}

/// The table of the ranks of a process.
pub(crate) struct Table<'a>(pub(crate) &'a [Report]);

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for report in self.0 {
            let Report { rank, ranks, tokens, symmalloc, cudarc, grown, digest } = report;
            let digest = digest.map_or_else(String::new, |digest| format!(", digest {digest}"));
            writeln!(f, "rank {rank} of {ranks}: {tokens} tokens per round{digest}")?;
            writeln!(f, "  {:<42} {:>12} {:>12}", "", "symmalloc", "cudarc")?;
            let mut line = |name: &str, of: &dyn Fn(&[Run]) -> String| {
                writeln!(f, "  {name:<42} {:>12} {:>12}", of(symmalloc), of(cudarc))
            };
            line("tokens per second, median of the rounds", &|runs| {
                let mut seconds: Vec<f64> = runs.iter().map(|run| run.seconds).collect();
                seconds.sort_unstable_by(f64::total_cmp);
                format!("{:.0}", *tokens as f64 / seconds[seconds.len() / 2])
            })?;
            line("wrong tokens", &|runs| runs.iter().map(|run| run.wrong_tokens).sum::<usize>().to_string())?;
            line("graphs launched", &|runs| runs.iter().map(|run| run.launches).sum::<u64>().to_string())?;
            let most = |runs: &[Run]| runs.iter().map(|run| run.most_at_once).max().unwrap_or(0).to_string();
            line("peak concurrent requests", &most)?;
            writeln!(f, "  {:<42} {:>12}", "driver memory calls after the warm-up", grown.memory_calls)?;
            writeln!(f, "  {:<42} {:>12}", "registrations after the warm-up", grown.registrations)?;
        }
        Ok(())
    }
}
