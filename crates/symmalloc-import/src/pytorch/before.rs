//! The state at the beginning of a trace: the live allocations and the reserved memory.
//!
//! A trace is a ring buffer. With `max_entries`, or if recording started late, it begins in the middle of a job. Allocations that are live
//! at this point can be recognized in two ways: the trace frees them without having allocated them, or `segments`, the final state of the
//! allocator, contains them.
//!
//! ```text
//! segments, at the end   ── minus memory the trace allocates and keeps ────────┐
//! frees in the trace     ── of memory the trace does not allocate ─────────────┴─► lived before: allocated first
//! segments, at the end   ── minus memory the trace obtained, plus memory it released ─► reserved at the beginning
//! ```
//!
//! `trace_alloc_overflowed` in `allocator_settings` marks a trace that lost entries. PyTorch up to 2.15.0 does not write it.
//!
//! Neither source states the order of these allocations. The allocations that the trace frees come first, in the order of their frees,
//! which the program determines. The remaining ones follow, sorted by pool, stream, size and name. They are not sorted by address, because
//! addresses differ between ranks.

use std::collections::{BTreeMap, BTreeSet};

use super::error::{Found, SnapshotError};
use super::frames;
use super::trace::{DeviceTrace, TraceEntry};
use super::words::{
    ACTION, ACTIVE_ALLOCATED, ADDRESS, ALLOC, ALLOCATOR_SETTINGS, BLOCKS, DEVICE, FRAMES, FREE_REQUESTED, INACTIVE,
    IS_EXPANDABLE, REQUESTED_SIZE, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_POOL_ID, SEGMENT_UNMAP, SEGMENTS,
    SIZE, STATE, STREAM, TOTAL_SIZE, TRACE_ALLOC_OVERFLOWED, text,
};
use crate::pickle::{DictId, Document, Item, ListId, Value, Word};
use crate::transcript::{Address, RawPool, RawStream};

/// An allocation that is live at the beginning of the trace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Lived {
    pub(super) pool: RawPool,
    pub(super) stream: RawStream,
    pub(super) size_bytes: u64,
    pub(super) name: Option<String>,
    pub(super) address: u64,
    /// The list of stack frames that requested the allocation.
    pub(super) frames: Option<ListId>,
}

/// A segment in the final state, or a part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SegmentAtEnd {
    pub(super) start: u64,
    pub(super) end: u64,
    /// `true` for an expandable segment.
    pub(super) grows: bool,
    pub(super) pool: RawPool,
    pub(super) stream: RawStream,
    /// Address and size of each block that is not free, in ascending order.
    pub(super) used: Vec<(u64, u64)>,
}

/// The known state at the beginning of the trace, and at its end.
#[derive(Debug, Default)]
pub(super) struct Before {
    pub(super) lived: Vec<Lived>,
    pub(super) at_end: Vec<SegmentAtEnd>,
    /// Peak of the reserved memory in bytes; `None` if the snapshot shows neither segments nor their creation.
    pub(super) reserved_bytes_peak: Option<u64>,
    pools: SegmentPools,
}

/// The pools of the segments in the final state. Needed for older traces, whose entries do not name pools.
#[derive(Debug, Default)]
struct SegmentPools {
    /// By start of the segment: its end, its pool, and the number of the entry that obtained it.
    segments: BTreeMap<u64, (u64, RawPool, Option<u64>)>,
}

impl SegmentPools {
    /// Returns the pool of an address at an entry. If the segment was obtained only later, memory at this address belonged to a different
    /// pool, and the default pool is returned.
    fn of(&self, address: Address, number: u64) -> RawPool {
        let below = self.segments.range(..=address.0).next_back();
        let segment =
            below.filter(|(_, (end, _, birth))| address.0 < *end && birth.is_none_or(|birth| birth <= number));
        segment.map_or(RawPool::default(), |(_, (_, pool, _))| *pool)
    }
}

impl Before {
    /// Returns the pool of an entry: the pool that the entry names, or else the pool of its segment.
    pub(super) fn pool(&self, entry: &TraceEntry<'_>) -> Result<RawPool, SnapshotError> {
        let named = entry.pool()?;
        Ok(named.unwrap_or(self.pools.of(entry.address()?, entry.number)))
    }

