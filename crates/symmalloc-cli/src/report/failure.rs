//! The request that failed, which is the center of a report: what failed, why, and what serves it.
//!
//! ```text
//! recorded: the last request that the recorded allocator refused ──┐
//! else: the first request that the report's settings refuse ───────┴─► state then ─► cause ─► each setting, up to this request
//! ```
//!
//! The request takes part in each attempt as an allocation at its op. The limit of an attempt is the memory that the recorded allocator
//! could have: what it held, and what was free on the device.

use super::holders::Holder;
use super::pools::PrivatePools;
use super::settings;
use crate::args::ReadingArgs;
use crate::error::CliError;
use crate::escape::quoted;
use crate::picture::memory::{BlockState, DrawnBlock, DrawnHeap, Memory};
use crate::quantity::{count, counted, memory};
use crate::recorded::Recorded;
use crate::streams;
use serde_json::{Value, json};
use std::sync::Arc;
use symmalloc_core::config::Config;
use symmalloc_core::ids::{PoolId, StreamId};
use symmalloc_core::op::{Op, Record};
use symmalloc_core::units::MIB;
use symmalloc_import::{Format, HeldMemory, Recording};
use symmalloc_text::visible_line;
use symmalloc_trace::replay::Program;

/// Number of holders that the description lists.
const HOLDERS_SHOWN: usize = 3;

/// A request that failed.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) op: usize,
    pub(super) size_bytes: u64,
    pub(super) stream: StreamId,
    pub(super) pool: PoolId,
    pub(super) name: Option<Arc<str>>,
    /// Frames of the request's Python stack, innermost first.
    pub(super) frames: Vec<Box<str>>,
    /// Name of the stream.
    stream_name: String,
    /// The name of the allocator that refused it.
    by: &'static str,
    /// Free memory in the heap that the request is for, if the report's own settings refuse it.
    own_free_bytes: Option<u64>,
    /// Number of other requests that failed.
    pub(super) others: u64,
    /// Bytes that the program had requested and not freed.
    pub(super) live_bytes: u64,
    /// Memory that the recorded allocator held.
    pub(super) held: Option<HeldMemory>,
    pub(super) device_free_bytes: Option<u64>,
    /// Memory that the allocator could have.
    pub(super) capacity_bytes: Option<u64>,
    pub(super) attempts: Vec<Attempt>,
}

/// Result of running the job up to the failed request under some settings.
#[derive(Clone, Debug)]
pub(super) struct Attempt {
    settings: String,
    command: String,
    /// Requests refused up to this one, which is included.
    refused: usize,
    reserved_bytes: u64,
}

/// Cause of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// Live memory and the request exceed the memory that the allocator could have.
    TooMuch { missing_bytes: u64 },
    /// Enough memory was free, but not for this request.
    Fragmentation,
    /// The recording does not state how much memory there was.
    Unknown,
}

impl Failure {
    /// Returns the failure of a job, and tries which settings serve the request. `None` if nothing failed.
    pub(super) fn of(recorded: &Recorded, reading: &ReadingArgs) -> Result<Option<Self>, CliError> {
        let Some(mut failure) = Self::found(recorded)? else { return Ok(None) };
        let records = with_request(&recorded.recording, failure.op);
        let program = Program::new(&records);
        let program = program.map_err(|source| CliError::Program { path: recorded.path.clone(), source })?;
        let mut configs = vec![recorded.config.clone()];
        for config in settings::candidates(&recorded.config, recorded.job.stream_count()) {
            if !configs.contains(&config) {
                configs.push(config);
            }
        }
        for config in configs {
            let Some(config) = limited(&config, failure.capacity_bytes) else { continue };
            // Settings under which the job stops serve nothing.
            let Ok(outcome) = recorded.job.attempt(&program, &config, failure.op) else { continue };
            let settings = settings::text(&config);
            let (path, flags) = (quoted(&recorded.path.to_string_lossy()), reading.flags());
            let command = format!("symmalloc replay {path}{flags} --ranks 1 --passes 1 --config {}", quoted(&settings));
            let (refused, reserved_bytes) = (outcome.refused.len(), outcome.reserved_bytes);
            failure.attempts.push(Attempt { settings, command, refused, reserved_bytes });
        }
        Ok(Some(failure))
    }

