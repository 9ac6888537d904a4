//! A comparison of the flight records of all ranks: missing ranks, collectives that differ between ranks, and ranks that are behind.

use crate::flight_record::{CollectiveRecord, CollectiveState, CommunicatorRecord, FlightRecord, Signature};
use crate::ids::CommunicatorId;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::hash::Hash;

/// Maximum number of missing ranks that are listed, over all communicators. No real job has this many. The bound prevents a corrupt file
/// from exhausting memory.
const MISSING_MAX: usize = 1 << 20;

/// The findings about each communicator, in ascending order of their ids.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// Id, name and findings of each communicator.
    pub communicators: Vec<(CommunicatorId, String, Vec<Finding>)>,
}

/// A finding about one communicator, from the records of its ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "finding", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Finding {
    /// Ranks without a record. They ended before they could write one, or their files were not passed.
    NoRecord {
        /// The ranks.
        ranks: Vec<u32>,
    },
    /// Two records are from the same rank: the rank wrote several, or the files are from different runs.
    RankTwice {
        /// The rank.
        rank: u32,
    },
    /// The records disagree on the number of ranks.
    RanksDiffer {
        /// Each number of ranks, with the ranks whose records state it.
        said: Vec<(u32, Vec<u32>)>,
    },
    /// The first collective that differs between ranks.
    Differs {
        /// The number of the collective.
        number: u64,
        /// Each call, with the ranks that made it.
        calls: Vec<(Signature, Vec<u32>)>,
    },
    /// The ranks that are furthest behind: they did not submit a collective that others submitted. Ranks that are less far behind may only
    /// be waiting for these.
    Behind {
        /// Number of the first collective that these ranks did not submit: one more than their last.
        number: u64,
        /// The collective as the other ranks recorded it; `None` if their records no longer contain it.
        signature: Option<Signature>,
        /// The ranks.
        ranks: Vec<u32>,
    },
    /// A collective that every rank with a record submitted and that some have not finished.
    Unfinished {
        /// The number of the collective.
        number: u64,
        /// The collective.
        signature: Signature,
        /// Each state of the collective, with the ranks that are in that state.
        states: Vec<(CollectiveState, Vec<u32>)>,
    },
    /// A send or receive that has not finished, although all collectives have. The other ranks may not have made this call.
    UnfinishedTransfer {
        /// The rank that called it.
        rank: u32,
        /// The call.
        signature: Signature,
        /// The state of the call on that rank.
        state: CollectiveState,
    },
    /// Every rank with a record submitted the same collectives, and all have finished.
    Even {
        /// Number of collectives.
        submitted: u64,
    },
}

impl Findings {
    /// Compares the records of the processes of a job.
    pub fn new(records: &[FlightRecord]) -> Self {
        let mut by_id: BTreeMap<CommunicatorId, Vec<&CommunicatorRecord>> = BTreeMap::new();
        for communicator in records.iter().flat_map(|record| &record.communicators) {
            by_id.entry(communicator.id).or_default().push(communicator);
        }
        let mut listable = MISSING_MAX;
        let found =
            by_id.into_iter().map(|(id, records)| (id, records[0].name.clone(), compare(&records, &mut listable)));
        Findings { communicators: found.collect() }
    }

    /// Returns `true` if ranks are missing, differ or are behind, or if a call is unfinished.
    pub fn is_trouble(&self) -> bool {
        let findings = self.communicators.iter().flat_map(|(_, _, findings)| findings);
        findings.into_iter().any(|finding| !matches!(finding, Finding::Even { .. }))
    }
}

impl CommunicatorRecord {
    /// Returns the call that this rank waits for: its first unfinished call, including sends and receives. Captured calls do not count:
    /// they run when their graph runs, and block nothing until then.
    pub fn first_unfinished(&self) -> Option<&CollectiveRecord> {
        self.unfinished().next()
    }

    fn unfinished(&self) -> impl Iterator<Item = &CollectiveRecord> {
        let is_done = |state| matches!(state, CollectiveState::Finished | CollectiveState::Captured);
        self.collectives.iter().filter(move |collective| !is_done(collective.state))
    }
}

/// Compares the records of one communicator. `listable` is the number of ranks that may still be listed as missing.
fn compare(records: &[&CommunicatorRecord], listable: &mut usize) -> Vec<Finding> {
    let mut found = Vec::new();
    let ranks = records[0].ranks;
    if records.iter().any(|record| record.ranks != ranks) {
        found.push(Finding::RanksDiffer { said: grouped(records.iter().map(|record| (record.ranks, record.rank))) });
    }
    let mut seen = BTreeSet::new();
    if let Some(twice) = records.iter().find(|record| !seen.insert(record.rank)) {
        found.push(Finding::RankTwice { rank: twice.rank });
        return found;
    }
    let missing: Vec<u32> = (0..ranks).filter(|rank| !seen.contains(rank)).take(*listable).collect();
    *listable -= missing.len();
    if !missing.is_empty() {
        found.push(Finding::NoRecord { ranks: missing });
    }
    let submitted = || records.iter().map(|record| record.progress.submitted);
    let (least, most) = (submitted().min().unwrap_or(0), submitted().max().unwrap_or(0));
    let difference = first_difference(records);
    // If calls differ, compare the progress before the difference, because the difference itself may hold ranks back.
    let alike = difference.as_ref().map_or(most, |(number, _)| number.saturating_sub(1));
    if least < alike {
        found.push(furthest_behind(records, least));
    }
    match difference {
        Some((number, calls)) => found.push(Finding::Differs { number, calls }),
        None if least == most => found.push(unfinished(records).unwrap_or(Finding::Even { submitted: most })),
        None => {}
    }
    found
}

