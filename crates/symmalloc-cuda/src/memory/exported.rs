//! An allocator's exports: the attached peers, and the notifications to importers when exported memory changes.
//!
//! ```text
//!  free ──────────────► ExportedList ──► ExportedMemory ── page ──► importers
//!  unmap, release ────────────────────────────╯  ╰── peers: one lease each, whose other end the importer holds
//! ```
//! While nothing is exported, a free only reads one counter. Importers are notified before a change takes effect.

use super::chunks::Part;
use super::share_page::{ExportState, SharePage};
use rustix::net::RecvFlags;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use symmalloc_core::PoolId;
use symmalloc_files::KeptFromChildren;

/// The access that an importer has to the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Access {
    /// Kernels and copies may read. A kernel that writes makes the importer's context unusable.
    Read,
    /// Kernels and copies may read and write.
    ReadWrite,
}

/// A process that has mapped memory of another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Peer {
    /// Id of the process that created the peer's end of the socket, as reported by the kernel, or by the peer itself if the kernel does not
    /// know it.
    pub pid: u32,
    /// The access that the peer has.
    pub access: Access,
}

/// Allocations of a pool that were exported together.
#[doc(hidden)]
pub struct ExportedMemory {
    pool: PoolId,
    page: SharePage,
    /// Address of each allocation's first byte, and its index in the export order.
    allocations: BTreeMap<u64, u32>,
    /// Address ranges of the chunks behind the allocations; empty while the export is being created.
    chunks: OnceLock<Vec<Part>>,
    /// `true` if this process holds the chunks itself until the export ends, for a dma-buf.
    is_held: bool,
    /// Processes that received an offer, each with this process's end of a lease. The peer holds the other end while it is attached.
    peers: Mutex<Vec<(Peer, Lease)>>,
}

impl ExportedMemory {
    /// Creates the state of an export whose memory is kept alive only by the export's peers.
    pub(crate) fn new(pool: PoolId, page: SharePage, addresses: impl IntoIterator<Item = u64>) -> Arc<Self> {
        Self::with(pool, page, addresses, false)
    }

    /// Creates the state of an export whose memory this process keeps until the export ends.
    pub(crate) fn held(pool: PoolId, page: SharePage, addresses: impl IntoIterator<Item = u64>) -> Arc<Self> {
        Self::with(pool, page, addresses, true)
    }

    fn with(pool: PoolId, page: SharePage, addresses: impl IntoIterator<Item = u64>, is_held: bool) -> Arc<Self> {
        let allocations = addresses.into_iter().zip(0..).collect();
        Arc::new(ExportedMemory { pool, page, allocations, chunks: OnceLock::new(), is_held, peers: Mutex::default() })
    }

    pub(crate) fn pool(&self) -> PoolId {
        self.pool
    }

    /// Sets the chunks behind the allocations, once.
    pub(crate) fn set_chunks(&self, chunks: Vec<Part>) {
        let _was_empty = self.chunks.set(chunks);
    }

    pub(crate) fn page(&self) -> &SharePage {
        &self.page
    }

    pub(crate) fn state(&self) -> ExportState {
        self.page.state()
    }

    pub(crate) fn add_peer(&self, peer: Peer, lease: Lease) {
        self.attached().push((peer, lease));
    }

    /// Closes the leases of peers that have left.
    pub(crate) fn forget_gone(&self) {
        drop(self.attached());
    }

    /// Returns the peers that are currently attached.
    pub(crate) fn peers(&self) -> Vec<Peer> {
        self.attached().iter().map(|(peer, _)| *peer).collect()
    }

    /// Locks the list of peers and removes those whose end of the lease is closed.
    fn attached(&self) -> MutexGuard<'_, Vec<(Peer, Lease)>> {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers.retain(|(_, lease)| is_held(lease));
        peers
    }
}

/// One end of a lease. A lease is a socket: the other process notices when this end is closed or this process dies, even if a forked child
/// of this process is still running.
#[derive(Debug)]
pub(crate) struct Lease {
    // Dropped before the descriptor is closed.
    _kept: KeptFromChildren,
    end: OwnedFd,
}

impl Lease {
    pub(crate) fn new(end: OwnedFd) -> Self {
        Lease { _kept: KeptFromChildren::new(end.as_fd()), end }
    }
}

impl AsFd for Lease {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.end.as_fd()
    }
}

/// Returns `true` if a process still holds the other end of a lease.
pub(crate) fn is_held(lease: impl AsFd) -> bool {
    let mut nothing = [0_u8; 1];
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    // Nobody writes to the socket, so either there is nothing to read or the other end is closed.
    !matches!(rustix::net::recv(lease, &mut nothing, flags), Ok((_, 0)) | Err(rustix::io::Errno::CONNRESET))
}

/// The exports of one allocator.
#[derive(Default)]
pub(crate) struct ExportedList {
    /// Number of exports in the list.
    count: AtomicUsize,
    list: Mutex<Vec<Arc<ExportedMemory>>>,
}

impl ExportedList {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    pub(crate) fn add(&self, memory: &Arc<ExportedMemory>) {
        self.change(|list| list.push(Arc::clone(memory)));
    }

    /// Ends an export. Removes it from the list unless a peer is attached.
    pub(crate) fn end(&self, memory: &Arc<ExportedMemory>) {
        self.change(|list| list.retain(|other| !Arc::ptr_eq(other, memory) || !memory.attached().is_empty()));
    }

    /// Notifies importers that an allocation is about to be freed.
    #[cold]
    pub(crate) fn note_free(&self, address: u64) {
        self.change(|list| {
            for memory in list.iter() {
                if let Some(&allocation) = memory.allocations.get(&address) {
                    memory.page.leave_live(ExportState::Freed(allocation));
                }
            }
        });
    }

    /// Notifies importers that the allocator has ended, so this process no longer uses the exported memory.
    pub(crate) fn end_all(&self) {
        self.change(|list| list.drain(..).for_each(|memory| memory.page.leave_live(ExportState::Ended)));
    }

    /// Returns all exports that are active or have peers.
    pub(crate) fn all(&self) -> Vec<Arc<ExportedMemory>> {
        self.change(|list| list.clone())
    }

    /// Returns the bytes of exported chunks of the selected pools that other processes have mapped, or that are held for a dma-buf. A chunk
    /// that belongs to several exports counts once.
    pub(crate) fn exported_bytes(&self, is_selected: impl Fn(PoolId) -> bool) -> u64 {
        let all = self.all();
        let is_in_use = |memory: &ExportedMemory| memory.is_held || !memory.attached().is_empty();
        let in_use = all.iter().filter(|memory| is_selected(memory.pool) && is_in_use(memory));
        let chunks: BTreeMap<u64, u64> =
            in_use.filter_map(|memory| memory.chunks.get()).flatten().map(|chunk| (chunk.start, chunk.end)).collect();
        chunks.into_iter().map(|(start, end)| end - start).sum()
    }

    /// Locks the list for `act`. First removes entries with neither an active export nor a peer, because nobody is left to notify.
    fn change<T>(&self, act: impl FnOnce(&mut Vec<Arc<ExportedMemory>>) -> T) -> T {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.retain(|memory| Arc::strong_count(memory) > 1 || !memory.attached().is_empty());
        let outcome = act(&mut list);
        self.count.store(list.len(), Ordering::Relaxed);
        outcome
    }
}
