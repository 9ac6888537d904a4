//! The exporter's side: offers a pool's current allocations to processes that attach to them.

use super::channel::Channel;
use super::error::{DeviceUuid, ShareError};
use super::message::{
    BATCH, BATCH_OF_HANDLES, BODY_BYTES_MAX, Header, Hello, Layout, OFFER, REFUSAL, Refusal, SharedAllocation,
    SharedSegment, Step, VERSION, short,
};
use crate::allocator::CudaAllocator;
use crate::backend::sealed::BackendParts;
use crate::memory::{Access, ExportState, ExportedHandle, ExportedMemory, HandleKind, Lease, Peer, SharePage};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;
use symmalloc_core::PoolId;
use symmalloc_core::report::{BlockSnapshot, BlockStateSnapshot, SegmentSnapshot};
use symmalloc_files::is_forked;

/// The allocations of a pool at the time of the export, for other processes on the same device.
///
/// Importers are notified before the memory changes: when one of the allocations is freed, when memory is returned to the device (because
/// the pool is put to sleep), or when the export is withdrawn. Frees are detected if they go through this crate (dropped buffers,
/// [`CachingAllocator::free`](crate::CachingAllocator::free)), but not if the program calls the core's allocator directly.
///
/// Dropping an export stops serving it. Attached peers stay attached and are still notified. [`withdraw`](Self::withdraw) asks them to
/// detach.
///
/// # Examples
/// ```no_run
/// use std::os::unix::net::UnixListener;
/// use std::time::Duration;
/// use symmalloc_core::config::PoolConfig;
/// use symmalloc_cuda::{Access, CudaAllocator, CudaDevice};
///
/// let device = CudaDevice::new(0)?;
/// let allocator = CudaAllocator::new(&device, Default::default())?;
/// let pool = allocator.create_pool(PoolConfig::builder().build()?)?;
/// let weights = allocator.with_pool(&pool); // a separate pool, so that nothing else is allocated or freed in it
/// let stream = device.context().new_stream()?;
/// let embedding = weights.alloc_zeroed_named::<f32>(&stream, 1 << 20, "embedding")?;
/// stream.synchronize()?; // importers do not see this process's streams
///
/// let export = weights.export()?;
/// let listener = UnixListener::bind("/run/trainer.socket")?;
/// let (socket, _) = listener.accept()?;
/// let peer = export.serve(&socket, Access::Read, Duration::from_secs(10))?;
/// println!("{} reads the weights", peer.pid);
/// # drop(embedding);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Export {
    /// Allocator that keeps the memory alive.
    allocator: CudaAllocator,
    memory: Arc<ExportedMemory>,
    layout: Layout,
    /// Base address of each segment of the layout.
    bases: Vec<u64>,
    body: Vec<u8>,
    uuid: DeviceUuid,
}

/// The state of an export and its peers.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExportReport {
    /// The pool that was exported.
    pub pool: PoolId,
    /// The state of the memory.
    pub state: ExportState,
    /// Processes that are attached, or received an offer and have not left.
    pub peers: Vec<Peer>,
}

impl CudaAllocator {
    /// Exports the current allocations of this allocator's pool, with names and addresses. Whole chunks of memory are shared, so use a
    /// separate pool for shared allocations. Allocations of zero bytes are left out.
    ///
    /// # Errors
    /// Returns an error if the memory does not support export ([`ShareError::NotExportable`]), the pool has no allocations, or the pool
    /// changes during the export.
    pub fn export(&self) -> Result<Export, ShareError> {
        Export::of(self)
    }

    /// Returns the exports whose memory other processes or devices may use: active exports, ended exports that still have peers, and open
    /// dma-bufs.
    pub fn exports(&self) -> Vec<ExportReport> {
        self.state().exported().all().iter().map(|memory| report(memory)).collect()
    }
}

fn report(memory: &ExportedMemory) -> ExportReport {
    ExportReport { pool: memory.pool(), state: memory.state(), peers: memory.peers() }
}

/// Returns the segments of the allocator's pool that have live allocations, with only the blocks of these allocations.
fn live_segments(allocator: &CudaAllocator) -> Vec<SegmentSnapshot> {
    let mut segments = allocator.core().snapshot().segments;
    segments.retain(|segment| segment.heap.pool == allocator.pool());
    for segment in &mut segments {
        segment.blocks.retain(|block| matches!(block.state, BlockStateSnapshot::Allocated { .. }));
    }
    segments.retain(|segment| !segment.blocks.is_empty());
    segments
}

/// Returns the allocations of segments, in order.
fn allocations_of(segments: &[SegmentSnapshot]) -> Vec<SharedAllocation> {
    let of = |(index, segment): (usize, &SegmentSnapshot)| {
        let block = |block: &BlockSnapshot| {
            let BlockStateSnapshot::Allocated { stream, requested_bytes, name, .. } = &block.state else { return None };
            Some(SharedAllocation {
                segment: index as u32,
                stream: *stream,
                offset_bytes: block.offset_bytes,
                size_bytes: *requested_bytes,
                name: name.as_deref().map(|name| short(name).into()),
            })
        };
        segment.blocks.iter().filter_map(block).collect::<Vec<_>>()
    };
    segments.iter().enumerate().flat_map(of).collect()
}

