//! The calls of the compiled PyTorch class.

use crate::library::*;
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::Mutex;
use symmalloc_import::{ReadOptions, read_path};
use symmalloc_torch::*;
use symmalloc_trace::RecordLine;

const A: (u64, u64) = (0, 7);

#[track_caller]
pub(crate) fn allocate(bytes: usize, stream: *mut c_void, inherited: u64) -> Pointer {
    let mut out = null_mut();
    // SAFETY: a live stream, and an output pointer.
    done(unsafe { symmalloc_torch_allocate(0, stream, bytes, inherited, null(), &raw mut out) });
    out as Pointer
}

/// Frees an allocation, and returns the size of its block.
#[track_caller]
pub(crate) fn free(pointer: Pointer) -> u64 {
    let mut bytes = 0;
    // SAFETY: an output pointer.
    done(unsafe { symmalloc_torch_deallocate(0, pointer as *mut c_void, &raw mut bytes) });
    bytes
}

/// Accepts allocations on one stream, whose handle is the context.
pub(crate) unsafe extern "C-unwind" fn is_stream(context: *mut c_void, stream: *mut c_void) -> bool {
    context == stream
}

/// Accepts no allocation, as a thread's filter does on all other threads.
unsafe extern "C-unwind" fn is_nobody(_context: *mut c_void, _stream: *mut c_void) -> bool {
    false
}

static GIVEN_UP: Mutex<Vec<usize>> = Mutex::new(Vec::new());

unsafe extern "C-unwind" fn give_up(context: *mut c_void) {
    GIVEN_UP.lock().expect("no panic").push(context as usize);
}

#[track_caller]
fn begin(id: (u64, u64), filter: symmalloc_filter_fn, context: *mut c_void) -> u64 {
    let mut number = 0;
    // SAFETY: the filter takes any context; an output pointer.
    done(unsafe { symmalloc_torch_begin_scope(0, id.0, id.1, filter, context, Some(give_up), &raw mut number) });
    assert!(number > 0);
    number
}

fn found(pointer: Pointer) -> symmalloc_found {
    // SAFETY: numbers and a pointer: zero is a value of each.
    let mut out = unsafe { std::mem::zeroed::<symmalloc_found>() };
    // SAFETY: an output pointer.
    done(unsafe { symmalloc_torch_find(pointer as *const c_void, &raw mut out) });
    out
}

pub(crate) fn id_of(pointer: Pointer) -> (u64, u64) {
    let found = found(pointer);
    (found.id_first, found.id_second)
}

fn counts() -> symmalloc_counts {
    let mut counts = symmalloc_counts::default();
    // SAFETY: an output pointer.
    done(unsafe { symmalloc_torch_counts(0, &raw mut counts) });
    counts
}

/// Segments with their blocks: (bytes, is allocated).
fn visited(id: (u64, u64)) -> Vec<(u64, Vec<(u64, bool)>)> {
    unsafe extern "C" fn visit(context: *mut c_void, segment: *const symmalloc_segment, block: *const symmalloc_block) {
        // SAFETY: the list below.
        let list = unsafe { &mut *context.cast::<Vec<(u64, Vec<(u64, bool)>)>>() };
        // SAFETY: null, or valid during the call.
        if let Some(segment) = unsafe { segment.as_ref() } {
            list.push((segment.bytes, Vec::new()));
        }
        // SAFETY: as above.
        if let Some(block) = unsafe { block.as_ref() } {
            list.last_mut().expect("a segment comes first").1.push((block.bytes, block.is_allocated));
        }
    }
    let mut list: Vec<(u64, Vec<(u64, bool)>)> = Vec::new();
    // SAFETY: the context is what the function expects.
    done(unsafe { symmalloc_torch_visit(0, id.0, id.1, Some(visit), (&raw mut list).cast()) });
    list
}

stub_test!(a_scope_applies_to_its_streams_and_drops_its_filter, {
    let streams = Streams::new(2);
    let number = begin(A, Some(is_stream), streams.get(0));
    let [inside, outside] = [0, 1].map(|stream| allocate(MIB, streams.get(stream), 0));
    assert_eq!([id_of(inside), id_of(outside)], [A, (0, 0)]);
    assert!(found(outside).is_expandable && found(inside).stream == streams.get(0));
    done(symmalloc_torch_end_scope(0, A.0, A.1));
    assert_eq!(*GIVEN_UP.lock().expect("no panic"), [streams.get(0) as usize]);
    let later = allocate(MIB, streams.get(0), number);
    assert_eq!(id_of(later), (0, 0), "an ended scope covers no allocation");
    assert_eq!(symmalloc_torch_end_scope(0, A.0, A.1), SYMMALLOC_INVALID_STATE);
    assert_eq!((free(inside), free(outside), free(later)), (1 << 20, 1 << 20, 1 << 20));
});

