//! The request that failed, which is the center of a report: what failed, why, and which settings serve it.
//!
//! ```text
//! recorded: the last request that the recorded allocator refused ──┐
//! else: the first request that the report's settings refuse ───────┴─► state then ─► cause ─► each setting, up to this request
//! ```
//! Each attempt replays the job up to the request, with other settings of the request's pool. The request is replayed as an allocation. The
//! limits are those of the job, and the memory that was available to the recorded allocator: the memory that it held, and the memory that
//! was free on the device.

mod bound;
mod growth;
mod places;

use super::holders::{self, Holder};
use super::pools::PrivatePools;
use super::settings;
use crate::args::ReadingArgs;
use crate::config_text;
use crate::error::CliError;
use crate::escape::quoted;
use crate::picture::memory::Memory;
use crate::quantity::{count, counted, memory};
use crate::recorded::Recorded;
use crate::streams;
use bound::{Bound, LiveBytes, Scope, bounds, pool_config};
use growth::Growth;
use places::{Place, Places};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;
use symmalloc_core::config::{Config, PoolConfig, Reclaim};
use symmalloc_core::errors::{LimitScope, OutOfMemoryCause};
use symmalloc_core::groups::Groups;
use symmalloc_core::ids::{PoolId, StreamId};
use symmalloc_core::op::{Op, Record, Refusal};
use symmalloc_core::units::{MIB, SEGMENT_BYTES_MAX};
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
    /// The groups of the job's streams.
    groups: Groups,
    /// The name of the allocator that refused it.
    by: &'static str,
    /// Number of other requests that failed.
    pub(super) others: u64,
    /// `true` if the memory in this struct is that of symmalloc's replay, not that of the recorded allocator.
    is_replayed: bool,
    /// Bytes that the program had requested and not freed, in all pools.
    pub(super) live_bytes: u64,
    /// The bytes of `live_bytes` that are in the request's pool.
    pool_live_bytes: u64,
    /// Memory that the allocator held; `None` if it is unknown.
    pub(super) held: Option<HeldMemory>,
    /// Memory of each heap.
    places: Places,
    /// Pools that sleep.
    asleep: BTreeSet<PoolId>,
    pub(super) device_free_bytes: Option<u64>,
    /// Limits that apply to the request, the narrowest first.
    bounds: Vec<Bound>,
    /// The limit that prevents the request, if one is known.
    bound: Option<Bound>,
    /// A holder that grows through the whole job.
    growth: Option<Growth>,
    /// Settings of the request's pool.
    pool_config: PoolConfig,
    pub(super) attempts: Vec<Attempt>,
    /// Settings that are not tried because the job is long, in the notation of `--config`.
    pub(super) left_out: Vec<String>,
}

/// Result of running the job up to the failed request under some settings.
#[derive(Clone, Debug)]
pub(super) struct Attempt {
    settings: String,
    /// Command that reproduces the attempt. `None` if it changes a pool that the program creates.
    command: Option<String>,
    /// Number of requests refused up to and including this one.
    refused: usize,
    reserved_bytes: u64,
    /// The value of `reclaim`, if the attempt differs from the job's own settings in `reclaim` alone.
    reclaim: Option<&'static str>,
}

/// Cause of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// Live memory and the request exceed the memory available to the allocator.
    TooMuch { missing_bytes: u64 },
    /// Enough memory was free, but not for this request.
    Fragmentation,
    /// The recording does not state how much memory there was.
    Unknown,
}

