//! Measures what must not grow, and computes slopes.

use crate::clock;
use crate::status::{add_line, file};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use stub_process::{cuda, descriptors, nccl};
use symmalloc_cuda::CudaAllocator;

/// Number of figures.
const COUNT: usize = 7;
/// Names and units of the figures.
const FIGURES: [&str; COUNT] = [
    "heap of the process without what names and ids keep, KiB",
    "resident memory without files and devices, KiB",
    "descriptors",
    "threads",
    "pools",
    "driver objects",
    "communicators, windows and sockets of NCCL",
];
/// Bytes that an allocator keeps of a destroyed pool of a graph, because ids are not reused. `tests/destroyed.rs` bounds those of any pool.
const KEPT_OF_A_POOL: u64 = 45;
/// Bytes that a process keeps of each meeting, because its name counts occurrences: an entry of a B-tree.
const KEPT_OF_A_MEETING: u64 = 32;
/// Samples in the first seconds of a process are not used.
const WARM_UP_SECONDS: f64 = 120.0;
/// Ratio of the half width of a 95 % confidence interval to the standard error.
const CONFIDENCE: f64 = 1.96;

/// Figures of a process at one time.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Sample {
    process: u32,
    seconds: f64,
    figures: [f64; COUNT],
}

/// Adds a sample of this process, after a number of meetings, to the rank's file.
pub(crate) fn take(folder: &Path, rank: usize, allocator: &CudaAllocator, meetings: u64) {
    let status = fs::read_to_string("/proc/self/status").expect("this test should run on Linux");
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a field of every process");
        line.split_whitespace().next().and_then(|number| number.parse::<u64>().ok()).expect("a number")
    };
    // SAFETY: takes and changes nothing.
    let heap = unsafe { libc::mallinfo2() };
    let (driver, nccl) = (cuda::live(), nccl::live());
    let objects =
        driver.ranges + driver.events + driver.streams + driver.graphs + driver.mappings + driver.host_allocations;
    let pools = allocator.core().pools().len() as u64;
    let destroyed = u64::from(allocator.core().pool_count()) - pools;
    let kept = KEPT_OF_A_POOL * destroyed + KEPT_OF_A_MEETING * meetings;
    let figures = [
        ((heap.uordblks + heap.hblkhd) as u64).saturating_sub(kept) >> 10,
        field("RssAnon:"),
        descriptors() as u64,
        field("Threads:"),
        pools,
        objects + driver.imports,
        nccl.communicators + nccl.windows + nccl.buffers + nccl.kept_rounds + nccl.leaked + nccl.sockets,
    ];
    let mut line = format!("{} {:.3}", std::process::id(), clock::seconds());
    figures.iter().for_each(|figure| write!(line, " {figure}").expect("a text grows"));
    add_line(&file(folder, "samples", rank), &line);
}

/// A slope per hour, with the half width of its confidence interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Slope {
    per_hour: f64,
    confidence: f64,
    least: f64,
    most: f64,
    samples: usize,
}

impl Slope {
    /// Returns `true` if there are enough samples for a slope with a confidence interval.
    pub(crate) fn is_known(&self) -> bool {
        self.confidence.is_finite()
    }

    /// Returns `true` if the figure grows beyond the confidence of its slope.
    pub(crate) fn grows(&self) -> bool {
        self.per_hour > self.confidence
    }
}

/// Returns the slope of each figure over all ranks. Each process has its own level, and one slope holds for all of them.
pub(crate) fn slopes(folder: &Path, ranks: usize) -> Vec<(&'static str, Slope)> {
    let mut processes: BTreeMap<u32, Vec<Sample>> = BTreeMap::new();
    for sample in (0..ranks).flat_map(|rank| read(folder, rank)) {
        processes.entry(sample.process).or_default().push(sample);
    }
    let settled: Vec<Vec<Sample>> = processes.into_values().map(after_start).filter(|it| it.len() > 1).collect();
    let slope_of = |figure: usize| {
        let points = |samples: &Vec<Sample>| -> Vec<(f64, f64)> {
            samples.iter().map(|sample| (sample.seconds / 3600.0, sample.figures[figure])).collect()
        };
        slope(&settled.iter().map(points).collect::<Vec<_>>())
    };
    FIGURES.iter().enumerate().map(|(index, name)| (*name, slope_of(index))).collect()
}

fn read(folder: &Path, rank: usize) -> Vec<Sample> {
    let text = fs::read_to_string(file(folder, "samples", rank)).unwrap_or_default();
    let parse = |line: &str| {
        let numbers: Vec<f64> = line.split(' ').map(|word| word.parse().expect("a number")).collect();
        let figures = numbers[2..].try_into().expect("all figures");
        Sample { process: numbers[0] as u32, seconds: numbers[1], figures }
    };
    text.lines().map(parse).collect()
}

fn after_start(samples: Vec<Sample>) -> Vec<Sample> {
    let begun = samples[0].seconds;
    samples.into_iter().filter(|sample| sample.seconds >= begun + WARM_UP_SECONDS).collect()
}

/// Returns the common least-squares slope of several series, each of which has its own level.
fn slope(series: &[Vec<(f64, f64)>]) -> Slope {
    let (mut squares, mut products, mut variance, mut samples) = (0.0, 0.0, 0.0, 0);
    let (mut least, mut most) = (f64::INFINITY, f64::NEG_INFINITY);
    for points in series {
        let count = points.len() as f64;
        let x = points.iter().map(|point| point.0).sum::<f64>() / count;
        let y = points.iter().map(|point| point.1).sum::<f64>() / count;
        for point in points {
            squares += (point.0 - x).powi(2);
            products += (point.0 - x) * (point.1 - y);
            variance += (point.1 - y).powi(2);
            least = least.min(point.1);
            most = most.max(point.1);
        }
        samples += points.len();
    }
    let per_hour = if squares > 0.0 { products / squares } else { 0.0 };
    // One degree of freedom for the slope, and one for each level.
    let freedom = samples as f64 - series.len() as f64 - 1.0;
    let rest = (variance - per_hour * products).max(0.0);
    let error = if freedom > 0.0 && squares > 0.0 { (rest / freedom / squares).sqrt() } else { f64::INFINITY };
    Slope { per_hour, confidence: CONFIDENCE * error, least, most, samples }
}

impl std::fmt::Display for Slope {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Slope { per_hour, confidence, least, most, samples } = self;
        write!(f, "{least} to {most}, {per_hour:+.2} ± {confidence:.2} per hour ({samples} samples)")
    }
}

#[test]
fn a_slope_is_that_of_each_series_and_not_of_their_levels() {
    let rising = |level: f64| (0..20).map(|x| (f64::from(x), level + 3.0 * f64::from(x))).collect::<Vec<_>>();
    let found = slope(&[rising(100.0), rising(0.0)]);
    assert!((found.per_hour - 3.0).abs() < 1e-9 && found.grows(), "{found:?}");
    let noisy = |level: f64| (0..20).map(|x| (f64::from(x), level + f64::from(x % 2))).collect::<Vec<_>>();
    assert!(!slope(&[noisy(0.0), noisy(50.0)]).grows());
    assert!(!slope(&[vec![(0.0, 5.0), (1.0, 5.0), (2.0, 5.0)]]).grows(), "a constant does not grow");
    assert!(found.is_known() && !slope(&[]).is_known() && !slope(&[vec![(0.0, 5.0), (1.0, 6.0)]]).is_known());
}
