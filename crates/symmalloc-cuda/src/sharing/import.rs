//! The importer's side: maps memory of another process.

use super::channel::Channel;
use super::error::{DeviceUuid, ImportError, ShareError};
use super::message::{
    BATCH, BATCH_OF_HANDLES, Header, Hello, Layout, MessageError, OFFER, REFUSAL, Refusal, Step, VERSION,
    fabric_handles,
};
use super::view::{ImportedView, ImportedViewMut};
use crate::device::CudaDevice;
use crate::driver::{Driver, MemLocation, MemProperties};
use crate::error::{CudaError, DriverError};
use crate::memory::{Access, ExportState, HandleKind, ImportedMemory, Lease, SharePage, is_held};
use cudarc::driver::{CudaStream, DeviceRepr};
use std::fmt;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use symmalloc_core::{Digest, PoolId, StreamId};
use symmalloc_files::is_forked;

/// Memory of another process that is mapped into this one, without a copy. Its addresses are valid only in this process.
///
/// Kernels see the exporter's writes immediately; the streams of the two processes are not ordered with each other. A read-only import is
/// read-only for the device: a kernel that writes to it makes this process's context unusable.
///
/// The mapping keeps the memory alive even if the exporter frees it, puts it to sleep or exits. If the memory has changed since the export,
/// creating a view returns [`ImportError::Stale`]. Addresses obtained earlier stay mapped.
///
/// Dropping waits until the device has finished the work that was submitted in this context, and unmaps the memory. Memory that the driver
/// fails to unmap stays mapped, and a warning is logged; [`detach`](Self::detach) returns the error.
///
/// # Examples
/// ```no_run
/// use std::os::unix::net::UnixStream;
/// use std::time::Duration;
/// use symmalloc_cuda::{Access, CudaDevice, Import};
///
/// let device = CudaDevice::new(0)?;
/// let stream = device.context().new_stream()?;
/// let socket = UnixStream::connect("/run/trainer.socket")?;
/// let weights = Import::attach(&device, &socket, Access::Read, Duration::from_secs(10))?;
/// // SAFETY: the trainer allocated it as `f32`, and notifies this process before it writes.
/// let embedding = unsafe { weights.view::<f32>("embedding", &stream) }?;
/// let first: Vec<f32> = stream.clone_dtoh(&embedding)?;
/// # drop(first);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Import {
    device: Arc<CudaDevice>,
    /// The mapped memory of each segment of the layout; empty once detached.
    segments: Mutex<Vec<ImportedMemory>>,
    layout: Layout,
    access: Access,
    page: SharePage,
    /// This process's end of the lease. The exporter detects when this end is closed. `None` once detached.
    lease: Mutex<Option<Lease>>,
}

/// An allocation of the exporter.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ImportedAllocation {
    /// The allocation's name in the exporter.
    pub name: Option<Box<str>>,
    /// Address in this process.
    pub address: u64,
    /// Size in bytes that the exporter requested.
    pub size_bytes: u64,
    /// The exporter's stream on which the memory was allocated.
    pub stream: StreamId,
}

/// The state of an import.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ImportReport {
    /// The exporter's process id, as reported by the exporter.
    pub exporter: u32,
    /// `true` if the exporter's process still holds its end of the lease.
    pub exporter_is_alive: bool,
    /// The pool's id in the exporter.
    pub pool: PoolId,
    /// The digest of the exporter's pool at the time of the export.
    pub digest: Digest,
    /// The access to the memory.
    pub access: Access,
    /// Number of mapped bytes.
    pub mapped_bytes: u64,
    /// Number of allocations.
    pub allocation_count: usize,
    /// The state of the memory.
    pub state: ExportState,
}

