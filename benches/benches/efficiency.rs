//! The memory that each recorded job reserves beyond its live memory: its amount, its location, and ways to reduce it.
//!
//! Prints tables of counts on a simulated device, which are the same on every machine and in every run:
//!
//! 1. the savings from streams that share a heap, and the events and waits that this takes; rules that would take fewer
//!    waits, from a separate model (`affinity`), which is checked to synchronize like the core;
//! 2. rules for large blocks: those that the configuration offers, and others from a separate model (`fit_rules`), which
//!    is first checked to place like the core;
//! 3. the location of memory that is reserved but not live when the last memory is obtained;
//! 4. moving whole free granules: under a limit the allocator releases free granules and maps others, so the smallest
//!    limit under which a job completes shows the savings from moving, and the calls until then its cost; and a rule that
//!    moves only the missing memory, again from a model (`moving`).
//!
//! Peaks are relative to the peak of live requested bytes. A job runs six times, with everything freed in between.
//! Times are computed from the counts and the cost of a chunk on an H200 (`docs/measured/gpu.md`). They exclude the
//! device work that the host waits for before it unmaps.
//!
//! `cargo bench -p symmalloc-benches --bench efficiency`; a word selects the jobs that contain it. `--test` runs one
//! job.

use std::env;
use symmalloc_benches::affinity::{Candidates, Outcome};
use symmalloc_benches::fit_rules::{FitRule, GRANULE_BYTES, Large};
use symmalloc_benches::metered::{Asked, Metered};
use symmalloc_benches::moving::{Moves, Victims, move_by_need};
use symmalloc_benches::varying;
use symmalloc_benches::workload::Workload;
use symmalloc_core::config::StreamPolicy;
use symmalloc_core::errors::AllocateError;
use symmalloc_core::report::{BlockStateSnapshot, Snapshot};
use symmalloc_core::{Allocator, Config, Op, Retry, StreamId};
use symmalloc_harness::jobs;
use symmalloc_trace::replay::{Program, Replay, StepError};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Number of passes. The first one begins without memory; the mean of the others represents all later passes.
const PASSES: usize = 6;

/// A size of physical chunk, with the time to create and to release one.
#[derive(Clone, Copy)]
struct Chunk {
    size_bytes: u64,
    make_us: f64,
    give_back_us: f64,
}

/// Chunks of one granule, each returned as soon as the allocator releases it. Growth by 2 MiB in
/// `docs/measured/gpu.md`.
const GRANULES: Chunk = Chunk { size_bytes: 2 * MIB, make_us: 35.2, give_back_us: 29.2 };
/// The default for ranges below 2 GiB. Growth by 128 MiB, from the same page.
const LARGE_CHUNKS: Chunk = Chunk { size_bytes: 32 * MIB, make_us: 35.2, give_back_us: 35.2 };

const EXPANDABLE: &str = "segments:expandable";

fn main() {
    let mut words = env::args().skip(1);
    let is_test = env::args().any(|arg| arg == "--test");
    let filter = words.find(|arg| !arg.starts_with('-'));
    let filter = filter.unwrap_or_else(|| if is_test { "fsdp1_train_rank0".into() } else { String::new() });
    let cases: Vec<Case> = jobs::JOBS.into_iter().filter(|job| job.contains(&filter)).flat_map(Case::of).collect();
    streams_table(&cases);
    affinity_table(&cases, &filter);
    settings_table(&cases);
    rules_tables(&cases);
    rest_table(&cases);
    moving_table(&cases);
    by_need_table(&cases);
}

/// A job with either a heap per stream or one heap for all streams.
struct Case {
    job: &'static str,
    streams: StreamPolicy,
    program: Program,
    workload: Workload,
    live_bytes_peak: u64,
}

impl Case {
    /// Returns the cases of a job: two if it has several streams.
    fn of(job: &'static str) -> Vec<Case> {
        let program = jobs::program(job);
        let workload = Workload::from(&program);
        let live_bytes_peak = workload.live_bytes_peak();
        let case =
            |streams| Case { job, streams, program: program.clone(), workload: workload.clone(), live_bytes_peak };
        let mut cases = vec![case(StreamPolicy::Separate)];
        if !cases[0].is_one_heap() {
            cases.push(case(StreamPolicy::Shared));
        }
        cases
    }

