//! Golden tests of the recorded jobs: digests and memory are pinned in `golden/jobs.txt`, and memory use is compared with requirements.
//!
//! If a digest changes while `placements` does not, then the contents of digests have changed. Both affect everyone who compares ranks of
//! two versions. If the change is intended, `SYMMALLOC_BLESS=1 cargo test -p symmalloc-harness --test golden` regenerates the file; review
//! its difference.

use std::fmt::Write as _;
use std::path::Path;
use symmalloc_core::config::{Config, PoolConfig, StreamPolicy};
use symmalloc_core::{Allocator, Digest, PoolId};
use symmalloc_harness::jobs;
use symmalloc_sim::{Call, CallCounts, SimBackend};
use symmalloc_trace::replay::{Program, Replay};

const SEGMENTS: [&str; 2] = ["expandable", "fixed"];
const STREAMS: [(&str, StreamPolicy); 2] = [("separate", StreamPolicy::Separate), ("shared", StreamPolicy::Shared)];

/// Results of a job.
struct Summary {
    allocations: u64,
    peak_live_bytes: u64,
    peak_reserved_bytes: u64,
    segments_born: u64,
    /// FNV-1a over all placements. Shows whether a changed digest implies changed placements.
    placements: u64,
    digest: Digest,
    calls: CallCounts,
}

impl Summary {
    fn efficiency(&self) -> f64 {
        self.peak_live_bytes as f64 / self.peak_reserved_bytes as f64
    }
}

fn replay(program: &Program, segments: &str, streams: StreamPolicy) -> Summary {
    let pool = PoolConfig::builder().streams(streams);
    let pool = if segments == "fixed" { pool.fixed() } else { pool.expandable() };
    let config = Config::builder()
        .default_pool(pool.build().expect("the configuration should be valid"))
        .build()
        .expect("the configuration should be valid");
    let allocator: Allocator<_> =
        Allocator::new(SimBackend::builder().seed(1).build(), config).expect("the arguments should be valid");
    let mut placements = 0xcbf2_9ce4_8422_2325_u64;
    let mut fold = |word: u64| placements = (placements ^ word).wrapping_mul(0x100_0000_01b3);
    Replay::new(&allocator, program)
        .run(|_, allocation| {
            fold(allocation.placement.segment.0.into());
            fold(allocation.placement.offset_bytes);
        })
        .expect("the job fits 80 GiB");
    allocator.check().expect("the invariants should hold");
    let stats = allocator.stats();
    assert_eq!(allocator.backend().mapped_bytes_peak(), stats.reserved_bytes.peak);
    Summary {
        allocations: stats.usage.all.allocations.allocated,
        peak_live_bytes: stats.usage.all.requested_bytes.peak,
        peak_reserved_bytes: stats.reserved_bytes.peak,
        segments_born: stats.segments_born,
        placements,
        digest: allocator.digest(PoolId::DEFAULT).expect("the default pool should always exist"),
        calls: allocator.backend().calls(),
    }
}

#[test]
fn recorded_jobs_equal_the_golden_results() {
    let mut table = format!(
        "{:<20} {:<10} {:<8} {:>11} {:>15} {:>19} {:>8} {:>16} {:>16}\n",
        "job",
        "segments",
        "streams",
        "allocations",
        "peak_live_bytes",
        "peak_reserved_bytes",
        "segments",
        "placements",
        "digest"
    );
    for job in jobs::JOBS {
        let program = jobs::program(job);
        for segments in SEGMENTS {
            for (name, streams) in STREAMS {
                let Summary {
                    allocations,
                    peak_live_bytes,
                    peak_reserved_bytes,
                    segments_born,
                    placements,
                    digest,
                    ..
                } = replay(&program, segments, streams);
                writeln!(
                    table,
                    "{job:<20} {segments:<10} {name:<8} {allocations:>11} {peak_live_bytes:>15} \
                     {peak_reserved_bytes:>19} {segments_born:>8} {placements:016x} {digest:>16}"
                )
                .expect("writing to memory cannot fail");
            }
        }
    }
    compare_with_file("golden/jobs.txt", &table);
}

/// Compares a table with the file that pins it, line by line.
fn compare_with_file(name: &str, table: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    if std::env::var_os("SYMMALLOC_BLESS").is_some() {
        std::fs::write(&path, table).expect("the golden file can be written");
    }
    let golden = std::fs::read_to_string(&path).expect("the golden file exists");
    for (found, expected) in table.lines().zip(golden.lines()) {
        assert_eq!(found, expected, "set SYMMALLOC_BLESS=1 if this is intended");
    }
    assert_eq!(table.lines().count(), golden.lines().count());
}

/// Each job makes the number of calls of each kind that `golden/calls.txt` lists. Placements would not show a missing
/// or an extra wait.
#[test]
fn recorded_jobs_make_the_golden_number_of_calls() {
    let mut table = String::new();
    for job in jobs::JOBS {
        for (name, streams) in STREAMS {
            let calls = replay(&jobs::program(job), "expandable", streams).calls;
            let counts: Vec<String> =
                Call::ALL.iter().map(|call| format!("{} {}", call.name(), calls.of(*call))).collect();
            writeln!(table, "{job:<20} {name:<8} {}", counts.join(", ")).expect("writing to memory cannot fail");
        }
    }
    compare_with_file("golden/calls.txt", &table);
}

#[test]
fn one_growing_range_with_exact_best_fit_wastes_little() {
    let bars = [
        ("gpt2_train_varlen", StreamPolicy::Separate, 0.935),
        ("moe_train", StreamPolicy::Separate, 0.945),
        ("resnet50_multiscale", StreamPolicy::Separate, 0.995),
        ("llama_generate", StreamPolicy::Separate, 0.970),
        ("fsdp_train_rank0", StreamPolicy::Separate, 0.835),
        ("fsdp1_train_rank0", StreamPolicy::Separate, 0.838),
        ("fsdp_train_rank0", StreamPolicy::Shared, 0.938),
        ("fsdp1_train_rank0", StreamPolicy::Shared, 0.938),
    ];
    for (job, streams, least) in bars {
        let efficiency = replay(&jobs::program(job), "expandable", streams).efficiency();
        assert!(efficiency >= least, "{job}, {streams:?}: {efficiency:.4} of peak reserved is live, not {least}");
    }
}

/// The expected values were measured with PyTorch 2.11. Each job is replayed without side-stream delays.
#[test]
fn fixed_segments_reserve_as_much_as_pytorch() {
    let pytorch = [
        ("gpt2_train_varlen", 22_064_136_192),
        ("moe_train", 9_453_961_216),
        ("resnet50_multiscale", 6_880_755_712),
        ("llama_generate", 3_087_007_744),
        ("fsdp_train_rank0", 7_881_097_216),
        ("fsdp1_train_rank0", 7_927_234_560),
    ];
    for (job, expected) in pytorch {
        let found = replay(&jobs::program(job), "fixed", StreamPolicy::Separate).peak_reserved_bytes;
        assert!(found.abs_diff(expected) * 1000 <= expected, "{job}: {found} bytes, PyTorch {expected}");
    }
}
