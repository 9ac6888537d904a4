//! Steps through the C interface.

use crate::library::*;
use std::ptr::{null, null_mut};
use symmalloc_torch::*;

stub_test!(a_step_that_comes_twice_is_planned_and_followed, {
    let (allocator, streams) = (Allocator::new("plan:learn"), Streams::new(1));
    let stream = streams.get(0);
    let mut report = symmalloc_step_report::default();
    let mut places = Vec::new();
    for _ in 0..3 {
        // SAFETY: a live allocator, and a place for the answer.
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
    assert!(places[1] - places[0] >= 3 << 20, "they do not overlap: {places:?}");
    assert_eq!(allocator.stats()["total"]["steps"]["followed"], 1);
    assert_eq!(live().device_bytes, 8 << 20, "what is reserved is what is live at the peak");
    // SAFETY: a live allocator.
    unsafe {
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