    fn name(&self) -> String {
        format!("{}{}", self.job, if self.is_shared() { ", shared" } else { "" })
    }

    fn is_shared(&self) -> bool {
        self.streams == StreamPolicy::Shared
    }

    fn is_one_heap(&self) -> bool {
        self.is_shared() || self.workload.streams() == 1
    }

    /// Formats `bytes` relative to the peak of live bytes.
    fn ratio(&self, bytes: u64) -> String {
        format!("{:.3}", bytes as f64 / self.live_bytes_peak as f64)
    }

    /// Creates an allocator with these settings and the case's stream policy.
    fn allocator(&self, settings: &str, chunk: Chunk) -> Allocator<Metered> {
        let text = format!("{settings},streams:{}", if self.is_shared() { "shared" } else { "separate" });
        let config: Config = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
        Allocator::new(Metered::new(chunk.size_bytes), config).expect("the granularity should be valid")
    }

    /// Runs the job `passes` times. Returns `None` if a limit refuses an allocation.
    fn carry_out(&self, allocator: &Allocator<Metered>, passes: usize) -> Option<Run> {
        let mut replay = Replay::new(allocator, &self.program);
        let mut run = Run::default();
        for pass in 0..passes {
            match replay.run(|_, _| {}).map_err(|stopped| stopped.error) {
                Ok(()) => {}
                Err(StepError::Allocate(AllocateError::OutOfMemory(_))) => return None,
                Err(error) => panic!("{}: {error}", self.name()),
            }
            replay.free_all().expect("events are endless");
            let (asked, reserved_bytes_peak) = (allocator.backend().asked(), allocator.stats().reserved_bytes.peak);
            if pass == 0 {
                (run.first, run.first_reserved_bytes_peak) = (asked, reserved_bytes_peak);
            }
            (run.further, run.reserved_bytes_peak) = (asked.since(run.first), reserved_bytes_peak);
        }
        run.held_bytes_peak = allocator.backend().held_bytes_peak();
        Some(run)
    }

    /// Runs the job without a limit.
    fn freely(&self, settings: &str, passes: usize) -> Run {
        self.carry_out(&self.allocator(settings, GRANULES), passes).expect("no limit should be reached")
    }

    /// Returns the smallest number of granules that is enough; `most` must be enough.
    fn least(&self, most: u64, is_enough: impl Fn(u64) -> bool) -> u64 {
        // Fewer granules than the live bytes need are never enough.
        let (mut refused, mut enough) = (self.live_bytes_peak.div_ceil(GRANULE_BYTES) - 1, most);
        while enough - refused > 1 {
            let middle = refused.midpoint(enough);
            *if is_enough(middle) { &mut enough } else { &mut refused } = middle;
        }
        enough
    }
}

/// The device calls and memory that a run took.
#[derive(Debug, Default)]
struct Run {
    /// The first pass.
    first: Asked,
    /// All later passes.
    further: Asked,
    /// Peak of reserved bytes in the first pass.
    first_reserved_bytes_peak: u64,
    /// Peak of reserved bytes over all passes.
    reserved_bytes_peak: u64,
    /// Peak of bytes that the device held in chunks.
    held_bytes_peak: u64,
}

/// Prints a row of a table: its name and its cells.
fn row(name: &str, cells: impl IntoIterator<Item = impl Into<String>>) {
    let cells: String = cells.into_iter().map(|cell| format!("{:>13}", cell.into())).collect();
    println!("{name:<38}{cells}");
}

fn mib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / MIB as f64)
}

/// Formats the mean over `passes` passes.
fn mean(count: u64, passes: usize) -> String {
    format!("{:.1}", count as f64 / passes as f64)
}

/// Returns the milliseconds per pass that creating and releasing chunks takes.
fn chunk_ms((made, given_back): (u64, u64), chunk: Chunk, passes: usize) -> f64 {
    (made as f64 * chunk.make_us + given_back as f64 * chunk.give_back_us) / 1e3 / passes as f64
}