impl Import {
    /// Maps the memory that the process at the other end of the socket exports with [`Export::serve`](crate::Export::serve).
    ///
    /// # Errors
    /// Returns an error if the exporter rejects the request, uses another device, does not answer within `timeout` or sends an invalid
    /// message, or if a driver call fails. Nothing is mapped in that case, and the socket can no longer be used: open a new connection.
    pub fn attach(
        device: &Arc<CudaDevice>,
        socket: &UnixStream,
        access: Access,
        timeout: Duration,
    ) -> Result<Self, ShareError> {
        let channel = Channel::new(socket, timeout);
        let uuid = device.uuid()?;
        channel.send(&Hello { version: VERSION, access, pid: std::process::id(), uuid }.write(), &[])?;
        let offer = receive(&channel, OFFER, 2, DeviceUuid(uuid), access);
        let outcome = offer.and_then(|(_, body, files)| {
            Self::attach_offered(device, &channel, access, &body, files, DeviceUuid(uuid))
        });
        let step = match &outcome {
            Ok(_) => Step::Attached,
            Err(ShareError::Cuda(CudaError::Driver(error))) => Step::GaveUp { code: error.code },
            Err(_) => Step::GaveUp { code: 0 },
        };
        // If sending fails, the exporter has exited or no longer waits.
        let sent = channel.send(&step.write(), &[]);
        let import = outcome?;
        sent?;
        Ok(import)
    }

    fn attach_offered(
        device: &Arc<CudaDevice>,
        channel: &Channel<'_>,
        access: Access,
        body: &[u8],
        files: Vec<OwnedFd>,
        uuid: DeviceUuid,
    ) -> Result<Self, ShareError> {
        let granularity_bytes = granularity_of(device)?;
        let layout = Layout::read(body, granularity_bytes)?;
        let [page, lease] = <[OwnedFd; 2]>::try_from(files).map_err(|_| MessageError::Descriptor)?;
        let page = SharePage::open(page).ok_or(MessageError::Descriptor)?;
        // From here on, dropping `import` unmaps everything that is mapped.
        let segments = Mutex::new(Vec::new());
        let lease = Mutex::new(Some(Lease::new(lease)));
        let import = Import { device: Arc::clone(device), segments, layout, access, page, lease };
        for segment in &import.layout.segments {
            import.segments().push(ImportedMemory::reserve(device, segment.size_bytes)?);
        }
        import.map(channel, uuid)?;
        import.segments().iter().try_for_each(|segment| segment.set_access(access))?;
        import.is_good()?;
        Ok(import)
    }

