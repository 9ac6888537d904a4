//! Lanes: from a stream to the heap that serves it, found without a lock and without a search.
//!
//! A **lane** is one (pool, stream): the stream, its id, and the bound heap. Every buffer holds its lane, so freeing it
//! takes no search either, and the lane holds the allocator's state. Buffers come by their lanes without counting them, as
//! [`crate::spares`] tells; where they count, threads with streams of their own do it in different places.
//!
//! ```text
//!  allocator ─┐
//!  allocator ─┼─ Lease ─── Lanes   by the address of the CudaStream: the first ones, then a hashed table that only grows
//!  Pool      ─┘              │
//!                            ▼
//!  DeviceBuffer ──────────► Lane ─── State
//!  DeviceBuffer ────────────┘  └─── heap
//! ```
//!
//! A registered stream is kept alive by the backend, and with it its address: an equal address is the same stream. The same
//! raw handle in another wrapper is found the longer way, among all registered streams.

use crate::allocator::State;
use crate::backend::CudaMemory;
use crate::device::CudaDevice;
use crate::error::CudaError;
use crate::spares::{CoreLock, Spares};
use cudarc::driver::CudaStream;
use std::sync::{Arc, OnceLock};
use symmalloc_core::config::StreamPolicy;
use symmalloc_core::{Binding, Entrance, PoolId, StreamId};

/// Lanes that are found without the table.
const FIRST: usize = 4;
/// Places of the table, a power of two.
const PLACES: usize = 64;
/// How many places behind its own a lane may stand. A lane without a place is made again for each allocation.
const STEPS: usize = 8;

/// One (pool, stream) of an allocator. Alone on its cache lines: what it counts may be written with every buffer.
#[repr(align(128))]
pub struct Lane<B: CudaMemory> {
    pub(crate) state: Arc<State<B>>,
    /// Where its allocations lie, captures aside.
    pub(crate) heap: Binding<CoreLock<B>>,
    pub(crate) stream: StreamId,
    /// Where its captures are known.
    pub(crate) device: Arc<CudaDevice>,
    /// The stream; `None` for the host.
    pub(crate) raw: Option<Arc<CudaStream>>,
}

impl<B: CudaMemory> Lane<B> {
    /// The lane of a registered stream.
    pub(crate) fn new(state: &Arc<State<B>>, pool: PoolId, stream: StreamId) -> Result<Arc<Self>, CudaError> {
        let heap = state.core.binding(pool, stream).map_err(symmalloc_core::errors::AllocateError::from)?;
        let raw = state.order().stream(stream).cloned();
        let device = Arc::clone(&state.order().device);
        Ok(Arc::new(Lane { state: Arc::clone(state), heap, stream, device, raw }))
    }

    /// Buffers that are dropped leave their lanes beside the heap from now on, if that has no other lane, and their frees to
    /// who comes next, if another thread is inside.
    fn open_spares(&self) {
        let config = self.state.core.pool_config(self.heap.pool());
        if config.is_ok_and(|config| config.streams() == StreamPolicy::Separate) {
            self.state.core.with_keepsake(&self.heap, Spares::open);
            self.state.core.open_mail(&self.heap);
        }
    }

    /// No lane is left beside the heap any more, nor in its mail.
    fn close_spares(&self) {
        self.state.core.close_mail(&self.heap);
        drop(self.state.core.with_keepsake(&self.heap, Spares::close));
    }
}

/// The lanes of one pool, by stream. Beside them lies what counts the pool's names: not on their cache lines.
#[repr(align(128))]
pub(crate) struct Lanes<B: CudaMemory> {
    /// The lanes that were made first, in that order. Most requests are for one of them. Which one is a branch that a processor
    /// can foresee; a place that is computed stands in front of all that follows.
    first: [OnceLock<Place<B>>; FIRST],
    /// A lane of the others stands in the place that its stream's address hashes to, or in one of the next.
    places: [OnceLock<Place<B>>; PLACES],
    /// The host's.
    host: OnceLock<Arc<Lane<B>>>,
}

/// Where a lane stands, with what an allocation on it needs at once.
pub(crate) struct Place<B: CudaMemory> {
    /// The address of the `CudaStream` that the lane keeps alive.
    address: usize,
    pub(crate) entrance: Entrance<CoreLock<B>>,
    pub(crate) lane: Arc<Lane<B>>,
}

/// Where the lane of a stream at this address belongs in the table.
#[inline(always)]
fn place_of(address: usize) -> usize {
    // Fibonacci hashing: the multiplication carries all bits to the highest ones.
    ((address as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - PLACES.ilog2())) as usize
}

impl<B: CudaMemory> Lanes<B> {
    pub(crate) fn new() -> Self {
        Lanes {
            first: std::array::from_fn(|_| OnceLock::new()),
            places: std::array::from_fn(|_| OnceLock::new()),
            host: OnceLock::new(),
        }
    }

    /// The lane of a stream, if it is one of the first, or stands in the place that the stream's address hashes to, as most do.
    #[inline(always)]
    pub(crate) fn find_first(&self, stream: &CudaStream) -> Option<&Place<B>> {
        let address = std::ptr::from_ref(stream) as usize;
        for place in &self.first {
            let there = place.get()?;
            if there.address == address {
                return Some(there);
            }
        }
        let there = self.places[place_of(address)].get()?;
        (there.address == address).then_some(there)
    }

    /// The lane of a stream that has one.
    #[inline(never)]
    pub(crate) fn find(&self, stream: &CudaStream) -> Option<&Place<B>> {
        let address = std::ptr::from_ref(stream) as usize;
        self.places_of(address).map_while(OnceLock::get).find(|there| there.address == address)
    }

    /// Where the lane of a stream at this address may stand. It stands in none behind one that is free.
    fn places_of(&self, address: usize) -> impl Iterator<Item = &OnceLock<Place<B>>> {
        let hashed = (0..STEPS).map(move |step| &self.places[(place_of(address) + step) % PLACES]);
        self.first.iter().chain(hashed)
    }

    /// Keeps a lane, if there is a place for it.
    #[cold]
    pub(crate) fn keep(&self, lane: &Arc<Lane<B>>) {
        let Some(raw) = &lane.raw else {
            return self.host.get_or_init(|| Arc::clone(lane)).open_spares();
        };
        let address = Arc::as_ptr(raw) as usize;
        for place in self.places_of(address) {
            let kept = place.get_or_init(|| Place { address, entrance: lane.heap.entrance(), lane: Arc::clone(lane) });
            if kept.address == address {
                return kept.lane.open_spares();
            }
        }
    }

    /// The pool's last name goes.
    pub(crate) fn close_spares(&self) {
        let lanes = self.first.iter().chain(&self.places).filter_map(|place| Some(&place.get()?.lane));
        lanes.chain(self.host()).for_each(|lane| lane.close_spares());
    }

    /// The host's lane.
    pub(crate) fn host(&self) -> Option<&Arc<Lane<B>>> {
        self.host.get()
    }
}
