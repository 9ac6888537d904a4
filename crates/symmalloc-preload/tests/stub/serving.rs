//! Guarantees to programs: memory without driver calls, in stream order, and the driver's error codes for mistakes.

use crate::driver::*;
use crate::environment::preload;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use stub_process::cuda::{LongWork, advance, all_calls, calls, fail, heal, hold, live};
use stub_process::stub_test;

/// Returns the number of driver calls that allocate or free memory.
fn driver_allocations() -> u64 {
    let all = [
        "cuMemAlloc_v2",
        "cuMemFree_v2",
        "cuMemAllocAsync",
        "cuMemFreeAsync",
        "cuMemAllocFromPoolAsync",
        "cuMemCreate",
    ];
    all.into_iter().map(calls).sum()
}

/// Releases held work after a short delay, and sets the flag immediately before.
fn release_soon(work: LongWork, is_over: &Arc<AtomicBool>) -> JoinHandle<()> {
    let is_over = Arc::clone(is_over);
    thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        is_over.store(true, Ordering::SeqCst);
        drop(work);
    })
}

stub_test!(a_steady_state_makes_no_driver_call, ["LD_PRELOAD" = &preload()], {
    begin(0);
    let stream = stream();
    let step = || {
        let (a, b) =
            (alloc(3 * MIB).expect("memory should suffice"), alloc_async(700, stream).expect("memory should suffice"));
        let c = alloc_async(40 * MIB, 0).expect("memory should suffice");
        assert_eq!([mem_free_async(b, stream), mem_free(a), mem_free_async(c, 0)], [0; 3]);
        [a, b, c]
    };
    let first = step();
    assert!(live().device_bytes > 43 << 20);
    let before = driver_allocations();
    assert!((0..100).all(|_| step() == first), "every iteration has the same addresses");
    assert_eq!(driver_allocations(), before);
    // Neither an allocation on a stream nor its free makes a driver call.
    let before = all_calls();
    let pointer = alloc_async(700, stream).expect("memory should suffice");
    assert_eq!((mem_free_async(pointer, stream), all_calls()), (0, before));
    assert_eq!((calls("cuMemAlloc_v2"), calls("cuMemAllocAsync")), (0, 0));
});

stub_test!(a_free_waits_for_the_context_and_an_async_one_does_not, ["LD_PRELOAD" = &preload()], {
    begin(0);
    let (stream, pointer) = (stream(), alloc(MIB).expect("memory should suffice"));
    let work = hold(stream);
    // Runs after the held work on the stream.
    assert_eq!(memset_async(pointer, 7, MIB, stream), 0);
    let is_over = Arc::new(AtomicBool::new(false));
    let releaser = release_soon(work, &is_over);
    assert_eq!(mem_free(pointer), 0);
    assert!(is_over.load(Ordering::SeqCst), "the free returned before the work was done");
    releaser.join().expect("the thread should not panic");
    let pointer = alloc_async(MIB, stream).expect("memory should suffice");
    let work = hold(stream);
    assert_eq!(memset_async(pointer, 9, MIB, stream), 0);
    assert_eq!(mem_free_async(pointer, stream), 0);
    assert_eq!(alloc_async(MIB, stream), Ok(pointer), "stream order suffices, so no wait is needed");
    drop(work);
});