stub_test!(a_thread_can_inherit_the_scope_of_another, {
    let stream = null_mut();
    let outer = begin(A, Some(is_nobody), null_mut());
    let inner = begin((0, 8), Some(is_nobody), null_mut());
    let places = [0, outer, inner].map(|inherited| id_of(allocate(MIB, stream, inherited)));
    assert_eq!(places, [(0, 0), A, (0, 8)]);
    done(symmalloc_torch_end_scope(0, 0, 8));
    assert_eq!(id_of(allocate(MIB, stream, inner)), (0, 0));
    assert_eq!(id_of(allocate(MIB, stream, outer)), A);
});

stub_test!(a_mem_pool_counts_uses_has_fixed_segments_and_is_destroyed_on_release, {
    let stream = null_mut();
    // SAFETY: no source.
    done(unsafe { symmalloc_torch_retain_pool(0, A.0, A.1, null()) });
    assert_eq!(symmalloc_torch_pool_uses(0, A.0, A.1), 1);
    begin(A, None, null_mut());
    let tensor = allocate(3 * MIB, stream, 0);
    done(symmalloc_torch_end_scope(0, A.0, A.1));
    assert_eq!(visited(A), [(20 << 20, vec![(3 << 20, true), (17 << 20, false)])]);
    assert!(!found(tensor).is_expandable);
    done(symmalloc_torch_release_use(0, A.0, A.1));
    free(tensor);
    done(symmalloc_torch_trim(A.0, A.1));
    assert_eq!((visited(A).len(), live().device_bytes), (1, 20 << 20), "the pool is still in use");
    done(symmalloc_torch_release_use(0, A.0, A.1));
    done(symmalloc_torch_trim(A.0, A.1));
    assert_eq!((visited(A).len(), live().device_bytes), (0, 0));
    assert_eq!(symmalloc_torch_release_use(0, A.0, A.1), SYMMALLOC_INVALID_STATE);
    assert_eq!(symmalloc_torch_pool_unsplit(0, A.0, A.1), SYMMALLOC_INVALID_STATE);
});

stub_test!(an_unsplit_pool_gives_every_allocation_a_segment, {
    // SAFETY: no source.
    done(unsafe { symmalloc_torch_retain_pool(0, A.0, A.1, null()) });
    done(symmalloc_torch_pool_unsplit(0, A.0, A.1));
    begin(A, None, null_mut());
    for bytes in [512, 5 * MIB, 30 * MIB] {
        allocate(bytes, null_mut(), 0);
    }
    let segments = visited(A);
    assert!(segments.iter().all(|(bytes, blocks)| *blocks == [(*bytes, true)]), "{segments:?}");
    // Each pool has different options.
    assert_eq!(segments.iter().map(|(bytes, _)| bytes >> 20).collect::<Vec<_>>(), [2, 6, 30]);
    assert_eq!(counts().requested_bytes[0].current, 512 + (35 << 20));
});

stub_test!(an_unsplit_pool_with_a_source_calls_it_for_every_allocation, {
    let source = symmalloc_source {
        allocate: Some(source_allocate),
        free: Some(source_free),
        context: null_mut(),
        destroy: None,
    };
    // SAFETY: functions that take any context.
    done(unsafe { symmalloc_torch_retain_pool(0, A.0, A.1, &raw const source) });
    done(symmalloc_torch_pool_unsplit(0, A.0, A.1));
    begin(A, None, null_mut());
    let tensors = [3, 4].map(|mib| allocate(mib * MIB, null_mut(), 0));
    assert_eq!(SOURCE.lock().expect("no panic").1, tensors, "each tensor is at the start of memory from the source");
});

stub_test!(a_pool_for_use_on_oom_serves_requests_that_would_fail, ["SYMMALLOC_CONF" = "total_limit_mb:40"], {
    // SAFETY: no source.
    done(unsafe { symmalloc_torch_retain_pool(0, A.0, A.1, null()) });
    begin(A, None, null_mut());
    let spare = allocate(20 * MIB, null_mut(), 0);
    done(symmalloc_torch_end_scope(0, A.0, A.1));
    free(spare);
    let mut out = null_mut();
    // SAFETY: an output pointer.
    let mut refused = || unsafe { symmalloc_torch_allocate(0, null_mut(), 24 * MIB, 0, null(), &raw mut out) };
    assert_eq!(refused(), SYMMALLOC_OUT_OF_MEMORY);
    done(symmalloc_torch_pool_helps_out(0, A.0, A.1, true));
    assert_eq!(refused(), SYMMALLOC_OUT_OF_MEMORY, "the free memory of the pool is smaller");
    allocate(16 * MIB, null_mut(), 0);
    let helped = allocate(18 * MIB, null_mut(), 0);
    assert_eq!((helped, id_of(helped)), (spare, A));
});