    /// Returns the recorded failure, or else the first request that the job's own settings refuse.
    fn found(recorded: &Recorded) -> Result<Option<Self>, CliError> {
        let recording = &recorded.recording;
        let ops = recorded.program().ops();
        let (op, noted) = match recording.failure {
            Some(failure) => (failure.record, Some(failure)),
            None => {
                let attempt = recorded.job.attempt(recorded.program(), &recorded.config, ops.len());
                let attempt = attempt.map_err(|source| CliError::Job { path: recorded.path.clone(), source })?;
                let Some(op) = attempt.refused.first() else { return Ok(None) };
                (*op, None)
            }
        };
        let (pool, stream, size_bytes) = match ops[op] {
            Op::Refuse { pool, stream, size_bytes, .. }
            | Op::Allocate { pool, stream, size_bytes, .. }
            | Op::Reserve { pool, stream, size_bytes } => (pool, stream, size_bytes),
            _ => return Ok(None),
        };
        let by = match (noted, recording.format) {
            (Some(_), Format::PyTorchSnapshot) => "PyTorch refused it",
            (Some(_), Format::RmmLog) => "RMM refused it",
            (Some(_), _) => "the recorded allocator refused it",
            (None, _) => "symmalloc refuses it with these settings",
        };
        let stack = noted.and_then(|failure| failure.stack);
        let frames = recording.stacks.as_ref().zip(stack).map_or_else(Vec::new, |(stacks, stack)| {
            stacks.stacks()[stack].frames.iter().map(|frame| stacks.frames()[*frame as usize].clone()).collect()
        });
        let held = noted.and_then(|failure| failure.held);
        let device_free_bytes = noted.and_then(|failure| failure.device_free_bytes);
        let from_device = held.zip(device_free_bytes).map(|(held, free)| held.reserved_bytes.saturating_add(free));
        let capacity_bytes = match noted {
            Some(_) => from_device,
            None => [
                recorded.config.total_limit_bytes(),
                recorded.config.default_pool().limit_bytes().filter(|_| pool == PoolId::DEFAULT),
            ]
            .into_iter()
            .flatten()
            .min(),
        };
        Ok(Some(Failure {
            op,
            size_bytes,
            stream,
            pool,
            name: recording.records[op].name.clone(),
            frames,
            stream_name: streams::name(recording, stream),
            by,
            own_free_bytes: None,
            others: noted.map_or(0, |_| recording.summary.failed_allocations.saturating_sub(1)),
            live_bytes: live_bytes(&ops[..op]),
            held,
            device_free_bytes,
            capacity_bytes,
            attempts: Vec::new(),
        }))
    }

    /// Adds the memory that symmalloc holds then, if its settings refuse the request.
    pub(super) fn add_state(&mut self, recorded: &Recorded, shown: &Memory) {
        if recorded.recording.failure.is_some() || shown.op != self.op {
            return;
        }
        let free = |block: &&DrawnBlock| matches!(block.state, BlockState::Free | BlockState::Fenced);
        let mut held = HeldMemory::default();
        held.reserved_bytes = shown.size_bytes();
        for block in shown.blocks().filter(free) {
            held.free_blocks += 1;
            held.free_block_bytes += block.size_bytes;
            held.largest_free_bytes = held.largest_free_bytes.max(block.size_bytes);
        }
        held.allocated_bytes = held.reserved_bytes - held.free_block_bytes;
        let is_own = |heap: &&DrawnHeap| {
            heap.owner.pool == self.pool && heap.owner.stream().is_none_or(|stream| stream == self.stream)
        };
        let own = shown.heaps.iter().filter(is_own).flat_map(DrawnHeap::blocks);
        self.own_free_bytes = Some(own.filter(free).map(|block| block.size_bytes).sum());
        self.held = Some(held);
    }

    fn cause(&self) -> Cause {
        let needed = self.live_bytes.saturating_add(self.size_bytes);
        match self.capacity_bytes {
            Some(capacity) if needed > capacity => Cause::TooMuch { missing_bytes: needed - capacity },
            Some(_) => Cause::Fragmentation,
            None => Cause::Unknown,
        }
    }

