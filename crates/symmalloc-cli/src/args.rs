//! The command-line arguments: all commands and their flags.

mod location;
mod plan_contradiction;
mod policy;
mod reading;
mod run;

pub(crate) use location::Location;
pub(crate) use plan_contradiction::PlanFlagContradiction;
pub(crate) use policy::{FlagContradiction, PolicyArgs};
pub(crate) use reading::ReadingArgs;
pub(crate) use run::RunArgs;

use crate::job::Order;
use clap::{Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use std::path::{Path, PathBuf};

/// Name of standard input and standard output.
pub(crate) const STREAM: &str = "-";

const HELP: &str = "\
A recording is a file, standard input (`-`), or a job that comes with the program: gpt2, moe, resnet50, llama, gnn, demo, fsdp,
fsdp_rank1, fsdp1, fsdp1_rank1.

With --json, every command except run, completions and man prints one JSON document: an object, or an array of objects. Each object
has schema_version (1). If the command fails, the document is {schema_version, error: {message, causes, help, exit_code}}, and stderr
has the same error as text.

Exit codes: 0 success, 3 ranks differ or memory is refused, 2 invalid input.";

/// Maximum number of ranks of a simulated job: 1,048,576.
const RANKS_MAX: i64 = 1 << 20;

const REPLAY_EXAMPLES: &str = "\
Examples:
  symmalloc replay snapshot.pickle                      a PyTorch job on 8 ranks, compared with PyTorch's own rule
  symmalloc replay snapshot.pickle.gz --ranks 64 --seed 3 --json
  symmalloc replay snapshot.pickle --order address --segments fixed      PyTorch 2.11's rule alone: exits with 3
  symmalloc replay job.trace --record rank0.trace.zst   our decisions, for `symmalloc diff`
  symmalloc replay job.trace --plan job.plan            every rank follows a plan written by `symmalloc plan`

JSON: an array with one object per trace. Ops and allocations are counted from 0.
  schema_version, trace, ops, allocs, ranks, passes, order, segments, streams
  aligned               true if all ranks make the same placements in every pass, with equal digests
  differing_placements  allocations whose (segment, offset) differs between ranks
  refused               allocations refused by a limit or by the size of a segment, in the pass with the most of them
  first_divergence      null, or {op, allocation, name?, pass?, ranks: [{rank, segment, offset}]};
                        segment and offset are null if the allocation was refused or has no bytes
  peak_live_bytes       peak of the bytes that the program has requested, over all passes
  peak_reserved_bytes   peak of the bytes reserved from the device, over all passes
  efficiency            peak_live_bytes / peak_reserved_bytes
  first_pass            {peak_reserved_bytes, efficiency, refused}: the first pass alone, which is optimistic
  segment_count         segments at the end of the last pass, before leftover allocations are freed
  ns_per_op             median of the passes after the first, on a device without cost; null with --order address
  digest                16 hex digits over all (op, decision) of rank 0's first pass; null with --order address
  lived_before, lived_before_bytes    allocations that were live when the recording began, and their bytes
  is_overwritten        true if the recording lost its oldest entries (PyTorch snapshots with a mark for it)
  pytorch               the same job under the model of PyTorch 2.11, on at most 8 ranks, with expandable segments and with
                        fixed ones, PyTorch's default: objects with the keys from ranks to segment_count; empty with --order address
  planned_ops_share     allocations placed by the plan, divided by all allocations of at least one byte, over all passes;
                        null without a plan

The configuration and pools come from the trace. --segments and --streams replace the policies of the default pool. --config
replaces the whole configuration, except for pools that the program creates. With --plan, the plan's configuration applies to
all pools, and flags that contradict it are an error. Each pass is a step, unless the program has its own steps.

The model of address order always keeps streams separate and supports fixed and expandable segments only. Its rank 0 runs all
passes; the other ranks are compared over the first pass. It supports the settings max_split_size, max_non_split_rounding,
large_segment_size and roundup_power2_divisions; with --order address, any other setting in --config is an error. It has no limits.

Exit codes: 0 success, 3 ranks differ, or allocations are refused without --allow-refusals, 2 invalid input.";

const DIFF_EXAMPLES: &str = "\
Examples:
  symmalloc diff rank0.pickle.gz rank1.pickle.gz
  symmalloc diff rank0.trace.zst rank1.trace.zst --json
  symmalloc diff symmalloc-flight-world-*.json          which rank is behind, at which collective, and what differs; records
                                                        are in $SYMMALLOC_FLIGHT_RECORDS or ~/.local/state/symmalloc

JSON of two recordings: schema_version, same_ops, compared_ops, uses_left_out (null if uses by other streams are compared,
otherwise their number in each recording, {a, b}), allocs, differing_placements (null if a recording has no placements), first
(null, or {allocation, op, a: {segment, offset}, b: {segment, offset}}; counted from 0, op in A). A segment is the ordinal
of its birth. If the ops differ, placements are compared up to the first difference, and first_op_difference has both ops, each with
the name of its allocation. Recordings that begin in the middle of the job are compared from their first common op on, up to the earlier
end; late then states for each, {a, b}, {is_late, ops_before}: the ops before that op. It has is_aligned (they have enough ops in common),
other_alignments (at which they agree as well, because the job repeats itself) and nearest_alignment (null, or the ops before, {a, b}).
ops_after, {a, b}, counts ops after the end of the other recording, if that one begins late or is torn.

Uses by other streams are compared only if both recordings were written by `replay --record`. A snapshot shows a use only if
event polling noticed it late, and that differs between ranks that make the same calls.

Flight records are compared as they were written. While a job runs, its ranks write at slightly different times, so one rank may
appear some collectives ahead. Name the files themselves; a folder is not read.

JSON of flight records: schema_version, trouble, communicators:
  communicator, id, ranks, records      name; 16 hex digits; number of ranks, and of ranks that left a record
  findings    finding (no_record, rank_twice, ranks_differ, behind, differs, unfinished, unfinished_transfer, even), text,
              and the values in the text: ranks, rank, number, signature {kind, elements?, data_type?, detail?}, state,
              submitted; as pairs: said [[number, ranks]], calls [[signature, ranks]], states [[state, ranks]]
  by_rank     rank, submitted, finished, record (the file), host, process, reason, state, cause, waits_for (null, or
              {number, is_point_to_point?, kind, elements?, data_type?, detail?, stream?, state, age_ms}), seen
              ([{as, by}]: what other ranks observed). For a rank without a record, submitted and finished are
              as far as other ranks knew, and the keys from record to waits_for are null

Exit codes: 0 equal, 3 ops or placements differ, or ranks are missing, behind, different or waiting, 2 invalid input.";

const IMPORT_EXAMPLES: &str = "\
Examples:
  symmalloc import snapshot.pickle job.trace.zst
  symmalloc import rmm.csv job.trace
  symmalloc import killed.trace.zst whole.trace.zst --accept-torn        the recording of a job that was killed
  zcat rmm.csv.gz | symmalloc import - - | head         standard input to standard output; messages go to stderr

A snapshot that begins in the middle of a job contains allocations that were already live: the job frees them, or `segments` lists
them at the end. They come first in the trace. An allocation has the name that the program gave it, or else the Python frame that
requested it, if the snapshot has stack frames.

JSON: schema_version, input, trace, format, device, ops, streams, allocs, frees, uses (by other streams), placements (recorded ones),
lived_before, lived_before_bytes (at the start of the recording), is_overwritten (its oldest entries are lost),
recorded_reserved_bytes_peak (null if the recording lacks it),
and what was added or left out: frees_supplied, frees_of_unknown, uses_of_unknown, failed_allocations (written as
`refuse`), empty_allocations, unknown_actions, unknown_kinds ({kind: number}), torn_at_line (null, or the line at which the recording is truncated).

Exit codes: 0 success, 2 invalid input.";

const ADDRESS_EXAMPLES: &str = "\
Examples:
  symmalloc address 0x7f1234567000 snapshot.pickle      the address that an error of CUDA or a tool names
  symmalloc address 0x7f1234567000 flight.json          a flight record with allocations: symmalloc.flight_record(path, devices=[0])
  symmalloc address 3@131074048 rank0.trace.zst         a place that `replay`, `diff` or a report names: segment 3, offset in bytes

Snapshots, RMM logs and flight records contain the addresses of the recorded process. Sizes are the requested ones. The ops of a
flight record count those of each heap, and are null for live allocations. A trace contains no addresses, and
places only if it was recorded, or written by `replay --record`.

JSON: schema_version, address, containing (an array, newest first), before, after (null, or the nearest allocations that were live
when the newest one was allocated, or at the end if no allocation contained the address). Each allocation is an object:
  allocation, allocated_at_op, freed_at_op (null if it is not freed)    counted from 0
  name, pool, stream, used_by (other streams), size_bytes
  segment               the segment's ordinal in its heap; null if start is an address
  start                 the address of the first byte, or its offset in the segment

Exit codes: 0 success, 2 invalid input.";

const EXPORT_EXAMPLES: &str = "\
Examples:
  symmalloc export job.trace.zst snapshot.pickle                 open it at https://pytorch.org/memory_viz
  symmalloc export snapshot.pickle ours.pickle.gz                a PyTorch job with the placements of our allocator
  symmalloc export snapshot.pickle ours.pickle --free-at-once    the same, but no block waits for other streams
  symmalloc export job.trace fixed.pickle --config segments:fixed,max_split_size_mb:256
  symmalloc export job.trace.zst job.json.gz                     a timeline: open it at https://ui.perfetto.dev
  symmalloc export job.trace.zst all.json --detail all           a timeline with every allocation and every change

The extension of OUT selects the format, unless --format is given: .json is a timeline, any other a snapshot. An extension that
belongs to another kind of file is an error. On a timeline, one op takes one microsecond.

JSON of a timeline: schema_version, trace, timeline, heaps, slices (allocations), left_out (smaller allocations), points (of counters),
ops_per_point (each point is their maximum), instants, lived_before, lived_before_bytes (at the start of the recording), is_overwritten
(its oldest entries are lost).

JSON of a snapshot: schema_version, trace, snapshot, entries, allocations, refused (by a limit), pending_frees (that complete later),
segments and blocks (at the end), ops_without_entry (ops that PyTorch's allocator lacks), lived_before, lived_before_bytes (at the
start of the recording), is_overwritten (its oldest entries are lost).

Exit codes: 0 success, 2 invalid input.";

const CHART_EXAMPLES: &str = "\
Examples:
  symmalloc chart job.trace.zst -o job.svg                       memory over ops
  symmalloc chart job.trace.zst -o map.svg --map --op 12000      segments and blocks after op 12000
  symmalloc chart rank0.pickle.gz --beside rank1.pickle.gz -o ranks.svg
  symmalloc chart job.trace.zst --plan job.plan -o job.svg       memory over ops, with the plan's reserved memory
  symmalloc chart fsdp1 --share -o fsdp1.svg                     before and after, in one picture to share

Two ranks are drawn with their recorded placements. If a recording has none, our allocator places its allocations. Pictures
need no script and no network. Equal jobs give equal bytes.

JSON: schema_version, trace, picture, ops, op (shown by the map), refused (allocations, by a limit), live, allocated, reserved
({peak_bytes, op}), heaps ([{pool, stream, group, live, allocated, reserved}]; stream is null if streams share; group is
then the first stream of their group, or null if all of the pool share). With
--beside: beside ({trace, placements: recorded or replayed, allocs, differing_placements, differing_live}). With
--plan: plan ({file, reserved}). With --share: trace, picture, refused (requests in all passes), peak_live_bytes, and the peak of
reserved memory over five passes (fewer if the job is long): pytorch_bytes and pytorch_expandable_bytes (model), symmalloc_bytes, planned_bytes (null if there is
no plan), no_plan (the reason, or null if there is nothing to plan).

Exit codes: 0 success, 2 invalid input.";

const REPORT_EXAMPLES: &str = "\
Examples:
  symmalloc report job.trace.zst -o report.html
  symmalloc report snapshot.pickle -o report.html --segments fixed --json

One page that fetches nothing: peaks, an interactive picture of the job as recorded, under PyTorch's allocator, under symmalloc and
planned, what holds memory at the peak, fragmentation, and the results of the same ops under other settings, each with the command
that reproduces it. Without scripts, the pictures are still ones.

If a request failed, the report is about it: what failed, what was held then, why, and which settings serve it within the memory that
is available to the recorded allocator.

JSON: schema_version, trace, report, ops, op (of holders and fragmentation), failure (null, or {op, size_bytes, pool, stream, name,
stack, others (requests that failed before), live_bytes, pool_live_bytes (in its pool), held (null, or as in state), heaps ([{pool,
stream (null if shared), group (its first stream if a group shares it), live_bytes, reserved_bytes, free_bytes, largest_free_bytes (null if unknown)}]), device_free_bytes,
growth (null, or the live bytes after each quarter of the ops of a holder that grows all the time), capacity_bytes and limit (of segment, pool, total or device: the one that decides; null if unknown), cause (too much, fragmentation,
unknown), attempts ([{settings, command (null if it changes a pool that the program creates), is_served, refused, reserved_bytes}])}), state (of a
snapshot without history: null, or {reserved_bytes, allocated_bytes, free_segments, free_segment_bytes, free_blocks,
free_block_bytes, largest_free_bytes}), private_pools (null, or {pools, reserved_bytes, live_bytes, peak_reserved_bytes,
peak_reserved_bytes_as_one}), refused, lived_before, lived_before_bytes (at the start
of the recording), is_overwritten (its oldest entries are lost), recorded_reserved (by the recorded allocator: null, or {peak_bytes, is_exact}; a lower bound unless exact), live,
allocated, reserved ({peak_bytes, op}), steady_reserved_bytes, efficiency (peak live / steady_reserved_bytes), holders ([{name,
each_bytes?, allocations, requested_bytes}]: by name, or by size if name is null), free_bytes, largest_free_bytes, fragmentation
(1 - largest / free), settings ([{settings, command, is_own, is_better (refuses fewer, or as many and reserves less), peak_reserved_bytes,
refused (requests in all passes), maps (map and unmap calls per pass), waits (of a stream for another, per pass)}], fewest refusals and then least peak first),
settings_impossible ([{settings, reason}]: the job stops under them), settings_left_out (settings not tried because the job is long), plan (null, or what a plan needs: {command, planned_bytes,
efficiency, refused (in all passes)}), no_plan (the reason, or null).

Numbers of settings and plans are the maximum over five passes, two for more than 200,000 ops, or one for more than 500,000. The pictures and the holders show the first pass.

Exit codes: 0 success, 2 invalid input.";

const PLAN_EXAMPLES: &str = "\
Examples:
  symmalloc plan job.trace.zst -o job.plan                       a placement for every allocation, for `symmalloc replay --plan`
  symmalloc plan job.trace.zst --streams separate                a separate plan for each stream's heap
  symmalloc plan rank0.pickle.gz rank1.pickle.gz --one-job --margin 5      the same reservation on all ranks, plus 5 %
  symmalloc plan job.trace.zst --reserved --streams shared       without a plan: one segment, one window
  symmalloc plan job.trace.zst --reservations reserved.trace.zst the job with its reservations, for `symmalloc replay`
  symmalloc plan rectangles.csv -o offsets.csv                   the same search on a table: id,lower,upper,size
  symmalloc plan job.trace.zst -o job.csv                        the plan as a table, for comparison with other planners

In a plan, the streams of the default pool share memory, unless --streams, --config or the recording's configuration says
otherwise. All other settings come from the recording and the flags. `planned` is the memory reserved when the job follows the
plan, `online` the memory reserved without one; both are the maximum over five passes (two for more than 200,000 ops,
one for more than 500,000). Reservations are for running without a
plan. To prove them, each recording runs twice, without and with them, on a device that counts its calls.

JSON: an array with one object per job (with --one-job, one object whose numbers are the maximum over all ranks):
  schema_version, job   1, and the recording
  peak_live_bytes       peak of the bytes that the program has requested
  planned_bytes         peak of reserved memory when the job follows the plan
  efficiency            peak_live_bytes / planned_bytes
  online_bytes          peak of reserved memory without a plan, with the recording's settings
  seconds               time that planning took
  streams, plans        streams of the default pool (shared or separate); number of plans
  plan_bytes            memory that the plans place allocations in; planned_bytes also includes all other memory
  planned_ops_share     allocations placed by the plan, divided by all allocations of at least one byte
  waits, online_waits   waits of a stream for another that reuse needs in a pass, with the plan and without
  refused, online_refused   requests that a limit refuses in all passes, with the plan and without
  plan                  the file that was written, or null
and the reservations for running without a plan. If a limit leaves no room for them, only no_reservations, the reason, is present:
  traces, margin_percent, settings (of the allocator and its default pool), lines (to paste into a trace), reserve_bytes,
  heaps ([{pool, stream, group, for_stream, segments, peak_live_bytes, grown_bytes (without reservations), reserve_bytes}]; stream is
  null if streams share, and group the first of them if they are a group), holds (true if the job obtains no memory after its reservations), without and with (the reservations:
  {reserving, first_pass, second_pass: {memory_calls, registrations}, refused, peak_reserved_bytes})

A table has the columns id, lower, upper and size, as MiniMalloc and TelaMalloc publish problems. `upper` is exclusive; a column
`end` instead is inclusive. -o adds the column offset. JSON for a table:
  schema_version, table 1, and the file
  rectangles            number of rectangles
  lower_bound           peak of the live sizes; no placement is lower
  height, quality       the height found, and lower_bound / height
  is_optimal            true if no lower placement exists
  work, seconds         cost of the search
  plan                  the file that was written, or null

Exit codes: 0 success, 3 the reservations are too small, 2 invalid input, such as a limit below what a plan needs.";

const SIMULATE_EXAMPLES: &str = "\
Examples:
  symmalloc simulate --seed 7                           one generated job on 64 ranks, with its plan
  symmalloc simulate --seeds 1000 --ops 300             a thousand generated jobs
  symmalloc simulate moe --ranks 256                    a recorded job; takes about a minute per thousand ranks
  symmalloc simulate simulate-seed-7.trace              a saved failure, exactly as it happened

A seed determines everything: the program, the environment of each rank, and which driver calls fail. A failure is shrunk to
a minimum and saved as a trace that begins with its description.

JSON: an array with one object per trace, or one object for the generated jobs:
  schema_version, trace, seed, runs, ranks, seconds    trace is null for generated jobs; ranks counts the ranks of all runs
  ops, private_ops                      ops executed by all ranks; private ops are those of one rank alone, in its private pools
  planned, differing                    allocations placed by a plan; steps that differed from the plan
  syncs, checks                         points at which all live ranks are compared; scans of all invariants of a rank
  failed_calls, ranks_with_failed_calls driver calls that failed, and ranks with at least one
  out_of_memory, refused, losses        injected faults: memory refused, other calls refused, devices lost
  small_devices                         ranks whose device has less memory than the program requests
  restarts, left                        ranks that restarted; ranks that left the job
  caught                                ranks that diverged after a driver failure and were detected
  device_bytes_peak                     peak device memory of a single rank
  state_bytes_per_rank                  host memory per rank on this machine; null with several runs, or if unknown
  digest                                16 hex digits over all heaps of the ranks without faults
  failure                               null, or {seed, rank, step, op, cause, report, trace, shrunk_ops, shrunk_ranks}

Exit codes: 0 success, 3 a run failed, 2 invalid input.";

/// A deterministic caching device allocator, on recorded GPU jobs. Only `run` needs a GPU.
#[derive(Debug, Parser)]
#[command(name = "symmalloc", version = env!("SYMMALLOC_VERSION"), after_help = HELP)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Command {
    /// Returns the allocator's configuration flags, or `None` if the command has none.
    pub(crate) fn policy(&self) -> Option<&PolicyArgs> {
        match self {
            Command::Replay(args) => Some(&args.policy),
            Command::Export(args) => Some(&args.policy),
            Command::Chart(args) => Some(&args.policy),
            Command::Report(args) => Some(&args.policy),
            Command::Plan(args) => Some(&args.policy),
            _ => None,
        }
    }

    /// Returns `true` if the command writes its result to stdout, which then carries no other output.
    pub(crate) fn writes_stdout(&self) -> bool {
        match self {
            Command::Import(args) => args.output.path() == Path::new(STREAM),
            Command::Export(args) => args.output.path() == Path::new(STREAM),
            _ => false,
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Replay(ReplayArgs),
    Simulate(SimulateArgs),
    Diff(DiffArgs),
    Address(AddressArgs),
    Import(ImportArgs),
    Export(ExportArgs),
    Chart(ChartArgs),
    Report(ReportArgs),
    Plan(PlanArgs),
    Run(RunArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
}

/// Replay recorded jobs on many ranks and check that all ranks make the same placements
///
/// Every rank is simulated with its own address order, event timing and handles. Recordings are PyTorch memory
/// snapshots (torch.cuda.memory._dump_snapshot), RMM logs and symmalloc traces; plain, gzip or zstd.
#[derive(Debug, clap::Args)]
#[command(after_help = REPLAY_EXAMPLES)]
pub(crate) struct ReplayArgs {
    /// Recordings to replay: files, `-`, or jobs that come with the program (see `symmalloc --help`)
    #[arg(required = true, value_name = "TRACE")]
    pub(crate) traces: Vec<PathBuf>,
    /// Ranks to simulate [default: 8, or 2 for more than 500,000 ops]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=RANKS_MAX))]
    pub(crate) ranks: Option<u32>,
    /// Order of free blocks: our rule, or the model of PyTorch 2.11's
    #[arg(long)]
    pub(crate) order: Option<Order>,
    #[command(flatten)]
    pub(crate) policy: PolicyArgs,
    /// Seed of the simulated job: address orders, event timing and handles of all ranks
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Number of times that each rank runs the trace on its allocator; everything is freed between passes [default: 5, or 2 for more
    /// than 500,000 ops]
    #[arg(long, alias = "repeat", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) passes: Option<u32>,
    #[command(flatten)]
    pub(crate) reading: ReadingArgs,
    /// Exit with 0 even if a limit refuses allocations; without this flag the exit code is 3
    #[arg(long)]
    pub(crate) allow_refusals: bool,
    /// Write the trace with rank 0's decisions (.zst and .gz compress)
    #[arg(long, value_name = "OUT")]
    pub(crate) record: Option<PathBuf>,
    /// Follow a plan of the job that `symmalloc plan` wrote, with the plan's configuration
    #[arg(long, value_name = "FILE", conflicts_with = "order")]
    pub(crate) plan: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Simulate whole jobs on many adverse ranks: refused memory, lost devices, interleaved threads, restarts
///
/// The program is the same on every rank: generated from the seed, or taken from a recording. Addresses, event timing, thread
/// interleaving and faults differ between ranks. Ranks without faults must make the same placements, ranks that diverge must be
/// detected, and all memory must be released at the end.
#[derive(Debug, clap::Args)]
#[command(after_help = SIMULATE_EXAMPLES)]
pub(crate) struct SimulateArgs {
    /// Recordings to simulate, or saved failures [default: generated jobs]
    #[arg(value_name = "TRACE")]
    pub(crate) traces: Vec<PathBuf>,
    /// Ranks of a job [default: 64; fewer for expensive recordings]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=RANKS_MAX))]
    pub(crate) ranks: Option<u32>,
    /// Seed of the first run
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Number of runs: seeds S, S + 1, ...
    #[arg(long, alias = "runs", value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) seeds: u32,
    /// Ops of a generated program
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub(crate) ops: u32,
    /// Folder for the traces of failures
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) out: PathBuf,
    #[command(flatten)]
    pub(crate) reading: ReadingArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Compare two ranks' recordings, or the flight records of a job's ranks
///
/// Two recordings are compared call by call and placement by placement. Flight records, which each rank leaves when a communicator
/// fails, show which ranks are missing, which are behind and at which collective, and where sizes or order differ. A rank
/// without a record is described by what the other ranks knew about it.
#[derive(Debug, clap::Args)]
#[command(after_help = DIFF_EXAMPLES)]
pub(crate) struct DiffArgs {
    /// Two ranks' recordings, or flight records, one per rank
    #[arg(required = true, value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) reading: ReadingArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Convert a recording to a symmalloc trace
#[derive(Debug, clap::Args)]
#[command(
    after_help = IMPORT_EXAMPLES,
    override_usage = "symmalloc import [OPTIONS] <IN> <OUT>\n       symmalloc import [OPTIONS] <IN> -o <OUT>"
)]
pub(crate) struct ImportArgs {
    /// A PyTorch memory snapshot, an RMM log or a trace; plain, gzip or zstd; `-` for standard input
    #[arg(value_name = "IN", index = 1)]
    pub(crate) input: PathBuf,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    #[command(flatten)]
    pub(crate) reading: ReadingArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Show which allocation of a recording contained an address, and its neighbors
#[derive(Debug, clap::Args)]
#[command(after_help = ADDRESS_EXAMPLES)]
pub(crate) struct AddressArgs {
    /// An address of the recorded process, or a place in a trace: SEGMENT@OFFSET
    #[arg(value_name = "ADDRESS")]
    pub(crate) address: Location,
    /// A PyTorch memory snapshot, an RMM log or a trace; plain, gzip or zstd; `-` for standard input
    #[arg(value_name = "RECORDING")]
    pub(crate) input: PathBuf,
    #[command(flatten)]
    pub(crate) reading: ReadingArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// The output of a conversion: a second file name, or `-o` as in the other commands.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
pub(crate) struct OutputArgs {
    /// The file to write (.zst and .gz compress); `-` for standard output
    #[arg(value_name = "OUT", index = 2)]
    positional: Option<PathBuf>,
    /// The file to write, instead of a second argument
    #[arg(short, long, value_name = "OUT")]
    output: Option<PathBuf>,
}

impl OutputArgs {
    pub(crate) fn path(&self) -> &Path {
        self.positional.as_deref().or(self.output.as_deref()).expect("the parser requires one of the two")
    }
}

/// Export our allocator's placements for a recording, as a snapshot for PyTorch's memory_viz or a timeline for Perfetto
#[derive(Debug, clap::Args)]
#[command(
    after_help = EXPORT_EXAMPLES,
    override_usage = "symmalloc export [OPTIONS] <TRACE> <OUT>\n       symmalloc export [OPTIONS] <TRACE> -o <OUT>"
)]
pub(crate) struct ExportArgs {
    /// A trace, a PyTorch memory snapshot or an RMM log; plain, gzip or zstd
    #[arg(value_name = "TRACE", index = 1)]
    pub(crate) input: PathBuf,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    /// Format of the output [default: a timeline if OUT ends in .json, else a snapshot]
    #[arg(long)]
    pub(crate) format: Option<ExportFormat>,
    /// Maximum number of allocations, and of points per counter, on a timeline: a number, or `all`
    #[arg(long, value_name = "N", default_value = "100000", value_parser = parse_detail)]
    pub(crate) detail: AtMost,
    #[command(flatten)]
    pub(crate) policy: PolicyArgs,
    /// Free memory when the program does, as every other command does. Without this flag, memory stays allocated as long as in the
    /// recording: in PyTorch, until event polling notices that other streams are done
    #[arg(long)]
    pub(crate) free_at_once: bool,
    #[command(flatten)]
    pub(crate) reading: ReadingArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Draw a job: memory over ops, a map of segments and blocks, two ranks side by side
#[derive(Debug, clap::Args)]
#[command(after_help = CHART_EXAMPLES)]
pub(crate) struct ChartArgs {
    /// A trace, a PyTorch memory snapshot or an RMM log; plain, gzip or zstd
    #[arg(value_name = "TRACE")]
    pub(crate) input: PathBuf,
    /// The picture to write, an .svg (`symmalloc report` writes pages)
    #[arg(short, long, value_name = "OUT")]
    pub(crate) output: PathBuf,
    /// Map the memory after this op, counted from 0 [default: the failed request, or else the peak of allocated memory]
    #[arg(long, value_name = "N")]
    pub(crate) op: Option<usize>,
    /// Draw the map instead of memory over ops
    #[arg(long, conflicts_with = "beside")]
    pub(crate) map: bool,
    /// Draw one picture to share: reserved memory under PyTorch's allocator, under symmalloc, and with a plan
    #[arg(long, conflicts_with_all = ["map", "beside", "plan", "op", "pool", "stream"])]
    pub(crate) share: bool,
    /// Another rank's recording, drawn next to the first with differing blocks marked
    #[arg(long, value_name = "TRACE")]
    pub(crate) beside: Option<PathBuf>,
    /// A plan of the job that `symmalloc plan` wrote, drawn next to it: its reserved memory, and a map
    #[arg(long, value_name = "FILE", conflicts_with = "beside")]
    pub(crate) plan: Option<PathBuf>,
    /// Show this pool only
    #[arg(long, value_name = "P", value_parser = parse_pool)]
    pub(crate) pool: Option<u32>,
    /// Show this stream's heaps only
    #[arg(long, value_name = "S", value_parser = parse_stream)]
    pub(crate) stream: Option<u16>,
    #[command(flatten)]
    pub(crate) policy: PolicyArgs,
    #[command(flatten)]
    pub(crate) reading: ReadingArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Write one page about a job: peaks, an interactive picture, holders of memory, fragmentation, settings to try
#[derive(Debug, clap::Args)]
#[command(after_help = REPORT_EXAMPLES)]
pub(crate) struct ReportArgs {
    /// A trace, a PyTorch memory snapshot or an RMM log; plain, gzip or zstd
    #[arg(value_name = "TRACE")]
    pub(crate) input: PathBuf,
    /// The page to write (.html)
    #[arg(short, long, value_name = "OUT")]
    pub(crate) output: PathBuf,
    /// Show the memory after this op, counted from 0 [default: the peak of allocated memory]
    #[arg(long, value_name = "N")]
    pub(crate) op: Option<usize>,
    #[command(flatten)]
    pub(crate) policy: PolicyArgs,
    #[command(flatten)]
    pub(crate) reading: ReadingArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Plan the placement of every allocation of a job, so that the job needs no more memory than its peak of live bytes
///
/// The whole job is known in advance, so a plan can reduce the peak of reserved memory to the peak of live bytes. The command also computes
/// reservations with which the job runs without a plan and obtains no further memory, and verifies them by replaying the job.
#[derive(Debug, clap::Args)]
#[command(after_help = PLAN_EXAMPLES)]
pub(crate) struct PlanArgs {
    /// Recorded jobs: traces, PyTorch memory snapshots or RMM logs; plain, gzip or zstd. Or tables of rectangles (CSV)
    #[arg(required = true, value_name = "TRACE")]
    pub(crate) traces: Vec<PathBuf>,
    /// Treat the recordings as the ranks of one job, which make the same calls and get the same reservations
    #[arg(long)]
    pub(crate) one_job: bool,
    /// Write the plan, for `symmalloc replay --plan` and `symmalloc chart --plan` (.zst and .gz compress)
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Seconds of processor time for the search, about; a proof that no plan needs less memory ends it. The plan depends on this number
    /// and not on the machine's speed [default: 10, or 4 for more than 500,000 ops]
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) seconds: Option<u64>,
    /// Memory to reserve beyond what the job needs, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub(crate) margin: u32,
    /// Reserve one segment, and so one window, per heap of every pool, as symmetric pools do
    #[arg(long)]
    pub(crate) reserved: bool,
    /// Write the job with its reservations as a trace (.zst and .gz compress)
    #[arg(long, value_name = "OUT")]
    pub(crate) reservations: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) policy: PolicyArgs,
    #[command(flatten)]
    pub(crate) reading: ReadingArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Print a shell's completions
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: symmalloc completions bash > ~/.local/share/bash-completion/completions/symmalloc")]
pub(crate) struct CompletionsArgs {
    /// The shell
    pub(crate) shell: Shell,
}

/// Print a manual page
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  symmalloc man replay | man -l -
  symmalloc man --all ~/.local/share/man/man1                    for `man symmalloc-replay`")]
pub(crate) struct ManArgs {
    /// The command to describe [default: the program]
    pub(crate) command: Option<String>,
    /// Write the pages of the program and of all commands to this folder, named as their cross-references expect
    #[arg(long, value_name = "FOLDER", conflicts_with = "command")]
    pub(crate) all: Option<PathBuf>,
}

/// Format of the file that `export` writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExportFormat {
    /// A PyTorch memory snapshot
    Snapshot,
    /// Chrome's trace events, for Perfetto
    Perfetto,
}

/// Upper limit on a number of items; `None` for no limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AtMost(pub(crate) Option<u64>);

fn parse_detail(text: &str) -> Result<AtMost, std::num::ParseIntError> {
    if text == "all" { Ok(AtMost(None)) } else { text.parse().map(|most| AtMost(Some(most))) }
}

/// Parses a pool: `1` or, as in a trace, `p1`.
fn parse_pool(text: &str) -> Result<u32, std::num::ParseIntError> {
    text.strip_prefix('p').unwrap_or(text).parse()
}

/// Parses a stream: `1` or, as in a trace, `s1`.
fn parse_stream(text: &str) -> Result<u16, std::num::ParseIntError> {
    text.strip_prefix('s').unwrap_or(text).parse()
}
