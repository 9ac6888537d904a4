//! Debugging: the ops of pools with [`DebugOptions`], and the calls that check memory and explain addresses. The state is
//! the [debugger's](super::debugger).

use super::Allocator;
use super::debugger::{DebuggedBlock, Debugger, Moment, Users};
use super::gate::{Gate, Request};
use super::lookup::SegmentPosition;
use super::pool::PoolRef;
use super::recorder::RecordingEnd;
use super::report::BlockStateSnapshot;
use crate::config::damage::{DebugRecord, MemoryDamage};
use crate::config::errors::{AllocateError, FreeError, HandleError};
use crate::config::{DebugOptions, PoolConfig, StreamPolicy};
use crate::heap::is_nothing;
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::{Backend, DeviceAddress};
use crate::types::handle::{Allocation, Handle};
use crate::types::ids::{HeapNumber, PoolId, StreamId};
use crate::types::units::{Amount, SEGMENT_BYTES_MAX};
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Takes the path that debugs ops if a pool has options.
    pub(super) fn debug_pool(&self, config: &PoolConfig) {
        if !config.debug().is_off() {
            self.recorder.begin_debugging();
        }
    }

    /// Returns the debugging options of a pool that has some.
    pub(super) fn debug_options(&self, pool: PoolId) -> Option<DebugOptions> {
        let options = self.pool(pool).ok()?.config().debug();
        (!options.is_off()).then_some(options)
    }

    /// Allocates in a pool with debugging options. The heap sees the request with its guard.
    pub(super) fn allocate_debugged<'a>(
        &'a self,
        request: Request,
        options: DebugOptions,
        name: Option<&Arc<str>>,
        gate: &mut Gate<'a, L>,
    ) -> Result<Allocation, AllocateError> {
        let Request { pool, stream, size_bytes } = request;
        let grown_bytes = options.grown_bytes(size_bytes);
        if grown_bytes > SEGMENT_BYTES_MAX {
            return Err(AllocateError::TooLarge { requested_bytes: size_bytes });
        }
        if let Some(damage) = self.debugger().take_damage() {
            return Err(AllocateError::Damaged(Box::new(damage)));
        }
        let allocation = self.allocate_in_pool(pool, stream, grown_bytes, name, Some(gate))?;
        if size_bytes == 0 {
            return Ok(allocation);
        }
        let allocated_at_op = self.heap_of(allocation.handle).map_or(0, |heap| heap.lock().ledger().digest().ops);
        let record = DebugRecord {
            name: name.cloned(),
            address: allocation.address,
            requested_bytes: size_bytes,
            pool,
            stream,
            allocated_at_op,
            freed_at_op: None,
        };
        let Allocation { handle, size_bytes, .. } = allocation;
        let block = DebuggedBlock { handle, record: Arc::new(record), options, size_bytes, is_of_graph: false };
        let usable_bytes = block.usable_bytes();
        self.debugger.lock().begin(&self.context.backend, block);
        Ok(Allocation { size_bytes: usable_bytes, ..allocation })
    }

    /// Frees an allocation of a pool with debugging options. Returns the bytes that the program could use, or `None` if the
    /// debugger does not know the allocation: its pool has no options, or a layout was restored.
    pub(super) fn free_debugged(&self, handle: Handle, gate: &mut Gate<'_, L>) -> Result<Option<u64>, FreeError> {
        if !self.recorder.is_debugged() || is_nothing(handle) {
            return Ok(None);
        }
        self.check_quarantine(handle)?;
        let address = self.heap_of(handle)?.lock().allocation(handle)?.address;
        let freed = self.with_moment(handle, |debugger, backend, moment| debugger.end(backend, address, moment))?;
        let Some(freed) = freed else { return Ok(None) };
        let (block, heap) = (freed.block.clone(), handle.heap());
        let DebugOptions { quarantine_bytes, unmap, .. } = block.options;
        if quarantine_bytes > 0 {
            self.debugger.lock().quarantine(heap, freed);
            // The program's free has succeeded. Blocks that the driver fails to fence stay in the quarantine.
            let _left = self.leave_quarantine(heap, quarantine_bytes, gate);
        } else if let Err(error) = self.free_in_heap(handle, gate) {
            self.debugger.lock().restore(block);
            return Err(error);
        }
        if unmap {
            self.unmap_free(heap, gate);
        }
        Ok(Some(block.usable_bytes()))
    }

    /// Gives the oldest blocks of a heap's quarantine back to the heap, until it has at most `bytes_max`.
    fn leave_quarantine(&self, heap: HeapNumber, bytes_max: u64, gate: &mut Gate<'_, L>) -> Result<(), FreeError> {
        loop {
            let Some(oldest) = self.debugger.lock().oldest_above(heap, bytes_max) else { return Ok(()) };
            // The comparison must be submitted before the free, which lets other streams take the memory.
            self.with_moment(oldest, |debugger, backend, moment| debugger.compare_oldest(backend, heap, moment))?;
            self.free_in_heap(oldest, gate)?;
            self.debugger.lock().leave(heap);
        }
    }

    /// Releases the free granules of a heap.
    fn unmap_free(&self, heap: HeapNumber, gate: &mut Gate<'_, L>) {
        let Some(heap) = self.heaps.get(heap.index()) else { return };
        let released = heap.cell().lock().trim(&self.context, None);
        gate.note_released(&released);
    }

    /// Frees the quarantined blocks of a pool.
    pub(super) fn leave_quarantines(&self, pool: PoolId, gate: &mut Gate<'_, L>) {
        if self.debug_options(pool).is_none() {
            return;
        }
        let Ok(entry) = self.pool(pool) else { return };
        let heaps: Vec<_> = entry.heaps().map(|heap| heap.lock().number()).collect();
        for heap in heaps {
            if let Err(FreeError::Fence(error)) = self.leave_quarantine(heap, 0, gate) {
                gate.end(RecordingEnd::Driver(error));
            }
        }
    }

    /// Returns an error if the program has freed the allocation and its heap does not reuse it yet.
    pub(super) fn check_quarantine(&self, handle: Handle) -> Result<(), HandleError> {
        if !self.recorder.is_debugged() || is_nothing(handle) {
            return Ok(());
        }
        let address = self.heap_of(handle)?.lock().allocation(handle)?.address;
        if self.debugger.lock().is_quarantined(address) { Err(HandleError::Stale { handle }) } else { Ok(()) }
    }

    /// Returns a live allocation without its guard.
    pub(super) fn without_guard(&self, allocation: Allocation) -> Allocation {
        if !self.recorder.is_debugged() {
            return allocation;
        }
        let usable_bytes = self.debugger.lock().live_at(allocation.address).map(DebuggedBlock::usable_bytes);
        Allocation { size_bytes: usable_bytes.unwrap_or(allocation.size_bytes), ..allocation }
    }

    /// Forgets the live allocations of a pool that was reset.
    pub(super) fn debug_reset(&self, pool: PoolId) {
        if self.debug_options(pool).is_some() {
            self.debugger.lock().forget(pool);
        }
    }

    /// Writes the guards of a pool that has woken again.
    pub(super) fn debug_woken(&self, pool: PoolId) {
        if self.debug_options(pool).is_some() {
            self.debugger.lock().rewrite(&self.context.backend, pool);
        }
    }

    /// Returns the debugger, after it has collected the results of comparisons.
    fn debugger(&self) -> impl std::ops::DerefMut<Target = Debugger> + use<'_, B, L> {
        let mut debugger = self.debugger.lock();
        debugger.collect(&self.context.backend);
        debugger
    }

    /// Passes the state of a live allocation's heap to `act`.
    fn with_moment<T>(
        &self,
        handle: Handle,
        act: impl FnOnce(&mut Debugger, &dyn Backend, Moment<'_>) -> T,
    ) -> Result<T, HandleError> {
        let heap = self.heap_of(handle)?.lock();
        let users: Users = heap.users_of(handle)?;
        let config = self.pool(heap.id().pool).map(PoolRef::config);
        let keeps = |config: &PoolConfig| config.streams() == StreamPolicy::Separate && config.stitching().is_none();
        let moment = Moment {
            op: heap.ledger().digest().ops,
            users: &users,
            released_bytes: self.context.budget.released_bytes(),
            is_mapped: !heap.is_asleep(),
            keeps_guards: config.is_ok_and(keeps),
        };
        drop(heap);
        Ok(act(&mut self.debugger.lock(), &self.context.backend, moment))
    }

    /// Checks the guards of all live allocations in pools with `debug:canary`, and collects the results of earlier
    /// comparisons. Blocks the host until the streams of these allocations have completed their work. Returns the number of
    /// checked guards.
    ///
    /// Guards are also checked when their block is freed, before a trim and before a sleep, and when the allocator is dropped. Damage is
    /// returned once, by this call or by a later allocation, and reported to `tracing` as `memory.damaged`.
    ///
    /// # Determinism
    /// Not an op. What is found changes no placement.
    ///
    /// # Errors
    /// Returns the damage that was found first.
    ///
    /// # Examples
    /// ```
    /// use symmalloc::{Allocator, Config, DeviceAddress, PoolId};
    /// use symmalloc::sim::SimBackend;
    ///
    /// let allocator = Allocator::new(SimBackend::builder().build(), "debug:canary".parse::<Config>()?)?;
    /// let stream = allocator.register_stream()?;
    /// let scores = allocator.allocate_named(PoolId::DEFAULT, stream, 4000, "scores")?;
    /// assert_eq!(allocator.check_memory()?, 1);
    ///
    /// let end = DeviceAddress(scores.address.0 + 4000);
    /// allocator.backend().write(end, 4, 1); // one element too many
    /// let damage = allocator.check_memory().unwrap_err();
    /// assert!(damage.to_string().contains("\"scores\""));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn check_memory(&self) -> Result<u64, Box<MemoryDamage>> {
        let checked = self.check_guards(None);
        self.debugger().take_damage().map_or(Ok(checked), |damage| Err(Box::new(damage)))
    }

    /// Checks the guards of a pool before its memory is released, saved or dropped.
    pub(super) fn check_guards_of(&self, pool: PoolId) {
        if self.debug_options(pool).is_some() {
            self.check_guards(Some(pool));
        }
    }

    /// Checks the guards of one pool, or of all pools, and waits for the results. Returns the number of checked guards.
    pub(super) fn check_guards(&self, pool: Option<PoolId>) -> u64 {
        if !self.recorder.is_debugged() {
            return 0;
        }
        let (mut checked, mut streams) = (0, BTreeSet::<StreamId>::new());
        let live = self.debugger.lock().live_in(pool);
        for (handle, address) in live {
            // Another thread may have freed it.
            let check = self.with_moment(handle, |debugger, backend, moment| debugger.check(backend, address, moment));
            if let Ok(Some(stream)) = check {
                checked += 1;
                streams.insert(stream);
            }
        }
        let mut debugger = self.debugger.lock();
        streams.extend(debugger.streams_in_check());
        for stream in streams {
            if let Err(error) = self.context.backend.synchronize(stream) {
                tracing::warn!(name: "debug.failed", target: "symmalloc", call = "synchronize", %error);
            }
        }
        debugger.collect(&self.context.backend);
        checked
    }

    /// Returns the allocations that were freed last in pools with debugging options, newest first. After a fault, the
    /// address of one of them may be the one that the program still used.
    pub fn freed_last(&self, count: usize) -> Vec<Arc<DebugRecord>> {
        self.debugger.lock().freed_last(count)
    }

    /// Returns what the allocator knows about a device address: the allocation that contains it, its neighbors, and, in
    /// pools with debugging options, the freed allocations that contained it. Takes O(blocks of the heap).
    ///
    /// # Examples
    /// ```
    /// use symmalloc::{Allocator, Config, DeviceAddress, PoolId};
    /// use symmalloc::sim::SimBackend;
    ///
    /// let allocator = Allocator::new(SimBackend::builder().build(), "debug:poison".parse::<Config>()?)?;
    /// let stream = allocator.register_stream()?;
    /// let scores = allocator.allocate_named(PoolId::DEFAULT, stream, 4000, "scores")?;
    /// allocator.free(scores.handle)?;
    /// let report = allocator.explain_address(DeviceAddress(scores.address.0 + 16));
    /// assert_eq!(report.freed[0].name.as_deref(), Some("scores"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn explain_address(&self, address: DeviceAddress) -> AddressReport {
        let segment = self.segment_at(address);
        let mut report = AddressReport {
            address,
            segment,
            block: None,
            before: None,
            after: None,
            is_quarantined: false,
            freed: self.debugger.lock().freed_around(address),
        };
        let Some(position) = segment else { return report };
        let Ok(entry) = self.pool(position.heap.pool) else { return report };
        let snapshots = entry.heaps().map(|heap| heap.lock().snapshot());
        let snapshot = snapshots.flatten().find(|snapshot| snapshot.base == position.base);
        let Some(snapshot) = snapshot else { return report };
        let base = snapshot.base;
        let blocks = snapshot.blocks.into_iter().map(|block| AddressBlock {
            address: DeviceAddress(base.0 + block.offset_bytes),
            size_bytes: block.size_bytes,
            state: block.state,
        });
        for block in blocks {
            let is_live = matches!(block.state, BlockStateSnapshot::Allocated { .. });
            if block.contains(address) {
                report.is_quarantined = self.debugger.lock().is_quarantined(block.address);
                report.block = Some(block);
            } else if is_live && block.address < address {
                report.before = Some(block);
            } else if is_live && report.after.is_none() {
                report.after = Some(block);
            }
        }
        report
    }

    /// Checks all memory a last time, when the allocator is dropped.
    pub(super) fn end_debugging(&self) {
        if self.recorder.is_debugged() {
            // Damage is reported to `tracing` when it is found.
            self.check_guards(None);
        }
    }
}

