//! Saved contents: pinned memory, pageable memory and files, what programs read of them, and files that are modified or do not fit.

use crate::process::{device, live, stub_test};
use crate::sleep::{Job, backend, cause_of};
use cudarc::driver::DevicePtr;
use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use symmalloc_core::backend::{BackendError, Reason};
use symmalloc_core::op::Contents;
use symmalloc_core::sleep::{Phase, SleepCause};
use symmalloc_core::units::MIB;
use symmalloc_cuda::{CudaBackend, CudaError, ImageStorage, SavedBytes};

/// A job whose pool keeps its contents in `place`.
fn job_in(place: ImageStorage) -> Job {
    let job = Job::new(backend(), "segments:expandable");
    job.allocator.save_in(job.id(), place);
    job
}

/// Returns the open file of this process that was unlinked from a folder.
fn unnamed_file(folder: &Path) -> PathBuf {
    let descriptors = std::fs::read_dir("/proc/self/fd").expect("the descriptors");
    let mut paths = descriptors.filter_map(|entry| Some(entry.ok()?.path()));
    let is_ours = |path: &PathBuf| std::fs::read_link(path).is_ok_and(|target| target.starts_with(folder));
    paths.find(is_ours).expect("an open file")
}

#[track_caller]
fn saved_error(error: CudaError) -> BackendError {
    match cause_of(error) {
        SleepCause::Save { error, .. } | SleepCause::Load(error) => error,
        other => panic!("{other}"),
    }
}

