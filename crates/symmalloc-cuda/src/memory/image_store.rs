//! The storage of one image: pinned chunks, pageable memory, or a file with checksums.

use super::copies::{CHUNK_BYTES, Chunk};
use rustix::mm::{MapFlags, ProtFlags};
use std::collections::hash_map::RandomState;
use std::fs::{File, Permissions};
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::ops::Deref;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use symmalloc_core::backend::{BackendError, Reason};
use symmalloc_files::without_signals;

/// The storage for the saved contents of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ImageStorage {
    /// Pinned host memory, which is slow to allocate and fast to copy. Later images reuse it.
    #[default]
    Pinned,
    /// Pageable host memory, which returns to the system when the pool wakes.
    Pageable,
    /// An unnamed file in this folder. It disappears with the process, and its checksums are verified when it is read.
    Folder(PathBuf),
}

/// The storage of one image.
pub(super) enum Store {
    Pinned(PinnedChunks),
    Pageable(Pageable),
    File(ImageFile),
}

/// Pinned chunks that no image uses.
#[derive(Clone, Default)]
pub(super) struct IdleChunks(Arc<Mutex<Vec<Chunk>>>);

impl IdleChunks {
    /// Takes at most `count` chunks.
    pub(super) fn take(&self, count: usize) -> PinnedChunks {
        let mut idle = self.lock();
        let from = idle.len().saturating_sub(count);
        PinnedChunks { chunks: idle.split_off(from), idle: self.clone() }
    }

    pub(super) fn pop(&self) -> Option<Chunk> {
        self.lock().pop()
    }

    pub(super) fn push(&self, chunk: Chunk) {
        self.lock().push(chunk);
    }

    pub(super) fn len(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Chunk>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Pinned chunks in use. They become idle when they are dropped.
pub(super) struct PinnedChunks {
    chunks: Vec<Chunk>,
    idle: IdleChunks,
}

impl PinnedChunks {
    pub(super) fn push(&mut self, chunk: Chunk) {
        self.chunks.push(chunk);
    }

    pub(super) fn truncate(&mut self, count: usize) {
        self.idle.lock().extend(self.chunks.drain(count.min(self.chunks.len())..));
    }
}

impl Deref for PinnedChunks {
    type Target = [Chunk];

    fn deref(&self) -> &[Chunk] {
        &self.chunks
    }
}

impl Drop for PinnedChunks {
    fn drop(&mut self) {
        self.truncate(0);
    }
}

/// Private anonymous memory.
pub(super) struct Pageable {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory is not bound to a thread.
unsafe impl Send for Pageable {}
// SAFETY: a shared reference only reads.
unsafe impl Sync for Pageable {}

impl Pageable {
    pub(super) fn new(len: usize) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the addresses.
        let start = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::PRIVATE) }?;
        Ok(Pageable { start: NonNull::new(start.cast()).expect("the kernel does not choose address 0"), len })
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Returns the address of the byte at `offset`.
    pub(super) fn at(&self, offset: usize) -> *const u8 {
        assert!(offset <= self.len);
        // SAFETY: the offset lies within the mapping.
        unsafe { self.start.as_ptr().add(offset) }
    }

    pub(super) fn write(&mut self, offset: usize, bytes: &[u8]) {
        assert!(offset <= self.len && bytes.len() <= self.len - offset);
        // SAFETY: the range lies within the mapping, to which nothing else refers during the call.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.as_ptr().add(offset), bytes.len()) };
    }

    pub(super) fn read(&self, offset: usize, bytes: &mut [u8]) {
        assert!(bytes.len() <= self.len - offset);
        // SAFETY: the range lies within the mapping, to which nothing writes during the call.
        unsafe { std::ptr::copy_nonoverlapping(self.at(offset), bytes.as_mut_ptr(), bytes.len()) };
    }
}

impl Drop for Pageable {
    fn drop(&mut self) {
        // SAFETY: mapped with this size, and not used again.
        let _unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// A file without a name that only this user can open, with a checksum for each chunk.
///
/// The checksums are keyed with a random number of this process, so another process that modifies the file cannot compute matching ones.
pub(super) struct ImageFile {
    file: File,
    len: usize,
    key: RandomState,
    /// The checksum of each chunk. The last chunk may be shorter than the others.
    checksums: Vec<u64>,
}

impl ImageFile {
    /// Creates a file for `len` bytes. It is deleted when it is closed.
    pub(super) fn create(folder: &Path, len: usize) -> Result<Self, BackendError> {
        let file = tempfile::tempfile_in(folder).map_err(|error| of_file("open", &error))?;
        // A file that never had a name gets the mode that the umask allows, so restrict it here. Ignore an error, because some file systems
        // have no modes.
        let _changed = file.set_permissions(Permissions::from_mode(0o600));
        Ok(ImageFile { file, len, key: RandomState::new(), checksums: Vec::new() })
    }

    /// Appends the next chunk.
    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<(), BackendError> {
        let offset = self.checksums.len() * CHUNK_BYTES;
        let written = without_signals(|| self.file.write_all_at(bytes, offset as u64));
        written.map_err(|error| of_file("write", &error))?;
        self.checksums.push(self.checksum(bytes));
        Ok(())
    }

    /// Returns the size in bytes of a chunk.
    pub(super) fn chunk_len(&self, chunk: usize) -> usize {
        (self.len - chunk * CHUNK_BYTES).min(CHUNK_BYTES)
    }

    /// Reads a whole chunk and verifies its checksum.
    pub(super) fn read(&self, chunk: usize, bytes: &mut [u8]) -> Result<(), BackendError> {
        match self.file.read_exact_at(bytes, (chunk * CHUNK_BYTES) as u64) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(modified()),
            read => read.map_err(|error| of_file("read", &error))?,
        }
        if self.checksums.get(chunk) == Some(&self.checksum(bytes)) { Ok(()) } else { Err(modified()) }
    }

    fn checksum(&self, bytes: &[u8]) -> u64 {
        let mut hasher = self.key.build_hasher();
        hasher.write(bytes);
        hasher.finish()
    }
}

fn modified() -> BackendError {
    BackendError::new("read", 0, Reason::Modified)
}

/// Converts a file error into a backend error, with `errno` as the code.
fn of_file(call: &'static str, error: &io::Error) -> BackendError {
    BackendError::new(call, error.raw_os_error().unwrap_or(0), Reason::File)
}