/// A block of an [`AddressReport`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AddressBlock {
    /// Address of its first byte.
    pub address: DeviceAddress,
    /// Its size in bytes, with its guard.
    pub size_bytes: u64,
    /// Its state. A block in a quarantine is `Allocated`.
    pub state: BlockStateSnapshot,
}

impl AddressBlock {
    fn contains(&self, address: DeviceAddress) -> bool {
        address.0.checked_sub(self.address.0).is_some_and(|offset| offset < self.size_bytes)
    }
}

impl fmt::Display for AddressBlock {
    /// Writes `the allocation "weights" of 4.00 KiB at 0x7f0000000000 for s1`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (address, size) = (self.address.0, Amount(self.size_bytes));
        match &self.state {
            BlockStateSnapshot::Allocated { stream, requested_bytes, name, used_by } => {
                match name {
                    Some(name) => write!(f, "the allocation {name:?}")?,
                    None => f.write_str("an unnamed allocation")?,
                }
                write!(f, " of {} at {address:#x} for {stream}", Amount(*requested_bytes))?;
                if used_by.is_empty() {
                    return Ok(());
                }
                f.write_str(", used by ")?;
                write!(f, "{}", used_by.iter().map(StreamId::to_string).collect::<Vec<_>>().join(" and "))
            }
            BlockStateSnapshot::Free { .. } => write!(f, "a free block of {size} at {address:#x}"),
            BlockStateSnapshot::Hole => write!(f, "a hole of {size} at {address:#x}, whose memory was released"),
            BlockStateSnapshot::Elsewhere => write!(f, "{size} at {address:#x} that are in use under other addresses"),
        }
    }
}