fn streams_table(cases: &[Case]) {
    println!("reserved memory, in MiB and relative to live; events and waits of a pass after the first");
    row("job", ["live", "first pass", "over live", "six passes", "over live", "events", "waits"]);
    for case in cases {
        let run = case.freely(EXPANDABLE, PASSES);
        let (first, most) = (run.first_reserved_bytes_peak, run.reserved_bytes_peak);
        let [live, events, waits] =
            [mib(case.live_bytes_peak), mean(run.further.records, PASSES - 1), mean(run.further.waits, PASSES - 1)];
        row(&case.name(), [live, mib(first), case.ratio(first), mib(most), case.ratio(most), events, waits]);
    }
}

/// Settings for the placement of large blocks, or for the sizes of large blocks and segments.
const SETTINGS: [(&str, &str); 13] = [
    ("expandable", EXPANDABLE),
    ("growth 16", "segments:expandable,growth_mb:16"),
    ("growth 64", "segments:expandable,growth_mb:64"),
    ("divisions 4", "segments:expandable,roundup_power2_divisions:4"),
    ("divisions 8", "segments:expandable,roundup_power2_divisions:8"),
    ("divisions 16", "segments:expandable,roundup_power2_divisions:16"),
    ("fixed", "segments:fixed"),
    ("large 12", "segments:fixed,large_segment_size_mb:12"),
    ("large 64", "segments:fixed,large_segment_size_mb:64"),
    ("split 20", "segments:fixed,max_split_size_mb:20"),
    ("split 64", "segments:fixed,max_split_size_mb:64"),
    ("split 256", "segments:fixed,max_split_size_mb:256"),
    ("split 512", "segments:fixed,max_split_size_mb:512"),
];

/// Rules of the model by which a shared heap prefers blocks without waits.
const CANDIDATES: [(&str, Candidates); 12] = [
    ("best fit", Candidates::BestFit),
    ("within 0", Candidates::Within { sixteenths: 0 }),
    ("within 1/16", Candidates::Within { sixteenths: 1 }),
    ("within 1/8", Candidates::Within { sixteenths: 2 }),
    ("within 1/4", Candidates::Within { sixteenths: 4 }),
    ("first 2", Candidates::First(2)),
    ("first 4", Candidates::First(4)),
    ("not largest", Candidates::AllButLargest),
    ("all", Candidates::All),
    ("> 64 KiB", Candidates::BestFitAbove { bytes: 64 * KIB }),
    ("> 256 KiB", Candidates::BestFitAbove { bytes: 256 * KIB }),
    ("> 1 MiB", Candidates::BestFitAbove { bytes: MIB }),
];

/// Seeds of the generated job `vit` for the rules of shared heaps. Placements are sensitive to details, so only the mean of
/// several jobs is informative.
const GENERATED: std::ops::RangeInclusive<u64> = 1..=12;
const GENERATED_STEPS: usize = 24;

fn affinity_table(cases: &[Case], filter: &str) {
    println!(
        "\nshared streams: over live in six passes, waits of the last pass, and the passes until placements are final,"
    );
    println!("  by the free blocks that a request may take because it need not wait for their users; from the model");
    row("job", CANDIDATES.map(|(name, _)| name));
    for case in cases.iter().filter(|case| case.is_shared()) {
        let core = case.freely(EXPANDABLE, PASSES);
        let outcomes = CANDIDATES.map(|(_, candidates)| candidates.run(&case.workload, PASSES));
        let (further, waits) = (&outcomes[0].passes[1..], core.further.waits);
        assert_eq!(further.iter().map(|pass| pass.waits).sum::<u64>(), waits, "{}: like the core", case.name());
        assert_eq!(outcomes[0].reserved_bytes, core.reserved_bytes_peak, "{}: like the core", case.name());
        row(&case.name(), outcomes.map(|outcome| affinity_cell([(case.live_bytes_peak, outcome)].into_iter())));
    }
    if "vit".contains(filter) {
        let jobs: Vec<Workload> = GENERATED.map(|seed| varying::job("vit", seed, GENERATED_STEPS)).collect();
        let cells = CANDIDATES.map(|(_, candidates)| {
            affinity_cell(jobs.iter().map(|job| (job.live_bytes_peak(), candidates.run(job, PASSES))))
        });
        row(&format!("vit, mean of {} generated", jobs.len()), cells);
    }
}

