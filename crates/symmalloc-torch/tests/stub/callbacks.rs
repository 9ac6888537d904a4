//! Callbacks of the program that call the library: each call returns an error, and none blocks or calls the callback again. Only frees
//! succeed, and take effect before the next call of the thread outside of the callback.

use crate::class_calls::{allocate, free};
use crate::library::*;
use crate::nulls::within_a_deadline;
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::Mutex;
use symmalloc_torch::*;

/// Id of a mempool.
const A: (u64, u64) = (0, 7);

/// The results of the callbacks' calls.
static RETURNED: Mutex<Vec<(symmalloc_status, String)>> = Mutex::new(Vec::new());

/// Makes calls that need the locks of all pools, among them an allocation in the pool that calls.
fn use_the_library() {
    let (mut out, mut number) = (null_mut(), 0);
    // SAFETY: output pointers, and a pointer that may be anything.
    let returned = unsafe {
        [
            symmalloc_torch_allocate(0, null_mut(), 3 * MIB, 0, null(), &raw mut out),
            symmalloc_torch_begin_scope(0, A.0, A.1, None, null_mut(), None, &raw mut number),
            symmalloc_torch_trim(0, 0),
            symmalloc_torch_record_use(std::ptr::dangling_mut::<c_void>(), null_mut()),
        ]
    };
    let device = symmalloc_torch_device_of(std::ptr::dangling::<c_void>());
    assert_eq!((device, symmalloc_torch_pool_uses(0, A.0, A.1)), (-1, 0));
    RETURNED.lock().expect("no panic").extend(returned.map(|status| (status, message())));
}

/// Asserts that callbacks ran at least `calls` times since the last check, and that each of their calls returned the error.
#[track_caller]
fn assert_refused(calls: usize) {
    let returned = std::mem::take(&mut *RETURNED.lock().expect("no panic"));
    assert!(returned.len() >= 4 * calls, "{returned:?}");
    for (status, text) in returned {
        let is_refused = status == SYMMALLOC_INVALID_STATE && text.contains("after the callback has returned");
        assert!(is_refused, "{status:?}: {text}");
    }
}

unsafe extern "C" fn on_memory(_device: i32, _is_mapped: u32, _address: u64, _bytes: u64) {
    use_the_library();
}

stub_test!(a_listener_that_calls_the_library_gets_errors_and_never_hangs, {
    within_a_deadline(|| {
        // SAFETY: the function may be called on any thread.
        unsafe { symmalloc_torch_on_memory(Some(on_memory)) };
        let allocator = Allocator::of_torch();
        let pointer = allocator.allocate(0, 50 * MIB, null_mut());
        done(allocator.try_free(pointer));
        done(symmalloc_torch_trim(0, 0));
        // SAFETY: removes the listener.
        unsafe { symmalloc_torch_on_memory(None) };
        assert_refused(2);
        done(allocator.try_free(allocator.allocate(0, 512, null_mut())));
    });
});

unsafe extern "C" fn source_allocate(_context: *mut c_void, _bytes: usize) -> *mut c_void {
    use_the_library();
    // Any unused address is sufficient, because nothing is written there.
    (1_usize << 46) as *mut c_void
}

unsafe extern "C" fn source_free(_context: *mut c_void, _pointer: *mut c_void) {
    use_the_library();
}

unsafe extern "C-unwind" fn destroy(_context: *mut c_void) {
    use_the_library();
}

