//! The reference: an allocator that makes the same decisions with a straightforward implementation.
//!
//! It is built like a first attempt, and like the allocators of PyTorch and RMM: a `BTreeSet` of (size, segment,
//! offset) per heap, a `HashMap` from pointer to block, and neighbors identified by their pointers.
//!
//! ```text
//!  free     BTreeSet (size, segment, offset)     best fit: the first at least (size, 0, 0)
//!  blocks   HashMap pointer ──► Block            split, merge: follow `prev` and `next` through the map
//! ```
//!
//! It has no digest, no checked handles, and no statistics except reserved bytes. It supports expandable and fixed
//! segments with their default parameters, and a heap per stream.

use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;
use symmalloc_core::backend::{Backend, Event, Range};
use symmalloc_core::ids::{Placement, SegmentId, StreamId};

use crate::Segments;
use crate::free_sets::{Key, Question};
use crate::workload::Subject;

const UNIT_BYTES: u64 = 512;
const MIB: u64 = 1 << 20;
const RANGE_BYTES: u64 = 512 << 30;

/// A use that must complete before the block is used again.
#[derive(Clone, Debug)]
struct Fence {
    stream: StreamId,
    /// Sequence number of the event. Of two events on one stream, the later one covers the earlier.
    ordinal: u64,
    event: Rc<Event>,
}

#[derive(Debug)]
struct Block {
    size: u64,
    /// Index in `segments`.
    segment: usize,
    offset: u64,
    /// Pointers of the neighbors.
    prev: Option<u64>,
    next: Option<u64>,
    is_free: bool,
    stream: StreamId,
    /// Other streams that use the block while it is allocated.
    used_by: Vec<StreamId>,
    /// Fences of a free block, for which the next user must wait.
    fences: Vec<Fence>,
}

#[derive(Debug)]
struct Segment {
    range: Range,
    /// Birth ordinal of the segment in its heap.
    ordinal: u32,
    heap: usize,
    end: u64,
    last: u64,
}

/// The free blocks of a stream as (size, ordinal, offset, pointer); small and large ones are separate with fixed
/// segments.
#[derive(Debug, Default)]
struct Heap {
    small: BTreeSet<(u64, u32, u64, u64)>,
    large: BTreeSet<(u64, u32, u64, u64)>,
    /// Index of the newest segment.
    newest: Option<usize>,
    born: u32,
}

/// The reference allocator. See the [module documentation](self).
#[derive(Debug)]
pub struct Reference<B> {
    backend: B,
    policy: Segments,
    heaps: Vec<Heap>,
    segments: Vec<Segment>,
    blocks: HashMap<u64, Block>,
    events: u64,
    reserved_bytes: u64,
    /// Recorded queries to the free sets, by heap; `None` while not recording.
    asked: Option<Vec<Vec<Question>>>,
    /// Slots by pointer, for the recorded queries.
    slots: HashMap<u64, u32>,
}

impl<B: Backend> Reference<B> {
    /// Creates an allocator over a backend with unlimited memory, with a heap per stream.
    pub fn new(backend: B, policy: Segments) -> Self {
        let (heaps, segments, blocks) = (Vec::new(), Vec::new(), HashMap::new());
        let slots = HashMap::new();
        Reference { backend, policy, heaps, segments, blocks, events: 0, reserved_bytes: 0, asked: None, slots }
    }

    /// Starts to record the queries to the free sets, beginning with insertions of their current contents.
    pub fn listen(&mut self) {
        let keys: Vec<Vec<_>> =
            self.heaps.iter().map(|heap| heap.small.iter().chain(&heap.large).copied().collect()).collect();
        self.asked = Some(vec![Vec::new(); keys.len()]);
        for (heap, keys) in keys.into_iter().enumerate() {
            keys.into_iter().for_each(|key| self.note(heap, Question::Insert, key));
        }
    }

    /// Returns the recorded queries, by heap.
    pub fn asked(&self) -> &[Vec<Question>] {
        self.asked.as_deref().unwrap_or_default()
    }

    fn note(&mut self, heap: usize, question: fn(Key) -> Question, key: (u64, u32, u64, u64)) {
        if let Some(asked) = &mut self.asked {
            let next = self.slots.len() as u32;
            let slot = *self.slots.entry(key.3).or_insert(next);
            let (size, offset) = ((key.0 / UNIT_BYTES) as u32, (key.2 / UNIT_BYTES) as u32);
            asked[heap].push(question((size, key.1, offset, slot)));
        }
    }

