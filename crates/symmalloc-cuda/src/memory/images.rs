//! Images: the saved contents of sleeping pools, in pinned or pageable host memory, or in files.
//!
//! ```text
//!  parts     │ a │     │ b │        │ c │       live blocks on the device, at arbitrary addresses
//!  image     │ a │ b │ c │                      contiguous
//!  chunks    │ 32 MiB │ 32 MiB │ ...            pinned; other places need only two: one is copied while the other is written
//! ```
//! Pinned memory is slow to allocate (about 0.3 s per GiB), so a chunk that is no longer needed is kept for the next image until
//! [`Images::release_idle`]. Copies use a dedicated stream and therefore wait for no other stream: the caller has already waited for all
//! users of the memory.
//!
//! A pool can have its own [storage](ImageStorage). It can also retain its image on the host after it wakes: the image stays readable, and
//! the next image reuses its memory.

use super::copies::{CHUNK_BYTES, Chunk, Copies, Direction, Piece, pieces};
use super::fills::Fills;
use super::image_store::{IdleChunks, ImageFile, ImageStorage, Pageable, PinnedChunks, Store};
use crate::device::CudaDevice;
use crate::driver::HOST_PORTABLE;
use crate::error::{DriverError, INVALID_VALUE};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use symmalloc_core::backend::{BackendError, Image, Part, Reason};
use symmalloc_core::ids::PoolId;

/// The images of one backend.
pub(crate) struct Images {
    device: Arc<CudaDevice>,
    /// The storage for images of pools without their own storage.
    storage: ImageStorage,
    kept: Mutex<KeptImages>,
    idle: IdleChunks,
    fills: Arc<Fills>,
}

#[derive(Default)]
struct KeptImages {
    next: u64,
    images: BTreeMap<u64, Arc<Saved>>,
    pools: BTreeMap<PoolId, PoolImages>,
}

/// The settings of one pool's images.
#[derive(Default)]
struct PoolImages {
    storage: Option<ImageStorage>,
    /// `true` if the host keeps the pool's image after the pool wakes.
    is_retained: bool,
    retained: Option<Arc<Saved>>,
}

/// A saved image, with the parts of device memory that it contains.
struct Saved {
    pool: PoolId,
    parts: Vec<Part>,
    store: Store,
}

impl Saved {
    /// Returns the offset of device bytes in the image, or `None` if the image does not contain them all. An empty range is in no image.
    fn offset_of(&self, address: u64, size_bytes: u64) -> Option<usize> {
        let at = self.parts.iter().find_map(|part| {
            let offset = address.checked_sub(part.address.0)?;
            let is_inside = size_bytes > 0 && offset.checked_add(size_bytes)? <= part.size_bytes;
            is_inside.then_some(part.image_offset_bytes + offset)
        })?;
        Some(at as usize)
    }
}

/// The host's copy of device bytes, see [`CudaAllocator::saved_at`](crate::CudaAllocator::saved_at).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SavedBytes {
    /// The bytes are contiguous at this host address, until the pool sleeps, wakes or is destroyed, or its storage changes.
    Contiguous(*const u8),
    /// The bytes are in a file, or in several pieces, so they can only be copied.
    Scattered,
}

impl Images {
    pub(crate) fn new(device: Arc<CudaDevice>, folder: Option<PathBuf>) -> Self {
        let storage = folder.map_or(ImageStorage::Pinned, ImageStorage::Folder);
        Images { device, storage, kept: Mutex::default(), idle: IdleChunks::default(), fills: Arc::default() }
    }

    /// Sets the storage of a pool's later images. If it changes, releases a retained image.
    pub(crate) fn set_storage(&self, pool: PoolId, storage: ImageStorage) {
        let mut kept = self.kept();
        let of_pool = kept.pools.entry(pool).or_default();
        if of_pool.storage.as_ref() != Some(&storage) {
            of_pool.storage = Some(storage);
            of_pool.retained = None;
        }
    }

    /// Sets whether the host keeps a pool's image after the pool's next wake. The next image replaces a retained one.
    pub(crate) fn set_retained(&self, pool: PoolId, is_retained: bool) {
        self.kept().pools.entry(pool).or_default().is_retained = is_retained;
    }

    /// Removes the settings of a destroyed pool, and its retained image.
    pub(crate) fn forget_pool(&self, pool: PoolId) {
        self.kept().pools.remove(&pool);
    }

    /// Returns the fills, which must be notified when memory is mapped and before it is unmapped.
    pub(crate) fn fills(&self) -> &Arc<Fills> {
        &self.fills
    }