/// Returns the mean peak over live, the mean waits of the last pass, and the number of passes until all jobs have the
/// placements of their last pass.
fn affinity_cell(outcomes: impl ExactSizeIterator<Item = (u64, Outcome)>) -> String {
    let count = outcomes.len() as u64;
    let (mut over_live, mut waits, mut fixed_from) = (0.0, 0, 0);
    for (live_bytes_peak, outcome) in outcomes {
        over_live += outcome.reserved_bytes as f64 / live_bytes_peak as f64;
        waits += outcome.passes.last().map_or(0, |pass| pass.waits);
        fixed_from = fixed_from.max(outcome.fixed_from().unwrap_or(0));
    }
    format!("{:.3} {} {fixed_from}", over_live / count as f64, waits / count)
}

fn settings_table(cases: &[Case]) {
    println!("\nreserved relative to live by setting, first pass; sizes in MiB");
    row("job", SETTINGS.map(|(name, _)| name));
    for case in cases {
        let ratio = |settings| case.ratio(case.freely(settings, 1).first_reserved_bytes_peak);
        row(&case.name(), SETTINGS.map(|(_, settings)| ratio(settings)));
    }
}

/// Rules of the model. The number is the minimum size of a large block.
const RULES: [(&str, FitRule); 10] = [
    ("best fit", FitRule::BEST_FIT),
    ("lowest all", FitRule { large: Large::LowestOffset, from_bytes: 0 }),
    ("lowest 1", FitRule { large: Large::LowestOffset, from_bytes: MIB }),
    ("lowest 20", FitRule { large: Large::LowestOffset, from_bytes: 20 * MIB }),
    ("far end 1", FitRule { large: Large::FarEnd, from_bytes: MIB }),
    ("far end 20", FitRule { large: Large::FarEnd, from_bytes: 20 * MIB }),
    ("apart 1", FitRule { large: Large::Apart, from_bytes: MIB }),
    ("apart 20", FitRule { large: Large::Apart, from_bytes: 20 * MIB }),
    ("granules 2", FitRule { large: Large::WholeGranules, from_bytes: 2 * MIB }),
    ("granules 20", FitRule { large: Large::WholeGranules, from_bytes: 20 * MIB }),
];

fn rules_tables(cases: &[Case]) {
    println!("\nreserved relative to live by rule, first pass, from the model; sizes in MiB");
    row("job", RULES.map(|(name, _)| name));
    let mut touched = Vec::new();
    for case in cases {
        let extents = RULES.map(|(_, rule)| rule.place(&case.workload, case.streams));
        let core = case.freely(EXPANDABLE, 1).first_reserved_bytes_peak;
        assert_eq!(extents[0].reserved_bytes, core, "{}: the model places like the core", case.name());
        row(&case.name(), extents.map(|extent| case.ratio(extent.reserved_bytes)));
        touched.push(extents.map(|extent| case.ratio(extent.touched_bytes)));
    }
    println!("\ngranules with live bytes, relative to live, by rule");
    row("job", RULES.map(|(name, _)| name));
    cases.iter().zip(touched).for_each(|(case, cells)| row(&case.name(), cells));
}

/// The location of memory that is reserved but not live when the last memory is obtained, in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Rest {
    /// Difference between the peak of live bytes and the live bytes at that time.
    below_peak: u64,
    /// Difference between block sizes and requested sizes.
    rounding: u64,
    /// In the growing heap, except at its end: free parts of granules with live bytes.
    parts: u64,
    /// In the growing heap: whole free granules.
    whole: u64,
    /// In the growing heap: from its last block to the end of that granule.
    end: u64,
    /// In other heaps: free parts of granules.
    other_parts: u64,
    /// In other heaps: whole free granules.
    other_whole: u64,
}

