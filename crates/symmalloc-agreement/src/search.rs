//! The search for the first op that differs, in up to [`SEARCHES_MAX`] heaps at once.
//!
//! Histories that differ after n ops also differ after every larger number of ops, so bisection finds the first
//! difference. Each round cuts the interval into as many parts as fit into a message: 97 with one heap, 7 with 16
//! heaps. If the journals do not reach back far enough, their checkpoints bound the difference.
//!
//! ```text
//!   equal                                         differ
//!     low ──┬─────┬─────┬─────┬─────┬─────┬───── high        a round requests the digest at each ┬
//!                       low ──┬──┬──┬──┬─ high               until high = low + 1: op `low` is the first
//! ```

use super::cause;
use super::directory::Differing;
use super::found::{Answered, Earliest, Found};
use super::message::{CheckpointPage, DetailsMessage, DigestPage, OpPage, PROBES_MAX, SEARCHES_MAX, messages};
use super::outcome::Next;
use super::protocol::ProtocolError;
use super::question::{Answer, Ask, HeapKey, OpNumber, Step};
use super::ranks::RankSet;
use super::report::{Action, Cause, Difference, Group, HeapDifference};
use super::transport::Gathered;
use std::collections::{BTreeMap, VecDeque};
use symmalloc_core::Digest;

/// Maximum number of heaps whose ops are reported in full, including names.
const HEAPS_DETAILED: usize = 4;

#[derive(Debug)]
pub(crate) struct Search {
    ranks: u32,
    waiting: VecDeque<Differing>,
    open: Vec<SearchInterval>,
    found: Vec<Found>,
    /// For heaps whose journals do not reach back far enough: the ranks, grouped by the heap's current digest.
    lost: BTreeMap<HeapKey, Vec<RankSet>>,
    /// Number of leading entries of `found` whose details were gathered.
    detailed: usize,
}

/// The interval that contains the first difference of a heap: histories are equal after `low` ops and differ after
/// `high`.
#[derive(Clone, Copy, Debug)]
struct SearchInterval {
    heap: HeapKey,
    low: u64,
    high: u64,
    state: IntervalState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IntervalState {
    /// `low` is the earliest point that all ranks remember, but equality there is not confirmed yet.
    Assumed,
    /// Equality after `low` ops is confirmed.
    Known,
    /// The journals do not reach back far enough.
    Lost,
    /// Checkpoints have narrowed the interval as far as possible.
    Bounded,
}

impl SearchInterval {
    fn new(differing: Differing) -> Self {
        let (low, high) = (differing.oldest, differing.differs_after);
        // Histories are equal before the first op, because the configurations are equal.
        let (low, state) = match (low, high) {
            (_, 1) | (0, _) => (0, IntervalState::Known),
            _ if low < high => (low, IntervalState::Assumed),
            _ => (0, IntervalState::Lost),
        };
        SearchInterval { heap: differing.key, low, high, state }
    }

    fn is_open(&self) -> bool {
        match self.state {
            IntervalState::Assumed => true,
            IntervalState::Known => self.high - self.low > 1,
            IntervalState::Lost | IntervalState::Bounded => false,
        }
    }

    /// Returns up to `count` positions (numbers of ops) at which to compare digests.
    fn probes(&self, count: u64) -> Vec<OpNumber> {
        let width = self.high - self.low;
        let inner = count - u64::from(self.state == IntervalState::Assumed);
        let at = |part: u64| self.low + (u128::from(width) * u128::from(part) / (u128::from(inner) + 1)) as u64;
        let first = (self.state == IntervalState::Assumed).then_some(self.low);
        let mut ops: Vec<u64> = first.into_iter().chain((1..=inner).map(at).filter(|ops| *ops > self.low)).collect();
        ops.dedup();
        ops.into_iter().map(|ops| OpNumber { heap: self.heap, ops }).collect()
    }
}

/// A comparison of all ranks' digests after a given number of ops.
#[derive(Clone, Copy, Debug, Default)]
struct DigestTally {
    ranks: u32,
    value: u64,
    differs: bool,
}

impl DigestTally {
    fn add(&mut self, value: u64) {
        if self.ranks == 0 {
            self.value = value;
        }
        self.differs |= self.value != value;
        self.ranks += 1;
    }
}

impl Search {
    pub(crate) fn new(ranks: u32) -> Self {
        Search {
            ranks,
            waiting: VecDeque::new(),
            open: Vec::new(),
            found: Vec::new(),
            lost: BTreeMap::new(),
            detailed: 0,
        }
    }