    fn kept(&self) -> MutexGuard<'_, KeptImages> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Implements [`Backend::save`](symmalloc_core::backend::Backend::save).
    pub(crate) fn save(&self, pool: PoolId, parts: &[Part]) -> Result<Image, BackendError> {
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        let (storage, reused) = {
            let mut kept = self.kept();
            let of_pool = kept.pools.get_mut(&pool);
            let (own, reused) = of_pool.map_or((None, None), |of| (of.storage.clone(), of.retained.take()));
            (own.unwrap_or_else(|| self.storage.clone()), reused.and_then(Arc::into_inner).map(|saved| saved.store))
        };
        let pieces = pieces(parts);
        let len = pieces.last().map_or(0, |piece| piece.chunk * CHUNK_BYTES + piece.at + piece.len);
        let store = match storage {
            ImageStorage::Pinned => self.save_pinned(&pieces, len, reused)?,
            ImageStorage::Pageable => self.save_pageable(&pieces, len, reused)?,
            ImageStorage::Folder(folder) => self.save_to_file(&folder, &pieces, len)?,
        };
        let mut kept = self.kept();
        kept.next += 1;
        let id = kept.next;
        kept.images.insert(id, Arc::new(Saved { pool, parts: parts.to_vec(), store }));
        Ok(Image(id))
    }

    fn save_pinned(&self, pieces: &[Piece], len: usize, reused: Option<Store>) -> Result<Store, BackendError> {
        let mut chunks = if let Some(Store::Pinned(chunks)) = reused { chunks } else { self.idle.take(0) };
        self.resize_chunks(&mut chunks, len.div_ceil(CHUNK_BYTES))?;
        self.copy(pieces, |piece| chunks[piece.chunk], Direction::ToHost)?;
        Ok(Store::Pinned(chunks))
    }

    fn save_pageable(&self, pieces: &[Piece], len: usize, reused: Option<Store>) -> Result<Store, BackendError> {
        let mut pageable = match reused {
            Some(Store::Pageable(pageable)) if pageable.len() == len => pageable,
            _ => {
                let refused =
                    |error: io::Error| BackendError::new("mmap", error.raw_os_error().unwrap_or(0), Reason::Refused);
                Pageable::new(len).map_err(refused)?
            }
        };
        self.save_staged(pieces, |chunk, bytes| {
            pageable.write(chunk * CHUNK_BYTES, bytes);
            Ok(())
        })?;
        Ok(Store::Pageable(pageable))
    }

    fn save_to_file(&self, folder: &Path, pieces: &[Piece], len: usize) -> Result<Store, BackendError> {
        let mut file = ImageFile::create(folder, len)?;
        self.save_staged(pieces, |_, bytes| file.append(bytes))?;
        Ok(Store::File(file))
    }

    /// Implements [`Backend::expect_load`](symmalloc_core::backend::Backend::expect_load). Leaves an image that is not in pinned memory to
    /// `load`, and every image if the driver cannot create a stream.
    pub(crate) fn expect_load(&self, image: Image, parts: &[Part]) {
        let saved = self.kept().images.get(&image.0).cloned();
        let Some(Store::Pinned(chunks)) = saved.as_deref().map(|saved| &saved.store) else { return };
        let Ok(_current) = self.device.enter() else { return };
        let _relaxed = self.device.driver().relax_capture();
        if let Ok(copies) = Copies::new(&self.device) {
            self.fills.announce(image.0, chunks.to_vec(), pieces(parts), copies);
        }
    }

    /// Implements [`Backend::load`](symmalloc_core::backend::Backend::load).
    pub(crate) fn load(&self, image: Image, parts: &[Part]) -> Result<(), BackendError> {
        let found = self.kept().images.get(&image.0).cloned();
        let saved = found.ok_or(DriverError { call: "load", code: INVALID_VALUE })?;
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        if let Some(filled) = self.fills.finish(image.0) {
            return Ok(filled?);
        }
        let pieces = pieces(parts);
        match &saved.store {
            Store::Pinned(chunks) => Ok(self.copy(&pieces, |piece| chunks[piece.chunk], Direction::ToDevice)?),
            Store::Pageable(pageable) => self.load_staged(&pieces, |chunk, bytes| {
                let len = (pageable.len() - chunk * CHUNK_BYTES).min(CHUNK_BYTES);
                pageable.read(chunk * CHUNK_BYTES, &mut bytes[..len]);
                Ok(())
            }),
            Store::File(file) => {
                self.load_staged(&pieces, |chunk, bytes| file.read(chunk, &mut bytes[..file.chunk_len(chunk)]))
            }
        }
    }