impl Rest {
    fn new(case: &Case, snapshot: &Snapshot, growing: StreamId) -> Self {
        let mut rest = Rest::default();
        let mut live = 0;
        for segment in &snapshot.segments {
            let grows = segment.heap.stream().is_none_or(|stream| stream == growing);
            for block in &segment.blocks {
                let (offset, end) = (block.offset_bytes, block.offset_bytes + block.size_bytes);
                if let BlockStateSnapshot::Allocated { requested_bytes, .. } = block.state {
                    rest.rounding += block.size_bytes - requested_bytes;
                    live += requested_bytes;
                    continue;
                }
                let first_whole = offset.next_multiple_of(GRANULE_BYTES);
                let whole = (end / GRANULE_BYTES * GRANULE_BYTES).saturating_sub(first_whole);
                let part = match (grows, end == segment.size_bytes) {
                    (true, true) => &mut rest.end,
                    (true, false) => &mut rest.parts,
                    (false, _) => &mut rest.other_parts,
                };
                *part += block.size_bytes - whole;
                *if grows { &mut rest.whole } else { &mut rest.other_whole } += whole;
            }
        }
        rest.below_peak = case.live_bytes_peak - live;
        rest
    }

    /// Returns the bytes that are reserved beyond the peak of live bytes.
    fn beyond_peak(&self) -> u64 {
        let Rest { below_peak, rounding, parts, whole, end, other_parts, other_whole } = self;
        rounding + parts + whole + end + other_parts + other_whole - below_peak
    }
}

fn rest_table(cases: &[Case]) {
    println!("\nMiB reserved beyond the peak of live bytes when the last memory of the first pass is obtained");
    println!(
        "  = in the growing heap: rounding + parts of granules + whole granules + its end; in others: parts + whole;"
    );
    println!("    minus how far the live bytes are below their peak at that time");
    row("job", ["beyond", "rounding", "parts", "whole", "end", "others parts", "others whole", "live below"]);
    for case in cases {
        let allocator = case.allocator(EXPANDABLE, GRANULES);
        let mut replay = Replay::new(&allocator, &case.program);
        let (mut reserved, mut rest) = (0, Rest::default());
        for op in case.program.ops() {
            replay.step(op).expect("no limit should be reached");
            let Op::Allocate { stream, .. } = *op else { continue };
            if allocator.backend().reserved_bytes() > reserved {
                reserved = allocator.backend().reserved_bytes();
                rest = Rest::new(case, &allocator.snapshot(), stream);
            }
        }
        assert_eq!(rest.beyond_peak(), reserved - case.live_bytes_peak, "{}: every byte is accounted for", case.name());
        let Rest { below_peak, rounding, parts, whole, end, other_parts, other_whole } = rest;
        let cells = [rest.beyond_peak(), rounding, parts, whole, end, other_parts, other_whole, below_peak];
        row(&case.name(), cells.map(mib));
    }
}

/// The source of free memory when a limit is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    /// The free memory of the heap that needs more.
    Heap,
    /// The free memory of the pool's heaps, one after another, until the request succeeds.
    Pool,
    /// All free memory of the pool, which the program's failure callback trims.
    Callback,
}

impl Room {
    const ALL: [Room; 3] = [Room::Heap, Room::Pool, Room::Callback];

    fn name(self) -> &'static str {
        match self {
            Room::Heap => "heap",
            Room::Pool => "pool",
            Room::Callback => "callback",
        }
    }

    /// Runs a job under a limit.
    fn carry_out(self, case: &Case, granules: u64, chunk: Chunk) -> Option<Run> {
        let reclaim = if self == Room::Heap { "heap" } else { "pool" };
        let limit = format!("{EXPANDABLE},reclaim:{reclaim},limit_bytes:{}", granules * GRANULE_BYTES);
        let allocator = case.allocator(&limit, chunk);
        if self == Room::Callback {
            allocator.set_failure_callback(|allocator, _| match allocator.trim_all() {
                Ok(0) | Err(_) => Retry::GiveUp,
                Ok(_) => Retry::Again,
            });
        }
        case.carry_out(&allocator, PASSES)
    }
}

/// Free memory of a heap, in MiB, above which a free returns all of it.
const THRESHOLD_MIB: u64 = 256;

