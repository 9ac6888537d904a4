//! One rank's side of an agreement: it answers questions about its allocator and makes no decisions.

use super::message::{
    CheckpointPage, DetailsMessage, DigestPage, HEAPS_PER_PAGE, HeapPage, OpMessage, OpPage, POLICIES_PER_PAGE, Page,
    PolicyPage, PolicyText, RankSummary, RankSummaryMessage, SEARCHES_MAX, Text, WINDOW, append,
};
use super::point::Point;
use super::question::{Answer, Ask, HeapKey, HeapSummary, OpNumber, Question, Step};
use std::fmt;
use symmalloc_core::backend::Backend;
use symmalloc_core::histories::{HistorySource, Journal, folded_multiply};
use symmalloc_core::ids::PoolId;
use symmalloc_core::lock::Lock;
use symmalloc_core::{Digest, generic};
use zerocopy::FromZeros;

/// A snapshot of one rank's history. Ops that other threads perform after its creation are not part of it.
pub struct RankHistory<'a> {
    source: &'a dyn HistorySource,
    point: Point,
    /// Heaps of the compared pools, ascending by key.
    heaps: Vec<HeapSummary>,
    /// The position in program order of the first op after the snapshot.
    order: u64,
    /// Ordinals of the compared pools, ascending; `None` for all symmetric pools.
    pools: Option<Vec<u32>>,
    /// `true` if the settings that all pools share, such as the allocator's limit, are compared.
    has_shared_settings: bool,
}

impl fmt::Debug for RankHistory<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RankHistory").field("point", &self.point).field("heaps", &self.heaps.len()).finish()
    }
}

impl<'a> RankHistory<'a> {
    /// Takes a snapshot of the history of an allocator's symmetric pools.
    pub fn new<B: Backend, L: Lock>(allocator: &'a generic::Allocator<B, L>, point: Point) -> Self {
        let source: &dyn HistorySource = allocator;
        let heaps = source.heap_histories().iter().map(HeapSummary::of).collect();
        RankHistory {
            source,
            point,
            order: source.program_order().next(),
            heaps,
            pools: None,
            has_shared_settings: true,
        }
    }

    /// Takes a snapshot of these pools only. Use it if the ranks have no other symmetric pools in common, or if other
    /// threads use the remaining pools at the same time. Every rank must name the same pools. Pools that are not
    /// symmetric are ignored.
    pub fn of_pools<B: Backend, L: Lock>(
        allocator: &'a generic::Allocator<B, L>,
        point: Point,
        pools: &[PoolId],
    ) -> Self {
        let mut ordinals: Vec<u32> = pools.iter().filter_map(|pool| allocator.symmetric_ordinal(*pool)).collect();
        ordinals.sort_unstable();
        let mut history = RankHistory::new(allocator, point);
        history.heaps.retain(|heap| ordinals.binary_search(&heap.key.pool).is_ok());
        history.pools = Some(ordinals);
        history
    }

    /// Leaves out the settings that all pools share, such as the allocator's limit. One rank may have raised its limit
    /// to make room for a wake. If one rank leaves these settings out, every rank must.
    #[must_use]
    pub fn without_shared_settings(mut self) -> Self {
        self.has_shared_settings = false;
        self
    }

    /// Appends the answer to a question. The answer is [`Question::message_bytes`] bytes long.
    pub fn answer(&self, question: &Question, message: &mut Vec<u8>) {
        let bytes = question.message_bytes();
        match &question.0 {
            Ask::Compare => append(message, &RankSummaryMessage::from(self.summary()), bytes),
            Ask::Policies { first } => {
                let digests = self.policy_digests();
                let page = digests.get(*first as usize..).unwrap_or_default().iter().take(POLICIES_PER_PAGE);
                append(message, &PolicyPage::new(page.map(|digest| (*digest).into())), bytes);
            }
            Ask::Policy { number } => append(message, &PolicyText::new(self.source.policy(*number).as_deref()), bytes),
            Ask::Heaps { after } => {
                let first = self.heaps.partition_point(|heap| Some(heap.key) <= *after);
                let page = self.heaps[first..].iter().take(HEAPS_PER_PAGE);
                append(message, &HeapPage::new(page.map(|heap| (*heap).into())), bytes);
            }
            Ask::Digests { at } => {
                append(message, &DigestPage::new(at.iter().map(|moment| self.digest_at(*moment).into())), bytes);
            }
            Ask::Checkpoints { heap } => {
                append(message, &CheckpointPage::new(self.checkpoints(*heap).into_iter().map(Into::into)), bytes);
            }
            Ask::Ops { at } => {
                let mut page: OpPage = [OpMessage::new_zeroed(); SEARCHES_MAX];
                for (place, moment) in page.iter_mut().zip(at) {
                    *place = self.op_at(*moment).into();
                }
                append(message, &page, bytes);
            }
            Ask::Details { at } => append(message, &self.details(*at), bytes),
        }
    }

