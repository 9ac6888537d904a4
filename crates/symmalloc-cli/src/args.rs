//! What the program is asked to do: its commands and flags.

mod policy;
mod reading;
mod run;

pub(crate) use policy::{FlagContradiction, PolicyArgs};
pub(crate) use reading::ReadingArgs;
pub(crate) use run::RunArgs;

use crate::input::STREAM;
use crate::job::Order;
use clap::{Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use std::path::{Path, PathBuf};

const HELP: &str = "\
Recordings are files, standard input (`-`), or jobs that come with the program: gpt2, moe, resnet50, llama, gnn, fsdp,
fsdp_rank1, fsdp1, fsdp1_rank1.

With --json every command but run, completions and man prints one JSON document: an object, or an array of objects, each with schema_version (1). If it fails,
that is {schema_version, error: {message, causes, help, exit_code}}, and stderr says the same for people.

Exit codes: 0 fine, 3 the ranks differ or memory is refused, 2 bad input.";

/// The most ranks of a simulated job: a million.
const RANKS_MAX: i64 = 1 << 20;

const REPLAY_EXAMPLES: &str = "\
Examples:
  symmalloc replay snapshot.pickle                      a PyTorch job on 8 ranks, beside PyTorch's own rule
  symmalloc replay snapshot.pickle.gz --ranks 64 --seed 3 --json
  symmalloc replay snapshot.pickle --order address --segments fixed      PyTorch's rule alone: exits with 3
  symmalloc replay job.trace --record rank0.trace.zst   our decisions, for `symmalloc diff`
  symmalloc replay job.trace --plan job.plan            every rank follows a plan that `symmalloc plan` wrote

JSON: an array with one object per trace:
  schema_version, trace, ops, allocs, ranks, passes, order, segments, streams
  aligned               whether all ranks placed alike, in every pass, with equal digests
  differing_placements  allocations whose (segment, offset) is not the same on all ranks
  refused               allocations that a limit, or the size of a segment, refused; of the pass with the most
  first_divergence      null, or {op, allocation, name?, pass?, ranks: [{rank, segment, offset}]}; counted from 0;
                        segment and offset are null where the allocation was refused or has no bytes
  peak_live_bytes       the most that the program had requested at any time of any pass
  peak_reserved_bytes   the most that was held from the device at any time of any pass
  efficiency            peak_live_bytes / peak_reserved_bytes
  first_pass            {peak_reserved_bytes, efficiency, refused}: the first pass alone, which flatters
  segment_count         at the end of the last pass, before what the program left is freed
  ns_per_op             median pass after the first on a device that costs nothing; null with --order address
  digest                16 hex digits over all (op, decision) of rank 0's first pass; null with --order address
  lived_before, lived_before_bytes    allocations that lived when the recording began, and their bytes
  pytorch               the same job under PyTorch's rule (the model, on at most 8 ranks) with expandable and with fixed segments,
                        its default: objects with the keys from ranks to segment_count; none with --order address
  planned_ops_share     allocations that went where the plan says over all of at least one byte, in all passes; null
                        without a plan

A trace's own configuration and pools hold; --segments and --streams replace the default pool's, and --config replaces
the whole of it but for the pools that the program makes. With --plan the plan's configuration holds, for all pools: flags
that say something else are an error. Each pass is a step, unless the program has steps of its own. The model of address
order always keeps streams separate, and has fixed and expandable segments only; its rank 0 does all passes, and the
other ranks are compared over the first one. Of settings it has max_split_size, max_non_split_rounding, large_segment_size and
roundup_power2_divisions; with --order address, others in --config are an error. It has no limits.

Exit codes: 0 fine, 3 the ranks differ, or allocations are refused without --allow-refusals, 2 bad input.";

const DIFF_EXAMPLES: &str = "\
Examples:
  symmalloc diff rank0.pickle.gz rank1.pickle.gz
  symmalloc diff rank0.trace.zst rank1.trace.zst --json
  symmalloc diff symmalloc-flight-world-*.json          who is behind, at which collective, and what differs; the records
                                                        lie in $SYMMALLOC_FLIGHT_RECORDS or ~/.local/state/symmalloc

JSON of two recordings: schema_version, same_ops, compared_ops, uses_left_out (null where uses by other streams are compared,
else {a, b}: how many), allocs, differing_placements (null where one of the two records no placements), first
(null, or {allocation, op, a: {segment, offset}, b: {segment, offset}}); counted from 0, op in A. A segment is the ordinal
of its birth. Where the ops differ, placements are compared up to there and first_op_difference says what each did.

Uses by other streams are not compared, unless both are decisions that `replay --record` wrote: a snapshot shows a use
only where event polling noticed it late, which differs between ranks that made the same calls.

Flight records are compared as they were written. Of a job that goes on, ranks write at slightly different times: one may
be some collectives ahead. A folder is not read: name its files.

JSON of flight records: schema_version, trouble, communicators:
  communicator, id, ranks, records      its name; 16 hex digits; how many there are, and how many left a record
  findings    finding (no_record, rank_twice, ranks_differ, behind, differs, unfinished, unfinished_transfer, even), text,
              and what the text says: ranks, rank, number, signature {kind, elements?, data_type?, detail?}, state,
              submitted; as pairs: said [[number, ranks]], calls [[signature, ranks]], states [[state, ranks]]
  by_rank     rank, submitted, finished, record (the file), host, process, reason, state, cause, waits_for (null, or
              {number, is_point_to_point?, kind, elements?, data_type?, detail?, stream?, state, age_ms}), seen
              ([{as, by}]: what other ranks saw of it). Of a rank that left no record, submitted and finished are as
              far as others knew, and record to waits_for are null

Exit codes: 0 the same, 3 different ops or placements, or ranks that are missing, behind, different or wait, 2 bad input.";

const IMPORT_EXAMPLES: &str = "\
Examples:
  symmalloc import snapshot.pickle job.trace.zst
  symmalloc import rmm.csv job.trace
  symmalloc import killed.trace.zst whole.trace.zst --accept-torn        what a job that was killed left
  zcat rmm.csv.gz | symmalloc import - - | head         from standard input to standard output; what is said goes to stderr

A snapshot that begins in the middle of a job says what lived by then: it is freed in the trace, or in `segments` at the end.
Such allocations come first in the trace. An allocation's name is what the program calls it, else the Python frame that asked for
it, where the snapshot has stack frames.

JSON: schema_version, input, trace, format, device, ops, streams, allocs, frees, uses (by other streams), placements (that are recorded),
lived_before, lived_before_bytes (when the recording began), recorded_reserved_bytes_peak (null where the recording does not say it),
and what was supplied or left out: frees_supplied, frees_of_unknown, uses_of_unknown, failed_allocations, empty_allocations,
unknown_actions, torn_at_line (null, or where it ends in the middle).

Exit codes: 0 fine, 2 bad input.";

const EXPORT_EXAMPLES: &str = "\
Examples:
  symmalloc export job.trace.zst snapshot.pickle                 open it at https://pytorch.org/memory_viz
  symmalloc export snapshot.pickle ours.pickle.gz                a PyTorch job, as our allocator places it
  symmalloc export snapshot.pickle ours.pickle --free-at-once    ... and frees it: no block waits for other streams
  symmalloc export job.trace fixed.pickle --config segments:fixed,max_split_size_mb:256
  symmalloc export job.trace.zst job.json.gz                     a time line: open it at https://ui.perfetto.dev
  symmalloc export job.trace.zst all.json --detail all           ... with every allocation and every change

The format goes by OUT's name, .json is a time line, unless --format says it; a name that says it is something else is an error. On a time line a microsecond is an op.

JSON of a time line: schema_version, trace, timeline, heaps, slices (allocations), left_out (smaller allocations), points (of counters),
ops_per_point (each is the highest of), instants, lived_before, lived_before_bytes (when the recording began).

JSON of a snapshot: schema_version, trace, snapshot, entries, allocations, refused (by a limit), pending_frees (that complete later),
segments and blocks (at the end), ops_without_entry (that PyTorch's allocator does not have), lived_before, lived_before_bytes (when
the recording began).

Exit codes: 0 fine, 2 bad input.";

const CHART_EXAMPLES: &str = "\
Examples:
  symmalloc chart job.trace.zst -o job.html                      memory over ops, and a map of the peak
  symmalloc chart job.trace.zst -o job.svg                       memory over ops alone
  symmalloc chart job.trace.zst -o map.svg --map --op 12000      segments and blocks after op 12000
  symmalloc chart rank0.pickle.gz --beside rank1.pickle.gz -o ranks.svg
  symmalloc chart job.trace.zst --plan job.plan -o job.html      what the plan holds, beside that
  symmalloc chart fsdp1 --share -o fsdp1.png                     before and after, to show to others

Two ranks are drawn where their recordings say that each allocation was placed; where these do not, as our allocator
places them. Pictures need no script and no network. Equal jobs are equal bytes.

JSON: schema_version, trace, picture, ops, op (that the map shows), refused (allocations, by a limit), live, allocated, reserved
({peak_bytes, op}), heaps ([{pool, stream, live, allocated, reserved}]; stream is null where streams share), and with
--beside: beside ({trace, placements: recorded or replayed, allocs, differing_placements, differing_live}), and with
--plan: plan ({file, reserved}); with --share: trace, picture, refused, peak_live_bytes, and what is reserved at the peak over five
passes: pytorch_bytes and pytorch_expandable_bytes (model), symmalloc_bytes, planned_bytes (null where there is no plan), no_plan (the reason, or null where
there is nothing to plan). Refused are then the requests in all passes.

Exit codes: 0 fine, 2 bad input.";

const REPORT_EXAMPLES: &str = "\
Examples:
  symmalloc report job.trace.zst -o report.html
  symmalloc report snapshot.pickle -o report.html --segments fixed --json

One page that needs no script and no network: peaks, what holds memory at the peak, fragmentation, pictures, and what
other settings would make of the same ops, each with the command that does it again.

JSON: schema_version, trace, report, ops, op (of holders and fragmentation), refused, lived_before, lived_before_bytes (when the
recording began), recorded_reserved (by the recorded allocator: null, or {peak_bytes, is_exact}, else it was at least that), live, allocated, reserved ({peak_bytes, op}),
steady_reserved_bytes, efficiency (peak live / that), holders ([{name, each_bytes?, allocations, requested_bytes}]: by name, or by size
where name is null), free_bytes, largest_free_bytes, fragmentation (1 - largest / free),
settings ([{settings, command, is_own, is_better (it holds less and refuses no more), peak_reserved_bytes, refused (requests, in all
passes), maps (calls that map or unmap, in a pass), waits (of a stream for another, in a pass)}], least peak first), settings_impossible ([{settings, reason}]: the job stops
under them), plan (what a plan would need, or null: {command, planned_bytes, efficiency, refused (in all passes)}), no_plan (the
reason, or null).

What settings and a plan take is the most over five passes; the pictures, and what holds memory, are of the first one.

Exit codes: 0 fine, 2 bad input.";

const PLAN_EXAMPLES: &str = "\
Examples:
  symmalloc plan job.trace.zst -o job.plan                       where every allocation goes, for `symmalloc replay --plan`
  symmalloc plan job.trace.zst --streams separate                each stream's heap planned by itself
  symmalloc plan rank0.pickle.gz rank1.pickle.gz --one-job --margin 5      the same reserved on all ranks, and 5 % more
  symmalloc plan job.trace.zst --reserved --streams shared       without a plan: one segment, one window
  symmalloc plan job.trace.zst --reservations reserved.trace.zst the job with what it reserves, for `symmalloc replay`

In a plan the default pool's streams share, unless --streams, or a configuration of the recording's own or of --config, says
otherwise; all else is as the recording and the flags say. Planned is what is held when the plan is followed, online what is
held without one, both the most over five passes. What to reserve is for running without a plan: each recording is carried
out twice, as it was recorded and with that, on a device that counts its calls.

JSON: an array with one object per job (with --one-job there is one job, and numbers are the most of all ranks):
  schema_version, job   1, and the recording
  peak_live_bytes       the most that the program has requested at any time
  planned_bytes         the most that is held when the plan is followed
  efficiency            peak_live_bytes / planned_bytes
  online_bytes          the most that is held without a plan, with the recording's settings
  seconds               that planning took
  streams, plans        of the default pool, shared or separate; how many plans there are
  plan_bytes            memory that plans place in; planned_bytes has all else, too
  planned_ops_share     allocations that go where the plan says over all of at least one byte
  waits, online_waits   waits of a stream for another one that reuse needs in a pass: planned, and without a plan
  refused, online_refused   requests that a limit refuses in all passes: planned, and without a plan
  plan                  the file that was written, or null
and what to reserve without a plan; where a limit leaves no room for that, no_reservations says so, and these are missing:
  traces, margin_percent, settings (of the allocator and its default pool), lines (to paste into a trace), reserve_bytes,
  heaps ([{pool, stream, for_stream, segments, peak_live_bytes, grown_bytes (with nothing reserved), reserve_bytes}]; stream is
  null where streams share), holds (nothing is obtained after what is reserved), without and with (the reservations:
  {reserving, first_pass, second_pass: {memory_calls, registrations}, refused, peak_reserved_bytes})

Exit codes: 0 fine, 3 what is reserved does not hold, 2 bad input, such as a limit below what a plan needs.";

const SIMULATE_EXAMPLES: &str = "\
Examples:
  symmalloc simulate --seed 7                           one generated job on 64 ranks, with its plan
  symmalloc simulate --seeds 1000 --ops 300             a thousand of them
  symmalloc simulate moe --ranks 256                    a recorded job; a minute for each thousand ranks, about
  symmalloc simulate simulate-seed-7.trace              a saved failure, as it was

Seeds name everything: the program, what each rank's surroundings are, which driver calls fail. A failure is made as
small as it gets and saved as a trace with its story on top.

JSON: an array with one object per trace, or for the generated jobs:
  schema_version, trace, seed, runs, ranks, seconds    trace is null for generated jobs; ranks are those of all runs
  ops, private_ops                      carried out, over all ranks; private ones are a rank's own, in pools of its own
  planned, differing                    allocations that went where a plan says; steps that were not as planned
  syncs, checks                         points at which all live ranks are compared; scans of all invariants of a rank
  failed_calls, ranks_with_failed_calls what drivers refused
  out_of_memory, refused, losses        injected: memory refused, other calls refused, devices lost
  small_devices                         ranks whose device has less memory than the program wants
  restarts, left                        ranks that started again; ranks that left the job
  caught                                ranks that differed because of what their driver refused, and were caught
  device_bytes_peak                     the most device memory that one rank held
  state_bytes_per_rank                  what a rank takes on this machine; null with several runs, or if unknown
  digest                                16 hex digits over all heaps of the ranks to which nothing happened
  failure                               null, or {seed, rank, step, op, cause, report, trace, shrunk_ops, shrunk_ranks}

Exit codes: 0 fine, 3 a run failed, 2 bad input.";

/// A deterministic caching device allocator, on recorded GPU jobs. Needs no GPU but for `run`.
#[derive(Debug, Parser)]
#[command(name = "symmalloc", version, after_help = HELP)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Command {
    /// How the allocator is configured, where the command takes that.
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

    /// Whether stdout has the result itself, and nothing else may be written to it.
    pub(crate) fn writes_stdout(&self) -> bool {
        match self {
            Command::Import(args) => args.output == Path::new(STREAM),
            Command::Export(args) => args.output == Path::new(STREAM),
            _ => false,
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Replay(ReplayArgs),
    Simulate(SimulateArgs),
    Diff(DiffArgs),
    Import(ImportArgs),
    Export(ExportArgs),
    Chart(ChartArgs),
    Report(ReportArgs),
    Plan(PlanArgs),
    Run(RunArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
}

/// Replay recorded jobs on many ranks and see whether they place alike
///
/// Every rank is simulated with its own address order, event timing and handles. Recordings are PyTorch memory
/// snapshots (torch.cuda.memory._dump_snapshot), RMM logs and symmalloc traces; plain, gzip or zstd.
#[derive(Debug, clap::Args)]
#[command(after_help = REPLAY_EXAMPLES)]
pub(crate) struct ReplayArgs {
    /// Recordings to replay: files, `-`, or jobs that come with the program (see `symmalloc --help`)
    #[arg(required = true, value_name = "TRACE")]
    pub(crate) traces: Vec<PathBuf>,
    /// Ranks to simulate
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=RANKS_MAX))]
    pub(crate) ranks: u32,
    /// How free blocks are ordered: our rule, or the model of PyTorch's
    #[arg(long)]
    pub(crate) order: Option<Order>,
    #[command(flatten)]
    pub(crate) policy: PolicyArgs,
    /// Names the simulated job: address orders, event timing and handles of all ranks
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub(crate) seed: u64,
    /// How often each rank carries the trace out on its allocator; between passes everything is freed
    #[arg(long, alias = "repeat", value_name = "N", default_value_t = 5,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) passes: u32,
    #[command(flatten)]
    pub(crate) reading: ReadingArgs,
    /// Allocations that a limit refuses are no failure: without this the exit code is 3
    #[arg(long)]
    pub(crate) allow_refusals: bool,
    /// Write the trace with rank 0's decisions (.zst and .gz compress)
    #[arg(long, value_name = "OUT")]
    pub(crate) record: Option<PathBuf>,
    /// Follow a plan of the job that `symmalloc plan` wrote; with its configuration
    #[arg(long, value_name = "FILE", conflicts_with = "order")]
    pub(crate) plan: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Simulate whole jobs on many adverse ranks: refused memory, lost devices, threads that interleave, restarts
///
/// Every rank has addresses, event timing, thread interleaving and faults of its own; the program, drawn from the seed or
/// taken from a recording, is the same. Ranks to which nothing happens must place alike, others must be caught, and in
/// the end everything must be given back.
#[derive(Debug, clap::Args)]
#[command(after_help = SIMULATE_EXAMPLES)]
pub(crate) struct SimulateArgs {
    /// Recordings to simulate, or saved failures [default: generated jobs]
    #[arg(value_name = "TRACE")]
    pub(crate) traces: Vec<PathBuf>,
    /// Ranks of a job
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=RANKS_MAX))]
    pub(crate) ranks: u32,
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