fn moving_table(cases: &[Case]) {
    println!(
        "\nmoving whole free granules: no limit; halfway to the smallest limit, and the smallest, by source of memory;"
    );
    println!("  no limit, but a release threshold of {THRESHOLD_MIB} MiB");
    println!("  first pass, then mean of the others: host waits for a stream, calls, MiB given back, ms for chunks");
    println!(
        "  of 2 and of 32 MiB; then ns per op for chunks of 2 MiB, and bytes held by the device in chunks of 32 MiB"
    );
    let cells = ["waits", "map", "unmap", "MiB back", "ms, 2 MiB", "ms, 32 MiB"];
    row("job", ["reserved", "over live"].into_iter().chain(cells).chain(cells).chain(["ns per op", "held, 32"]));
    for case in cases {
        moving_row(case, "", |chunk| case.carry_out(&case.allocator(EXPANDABLE, chunk), PASSES));
        let most = case.freely(EXPANDABLE, PASSES).reserved_bytes_peak / GRANULE_BYTES;
        // With a single heap, all sources are the same memory.
        let rooms = if case.is_one_heap() { &Room::ALL[..1] } else { &Room::ALL };
        for room in rooms {
            let least = case.least(most, |granules| room.carry_out(case, granules, GRANULES).is_some());
            for granules in [least.midpoint(most), least] {
                moving_row(case, room.name(), |chunk| room.carry_out(case, granules, chunk));
            }
        }
        let settings = format!("{EXPANDABLE},release_threshold_mb:{THRESHOLD_MIB}");
        moving_row(case, "threshold", |chunk| case.carry_out(&case.allocator(&settings, chunk), PASSES));
    }
}

fn moving_row(case: &Case, means: &str, carry_out: impl Fn(Chunk) -> Option<Run>) {
    let name = if means.is_empty() { case.name() } else { format!("{}, {means}", case.name()) };
    // A limit between two sufficient limits can be insufficient, because each limit leads to different placements.
    let Some((small, large)) = carry_out(GRANULES).zip(carry_out(LARGE_CHUNKS)) else {
        row(&name, ["refused"]);
        return;
    };
    let ms = |asked: Asked, chunk, passes| chunk_ms((asked.chunks_made, asked.chunks_given_back), chunk, passes);
    let mut cells = vec![mib(small.reserved_bytes_peak), case.ratio(small.reserved_bytes_peak)];
    for (small, large, passes) in [(small.first, large.first, 1), (small.further, large.further, PASSES - 1)] {
        cells.extend([small.synchronizes, small.maps, small.unmaps].map(|count| mean(count, passes)));
        cells.push(mean(small.unmapped_bytes / MIB, passes));
        cells.extend([ms(small, GRANULES, passes), ms(large, LARGE_CHUNKS, passes)].map(|ms| format!("{ms:.1}")));
    }
    let ns_per_op = ms(small.further, GRANULES, PASSES - 1) * 1e6 / case.workload.len() as f64;
    cells.extend([format!("{ns_per_op:.1}"), case.ratio(large.held_bytes_peak)]);
    row(&name, cells);
}

fn by_need_table(cases: &[Case]) {
    println!(
        "\nmoving only missing memory, from the model, under its smallest limit; a pass after the first: host waits,"
    );
    println!("  MiB given back, ms for chunks of 2 MiB; granules are taken from the range's end, or from its start");
    row("job", ["limit", "over live", "end: waits", "MiB back", "ms", "start: waits", "MiB back", "ms"]);
    for case in cases {
        let carry_out = |granules: u64, victims| {
            move_by_need(&case.workload, case.streams, victims, granules * GRANULE_BYTES, PASSES)
        };
        let most = case.freely(EXPANDABLE, PASSES).reserved_bytes_peak / GRANULE_BYTES;
        let least = case.least(most, |granules| carry_out(granules, Victims::Highest).is_some());
        let limit = least * GRANULE_BYTES;
        let mut cells = vec![mib(limit), case.ratio(limit)];
        for victims in [Victims::Highest, Victims::Lowest] {
            let moves = carry_out(least, victims).expect("placement does not depend on the victims");
            let sum = |count: fn(&Moves) -> u64| moves[1..].iter().map(count).sum::<u64>();
            let (mapped, unmapped) = (sum(|moves| moves.mapped), sum(|moves| moves.unmapped));
            let [waits, back] = [sum(|moves| moves.stalls), unmapped * GRANULE_BYTES / MIB];
            cells.extend([mean(waits, PASSES - 1), mean(back, PASSES - 1)]);
            cells.push(format!("{:.1}", chunk_ms((mapped, unmapped), GRANULES, PASSES - 1)));
        }
        row(&case.name(), cells);
    }
}