/// The state of the program's memory source: the number of calls, and the live allocations.
static SOURCE: Mutex<(u32, Vec<usize>)> = Mutex::new((0, Vec::new()));

unsafe extern "C" fn source_allocate(_context: *mut c_void, bytes: usize) -> *mut c_void {
    let mut source = SOURCE.lock().expect("no panic");
    if source.0 == 3 {
        return null_mut();
    }
    source.0 += 1;
    // Any unused address is sufficient, because nothing is written there.
    let address = (1 << 46) + source.0 as usize * (64 << 20);
    assert!(bytes <= 64 << 20);
    source.1.push(address);
    address as *mut c_void
}

unsafe extern "C" fn source_free(_context: *mut c_void, pointer: *mut c_void) {
    SOURCE.lock().expect("no panic").1.retain(|address| *address != pointer as usize);
}

stub_test!(a_pool_with_a_source_caches_memory_of_the_source, {
    let streams = Streams::new(2);
    let source = symmalloc_source {
        allocate: Some(source_allocate),
        free: Some(source_free),
        context: 5 as *mut c_void,
        destroy: Some(give_up),
    };
    // SAFETY: functions that take any context.
    done(unsafe { symmalloc_torch_retain_pool(0, A.0, A.1, &raw const source) });
    begin(A, None, null_mut());
    let tensors = [3, 4, 30].map(|mib| allocate(mib * MIB, streams.get(0), 0));
    assert_eq!(SOURCE.lock().expect("no panic").0, 2, "two segments");
    assert!(tensors.iter().all(|tensor| id_of(*tensor) == A && symmalloc_torch_device_of(*tensor as *const _) == 0));
    assert_eq!(torch::base(tensors[1]).0, tensors[0]);
    // SAFETY: a live stream.
    done(unsafe { symmalloc_torch_record_use(tensors[0] as *mut c_void, streams.get(1)) });
    assert_eq!(counts().allocated_bytes[0].current, 37 << 20);
    assert_eq!(free(tensors[0]), 3 << 20);
    assert_eq!(allocate(3 * MIB, streams.get(0), 0), tensors[0], "the pool's free memory is used first");
    allocate(40 * MIB, streams.get(0), 0);
    let mut out = null_mut();
    // SAFETY: an output pointer.
    let refused = unsafe { symmalloc_torch_allocate(0, streams.get(0), 50 * MIB, 0, null(), &raw mut out) };
    assert_eq!(refused, SYMMALLOC_OUT_OF_MEMORY);
    done(symmalloc_torch_end_scope(0, A.0, A.1));
    // Empty segments are released. Segments in use stay.
    for _ in 0..2 {
        done(symmalloc_torch_release_use(0, A.0, A.1));
    }
    free(tensors[2]);
    done(symmalloc_torch_trim(0, 0));
    assert_eq!(SOURCE.lock().expect("no panic").1.len(), 2);
    assert!(!GIVEN_UP.lock().expect("no panic").contains(&5));
    for (_, blocks) in visited(A) {
        assert!(blocks.iter().any(|(_, is_allocated)| *is_allocated));
    }
    for tensor in [tensors[0], tensors[1], (1 << 46) + 3 * (64 << 20)] {
        free(tensor);
    }
    done(symmalloc_torch_trim(0, 0));
    assert_eq!(SOURCE.lock().expect("no panic").1, [] as [usize; 0]);
    assert!(GIVEN_UP.lock().expect("no panic").contains(&5), "the source was destroyed with the pool");
});

stub_test!(a_mempool_returns_to_its_checkpoint_and_keeps_its_memory, {
    unsafe extern "C" fn collect(context: *mut c_void, pointer: *mut c_void, bytes: u64, is_live: u32) {
        // SAFETY: the list below.
        unsafe { &mut *context.cast::<Vec<(usize, u64, bool)>>() }.push((pointer as usize, bytes, is_live == 1));
    }
    begin(A, None, null_mut());
    let [stem, dies] = [3, 5].map(|mib| allocate(mib * MIB, null_mut(), 0));
    let mut checkpoint = null_mut();
    // SAFETY: an output pointer.
    done(unsafe { symmalloc_torch_checkpoint(0, A.0, A.1, &raw mut checkpoint) });
    free(dies);
    let branch = allocate(60 * MIB, null_mut(), 0);
    done(symmalloc_torch_end_scope(0, A.0, A.1));
    let reserved = counts().reserved_bytes.current;
    for _ in 0..2 {
        let mut list: Vec<(usize, u64, bool)> = Vec::new();
        // SAFETY: a live checkpoint; the context is what the function expects.
        done(unsafe { symmalloc_torch_restore(0, checkpoint, Some(collect), (&raw mut list).cast()) });
        let alive: Vec<_> = list.iter().filter(|(.., is_live)| *is_live).map(|(at, ..)| *at).collect();
        assert_eq!(alive, [stem, dies]);
        assert!(list.iter().any(|(at, _, is_live)| *at == stem && !is_live), "the stem was also live before: {list:?}");
        let counts = counts();
        assert_eq!((counts.allocated_bytes[0].current, counts.reserved_bytes.current), (8 << 20, reserved));
        assert_eq!(counts.allocations[0].current, 2);
    }
    assert_eq!(branch, dies, "the branch was allocated at the freed address");
    assert_eq!((free(dies), free(stem)), (5 << 20, 3 << 20));
    // SAFETY: live, and not used after this.
    unsafe { symmalloc_torch_checkpoint_destroy(checkpoint) };
    // SAFETY: an output pointer.
    assert_eq!(unsafe { symmalloc_torch_checkpoint(0, 9, 9, &raw mut checkpoint) }, SYMMALLOC_INVALID_STATE);
});

