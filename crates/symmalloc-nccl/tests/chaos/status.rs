//! Files through which the ranks and the test know of each other.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The part of a generation that a rank has reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// It waits for the other ranks.
    Meets,
    /// It has a communicator.
    Runs,
    /// It has destroyed the communicator.
    Ended,
    /// It has reported an error, and waits until the test publishes the next generation.
    Failed,
}

/// The state of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Status {
    pub(crate) phase: Phase,
    pub(crate) generation: u64,
    pub(crate) round: u64,
    /// Number of generations whose recording and layout were written and read again.
    pub(crate) recorded: u64,
    /// Number of generations whose recording or layout could not be written.
    pub(crate) unrecorded: u64,
    /// Number of requests that the full device refused.
    pub(crate) refused: u64,
    /// Number of driver calls that failed by chance.
    pub(crate) faults: u64,
    /// Number of jumps of the time of day.
    pub(crate) clock_jumps: u64,
}

impl Status {
    pub(crate) fn new(generation: u64) -> Self {
        Status {
            phase: Phase::Meets,
            generation,
            round: 0,
            recorded: 0,
            unrecorded: 0,
            refused: 0,
            faults: 0,
            clock_jumps: 0,
        }
    }

    pub(crate) fn write(&self, folder: &Path, rank: usize) {
        let Status { phase, generation, round, recorded, unrecorded, refused, faults, clock_jumps } = *self;
        let phase = phase as u64;
        let text = format!("{phase} {generation} {round} {recorded} {unrecorded} {refused} {faults} {clock_jumps}");
        replace(&file(folder, "status", rank), &text);
    }

    /// Returns the state of a rank; `None` before its first one.
    pub(crate) fn read(folder: &Path, rank: usize) -> Option<Self> {
        let text = fs::read_to_string(file(folder, "status", rank)).ok()?;
        let numbers: Vec<u64> = text.split(' ').map(|word| word.parse().expect("a number")).collect();
        let [phase, generation, round, recorded, unrecorded, refused, faults, clock_jumps] = numbers[..] else {
            panic!("{text}");
        };
        let phase = [Phase::Meets, Phase::Runs, Phase::Ended, Phase::Failed][phase as usize];
        Some(Status { phase, generation, round, recorded, unrecorded, refused, faults, clock_jumps })
    }
}

/// An order of the test to a rank, which the rank executes before its next round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Fill the device until the generation ends.
    FillDevice,
    /// Move the time of day by this number of seconds.
    MoveClock(i64),
    /// Arrive late at the next two meetings, so that the other ranks listen for longer.
    ArriveLate,
    /// Make driver calls fail by chance, with this seed, until one has failed.
    FailCalls(u64),
}

impl Order {
    pub(crate) fn give(self, folder: &Path, rank: usize) {
        let text = match self {
            Order::FillDevice => "fill 0".to_owned(),
            Order::ArriveLate => "late 0".to_owned(),
            Order::MoveClock(seconds) => format!("clock {seconds}"),
            Order::FailCalls(seed) => format!("fail {seed}"),
        };
        replace(&file(folder, "order", rank), &text);
    }

    /// Takes the order of this rank, if there is one.
    pub(crate) fn take(folder: &Path, rank: usize) -> Option<Self> {
        let path = file(folder, "order", rank);
        let text = fs::read_to_string(&path).ok()?;
        fs::remove_file(path).expect("the folder is writable");
        let (word, number) = text.split_once(' ').expect("two words");
        Some(match word {
            "fill" => Order::FillDevice,
            "late" => Order::ArriveLate,
            "clock" => Order::MoveClock(number.parse().expect("seconds")),
            "fail" => Order::FailCalls(number.parse().expect("a seed")),
            other => panic!("{other}"),
        })
    }
}

/// Returns a rank's file.
pub(crate) fn file(folder: &Path, name: &str, rank: usize) -> PathBuf {
    folder.join(format!("{name}.{rank}"))
}

/// Returns the content of a file as a number; `None` if there is no file.
pub(crate) fn read_number<T: FromStr>(path: &Path) -> Option<T> {
    fs::read_to_string(path).ok()?.parse().ok()
}

/// Replaces a file, which readers see whole.
pub(crate) fn replace(path: &Path, text: &str) {
    let draft = path.with_file_name(format!(".{}", path.file_name().expect("the path names a file").to_string_lossy()));
    fs::write(&draft, text).expect("the folder is writable");
    fs::rename(draft, path).expect("the folder is writable");
}

/// Adds a line to a file.
pub(crate) fn add_line(path: &Path, line: &str) {
    let file = fs::File::options().create(true).append(true).open(path);
    file.expect("the folder is writable").write_all(format!("{line}\n").as_bytes()).expect("the folder is writable");
}