stub_test!(memory_freed_on_another_stream_is_reused_after_that_streams_work, ["LD_PRELOAD" = &preload()], {
    begin(0);
    let (a, b) = (stream(), stream());
    let pointer = alloc_async(MIB, a).expect("memory should suffice");
    assert_eq!(memset_async(pointer, 1, MIB, a), 0);
    let work = hold(b);
    assert_eq!([memset_async(pointer, 2, MIB, b), mem_free_async(pointer, b)], [0; 2]);
    assert_eq!(alloc_async(MIB, a), Ok(pointer));
    assert_eq!(memset_async(pointer, 3, MIB, a), 0);
    assert!(!advance(a));
    assert_eq!(byte(pointer), 1, "no later work has run");
    drop(work);
    assert_eq!([stream_synchronize(b), stream_synchronize(a)], [0; 2]);
    assert_eq!(byte(pointer), 3, "the next user's work came last");
    // Memory of `cuMemAlloc` can be used immediately, because the host has waited.
    let pointer = alloc(MIB).expect("memory should suffice");
    let work = hold(b);
    assert_eq!([memset_async(pointer, 4, MIB, b), mem_free_async(pointer, b)], [0; 2]);
    let is_over = Arc::new(AtomicBool::new(false));
    let releaser = release_soon(work, &is_over);
    assert_eq!(alloc(MIB), Ok(pointer));
    assert!(
        is_over.load(Ordering::SeqCst) && byte(pointer) == 4,
        "the memory was reused before its last user was done"
    );
    releaser.join().expect("the thread should not panic");
});

stub_test!(
    the_next_stream_with_a_number_waits_for_the_destroyed_one,
    ["LD_PRELOAD" = &preload(), "STUB_REUSE_STREAMS" = "1"],
    {
        begin(0);
        let first = stream();
        let pointer = alloc_async(MIB, first).expect("memory should suffice");
        let work = hold(first);
        assert_eq!(
            [memset_async(pointer, 5, MIB, first), mem_free_async(pointer, first), stream_destroy(first)],
            [0; 3]
        );
        let second = stream();
        assert_ne!(first, second, "its work is not done, so the driver does not reuse its handle");
        // The new stream gets the first stream's number, and with it the memory.
        assert_eq!(alloc_async(MIB, second), Ok(pointer));
        assert_eq!(memset_async(pointer, 6, MIB, second), 0);
        drop(work);
        assert_eq!(stream_synchronize(second), 0);
        assert_eq!(byte(pointer), 6);
        assert_eq!([mem_free_async(pointer, second), stream_destroy(second)], [0; 2]);
        assert_eq!(context_synchronize(), 0, "the driver may reuse the handles of streams whose work is done");
        // A reused handle is another stream, and gets the lowest free number.
        let (third, fourth) = (stream(), stream());
        assert!([first, second].contains(&third));
        let lower = alloc_async(MIB, fourth).expect("memory should suffice");
        assert_eq!(lower, pointer, "numbers are assigned at the first use, not at creation");
        assert_ne!(alloc_async(MIB, third), Ok(pointer));
        for _ in 0..200_000 / 100 {
            let stream = stream();
            let pointer = alloc_async(512, stream).expect("more streams than numbers are created and destroyed");
            assert_eq!([mem_free_async(pointer, stream), stream_destroy(stream)], [0; 2]);
        }
    }
);

// A program that creates and destroys streams: the driver reuses their handles, and the library must not confuse them.
stub_test!(
    memory_waits_for_the_stream_that_has_the_handle_now,
    ["LD_PRELOAD" = &preload(), "STUB_REUSE_STREAMS" = "1"],
    {
        begin(0);
        let (kept, mut handles) = (stream(), Vec::new());
        for round in 0..6_u8 {
            let reused = stream();
            handles.push(reused);
            let pointer = alloc_async(MIB, kept).expect("memory should suffice");
            let work = hold(reused);
            // The free orders the memory's next user after the work of this stream.
            assert_eq!([memset_async(pointer, round, MIB, reused), mem_free_async(pointer, reused)], [0; 2]);
            assert_eq!(alloc_async(MIB, kept), Ok(pointer));
            assert_eq!(memset_async(pointer, 100 + round, MIB, kept), 0);
            assert!(!advance(kept), "round {round}: the memory's next user waits");
            drop(work);
            assert_eq!([stream_synchronize(reused), stream_synchronize(kept)], [0; 2]);
            assert_eq!(byte(pointer), 100 + round);
            assert_eq!([mem_free_async(pointer, kept), stream_destroy(reused)], [0; 2]);
            assert_eq!(context_synchronize(), 0, "the driver may reuse the handle");
        }
        handles.sort_unstable();
        handles.dedup();
        assert!(handles.len() < 6, "handles are reused");
    }
);

