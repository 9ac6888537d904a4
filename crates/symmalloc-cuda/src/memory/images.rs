//! Images: the saved contents of sleeping pools, in pinned or pageable host memory, or in files.
//!
//! ```text
//!  parts     │ a │     │ b │        │ c │       live blocks on the device, at arbitrary addresses
//!  image     │ a │ b │ c │                      contiguous
//!  chunks    │ 32 MiB │ 32 MiB │ ...            pinned; other places need only two: one is copied while the other is written
//! ```
//! Pinned memory is slow to allocate (about 0.3 s per GiB), so a chunk that is no longer needed is kept for the next image until
//! [`Images::release_idle`]. Copies use a dedicated stream and therefore wait for no other stream. The caller has waited for all users of
//! the memory.
//!
//! A pool can have its own [place](ImagePlace). It can also retain its image on the host after it wakes: the image stays readable, and the
//! next one reuses its memory.

use super::copies::{CHUNK_BYTES, Chunk, Copies, Direction, Piece, pieces};
use super::fills::Fills;
use super::image_store::{ImageFile, ImagePlace, Pageable, Store, of_file};
use crate::device::CudaDevice;
use crate::driver::HOST_PORTABLE;
use crate::error::{DriverError, INVALID_VALUE};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use symmalloc_core::backend::{BackendError, Image, Part};
use symmalloc_core::ids::PoolId;

/// The images of one backend.
pub(crate) struct Images {
    device: Arc<CudaDevice>,
    /// Place of the images of pools without their own place.
    place: ImagePlace,
    kept: Mutex<KeptImages>,
    fills: Arc<Fills>,
}

#[derive(Default)]
struct KeptImages {
    next: u64,
    images: BTreeMap<u64, Arc<Saved>>,
    pools: BTreeMap<PoolId, PoolImages>,
    idle: Vec<Chunk>,
}

/// The settings of one pool's images.
#[derive(Default)]
struct PoolImages {
    place: Option<ImagePlace>,
    /// The host keeps an image of the pool after the pool woke.
    is_retained: bool,
    retained: Option<Arc<Saved>>,
}

/// An image.
struct Saved {
    pool: PoolId,
    parts: Vec<Part>,
    store: Store,
}

impl Saved {
    fn len(&self) -> usize {
        self.parts.last().map_or(0, |part| (part.image_offset_bytes + part.size_bytes) as usize)
    }

    /// Returns the offset of device bytes in the image.
    fn offset_of(&self, address: u64, size_bytes: u64) -> Option<usize> {
        let at = self.parts.iter().find_map(|part| {
            let offset = address.checked_sub(part.address.0)?;
            (offset + size_bytes <= part.size_bytes).then_some(part.image_offset_bytes + offset)
        })?;
        Some(at as usize)
    }
}

/// The host's copy of device bytes, see [`CudaAllocator::saved_at`](crate::CudaAllocator::saved_at).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SavedBytes {
    /// Contiguous at this host address, until the pool sleeps, wakes or is destroyed.
    Contiguous(*const u8),
    /// In a file, or in several pieces: they can only be copied.
    Scattered,
}

impl Images {
    pub(crate) fn new(device: Arc<CudaDevice>, folder: Option<PathBuf>) -> Self {
        let place = folder.map_or(ImagePlace::Pinned, ImagePlace::Folder);
        Images { device, place, kept: Mutex::default(), fills: Arc::default() }
    }

    /// Sets the place of a pool's later images, and releases a retained image.
    pub(crate) fn set_place(&self, pool: PoolId, place: ImagePlace) {
        let mut kept = self.kept();
        let of_pool = kept.pools.entry(pool).or_default();
        of_pool.place = Some(place);
        let retained = of_pool.retained.take();
        drop(kept);
        self.end(retained);
    }

    /// Sets if images of a pool on the host outlive its next wake. A retained image stays until a wake that does not retain.
    pub(crate) fn set_retained(&self, pool: PoolId, is_retained: bool) {
        self.kept().pools.entry(pool).or_default().is_retained = is_retained;
    }