    /// Discards the histories up to this snapshot. Call this once all ranks have agreed on it.
    pub fn settle(&self) {
        self.settle_pools(|_| true);
    }

    /// Discards the histories of the symmetric pools for whose ordinals `is_chosen` returns `true`. For the remaining
    /// pools, later agreements still cover the history before this snapshot.
    pub fn settle_pools(&self, is_chosen: impl Fn(u32) -> bool) {
        self.source.program_order().agree(self.order);
        if self.point == Point::Sync {
            self.source.pass_sync();
        }
        let chosen = self.heaps.iter().filter(|heap| is_chosen(heap.key.pool));
        chosen.for_each(|heap| self.source.settle(heap.key.pool, heap.key.group(), heap.digest));
    }

    /// Returns the digests of the policies, indexed by the numbers of [`Ask::Policies`], with 0 for policies that are
    /// not compared.
    fn policy_digests(&self) -> Vec<u64> {
        let mut digests = self.source.policy_digests();
        if !self.has_shared_settings {
            digests[0] = 0;
        }
        if let Some(pools) = &self.pools {
            digests.truncate(pools.last().map_or(1, |last| *last as usize + 2));
            for (digest, ordinal) in digests.iter_mut().skip(1).zip(0..) {
                if pools.binary_search(&ordinal).is_err() {
                    *digest = 0;
                }
            }
        }
        digests
    }

    fn summary(&self) -> RankSummary {
        let policies = self.policy_digests();
        let mut digest = Digest { ops: 0, value: 0 };
        for HeapSummary { key, digest: heap, .. } in &self.heaps {
            let name = (u64::from(key.pool) << 32) | u64::from(key.streams());
            digest.value =
                folded_multiply(digest.value ^ name ^ NAME_KEY, heap.value ^ DIGEST_KEY).wrapping_add(heap.ops);
            digest.ops += heap.ops;
        }
        RankSummary {
            point: self.point as u8,
            policies: policies.len() as u32,
            policy_digest: policies.iter().fold(0, |all, one| folded_multiply(all ^ NAME_KEY, one ^ DIGEST_KEY)),
            heaps: self.heaps.len() as u32,
            digest,
        }
    }

    fn heap(&self, heap: HeapKey) -> Option<&HeapSummary> {
        let at = self.heaps.binary_search_by_key(&heap, |summary| summary.key).ok()?;
        Some(&self.heaps[at])
    }

    /// Applies `look` to the journal of a heap.
    fn look_back<T>(&self, heap: HeapKey, look: impl Fn(&Journal) -> T) -> Option<T> {
        let mut found = None;
        self.source.look_back(heap.pool, heap.group(), &mut |journal| found = Some(look(journal)));
        found
    }

    fn digest_at(&self, OpNumber { heap, ops }: OpNumber) -> Option<u64> {
        let now = self.heap(heap)?.digest;
        if ops >= now.ops {
            return (ops == now.ops).then_some(now.value);
        }
        self.look_back(heap, |journal| journal.digest_at(ops))?
    }

    fn checkpoints(&self, heap: HeapKey) -> Vec<Digest> {
        let Some(now) = self.heap(heap) else { return Vec::new() };
        let kept = self.look_back(heap, |journal| journal.checkpoints().collect::<Vec<_>>());
        let mut kept = kept.unwrap_or_default();
        kept.retain(|digest| digest.ops < now.digest.ops);
        kept.push(now.digest);
        kept
    }

    fn op_at(&self, OpNumber { heap, ops }: OpNumber) -> Answer {
        if self.heap(heap).is_none_or(|now| now.digest.ops <= ops) {
            return Answer::Ended;
        }
        let order = |number| self.source.program_order().since_agreed(number);
        let answer = self.look_back(heap, |journal| match journal.entry(ops) {
            Some(entry) => Answer::Op { op: entry.op, decision: entry.decision, order: order(entry.order) },
            None => Answer::Forgotten { order: journal.entry(journal.oldest()).map(|entry| order(entry.order)) },
        });
        answer.unwrap_or(Answer::Forgotten { order: None })
    }

    fn details(&self, OpNumber { heap, ops }: OpNumber) -> DetailsMessage {
        let end = self.heap(heap).map_or(0, |now| now.digest.ops);
        let (window, name) = self
            .look_back(heap, |journal| {
                let entries = (ops..end).take(4 * WINDOW).map_while(|op| journal.entry(op));
                let steps = entries.filter_map(|entry| Step::new(entry.op, entry.decision));
                let window: Vec<Step> = steps.take(WINDOW).collect();
                let name = if ops < end { journal.name_of(ops).unwrap_or_default() } else { "" };
                (window, name.to_owned())
            })
            .unwrap_or_default();
        DetailsMessage { steps: Page::new(window.into_iter().map(Into::into)), name: Text::new(&name) }
    }
}

// Digits of pi, like the constants of the digest.
const NAME_KEY: u64 = 0x13198a2e_03707344;
const DIGEST_KEY: u64 = 0x452821e6_38d01377;