    /// Starts the search in the heaps that differ.
    pub(crate) fn begin(&mut self, differing: Vec<Differing>) -> Result<Next, ProtocolError> {
        if differing.is_empty() {
            return Err(ProtocolError::Contradiction);
        }
        self.waiting = differing.into();
        Ok(self.next())
    }

    fn next(&mut self) -> Next {
        if self.open.is_empty() {
            let batch = self.waiting.len().min(SEARCHES_MAX);
            self.open.extend(self.waiting.drain(..batch).map(SearchInterval::new));
        }
        if self.open.is_empty() {
            return self.next_details();
        }
        if let Some(lost) = self.open.iter().find(|interval| interval.state == IntervalState::Lost) {
            return Next::Ask(Ask::Checkpoints { heap: lost.heap });
        }
        let open: Vec<&SearchInterval> = self.open.iter().filter(|interval| interval.is_open()).collect();
        Next::Ask(if open.is_empty() {
            Ask::Ops {
                at: self.open.iter().map(|interval| OpNumber { heap: interval.heap, ops: interval.low }).collect(),
            }
        } else {
            let count = (PROBES_MAX / open.len()) as u64;
            Ask::Digests { at: open.iter().flat_map(|interval| interval.probes(count)).collect() }
        })
    }

    pub(crate) fn digests(&mut self, at: &[OpNumber], gathered: &Gathered) -> Result<Next, ProtocolError> {
        let mut tallies = vec![DigestTally::default(); at.len()];
        for page in messages::<DigestPage>(gathered) {
            let (rank, page) = page?;
            let probes = page.entries(rank)?;
            if probes.len() != at.len() {
                return Err(ProtocolError::Garbled { rank });
            }
            for (tally, probe) in tallies.iter_mut().zip(probes) {
                if let Some(value) = probe.decode(rank)? {
                    tally.add(value);
                }
            }
        }
        for interval in &mut self.open {
            let of_heap = at.iter().zip(&tallies).filter(|(moment, _)| moment.heap == interval.heap);
            for (moment, tally) in of_heap {
                if tally.ranks < self.ranks {
                    interval.state = IntervalState::Lost;
                    break;
                }
                if tally.differs {
                    let is_low_unconfirmed = interval.state == IntervalState::Assumed;
                    interval.high = moment.ops;
                    interval.state = if is_low_unconfirmed { IntervalState::Lost } else { IntervalState::Known };
                    break;
                }
                (interval.low, interval.state) = (moment.ops, IntervalState::Known);
            }
            if interval.state == IntervalState::Lost {
                interval.low = 0;
            }
        }
        Ok(self.next())
    }

    pub(crate) fn checkpoints(&mut self, heap: HeapKey, gathered: &Gathered) -> Result<Next, ProtocolError> {
        let mut tallies: BTreeMap<u64, DigestTally> = BTreeMap::new();
        let mut groups: BTreeMap<Option<(u64, u64)>, RankSet> = BTreeMap::new();
        for page in messages::<CheckpointPage>(gathered) {
            let (rank, page) = page?;
            let mut last: Option<(u64, u64)> = None;
            for digest in page.entries(rank)? {
                let Digest { ops, value } = (*digest).into();
                if last.is_some_and(|(last, _)| ops <= last) {
                    return Err(ProtocolError::Garbled { rank });
                }
                last = Some((ops, value));
                tallies.entry(ops).or_default().add(value);
            }
            groups.entry(last).or_default().push(rank);
        }
        let mut groups: Vec<RankSet> = groups.into_values().collect();
        groups.sort_by_key(RankSet::first);
        self.lost.insert(heap, groups);
        for interval in self.open.iter_mut().filter(|interval| interval.heap == heap) {
            interval.state = IntervalState::Bounded;
            for (ops, tally) in tallies.range(..interval.high).filter(|(_, tally)| tally.ranks == self.ranks) {
                if tally.differs {
                    interval.high = *ops;
                    break;
                }
                interval.low = *ops;
            }
            if interval.high <= interval.low {
                return Err(ProtocolError::Contradiction);
            }
        }
        Ok(self.next())
    }