stub_test!(a_stream_whose_last_event_cannot_be_recorded_is_not_destroyed, ["LD_PRELOAD" = &preload()], {
    begin(0);
    let stream = stream();
    let pointer = alloc_async(MIB, stream).expect("memory should suffice");
    assert_eq!(mem_free_async(pointer, stream), 0);
    fail("cuEventRecord", 1, 214);
    let before = live().streams;
    assert_eq!(
        (stream_destroy(stream), live().streams),
        (214, before + 1),
        "includes the stream that waits for returned streams"
    );
    assert_eq!(alloc_async(MIB, stream), Ok(pointer), "nothing has changed");
    assert_eq!([mem_free_async(pointer, stream), stream_destroy(stream)], [0; 2]);
});

stub_test!(every_thread_has_its_own_default_stream, ["LD_PRELOAD" = &preload()], {
    let context = begin(0);
    let mut own = 0;
    assert_eq!(mem_alloc_async_ptsz(&raw mut own, MIB, 0), 0);
    assert_eq!(mem_free_async_ptsz(own, 0), 0);
    assert_ne!(alloc_async(MIB, 0), Ok(own), "the legacy stream is a different stream");
    assert_eq!(alloc_async(MIB, 2), Ok(own), "handle 2 is the same stream");
    assert_eq!(mem_free_async(own, 2), 0);
    let others = thread::spawn(move || {
        assert_eq!(set_current(context), 0);
        let mut pointer = 0;
        assert_eq!(mem_alloc_async_ptsz(&raw mut pointer, MIB, 0), 0);
        assert_eq!(mem_free_async_ptsz(pointer, 0), 0);
        pointer
    });
    let others = others.join().expect("the thread should not panic");
    assert_ne!(others, own);
    // The thread has ended, and the next thread gets its number.
    let next = thread::spawn(move || {
        assert_eq!(set_current(context), 0);
        let mut pointer = 0;
        assert_eq!(mem_alloc_async_ptsz(&raw mut pointer, MIB, 0), 0);
        assert_eq!(mem_free_async_ptsz(pointer, 0), 0);
        pointer
    });
    assert_eq!(next.join().expect("the thread should not panic"), others);
});

stub_test!(invalid_calls_return_the_drivers_errors, ["LD_PRELOAD" = &preload()], {
    let mut address = 0;
    assert_eq!(init(0), 0);
    assert_eq!(mem_alloc(&raw mut address, MIB), 201, "no context");
    begin(0);
    let (stream, pointer) = (stream(), alloc(MIB).expect("memory should suffice"));
    assert_eq!(mem_free(pointer + 512), 1);
    assert_eq!(mem_free(pointer), 0);
    assert_eq!(mem_free(pointer), 1, "freed twice");
    let pointer = alloc_async(MIB, stream).expect("memory should suffice");
    assert_eq!(mem_free_async(pointer, stream), 0);
    assert_eq!(mem_free_async(pointer, stream), 1, "freed twice");
    assert_eq!(alloc_async(0, stream), Err(1));
    assert_eq!(alloc_async(MIB, 0x666), Err(400), "no such stream");
    let pointer = alloc_async(MIB, stream).expect("memory should suffice");
    assert_eq!(mem_free_async(pointer, 0x666), 400);
    assert_eq!(mem_free_async(pointer, stream), 0, "a failed free can be repeated");
    assert_eq!(alloc(usize::MAX / 4), Err(2));
    assert_eq!(alloc(2 << 30), Err(2), "more memory than the device has");
    // Memory from calls that are not served belongs to the driver.
    let (mut pitched, mut pitch, mut managed) = (0, 0, 0);
    assert_eq!(mem_alloc_pitch(&raw mut pitched, &raw mut pitch, 100, 100, 4), 0);
    assert_eq!(mem_alloc_managed(&raw mut managed, MIB, 1), 0);
    assert_eq!([mem_free(pitched), mem_free(managed)], [0; 2]);
});