/// Returns the collectives of a record, without sends and receives.
fn collectives(record: &CommunicatorRecord) -> impl Iterator<Item = &CollectiveRecord> {
    record.collectives.iter().filter(|collective| !collective.is_point_to_point)
}

/// Each distinct call, with the ranks that made it.
type Calls = Vec<(Signature, Vec<u32>)>;

/// Returns the first collective that differs between ranks, among those that at least two records still contain.
fn first_difference(records: &[&CommunicatorRecord]) -> Option<(u64, Calls)> {
    let mut calls: BTreeMap<u64, Vec<(&Signature, u32)>> = BTreeMap::new();
    for record in records {
        for collective in collectives(record) {
            calls.entry(collective.number).or_default().push((&collective.signature, record.rank));
        }
    }
    let (number, calls) = calls.into_iter().find(|(_, calls)| calls.iter().any(|call| call.0 != calls[0].0))?;
    Some((number, grouped(calls).into_iter().map(|(signature, ranks)| (signature.clone(), ranks)).collect()))
}

/// Returns the finding about the ranks whose last collective is `last`.
fn furthest_behind(records: &[&CommunicatorRecord], last: u64) -> Finding {
    let number = last + 1;
    let submitted = records.iter().flat_map(|record| collectives(record));
    let signature = submitted.into_iter().find(|it| it.number == number).map(|it| it.signature.clone());
    let behind = records.iter().filter(|record| record.progress.submitted == last);
    let mut ranks: Vec<u32> = behind.map(|record| record.rank).collect();
    ranks.sort_unstable();
    Finding::Behind { number, signature, ranks }
}

/// Returns the first unfinished collective, or the first unfinished send or receive if there is none.
fn unfinished(records: &[&CommunicatorRecord]) -> Option<Finding> {
    let open = || records.iter().flat_map(|record| record.unfinished().map(|it| (it, record.rank)));
    let (first, rank) = open().min_by_key(|(it, rank)| (it.is_point_to_point, it.number, *rank))?;
    let (number, signature) = (first.number, first.signature.clone());
    if first.is_point_to_point {
        return Some(Finding::UnfinishedTransfer { rank, signature, state: first.state });
    }
    let there = open().filter(|(it, _)| !it.is_point_to_point && it.number == number);
    Some(Finding::Unfinished { number, signature, states: grouped(there.map(|(it, rank)| (it.state, rank))) })
}

/// Groups ranks by value, in the order of each group's first rank. Linear in the number of ranks, except for sorting.
fn grouped<T: Copy + Eq + Hash>(said: impl IntoIterator<Item = (T, u32)>) -> Vec<(T, Vec<u32>)> {
    let mut groups: Vec<(T, Vec<u32>)> = Vec::new();
    // The map is never iterated, so its hash order has no effect.
    let mut group_of: HashMap<T, usize> = HashMap::new();
    for (what, rank) in said {
        let group = *group_of.entry(what).or_insert_with(|| {
            groups.push((what, Vec::new()));
            groups.len() - 1
        });
        groups[group].1.push(rank);
    }
    groups.iter_mut().for_each(|(_, ranks)| ranks.sort_unstable());
    groups.sort_by_key(|(_, ranks)| ranks[0]);
    groups
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Finding::NoRecord { ranks } => {
                let files = if ranks.len() == 1 { "its file was" } else { "their files were" };
                write!(f, "{} left no record, or {files} not given", named(ranks))
            }
            Finding::RankTwice { rank } => write!(f, "rank {rank} has two records: pass one per rank, from one run"),
            Finding::RanksDiffer { said } => {
                let said = said.iter().map(|(number, ranks)| format!("{number} on {}", named(ranks)));
                write!(f, "the records disagree on the number of ranks: {}", listed(said, "; "))
            }
            Finding::Differs { number, calls } => {
                let calls = calls.iter().map(|(signature, ranks)| format!("{} called {signature}", named(ranks)));
                write!(f, "collective {number} is the first that differs: {}", listed(calls, "; "))
            }
            Finding::Behind { number, signature, ranks } => {
                let what = signature.as_ref().map_or_else(String::new, |signature| format!(" ({signature})"));
                write!(f, "{} did not reach collective {number}{what}, which others submitted", named(ranks))
            }
            Finding::Unfinished { number, signature, states } => {
                let states = states.iter().map(|(state, ranks)| format!("{state} on {}", named(ranks)));
                let states = listed(states, "; ");
                write!(
                    f,
                    "all ranks with a record reached collective {number} ({signature}), which has not finished: {states}"
                )
            }
            Finding::UnfinishedTransfer { rank, signature, state } => {
                write!(f, "all collectives have finished, but {signature} has not: {state} on rank {rank}")
            }
            Finding::Even { submitted: 0 } => f.write_str("no rank with a record submitted a collective"),
            Finding::Even { submitted } => {
                let plural = if *submitted == 1 { "" } else { "s" };
                write!(f, "all ranks with a record submitted the same {submitted} collective{plural}, all done")
            }
        }
    }
}

/// Formats ranks as "rank 3" or "ranks 0, 1, 4".
fn named(ranks: &[u32]) -> String {
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", listed(ranks.iter().map(u32::to_string), ", "))
}

/// Joins at most 16 items and counts the rest, so that the list stays readable.
fn listed(items: impl ExactSizeIterator<Item = String>, separator: &str) -> String {
    const SHOWN: usize = 16;
    let more = items.len().saturating_sub(SHOWN);
    let mut list = items.take(SHOWN).collect::<Vec<_>>().join(separator);
    if more > 0 {
        list += &format!(" and {more} more");
    }
    list
}
