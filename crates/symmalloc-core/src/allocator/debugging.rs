//! Debugging: the calls that check the memory of pools with [`DebugOptions`](crate::config::DebugOptions). The state of
//! each heap is in its [`HeapDebugger`](crate::heap::debugger::HeapDebugger).
//!
//! No lock of a heap is held while the host waits for a stream. A check therefore visits the heaps three times: it submits
//! comparisons, waits, and reads their results.

use super::Allocator;
use super::pool::{HeapCell, PoolRef};
use crate::config::damage::{DebugRecord, MemoryDamage, MemoryFault};
use crate::config::errors::{AllocateError, FreeError, OutOfMemoryCause};
use crate::heap::debugger::FreedBlock;
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::{Backend, BackendError, Reason};
use crate::types::ids::PoolId;
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Blocks that a check submits before it looks whether the host must wait.
const BLOCKS_AT_ONCE: usize = 64;
/// Freed blocks that an error names after a fault.
const NAMED_MAX: usize = 4;

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Checks the guards of all live allocations in pools with `debug:canary`, and collects the results of earlier
    /// comparisons. Blocks the host until the streams of these allocations have completed their work. Returns the
    /// number of checked guards.
    ///
    /// Also checks that freed blocks in a quarantine still hold the pattern of `debug:poison`. Guards are also checked
    /// when their block is freed or reset, before a trim and a sleep, at the end of a pool and when the allocator is
    /// dropped. Damage is reported to
    /// `tracing` as `memory.damaged` when it is found, and returned once, by this call. Memory of streams that are being
    /// captured is not checked.
    ///
    /// # Determinism
    /// Not an op. What is found changes no placement. If no other thread uses the allocator, the returned damage and
    /// its order are a function of the ops and of the overwritten bytes.
    ///
    /// # Errors
    /// Returns one damage: the first of a destroyed pool, or of the first heap that has some, in (pool, stream) order.
    /// Call it again for the next one.
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
        let damage = self.debug.take_damage();
        let damage = damage.or_else(|| self.all_heaps().find_map(|heap| heap.lock().take_damage()));
        damage.map_or(Ok(checked), |damage| Err(Box::new(damage)))
    }

    /// Checks the memory of a pool before it is released, saved or dropped.
    pub(super) fn check_guards_of(&self, pool: PoolId) {
        if self.recorder.is_debugged() {
            self.check_guards(Some(pool));
        }
    }

    /// Checks the memory of one pool, or of all pools, and waits for the results. Returns the number of checked guards.
    pub(super) fn check_guards(&self, pool: Option<PoolId>) -> u64 {
        if !self.recorder.is_debugged() {
            return 0;
        }
        let mut checked = 0;
        for heap in self.heaps_in(pool) {
            let blocks = heap.lock().debugged_blocks();
            for blocks in blocks.chunks(BLOCKS_AT_ONCE) {
                checked += heap.lock().check_debugged(&self.context, blocks);
                self.debug.totals().has_backlog().then(|| self.complete_checks(None));
            }
        }
        self.complete_checks(pool);
        checked
    }

    /// Waits for the comparisons in progress in one pool, or in all pools, and reads their results. A comparison on a
    /// stream that is being captured stays in progress.
    pub(super) fn complete_checks(&self, pool: Option<PoolId>) {
        let heaps = self.heaps_in(pool);
        let mut streams = BTreeSet::new();
        heaps.iter().for_each(|heap| heap.lock().add_checked_streams(&mut streams));
        let backend = &self.context.backend;
        for stream in streams.into_iter().filter(|stream| !backend.is_captured(*stream)) {
            if let Err(error) = backend.synchronize(stream) {
                tracing::warn!(name: "debug.failed", target: "symmalloc", call = "synchronize", %error);
            }
        }
        heaps.iter().for_each(|heap| heap.lock().collect_checks(&self.context));
    }

    /// Returns the heaps of one pool, or of all pools. None of them is locked.
    fn heaps_in(&self, pool: Option<PoolId>) -> Vec<&HeapCell<L>> {
        match pool {
            None => self.all_heaps().collect(),
            Some(pool) => self.pool(pool).map_or_else(|_| Vec::new(), |entry| entry.heaps().collect()),
        }
    }

    /// Returns the allocations that were freed last in pools with debugging options, newest first. After a fault, the
    /// address of one of them may be the one that the program still used.
    pub fn freed_last(&self, count: usize) -> Vec<Arc<DebugRecord>> {
        self.freed_blocks(|_| true).into_iter().take(count).map(|(_, record)| record).collect()
    }

    /// Returns the freed blocks that `is_meant` accepts, newest first.
    pub(super) fn freed_blocks(&self, is_meant: impl Fn(&DebugRecord) -> bool) -> Vec<FreedBlock> {
        let mut freed = self.debug.freed_blocks(&is_meant);
        for heap in self.all_heaps() {
            freed.extend(heap.lock().freed_blocks().filter(|(_, record)| is_meant(record)).cloned());
        }
        freed.sort_by_key(|(number, _)| Reverse(*number));
        freed
    }

    /// Names what was freed before a call failed because the device is lost.
    pub(super) fn with_suspects(&self, error: AllocateError) -> AllocateError {
        let cause = match &error {
            AllocateError::Fence { error, .. } => Some(error),
            AllocateError::OutOfMemory(refused) => match &refused.cause {
                OutOfMemoryCause::Driver(error) => Some(error),
                _ => None,
            },
            _ => None,
        };
        cause.and_then(|cause| self.fault(cause)).map_or(error, AllocateError::Fault)
    }

    /// Like [`with_suspects`](Self::with_suspects), for a free.
    pub(super) fn with_suspects_of_free(&self, error: FreeError) -> FreeError {
        match &error {
            FreeError::Fence(cause) => self.fault(cause).map_or(error, FreeError::Fault),
            _ => error,
        }
    }

    fn fault(&self, error: &BackendError) -> Option<Box<MemoryFault>> {
        if error.reason != Reason::DeviceLost || !self.recorder.is_debugged() {
            return None;
        }
        let freed = self.freed_last(NAMED_MAX);
        let sleeps = |entry: &PoolRef<'_, L>| !entry.is_destroyed() && !entry.sleep().lock().is_awake();
        let asleep: Vec<_> = self.listed_pools().filter(sleeps).map(PoolRef::id).collect();
        let is_known = !freed.is_empty() || !asleep.is_empty();
        is_known.then(|| Box::new(MemoryFault::new(error.clone(), freed, asleep)))
    }

    /// Checks all memory a last time, when the allocator is dropped.
    pub(super) fn end_debugging(&self) {
        // Damage is reported to `tracing` when it is found.
        self.check_guards(None);
    }
}
