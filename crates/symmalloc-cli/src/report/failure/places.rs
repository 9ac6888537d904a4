//! The memory of each pool, and of its streams, at the time of a failed request.

use crate::picture::memory::{BlockState, Memory};
use crate::quantity::{counted, memory};
use crate::streams;
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use symmalloc_core::groups::Groups;
use symmalloc_core::ids::{PoolId, StreamGroup, StreamId};
use symmalloc_import::{HeldHeap, HeldMemory, Recording};

use super::bound::LiveBytes;

/// Number of places that the description lists.
const PLACES_SHOWN: usize = 5;

/// Memory of a heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// `None` for a pool of the recorded allocator that no op uses.
    pub(super) pool: Option<PoolId>,
    /// The streams that share the memory. `None` for a stream that no op uses.
    streams: Option<StreamGroup>,
    /// Bytes of live allocations.
    live_bytes: u64,
    /// Memory that the allocator holds for the heap, if it is known.
    pub(super) held: Option<HeldMemory>,
}

/// Memory of all heaps.
#[derive(Clone, Debug, Default)]
pub(super) struct Places(pub(super) Vec<Place>);

impl Place {
    /// Returns `true` if this memory may serve a request on `stream`, given the job's groups of streams.
    pub(super) fn serves(&self, stream: StreamId, groups: &Groups) -> bool {
        match self.streams {
            Some(StreamGroup::One(own)) => own == stream,
            Some(StreamGroup::Group(first)) => first == groups.first_of(stream),
            _ => true,
        }
    }
}

impl Places {
    /// Returns the heaps of symmalloc that have memory on the device.
    pub(super) fn replayed(shown: &Memory, asleep: &BTreeSet<PoolId>) -> Self {
        let place = |heap: &crate::picture::memory::DrawnHeap| {
            let (mut held, mut live_bytes) = (HeldMemory::default(), 0);
            held.reserved_bytes = heap.size_bytes();
            for block in heap.blocks() {
                if matches!(block.state, BlockState::Free | BlockState::Fenced) {
                    held.free_blocks += 1;
                    held.free_block_bytes += block.size_bytes;
                    held.largest_free_bytes = held.largest_free_bytes.max(block.size_bytes);
                }
                live_bytes += block.held.as_ref().map_or(0, |held| held.requested_bytes);
            }
            held.allocated_bytes = held.reserved_bytes - held.free_block_bytes;
            Place { pool: Some(heap.owner.pool), streams: Some(heap.owner.group), live_bytes, held: Some(held) }
        };
        Places(shown.heaps.iter().filter(|heap| !asleep.contains(&heap.owner.pool)).map(place).collect())
    }

    /// Returns the heaps of the recorded allocator. If the recording does not show the allocator's memory, only live memory is known.
    pub(super) fn recorded(heaps: &[HeldHeap], live: &LiveBytes) -> Self {
        let of = |heap: &HeldHeap| {
            let live_bytes = heap.pool.zip(heap.stream).and_then(|heap| live.by_heap.get(&heap)).copied();
            Place {
                pool: heap.pool,
                streams: heap.stream.map(StreamGroup::One),
                live_bytes: live_bytes.unwrap_or(heap.held.allocated_bytes),
                held: Some(heap.held),
            }
        };
        let mut places: Vec<Place> = heaps.iter().map(of).collect();
        let is_there = |pool: &PoolId, live_bytes: &u64| *live_bytes > 0 && !live.asleep.contains(pool);
        for (&(pool, stream), &live_bytes) in live.by_heap.iter().filter(|((pool, _), bytes)| is_there(pool, bytes)) {
            let streams = Some(StreamGroup::One(stream));
            if !places.iter().any(|place| (place.pool, place.streams) == (Some(pool), streams)) {
                places.push(Place { pool: Some(pool), streams, live_bytes, held: None });
            }
        }
        Places(places)
    }

    /// Returns the sum of all heaps whose memory is known.
    pub(super) fn held(&self) -> HeldMemory {
        self.held_by(|_| true).unwrap_or_default()
    }

    /// Returns the sum of the heaps that `is_meant` selects, or `None` if their memory is unknown.
    pub(super) fn held_by(&self, is_meant: impl Fn(&Place) -> bool) -> Option<HeldMemory> {
        let mut known = self.0.iter().filter(|place| is_meant(place)).filter_map(|place| place.held).peekable();
        known.peek()?;
        let mut sum = HeldMemory::default();
        for held in known {
            sum.reserved_bytes += held.reserved_bytes;
            sum.allocated_bytes += held.allocated_bytes;
            sum.free_segments += held.free_segments;
            sum.free_segment_bytes += held.free_segment_bytes;
            sum.free_blocks += held.free_blocks;
            sum.free_block_bytes += held.free_block_bytes;
            sum.largest_free_bytes = sum.largest_free_bytes.max(held.largest_free_bytes);
        }
        Some(sum)
    }

    /// Returns the number of pools with free memory in heaps that `is_meant` selects. Pools that no op uses count as one.
    pub(super) fn pools_with_free(&self, is_meant: impl Fn(&Place) -> bool) -> usize {
        let pools: BTreeSet<_> = self.with_free(is_meant).map(|place| place.pool).collect();
        pools.len()
    }