stub_test!(a_trace_continues_with_names_after_a_pool_returned_to_a_checkpoint, {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("job.trace");
    let outputs = stub_process::ranks(1, &[("SYMMALLOC_TRACE", path.to_str().expect("text"))], |_| {
        begin(A, None, null_mut());
        let stem = allocate(3 * MIB, null_mut(), 0);
        let mut checkpoint = null_mut();
        // SAFETY: an output pointer.
        done(unsafe { symmalloc_torch_checkpoint(0, A.0, A.1, &raw mut checkpoint) });
        free(stem);
        allocate(MIB, null_mut(), 0);
        done(symmalloc_torch_end_scope(0, A.0, A.1));
        // SAFETY: a live checkpoint, and no callback.
        done(unsafe { symmalloc_torch_restore(0, checkpoint, None, null_mut()) });
        for name in [c"model.py:7 forward".as_ptr(), c"\xff".as_ptr(), null()] {
            let mut out = null_mut();
            // SAFETY: C strings or NULL, and an output pointer.
            done(unsafe { symmalloc_torch_allocate(0, null_mut(), MIB, 0, name, &raw mut out) });
        }
    });
    assert!(outputs[0].is_success, "{}", outputs[0].text);
    let recording = read_path(&path, &ReadOptions::default()).expect("the trace is complete");
    let lines: Vec<String> = recording.records.iter().map(|record| RecordLine(record).to_string()).collect();
    let ops: Vec<&str> = lines.iter().map(String::as_str).filter(|line| line.starts_with(['a', 'f'])).collect();
    assert_eq!(
        ops,
        [
            "a 0 3145728 s0 p1 -> 0@0",
            "f 0",
            "a 1 1048576 s0 p1 -> 0@0",
            "f 1",
            "a 2 3145728 s0 p1 -> 0@0 revived 3145728",
            "a 3 1048576 s0 \"model.py:7 forward\" -> 0@0",
            "a 4 1048576 s0 \"\u{fffd}\" -> 0@1048576",
            "a 5 1048576 s0 -> 1@0",
        ]
    );
});

static CHANGES: Mutex<Vec<(bool, u64)>> = Mutex::new(Vec::new());

unsafe extern "C" fn changed(device: i32, is_mapped: u32, _address: u64, bytes: u64) {
    assert_eq!(device, 0);
    CHANGES.lock().expect("no panic").push((is_mapped == 1, bytes));
}

stub_test!(a_listener_is_notified_after_mapping_and_before_unmapping, {
    // SAFETY: a function for the rest of the process.
    unsafe { symmalloc_torch_on_memory(Some(changed)) };
    let tensor = allocate(5 * MIB, null_mut(), 0);
    free(tensor);
    fail("cuMemUnmap", 1, 700);
    assert_ne!(symmalloc_torch_trim(0, 0), SYMMALLOC_OK);
    heal();
    done(symmalloc_torch_trim(0, 0));
    assert_eq!(*CHANGES.lock().expect("no panic"), [(true, 6 << 20), (false, 6 << 20), (false, 6 << 20)]);
    // SAFETY: none.
    unsafe { symmalloc_torch_on_memory(None) };
    allocate(5 * MIB, null_mut(), 0);
    assert_eq!(CHANGES.lock().expect("no panic").len(), 3);
});

stub_test!(a_device_that_was_never_used_has_counts_of_zero, {
    assert_eq!((counts().reserved_bytes.current, counts().total_bytes), (0, 0));
    assert_eq!(visited((0, 0)).len(), 0);
    assert_eq!(symmalloc_torch_device_of(64 as *const c_void), -1);
    // SAFETY: any pointer is valid.
    assert_eq!(unsafe { symmalloc_torch_deallocate(0, 64 as *mut c_void, null_mut()) }, SYMMALLOC_UNKNOWN_POINTER);
    // SAFETY: as above.
    done(unsafe { symmalloc_torch_deallocate(0, null_mut(), null_mut()) });
});
