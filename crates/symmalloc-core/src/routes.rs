//! Routes: from (pool, stream) to the heap that serves it. Heaps are made at the first request, and found without a lock.

use crate::allocator::{Allocator, allocate_nothing};
use crate::backend::Backend;
use crate::config::StreamPolicy;
use crate::errors::{AllocateError, HandleError, UnknownError};
use crate::free_index::Unfit;
use crate::handle::{Allocation, Handle};
use crate::heap::{Heap, HeapIdentity, Shortage};
use crate::held::{Guarded, HeapCell, HeapGuard, HeapRef};
use crate::ids::{HeapId, PoolId, StreamId};
use crate::lock::{Lock, LockCell};
use crate::out_of_memory::Request;
use crate::plain::Way;
use crate::pool::Pool;
use crate::recording::Tape;
use crate::segment_log::SegmentLog;
use crate::size_rules::{ByRule, Exact, Sizing};
use crate::tally::Tally;
use crate::units::SEGMENT_BYTES_MAX;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The heap of (pool, stream), with what its requests need.
pub(crate) struct Route<'a, B: Backend, L: Lock> {
    pub(crate) allocator: &'a Allocator<B, L>,
    pub(crate) heap: &'a HeapCell<L>,
    pub(crate) pool: PoolId,
    pub(crate) stream: StreamId,
}

impl<B: Backend, L: Lock> Clone for Route<'_, B, L> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend, L: Lock> Copy for Route<'_, B, L> {}

