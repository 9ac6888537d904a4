//! Steps through the C interface.

use crate::library::*;
use std::ptr::{null, null_mut};
use symmalloc_torch::*;

stub_test!(a_step_that_occurs_twice_is_planned_and_followed, {
    let (allocator, streams) = (Allocator::new("plan:learn,stitching:false"), Streams::new(1));
    let stream = streams.get(0);
    let mut report = symmalloc_step_report::default();
    let mut places = Vec::new();
    for _ in 0..3 {
        // SAFETY: a live allocator, and an output pointer.
        done(unsafe { symmalloc_step_begin(allocator.0, 0, 3) });
        let (one, two) = (allocator.allocate(0, 5 * MIB, stream), allocator.allocate(0, 3 * MIB, stream));
        places = vec![allocator.placement(one).offset_bytes, allocator.placement(two).offset_bytes];
        allocator.free(one);
        allocator.free(two);
        // SAFETY: as above.
        done(unsafe { symmalloc_step_end(allocator.0, 0, &raw mut report) });
    }
    let expected = symmalloc_step_report { allocations: 2, planned: 2, plan_bytes: 8 << 20, differs_at: u64::MAX };
    assert_eq!(report, expected);
    places.sort_unstable();
    assert!(places[1] - places[0] >= 3 << 20, "the allocations overlap: {places:?}");
    assert_eq!(allocator.stats()["total"]["steps"]["followed"], 1);
    assert_eq!(live().device_bytes, 8 << 20, "reserved memory equals the peak of live memory");
    // A plan file for two live allocations of 8 MiB.
    let text = "symmalloc-plan 1\nconfig segments:expandable\nplan p0 s0 key 3 allocations 2\n\
                a 5242880 s0 2 @3145728\na 3145728 s0 2 @0\nend 4\n";
    let path = std::env::temp_dir().join(format!("symmalloc-steps-{}.plan", std::process::id()));
    std::fs::write(&path, text).expect("a folder for temporary files");
    let c_path = std::ffi::CString::new(path.to_str().expect("text")).expect("no NUL");
    let (mut count, missing) = (0, c"/nonexistent/job.plan");
    // SAFETY: a live allocator, C strings, and output pointers.
    unsafe {
        done(symmalloc_plans_adopt(allocator.0, 0, c_path.as_ptr(), &raw mut count));
        let status = symmalloc_plans_adopt(allocator.0, 0, missing.as_ptr(), null_mut());
        assert_eq!(status, SYMMALLOC_IO, "{}", message());
        done(symmalloc_step_begin(allocator.0, 0, 3));
    }
    std::fs::remove_file(&path).expect("the file exists");
    let one = allocator.allocate(0, 5 * MIB, stream);
    let two = allocator.allocate(0, 3 * MIB, stream);
    assert_eq!(allocator.placement(one).offset_bytes - allocator.placement(two).offset_bytes, 3 << 20);
    allocator.free(one);
    allocator.free(two);
    // SAFETY: a live allocator.
    unsafe {
        done(symmalloc_step_end(allocator.0, 0, null_mut()));
        assert_eq!(count, 1);
        done(symmalloc_plans_drop(allocator.0, 0));
        assert_eq!(symmalloc_step_end(allocator.0, 0, null_mut()), SYMMALLOC_INVALID_STATE, "{}", message());
        done(symmalloc_step_begin(allocator.0, 0, 3));
        assert_eq!(symmalloc_step_begin(allocator.0, 0, 3), SYMMALLOC_INVALID_STATE, "{}", message());
        assert_eq!(symmalloc_plans_drop(allocator.0, 0), SYMMALLOC_INVALID_STATE, "{}", message());
        assert_eq!(symmalloc_step_begin(allocator.0, 99, 3), SYMMALLOC_UNKNOWN_POOL, "{}", message());
        done(symmalloc_step_end(allocator.0, 0, null_mut()));
        assert_eq!(symmalloc_step_end(null::<()>() as *mut _, 0, null_mut()), SYMMALLOC_INVALID_ARGUMENT);
    }
});
