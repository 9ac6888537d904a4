//! `--check`: a comparison of the calls and placements of the ranks of a run.

use super::summary::{PoolDigest, Summaries, Summary};
use crate::diff::Diff;
use crate::error::CliError;
use crate::output;
use symmalloc_import::{ReadOptions, read_path};

/// Compares every rank with the first one and prints the result. Returns `true` if any rank differs.
pub(super) fn print_comparison(summaries: &Summaries, is_watched: bool) -> Result<bool, CliError> {
    let ranks = summaries.by_rank();
    if ranks.len() + summaries.killed.iter().filter(|begun| begun.rank.is_some()).count() < 2 {
        return Err(CliError::NothingToCheck { ranks: ranks.len() });
    }
    let (mut lines, mut differ) = (Vec::new(), Vec::new());
    let mut others = ranks.iter();
    let Some((first_rank, first)) = others.next() else { return Err(CliError::NothingToCheck { ranks: 0 }) };
    for (rank, summary) in others {
        let difference =
            if is_watched { differs_by_traces(first, summary)? } else { differs_by_digests(first, summary) };
        if let Some(difference) = difference {
            lines.push(format!("rank {rank} differs from rank {first_rank}: {difference}"));
            differ.push(*rank);
        }
    }
    if !summaries.killed.is_empty() {
        lines.push("a process was killed and is not compared".to_owned());
    }
    if differ.is_empty() {
        let digests = first.devices.iter().flat_map(|device| &device.digests);
        let digests: Vec<String> = digests.map(|PoolDigest { pool, digest, .. }| format!("p{pool} {digest}")).collect();
        let what =
            if is_watched { "the same calls".to_owned() } else { format!("digests are equal: {}", digests.join(", ")) };
        lines.push(format!("{} ranks, {what}", ranks.len()));
    }
    output::write_stderr(&lines.iter().map(|line| format!("symmalloc: {line}\n")).collect::<String>());
    Ok(!differ.is_empty())
}

/// Compares digests, which are exact. If they differ, the traces, if there are any, identify the op.
fn differs_by_digests(a: &Summary, b: &Summary) -> Option<String> {
    let digests =
        |of: &Summary| -> Vec<Vec<PoolDigest>> { of.devices.iter().map(|device| device.digests.clone()).collect() };
    let (ours, theirs) = (digests(a), digests(b));
    if ours == theirs {
        return None;
    }
    let ops = |digests: &[Vec<PoolDigest>]| digests.iter().flatten().map(|digest| digest.ops).sum::<u64>();
    let named = differs_by_traces(a, b).ok().flatten();
    Some(named.unwrap_or_else(|| {
        let (ours, theirs) = (ops(&ours), ops(&theirs));
        format!("{theirs} ops instead of {ours}; add --serve --record FILE to find the first difference")
    }))
}

fn differs_by_traces(a: &Summary, b: &Summary) -> Result<Option<String>, CliError> {
    if a.devices.len() != b.devices.len() {
        return Ok(Some(format!("{} devices instead of {}", b.devices.len(), a.devices.len())));
    }
    for (one, other) in a.devices.iter().zip(&b.devices) {
        let (Some(one), Some(other)) = (&one.trace, &other.trace) else { continue };
        let options = ReadOptions::default();
        let diff = Diff::new(&read_path(one, &options)?, &read_path(other, &options)?);
        if let Some(difference) = &diff.first_op {
            let describe = |op: &Option<(usize, _)>| {
                op.as_ref().map_or("the end".to_owned(), |(number, op)| format!("op {number} {op:?}"))
            };
            return Ok(Some(format!("{} instead of {}", describe(&difference.b), describe(&difference.a))));
        }
        if let Some(place) = &diff.first {
            return Ok(Some(format!("allocation {} at op {} has a different placement", place.allocation, place.op)));
        }
    }
    Ok(None)
}