    /// Removes the settings of a destroyed pool, and its retained image.
    pub(crate) fn forget_pool(&self, pool: PoolId) {
        let of_pool = self.kept().pools.remove(&pool);
        self.end(of_pool.and_then(|of_pool| of_pool.retained));
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
        let (place, reused) = {
            let mut kept = self.kept();
            let of_pool = kept.pools.get_mut(&pool);
            let (own, reused) = of_pool.map_or((None, None), |of| (of.place.clone(), of.retained.take()));
            (own.unwrap_or_else(|| self.place.clone()), reused.and_then(Arc::into_inner).map(|saved| saved.store))
        };
        let pieces = pieces(parts);
        let len = pieces.last().map_or(0, |piece| piece.chunk * CHUNK_BYTES + piece.at + piece.len);
        let store = match place {
            ImagePlace::Pinned => self.save_pinned(&pieces, len, reused)?,
            ImagePlace::Pageable => self.save_pageable(&pieces, len, reused)?,
            ImagePlace::Folder(folder) => self.save_to_file(&folder, &pieces, len)?,
        };
        let mut kept = self.kept();
        kept.next += 1;
        let id = kept.next;
        kept.images.insert(id, Arc::new(Saved { pool, parts: parts.to_vec(), store }));
        Ok(Image(id))
    }

    fn save_pinned(&self, pieces: &[Piece], len: usize, reused: Option<Store>) -> Result<Store, BackendError> {
        let mut chunks = if let Some(Store::Pinned(chunks)) = reused { chunks } else { Vec::new() };
        let count = len.div_ceil(CHUNK_BYTES);
        if chunks.len() > count {
            self.put_back(chunks.split_off(count));
        }
        match self.take_chunks(count - chunks.len()) {
            Ok(more) => chunks.extend(more),
            Err(error) => {
                self.put_back(chunks);
                return Err(error.into());
            }
        }
        if let Err(error) = self.copy(pieces, |piece| chunks[piece.chunk], Direction::ToHost) {
            self.put_back(chunks);
            return Err(error.into());
        }
        Ok(Store::Pinned(chunks))
    }

    fn save_pageable(&self, pieces: &[Piece], len: usize, reused: Option<Store>) -> Result<Store, BackendError> {
        let pageable = match reused {
            Some(Store::Pageable(pageable)) if pageable.len() == len => pageable,
            _ => Pageable::new(len).map_err(|error| of_file("mmap", &error))?,
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

    /// Implements [`Backend::expect_load`](symmalloc_core::backend::Backend::expect_load). Images elsewhere than in pinned memory are left to `load`,
    /// as are all images if the driver cannot create a stream.
    pub(crate) fn expect_load(&self, image: Image, parts: &[Part]) {
        let saved = self.kept().images.get(&image.0).cloned();
        let Some(Store::Pinned(chunks)) = saved.as_deref().map(|saved| &saved.store) else { return };
        let Ok(_current) = self.device.enter() else { return };
        let _relaxed = self.device.driver().relax_capture();
        if let Ok(copies) = Copies::new(&self.device) {
            self.fills.announce(image.0, chunks.clone(), pieces(parts), copies);
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
                let len = (saved.len() - chunk * CHUNK_BYTES).min(CHUNK_BYTES);
                pageable.read(chunk * CHUNK_BYTES, &mut bytes[..len]);
                Ok(())
            }),
            Store::File(file) => {
                self.load_staged(&pieces, |chunk, bytes| file.read(chunk, &mut bytes[..file.chunk_len(chunk)]))
            }
        }
    }

    /// Discards an image that is no longer needed, or retains it for its pool. Its chunks are kept for other images.
    pub(crate) fn discard(&self, image: Image) {
        let _current = self.device.enter();
        self.fills.forget(image.0);
        let mut kept = self.kept();
        let Some(saved) = kept.images.remove(&image.0) else { return };
        let of_pool = kept.pools.get_mut(&saved.pool).filter(|of_pool| of_pool.is_retained);
        let ended = match of_pool {
            Some(of_pool) if !matches!(saved.store, Store::File(_)) => of_pool.retained.replace(saved),
            _ => Some(saved),
        };
        drop(kept);
        self.end(ended);
    }

