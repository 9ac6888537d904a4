//! Images: the saved contents of sleeping pools, in pinned host memory or in files.
//!
//! ```text
//!  parts     │ a │     │ b │        │ c │       live blocks on the device, at arbitrary addresses
//!  image     │ a │ b │ c │                      contiguous
//!  chunks    │ 32 MiB │ 32 MiB │ ...            pinned; with a file only two: one is copied while the other is written
//! ```
//! Pinned memory is slow to allocate (about 0.3 s per GiB), so a chunk that is no longer needed is kept for the next image until
//! [`Images::release_idle`]. Copies use a dedicated stream and therefore wait for no other stream. The caller has waited for all users of
//! the memory.

use super::copies::{CHUNK_BYTES, Chunk, Copies, Direction, Piece, pieces};
use super::fills::Fills;
use crate::device::CudaDevice;
use crate::driver::HOST_PORTABLE;
use crate::error::{DriverError, INVALID_VALUE};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use symmalloc_core::backend::{BackendError, Image, Part, Reason};

/// The images of one backend.
pub(crate) struct Images {
    device: Arc<CudaDevice>,
    /// Folder for image files. `None`: images stay in pinned memory.
    folder: Option<PathBuf>,
    kept: Mutex<KeptImages>,
    fills: Arc<Fills>,
}

#[derive(Default)]
struct KeptImages {
    next: u64,
    images: BTreeMap<u64, Arc<Store>>,
    idle: Vec<Chunk>,
}

/// Storage of one image.
enum Store {
    Host(Vec<Chunk>),
    File(File),
}

impl Images {
    pub(crate) fn new(device: Arc<CudaDevice>, folder: Option<PathBuf>) -> Self {
        Images { device, folder, kept: Mutex::default(), fills: Arc::default() }
    }

    /// Returns the fills, which must be notified when memory is mapped and before it is unmapped.
    pub(crate) fn fills(&self) -> &Arc<Fills> {
        &self.fills
    }

    fn kept(&self) -> MutexGuard<'_, KeptImages> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Implements [`Backend::save`](symmalloc_core::backend::Backend::save).
    pub(crate) fn save(&self, parts: &[Part]) -> Result<Image, BackendError> {
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        let pieces = pieces(parts);
        let store = match &self.folder {
            None => {
                let chunks = self.take_chunks(pieces.last().map_or(0, |piece| piece.chunk + 1))?;
                let copied = self.copy(&pieces, |piece| chunks[piece.chunk], Direction::ToHost);
                if let Err(error) = copied {
                    self.put_back(chunks);
                    return Err(error.into());
                }
                Store::Host(chunks)
            }
            Some(folder) => Store::File(self.save_to_file(folder, &pieces)?),
        };
        let mut kept = self.kept();
        kept.next += 1;
        let id = kept.next;
        kept.images.insert(id, Arc::new(store));
        Ok(Image(id))
    }

    /// Implements [`Backend::expect_load`](symmalloc_core::backend::Backend::expect_load). Images in files are left to `load`, as are all
    /// images if the driver cannot create a stream.
    pub(crate) fn expect_load(&self, image: Image, parts: &[Part]) {
        let store = self.kept().images.get(&image.0).cloned();
        let Some(Store::Host(chunks)) = store.as_deref() else { return };
        let Ok(_current) = self.device.enter() else { return };
        let _relaxed = self.device.driver().relax_capture();
        if let Ok(copies) = Copies::new(&self.device) {
            self.fills.announce(image.0, chunks.clone(), pieces(parts), copies);
        }
    }

    /// Implements [`Backend::load`](symmalloc_core::backend::Backend::load).
    pub(crate) fn load(&self, image: Image, parts: &[Part]) -> Result<(), BackendError> {
        let found = self.kept().images.get(&image.0).cloned();
        let store = found.ok_or(DriverError { call: "load", code: INVALID_VALUE })?;
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        if let Some(filled) = self.fills.finish(image.0) {
            return Ok(filled?);
        }
        let pieces = pieces(parts);
        match &*store {
            Store::Host(chunks) => Ok(self.copy(&pieces, |piece| chunks[piece.chunk], Direction::ToDevice)?),
            Store::File(file) => self.load_from_file(file, &pieces),
        }
    }