    /// Returns the attempts that serve the request and refuse nothing before, the least memory first and the job's own settings before
    /// all others.
    fn served(&self) -> Vec<&Attempt> {
        let mut served: Vec<&Attempt> = self.attempts.iter().filter(|attempt| attempt.refused == 0).collect();
        let own = self.attempts.first().map(|own| own.settings.as_str());
        served.sort_by_key(|attempt| (Some(attempt.settings.as_str()) != own, attempt.reserved_bytes));
        served
    }

    /// Returns the op of the memory that the report shows: the state before the request.
    pub(super) fn op_shown(&self) -> usize {
        self.op
    }

    /// Describes the failure in sentences: what failed, the state then, the cause, the largest holders and the remedy.
    pub(super) fn lines(&self, holders: &[Holder], pools: Option<&PrivatePools>) -> Vec<(&'static str, String)> {
        let mut lines = vec![("failed", self.request()), ("then", self.state()), ("why", self.reason())];
        if !holders.is_empty() {
            lines.push(("held", largest(holders)));
        }
        lines.push(("remedy", self.remedy(pools)));
        lines
    }

    fn request(&self) -> String {
        let name = self.name.as_deref().map_or_else(String::new, |name| format!(" by {}", visible_line(name)));
        let others = match self.others {
            0 => String::new(),
            others => format!("; {} failed before", counted(others, "other request")),
        };
        let (op, size, pool) = (count(self.op), memory(self.size_bytes), self.pool.0);
        let stream = &self.stream_name;
        let by = self.by;
        format!("op {op} requested {size}{name} in pool {pool} on {stream}, and {by}{others}")
    }

    fn state(&self) -> String {
        let live = format!("{} live", memory(self.live_bytes));
        let Some(held) = self.held else {
            let limit =
                self.capacity_bytes.map_or_else(String::new, |limit| format!(", under a limit of {}", memory(limit)));
            return format!("{live}{limit}");
        };
        let pieces = held.free_segments + held.free_blocks;
        let free = match pieces {
            0 => "nothing of it free".to_owned(),
            1 => format!("{} of it free in 1 piece", memory(held.free_bytes())),
            pieces => format!(
                "{} of it free in {} pieces, the largest of {}",
                memory(held.free_bytes()),
                count(pieces),
                memory(held.largest_free_bytes)
            ),
        };
        let device =
            self.device_free_bytes.map_or_else(String::new, |free| format!("; {} free on the device", memory(free)));
        format!("{live}, {} reserved, {free}{device}", memory(held.reserved_bytes))
    }

    fn reason(&self) -> String {
        let needed = memory(self.live_bytes.saturating_add(self.size_bytes));
        match (self.cause(), self.capacity_bytes) {
            (Cause::TooMuch { missing_bytes }, Some(capacity)) => format!(
                "live memory and the request need {needed}, but only {} can be had: {} are missing",
                memory(capacity),
                memory(missing_bytes)
            ),
            (_, Some(capacity))
                if self.own_free_bytes.zip(self.held).is_some_and(|(own, held)| {
                    held.free_bytes() - own >= held.free_bytes().div_ceil(2) && held.free_bytes() > 0
                }) =>
            {
                format!(
                    "live memory and the request need {needed} of {}, but most free memory is in heaps of other streams or pools",
                    memory(capacity)
                )
            }
            (_, Some(capacity)) => format!(
                "fragmentation: live memory and the request need {needed} of {}, but no free piece holds the request",
                memory(capacity)
            ),
            (_, None) => format!(
                "the recording does not state how much memory there was; live memory and the request need {needed}"
            ),
        }
    }

    fn remedy(&self, pools: Option<&PrivatePools>) -> String {
        if let Cause::TooMuch { missing_bytes } = self.cause() {
            let missing = memory(missing_bytes);
            return format!("no allocator can serve it: free {missing} before this op, or request less");
        }
        let served = self.served();
        let Some(best) = served.first() else {
            let other = if pools.is_some() { "share the private pools (below), " } else { "" };
            return format!(
                "none of the tested settings serves it: {other}free memory before this op, or request less"
            );
        };
        let within = match self.capacity_bytes {
            Some(capacity) => format!("within the same {} MiB", count(capacity / MIB)),
            None => {
                return format!(
                    "with {}, symmalloc reserves {} to serve it; `--config total_limit_mb:N` of `symmalloc replay` tells whether it fits into N MiB",
                    best.settings,
                    memory(best.reserved_bytes)
                );
            }
        };
        format!(
            "symmalloc serves it {within} with {}, {} reserved ({})",
            best.settings,
            memory(best.reserved_bytes),
            best.command
        )
    }

