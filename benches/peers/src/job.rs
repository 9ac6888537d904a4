//! The recorded jobs, as files that the programs of all peers read.
//!
//! ```text
//! a 4096 0      allocation 0: 4096 bytes for work on stream 0
//! a 512 2       allocation 1
//! u 1 0         stream 0 also uses allocation 1
//! f 0           allocation 0 is freed
//! f 1
//! ```
//!
//! A job frees everything that it allocates, so that it can be repeated. Requests for zero bytes are replaced by one
//! byte, which every peer supports. A job with uses by other streams has an additional file (`..._uses`), because not
//! every peer supports them.
//!
//! The measured programs store live allocations in an array of slots, called places. A new allocation gets the most
//! recently vacated place, so the array stays as small as the number of live allocations: see [`Script`].

use crate::report::Report;
use std::error::Error;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use symmalloc_core::op::Op;
use symmalloc_harness::jobs;

/// The jobs of the comparison. Of the two distributed jobs, only one rank is used; the other makes the same calls.
const JOBS: [&str; 7] = [
    "gpt2_train_varlen",
    "moe_train",
    "resnet50_multiscale",
    "llama_generate",
    "fsdp_train_rank0",
    "fsdp1_train_rank0",
    "gnn_sampled",
];

/// One op. Allocations are numbered in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Allocate { number: usize, stream: usize, size_bytes: u64 },
    Free { number: usize, stream: usize },
    Use { number: usize, stream: usize },
}

/// A job that leaves nothing allocated.
#[derive(Clone, Debug, Default)]
pub(crate) struct Job {
    pub(crate) name: String,
    pub(crate) steps: Vec<Step>,
    /// Stream and size in bytes of each allocation.
    allocations: Vec<(usize, u64)>,
}

/// An invalid line in a job's file.
#[derive(Debug)]
pub(crate) struct BadLine {
    file: String,
    line: usize,
}

impl std::fmt::Display for BadLine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let BadLine { file, line } = self;
        write!(
            f,
            "{file}, line {line}: expected `a BYTES STREAM`, or `f NUMBER` or `u NUMBER STREAM` of an earlier allocation"
        )
    }
}

impl Error for BadLine {}

/// A job in executable form: steps that refer to the place of each allocation.
#[derive(Clone, Debug)]
pub(crate) struct Script {
    pub(crate) moves: Vec<Move>,
    /// Number of places.
    pub(crate) places: usize,
}

/// One op. It is small, because reading the script is part of the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Move {
    Allocate { stream: u16, place: u32, size_bytes: u64 },
    Free { stream: u16, place: u32 },
    Use { stream: u16, place: u32 },
}

impl Script {
    /// Assigns a place to each allocation: the most recently vacated one, or a new one.
    pub(crate) fn new(job: &Job) -> Self {
        let mut place_of = vec![0; job.allocations.len()];
        let (mut left, mut places) = (Vec::new(), 0);
        let moves = job.steps.iter().map(|step| match *step {
            Step::Allocate { number, stream, size_bytes } => {
                let place = left.pop().unwrap_or_else(|| {
                    places += 1;
                    places - 1
                });
                place_of[number] = place;
                Move::Allocate { stream: stream as u16, place, size_bytes }
            }
            Step::Free { number, stream } => {
                left.push(place_of[number]);
                Move::Free { stream: stream as u16, place: place_of[number] }
            }
            Step::Use { number, stream } => Move::Use { stream: stream as u16, place: place_of[number] },
        });
        Script { moves: moves.collect(), places: places as usize }
    }
}

impl Job {
    fn allocate(&mut self, size_bytes: u64, stream: usize) {
        self.steps.push(Step::Allocate { number: self.allocations.len(), stream, size_bytes });
        self.allocations.push((stream, size_bytes));
    }

    fn free(&mut self, number: usize) -> Option<()> {
        let stream = self.allocations.get(number)?.0;
        self.steps.push(Step::Free { number, stream });
        Some(())
    }

    fn record_use(&mut self, number: usize, stream: usize) -> Option<()> {
        self.allocations.get(number)?;
        self.steps.push(Step::Use { number, stream });
        Some(())
    }

    /// Returns the number of streams.
    pub(crate) fn streams(&self) -> usize {
        let streams = self.steps.iter().map(|step| match *step {
            Step::Allocate { stream, .. } | Step::Free { stream, .. } | Step::Use { stream, .. } => stream + 1,
        });
        streams.max().unwrap_or(1)
    }

    /// Returns the peak of live requested bytes.
    fn live_peak_bytes(&self) -> u64 {
        let (mut live, mut peak) = (0, 0);
        for step in &self.steps {
            match *step {
                Step::Allocate { size_bytes, .. } => live += size_bytes,
                Step::Free { number, .. } => live -= self.allocations[number].1,
                Step::Use { .. } => {}
            }
            peak = peak.max(live);
        }
        peak
    }

    /// Returns the allocations, frees and uses of a recorded job, followed by frees of the remaining allocations.
    fn recorded(name: &str) -> Job {
        let mut job = Job { name: name.to_owned(), ..Job::default() };
        let mut is_live = Vec::new();
        for op in jobs::program(name).ops() {
            match *op {
                Op::Allocate { stream, size_bytes, .. } => {
                    job.allocate(size_bytes.max(1), stream.index());
                    is_live.push(true);
                }
                Op::Free { id } => {
                    job.free(id.0 as usize).expect("only live allocations are freed");
                    is_live[id.0 as usize] = false;
                }
                Op::RecordUse { id, stream } => {
                    job.record_use(id.0 as usize, stream.index()).expect("only live allocations are used");
                }
                _ => {}
            }
        }
        let left = is_live.iter().enumerate().filter_map(|(number, is_live)| is_live.then_some(number));
        left.for_each(|number| job.free(number).expect("made above"));
        job
    }

