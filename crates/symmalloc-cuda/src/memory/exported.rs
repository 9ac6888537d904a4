//! What an allocator has exported: who attached to it, and what importers must be told when the memory is no longer what it was.
//!
//! ```text
//!  free ──────────────► ExportedList ──► ExportedMemory ── page ──► importers
//!  unmap, release ────────────────────────────╯  ╰── peers: a lease each, whose other end the importer holds
//! ```
//! A free looks at one number while nothing is exported. What importers are told is written before it happens.

use super::share_page::{ExportState, SharePage};
use rustix::net::RecvFlags;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use symmalloc_core::PoolId;

/// What an importer may do with the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Access {
    /// Kernels and copies may read. One that writes ends the importer's context.
    Read,
    /// They may write as well.
    ReadWrite,
}

/// A process that has memory of another one mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Peer {
    /// Its process id: who made its end of the socket, as the kernel says, or where it does not know, what the process said itself.
    pub pid: u32,
    /// What it may do.
    pub access: Access,
}

/// Allocations of a pool that were exported together.
#[doc(hidden)]
pub struct ExportedMemory {
    pool: PoolId,
    page: SharePage,
    /// First byte of each allocation, and its number in the order of the export.
    allocations: BTreeMap<u64, u32>,
    /// Those that were offered it, each with a socket whose other end it holds as long as it stays.
    peers: Mutex<Vec<(Peer, OwnedFd)>>,
}

impl ExportedMemory {
    pub(crate) fn new(pool: PoolId, page: SharePage, addresses: impl IntoIterator<Item = u64>) -> Arc<Self> {
        let allocations = addresses.into_iter().zip(0..).collect();
        Arc::new(ExportedMemory { pool, page, allocations, peers: Mutex::default() })
    }

    pub(crate) fn pool(&self) -> PoolId {
        self.pool
    }

    pub(crate) fn page(&self) -> &SharePage {
        &self.page
    }

    pub(crate) fn state(&self) -> ExportState {
        self.page.state()
    }

    pub(crate) fn add_peer(&self, peer: Peer, lease: OwnedFd) {
        self.attached().push((peer, lease));
    }

    /// Closes the leases of those that have left.
    pub(crate) fn forget_gone(&self) {
        drop(self.attached());
    }

    /// Those that are attached now.
    pub(crate) fn peers(&self) -> Vec<Peer> {
        self.attached().iter().map(|(peer, _)| *peer).collect()
    }

    /// Without those whose end of the lease is closed.
    fn attached(&self) -> MutexGuard<'_, Vec<(Peer, OwnedFd)>> {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers.retain(|(_, lease)| is_held(lease));
        peers
    }
}

/// Whether a process still holds the other end of a lease.
pub(crate) fn is_held(lease: impl AsFd) -> bool {
    let mut nothing = [0_u8; 1];
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    // Nobody writes to it: there is nothing to read, or it is closed.
    !matches!(rustix::net::recv(lease, &mut nothing, flags), Ok((_, 0)) | Err(rustix::io::Errno::CONNRESET))
}

/// Of one allocator.
#[derive(Default)]
pub(crate) struct ExportedList {
    /// How many are on the list.
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

    /// An export is over: it goes off the list, unless somebody is attached.
    pub(crate) fn end(&self, memory: &Arc<ExportedMemory>) {
        self.change(|list| list.retain(|other| !Arc::ptr_eq(other, memory) || !memory.attached().is_empty()));
    }

    /// An allocation is about to be freed.
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

    /// The allocator ends: nothing of it is used by this process any more.
    pub(crate) fn end_all(&self) {
        self.change(|list| list.drain(..).for_each(|memory| memory.page.leave_live(ExportState::Ended)));
    }

    /// What is exported or has peers.
    pub(crate) fn all(&self) -> Vec<Arc<ExportedMemory>> {
        self.change(|list| list.clone())
    }

    /// Takes off the list what nobody can be told anything about: neither an export nor a peer is left. Then does something with it.
    fn change<T>(&self, act: impl FnOnce(&mut Vec<Arc<ExportedMemory>>) -> T) -> T {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.retain(|memory| Arc::strong_count(memory) > 1 || !memory.attached().is_empty());
        let outcome = act(&mut list);
        self.count.store(list.len(), Ordering::Relaxed);
        outcome
    }
}