impl Export {
    fn of(allocator: &CudaAllocator) -> Result<Self, ShareError> {
        let backend = allocator.core().backend();
        let kind = match backend.traits() {
            traits if traits.posix_fd => HandleKind::FileDescriptor,
            traits if traits.fabric => HandleKind::Fabric,
            _ => return Err(ShareError::NotExportable),
        };
        let live = live_segments(allocator);
        if live.is_empty() {
            return Err(ShareError::Empty);
        }
        let allocations = allocations_of(&live);
        let bases: Vec<u64> = live.iter().map(|segment| segment.base.0).collect();
        let addresses = allocations.iter().map(|of| bases[of.segment as usize] + of.offset_bytes);
        let memory = ExportedMemory::new(allocator.pool(), SharePage::create()?, addresses);
        let uuid = DeviceUuid(allocator.device().uuid()?);
        let (pool, digest) = (allocator.pool(), allocator.digest(allocator.pool())?);
        // Frees are detected from here on. The comparison with the live allocations below detects earlier ones.
        allocator.state().exported().add(&memory);
        let layout = Layout { pid: std::process::id(), pool, digest, kind, segments: Vec::new(), allocations };
        let mut export = Export { allocator: allocator.clone(), memory, layout, bases, body: Vec::new(), uuid };
        export.find_chunks(&live)?;
        export.body = export.layout.write();
        match export.body.len() {
            bytes if bytes > BODY_BYTES_MAX => Err(ShareError::TooLong { bytes, most: BODY_BYTES_MAX }),
            _ => Ok(export),
        }
    }

    /// Adds the chunks behind the live allocations. Returns an error if these allocations differ from the ones that were found before.
    fn find_chunks(&mut self, live: &[SegmentSnapshot]) -> Result<(), ShareError> {
        let memory = self.allocator.core().backend().memory();
        let segments = &mut self.layout.segments;
        let mut all = Vec::new();
        for segment in live {
            let base = segment.base.0;
            let part = |block: &BlockSnapshot| base + block.offset_bytes..base + block.offset_bytes + block.size_bytes;
            let parts: Vec<_> = segment.blocks.iter().map(part).collect();
            let chunks = memory.chunks_behind(&parts, Some(&self.memory)).ok_or(ShareError::Changed)?;
            all.extend(chunks.iter().cloned());
            let chunks: Vec<_> = chunks.into_iter().map(|chunk| chunk.start - base..chunk.end - base).collect();
            segments.push(SharedSegment { size_bytes: chunks.last().map_or(0, |chunk| chunk.end), chunks });
        }
        self.memory.set_chunks(all);
        let is_same = live_segments(&self.allocator) == live && self.memory.state() == ExportState::Live;
        if is_same { Ok(()) } else { Err(ShareError::Changed) }
    }

    /// Lets the process at the other end of the socket attach with [`Import::attach`](crate::Import::attach), and returns its identity.
    /// `access` is the maximum access that the process may request. This limit is not a security boundary, because the other process
    /// enforces it when it maps the memory: a process that holds descriptors of memory can map them for writing. Use the socket's
    /// permissions to control who may connect.
    ///
    /// Any number of processes may attach, one after another, or concurrently over separate sockets. This call does not wait for work on
    /// this process's streams.
    ///
    /// # Errors
    /// Returns an error if the memory is stale, or if the other process requests more access than it is granted, gives up, or does not
    /// finish within `timeout`. The export is unchanged in that case, and the socket can no longer be used. A process that received the
    /// offer and has not left is listed as a peer.
    pub fn serve(&self, socket: &UnixStream, access: Access, timeout: Duration) -> Result<Peer, ShareError> {
        let channel = Channel::new(socket, timeout);
        let outcome = self.serve_on(&channel, access);
        if let Err(error) = &outcome
            && let Some(refusal) = self.refusal_of(error)
        {
            // Best effort: the other process may be gone.
            let body = refusal.write();
            let header = Header::new(REFUSAL, 0, &body).write();
            let _told = channel.send(&[&header[..], &body].concat(), &[]);
        }
        // Closes the lease if it was not delivered, or if the other process has closed its end.
        self.memory.forget_gone();
        outcome
    }