impl Failure {
    /// Returns the failure of a job, with the result of each setting that may serve the request. Returns `None` if nothing failed.
    /// `own_refused` is the number of allocations that the job's own settings refuse.
    pub(super) fn of(recorded: &Recorded, reading: &ReadingArgs, own_refused: u64) -> Result<Option<Self>, CliError> {
        let Some(mut failure) = Self::found(recorded, own_refused)? else { return Ok(None) };
        let program = Program::new(&with_request(&recorded.recording, failure.op));
        let program = program.map_err(|source| CliError::Program { path: recorded.path.clone(), source })?;
        let of_default = failure.pool == PoolId::DEFAULT;
        // Candidates are made for the default pool, so the configuration of the request's pool takes its place.
        let as_default = recorded.config.to_builder().default_pool(failure.pool_config.clone()).build();
        let mut configs: Vec<Config> = as_default.into_iter().collect();
        if let Some(own) = configs.first() {
            let candidates = settings::candidates(recorded, own);
            let (others, left_out) = settings::within_budget(recorded, candidates, own, failure.op);
            configs.extend(others);
            failure.left_out = left_out;
        }
        let device_bytes = failure.device_bytes();
        for (index, candidate) in configs.iter().enumerate() {
            let changed = (!of_default && index > 0)
                .then(|| program.clone().with_pool_config(failure.pool, candidate.default_pool()));
            let config = if of_default { candidate } else { &recorded.config };
            let Some(config) = limited(config, device_bytes) else { continue };
            // Settings under which the job stops do not serve the request.
            let attempt = recorded.job.attempt(changed.as_ref().unwrap_or(&program), &config, failure.op);
            let Ok(outcome) = attempt else { continue };
            let changed = config_text::shortest(&config);
            let (path, flags) = (quoted(&recorded.path.to_string_lossy()), reading.flags());
            let command =
                || format!("symmalloc replay {path}{flags} --ranks 1 --passes 1 --config {}", quoted(&changed));
            let (settings, command) = match of_default || index == 0 {
                true => (changed.clone(), Some(command())),
                false => {
                    let own =
                        candidate.to_builder().total_limit_bytes(None).build().unwrap_or_else(|_| candidate.clone());
                    (format!("{} for pool {}", config_text::shortest(&own), failure.pool.0), None)
                }
            };
            let (refused, reserved_bytes) = (outcome.refused.len(), outcome.reserved_bytes);
            let reclaim = changed_reclaim(&configs[0], candidate);
            failure.attempts.push(Attempt { settings, command, refused, reserved_bytes, reclaim });
        }
        Ok(Some(failure))
    }