stub_test!(kept_contents_can_be_stored_in_a_temporary_file, {
    let folder = std::env::temp_dir().join(format!("symmalloc-sleep-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let files = || std::fs::read_dir(&folder).expect("the folder").count();
    let backend = CudaBackend::builder(&device()).images_in(&folder).build().expect("the stub supports it");
    let mut job = Job::new(backend, "segments:fixed");
    for _ in 0..2 {
        job.allocator.sleep(job.id(), Contents::Keep).expect("slept");
        assert_eq!(
            (live().device_bytes, live().host_bytes, files()),
            (0, 64 << 20, 0),
            "at most two chunks are in use"
        );
        // A buffer that is freed during sleep is not copied back.
        drop(job.buffers.remove(0));
        job.allocator.wake(job.id()).expect("woken");
        job.holds_what_it_held();
    }
    job.end();
    std::fs::remove_dir(&folder).expect("the folder is empty");
    let nowhere = CudaBackend::builder(&device()).images_in(&folder).build().expect("the folder is not checked yet");
    let job = Job::new(nowhere, "segments:fixed");
    let error = job.allocator.sleep(job.id(), Contents::Keep).expect_err("there is no folder");
    let SleepCause::Save { error, .. } = cause_of(error) else { panic!("saving to the host must fail") };
    assert_eq!((error.call, error.code), ("open", 2));
    job.holds_what_it_held();
    job.end();
});

stub_test!(each_pool_keeps_its_contents_in_its_own_place, {
    contents_in_every_place();
});

stub_test!(staged_contents_are_copied_before_their_memory_is_reused, ["STUB_LAZY" = "1"], {
    contents_in_every_place();
});

fn contents_in_every_place() {
    let folder = tempfile::tempdir().expect("a folder");
    for place in [ImageStorage::Pinned, ImageStorage::Pageable, ImageStorage::Folder(folder.path().into())] {
        let job = job_in(place.clone());
        let (buffer, pattern) = &job.buffers[3];
        let (address, len) = (buffer.device_ptr(&job.stream).0, pattern.len());
        for _ in 0..2 {
            assert_eq!(job.allocator.saved_at(address, 1), None);
            job.allocator.sleep(job.id(), Contents::Keep).expect("slept");
            assert_eq!(live().device_bytes, 0);
            // Other places than pinned memory need two chunks to copy through.
            let chunks = if place == ImageStorage::Pinned { 3 } else { 2 };
            assert_eq!(job.allocator.host_bytes(), chunks * 32 * MIB, "{place:?}");
            let mut copy = vec![0; len];
            assert_eq!(job.allocator.copy_saved(address, &mut copy), Ok(true));
            assert!(copy == *pattern, "{place:?}");
            let at = job.allocator.saved_at(address, len as u64).expect("saved");
            match (&place, at) {
                (ImageStorage::Pageable, SavedBytes::Contiguous(at)) => {
                    // SAFETY: the bytes are saved there until the pool wakes.
                    assert!(unsafe { std::slice::from_raw_parts(at, len) } == pattern.as_slice());
                }
                // The buffer is larger than a chunk.
                (ImageStorage::Pinned | ImageStorage::Folder(_), SavedBytes::Scattered) => {}
                other => panic!("{other:?}"),
            }
            job.allocator.wake(job.id()).expect("woken");
            job.holds_what_it_held();
        }
        job.end();
    }
    assert_eq!(std::fs::read_dir(folder.path()).expect("the folder").count(), 0);
}

stub_test!(retained_contents_stay_readable_and_their_memory_is_reused, {
    for place in [ImageStorage::Pinned, ImageStorage::Pageable] {
        let job = job_in(place);
        let address = job.buffers[0].0.device_ptr(&job.stream).0;
        let saved = || match job.allocator.saved_at(address, 100) {
            Some(SavedBytes::Contiguous(at)) => Some(at as u64),
            None => None,
            other => panic!("{other:?}"),
        };
        let there_and_back = || {
            job.allocator.sleep(job.id(), Contents::Keep).expect("slept");
            let during = saved();
            job.allocator.wake(job.id()).expect("woken");
            job.holds_what_it_held();
            during
        };
        job.allocator.retain_saved(job.id(), true);
        let first = there_and_back();
        assert!(first.is_some() && saved() == first, "still readable after the wake");
        assert_eq!(there_and_back(), first, "the same memory");
        job.allocator.retain_saved(job.id(), false);
        assert_eq!(saved(), first, "until a wake that does not retain");
        assert_eq!(there_and_back(), first);
        assert_eq!(saved(), None);
        job.allocator.retain_saved(job.id(), true);
        there_and_back();
        let Job { allocator, pool, buffers, .. } = job;
        drop((buffers, pool));
        assert!(allocator.saved_at(address, 100).is_some(), "the pool still exists");
        allocator.trim_all().expect("the pool is destroyed");
        assert!(allocator.saved_at(address, 100).is_none(), "settings and contents end with the pool");
        allocator.release_host_memory().expect("released");
        assert_eq!((live().device_bytes, live().host_bytes), (0, 0));
    }
});

stub_test!(pinned_memory_becomes_idle_when_the_place_changes_during_sleep, {
    let job = job_in(ImageStorage::Pinned);
    let there_and_back = || {
        job.allocator.sleep(job.id(), Contents::Keep).expect("slept");
        job.allocator.wake(job.id()).expect("woken");
        job.holds_what_it_held();
    };
    job.allocator.retain_saved(job.id(), true);
    there_and_back();
    job.allocator.sleep(job.id(), Contents::Keep).expect("slept");
    job.allocator.save_in(job.id(), ImageStorage::Pageable);
    job.allocator.wake(job.id()).expect("woken");
    job.holds_what_it_held();
    there_and_back();
    job.allocator.release_host_memory().expect("released");
    assert_eq!((live().host_bytes, job.allocator.host_bytes()), (0, 0), "pageable memory needs none");
    job.end();
});

stub_test!(setting_the_same_place_again_keeps_the_retained_contents, {
    for place in [ImageStorage::Pinned, ImageStorage::Pageable] {
        let job = job_in(place.clone());
        let address = job.buffers[0].0.device_ptr(&job.stream).0;
        job.allocator.retain_saved(job.id(), true);
        job.allocator.sleep(job.id(), Contents::Keep).expect("slept");
        job.allocator.wake(job.id()).expect("woken");
        let saved = job.allocator.saved_at(address, 1);
        assert!(saved.is_some());
        job.allocator.save_in(job.id(), place);
        assert_eq!(job.allocator.saved_at(address, 1), saved);
        assert_eq!(job.allocator.saved_at(address, 0), None, "an empty range");
        assert_eq!(job.allocator.saved_at(address, u64::MAX), None, "beyond the end");
        job.end();
    }
});

stub_test!(a_modified_file_is_found_and_the_pool_stays_asleep_until_it_is_whole_again, {
    let folder = tempfile::tempdir().expect("a folder");
    let job = job_in(ImageStorage::Folder(folder.path().into()));
    job.allocator.sleep(job.id(), Contents::Keep).expect("slept");
    let file = OpenOptions::new().read(true).write(true).open(unnamed_file(folder.path())).expect("the file");
    assert_eq!(file.metadata().expect("metadata").mode() & 0o777, 0o600);
    let (mut byte, len) = ([0], file.metadata().expect("metadata").len());
    let at = 40 << 20;
    file.read_exact_at(&mut byte, at).expect("read");
    file.write_all_at(&[byte[0] ^ 1], at).expect("modified");
    for _ in 0..2 {
        let error = saved_error(job.allocator.wake(job.id()).expect_err("one bit differs"));
        assert_eq!((error.call, error.reason), ("read", Reason::Modified));
        assert_eq!((job.phase(), live().device_bytes), (Phase::Asleep, 0));
    }
    file.write_all_at(&byte, at).expect("restored");
    let mut tail = vec![0; 100];
    file.read_exact_at(&mut tail, len - 100).expect("read");
    file.set_len(len - 100).expect("shortened");
    let error = saved_error(job.allocator.wake(job.id()).expect_err("100 bytes are missing"));
    assert_eq!(error.reason, Reason::Modified);
    file.write_all_at(&tail, len - 100).expect("restored");
    job.allocator.wake(job.id()).expect("woken");
    job.holds_what_it_held();
    job.end();
});

stub_test!(a_full_disk_leaves_the_pool_awake_and_another_place_serves_it, {
    let folder = tempfile::tempdir().expect("a folder");
    let job = job_in(ImageStorage::Folder(folder.path().into()));
    // A limit on the size of files fails writes as a full disk does.
    let limit = |bytes| {
        let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: valid arguments, in a process that runs only this test.
        let result = unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) };
        assert_eq!(result, 0);
    };
    limit(40 << 20);
    let error = saved_error(job.allocator.sleep(job.id(), Contents::Keep).expect_err("the file is too large"));
    assert_eq!((error.call, error.code, error.reason), ("write", libc::EFBIG, Reason::File));
    assert_eq!(job.phase(), Phase::Awake);
    job.holds_what_it_held();
    job.allocator.save_in(job.id(), ImageStorage::Pageable);
    job.allocator.sleep(job.id(), Contents::Keep).expect("slept");
    limit(libc::RLIM_INFINITY);
    job.allocator.wake(job.id()).expect("woken");
    job.holds_what_it_held();
    job.end();
});