stub_test!(a_source_that_allocates_in_its_own_pool_gets_errors_and_never_hangs, {
    within_a_deadline(|| {
        let source = symmalloc_source {
            allocate: Some(source_allocate),
            free: Some(source_free),
            context: null_mut(),
            destroy: Some(destroy),
        };
        // SAFETY: functions that take any context.
        done(unsafe { symmalloc_torch_retain_pool(0, A.0, A.1, &raw const source) });
        let mut number = 0;
        // SAFETY: an empty filter, which accepts all streams, and an output pointer.
        done(unsafe { symmalloc_torch_begin_scope(0, A.0, A.1, None, null_mut(), None, &raw mut number) });
        let tensor = allocate(3 * MIB, null_mut(), 0);
        assert_eq!(tensor, 1 << 46);
        assert_refused(1);
        done(symmalloc_torch_end_scope(0, A.0, A.1));
        // The scope is a use as well.
        done(symmalloc_torch_release_use(0, A.0, A.1));
        done(symmalloc_torch_release_use(0, A.0, A.1));
        free(tensor);
        done(symmalloc_torch_trim(0, 0));
        // The memory is freed, and the source is destroyed with the pool.
        assert_refused(2);
        assert!(free(allocate(3 * MIB, null_mut(), 0)) > 0, "the allocator works");
    });
});

unsafe extern "C-unwind" fn accepts(_context: *mut c_void, _stream: *mut c_void) -> bool {
    use_the_library();
    true
}

stub_test!(a_filter_that_allocates_gets_errors_and_is_not_called_again_for_it, {
    within_a_deadline(|| {
        let mut number = 0;
        // SAFETY: functions that take any context, and an output pointer.
        let begun = unsafe {
            symmalloc_torch_begin_scope(0, A.0, A.1, Some(accepts), null_mut(), Some(destroy), &raw mut number)
        };
        done(begun);
        let tensor = allocate(3 * MIB, null_mut(), 0);
        assert_refused(1);
        done(symmalloc_torch_end_scope(0, A.0, A.1));
        assert_refused(1);
        assert!(free(tensor) > 0);
    });
});

unsafe extern "C" fn visit(_: *mut c_void, _: *const symmalloc_segment, _: *const symmalloc_block) {
    use_the_library();
}

unsafe extern "C" fn restored(_context: *mut c_void, _pointer: *mut c_void, _requested_bytes: u64, _is_live: u32) {
    use_the_library();
}

stub_test!(a_visitor_and_a_restore_that_allocate_get_errors_and_change_nothing, {
    within_a_deadline(|| {
        let (mut number, mut checkpoint) = (0, null_mut());
        // SAFETY: an empty filter, which accepts all streams, and output pointers.
        unsafe {
            done(symmalloc_torch_begin_scope(0, A.0, A.1, None, null_mut(), None, &raw mut number));
            allocate(3 * MIB, null_mut(), 0);
            done(symmalloc_torch_checkpoint(0, A.0, A.1, &raw mut checkpoint));
        }
        allocate(5 * MIB, null_mut(), 0);
        done(symmalloc_torch_end_scope(0, A.0, A.1));
        // SAFETY: a function that takes any context.
        done(unsafe { symmalloc_torch_visit(0, A.0, A.1, Some(visit), null_mut()) });
        assert_refused(3);
        // SAFETY: as above, and a live checkpoint.
        done(unsafe { symmalloc_torch_restore(0, checkpoint, Some(restored), null_mut()) });
        assert_refused(3);
        let mut counts = symmalloc_counts::default();
        // SAFETY: an output pointer, and a live checkpoint that is not used after this.
        unsafe {
            done(symmalloc_torch_counts(0, &raw mut counts));
            symmalloc_torch_checkpoint_destroy(checkpoint);
        }
        assert_eq!(counts.allocated_bytes[0].current, 3 << 20);
    });
});

/// What a callback frees: tensors of PyTorch, an allocation of another interface, a use of a mempool, and a pool.
static GARBAGE: Mutex<Option<Garbage>> = Mutex::new(None);

struct Garbage {
    tensors: Vec<usize>,
    pointer: usize,
    allocator: usize,
    pool: u32,
}