    pub(super) fn object(&self) -> Value {
        let held = self.held.map(|held| held_object(&held));
        let cause = match self.cause() {
            Cause::TooMuch { .. } => "too much",
            Cause::Fragmentation => "fragmentation",
            Cause::Unknown => "unknown",
        };
        let attempt = |attempt: &Attempt| {
            json!({
                "settings": attempt.settings,
                "command": attempt.command,
                "is_served": attempt.refused == 0,
                "refused": attempt.refused,
                "reserved_bytes": attempt.reserved_bytes,
            })
        };
        json!({
            "op": self.op,
            "size_bytes": self.size_bytes,
            "pool": self.pool.0,
            "stream": self.stream.0,
            "name": self.name.as_deref(),
            "stack": self.frames,
            "others": self.others,
            "live_bytes": self.live_bytes,
            "held": held,
            "device_free_bytes": self.device_free_bytes,
            "capacity_bytes": self.capacity_bytes,
            "cause": cause,
            "attempts": self.attempts.iter().map(attempt).collect::<Vec<_>>(),
        })
    }
}

/// Describes the largest holders of memory.
fn largest(holders: &[Holder]) -> String {
    let of = |holder: &Holder| {
        let number = counted(holder.allocations, "allocation");
        format!("{} in {number} {}", memory(holder.requested_bytes), visible_line(&holder.origin()))
    };
    let (first, rest) = holders.split_at(holders.len().min(HOLDERS_SHOWN));
    let mut parts: Vec<String> = first.iter().map(of).collect();
    let rest_bytes: u64 = rest.iter().map(|holder| holder.requested_bytes).sum();
    if rest_bytes > 0 {
        parts.push(format!("{} in others", memory(rest_bytes)));
    }
    parts.join("; ")
}

/// Returns the memory of a recorded allocator as JSON.
pub(super) fn held_object(held: &HeldMemory) -> Value {
    json!({
        "reserved_bytes": held.reserved_bytes,
        "allocated_bytes": held.allocated_bytes,
        "free_segments": held.free_segments,
        "free_segment_bytes": held.free_segment_bytes,
        "free_blocks": held.free_blocks,
        "free_block_bytes": held.free_block_bytes,
        "largest_free_bytes": held.largest_free_bytes,
    })
}

/// Returns a configuration whose limit is at most this, or `None` if it is invalid.
fn limited(config: &Config, capacity_bytes: Option<u64>) -> Option<Config> {
    let Some(capacity) = capacity_bytes else { return Some(config.clone()) };
    let limit = config.total_limit_bytes().map_or(capacity, |limit| limit.min(capacity)) / MIB * MIB;
    // The pool's own limit is the reason of the failure.
    if config.default_pool().limit_bytes() == Some(limit) {
        return Some(config.clone());
    }
    config.to_builder().total_limit_bytes(Some(limit)).build().ok()
}

/// Returns the records in which the refused request of an op is an allocation.
fn with_request(recording: &Recording, op: usize) -> Vec<Record> {
    let mut records = recording.records.clone();
    if let Op::Refuse { pool, stream, size_bytes, .. } = records[op].op {
        let id = crate::job::unused_id(&records);
        records[op].op = Op::Allocate { id, pool, stream, size_bytes };
    }
    records
}

/// Returns the bytes that are live after these ops.
fn live_bytes(ops: &[Op]) -> u64 {
    let mut sizes = Vec::new();
    let mut live = 0u64;
    for op in ops {
        match op {
            Op::Allocate { size_bytes, .. } => {
                sizes.push(*size_bytes);
                live = live.saturating_add(*size_bytes);
            }
            Op::Free { id } => live = live.saturating_sub(sizes.get(id.index()).copied().unwrap_or(0)),
            _ => {}
        }
    }
    live
}