    pub(super) fn of(trace: &DeviceTrace<'_>) -> Result<Self, SnapshotError> {
        let segments = segments(trace.document, trace.device)?;
        let mut pools = SegmentPools::default();
        for Segment { address, total_bytes, pool, .. } in segments.iter().flatten() {
            pools.segments.insert(*address, (address.saturating_add(*total_bytes), *pool, None));
        }
        for entry in trace.entries() {
            let entry = entry?;
            if entry.field(ACTION) == Some(Value::Word(SEGMENT_ALLOC))
                && let Some((_, _, birth)) = pools.segments.get_mut(&entry.address()?.0)
            {
                *birth = Some(entry.number);
            }
        }
        let (mut live, mut freed) = (BTreeSet::new(), BTreeSet::new());
        let mut lived = Vec::new();
        let (mut reserved, mut least, mut most, mut has_segments) = (0i128, 0i128, 0i128, segments.is_some());
        for entry in trace.entries() {
            let entry = entry?;
            let mut change = |bytes: i128| {
                has_segments = true;
                reserved += bytes;
                (least, most) = (least.min(reserved), most.max(reserved));
            };
            match entry.field(ACTION) {
                Some(Value::Word(ALLOC)) => _ = live.insert(entry.address()?),
                Some(Value::Word(FREE_REQUESTED)) => {
                    let address = entry.address()?;
                    // A second free without an allocation indicates a damaged trace, not another allocation.
                    if !live.remove(&address) && freed.insert(address) {
                        let (size_bytes, stream) = (entry.integer(SIZE)?, entry.stream()?);
                        let pool = entry.pool()?.unwrap_or(pools.of(address, entry.number));
                        lived.push(Lived { pool, stream, size_bytes, name: None, address: address.0, frames: None });
                    }
                }
                Some(Value::Word(SEGMENT_ALLOC | SEGMENT_MAP)) => change(entry.integer(SIZE)?.into()),
                Some(Value::Word(SEGMENT_FREE | SEGMENT_UNMAP)) => change(-i128::from(entry.integer(SIZE)?)),
                _ => {}
            }
        }
        let at_end = segments.unwrap_or_default();
        let total: i128 = at_end.iter().map(|segment| i128::from(segment.total_bytes)).sum();
        // At least as much as the trace releases without having obtained it.
        let at_beginning = (total - reserved).max(-least);
        let ranges = at_end.iter().map(|segment| segment.range.clone()).collect();
        let mut left: Vec<Lived> = at_end.into_iter().flat_map(|segment| segment.live).collect();
        left.retain(|block| !live.contains(&Address(block.address)));
        left.sort();
        lived.extend(left);
        let peak = u64::try_from(at_beginning + most).unwrap_or(u64::MAX);
        Ok(Before { lived, at_end: ranges, reserved_bytes_peak: has_segments.then_some(peak), pools })
    }
}

/// Returns `true` if the snapshot states that its trace lost entries.
pub(super) fn has_overflowed(document: &Document) -> bool {
    let field = |value, word| match value {
        Value::Dict(dict) => document.values.field(dict, word),
        _ => None,
    };
    let settings = field(document.root, ALLOCATOR_SETTINGS);
    settings.and_then(|settings| field(settings, TRACE_ALLOC_OVERFLOWED)) == Some(Value::True)
}

/// Returns the list of segments. A snapshot has it in `segments`; a pickle of `torch.cuda.memory_snapshot()` consists of it.
pub(super) fn segments_of(document: &Document) -> Option<Value> {
    match document.root {
        Value::Dict(root) => document.values.field(root, SEGMENTS),
        Value::List(list) => {
            let has = |dict: &DictId, word| document.values.field(*dict, word).is_some();
            let is_segment = |item: &Item| match item {
                Item::Dict(dict) => has(dict, ADDRESS) && has(dict, TOTAL_SIZE),
                Item::List(_) => false,
            };
            document.values.list(list).items.first().is_some_and(is_segment).then_some(document.root)
        }
        _ => None,
    }
}

/// Returns the bytes of live blocks in the segments of each device that has live blocks.
pub(super) fn live_bytes(document: &Document) -> BTreeMap<usize, u64> {
    let mut live = BTreeMap::new();
    let Some(Value::List(list)) = segments_of(document) else { return live };
    let values = &document.values;
    let block_bytes = |item: &Item| match item {
        Item::Dict(block) if values.field(*block, STATE) == Some(Value::Word(ACTIVE_ALLOCATED)) => {
            let size = values.field(*block, REQUESTED_SIZE).or(values.field(*block, SIZE));
            Some(if let Some(Value::Integer(bytes)) = size { bytes } else { 0 })
        }
        _ => None,
    };
    let mut seen = BTreeSet::new();
    for item in &values.list(list).items {
        let Item::Dict(segment) = *item else { continue };
        let Some(Value::List(blocks)) = values.field(segment, BLOCKS) else { continue };
        let device = match values.field(segment, DEVICE) {
            Some(Value::Integer(device)) => usize::try_from(device).unwrap_or(usize::MAX),
            _ => 0,
        };
        // A pickle may refer to the same list a million times.
        if seen.insert((blocks, device)) {
            for bytes in values.list(blocks).items.iter().filter_map(block_bytes) {
                let sum: &mut u64 = live.entry(device).or_default();
                *sum = sum.saturating_add(bytes);
            }
        }
    }
    live
}

