//! A page that exporter and importers of memory have in common: whether the memory is still what was exported.
//!
//! ```text
//!  exporter                          importers, read only
//!  word: state │ allocation  ──────► one load each time they ask
//! ```
//! The exporter writes once, before what the word says happens. A process that dies leaves the word as it is: nobody writes to its memory any
//! more, so the importers' mappings stay good. The page is sealed: an exporter cannot shrink it under an importer, and an
//! importer cannot map it for writing.

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

const PAGE_BYTES: usize = 4096;

/// What became of exported memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExportState {
    /// The exporter still has it as it was exported.
    Live,
    /// The exporter freed the allocation with this number, in the order of the export: it may hold anything from now on.
    Freed(u32),
    /// The exporter gave the memory back to the device, or its pool sleeps. Importers have the last bytes, and hold the memory.
    Unmapped,
    /// The exporter withdrew it, see [`Export::withdraw`](crate::Export::withdraw).
    Withdrawn,
    /// The exporter's allocator has ended, and nobody else writes there: importers keep the memory.
    Ended,
}

impl ExportState {
    /// Whether an import shows what was exported.
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

    /// Words that no exporter writes mean that the memory is not to be used.
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
            ExportState::Live => f.write_str("it is as it was exported"),
            ExportState::Freed(allocation) => write!(f, "the exporter freed allocation {allocation} of it"),
            ExportState::Unmapped => f.write_str("the exporter gave it back to the device, or its pool sleeps"),
            ExportState::Withdrawn => f.write_str("the exporter withdrew it"),
            ExportState::Ended => f.write_str("the exporter has ended and left it"),
        }
    }
}

/// See the file's comment.
pub(crate) struct SharePage {
    file: OwnedFd,
    /// The start of a mapped page, which lives as long as this.
    word: NonNull<AtomicU64>,
}

// SAFETY: the page is only accessed through an atomic.
unsafe impl Send for SharePage {}
// SAFETY: as above.
unsafe impl Sync for SharePage {}

impl SharePage {
    /// A page of an exporter, which says that the memory is live.
    pub(crate) fn create() -> rustix::io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("symmalloc-share", flags)?;
        rustix::fs::ftruncate(&file, PAGE_BYTES as u64)?;
        let word = map(&file, ProtFlags::READ | ProtFlags::WRITE)?;
        let page = SharePage { file, word };
        page.word().store(ExportState::Live.to_word(), Ordering::Release);
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        // Before Linux 5.1 importers could write to the page.
        if rustix::fs::fcntl_add_seals(&page.file, seals | SealFlags::FUTURE_WRITE).is_err() {
            rustix::fs::fcntl_add_seals(&page.file, seals)?;
        }
        Ok(page)
    }

    /// The page that an exporter sent; `None` when it is none, or could be shrunk while it is read.
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

    /// Says what became of the memory, unless that was said before.
    pub(crate) fn leave_live(&self, state: ExportState) {
        let live = ExportState::Live.to_word();
        let _first = self.word().compare_exchange(live, state.to_word(), Ordering::AcqRel, Ordering::Acquire);
    }

    fn word(&self) -> &AtomicU64 {
        // SAFETY: mapped until this is dropped, aligned to a page, and only ever accessed as an atomic.
        unsafe { self.word.as_ref() }
    }
}

fn map(file: &OwnedFd, protection: ProtFlags) -> rustix::io::Result<NonNull<AtomicU64>> {
    // SAFETY: the kernel chooses the addresses.
    let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), PAGE_BYTES, protection, MapFlags::SHARED, file, 0) }?;
    Ok(NonNull::new(at.cast()).expect("no mapping is at 0 unless it was asked for"))
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
    fn what_an_exporter_says_first_is_what_importers_see() {
        let page = SharePage::create().expect("a page");
        let seen = SharePage::open(page.file().try_clone_to_owned().expect("a descriptor")).expect("the same page");
        assert_eq!(seen.state(), ExportState::Live);
        page.leave_live(ExportState::Freed(70_000));
        page.leave_live(ExportState::Ended);
        assert_eq!((page.state(), seen.state()), (ExportState::Freed(70_000), ExportState::Freed(70_000)));
    }

    #[test]
    fn a_file_that_can_be_shrunk_is_no_page() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = || rustix::fs::memfd_create("test", flags).expect("a file");
        let long = file();
        rustix::fs::ftruncate(&long, PAGE_BYTES as u64).expect("long enough");
        assert!(SharePage::open(long).is_none(), "it has no seal");
        let short = file();
        rustix::fs::fcntl_add_seals(&short, SealFlags::SHRINK).expect("sealed");
        assert!(SharePage::open(short).is_none(), "it is empty");
        let (one, _other) = std::os::unix::net::UnixStream::pair().expect("sockets");
        assert!(SharePage::open(one.into()).is_none(), "it is no file");
    }
}