/// Compare two ranks' recordings, or the flight records that a job's ranks left
///
/// Two recordings: the same calls, the same placements? Flight records, which each rank leaves when a communicator fails:
/// who is missing, who is behind and at which collective, and where sizes or order differ. A rank that left none is
/// described by what the others knew of it.
#[derive(Debug, clap::Args)]
#[command(after_help = DIFF_EXAMPLES)]
pub(crate) struct DiffArgs {
    /// Two ranks' recordings, or flight records: one of each rank
    #[arg(required = true, value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) reading: ReadingArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Turn a recording into a symmalloc trace
#[derive(Debug, clap::Args)]
#[command(after_help = IMPORT_EXAMPLES)]
pub(crate) struct ImportArgs {
    /// A PyTorch memory snapshot, an RMM log or a trace; plain, gzip or zstd; `-` for standard input
    #[arg(value_name = "IN")]
    pub(crate) input: PathBuf,
    /// The trace to write (.zst and .gz compress); `-` for standard output
    #[arg(value_name = "OUT")]
    pub(crate) output: PathBuf,
    #[command(flatten)]
    pub(crate) reading: ReadingArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Write what our allocator makes of a recording as a snapshot for PyTorch's memory_viz, or a time line for Perfetto
#[derive(Debug, clap::Args)]
#[command(after_help = EXPORT_EXAMPLES)]
pub(crate) struct ExportArgs {
    /// A trace, a PyTorch memory snapshot or an RMM log; plain, gzip or zstd
    #[arg(value_name = "TRACE")]
    pub(crate) input: PathBuf,
    /// The file to write (.gz and .zst compress); `-` for standard output
    #[arg(value_name = "OUT")]
    pub(crate) output: PathBuf,
    /// What to write [default: a time line if OUT is called .json, else a snapshot]
    #[arg(long)]
    pub(crate) format: Option<ExportFormat>,
    /// On a time line, the most allocations, and the most points of a counter: a number, or `all`
    #[arg(long, value_name = "N", default_value = "100000", value_parser = parse_detail)]
    pub(crate) detail: AtMost,
    #[command(flatten)]
    pub(crate) policy: PolicyArgs,
    /// Free memory when the program does, as in every other command. Otherwise it stays taken as long as the recording
    /// says: in PyTorch, until event polling noticed that other streams were done
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
    /// The picture to write: .svg or .png for one, .html for all
    #[arg(short, long, value_name = "OUT")]
    pub(crate) output: PathBuf,
    /// Map the memory after this op, counted from 0 [default: where most is allocated]
    #[arg(long, value_name = "N")]
    pub(crate) op: Option<usize>,
    /// In an .svg or .png, draw the map in place of memory over ops
    #[arg(long, conflicts_with = "beside")]
    pub(crate) map: bool,
    /// Draw one picture for others: what the job holds under PyTorch's allocator, under symmalloc, and planned
    #[arg(long, conflicts_with_all = ["map", "beside", "plan", "op", "pool", "stream"])]
    pub(crate) share: bool,
    /// Another rank's recording, to draw beside with differing blocks marked
    #[arg(long, value_name = "TRACE")]
    pub(crate) beside: Option<PathBuf>,
    /// A plan of the job that `symmalloc plan` wrote, to draw beside: what it reserves, and a map of it
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

/// Write one page about a job: peaks, what holds memory, fragmentation, settings to try
#[derive(Debug, clap::Args)]
#[command(after_help = REPORT_EXAMPLES)]
pub(crate) struct ReportArgs {
    /// A trace, a PyTorch memory snapshot or an RMM log; plain, gzip or zstd
    #[arg(value_name = "TRACE")]
    pub(crate) input: PathBuf,
    /// The page to write (.html)
    #[arg(short, long, value_name = "OUT")]
    pub(crate) output: PathBuf,
    /// Look at the memory after this op, counted from 0 [default: where most is allocated]
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

/// Plan where every allocation of a job goes, so that it needs no more than what is live at its peak
///
/// The whole job is known beforehand, so its peak can be planned to what is live then. Says also what to reserve without a plan, so
/// that a job, once it runs, obtains no more memory, and proves it.
#[derive(Debug, clap::Args)]
#[command(after_help = PLAN_EXAMPLES)]
pub(crate) struct PlanArgs {
    /// Recorded jobs: traces, PyTorch memory snapshots or RMM logs; plain, gzip or zstd
    #[arg(required = true, value_name = "TRACE")]
    pub(crate) traces: Vec<PathBuf>,
    /// The recordings are of one job's ranks, which make the same calls: what to reserve is the same on all of them
    #[arg(long)]
    pub(crate) one_job: bool,
    /// Write the plan, for `symmalloc replay --plan` and `symmalloc chart --plan` (.zst and .gz compress)
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Reserve so much more than the job needs, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub(crate) margin: u32,
    /// Reserve one segment, and so one window, for each heap of every pool, as for symmetric pools
    #[arg(long)]
    pub(crate) reserved: bool,
    /// Write the job with what it reserves as a trace (.zst and .gz compress)
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
#[command(after_help = "Example: symmalloc man replay | man -l -")]
pub(crate) struct ManArgs {
    /// The command that it is about [default: the program]
    pub(crate) command: Option<String>,
}

/// What `export` writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExportFormat {
    /// A PyTorch memory snapshot
    Snapshot,
    /// Chrome's trace events, for Perfetto
    Perfetto,
}

/// How many of something at most; `None` for all.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AtMost(pub(crate) Option<u64>);

fn parse_detail(text: &str) -> Result<AtMost, std::num::ParseIntError> {
    if text == "all" { Ok(AtMost(None)) } else { text.parse().map(|most| AtMost(Some(most))) }
}

/// A pool: `1` or, as in a trace, `p1`.
fn parse_pool(text: &str) -> Result<u32, std::num::ParseIntError> {
    text.strip_prefix('p').unwrap_or(text).parse()
}

/// A stream: `1` or, as in a trace, `s1`.
fn parse_stream(text: &str) -> Result<u16, std::num::ParseIntError> {
    text.strip_prefix('s').unwrap_or(text).parse()
}