    /// Returns the recorded failure, or else the first request that the job's own settings refuse.
    fn found(recorded: &Recorded, own_refused: u64) -> Result<Option<Self>, CliError> {
        let recording = &recorded.recording;
        let ops = recorded.program().ops();
        let (op, noted, cause) = match recording.failure {
            Some(failure) => (failure.record, Some(failure), refusal_of(recorded, failure.record)),
            // `own_refused` does not count reservations.
            None if own_refused == 0 && !ops.iter().any(|op| matches!(op, Op::Reserve { .. })) => return Ok(None),
            None => {
                let refusal = recorded.job.first_refusal(&recorded.config);
                let refusal = refusal.map_err(|source| CliError::Job { path: recorded.path.clone(), source })?;
                let Some((op, cause)) = refusal else { return Ok(None) };
                (op, None, cause)
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
        let live = LiveBytes::after(&ops[..op]);
        let held = noted.and_then(|failure| failure.held);
        let device_free_bytes = noted.and_then(|failure| failure.device_free_bytes);
        let device_bytes = held.zip(device_free_bytes).map(|(held, free)| held.reserved_bytes.saturating_add(free));
        let bounds = bounds(recorded, (pool, stream), op, &live, cause.as_ref(), device_bytes);
        let by_driver = matches!(ops[op], Op::Refuse { refusal: Refusal::Driver, .. }) && device_bytes.is_none();
        let mut failure = Failure {
            op,
            size_bytes,
            stream,
            pool,
            name: recording.records[op].name.clone(),
            frames,
            stream_name: streams::name(recording, stream),
            groups: recorded.program().groups(),
            by,
            others: noted.map_or(0, |_| recording.summary.failed_allocations.saturating_sub(1)),
            is_replayed: noted.is_none() || is_ours(recording),
            live_bytes: live.all(),
            pool_live_bytes: live.of_pool(pool),
            held,
            places: Places::recorded(&recording.failure_heaps, &live),
            asleep: live.asleep,
            device_free_bytes,
            bound: deciding(&bounds, size_bytes, cause.as_ref(), by_driver),
            bounds,
            growth: None,
            pool_config: pool_config(recorded, pool, op),
            attempts: Vec::new(),
            left_out: Vec::new(),
        };
        failure.growth = Growth::of(&recording.records, op, failure.of_pool_alone());
        Ok(Some(failure))
    }

    /// Adds the memory that symmalloc holds at the request, if symmalloc refused the request.
    pub(super) fn add_state(&mut self, shown: &Memory) {
        if self.is_replayed && shown.op == self.op {
            self.places = Places::replayed(shown, &self.asleep);
            self.held = Some(self.places.held());
        }
    }

    /// Returns the memory available to the recorded allocator.
    fn device_bytes(&self) -> Option<u64> {
        self.bounds.iter().find(|bound| bound.scope == Scope::Device).map(|bound| bound.capacity_bytes)
    }

    /// Returns the request's pool if a limit of this pool prevents the request. In this case, only the pool's memory matters.
    fn of_pool_alone(&self) -> Option<PoolId> {
        let is_own = |bound: &Bound| matches!(bound.scope, Scope::Pool | Scope::Segment);
        self.bound.filter(is_own).map(|_| self.pool)
    }

    fn cause(&self) -> Cause {
        match self.bound.map(|bound| bound.missing_bytes(self.size_bytes)) {
            Some(0) => Cause::Fragmentation,
            Some(missing_bytes) => Cause::TooMuch { missing_bytes },
            None => Cause::Unknown,
        }
    }

    /// Returns the attempts that serve the request and all requests before it. The job's own settings come first, then changes of `reclaim`
    /// alone, then all others; among these, the attempts that reserve the least memory come first.
    fn served(&self) -> Vec<&Attempt> {
        let mut served: Vec<&Attempt> = self.attempts.iter().filter(|attempt| attempt.refused == 0).collect();
        let own = self.attempts.first().map(|own| own.settings.as_str());
        served.sort_by_key(|attempt| {
            (Some(attempt.settings.as_str()) != own, attempt.reclaim.is_none(), attempt.reserved_bytes)
        });
        served
    }

    /// Returns `true` if a tested setting serves the request.
    pub(super) fn is_served(&self) -> bool {
        !self.served().is_empty()
    }

    /// Returns `true` if the job's own settings serve the request after `change` has changed the records up to it.
    pub(super) fn serves(
        &self,
        recorded: &Recorded,
        change: impl FnOnce(&[Record]) -> Option<Vec<Record>>,
    ) -> Option<bool> {
        let records = with_request(&recorded.recording, self.op);
        let changed = change(&records[..=self.op])?;
        let config = limited(&recorded.config, self.device_bytes())?;
        let attempt = recorded.job.attempt(&Program::new(&changed).ok()?, &config, changed.len()).ok()?;
        Some(attempt.refused.is_empty())
    }

    /// Returns the op at which the report shows the memory: the state before the request.
    pub(super) fn op_shown(&self) -> usize {
        self.op
    }

    /// Describes the failure in sentences: what failed, the state then, the cause, where memory is, the largest holders and the remedy.
    pub(super) fn lines(
        &self,
        recording: &Recording,
        shown: &Memory,
        pools: Option<&PrivatePools>,
    ) -> Vec<(&'static str, String)> {
        let mut lines = vec![("failed", self.request()), ("then", self.state()), ("why", self.reason())];
        lines.extend(self.places.text(recording, &self.groups, (self.pool, self.stream)).map(|text| ("where", text)));
        let holders = match self.of_pool_alone() {
            Some(pool) => holders::of_pools(shown, |of| of == pool),
            None => holders::of_pools(shown, |of| !self.asleep.contains(&of)),
        };
        let held: Vec<String> = [largest(&holders), self.free_memory()].into_iter().flatten().collect();
        if !held.is_empty() {
            lines.push(("held", held.join("; ")));
        }
        // Growth is not the problem if no device could serve the request.
        let growth = self.growth.as_ref().filter(|_| !self.is_larger_than_devices());
        lines.extend(growth.map(|growth| ("grows", growth.text())));
        let remedy = self.remedy(pools);
        lines.push(("remedy", growth.map_or(remedy.clone(), |growth| growth.remedy(&remedy))));
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
        let live = match self.live_bytes == self.pool_live_bytes {
            true => format!("{} live", memory(self.live_bytes)),
            false => {
                format!(
                    "{} live, {} of it in pool {}",
                    memory(self.live_bytes),
                    memory(self.pool_live_bytes),
                    self.pool.0
                )
            }
        };
        let Some(held) = self.held else {
            let limit = self.bound.map(|bound| memory(bound.capacity_bytes));
            return limit.map_or_else(|| live.clone(), |limit| format!("{live}, under a limit of {limit}"));
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
        let Some(bound) = self.bound else {
            let needed = memory(self.live_bytes.saturating_add(self.size_bytes));
            return format!(
                "the recording does not state how much memory there was; live memory and the request need {needed}"
            );
        };
        let (live, needed) = (bound.live_memory(self.pool), memory(bound.needed_bytes(self.size_bytes)));
        if let Cause::TooMuch { missing_bytes } = self.cause() {
            return format!(
                "{live} and the request need {needed}, but {}: {} are missing",
                bound.capacity(),
                memory(missing_bytes)
            );
        }
        let keeps = match self.served().first() {
            Some(best) if best.reclaim.is_some() => ". reclaim:never keeps the free segments",
            _ => "",
        };
        match self.held_under(&bound) {
            Some(held) => format!("{}{keeps}", self.unusable(&bound, &held)),
            None => format!(
                "fragmentation: {live} and the request need {needed} of {}, but no free piece holds the request",
                memory(bound.capacity_bytes)
            ),
        }
    }

    /// Returns the memory that counts toward a limit, if the recording shows it.
    fn held_under(&self, bound: &Bound) -> Option<HeldMemory> {
        let all = self.held?;
        match bound.scope {
            Scope::Total | Scope::Device => Some(all),
            Scope::Pool => self.places.held_by(|place| place.pool == Some(self.pool)),
            Scope::Segment => self.places.held_by(|place| self.is_own(place)),
        }
    }

    /// Returns `true` if the request can use the free memory of this heap.
    fn is_own(&self, place: &Place) -> bool {
        place.pool == Some(self.pool) && place.serves(self.stream, &self.groups)
    }

    /// Explains why neither the unreserved memory under a limit nor the free memory serves the request.
    fn unusable(&self, bound: &Bound, held: &HeldMemory) -> String {
        let unreserved_bytes = match (bound.scope, self.device_free_bytes) {
            (Scope::Device, Some(free_bytes)) => free_bytes,
            _ => bound.capacity_bytes.saturating_sub(held.reserved_bytes),
        };
        let unreserved = match unreserved_bytes {
            0 => format!("{} is reserved as a whole", bound.limit()),
            bytes => format!("{} of {} are unreserved", memory(bytes), bound.limit()),
        };
        let request = match unreserved_bytes < self.size_bytes {
            true => format!("the request needs {}", memory(self.size_bytes)),
            false => format!("the request of {} needs a larger segment", memory(self.size_bytes)),
        };
        let pieces = |held: &HeldMemory| match held.free_segments + held.free_blocks {
            1 => "in one piece".to_owned(),
            pieces => format!("in {} pieces of at most {}", count(pieces), memory(held.largest_free_bytes)),
        };
        let free_bytes = held.free_bytes();
        let own = self.places.held_by(|place| self.is_own(place)).unwrap_or_default();
        let other_bytes = free_bytes.saturating_sub(own.free_bytes());
        match self.elsewhere(bound) {
            _ if free_bytes == 0 => format!("{unreserved}, and {request}; none of the reserved memory is free"),
            Some(elsewhere) if own.free_bytes() == 0 => format!(
                "{unreserved}, and {request}; the {} that are free are in {elsewhere}, where it cannot use them",
                memory(free_bytes)
            ),
            Some(elsewhere) => format!(
                "{unreserved}, and {request}; of the {} that are free, {} are in {elsewhere}, where it cannot use them, and {} are {}",
                memory(free_bytes),
                memory(other_bytes),
                memory(own.free_bytes()),
                pieces(&own)
            ),
            None => format!(
                "fragmentation: {unreserved}, and {request}; the {} that are free are {}",
                memory(free_bytes),
                pieces(held)
            ),
        }
    }

    /// Describes the heaps whose free memory counts toward a limit, but cannot serve the request. Returns `None` unless these heaps have
    /// most of the free memory.
    fn elsewhere(&self, bound: &Bound) -> Option<String> {
        let is_other_stream = |place: &Place| place.pool == Some(self.pool) && !self.is_own(place);
        let is_other_pool = |place: &Place| place.pool != Some(self.pool) && !matches!(bound.scope, Scope::Pool);
        if bound.scope == Scope::Segment {
            return None;
        }
        let [own_bytes, streams_bytes, pools_bytes] = [
            self.places.free_bytes(|place| self.is_own(place)),
            self.places.free_bytes(is_other_stream),
            self.places.free_bytes(is_other_pool),
        ];
        let streams = (streams_bytes > 0).then(|| "other streams of the pool".to_owned());
        let pools = (pools_bytes > 0).then(|| counted(self.places.pools_with_free(is_other_pool), "other pool"));
        let names: Vec<String> = streams.into_iter().chain(pools).collect();
        (!names.is_empty() && streams_bytes + pools_bytes >= own_bytes).then(|| names.join(" and "))
    }

    /// Describes the free memory and its holders, if fragmentation is the problem.
    fn free_memory(&self) -> Option<String> {
        let held = self.bound.and_then(|bound| self.held_under(&bound))?;
        let counts = |place: &Place| self.of_pool_alone().is_none_or(|pool| place.pool == Some(pool));
        let [pools, heaps] = [self.places.pools_with_free(counts), self.places.heaps_with_free(counts)];
        let holders = match (pools, heaps) {
            (2.., _) => counted(pools, "pool"),
            (_, 2..) => counted(heaps, "stream"),
            _ => counted(held.free_segments + held.free_blocks, "piece"),
        };
        let is_problem = self.cause() == Cause::Fragmentation && held.free_bytes() > 0;
        is_problem.then(|| format!("free: {} in {holders}", memory(held.free_bytes())))
    }

    fn remedy(&self, pools: Option<&PrivatePools>) -> String {
        if self.is_larger_than_devices() {
            return format!(
                "no device has {}: the size is probably a bug of the program, such as a negative number or an overflow",
                memory(self.size_bytes)
            );
        }
        if let Cause::TooMuch { missing_bytes } = self.cause() {
            let missing = match self.of_pool_alone() {
                Some(pool) => format!("{} of pool {}", memory(missing_bytes), pool.0),
                None => memory(missing_bytes),
            };
            let exceeded = self.bounds.iter().filter(|bound| bound.missing_bytes(self.size_bytes) > 0);
            let settings: Option<Vec<String>> =
                exceeded.map(|bound| bound.setting(self.pool, &self.pool_config, self.size_bytes)).collect();
            return match settings {
                None => format!("no allocator can serve it: free {missing} before this op, or request less"),
                Some(settings) => {
                    let (raise, left) = (settings.join(" and "), self.left_in_total());
                    format!("raise {raise}, free {missing} before this op, or request less{left}")
                }
            };
        }
        let served = self.served();
        let Some(best) = served.first() else {
            if let Some(pools) = pools.filter(|pools| pools.serves_request()) {
                return pools.remedy();
            }
            // Trimming does not help PyTorch, which releases its free segments before it fails.
            let is_over_all = self.bound.is_some_and(|bound| bound.scope == Scope::Total);
            let freest = self.places.freest(self.pool).filter(|_| is_over_all && self.is_replayed);
            let trim = freest.map_or_else(String::new, |(pool, free_bytes)| {
                format!("trim pool {}, which holds {} free, ", pool.0, memory(free_bytes))
            });
            return format!("{trim}free memory before this op, or request less: no tested setting serves it");
        };
        let command = best.command.as_ref().map_or_else(String::new, |command| format!(" ({command})"));
        let within = match self.bound {
            Some(bound) if bound.scope == Scope::Pool => {
                format!("within the pool's {} MiB", count(bound.capacity_bytes / MIB))
            }
            Some(bound) => format!("within the same {} MiB", count(bound.capacity_bytes / MIB)),
            None => {
                return format!(
                    "with {}, symmalloc reserves {} to serve it; `--config total_limit_mb:N` of `symmalloc replay` tells whether it fits into N MiB",
                    best.settings,
                    memory(best.reserved_bytes)
                );
            }
        };
        let instead = best.reclaim.map_or_else(String::new, |reclaim| format!(" ({reclaim} instead of reclaim:never)"));
        format!(
            "symmalloc serves it {within} with {}{instead}, {} reserved{command}",
            best.settings,
            memory(best.reserved_bytes)
        )
    }

    /// Returns `true` if no device could serve the request.
    fn is_larger_than_devices(&self) -> bool {
        self.size_bytes > SEGMENT_BYTES_MAX
    }

    /// States how much memory the limit over all pools leaves, unless that limit prevents the request, too.
    fn left_in_total(&self) -> String {
        let total = self.bounds.iter().find(|bound| bound.scope == Scope::Total);
        let Some(total) = total.filter(|total| total.missing_bytes(self.size_bytes) == 0) else { return String::new() };
        let used_bytes = self.held.map_or(total.live_bytes, |held| held.reserved_bytes);
        let left = memory(total.capacity_bytes.saturating_sub(used_bytes));
        format!("; the limit of all pools leaves {left} of {}", memory(total.capacity_bytes))
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
            "pool_live_bytes": self.pool_live_bytes,
            "held": held,
            "heaps": self.places.object(),
            "device_free_bytes": self.device_free_bytes,
            "capacity_bytes": self.bound.map(|bound| bound.capacity_bytes),
            "growth": self.growth.as_ref().map(|growth| growth.quarters),
            "limit": self.bound.map(|bound| bound.scope.word()),
            "cause": cause,
            "attempts": self.attempts.iter().map(attempt).collect::<Vec<_>>(),
        })
    }
}

/// Describes the largest holders of memory.
fn largest(holders: &[Holder]) -> Option<String> {
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
    (!parts.is_empty()).then(|| parts.join("; "))
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

/// Returns a configuration whose limit is at most the memory of the device, or `None` if it is invalid.
fn limited(config: &Config, device_bytes: Option<u64>) -> Option<Config> {
    let Some(device_bytes) = device_bytes else { return Some(config.clone()) };
    let limit = config.total_limit_bytes().map_or(device_bytes, |limit| limit.min(device_bytes)) / MIB * MIB;
    config.to_builder().total_limit_bytes(limit).build().ok()
}

/// Returns the value of `reclaim` in the `other` configuration, if the default pool of `own` never releases memory and `other` differs from
/// it in nothing else.
fn changed_reclaim(own: &Config, other: &Config) -> Option<&'static str> {
    let (own, other) = (own.default_pool(), other.default_pool());
    let is_alone = other.to_builder().reclaim(own.reclaim()).build().as_ref() == Ok(own);
    match (own.reclaim(), other.reclaim()) {
        (Reclaim::Never, Reclaim::Heap) if is_alone => Some("reclaim:heap"),
        (Reclaim::Never, Reclaim::Pool) if is_alone => Some("reclaim:pool"),
        _ => None,
    }
}

/// Returns the limit that prevents a request: the one that lacks the most bytes, or else the one that the allocator named, or else the
/// tightest. Returns `None` if no limit lacks bytes and the driver refused the request, because no setting states why a driver refuses.
fn deciding(bounds: &[Bound], size_bytes: u64, cause: Option<&OutOfMemoryCause>, by_driver: bool) -> Option<Bound> {
    let lacking = bounds.iter().filter(|bound| bound.missing_bytes(size_bytes) > 0);
    if let Some(bound) = lacking.rev().max_by_key(|bound| bound.missing_bytes(size_bytes)) {
        return Some(*bound);
    }
    if by_driver {
        return None;
    }
    let named = match cause {
        Some(OutOfMemoryCause::SegmentFull { .. }) => Some(Scope::Segment),
        Some(OutOfMemoryCause::Limit { scope: LimitScope::Pool, .. }) => Some(Scope::Pool),
        Some(OutOfMemoryCause::Limit { .. }) => Some(Scope::Total),
        _ => None,
    };
    let named = bounds.iter().find(|bound| Some(bound.scope) == named);
    named.or(bounds.iter().min_by_key(|bound| bound.capacity_bytes - bound.live_bytes)).copied()
}

/// Returns `true` if symmalloc recorded the job itself: the trace states the configuration, and a replay has the same memory.
fn is_ours(recording: &Recording) -> bool {
    recording.format == Format::Trace && recording.config.is_some()
}

/// Returns the cause for which symmalloc refuses the recorded request of an op. Returns `None` if symmalloc serves the request, or if
/// another allocator refused it.
fn refusal_of(recorded: &Recorded, op: usize) -> Option<OutOfMemoryCause> {
    if !is_ours(&recorded.recording) {
        return None;
    }
    let program = Program::new(&with_request(&recorded.recording, op)).ok()?;
    let attempt = recorded.job.attempt(&program, &recorded.config, op).ok()?;
    attempt.refused.into_iter().find(|(refused, _)| *refused == op)?.1
}

/// Returns the recording's records. If the op is a refused request, an allocation replaces it.
fn with_request(recording: &Recording, op: usize) -> Vec<Record> {
    let mut records = recording.records.clone();
    if let Op::Refuse { pool, stream, size_bytes, .. } = records[op].op {
        let id = crate::job::unused_id(&records);
        records[op].op = Op::Allocate { id, pool, stream, size_bytes };
    }
    records
}