    /// Discards an image that is no longer needed, or retains it for its pool. The chunks of a discarded image are kept for other images.
    pub(crate) fn discard(&self, image: Image) {
        let _current = self.device.enter();
        self.fills.forget(image.0);
        let mut kept = self.kept();
        let Some(saved) = kept.images.remove(&image.0) else { return };
        let of_pool = kept.pools.get_mut(&saved.pool).filter(|of_pool| of_pool.is_retained);
        if let Some(of_pool) = of_pool
            && !matches!(saved.store, Store::File(_))
        {
            of_pool.retained = Some(saved);
        }
    }

    fn find_saved(&self, address: u64, size_bytes: u64) -> Option<(Arc<Saved>, usize)> {
        let kept = self.kept();
        let retained = kept.pools.values().filter_map(|of_pool| of_pool.retained.as_ref());
        let mut all = kept.images.values().chain(retained);
        all.find_map(|saved| Some((Arc::clone(saved), saved.offset_of(address, size_bytes)?)))
    }

    /// Returns the saved bytes of device memory, or `None` if no image contains them.
    pub(crate) fn saved_at(&self, address: u64, size_bytes: u64) -> Option<SavedBytes> {
        let (saved, offset) = self.find_saved(address, size_bytes)?;
        let (chunk, at) = (offset / CHUNK_BYTES, offset % CHUNK_BYTES);
        Some(match &saved.store {
            Store::Pageable(pageable) => SavedBytes::Contiguous(pageable.at(offset)),
            Store::Pinned(chunks) if at + size_bytes as usize <= CHUNK_BYTES => {
                SavedBytes::Contiguous(chunks[chunk].at(at).cast::<u8>())
            }
            _ => SavedBytes::Scattered,
        })
    }

    /// Copies the saved bytes of device memory. Returns `false` if no image contains them.
    pub(crate) fn copy_saved(&self, address: u64, to: &mut [u8]) -> Result<bool, BackendError> {
        let Some((saved, mut offset)) = self.find_saved(address, to.len() as u64) else { return Ok(false) };
        let mut left = to;
        let mut whole = Vec::new();
        while !left.is_empty() {
            let (chunk, at) = (offset / CHUNK_BYTES, offset % CHUNK_BYTES);
            let len = left.len().min(CHUNK_BYTES - at);
            let (now, rest) = std::mem::take(&mut left).split_at_mut(len);
            match &saved.store {
                Store::Pageable(pageable) => pageable.read(offset, now),
                Store::Pinned(chunks) => {
                    // SAFETY: the chunk is initialized host memory that nothing writes while the image exists.
                    now.copy_from_slice(unsafe { std::slice::from_raw_parts(chunks[chunk].at(at).cast(), len) });
                }
                Store::File(file) => {
                    whole.resize(file.chunk_len(chunk), 0);
                    file.read(chunk, &mut whole)?;
                    now.copy_from_slice(&whole[at..at + len]);
                }
            }
            (left, offset) = (rest, offset + len);
        }
        Ok(true)
    }

    /// Implements [`Backend::zero`](symmalloc_core::backend::Backend::zero).
    pub(crate) fn zero(&self, parts: &[Part]) -> Result<(), BackendError> {
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        let copies = Copies::new(&self.device)?;
        let set = parts.iter().try_for_each(|part| copies.zero(part));
        Ok(copies.end(set)?)
    }

    /// Allocates pinned memory for images of `size_bytes` bytes in advance, so that saving does not need to.
    pub(crate) fn reserve(&self, size_bytes: u64) -> Result<(), BackendError> {
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        Ok(self.take_chunks((size_bytes as usize).div_ceil(CHUNK_BYTES)).map(drop)?)
    }

    /// Releases pinned memory that no image uses. Returns the number of bytes released.
    pub(crate) fn release_idle(&self) -> Result<u64, BackendError> {
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        let mut released_bytes = 0;
        while let Some(chunk) = self.idle.pop() {
            if let Err(error) = self.free(chunk) {
                self.idle.push(chunk);
                return Err(error.into());
            }
            released_bytes += CHUNK_BYTES as u64;
        }
        Ok(released_bytes)
    }

    /// Returns the size in bytes of the pinned memory, including chunks that no image uses.
    pub(crate) fn host_bytes(&self) -> u64 {
        let kept = self.kept();
        let retained = kept.pools.values().filter_map(|of_pool| of_pool.retained.as_ref());
        let pinned = |saved: &Arc<Saved>| if let Store::Pinned(chunks) = &saved.store { chunks.len() } else { 0 };
        let in_use = kept.images.values().chain(retained).map(pinned);
        ((in_use.sum::<usize>() + self.idle.len()) * CHUNK_BYTES) as u64
    }

