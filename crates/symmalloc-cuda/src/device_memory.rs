//! The used memory of a device, by owner. Shows, for example, which memory remains on the device while pools sleep.

use crate::allocator::CudaAllocator;
use crate::backend::CudaMemory;
use crate::error::CudaError;
use symmalloc_core::PoolId;
use symmalloc_core::sleep::Phase;

/// The used memory of a device in bytes, by owner. The parts add up to [`used_bytes`](Self::used_bytes), unless memory is allocated or
/// released while they are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceMemory {
    /// Bytes in use by all processes, as the driver reports them.
    pub used_bytes: u64,
    /// Bytes of the allocator's awake pools, including free blocks and excluding the pools of captured graphs.
    pub awake_bytes: u64,
    /// Bytes of the awake pools of captured graphs. Memory that the driver allocates for graphs is part of
    /// [`other_bytes`](Self::other_bytes).
    pub graph_bytes: u64,
    /// Bytes that sleeping pools still hold, because the driver or a window did not release them.
    pub asleep_bytes: u64,
    /// Bytes of sleeping pools that other processes have mapped, or that a [`DmaBuf`](crate::DmaBuf) holds. They return to the device when
    /// the processes detach and the dma-bufs are dropped.
    pub exported_bytes: u64,
    /// Bytes of idle chunks, which the device could not take back yet, and of prefetched memory.
    pub idle_bytes: u64,
    /// Bytes that NCCL holds for communicators: 0 if NCCL is older than 2.29.7 or no communicator is known.
    pub communicators_bytes: u64,
    /// All other bytes: contexts and their modules, other libraries, other allocators and other processes.
    pub other_bytes: u64,
}

impl DeviceMemory {
    /// Moves the bytes of communicators from [`other_bytes`](Self::other_bytes) to [`communicators_bytes`](Self::communicators_bytes).
    #[must_use]
    pub fn with_communicators(mut self, communicators_bytes: u64) -> Self {
        self.communicators_bytes += communicators_bytes;
        self.other_bytes = self.other_bytes.saturating_sub(communicators_bytes);
        self
    }
}

impl CudaAllocator {
    /// Returns the used memory of the device by owner. Communicators are unknown here: `Registrar::device_memory` of `symmalloc-nccl`
    /// includes them. The allocator makes no decision by these numbers (rule D4 in `docs/determinism.md`).
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn device_memory(&self) -> Result<DeviceMemory, CudaError> {
        self.device_memory_with(|_| false)
    }

    /// Returns the used memory of the device by owner, like [`device_memory`](Self::device_memory). Pools for which `is_of_graph` returns
    /// `true` count as pools of graphs, in addition to those of [`GraphPool`](crate::GraphPool).
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn device_memory_with(&self, is_of_graph: impl Fn(PoolId) -> bool) -> Result<DeviceMemory, CudaError> {
        let (core, state) = (self.core(), self.state());
        let info = self.device().memory_info()?;
        let mut memory = DeviceMemory { used_bytes: info.total_bytes - info.free_bytes, ..DeviceMemory::default() };
        for pool in core.pools() {
            let Ok(stats) = core.pool_stats(pool) else { continue };
            let bytes = match core.phase(pool) {
                Ok(Phase::Asleep | Phase::Held) => &mut memory.asleep_bytes,
                _ if is_of_graph(pool) || state.own_observers(pool) > 0 => &mut memory.graph_bytes,
                _ => &mut memory.awake_bytes,
            };
            *bytes += stats.reserved_bytes.current;
        }
        memory.exported_bytes = state.exported().exported_bytes(|pool| core.phase(pool) == Ok(Phase::Asleep));
        memory.idle_bytes = core.backend().idle_bytes() + core.backend().spare_bytes();
        let known =
            [memory.awake_bytes, memory.graph_bytes, memory.asleep_bytes, memory.exported_bytes, memory.idle_bytes];
        memory.other_bytes = memory.used_bytes.saturating_sub(known.into_iter().sum());
        Ok(memory)
    }
}
