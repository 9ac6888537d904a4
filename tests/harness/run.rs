//! One run of a scenario, in which each op uses the access that the scenario selected.
//!
//! ```text
//!  op ─┬─ by handle ──► allocate, allocate_named, free, record_use ─┐
//!      └─ by address ─► free_at, record_use_at, handle_at ──────────┴─► the same decision, digest and waits
//! ```
//!
//! A live allocation is found by its first address, and a freed one is not. This also holds after a failed call.

use crate::generate::{Access, Scenario};
use std::collections::BTreeMap;
use symmalloc_core::backend::Backend;
use symmalloc_core::config::PointerLookup;
use symmalloc_core::errors::{FreeError, RecordUseError};
use symmalloc_core::lock::Lock;
use symmalloc_core::{Allocation, AllocationId, Op, StreamId, generic};
use symmalloc_trace::replay::{Replay, StepError};

/// See the [module documentation](self).
#[derive(Debug)]
pub struct Run<'a, B: Backend, L: Lock> {
    allocator: &'a generic::Allocator<B, L>,
    scenario: &'a Scenario,
    /// Executor of allocations, and of ops that name no allocation.
    replay: Replay<'a, B, L>,
    live: BTreeMap<AllocationId, Allocation>,
    /// `true` if allocations can be found by address.
    has_lookup: bool,
}

impl<'a, B: Backend, L: Lock> Run<'a, B, L> {
    /// Creates a run on an allocator that no other run uses at the same time.
    pub fn new(allocator: &'a generic::Allocator<B, L>, scenario: &'a Scenario) -> Self {
        let has_lookup = allocator.config().pointer_lookup() != PointerLookup::Off;
        let replay = Replay::new(allocator, &scenario.program);
        Run { allocator, scenario, replay, live: BTreeMap::new(), has_lookup }
    }

    /// Executes the op with this index. Returns the allocation that it made.
    ///
    /// # Errors
    /// Returns an error if the allocator rejects the op, or the op names an allocation that is not live. The run can
    /// continue.
    ///
    /// # Panics
    /// Panics if a live allocation is not found by its address, or a freed one is.
    pub fn step(&mut self, index: usize) -> Result<Option<Allocation>, StepError> {
        let access = self.scenario.access[index];
        match self.scenario.program.ops()[index] {
            ref op @ Op::Allocate { id, .. } => {
                let made = self.replay.step(op)?;
                let allocation = made.expect("an allocation was made");
                if access == Access::Address && self.is_found_by_address(&allocation) {
                    assert_eq!(self.allocator.handle_at(allocation.address), Ok(allocation.handle), "op {index}");
                }
                self.live.insert(id, allocation);
                Ok(made)
            }
            Op::Free { id } => {
                let allocation = *self.live.get(&id).ok_or(StepError::NotLive { id })?;
                self.free(&allocation, access)?;
                self.live.remove(&id);
                Ok(None)
            }
            Op::RecordUse { id, stream } => {
                let allocation = *self.live.get(&id).ok_or(StepError::NotLive { id })?;
                self.record_use(&allocation, stream, access)?;
                Ok(None)
            }
            ref op @ Op::ResetPool { .. } => {
                let reset = self.replay.step(op);
                let allocator = self.allocator;
                self.live.retain(|_, live| allocator.is_live(live.handle));
                reset
            }
            ref op => self.replay.step(op),
        }
    }

    /// Frees all live allocations in order of creation, every second one by address.
    ///
    /// # Errors
    /// Returns an error if the driver cannot fence a use. Another call can free the remaining allocations.
    ///
    /// # Panics
    /// Same as [`step`](Self::step).
    pub fn free_all(&mut self) -> Result<(), FreeError> {
        while let Some((id, allocation)) = self.live.first_key_value() {
            let (id, allocation) = (*id, *allocation);
            self.free(&allocation, if id.0.is_multiple_of(2) { Access::Address } else { Access::Handle })?;
            self.live.remove(&id);
        }
        Ok(())
    }

    /// Returns `true` if the allocation can be found by address: one of zero bytes has none.
    fn is_found_by_address(&self, allocation: &Allocation) -> bool {
        self.has_lookup && allocation.size_bytes > 0
    }

    fn free(&self, allocation: &Allocation, access: Access) -> Result<(), FreeError> {
        let Allocation { handle, address, .. } = *allocation;
        if !self.is_found_by_address(allocation) {
            return self.allocator.free(handle);
        }
        let freed = match access {
            Access::Handle => self.allocator.free(handle),
            Access::Address => self.allocator.free_at(address).map(drop),
        };
        match &freed {
            Ok(()) => {
                assert!(self.allocator.handle_at(address).is_err(), "{allocation:?} was freed and is still found");
                assert!(self.allocator.free_at(address).is_err(), "{allocation:?} was freed twice");
            }
            Err(FreeError::Handle(error)) => panic!("{allocation:?} is live: {error}"),
            Err(_) => assert_eq!(self.allocator.handle_at(address), Ok(handle), "it is still live"),
        }
        freed
    }

    fn record_use(&self, allocation: &Allocation, stream: StreamId, access: Access) -> Result<(), RecordUseError> {
        let noted = match access {
            Access::Address if self.is_found_by_address(allocation) => {
                self.allocator.record_use_at(allocation.address, stream)
            }
            _ => self.allocator.record_use(allocation.handle, stream),
        };
        assert!(!matches!(noted, Err(RecordUseError::Handle(_))), "{allocation:?} is live: {noted:?}");
        noted
    }
}