    /// Discards an image that is no longer needed. Its chunks are kept for other images.
    pub(crate) fn discard(&self, image: Image) {
        let _current = self.device.enter();
        self.fills.forget(image.0);
        let store = self.kept().images.remove(&image.0);
        if let Some(Store::Host(chunks)) = store.and_then(Arc::into_inner) {
            self.put_back(chunks);
        }
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
        let in_use =
            kept.images.values().map(|store| if let Store::Host(chunks) = &**store { chunks.len() } else { 0 });
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

    /// Saves pieces to a new file. Copies one chunk while the previous one is written.
    fn save_to_file(&self, folder: &Path, pieces: &[Piece]) -> Result<File, BackendError> {
        let file = file_without_name(folder).map_err(|error| of_file("open", &error))?;
        let staging = self.take_chunks(2)?;
        let save = || {
            let copies = Copies::new(&self.device)?;
            let groups: Vec<&[Piece]> = pieces.chunk_by(|one, next| one.chunk == next.chunk).collect();
            let submit = |at: usize| {
                let group = groups.get(at).copied().unwrap_or_default();
                group.iter().try_for_each(|piece| copies.submit(piece, staging[at % 2], Direction::ToHost))
            };
            let steps = || {
                submit(0)?;
                for (at, group) in groups.iter().enumerate() {
                    copies.wait()?;
                    submit(at + 1)?;
                    for piece in *group {
                        // SAFETY: the piece was copied into the staging chunk, to which nothing writes until the next wait.
                        let bytes = unsafe { slice_of(staging[at % 2], piece) };
                        file.write_all_at(bytes, piece.image_offset()).map_err(|error| of_file("write", &error))?;
                    }
                }
                Ok(())
            };
            copies.end(steps())
        };
        let saved = save();
        self.put_back(staging);
        saved.map(|()| file)
    }

    /// Loads pieces from a file. Reads one chunk while the previous one is copied.
    fn load_from_file(&self, file: &File, pieces: &[Piece]) -> Result<(), BackendError> {
        let staging = self.take_chunks(2)?;
        let load = || {
            let copies = Copies::new(&self.device)?;
            let steps = || {
                for (at, group) in pieces.chunk_by(|one, next| one.chunk == next.chunk).enumerate() {
                    let chunk = staging[at % 2];
                    for piece in group {
                        // SAFETY: the copies from this staging chunk were waited for; copies from the other chunk may still be running.
                        let bytes = unsafe { slice_of(chunk, piece) };
                        file.read_exact_at(bytes, piece.image_offset()).map_err(|error| of_file("read", &error))?;
                    }
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
        let stores = std::mem::take(&mut kept.images).into_values().filter_map(Arc::into_inner);
        kept.idle.extend(stores.flat_map(|store| if let Store::Host(chunks) = store { chunks } else { Vec::new() }));
        for chunk in kept.idle {
            // Memory that the driver fails to free is released with its context.
            let _freed = self.free(chunk);
        }
    }
}

/// Returns the bytes of a piece in a staging chunk.
///
/// # Safety
/// No copy reads or writes the bytes while the slice is alive, and no other slice refers to them.
unsafe fn slice_of<'a>(chunk: Chunk, piece: &Piece) -> &'a mut [u8] {
    // SAFETY: the chunk has room for the piece and is initialized host memory; the caller ensures exclusive access.
    unsafe { std::slice::from_raw_parts_mut(chunk.at(piece.at).cast::<u8>(), piece.len) }
}

/// Creates a file that is deleted when it is closed.
fn file_without_name(folder: &Path) -> io::Result<File> {
    let mut number = 0_u64;
    loop {
        let path = folder.join(format!(".symmalloc-{}-{number}.image", std::process::id()));
        match OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path) {
            Ok(file) => {
                std::fs::remove_file(&path)?;
                return Ok(file);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
            Err(error) => return Err(error),
        }
    }
}

/// Converts a file error into a backend error, with `errno` as the code.
fn of_file(call: &'static str, error: &io::Error) -> BackendError {
    BackendError::new(call, error.raw_os_error().unwrap_or(0), Reason::Refused)
}