    /// Returns the job without uses by other streams, or `None` if it has none.
    fn without_uses(&self) -> Option<Job> {
        let is_use = |step: &Step| matches!(step, Step::Use { .. });
        self.steps
            .iter()
            .any(is_use)
            .then(|| Job { steps: self.steps.iter().copied().filter(|step| !is_use(step)).collect(), ..self.clone() })
    }

    fn to_text(&self) -> String {
        let mut text = String::new();
        for step in &self.steps {
            match *step {
                Step::Allocate { stream, size_bytes, .. } => writeln!(text, "a {size_bytes} {stream}"),
                Step::Free { number, .. } => writeln!(text, "f {number}"),
                Step::Use { number, stream } => writeln!(text, "u {number} {stream}"),
            }
            .expect("writing to a string cannot fail");
        }
        text
    }

    /// Reads a job's file.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or a line is invalid.
    fn read(path: &Path) -> Result<Job, Box<dyn Error>> {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Job::from_text(&name, &fs::read_to_string(path)?)?)
    }

    fn from_text(name: &str, text: &str) -> Result<Job, BadLine> {
        let mut job = Job { name: name.to_owned(), ..Job::default() };
        for (index, line) in text.lines().enumerate() {
            job.add(line).ok_or_else(|| BadLine { file: name.to_owned(), line: index + 1 })?;
        }
        Ok(job)
    }

    fn add(&mut self, line: &str) -> Option<()> {
        let mut words = line.split(' ');
        let kind = words.next()?;
        let numbers: Vec<u64> = words.map(str::parse).collect::<Result<_, _>>().ok()?;
        match (kind, numbers.as_slice()) {
            ("a", &[size_bytes, stream]) => {
                self.allocate(size_bytes, stream as usize);
                Some(())
            }
            ("f", &[number]) => self.free(number as usize),
            ("u", &[number, stream]) => self.record_use(number as usize, stream as usize),
            _ => None,
        }
    }

    /// Reads all jobs of a folder, ordered by name.
    ///
    /// # Errors
    /// Returns an error if the folder or a file cannot be read, or a line is invalid.
    pub(crate) fn read_all(folder: &Path) -> Result<Vec<Job>, Box<dyn Error>> {
        let entries = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let mut paths: Vec<_> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_, std::io::Error>>()?;
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "job"));
        paths.sort();
        paths.iter().map(|path| Job::read(path)).collect()
    }
}

/// Writes the recorded jobs to a folder and prints their figures.
///
/// # Errors
/// Returns an error if the folder cannot be written.
pub(crate) fn write_all(folder: &Path, filter: &str) -> Result<(), Box<dyn Error>> {
    fs::create_dir_all(folder)?;
    let report = Report::new("");
    for name in JOBS.into_iter().filter(|name| name.contains(filter)) {
        let recorded = Job::recorded(name);
        let mut jobs = vec![recorded.clone()];
        if let Some(plain) = recorded.without_uses() {
            jobs = vec![plain, Job { name: format!("{name}_uses"), ..recorded }];
        }
        for job in jobs {
            fs::write(folder.join(format!("{}.job", job.name)), job.to_text())?;
            report.figure("ops", &job.name, &[job.steps.len() as f64]);
            report.figure("streams", &job.name, &[job.streams() as f64]);
            report.figure("live_peak_bytes", &job.name, &[job.live_peak_bytes() as f64]);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Job, Move, Script, Step};

    #[test]
    fn a_jobs_text_parses_to_the_same_steps() {
        let job = Job::recorded("fsdp1_train_rank0");
        assert!(job.steps.iter().any(|step| matches!(step, Step::Use { .. })));
        assert_eq!(Job::from_text("again", &job.to_text()).expect("the read should succeed").steps, job.steps);
        let plain = job.without_uses().expect("it has uses");
        assert!(plain.without_uses().is_none());
        assert_eq!(plain.live_peak_bytes(), job.live_peak_bytes());
    }

    #[test]
    fn a_vacated_place_is_reused() {
        let job = Job::from_text("places", "a 1 0\na 2 1\nf 0\na 3 0\nu 2 1\nf 1\nf 2").expect("steps");
        let Script { moves, places } = Script::new(&job);
        let place = |at: usize| match moves[at] {
            Move::Allocate { place, .. } | Move::Free { place, .. } | Move::Use { place, .. } => place,
        };
        assert_eq!((0..moves.len()).map(place).collect::<Vec<_>>(), [0, 1, 0, 0, 0, 1, 0]);
        assert_eq!(places, 2);
        assert_eq!(moves[3], Move::Allocate { stream: 0, place: 0, size_bytes: 3 });
        assert_eq!(size_of::<Move>(), 16);
    }

    #[test]
    fn an_invalid_line_is_named() {
        for (text, line) in [("a 1 0\nx 1", 2), ("f 0", 1), ("a 1 0\nu 1 0", 2), ("a 1", 1), ("a -1 0", 1)] {
            let error = Job::from_text("bad", text).expect_err("no job").to_string();
            assert!(error.starts_with(&format!("bad, line {line}: ")), "{error}");
        }
    }
}
