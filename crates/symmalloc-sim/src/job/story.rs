//! Stories: a story is a failing plan, written as a trace that starts with a description of the failure.
//!
//! `symmalloc replay` and every test can run a story, because it is an ordinary trace. Comments hold the information
//! that the trace format cannot express: lines that begin with `#!` contain the seed, the granularity, the ranks with
//! their contexts, and the threads. `symmalloc simulate` reads these lines, so the file alone reproduces the failure.
//!
//! ```text
//! symmalloc-trace 1
//! config segments:expandable
//! # seed 7, rank 3, step 1 (`f 0`): the digest of the heap of p0 s0 differs
//! #! seed:7 granularity:2097152
//! #! rank:0 schedule:program
//! #! rank:3 schedule:program keeps:0
//! #! threads 0 0 0
//! stream s0
//! a 0 1048576 s0
//! f 0
//! end 3
//! ```

use crate::job::context::{BadContext, RankContext};
use crate::job::failure::Failure;
use crate::job::plan::JobPlan;
use crate::job::steps::JobStep;
use std::fmt::Write;
use std::num::NonZeroU32;
use symmalloc_core::Record;
use symmalloc_trace::{Trace, TraceError, TraceWriteError};

/// The prefix of lines that only the simulator interprets.
const MARK: &str = "#! ";
/// Maximum number of ranks of a story (`RANKS_MAX`), and of its steps over all ranks (`STEPS_MAX`). A rank takes about
/// 140 KB, and more with each step.
const RANKS_MAX: usize = 4096;
const STEPS_MAX: usize = 10_000_000;
/// Number of threads per line.
const THREADS_PER_LINE: usize = 1000;

/// Writes the story of a failing plan. The story begins with `comment`.
///
/// # Errors
/// Returns an error if the steps of the plan contradict each other.
pub fn write(plan: &JobPlan, failure: &Failure, comment: &str) -> Result<String, TraceWriteError> {
    let record = |step: &JobStep| {
        let mut record = Record::from(step.op.clone());
        record.name.clone_from(&step.name);
        record
    };
    let trace = Trace::new(Some(plan.config.clone()), plan.steps.iter().map(record).collect())?.to_text();
    let mut story = String::new();
    let mut lines = trace.lines();
    // The first two lines are the version and the configuration.
    lines.by_ref().take(2).for_each(|line| add(&mut story, format_args!("{line}")));
    comment.lines().for_each(|line| add(&mut story, format_args!("# {line}")));
    add(&mut story, format_args!("#"));
    failure.to_string().lines().for_each(|line| add(&mut story, format_args!("# {line}")));
    add(&mut story, format_args!("#"));
    add(&mut story, format_args!("{MARK}seed:{} granularity:{}", plan.seed, plan.granularity_bytes));
    plan.ranks.iter().for_each(|rank| add(&mut story, format_args!("{MARK}{rank}")));
    for steps in plan.steps.chunks(THREADS_PER_LINE) {
        let threads: String = steps.iter().map(|step| format!(" {}", step.thread)).collect();
        add(&mut story, format_args!("{MARK}threads{threads}"));
    }
    lines.for_each(|line| add(&mut story, format_args!("{line}")));
    Ok(story)
}

fn add(story: &mut String, line: std::fmt::Arguments<'_>) {
    // A trailing blank would only clutter a diff.
    story.push_str(line.to_string().trim_end());
    let _ = story.write_char('\n');
}

/// Reads the plan of a story. Returns `None` for a trace that is not a story.
///
/// # Errors
/// Returns an error if the text is not a valid trace, or if a simulator line is invalid.
pub fn read(text: &str) -> Result<Option<JobPlan>, StoryError> {
    let marked = || text.lines().zip(1_usize..).filter_map(|(line, number)| Some((line.strip_prefix(MARK)?, number)));
    if marked().next().is_none() {
        return Ok(None);
    }
    let (config, records) = Trace::parse(text)?.into_parts();
    let mut plan = JobPlan::of_records(config.unwrap_or_default(), records, 0, NonZeroU32::MIN);
    plan.ranks.clear();
    plan.steps.iter_mut().for_each(|step| step.thread = 0);
    let mut threads = Vec::new();
    for (line, number) in marked() {
        let bad = |word: &str| StoryError::Word { line: number, word: word.into() };
        if let Some(numbers) = line.strip_prefix("threads") {
            for word in numbers.split_ascii_whitespace() {
                threads.push(word.parse::<u8>().ok().filter(|thread| *thread < 128).ok_or_else(|| bad(word))?);
            }
        } else if line.starts_with("seed:") {
            for word in line.split_ascii_whitespace() {
                let (key, value) = word.split_once(':').ok_or_else(|| bad(word))?;
                let value: u64 = value.parse().map_err(|_| bad(word))?;
                match key {
                    "seed" => plan.seed = value,
                    "granularity" if value.is_power_of_two() && (512..=1 << 30).contains(&value) => {
                        plan.granularity_bytes = value;
                    }
                    _ => return Err(bad(word)),
                }
            }
        } else {
            let rank = line.parse::<RankContext>().map_err(|BadContext { word }| bad(&word))?;
            plan.ranks.push(rank);
        }
    }
    let (ranks, steps) = (plan.ranks.len(), plan.steps.len());
    if ranks > RANKS_MAX || ranks.saturating_mul(steps) > STEPS_MAX {
        return Err(StoryError::Size { ranks, steps });
    }
    if plan.reference().is_none() {
        return Err(StoryError::NoReference);
    }
    if threads.len() > plan.steps.len() {
        return Err(StoryError::Threads { threads: threads.len(), steps: plan.steps.len() });
    }
    plan.steps.iter_mut().zip(threads).for_each(|(step, thread)| step.thread = thread);
    Ok(Some(plan))
}

/// An error from reading a story.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoryError {
    /// The text is not a valid trace.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A simulator line contains an invalid word.
    #[error("line {line}: invalid simulator word `{word}`: use the words that `symmalloc simulate` writes")]
    Word {
        /// The line number, counted from 1.
        line: usize,
        /// The word.
        word: Box<str>,
    },
    /// The story would take more memory than any saved failure needs.
    #[error(
        "the story has {steps} steps on {ranks} ranks; at most {RANKS_MAX} ranks and {STEPS_MAX} steps over all ranks are allowed: run the \
         trace with `simulate --ranks`"
    )]
    Size {
        /// Number of ranks.
        ranks: usize,
        /// Number of steps in the trace.
        steps: usize,
    },
    /// No rank of the story can be the reference: every rank has faults, restarts or does private work under a limit.
    #[error("the story has no reference rank: add one without faults, restart or private work")]
    NoReference,
    /// The story assigns threads to more steps than it has.
    #[error("the story assigns threads to {threads} steps but has {steps}: remove the excess threads")]
    Threads {
        /// Number of threads assigned.
        threads: usize,
        /// Number of steps in the trace.
        steps: usize,
    },
}