    /// Requests all handles in batches, and maps each handle as it arrives.
    fn map(&self, channel: &Channel<'_>, uuid: DeviceUuid) -> Result<(), ShareError> {
        let chunks: Vec<(usize, Range<u64>)> =
            self.layout.chunks().map(|(segment, chunk)| (segment, chunk.clone())).collect();
        let mut first = 0;
        for batch in chunks.chunks(BATCH) {
            channel.send(&Step::Next { first: first as u32, count: batch.len() as u32 }.write(), &[])?;
            first += batch.len();
            let count = batch.len();
            let files = if self.layout.kind == HandleKind::FileDescriptor { count } else { 0 };
            let (header, body, files) = receive(channel, BATCH_OF_HANDLES, files, uuid, self.access)?;
            if header.handles as usize != count {
                return Err(MessageError::Length.into());
            }
            match self.layout.kind {
                HandleKind::FileDescriptor => {
                    for ((segment, chunk), file) in batch.iter().zip(files) {
                        self.segments()[*segment].map_file(chunk, &file)?;
                    }
                }
                HandleKind::Fabric => {
                    for ((segment, chunk), mut bytes) in batch.iter().zip(fabric_handles(&body, count)?) {
                        self.segments()[*segment].map(chunk, bytes.as_mut_ptr().cast(), HandleKind::Fabric)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn segments(&self) -> MutexGuard<'_, Vec<ImportedMemory>> {
        self.segments.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_good(&self) -> Result<(), ShareError> {
        match self.page.state() {
            state if state.is_good() => Ok(()),
            state => Err(ShareError::Stale(state)),
        }
    }

    /// Checks that the memory is unchanged since the export. Every view makes this check when it is created. The check costs one load.
    ///
    /// # Errors
    /// Returns [`ImportError::Stale`] if the memory has changed, or [`ImportError::Detached`] after [`detach`](Self::detach).
    pub fn check(&self) -> Result<(), ImportError> {
        let state = self.page.state();
        if !state.is_good() {
            let freed = match state {
                ExportState::Freed(number) => self.layout.allocations.get(number as usize),
                _ => None,
            };
            return Err(ImportError::Stale { state, allocation: freed.and_then(|freed| freed.name.clone()) });
        }
        if self.segments().is_empty() { Err(ImportError::Detached) } else { Ok(()) }
    }

    /// Returns the device.
    pub fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    /// Returns the number of allocations.
    pub fn len(&self) -> usize {
        self.layout.allocations.len()
    }

    /// Returns `true` if there are no allocations, which cannot occur in a valid export.
    pub fn is_empty(&self) -> bool {
        self.layout.allocations.is_empty()
    }

    /// Returns an allocation by its number in the export order, which is by stream, then by segment, then by offset in the exporter.
    ///
    /// # Errors
    /// Returns an error if it does not exist, or the import is stale or detached.
    pub fn allocation(&self, number: usize) -> Result<ImportedAllocation, ImportError> {
        self.check()?;
        let count = self.len();
        let of = self.layout.allocations.get(number).ok_or(ImportError::NoSuchAllocation { number, count })?;
        let base = self.segments().get(of.segment as usize).ok_or(ImportError::Detached)?.address();
        let (name, stream) = (of.name.clone(), of.stream);
        Ok(ImportedAllocation { name, address: base + of.offset_bytes, size_bytes: of.size_bytes, stream })
    }

    /// Returns the number of the allocation with this name, which must be unique.
    ///
    /// # Errors
    /// Returns an error if no allocation, or more than one, has this name.
    pub fn find(&self, name: &str) -> Result<usize, ImportError> {
        let mut named = self.layout.allocations.iter().enumerate().filter(|(_, of)| of.name.as_deref() == Some(name));
        let (number, _) = named.next().ok_or_else(|| ImportError::Unknown { name: name.into() })?;
        match named.count() {
            0 => Ok(number),
            others => Err(ImportError::Ambiguous { name: name.into(), count: others + 1 }),
        }
    }

    /// Returns a read-only view of the bytes of the allocation with this name, for work on a stream.
    ///
    /// # Errors
    /// Returns an error if no allocation, or more than one, has this name, or the import is stale or detached.
    pub fn bytes<'a>(&'a self, name: &str, stream: &'a Arc<CudaStream>) -> Result<ImportedView<'a, u8>, ImportError> {
        self.view_of(&self.allocation(self.find(name)?)?, stream)
    }

    /// Returns a read-only view of the allocation with this name as elements, for work on a stream.
    ///
    /// # Safety
    /// The exporter must have written elements of type `T` there, unless every bit pattern is a valid `T`. Nobody may write to the elements
    /// while they are read.
    ///
    /// # Errors
    /// See [`bytes`](Self::bytes). Also returns an error if the size is not a multiple of the element size.
    pub unsafe fn view<'a, T: DeviceRepr>(
        &'a self,
        name: &str,
        stream: &'a Arc<CudaStream>,
    ) -> Result<ImportedView<'a, T>, ImportError> {
        self.view_of(&self.allocation(self.find(name)?)?, stream)
    }

    /// Like [`view`](Self::view), but finds the allocation by its number.
    ///
    /// # Safety
    /// See [`view`](Self::view).
    ///
    /// # Errors
    /// See [`view`](Self::view).
    pub unsafe fn view_at<'a, T: DeviceRepr>(
        &'a self,
        number: usize,
        stream: &'a Arc<CudaStream>,
    ) -> Result<ImportedView<'a, T>, ImportError> {
        self.view_of(&self.allocation(number)?, stream)
    }

    /// Like [`view`](Self::view), for reading and writing.
    ///
    /// # Safety
    /// See [`view`](Self::view). In addition, no other code in any process may use the elements while the view, or work that uses the view,
    /// exists.
    ///
    /// # Errors
    /// See [`view`](Self::view). Also returns an error if the import is read-only.
    pub unsafe fn view_mut<'a, T: DeviceRepr>(
        &'a self,
        name: &str,
        stream: &'a Arc<CudaStream>,
    ) -> Result<ImportedViewMut<'a, T>, ImportError> {
        if self.access != Access::ReadWrite {
            return Err(ImportError::ReadOnly);
        }
        Ok(ImportedViewMut::of(self.view_of(&self.allocation(self.find(name)?)?, stream)?))
    }

    fn view_of<'a, T>(
        &'a self,
        allocation: &ImportedAllocation,
        stream: &'a Arc<CudaStream>,
    ) -> Result<ImportedView<'a, T>, ImportError> {
        let (size_bytes, element_bytes) = (allocation.size_bytes, size_of::<T>());
        if element_bytes == 0 || !size_bytes.is_multiple_of(element_bytes as u64) {
            return Err(ImportError::Elements { size_bytes, element_bytes });
        }
        Ok(ImportedView::new(allocation.address, size_bytes as usize / element_bytes, stream))
    }

    /// Returns the state of this import.
    pub fn report(&self) -> ImportReport {
        let lease = self.lease.lock().unwrap_or_else(PoisonError::into_inner);
        ImportReport {
            exporter: self.layout.pid,
            exporter_is_alive: lease.as_ref().is_some_and(is_held),
            pool: self.layout.pool,
            digest: self.layout.digest,
            access: self.access,
            mapped_bytes: self.segments().iter().map(ImportedMemory::mapped_bytes).sum(),
            allocation_count: self.len(),
            state: self.page.state(),
        }
    }

    /// Waits until the device has finished the work that was submitted in this context, unmaps the memory, and leaves the exporter's list
    /// of peers.
    ///
    /// # Errors
    /// Returns an error if a driver call fails. Memory that was not unmapped stays mapped, and the call can be repeated.
    pub fn detach(&mut self) -> Result<(), CudaError> {
        self.unmap()?;
        Ok(())
    }

    fn unmap(&self) -> Result<(), DriverError> {
        let mut segments = self.segments();
        while let Some(segment) = segments.last_mut() {
            segment.unmap()?;
            segments.pop();
        }
        // Closed last: as long as this process has memory mapped, the exporter must see it as a peer.
        *self.lease.lock().unwrap_or_else(PoisonError::into_inner) = None;
        Ok(())
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        if let Err(error) = self.unmap() {
            let size_bytes = self.layout.mapped_bytes();
            tracing::warn!(name: "memory.import_kept", target: "symmalloc", size_bytes, %error);
            // The memory stays mapped, so the exporter must continue to see this process as a peer.
            let segments = self.segments.get_mut().unwrap_or_else(PoisonError::into_inner);
            segments.drain(..).for_each(std::mem::forget);
            let lease = self.lease.get_mut().unwrap_or_else(PoisonError::into_inner);
            lease.take().into_iter().for_each(std::mem::forget);
        }
    }
}