/// What an allocator knows about a device address, from [`Allocator::explain_address`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AddressReport {
    /// The address.
    pub address: DeviceAddress,
    /// The live segment that contains it.
    pub segment: Option<SegmentPosition>,
    /// The block that contains it.
    pub block: Option<AddressBlock>,
    /// The nearest live allocation before that block in its segment.
    pub before: Option<AddressBlock>,
    /// The nearest live allocation after that block in its segment.
    pub after: Option<AddressBlock>,
    /// `true` if the program has freed the block, and its heap does not reuse it yet.
    pub is_quarantined: bool,
    /// Freed allocations that contained the address, newest first. Known for pools with debugging options.
    pub freed: Vec<Arc<DebugRecord>>,
}

impl fmt::Display for AddressReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}: ", self.address.0)?;
        match (&self.segment, &self.block) {
            (Some(segment), Some(block)) => {
                let offset_bytes = self.address.0 - block.address.0;
                writeln!(f, "byte {offset_bytes} of {block}, in {} of {}", segment.segment, segment.heap)?;
                if self.is_quarantined {
                    writeln!(f, "  the program has freed it; it waits in the quarantine")?;
                } else if matches!(block.state, BlockStateSnapshot::Allocated { requested_bytes, .. } if offset_bytes >= requested_bytes)
                {
                    writeln!(f, "  the address lies past the requested bytes")?;
                }
            }
            _ => writeln!(f, "in no segment of this allocator")?,
        }
        for (word, neighbor) in [("before", &self.before), ("after", &self.after)] {
            if let Some(neighbor) = neighbor {
                writeln!(f, "  {word} it: {neighbor}")?;
            }
        }
        for freed in &self.freed {
            writeln!(f, "  earlier: {freed}")?;
        }
        if self.freed.is_empty()
            && !matches!(&self.block, Some(AddressBlock { state: BlockStateSnapshot::Allocated { .. }, .. }))
        {
            writeln!(
                f,
                "  freed allocations are remembered in pools with `debug:poison`, or another debugging option"
            )?;
        }
        Ok(())
    }
}
