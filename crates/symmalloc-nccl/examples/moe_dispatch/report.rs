//! A rank's results, as a line of a table.

use super::WARM_UP_STEPS;
use std::fmt;
use std::time::Duration;
use symmalloc_cuda::DriverError;
use symmalloc_nccl::{Communicator, Registrar, Splits};

/// Durations of the parts of all steps.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Times {
    pub(crate) exchanges: u64,
    pub(crate) exchange: Duration,
    pub(crate) dispatch: Duration,
    pub(crate) combine: Duration,
}

/// Resources of a rank that must not grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Holdings {
    registrations: u64,
    deregistrations: u64,
    /// Free bytes of the device.
    device_bytes: u64,
    /// Open file descriptors of the process.
    files: u64,
}

impl Holdings {
    /// Returns the resources of a rank's device and registrar, and of this process.
    pub(crate) fn now(comm: &Communicator, registrar: &Registrar) -> Result<Self, DriverError> {
        let stats = registrar.stats();
        Ok(Holdings {
            registrations: stats.registrations,
            deregistrations: stats.deregistrations,
            device_bytes: comm.device().memory_info()?.free_bytes,
            files: open_files(),
        })
    }

    /// Returns the growth since `before`.
    pub(crate) fn since(self, before: Holdings) -> Growth {
        Growth {
            registrations: self.registrations - before.registrations,
            deregistrations: self.deregistrations - before.deregistrations,
            device_bytes: before.device_bytes as i64 - self.device_bytes as i64,
            files: self.files as i64 - before.files as i64,
        }
    }
}

/// Returns the number of open files of this process, except directories under `/proc` that another rank's thread may be reading.
fn open_files() -> u64 {
    let files = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    files.filter_map(|file| std::fs::read_link(file.path()).ok()).filter(|to| !to.starts_with("/proc")).count() as u64
}

/// Returns the resident memory of this process in bytes.
pub(crate) fn resident_bytes() -> i64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<i64>().ok()).map_or(0, |pages| pages * 4096)
}

/// Growth after the warm-up, expected to be zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Growth {
    registrations: u64,
    deregistrations: u64,
    device_bytes: i64,
    files: i64,
}

/// A rank's results after the warm-up.
#[derive(Clone, Debug)]
pub struct Report {
    rank: u32,
    ranks: u32,
    library: String,
    steps: u64,
    rows_sent: u64,
    rows_received: u64,
    fewest_rows: u64,
    most_rows: u64,
    bytes: u64,
    /// Rows that were wrong, at any step.
    pub wrong_rows: u64,
    pub(crate) times: Times,
    pub(crate) grown: Growth,
    /// Growth of the process's resident memory in bytes. Reported but not checked: the host's allocator keeps memory that this program
    /// frees.
    pub(crate) resident_bytes: i64,
}

impl Report {
    pub(crate) fn new(comm: &Communicator) -> Self {
        Report {
            rank: comm.rank(),
            ranks: comm.ranks(),
            library: format!("NCCL {} at {}", comm.nccl().version(), comm.nccl().path().display()),
            steps: 0,
            rows_sent: 0,
            rows_received: 0,
            fewest_rows: u64::MAX,
            most_rows: 0,
            bytes: 0,
            wrong_rows: 0,
            times: Times::default(),
            grown: Growth::default(),
            resident_bytes: 0,
        }
    }

    pub(crate) fn count(&mut self, splits: &Splits, hidden: usize) {
        let received = splits.output().total();
        self.steps += 1;
        self.rows_sent += splits.input().total();
        self.rows_received += received;
        self.fewest_rows = self.fewest_rows.min(received);
        self.most_rows = self.most_rows.max(received);
        // The rows are sent in both directions.
        self.bytes += 2 * splits.input().total() * (hidden * size_of::<f32>()) as u64;
    }

    /// Returns `true` if every row was correct and nothing was registered or grew after the warm-up.
    pub fn is_right(&self) -> bool {
        self.wrong_rows == 0 && self.grown == Growth::default()
    }
}

/// The head of the table: the work of a rank, durations, growth after the warm-up, and wrong rows.
const HEAD: [[&str; COLUMNS]; 2] = [
    [
        "",
        "",
        "tokens",
        "rows of its experts",
        "MiB",
        "exchange",
        "dispatch",
        "combine",
        "more",
        "device",
        "open",
        "host",
        "wrong",
    ],
    [
        "rank",
        "steps",
        "sent",
        "mean (range)",
        "moved",
        "us each",
        "us each",
        "us each",
        "registered",
        "bytes",
        "files",
        "KiB",
        "rows",
    ],
];
const COLUMNS: usize = 13;
const WIDTHS: [usize; COLUMNS] = [4, 6, 9, 24, 7, 9, 9, 9, 10, 7, 6, 6, 6];

fn line(cells: &[impl AsRef<str>; COLUMNS]) -> String {
    let cells: Vec<String> =
        cells.iter().zip(WIDTHS).map(|(cell, width)| format!("{:>width$}", cell.as_ref())).collect();
    cells.join(" ")
}

/// The reports of this process's ranks.
pub struct Table<'a>(pub &'a [Report]);

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // With one rank per process, only rank 0 writes the head.
        if let Some(first) = self.0.first().filter(|report| report.rank == 0) {
            writeln!(f, "{} ranks, {}; after {WARM_UP_STEPS} steps of warm-up:", first.ranks, first.library)?;
            HEAD.into_iter().try_for_each(|cells| writeln!(f, "{}", line(&cells)))?;
        }
        self.0.iter().try_for_each(|report| writeln!(f, "{report}"))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { steps, times, grown, .. } = self;
        let per = |time: Duration, times: u64| format!("{:.1}", time.as_secs_f64() * 1e6 / times.max(1) as f64);
        let cells = [
            self.rank.to_string(),
            steps.to_string(),
            self.rows_sent.to_string(),
            format!("{} ({} to {})", self.rows_received / steps.max(&1), self.fewest_rows, self.most_rows),
            (self.bytes >> 20).to_string(),
            per(times.exchange, times.exchanges),
            per(times.dispatch, *steps),
            per(times.combine, *steps),
            (grown.registrations + grown.deregistrations).to_string(),
            grown.device_bytes.to_string(),
            grown.files.to_string(),
            (self.resident_bytes >> 10).to_string(),
            self.wrong_rows.to_string(),
        ];
        f.write_str(&line(&cells))
    }
}