impl fmt::Debug for Import {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Import").field(&self.report()).finish()
    }
}

/// Receives a message of this kind from the exporter, with `descriptors` file descriptors. Converts a refusal into an error.
fn receive(
    channel: &Channel<'_>,
    kind: u32,
    descriptors: usize,
    importer: DeviceUuid,
    wanted: Access,
) -> Result<(Header, Vec<u8>, Vec<OwnedFd>), ShareError> {
    let mut header = [0; Header::BYTES];
    let files = channel.receive_at_most(&mut header, descriptors)?;
    let header = Header::read(header)?;
    let mut body = vec![0; header.length as usize];
    channel.receive(&mut body, 0)?;
    header.check(&body)?;
    if header.kind == REFUSAL {
        return Err(match Refusal::read(&body)? {
            Refusal::Version => ShareError::VersionMismatch { theirs: header.version, ours: VERSION },
            Refusal::Device { uuid } => ShareError::DeviceMismatch { exporter: DeviceUuid(uuid), importer },
            Refusal::Access { given } => ShareError::AccessRefused { wanted, given },
            Refusal::Stale { word } => ShareError::Stale(ExportState::of_word(word)),
            Refusal::Failed { code } => ShareError::PeerFailed { code },
        });
    }
    if header.version != VERSION {
        return Err(ShareError::VersionMismatch { theirs: header.version, ours: VERSION });
    }
    if header.kind != kind {
        return Err(MessageError::Unexpected { kind: header.kind }.into());
    }
    if files.len() != descriptors {
        return Err(MessageError::Descriptors { got: files.len(), wanted: descriptors }.into());
    }
    Ok((header, body, files))
}

fn granularity_of(device: &CudaDevice) -> Result<u64, DriverError> {
    let _current = device.enter()?;
    let driver: &Driver = device.driver();
    let properties = MemProperties::of(MemLocation::device(device.raw_device()), 0, 0);
    let mut bytes = 0_usize;
    // SAFETY: `bytes` is valid for writing, the properties for reading. 0 selects the minimum granularity.
    unsafe { driver.granularity(&raw mut bytes, &raw const properties, 0) }?;
    Ok(bytes as u64)
}