    fn serve_on(&self, channel: &Channel<'_>, given: Access) -> Result<Peer, ShareError> {
        let mut hello = [0; Hello::BYTES];
        channel.receive(&mut hello, 0)?;
        let hello = Hello::read(hello)?;
        if hello.version != VERSION {
            return Err(ShareError::VersionMismatch { theirs: hello.version, ours: VERSION });
        }
        if hello.uuid != self.uuid.0 {
            return Err(ShareError::DeviceMismatch { exporter: self.uuid, importer: DeviceUuid(hello.uuid) });
        }
        if hello.access > given {
            return Err(ShareError::AccessRefused { wanted: hello.access, given });
        }
        self.check()?;
        let known = channel.peer().map(|(pid, _)| pid).filter(|pid| *pid != 0 && *pid != std::process::id());
        let pid = known.unwrap_or(hello.pid);
        let peer = Peer { pid, access: hello.access };
        // If a later step fails, the process that received the lease may have mapped everything. It counts as a peer until it closes the
        // lease.
        let (lease, theirs) = lease()?;
        self.memory.add_peer(peer, Lease::new(lease));
        let descriptors = [self.memory.page().file(), theirs.as_fd()];
        let header = Header::new(OFFER, descriptors.len(), &self.body).write();
        channel.send(&header, &descriptors)?;
        drop(theirs);
        channel.send(&self.body, &[])?;
        loop {
            let mut step = [0; Step::BYTES];
            channel.receive(&mut step, 0)?;
            match Step::read(step)? {
                Step::Next { first, count } => self.send_batch(channel, first as usize, count as usize)?,
                Step::GaveUp { code } => return Err(ShareError::PeerFailed { code }),
                Step::Attached => break,
            }
        }
        tracing::debug!(name: "memory.exported", target: "symmalloc", pid, bytes = self.layout.mapped_bytes());
        Ok(peer)
    }

    /// Returns the refusal to send to the other process, if it waits for an answer.
    fn refusal_of(&self, error: &ShareError) -> Option<Refusal> {
        Some(match error {
            ShareError::VersionMismatch { .. } => Refusal::Version,
            ShareError::DeviceMismatch { exporter, .. } => Refusal::Device { uuid: exporter.0 },
            ShareError::AccessRefused { given, .. } => Refusal::Access { given: *given },
            ShareError::Stale(state) => Refusal::Stale { word: state.to_word() },
            ShareError::Cuda(crate::error::CudaError::Driver(error)) => Refusal::Failed { code: error.code },
            ShareError::HungUp | ShareError::TimedOut | ShareError::PeerFailed { .. } => return None,
            _ => Refusal::Failed { code: 0 },
        })
    }

    fn send_batch(&self, channel: &Channel<'_>, first: usize, count: usize) -> Result<(), ShareError> {
        let wanted: Vec<_> = self.layout.chunks().skip(first).take(count).collect();
        if wanted.len() != count || count == 0 || count > BATCH {
            return Err(super::message::MessageError::Layout("batch").into());
        }
        let (mut files, mut body): (Vec<OwnedFd>, Vec<u8>) = (Vec::new(), Vec::new());
        let memory = self.allocator.core().backend().memory();
        for (segment, chunk) in wanted {
            let base = self.bases[segment];
            match memory.export_chunk(&(base + chunk.start..base + chunk.end), self.layout.kind) {
                Ok(ExportedHandle::FileDescriptor(file)) => files.push(file),
                Ok(ExportedHandle::Fabric(bytes)) => body.extend(bytes.iter()),
                Err(error) => {
                    // The chunk no longer exists. `check` returns the reason, which the page states.
                    self.check()?;
                    return Err(error.into());
                }
            }
        }
        let descriptors: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        let header = Header::new(BATCH_OF_HANDLES, count, &body).write();
        channel.send(&[&header[..], &body].concat(), &descriptors)
    }

    /// Checks that the memory is unchanged since the export. Importers use [`Import::check`](crate::Import::check).
    ///
    /// # Errors
    /// Returns [`ShareError::Stale`] if the memory has changed.
    pub fn check(&self) -> Result<(), ShareError> {
        match self.memory.state() {
            state if state.is_good() => Ok(()),
            state => Err(ShareError::Stale(state)),
        }
    }

    /// Returns the state of the export and its peers.
    pub fn report(&self) -> ExportReport {
        report(&self.memory)
    }

    /// Returns the number of bytes of device memory that importers map: the chunks that hold the allocations.
    pub fn mapped_bytes(&self) -> u64 {
        self.layout.mapped_bytes()
    }

    /// Returns the number of allocations.
    pub fn allocation_count(&self) -> usize {
        self.layout.allocations.len()
    }

    /// Notifies all attached peers that they must no longer use the memory, and stops serving. They keep the memory mapped until they
    /// detach: see [`ExportReport::peers`].
    pub fn withdraw(self) {
        self.memory.page().leave_live(ExportState::Withdrawn);
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        self.allocator.state().exported().end(&self.memory);
    }
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Export")
            .field("report", &self.report())
            .field("mapped_bytes", &self.mapped_bytes())
            .finish_non_exhaustive()
    }
}

/// Returns the two ends of a socket. Each end can detect that the other is closed.
fn lease() -> Result<(OwnedFd, OwnedFd), ShareError> {
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?)
}