    pub(crate) fn ops(&mut self, at: &[OpNumber], gathered: &Gathered) -> Result<Next, ProtocolError> {
        let mut answers: Vec<BTreeMap<Answer, RankSet>> = vec![BTreeMap::new(); at.len()];
        let mut earliest: Vec<Option<Earliest>> = vec![None; at.len()];
        for page in messages::<OpPage>(gathered) {
            let (rank, page) = page?;
            for ((answers, earliest), op) in answers.iter_mut().zip(&mut earliest).zip(page) {
                let answer = Answer::decode(rank, op)?;
                *earliest = Earliest::of(answer).map_or(*earliest, |this| Some(this.or_before(*earliest)));
                answers.entry(answer.without_order()).or_default().push(rank);
            }
        }
        for ((interval, answers), earliest) in self.open.drain(..).zip(answers).zip(earliest) {
            let is_exact = interval.high - interval.low == 1;
            let is_remembered = !answers.keys().any(|answer| matches!(answer, Answer::Forgotten { .. }));
            if is_exact && is_remembered && answers.len() < 2 {
                return Err(ProtocolError::Contradiction);
            }
            let answered = |(answer, ranks)| Answered { ranks, answer, name: None, window: Vec::new() };
            let forgotten = Answer::Forgotten { order: None };
            let mut answers: Vec<Answered> = match self.lost.remove(&interval.heap) {
                Some(groups) if !is_exact || answers.len() < 2 => {
                    groups.into_iter().map(|ranks| answered((forgotten, ranks))).collect()
                }
                _ => answers.into_iter().map(answered).collect(),
            };
            answers.sort_by_key(|answered| answered.ranks.first());
            let (first, last) = (interval.low, interval.high - 1);
            self.found.push(Found { heap: interval.heap, first, last, earliest, answers });
        }
        Ok(self.next())
    }

    /// Returns the question for the next details once all heaps are searched. Heaps get their details in program order.
    fn next_details(&mut self) -> Next {
        if self.detailed == 0 {
            let order = |found: &Found| (found.order().unwrap_or(u64::MAX), cause::consequence(found), found.heap);
            self.found.sort_by_key(order);
        }
        let detailed = self.found.iter().take(HEAPS_DETAILED).skip(self.detailed);
        match detailed.map(|found| OpNumber { heap: found.heap, ops: found.first }).next() {
            Some(at) => Next::Ask(Ask::Details { at }),
            None => Next::Disagreed(self.conclude()),
        }
    }

    pub(crate) fn details(&mut self, at: OpNumber, gathered: &Gathered) -> Result<Next, ProtocolError> {
        debug_assert_eq!(self.found[self.detailed].heap, at.heap);
        let mut messages = messages::<DetailsMessage>(gathered);
        let mut answers: Vec<&mut Answered> = self.found[self.detailed].answers.iter_mut().collect();
        answers.sort_by_key(|answered| answered.ranks.first());
        // The first rank of each group answers for the whole group.
        for answered in answers {
            let answers_for_group = |rank: u32| answered.ranks.first() == Some(rank);
            let message = messages.find(|message| message.as_ref().is_ok_and(|(rank, _)| answers_for_group(*rank)));
            let Some((rank, message)) = message.transpose()? else { break };
            answered.window = message.steps.entries(rank)?.iter().map(Step::from).collect();
            answered.name = Some(message.name.get(rank)?).filter(|name| !name.is_empty()).map(Into::into);
        }
        self.detailed += 1;
        Ok(self.next())
    }

    fn conclude(&mut self) -> Difference {
        let found = std::mem::take(&mut self.found);
        let cause = |index: usize| {
            if index < self.detailed { cause::cause(&found[index], &found) } else { Cause::Consequence }
        };
        let mut heaps: Vec<HeapDifference> =
            (0..found.len()).map(|index| heap_difference(&found[index], cause(index))).collect();
        let others = heaps.split_off(1);
        let first = heaps.remove(0);
        Difference::History { first, others }
    }
}

fn heap_difference(found: &Found, cause: Cause) -> HeapDifference {
    let group = |answered: &Answered| Group {
        ranks: answered.ranks.clone(),
        action: Action::new(answered.answer),
        name: answered.name.clone(),
    };
    HeapDifference {
        pool: found.heap.pool,
        streams: found.heap.group(),
        first_op: found.first,
        last_op: found.last,
        order: found.order(),
        groups: found.answers.iter().map(group).collect(),
        cause,
    }
}