    fn is_small(&self, size: u64) -> bool {
        self.policy == Segments::Fixed && size <= MIB
    }

    /// Returns the free blocks of one class of a heap.
    fn free_set(&mut self, heap: usize, is_small: bool) -> &mut BTreeSet<(u64, u32, u64, u64)> {
        let heap = &mut self.heaps[heap];
        if is_small { &mut heap.small } else { &mut heap.large }
    }

    /// Returns the set that a block belongs to, which its segment determines.
    fn home(&self, segment: usize) -> (usize, bool) {
        let Segment { heap, range, .. } = &self.segments[segment];
        (*heap, self.policy == Segments::Fixed && range.size_bytes == 2 * MIB)
    }

    fn insert_free(&mut self, pointer: u64) {
        let Block { size, segment, offset, .. } = self.blocks[&pointer];
        let ((heap, is_small), ordinal) = (self.home(segment), self.segments[segment].ordinal);
        self.free_set(heap, is_small).insert((size, ordinal, offset, pointer));
        self.note(heap, Question::Insert, (size, ordinal, offset, pointer));
    }

    fn remove_free(&mut self, pointer: u64) {
        let Block { size, segment, offset, .. } = self.blocks[&pointer];
        let ((heap, is_small), ordinal) = (self.home(segment), self.segments[segment].ordinal);
        assert!(self.free_set(heap, is_small).remove(&(size, ordinal, offset, pointer)));
        self.note(heap, Question::Remove, (size, ordinal, offset, pointer));
    }

    fn obtain(&mut self, stream: StreamId, size: u64) -> u64 {
        match self.policy {
            Segments::Fixed => {
                let size = match size {
                    small if small <= MIB => 2 * MIB,
                    medium if medium < 10 * MIB => 20 * MIB,
                    large => large.next_multiple_of(2 * MIB),
                };
                self.bear(stream, size, size)
            }
            Segments::Expandable => self.grow(stream, size),
        }
    }

    fn bear(&mut self, stream: StreamId, range_bytes: u64, mapped: u64) -> u64 {
        let range = self.backend.reserve(range_bytes).expect("the simulated address space is unlimited");
        self.backend.map(range, 0, mapped).expect("the simulated device has unlimited memory");
        self.reserved_bytes += mapped;
        let (pointer, index, heap) = (range.base.0, self.segments.len(), stream.index());
        let ordinal = self.heaps[heap].born;
        self.heaps[heap].born += 1;
        self.heaps[heap].newest = Some(index);
        self.segments.push(Segment { range, ordinal, heap, end: mapped, last: pointer });
        self.add_block(pointer, mapped, index, 0, None, stream);
        self.insert_free(pointer);
        pointer
    }

    fn add_block(&mut self, pointer: u64, size: u64, segment: usize, offset: u64, prev: Option<u64>, stream: StreamId) {
        let (used_by, fences) = (Vec::new(), Vec::new());
        let block = Block { size, segment, offset, prev, next: None, is_free: true, stream, used_by, fences };
        self.blocks.insert(pointer, block);
    }

    fn grow(&mut self, stream: StreamId, size: u64) -> u64 {
        let Some(index) = self.heaps[stream.index()].newest else {
            return self.bear(stream, RANGE_BYTES, size.next_multiple_of(2 * MIB));
        };
        let (last, end, range) = (self.segments[index].last, self.segments[index].end, self.segments[index].range);
        let at_end = if self.blocks[&last].is_free { self.blocks[&last].size } else { 0 };
        let growth = (size - at_end).next_multiple_of(2 * MIB);
        assert!(end + growth <= range.size_bytes, "the range is full");
        self.backend.map(range, end, growth).expect("the simulated device has unlimited memory");
        self.reserved_bytes += growth;
        let pointer = range.base.0 + end;
        self.add_block(pointer, growth, index, end, Some(last), stream);
        self.blocks.get_mut(&last).expect("the entry should be linked").next = Some(pointer);
        self.segments[index].last = pointer;
        self.segments[index].end += growth;
        self.put_back(pointer)
    }

    /// Merges a free block with its free neighbors. Returns the merged block.
    fn put_back(&mut self, pointer: u64) -> u64 {
        let Block { prev, next, .. } = self.blocks[&pointer];
        let mut pointer = pointer;
        if let Some(next) = next.filter(|next| self.blocks[next].is_free) {
            self.remove_free(next);
            self.merge(pointer, next);
        }
        if let Some(prev) = prev.filter(|prev| self.blocks[prev].is_free) {
            self.remove_free(prev);
            self.merge(prev, pointer);
            pointer = prev;
        }
        self.insert_free(pointer);
        pointer
    }