impl<B: Backend, L: Lock> Route<'_, B, L> {
    #[inline(always)]
    pub(crate) fn allocate(&self, size_bytes: u64) -> Result<Allocation, AllocateError> {
        if !(1..=SEGMENT_BYTES_MAX).contains(&size_bytes) {
            return self.allocator.allocate_by_all_means(self.pool, self.stream, size_bytes);
        }
        let mut heap = self.heap.lock();
        if heap.way != Way::Plain {
            return self.allocate_by_rule(heap, size_bytes);
        }
        let allocation = match heap.allocate_at_once(size_bytes) {
            Ok(allocation) => allocation,
            Err(unfit) => return self.allocate_unfit(heap, size_bytes, unfit),
        };
        drop(heap);
        self.allocator.tally(|tally| tally.allocate(allocation.size_bytes, size_bytes));
        Ok(allocation)
    }

    /// As [`allocate`](Self::allocate), in a heap that is not plain. Apart from the way that plain heaps take: in one function,
    /// either would leave the other fewer registers.
    #[inline(never)]
    fn allocate_by_rule(&self, mut heap: HeapGuard<'_, L>, size_bytes: u64) -> Result<Allocation, AllocateError> {
        if heap.is_recorded {
            return self.allocate_recorded(heap, size_bytes);
        }
        let Some(allocation) = heap.allocate_at_once_by_rule(self.stream, size_bytes) else {
            return self.allocate_by::<ByRule>(heap, size_bytes);
        };
        drop(heap);
        self.allocator.tally(|tally| tally.allocate(allocation.size_bytes, size_bytes));
        Ok(allocation)
    }

    /// Allocates from a plain heap whose best fit others used, or that has none.
    #[inline(never)]
    pub(crate) fn allocate_unfit(
        &self,
        mut heap: HeapGuard<'_, L>,
        size_bytes: u64,
        unfit: Unfit,
    ) -> Result<Allocation, AllocateError> {
        let Some(allocation) = heap.allocate_behind_users(&self.allocator.around, size_bytes, unfit) else {
            return self.allocate_by::<Exact>(heap, size_bytes);
        };
        drop(heap);
        self.allocator.tally(|tally| tally.allocate(allocation.size_bytes, size_bytes));
        Ok(allocation)
    }

    /// Allocates what may need more than a free block: memory, waits, books, a refusal. The heap is this route's, and `S`
    /// its sizing; [`ByRule`] is every heap's.
    #[inline(never)]
    pub(crate) fn allocate_by<S: Sizing>(
        &self,
        mut heap: HeapGuard<'_, L>,
        size_bytes: u64,
    ) -> Result<Allocation, AllocateError> {
        let outcome = heap.allocate::<B, L, S>(&self.allocator.around, self.stream, size_bytes);
        drop(heap);
        let allocation = match outcome {
            Ok(allocation) => allocation,
            Err(shortage) => self.persist(size_bytes, *shortage, &mut self.allocator.blank_tape())?,
        };
        self.allocator.tally(|tally| tally.allocate(allocation.size_bytes, size_bytes));
        Ok(allocation)
    }

    /// Allocates from a heap that is recorded: the gate comes before the heap, which is let go.
    #[cold]
    #[inline(never)]
    pub(crate) fn allocate_recorded(
        &self,
        heap: HeapGuard<'_, L>,
        size_bytes: u64,
    ) -> Result<Allocation, AllocateError> {
        drop(heap);
        self.allocate_behind_gate(size_bytes, None)
    }

    /// Allocates up to [`SEGMENT_BYTES_MAX`] bytes, with a name or without.
    #[inline(never)]
    pub(crate) fn allocate_behind_gate(
        &self,
        size_bytes: u64,
        name: Option<&str>,
    ) -> Result<Allocation, AllocateError> {
        let Route { allocator, heap: cell, pool, stream } = *self;
        let mut tape = allocator.tape_of_recorded();
        let mut heap = cell.lock();
        let at_once = match heap.way {
            _ if size_bytes == 0 => None,
            Way::PlainRecorded => heap.allocate_at_once(size_bytes).ok(),
            _ => heap.allocate_at_once_by_rule(stream, size_bytes),
        };
        let Some(allocation) = at_once else { return self.allocate_by_all_means(heap, size_bytes, name, tape) };
        if let Some(name) = name {
            heap.set_name(allocation.handle.slot(), name);
        }
        drop(heap);
        allocator.tally(|tally| tally.allocate(allocation.size_bytes, size_bytes));
        tape.note_allocation(&allocation, (pool, stream, size_bytes), name);
        Ok(allocation)
    }

    /// As [`allocate_behind_gate`](Self::allocate_behind_gate), where no block is at hand.
    #[inline(never)]
    fn allocate_by_all_means(
        &self,
        mut heap: HeapGuard<'_, L>,
        size_bytes: u64,
        name: Option<&str>,
        mut tape: Tape<'_, B, L>,
    ) -> Result<Allocation, AllocateError> {
        let Route { allocator, heap: cell, pool, stream } = *self;
        let allocation = if size_bytes == 0 {
            let nothing = allocate_nothing(&mut heap, stream)?;
            drop(heap);
            nothing
        } else {
            let outcome = heap.allocate::<B, L, ByRule>(&allocator.around, stream, size_bytes);
            drop(heap);
            let allocation = outcome.or_else(|shortage| self.persist(size_bytes, *shortage, &mut tape))?;
            if let Some(name) = name {
                cell.lock().set_name(allocation.handle.slot(), name);
            }
            allocator.tally(|tally| tally.allocate(allocation.size_bytes, size_bytes));
            allocation
        };
        tape.note_allocation(&allocation, (pool, stream, size_bytes), name);
        Ok(allocation)
    }

    /// Does what may end a shortage, and allocates then.
    #[cold]
    #[inline(never)]
    fn persist(
        &self,
        size_bytes: u64,
        shortage: Shortage,
        tape: &mut Tape<'_, B, L>,
    ) -> Result<Allocation, AllocateError> {
        let Route { allocator, heap, pool, stream } = *self;
        let request = Request { pool, stream, size_bytes };
        let again = |heap: &mut Heap| heap.allocate::<B, L, ByRule>(&allocator.around, stream, size_bytes);
        allocator.persist(allocator.pool(pool)?, heap, request, shortage, tape, again)
    }
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    #[inline]
    pub(crate) fn known_stream(&self, stream: StreamId) -> Result<(), UnknownError> {
        let streams = self.streams.load(Ordering::Acquire);
        if u32::from(stream.0) < streams { Ok(()) } else { Err(UnknownError::Stream { stream, streams }) }
    }

    pub(crate) fn heap_of(&self, handle: Handle) -> Result<&HeapCell<L>, HandleError> {
        self.heaps.get(handle.heap().index()).map(|heap| &**heap).ok_or(HandleError::Foreign { handle })
    }

    /// The heap that serves a stream in a pool, if it was made already.
    #[inline(always)]
    pub(crate) fn route(&self, pool: PoolId, stream: StreamId) -> Option<&HeapCell<L>> {
        let entry = self.pools.get(pool.index())?;
        let heap = match entry.config.streams() {
            // A stream has a heap only if it is registered.
            StreamPolicy::Separate => entry.routes.get(stream.index()),
            StreamPolicy::Shared => entry.routes.get(0).filter(|_| self.known_stream(stream).is_ok()),
        };
        heap.map(|heap| &**heap)
    }

    /// The heap that serves a stream in a pool, made at the first request.
    pub(crate) fn route_or_make(
        &self,
        pool: PoolId,
        stream: StreamId,
    ) -> Result<(&Pool<L>, &HeapCell<L>), UnknownError> {
        let entry = self.pool(pool)?;
        self.known_stream(stream)?;
        match entry.routes.get(entry.route_index(stream)) {
            Some(heap) => Ok((entry, heap)),
            None => Ok((entry, self.make_heap(pool, stream)?)),
        }
    }

    /// The heap of (pool, stream) if it was made already.
    pub(crate) fn existing_heap<'a>(&self, entry: &'a Pool<L>, stream: StreamId) -> Option<&'a HeapCell<L>> {
        entry.routes.get(entry.route_index(stream)).map(|heap| &**heap)
    }

    #[cold]
    fn make_heap(&self, pool: PoolId, stream: StreamId) -> Result<&HeapCell<L>, UnknownError> {
        let observers = self.observers.lock();
        let open_scopes = self.open_scopes.lock();
        let entry = self.pool(pool)?;
        let heap = entry.routes.get_or_make(entry.route_index(stream), || {
            let make = |index| {
                let identity = HeapIdentity {
                    id: HeapId(index as u32),
                    pool,
                    stream: (entry.config.streams() == StreamPolicy::Separate).then_some(stream),
                    owner: self.owner,
                };
                let budget = Arc::clone(&entry.budget);
                let lookup = self.config().pointer_lookup();
                let mut heap = Heap::new(identity, entry.config.clone(), budget, self.granularity_bytes, lookup);
                heap.log = SegmentLog::new(Arc::clone(&entry.log_entries));
                if entry.config.symmetric() && self.config().history_ops() > 0 {
                    heap.keep_journal(self.config().history_ops(), Arc::clone(&self.program_order));
                }
                (0..*open_scopes).for_each(|_| heap.usage.open_scope());
                observers.of_pool(pool).for_each(|observer| heap.log.observe(observer));
                heap.set_recorded(self.is_recording());
                L::HeapRef::new(Guarded::new(heap))
            };
            let index = self.heaps.push(make);
            if index == 1 {
                self.start_tally();
            }
            self.heaps.get(index).expect("it was just made").clone()
        });
        Ok(heap)
    }

    /// Whether usage over all heaps is counted beside each heap's own: with one heap they are the same, and several
    /// threads would meet at the counters.
    #[inline]
    pub(crate) fn is_tallied(&self) -> bool {
        L::IS_EXCLUSIVE && self.heaps.len() > 1
    }

    #[inline(always)]
    pub(crate) fn tally(&self, count: impl FnOnce(&L::Tally)) {
        if self.is_tallied() {
            count(&self.tally);
        }
    }

    /// A second heap comes to the first: from now on their sum has peaks of its own.
    fn start_tally(&self) {
        if let Some(first) = self.heaps.get(0).filter(|_| L::IS_EXCLUSIVE) {
            self.tally.begin(first.lock().usage.levels());
        }
    }
}