/// Frees everything, as a collector does that runs because the callback allocated an object.
unsafe extern "C" fn collect(_device: i32, _is_mapped: u32, _address: u64, _bytes: u64) {
    let Some(garbage) = GARBAGE.lock().expect("no panic").take() else { return };
    let (allocator, mut bytes) = (garbage.allocator as *mut DeviceAllocator, 1);
    // SAFETY: a live allocator, and pointers that are not used after this.
    unsafe {
        for tensor in garbage.tensors {
            done(symmalloc_torch_deallocate(0, tensor as *mut c_void, &raw mut bytes));
            assert_eq!(bytes, 1, "the block is freed later");
        }
        done(symmalloc_free(allocator, garbage.pointer as *mut c_void));
        done(symmalloc_torch_release_use(0, A.0, A.1));
        done(symmalloc_pool_destroy(allocator, garbage.pool));
    }
}

stub_test!(frees_inside_a_callback_take_effect_before_the_next_call, {
    within_a_deadline(|| {
        let allocator = Allocator::of_torch();
        let pool = allocator.create_pool(Some("segments:expandable"));
        // SAFETY: no source.
        done(unsafe { symmalloc_torch_retain_pool(0, A.0, A.1, null()) });
        let garbage = Garbage {
            tensors: (0..3).map(|_| allocate(3 * MIB, null_mut(), 0)).collect(),
            pointer: allocator.allocate(pool, 3 * MIB, null_mut()),
            allocator: allocator.0 as usize,
            pool,
        };
        *GARBAGE.lock().expect("no panic") = Some(garbage);
        // SAFETY: the function may be called on any thread.
        unsafe { symmalloc_torch_on_memory(Some(collect)) };
        let live = allocate(500 * MIB, null_mut(), 0);
        // SAFETY: removes the listener.
        unsafe { symmalloc_torch_on_memory(None) };
        assert!(GARBAGE.lock().expect("no panic").is_none(), "the callback ran");
        let mut counts = symmalloc_counts::default();
        // SAFETY: an output pointer.
        done(unsafe { symmalloc_torch_counts(0, &raw mut counts) });
        assert_eq!(counts.allocated_bytes[0].current, 500 << 20, "nothing else is live");
        assert_eq!(symmalloc_torch_pool_uses(0, A.0, A.1), 0);
        assert!(allocator.try_allocate(pool, 512, null_mut()).is_err(), "the pool is destroyed");
        assert!(free(live) > 0);
    });
});

unsafe extern "C" fn collect_tensors(_device: i32, _is_mapped: u32, _address: u64, _bytes: u64) {
    let Some(garbage) = GARBAGE.lock().expect("no panic").take() else { return };
    for tensor in garbage.tensors {
        // SAFETY: a pointer that is not used after this, and no output.
        done(unsafe { symmalloc_torch_deallocate(0, tensor as *mut c_void, null_mut()) });
    }
}

// Otherwise, the calls of another thread would decide when a heap gets its block back, and so the next placement (D8).
stub_test!(a_deferred_free_waits_for_its_own_thread, {
    within_a_deadline(|| {
        let live = move || {
            let mut counts = symmalloc_counts::default();
            // SAFETY: an output pointer.
            done(unsafe { symmalloc_torch_counts(0, &raw mut counts) });
            counts.allocated_bytes[0].current
        };
        let on_another_thread = || std::thread::scope(|scope| scope.spawn(live).join().expect("no panic"));
        let defer = move || {
            let tensors = vec![allocate(3 * MIB, null_mut(), 0)];
            let garbage = Garbage { tensors, pointer: 0, allocator: 0, pool: 0 };
            *GARBAGE.lock().expect("no panic") = Some(garbage);
            // SAFETY: the function may be called on any thread.
            unsafe { symmalloc_torch_on_memory(Some(collect_tensors)) };
            allocate(500 * MIB, null_mut(), 0);
            assert!(GARBAGE.lock().expect("no panic").is_none(), "the callback ran");
        };
        defer();
        assert_eq!(on_another_thread(), 503 << 20, "the other thread runs no release of this one");
        assert_eq!(live(), 500 << 20);
        std::thread::scope(|scope| scope.spawn(defer).join().expect("no panic"));
        assert_eq!(live(), 1000 << 20, "the end of a thread runs its releases");
    });
});