    fn merge(&mut self, lower: u64, upper: u64) {
        let gone = self.blocks.remove(&upper).expect("the entry should be linked");
        let kept = self.blocks.get_mut(&lower).expect("the entry should be linked");
        kept.size += gone.size;
        kept.next = gone.next;
        for fence in gone.fences {
            match kept.fences.iter_mut().find(|kept| kept.stream == fence.stream) {
                None => kept.fences.push(fence),
                Some(kept) => {
                    let (later, earlier) =
                        if fence.ordinal > kept.ordinal { (fence, kept.clone()) } else { (kept.clone(), fence) };
                    *kept = later;
                    recycle(&self.backend, earlier);
                }
            }
        }
        match gone.next {
            None => self.segments[gone.segment].last = lower,
            Some(next) => self.blocks.get_mut(&next).expect("the entry should be linked").prev = Some(lower),
        }
    }

    fn split(&mut self, pointer: u64, size: u64) {
        let block = self.blocks.get_mut(&pointer).expect("it should be taken");
        let rest = Block {
            size: block.size - size,
            segment: block.segment,
            offset: block.offset + size,
            prev: Some(pointer),
            next: block.next,
            is_free: true,
            stream: block.stream,
            used_by: Vec::new(),
            fences: block.fences.clone(),
        };
        let upper = pointer + size;
        let next = block.next.replace(upper);
        block.size = size;
        match next {
            None => self.segments[rest.segment].last = upper,
            Some(next) => self.blocks.get_mut(&next).expect("the entry should be linked").prev = Some(upper),
        }
        self.blocks.insert(upper, rest);
        self.insert_free(upper);
    }
}

impl<B: Backend> Subject for Reference<B> {
    /// The device pointer.
    type Handle = u64;

    fn register_stream(&mut self) {
        self.heaps.push(Heap::default());
    }

    fn allocate(&mut self, stream: StreamId, size_bytes: u64) -> u64 {
        let size = size_bytes.next_multiple_of(UNIT_BYTES);
        let is_small = self.is_small(size);
        if let Some(asked) = &mut self.asked {
            asked[stream.index()].push(Question::BestFit((size / UNIT_BYTES) as u32));
        }
        let found = self.free_set(stream.index(), is_small).range((size, 0, 0, 0)..).next().map(|key| key.3);
        let pointer = found.unwrap_or_else(|| self.obtain(stream, size));
        self.remove_free(pointer);
        let rest = self.blocks[&pointer].size - size;
        let splits = match self.policy {
            Segments::Expandable => rest > 0,
            Segments::Fixed if is_small => rest > 0,
            Segments::Fixed => rest > MIB,
        };
        if splits {
            self.split(pointer, size);
        }
        let block = self.blocks.get_mut(&pointer).expect("it should be taken");
        block.is_free = false;
        for fence in block.fences.drain(..) {
            self.backend.wait(stream, *fence.event).expect("a wait");
            recycle(&self.backend, fence);
        }
        pointer
    }

    fn free(&mut self, _: StreamId, pointer: u64) {
        let block = self.blocks.get_mut(&pointer).expect("it should be live");
        block.is_free = true;
        for stream in std::mem::take(&mut block.used_by) {
            let event = Rc::new(self.backend.record(stream).expect("an event"));
            self.events += 1;
            block.fences.push(Fence { stream, ordinal: self.events, event });
        }
        self.put_back(pointer);
    }

    fn record_use(&mut self, pointer: u64, stream: StreamId) {
        let block = self.blocks.get_mut(&pointer).expect("it should be live");
        if stream != block.stream && !block.used_by.contains(&stream) {
            block.used_by.push(stream);
        }
    }

    fn placement(&self, pointer: u64) -> Placement {
        let block = &self.blocks[&pointer];
        Placement { segment: SegmentId(self.segments[block.segment].ordinal), offset_bytes: block.offset }
    }

    fn reserved_bytes(&self) -> u64 {
        self.reserved_bytes
    }
}

/// Recycles the event if no other block waits for it.
fn recycle(backend: &impl Backend, fence: Fence) {
    if let Some(event) = Rc::into_inner(fence.event) {
        backend.recycle(event);
    }
}