    /// Releases the memory of an image.
    fn end(&self, saved: Option<Arc<Saved>>) {
        if let Some(Store::Pinned(chunks)) = saved.and_then(Arc::into_inner).map(|saved| saved.store) {
            self.put_back(chunks);
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
        let chunks = self.take_chunks((size_bytes as usize).div_ceil(CHUNK_BYTES))?;
        self.put_back(chunks);
        Ok(())
    }

    /// Releases pinned memory that no image uses. Returns the number of bytes released.
    pub(crate) fn release_idle(&self) -> Result<u64, BackendError> {
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        let mut released_bytes = 0;
        loop {
            let Some(chunk) = self.kept().idle.pop() else { return Ok(released_bytes) };
            if let Err(error) = self.free(chunk) {
                self.put_back(vec![chunk]);
                return Err(error.into());
            }
            released_bytes += CHUNK_BYTES as u64;
        }
    }

    /// Returns the size in bytes of the pinned memory, including chunks that no image uses.
    pub(crate) fn host_bytes(&self) -> u64 {
        let kept = self.kept();
        let retained = kept.pools.values().filter_map(|of_pool| of_pool.retained.as_ref());
        let pinned = |saved: &Arc<Saved>| if let Store::Pinned(chunks) = &saved.store { chunks.len() } else { 0 };
        let in_use = kept.images.values().chain(retained).map(pinned);
        ((in_use.sum::<usize>() + kept.idle.len()) * CHUNK_BYTES) as u64
    }

    /// Returns `count` chunks, idle ones first, or none on error.
    fn take_chunks(&self, count: usize) -> Result<Vec<Chunk>, DriverError> {
        let mut chunks = {
            let mut kept = self.kept();
            let from = kept.idle.len() - count.min(kept.idle.len());
            kept.idle.split_off(from)
        };
        while chunks.len() < count {
            let mut address = std::ptr::null_mut();
            // SAFETY: `address` is valid for writing, and a context is current.
            match unsafe { self.device.driver().host_allocate(&raw mut address, CHUNK_BYTES, HOST_PORTABLE) } {
                Ok(()) => chunks.push(Chunk(address as u64)),
                Err(error) => {
                    self.put_back(chunks);
                    return Err(error);
                }
            }
        }
        Ok(chunks)
    }

    fn put_back(&self, chunks: Vec<Chunk>) {
        self.kept().idle.extend(chunks);
    }

    fn free(&self, chunk: Chunk) -> Result<(), DriverError> {
        // SAFETY: the chunk came from `host_allocate`, is freed only once, and all of its copies were waited for.
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
        let mut save = || {
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
        };
        let saved = save();
        self.put_back(staging);
        saved
    }

    /// Copies pieces from the chunks that `read` fills. Reads one chunk while the previous one is copied.
    fn load_staged(
        &self,
        pieces: &[Piece],
        read: impl Fn(usize, &mut [u8]) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let staging = self.take_chunks(2)?;
        let load = || {
            let copies = Copies::new(&self.device)?;
            let steps = || {
                for (at, group) in pieces.chunk_by(|one, next| one.chunk == next.chunk).enumerate() {
                    let chunk = staging[at % 2];
                    // SAFETY: the copies from this staging chunk were waited for; copies from the other chunk may still be running.
                    read(group[0].chunk, unsafe { slice_of(chunk, CHUNK_BYTES) })?;
                    copies.wait()?;
                    group.iter().try_for_each(|piece| copies.submit(piece, chunk, Direction::ToDevice))?;
                }
                Ok(())
            };
            copies.end(steps())
        };
        let loaded = load();
        self.put_back(staging);
        loaded
    }
}

impl Drop for Images {
    fn drop(&mut self) {
        let Ok(_current) = self.device.enter() else { return };
        let _relaxed = self.device.driver().relax_capture();
        let mut kept = std::mem::take(&mut *self.kept());
        kept.images.keys().for_each(|image| self.fills.forget(*image));
        let retained = std::mem::take(&mut kept.pools).into_values().filter_map(|of_pool| of_pool.retained);
        let saved = std::mem::take(&mut kept.images).into_values().chain(retained).filter_map(Arc::into_inner);
        kept.idle
            .extend(saved.flat_map(|saved| if let Store::Pinned(chunks) = saved.store { chunks } else { Vec::new() }));
        for chunk in kept.idle {
            // Memory that the driver fails to free is released with its context.
            let _freed = self.free(chunk);
        }
    }
}

/// Returns the first `len` bytes of a staging chunk.
///
/// # Safety
/// No copy reads or writes the bytes while the slice is alive, and no other slice refers to them.
unsafe fn slice_of<'a>(chunk: Chunk, len: usize) -> &'a mut [u8] {
    assert!(len <= CHUNK_BYTES);
    // SAFETY: the chunk is initialized host memory of this size; the caller ensures exclusive access.
    unsafe { std::slice::from_raw_parts_mut(chunk.at(0).cast::<u8>(), len) }
}
