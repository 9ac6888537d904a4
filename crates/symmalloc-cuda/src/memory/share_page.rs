//! A page shared by the exporter and the importers of memory, with the current state of the export.
//!
//! ```text
//!  exporter                          importers, read only
//!  word: state │ allocation  ──────► one load per query
//! ```
//! The exporter writes the state once, before it changes the memory. If the exporter dies, the state remains as it is: nobody writes to the
//! memory anymore, so the importers' mappings stay valid. The page is sealed: an exporter cannot shrink it while an importer reads it, and
//! an importer cannot map it for writing.

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use symmalloc_files::is_forked;

const PAGE_BYTES: usize = 4096;

/// State of exported memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExportState {
    /// The exporter still uses the memory as it was exported.
    Live,
    /// The exporter freed the allocation with this index in the export order. The contents of this allocation are undefined from then on.
    Freed(u32),
    /// The exporter returned the memory to the device, or its pool is asleep. Importers keep the memory with its last contents.
    Unmapped,
    /// The exporter withdrew the export, see [`Export::withdraw`](crate::Export::withdraw).
    Withdrawn,
    /// The exporter's allocator has ended and no longer writes to the memory. Importers keep the memory.
    Ended,
}

impl ExportState {
    /// Returns `true` if an import still shows the exported contents.
    pub fn is_good(self) -> bool {
        matches!(self, ExportState::Live | ExportState::Ended)
    }

    pub(crate) fn to_word(self) -> u64 {
        match self {
            ExportState::Live => 1,
            ExportState::Freed(allocation) => 2 | u64::from(allocation) << 8,
            ExportState::Unmapped => 3,
            ExportState::Withdrawn => 4,
            ExportState::Ended => 5,
        }
    }

    /// Decodes the page's word. An unknown word counts as [`Withdrawn`](Self::Withdrawn), so the memory must not be used.
    pub(crate) fn of_word(word: u64) -> Self {
        match word & 0xff {
            1 => ExportState::Live,
            2 => ExportState::Freed((word >> 8) as u32),
            3 => ExportState::Unmapped,
            5 => ExportState::Ended,
            _ => ExportState::Withdrawn,
        }
    }
}

impl fmt::Display for ExportState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExportState::Live => f.write_str("it is live"),
            ExportState::Freed(allocation) => write!(f, "the exporter freed allocation {allocation} of it"),
            ExportState::Unmapped => f.write_str("the exporter returned it to the device, or its pool is asleep"),
            ExportState::Withdrawn => f.write_str("the exporter withdrew it"),
            ExportState::Ended => f.write_str("the exporter has ended and left it mapped"),
        }
    }
}

/// A mapped page of an export. See the module documentation.
pub(crate) struct SharePage {
    file: OwnedFd,
    /// The start of a mapped page, which is unmapped when this value is dropped.
    word: NonNull<AtomicU64>,
}

// SAFETY: the page is only accessed through an atomic.
unsafe impl Send for SharePage {}
// SAFETY: as above.
unsafe impl Sync for SharePage {}

impl SharePage {
    /// Creates the page of an exporter, in the live state.
    pub(crate) fn create() -> rustix::io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("symmalloc-share", flags)?;
        rustix::fs::ftruncate(&file, PAGE_BYTES as u64)?;
        let word = map(&file, ProtFlags::READ | ProtFlags::WRITE)?;
        let page = SharePage { file, word };
        page.word().store(ExportState::Live.to_word(), Ordering::Release);
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        // Linux before 5.1 lacks this seal, so importers could write to the page there.
        if rustix::fs::fcntl_add_seals(&page.file, seals | SealFlags::FUTURE_WRITE).is_err() {
            rustix::fs::fcntl_add_seals(&page.file, seals)?;
        }
        Ok(page)
    }

    /// Opens the page that an exporter sent. Returns `None` if the file is too small, or is not sealed and could therefore shrink while it
    /// is read.
    pub(crate) fn open(file: OwnedFd) -> Option<Self> {
        let size = rustix::fs::fstat(&file).ok()?.st_size;
        let is_sealed = rustix::fs::fcntl_get_seals(&file).ok()?.contains(SealFlags::SHRINK);
        if size < PAGE_BYTES as i64 || !is_sealed {
            return None;
        }
        let word = map(&file, ProtFlags::READ).ok()?;
        Some(SharePage { file, word })
    }

    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    #[inline]
    pub(crate) fn state(&self) -> ExportState {
        ExportState::of_word(self.word().load(Ordering::Acquire))
    }

    /// Changes the state from live to `state`. Later calls have no effect. Calls in a forked child have no effect either, because the
    /// child's copy of the exporter does not own the memory.
    pub(crate) fn leave_live(&self, state: ExportState) {
        if is_forked() {
            return;
        }
        let live = ExportState::Live.to_word();
        let _first = self.word().compare_exchange(live, state.to_word(), Ordering::AcqRel, Ordering::Acquire);
    }

    fn word(&self) -> &AtomicU64 {
        // SAFETY: mapped until this value is dropped, page-aligned, and only ever accessed as an atomic.
        unsafe { self.word.as_ref() }
    }
}

fn map(file: &OwnedFd, protection: ProtFlags) -> rustix::io::Result<NonNull<AtomicU64>> {
    // SAFETY: the kernel chooses the addresses.
    let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), PAGE_BYTES, protection, MapFlags::SHARED, file, 0) }?;
    Ok(NonNull::new(at.cast()).expect("the kernel does not choose address 0"))
}

impl Drop for SharePage {
    fn drop(&mut self) {
        // SAFETY: mapped with this size, and not used again.
        let _unmapped = unsafe { rustix::mm::munmap(self.word.as_ptr().cast(), PAGE_BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_final_state_of_an_export_is_kept() {
        let page = SharePage::create().expect("a page");
        let seen = SharePage::open(page.file().try_clone_to_owned().expect("a descriptor")).expect("the same page");
        assert_eq!(seen.state(), ExportState::Live);
        page.leave_live(ExportState::Freed(70_000));
        page.leave_live(ExportState::Ended);
        assert_eq!((page.state(), seen.state()), (ExportState::Freed(70_000), ExportState::Freed(70_000)));
    }

    #[test]
    fn a_file_that_can_be_shrunk_is_refused_as_a_page() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = || rustix::fs::memfd_create("test", flags).expect("a file");
        let long = file();
        rustix::fs::ftruncate(&long, PAGE_BYTES as u64).expect("resized");
        assert!(SharePage::open(long).is_none(), "the file has no seal");
        let short = file();
        rustix::fs::fcntl_add_seals(&short, SealFlags::SHRINK).expect("sealed");
        assert!(SharePage::open(short).is_none(), "the file is empty");
        let (one, _other) = std::os::unix::net::UnixStream::pair().expect("sockets");
        assert!(SharePage::open(one.into()).is_none(), "a socket is not a page");
    }
}
