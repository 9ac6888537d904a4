//! Recordings of a program's allocator and of PyTorch's allocator.

use crate::library::*;
use std::path::Path;
use std::ptr::null_mut;
use symmalloc_core::op::Op;
use symmalloc_import::{ReadOptions, read_path};
use symmalloc_torch::*;

/// Returns the numbers of allocations and frees in a file, and `true` if it is complete.
fn recorded(path: &Path) -> (usize, usize, Option<u64>) {
    let recording = read_path(path, &ReadOptions::default()).expect("the trace is complete");
    let count = |is: fn(&Op) -> bool| recording.records.iter().filter(|record| is(&record.op)).count();
    let allocations = count(|op| matches!(op, Op::Allocate { .. }));
    (
        allocations,
        count(|op| matches!(op, Op::Free { .. })),
        recording.config.and_then(|config| config.total_limit_bytes()),
    )
}

stub_test!(a_program_records_what_it_does, {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("job.trace.zst");
    let allocator = Allocator::new("total_limit_mb:64");
    let c_path = c_text(path.to_str().expect("text"));
    // SAFETY: a live allocator and a C string, here and below.
    done(unsafe { symmalloc_trace_start(allocator.0, c_path.as_ptr()) });
    // SAFETY: as above.
    assert_eq!(unsafe { symmalloc_trace_start(allocator.0, c_path.as_ptr()) }, SYMMALLOC_INVALID_STATE);
    let pointers = [MIB, 3 * MIB, 700].map(|size| allocator.allocate(0, size, null_mut()));
    allocator.free(pointers[1]);
    // SAFETY: as above.
    done(unsafe { symmalloc_trace_stop(allocator.0) });
    allocator.free(pointers[0]);
    assert_eq!(recorded(&path), (3, 1, Some(64 << 20)));
    // SAFETY: as above.
    assert_eq!(unsafe { symmalloc_trace_stop(allocator.0) }, SYMMALLOC_INVALID_STATE);
    // SAFETY: as above.
    assert_eq!(unsafe { symmalloc_trace_start(allocator.0, c_path.as_ptr()) }, SYMMALLOC_INVALID_STATE);
    assert!(message().contains("begin it before the first allocation"), "{}", message());
    assert_eq!(recorded(&path), (3, 1, Some(64 << 20)), "rejected calls do not change the trace");
    let other = Allocator::new("");
    // SAFETY: as above.
    let status = unsafe { symmalloc_trace_start(other.0, c"/nowhere/at/all".as_ptr()) };
    assert_eq!(status, SYMMALLOC_IO, "{}", message());
});

stub_test!(an_allocator_that_ends_ends_its_trace, {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("job.trace");
    let allocator = Allocator::new("");
    // SAFETY: a live allocator and a C string.
    done(unsafe { symmalloc_trace_start(allocator.0, c_text(path.to_str().expect("text")).as_ptr()) });
    allocator.allocate(0, MIB, null_mut());
    allocator.destroy();
    assert_eq!(recorded(&path), (1, 0, None));
});

stub_test!(the_environment_can_request_a_trace, ["RANK" = "1", "WORLD_SIZE" = "2"], {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let outputs = stub_process::ranks(
        1,
        &[("SYMMALLOC_TRACE", folder.path().join("job.trace.gz").to_str().expect("text"))],
        |_| {
            // A limit that is set before the first use is part of the configuration. A later one ends the trace.
            done(symmalloc_torch_set_fraction(0, 0.5));
            let tensor = torch::allocate(5 * MIB, null_mut());
            torch::free(tensor);
            torch::allocate(MIB, null_mut());
        },
    );
    assert!(outputs[0].is_success, "{}", outputs[0].text);
    // The end of the trace was written at process exit.
    assert_eq!(recorded(&folder.path().join("job.rank1.trace.gz")), (2, 1, Some(512 << 20)));
});

stub_test!(a_trace_that_cannot_be_written_is_an_error_at_first_use, ["SYMMALLOC_TRACE" = "/nowhere/job.trace"], {
    let allocator = Allocator::of_torch();
    assert_eq!(allocator.try_allocate(0, MIB, null_mut()), Err(SYMMALLOC_IO));
    assert!(message().contains("/nowhere/job.trace: cannot be created"), "{}", message());
});