stub_test!(errors_of_the_driver_are_returned_unchanged, ["LD_PRELOAD" = &preload()], {
    begin(0);
    let stream = stream();
    for (call, code) in [("cuMemCreate", 2), ("cuMemMap", 719), ("cuMemSetAccess", 801)] {
        fail(call, 0, code);
        assert_eq!(alloc(64 * MIB), Err(code), "{call}");
        heal();
    }
    let pointer = alloc(64 * MIB).expect("a failed allocation leaves no partial state");
    fail("cuCtxSynchronize", 1, 700);
    assert_eq!(mem_free(pointer), 700);
    assert_eq!(mem_free(pointer), 0, "the allocation was still live");
    let (pointer, other) = (alloc_async(MIB, stream).expect("memory should suffice"), crate::driver::stream());
    fail("cuEventRecord", 1, 46);
    assert_eq!(mem_free_async(pointer, other), 46);
    assert_eq!(mem_free_async(pointer, other), 0);
});

stub_test!(cached_memory_is_released_before_any_call_fails, ["LD_PRELOAD" = &preload()], {
    begin(0);
    let (a, b) = (stream(), stream());
    let pointer = alloc_async(700 * MIB, a).expect("memory should suffice");
    assert_eq!(mem_free_async(pointer, a), 0);
    let pointer = alloc_async(700 * MIB, b).expect("the other stream's cached memory is released");
    assert_eq!(mem_free_async(pointer, b), 0);
    let mut managed = 0;
    assert_eq!(
        mem_alloc_managed(&raw mut managed, 700 * MIB, 1),
        0,
        "cached memory is also released for calls that the driver serves"
    );
});

stub_test!(a_limit_is_enforced, ["LD_PRELOAD" = &preload(), "SYMMALLOC_RUN_LIMIT" = "104857600"], {
    begin(0);
    let pointer = alloc(80 * MIB).expect("memory should suffice");
    assert_eq!(alloc(40 * MIB), Err(2));
    let (mut free, mut total) = (0, 0);
    assert_eq!(mem_info(&raw mut free, &raw mut total), 0);
    assert_eq!((free, total), (20 * MIB, 100 * MIB));
    assert_eq!(mem_free(pointer), 0);
    assert_eq!(mem_info(&raw mut free, &raw mut total), 0);
    assert_eq!((free, total), (100 * MIB, 100 * MIB));
});

/// Returns a setting that names a folder of this process.
fn report_into_a_folder() -> String {
    let name = format!("symmalloc-pages-{}", std::process::id());
    format!("report:{}", std::env::temp_dir().join(name).display())
}

stub_test!(
    a_failed_allocation_writes_a_page,
    [
        "LD_PRELOAD" = &preload(),
        "SYMMALLOC_RUN_LIMIT" = "104857600",
        "SYMMALLOC_ON_OUT_OF_MEMORY" = &report_into_a_folder()
    ],
    {
        begin(0);
        let setting = std::env::var("SYMMALLOC_ON_OUT_OF_MEMORY").expect("set for this process");
        let folder =
            std::path::PathBuf::from(setting.strip_prefix("report:").expect("the path should be below a folder"));
        let held = alloc(40 * MIB).expect("the request should stay within the limit");
        assert!(!folder.exists(), "no allocation has failed");
        assert_eq!(alloc(80 * MIB), Err(2));
        let page = std::fs::read_to_string(folder.join("out-of-memory.html")).expect("the page is written");
        std::fs::remove_dir_all(&folder).expect("the folder exists");
        assert!(page.contains("80.00 MiB for pool 0") && page.contains("40.00 MiB live"), "{page}");
        assert_eq!(mem_free(held), 0);
    }
);