    /// Returns the number of heaps with free memory that `is_meant` selects.
    pub(super) fn heaps_with_free(&self, is_meant: impl Fn(&Place) -> bool) -> usize {
        self.with_free(is_meant).count()
    }

    fn with_free(&self, is_meant: impl Fn(&Place) -> bool) -> impl Iterator<Item = &Place> {
        let is_free = |place: &Place| place.held.is_some_and(|held| held.free_bytes() > 0);
        self.0.iter().filter(move |place| is_free(place) && is_meant(place))
    }

    /// Returns the free bytes of the heaps that `is_meant` selects.
    pub(super) fn free_bytes(&self, is_meant: impl Fn(&Place) -> bool) -> u64 {
        let meant = self.0.iter().filter(|place| is_meant(place));
        meant.filter_map(|place| place.held).map(|held| held.free_bytes()).sum()
    }

    /// Returns the pool with the most free memory other than `apart`, and its free bytes.
    pub(super) fn freest(&self, apart: PoolId) -> Option<(PoolId, u64)> {
        let mut by_pool: BTreeMap<PoolId, u64> = BTreeMap::new();
        for place in &self.0 {
            if let (Some(pool), Some(held)) = (place.pool.filter(|pool| *pool != apart), place.held) {
                *by_pool.entry(pool).or_default() += held.free_bytes();
            }
        }
        by_pool.into_iter().filter(|(_, free)| *free > 0).max_by_key(|(pool, free)| (*free, Reverse(*pool)))
    }

    /// Describes which pools hold memory or, if there is only one pool, which of its streams. The pool or stream of the request comes
    /// first. Returns `None` if all memory is in one place.
    pub(super) fn text(
        &self,
        recording: &Recording,
        groups: &Groups,
        (pool, stream): (PoolId, StreamId),
    ) -> Option<String> {
        let has_pools = self.0.iter().any(|place| place.pool != Some(pool));
        let label = |place: &Place| match (place.pool, place.streams) {
            (None, _) => "other pools".to_owned(),
            (Some(pool), _) if has_pools => format!("pool {}", pool.0),
            (_, Some(StreamGroup::One(stream))) => streams::name(recording, stream),
            (_, Some(StreamGroup::Group(first))) => format!("group of {}", streams::name(recording, first)),
            _ => "other streams".to_owned(),
        };
        let mut parts: Vec<(bool, String, u64, Option<HeldMemory>)> = Vec::new();
        for place in &self.0 {
            let is_own = place.pool == Some(pool) && (has_pools || place.serves(stream, groups));
            let label = label(place);
            let known = parts.iter_mut().find(|(_, of, ..)| *of == label);
            let Some((_, _, live_bytes, held)) = known else {
                parts.push((is_own, label, place.live_bytes, place.held));
                continue;
            };
            *live_bytes += place.live_bytes;
            *held = match (*held, place.held) {
                (Some(one), Some(other)) => Some(
                    Places(vec![Place { held: Some(one), ..*place }, Place { held: Some(other), ..*place }]).held(),
                ),
                (one, other) => one.or(other),
            };
        }
        if !parts.iter().any(|(is_own, ..)| *is_own) {
            let own = Place { pool: Some(pool), streams: Some(StreamGroup::One(stream)), live_bytes: 0, held: None };
            parts.push((
                true,
                label(&own),
                0,
                self.0.iter().any(|place| place.held.is_some()).then(HeldMemory::default),
            ));
        }
        if parts.len() < 2 {
            return None;
        }
        parts.sort_by_key(|(is_own, _, live, held)| (!is_own, Reverse(held.map_or(*live, |held| held.reserved_bytes))));
        let amounts = |live_bytes: u64, held: Option<HeldMemory>| {
            let free = held.map_or_else(String::new, |held| format!(", {} free", memory(held.free_bytes())));
            format!("{} live{free}", memory(live_bytes))
        };
        let others = parts.split_off(parts.len().min(PLACES_SHOWN));
        let mut texts: Vec<String> = parts
            .iter()
            .map(|(is_own, label, live, held)| {
                let of_request = if *is_own { ", of the request" } else { "" };
                format!("{label}{of_request}: {}", amounts(*live, *held))
            })
            .collect();
        if !others.is_empty() {
            let live = others.iter().map(|(_, _, live, _)| live).sum();
            let free: u64 = others.iter().filter_map(|(.., held)| *held).map(|held| held.free_bytes()).sum();
            let mut held = HeldMemory::default();
            held.free_block_bytes = free;
            let known = others.iter().any(|(.., held)| held.is_some());
            texts.push(format!("{}: {}", counted(others.len(), "other"), amounts(live, known.then_some(held))));
        }
        Some(texts.join("; "))
    }

    pub(super) fn object(&self) -> Value {
        let place = |place: &Place| {
            json!({
                "pool": place.pool.map(|pool| pool.0),
                "stream": place.streams.and_then(StreamGroup::stream).map(|stream| stream.0),
                "group": match place.streams {
                    Some(StreamGroup::Group(first)) => Some(first.0),
                    _ => None,
                },
                "live_bytes": place.live_bytes,
                "reserved_bytes": place.held.map(|held| held.reserved_bytes),
                "free_bytes": place.held.map(|held| held.free_bytes()),
                "largest_free_bytes": place.held.map(|held| held.largest_free_bytes),
            })
        };
        self.0.iter().map(place).collect()
    }
}