    /// Returns `count` chunks, idle ones first.
    fn take_chunks(&self, count: usize) -> Result<PinnedChunks, DriverError> {
        let mut chunks = self.idle.take(count);
        self.resize_chunks(&mut chunks, count)?;
        Ok(chunks)
    }

    /// Changes the number of chunks. Idle ones are used first.
    fn resize_chunks(&self, chunks: &mut PinnedChunks, count: usize) -> Result<(), DriverError> {
        chunks.truncate(count);
        while chunks.len() < count {
            if let Some(chunk) = self.idle.pop() {
                chunks.push(chunk);
                continue;
            }
            let mut address = std::ptr::null_mut();
            // SAFETY: `address` is valid for writing, and a context is current.
            unsafe { self.device.driver().host_allocate(&raw mut address, CHUNK_BYTES, HOST_PORTABLE) }?;
            chunks.push(Chunk(address as u64));
        }
        Ok(())
    }

    fn free(&self, chunk: Chunk) -> Result<(), DriverError> {
        // SAFETY: the chunk came from `host_allocate`, is freed only once, and all copies to and from it are done.
        unsafe { self.device.driver().host_free(chunk.at(0)) }
    }

    /// Copies pieces to or from their chunks, and waits for the copies.
    fn copy(
        &self,
        pieces: &[Piece],
        chunk_of: impl Fn(&Piece) -> Chunk,
        direction: Direction,
    ) -> Result<(), DriverError> {
        let copies = Copies::new(&self.device)?;
        let submitted = pieces.iter().try_for_each(|piece| copies.submit(piece, chunk_of(piece), direction));
        copies.end(submitted)
    }

    /// Passes each chunk of an image to `write`. Copies one chunk while the previous one is written.
    fn save_staged(
        &self,
        pieces: &[Piece],
        mut write: impl FnMut(usize, &[u8]) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let staging = self.take_chunks(2)?;
        let copies = Copies::new(&self.device)?;
        let groups: Vec<&[Piece]> = pieces.chunk_by(|one, next| one.chunk == next.chunk).collect();
        let submit = |at: usize| {
            let group = groups.get(at).copied().unwrap_or_default();
            group.iter().try_for_each(|piece| copies.submit(piece, staging[at % 2], Direction::ToHost))
        };
        let mut steps = || {
            submit(0)?;
            for (at, group) in groups.iter().enumerate() {
                copies.wait()?;
                submit(at + 1)?;
                let len = group.iter().map(|piece| piece.len).sum();
                // SAFETY: the pieces were copied into the staging chunk without gaps, and nothing writes to it until the next wait.
                write(at, unsafe { slice_of(staging[at % 2], len) })?;
            }
            Ok(())
        };
        copies.end(steps())
    }

    /// Copies pieces from the chunks that `read` fills. Reads one chunk while the previous one is copied.
    fn load_staged(
        &self,
        pieces: &[Piece],
        read: impl Fn(usize, &mut [u8]) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let staging = self.take_chunks(2)?;
        let copies = Copies::new(&self.device)?;
        let steps = || {
            for (at, group) in pieces.chunk_by(|one, next| one.chunk == next.chunk).enumerate() {
                let chunk = staging[at % 2];
                // SAFETY: the copies from this staging chunk are done; copies from the other chunk may still be running.
                read(group[0].chunk, unsafe { slice_of(chunk, CHUNK_BYTES) })?;
                copies.wait()?;
                group.iter().try_for_each(|piece| copies.submit(piece, chunk, Direction::ToDevice))?;
            }
            Ok(())
        };
        copies.end(steps())
    }
}

impl Drop for Images {
    fn drop(&mut self) {
        let Ok(_current) = self.device.enter() else { return };
        let _relaxed = self.device.driver().relax_capture();
        let kept = std::mem::take(&mut *self.kept());
        kept.images.keys().for_each(|image| self.fills.forget(*image));
        drop(kept);
        while let Some(chunk) = self.idle.pop() {
            // Memory that the driver fails to free is released with its context.
            let _freed = self.free(chunk);
        }
    }
}

/// Returns the first `len` bytes of a staging chunk.
///
/// # Safety
/// While the slice is alive, no copy may read or write the bytes, and no other slice may refer to them.
unsafe fn slice_of<'a>(chunk: Chunk, len: usize) -> &'a mut [u8] {
    assert!(len <= CHUNK_BYTES);
    // SAFETY: the chunk is initialized host memory of this size; the caller ensures exclusive access.
    unsafe { std::slice::from_raw_parts_mut(chunk.at(0).cast::<u8>(), len) }
}