stub_test!(
    invalid_settings_leave_everything_to_the_driver,
    ["LD_PRELOAD" = &preload(), "SYMMALLOC_RUN_CONFIG" = "segment:fixed"],
    {
        begin(0);
        let pointer = alloc(MIB).expect("memory should suffice");
        assert_eq!((mem_free(pointer), calls("cuMemAlloc_v2")), (0, 1));
    }
);

stub_test!(each_of_two_devices_has_its_own_allocator, ["LD_PRELOAD" = &preload(), "STUB_DEVICES" = "2"], {
    let first = begin(0);
    let (a, on_first) = (alloc(MIB).expect("memory should suffice"), stream());
    let second = begin(1);
    let (b, on_second) = (alloc(MIB).expect("memory should suffice"), stream());
    let ordinal = |address| {
        let mut device: c_int = -1;
        let mut value = 0_usize;
        assert_eq!(pointer_attribute((&raw mut value).cast(), 1, address), 0);
        assert_eq!(set_current(value), 0);
        device += if value == first { 1 } else { 2 };
        device
    };
    assert_eq!((ordinal(a), ordinal(b)), (0, 1));
    assert_eq!(set_current(second), 0);
    // A stream determines its device, regardless of the current context.
    let c = alloc_async(MIB, on_first).expect("memory should suffice");
    assert_eq!(ordinal(c), 0);
    assert_eq!(set_current(second), 0);
    // A stream of the other device frees it, so the host waits for that stream.
    assert_eq!([mem_free_async(c, on_second), mem_free(a), mem_free(b)], [0; 3]);
    assert_eq!(calls("cuMemAlloc_v2") + calls("cuMemAllocAsync"), 0);
});

stub_test!(contexts_created_by_the_program_are_served_by_the_driver, ["LD_PRELOAD" = &preload()], {
    let mut context = 0;
    assert_eq!([init(0), create_context(&raw mut context, 0, 0)], [0; 2]);
    let pointer = alloc(MIB).expect("memory should suffice");
    assert_eq!((mem_free(pointer), calls("cuMemAlloc_v2")), (0, 1));
    // Also while the primary context is in use.
    let primary = begin(0);
    let pointer = alloc(MIB).expect("memory should suffice");
    assert_eq!((mem_free(pointer), calls("cuMemAlloc_v2")), (0, 1));
    assert_eq!(set_current(context), 0);
    let pointer = alloc(MIB).expect("memory should suffice");
    assert_eq!((mem_free(pointer), calls("cuMemAlloc_v2")), (0, 2));
    // Regression test: NVIDIA's simpleDrvRuntime failed, because the primary context had become current.
    let mut current = 0;
    assert_eq!((get_current(&raw mut current), current), (0, context));
    assert_eq!(set_current(primary), 0);
});

stub_test!(
    a_stream_of_another_device_frees_memory_after_its_own_work,
    ["LD_PRELOAD" = &preload(), "STUB_DEVICES" = "2"],
    {
        let first = begin(0);
        let own = stream();
        begin(1);
        let (other, written) = (stream(), alloc(MIB).expect("memory should suffice"));
        assert_eq!(set_current(first), 0);
        let pointer = alloc_async(MIB, own).expect("memory should suffice");
        let is_over = Arc::new(AtomicBool::new(false));
        let work = hold(other);
        // Runs after the held work.
        assert_eq!(memset_async(written, 1, MIB, other), 0);
        let releaser = release_soon(work, &is_over);
        assert_eq!(mem_free_async(pointer, other), 0);
        assert!(is_over.load(Ordering::SeqCst), "the free returned before the work was done");
        releaser.join().expect("the thread should not panic");
        assert_eq!(alloc_async(MIB, own), Ok(pointer), "it was freed");
        fail("cuStreamSynchronize", 1, 700);
        assert_eq!(mem_free_async(pointer, other), 700);
        assert_eq!(mem_free_async(pointer, own), 0, "the allocation was still live");
    }
);