/// Objects that were already visited. A pickle may refer to the same object a million times, but it counts once.
#[derive(Default)]
struct Seen {
    segments: BTreeSet<DictId>,
    lists: BTreeSet<ListId>,
    addresses: BTreeSet<u64>,
}

/// A segment in the final state, with its allocated blocks.
struct Segment {
    address: u64,
    total_bytes: u64,
    pool: RawPool,
    range: SegmentAtEnd,
    /// The segment's allocated blocks.
    live: Vec<Lived>,
}

/// Returns the segments of a device; `None` if the snapshot has no list of them.
fn segments(document: &Document, device: usize) -> Result<Option<Vec<Segment>>, SnapshotError> {
    let Some(list) = segments_of(document) else { return Ok(None) };
    let not_a_list = |value| SnapshotError::Segments { found: Found::of(Some(value)) };
    let Value::List(list) = list else { return Err(not_a_list(list)) };
    let list = document.values.list(list);
    let dicts = list.items.iter().filter(|item| matches!(item, Item::Dict(_))).count() as u64;
    if dicts != list.len {
        return Err(SnapshotError::Segments { found: Found::ListOfOthers });
    }
    let mut segments = Vec::new();
    let mut seen = Seen::default();
    for (number, item) in list.items.iter().enumerate() {
        let Item::Dict(dict) = *item else { continue };
        if !seen.segments.insert(dict) {
            continue;
        }
        let segment = SegmentDict { document, dict, number };
        // The first versions of PyTorch omitted the device, because they recorded only one.
        let of = if document.values.field(dict, DEVICE).is_some() { segment.integer(DEVICE)? } else { device as u64 };
        if of == device as u64 {
            segments.push(segment.read(&mut seen)?);
        }
    }
    Ok(Some(segments))
}

/// A segment, or one of its blocks.
#[derive(Clone, Copy)]
struct SegmentDict<'a> {
    document: &'a Document,
    dict: DictId,
    /// Index of the segment in the list.
    number: usize,
}

impl SegmentDict<'_> {
    fn read(self, seen: &mut Seen) -> Result<Segment, SnapshotError> {
        let (total_bytes, stream) = (self.integer(TOTAL_SIZE)?, RawStream(self.integer(STREAM)?.into()));
        let address = self.integer(ADDRESS)?;
        let pool = match self.field(SEGMENT_POOL_ID) {
            None => RawPool::default(),
            Some(Value::Pair(first, second)) => RawPool::of_pair(first, second),
            other => return Err(self.bad(SEGMENT_POOL_ID, other)),
        };
        let mut live = Vec::new();
        let grows = self.field(IS_EXPANDABLE) == Some(Value::True);
        let mut range = SegmentAtEnd {
            start: address,
            end: address.saturating_add(total_bytes),
            grows,
            pool,
            stream,
            used: Vec::new(),
        };
        let blocks = match self.field(BLOCKS) {
            Some(Value::List(blocks)) if !seen.lists.insert(blocks) => {
                return Ok(Segment { address, total_bytes, pool, range, live });
            }
            Some(Value::List(blocks)) => self.document.values.list(blocks),
            other => return Err(self.bad(BLOCKS, other)),
        };
        // Blocks state their addresses since PyTorch 2.1. In older snapshots, they follow each other without gaps.
        let mut next = address;
        for item in &blocks.items {
            let Item::Dict(dict) = *item else { return Err(self.bad(BLOCKS, self.field(BLOCKS))) };
            let block = SegmentDict { dict, ..self };
            let size_bytes = block.integer(SIZE)?;
            let address = if block.field(ADDRESS).is_some() { block.integer(ADDRESS)? } else { next };
            next = address.saturating_add(size_bytes);
            if block.field(STATE) != Some(Value::Word(INACTIVE)) {
                range.used.push((address, size_bytes));
            }
            if block.field(STATE) == Some(Value::Word(ACTIVE_ALLOCATED)) && seen.addresses.insert(address) {
                let requested = block.field(REQUESTED_SIZE).is_some();
                let size_bytes = if requested { block.integer(REQUESTED_SIZE)? } else { size_bytes };
                let name = frames::name(self.document, block.field(FRAMES));
                let frames = match block.field(FRAMES) {
                    Some(Value::List(frames)) => Some(frames),
                    _ => None,
                };
                live.push(Lived { pool, stream, size_bytes, name, address, frames });
            }
        }
        range.used.sort_unstable();
        Ok(Segment { address, total_bytes, pool, range, live })
    }

    fn field(self, word: Word) -> Option<Value> {
        self.document.values.field(self.dict, word)
    }

    fn integer(self, word: Word) -> Result<u64, SnapshotError> {
        match self.field(word) {
            Some(Value::Integer(integer)) => Ok(integer),
            other => Err(self.bad(word, other)),
        }
    }

    fn bad(self, word: Word, found: Option<Value>) -> SnapshotError {
        SnapshotError::SegmentField { segment: self.number as u64, field: text(word), found: Found::of(found) }
    }
}
