//! Missing waits: on the lazy stub, work of streams that the program did not record runs as late as possible. Calls that release or save
//! memory must wait for it.

use crate::library::*;
use cudarc::driver::CudaStream;
use cudarc::driver::result::{memcpy_dtod_async, memset_d8_async};
use std::ffi::c_void;
use std::ptr::{null_mut, with_exposed_provenance};
use std::sync::Arc;
use symmalloc_torch::*;

const SIZE: usize = 4 * MIB;
const BEFORE: u8 = 5;
const LATE: u8 = 9;

/// A program with memory that a stream uses without a record.
struct Program {
    allocator: Allocator,
    streams: &'static Streams,
    /// Memory whose contents nothing releases.
    target: Pointer,
}

/// A way to allocate memory, to release or save it, and to restore it if possible.
struct Way {
    name: &'static str,
    /// Returns a pool and memory of it.
    take: fn(&Program) -> (u32, Pointer),
    release: fn(&Program, u32, Pointer),
    /// Returns `true` if the contents are kept.
    restore: fn(&Program, u32) -> bool,
}

impl Program {
    fn new() -> Self {
        let (allocator, streams) = (Allocator::of_torch(), lasting_streams());
        let target = allocator.allocate(0, SIZE, streams.get(0));
        let program = Program { allocator, streams, target };
        program.set(target, 0, program.streams.stream(0));
        program.settle();
        program
    }

    /// The stream that the library knows.
    fn own(&self) -> *mut c_void {
        self.streams.get(0)
    }

    /// The stream whose uses are not recorded.
    fn unrecorded(&self) -> &Arc<CudaStream> {
        self.streams.stream(1)
    }

    fn set(&self, pointer: Pointer, value: u8, stream: &CudaStream) {
        // SAFETY: live memory of this size.
        unsafe { memset_d8_async(pointer as u64, value, SIZE, stream.cu_stream()) }.expect("submitted");
    }

    /// Waits for all work.
    fn settle(&self) {
        self.unrecorded().context().synchronize().expect("done");
    }

    fn value(&self, pointer: Pointer) -> u8 {
        self.settle();
        // SAFETY: live memory of this size, which the stub maps at its address.
        let bytes = unsafe { std::slice::from_raw_parts(with_exposed_provenance::<u8>(pointer), SIZE) };
        assert!(bytes.iter().all(|byte| *byte == bytes[0]));
        bytes[0]
    }
}

fn in_pool(program: &Program) -> (u32, Pointer) {
    let pool = program.allocator.create_pool(Some("segments:expandable,tag:weights"));
    (pool, program.allocator.allocate(pool, SIZE, program.own()))
}

fn in_graph_pool(program: &Program) -> (u32, Pointer) {
    torch::begin((1, 0));
    let pointer = torch::allocate(SIZE, program.own());
    torch::end((1, 0));
    torch::release((1, 0));
    (program.allocator.placement(pointer).pool, pointer)
}

fn put_to_sleep(program: &Program, pool: u32, contents: u32) {
    // SAFETY: a live allocator.
    done(unsafe { symmalloc_sleep(program.allocator.0, pool, contents, null_mut()) });
}

fn wake(program: &Program, pool: u32) {
    // SAFETY: a live allocator.
    done(unsafe { symmalloc_wake(program.allocator.0, pool, null_mut()) });
}

const WAYS: &[Way] = &[
    Way {
        name: "a sleep that keeps contents",
        take: in_pool,
        release: |program, pool, _| put_to_sleep(program, pool, SYMMALLOC_CONTENTS_KEEP),
        restore: |program, pool| {
            wake(program, pool);
            true
        },
    },
    Way {
        name: "a sleep that drops contents",
        take: in_pool,
        release: |program, pool, _| put_to_sleep(program, pool, SYMMALLOC_CONTENTS_DROP),
        restore: |program, pool| {
            wake(program, pool);
            false
        },
    },
    Way {
        name: "a sleep by tag",
        take: in_pool,
        release: |program, _, _| {
            let (tag, allocator) = (c_text("weights"), program.allocator.0);
            // SAFETY: a live allocator, and a C string.
            done(unsafe { symmalloc_sleep_tagged(allocator, tag.as_ptr(), SYMMALLOC_CONTENTS_KEEP, null_mut()) });
        },
        restore: |program, pool| {
            wake(program, pool);
            true
        },
    },
    Way {
        name: "a sleep that suspends",
        take: in_pool,
        release: |program, pool, _| {
            let allocator = program.allocator.0;
            // SAFETY: a live allocator.
            done(unsafe { symmalloc_sleep_and_suspend(allocator, pool, SYMMALLOC_CONTENTS_KEEP, null_mut()) });
        },
        restore: |program, pool| {
            wake(program, pool);
            true
        },
    },
    Way {
        name: "the end of a graph's pool",
        take: in_graph_pool,
        release: |_, _, pointer| {
            torch::free(pointer);
            torch::empty_cache();
        },
        restore: |_, _| false,
    },
    Way {
        name: "memory of a graph's pool for another allocation",
        take: in_graph_pool,
        release: |program, _, pointer| {
            torch::free(pointer);
            program.allocator.trim_private();
        },
        restore: |_, _| false,
    },
];

stub_test!(memory_is_released_after_the_work_that_nobody_recorded, ["STUB_LAZY" = "1"], {
    for way in WAYS {
        // The late work reads the memory, or writes to it.
        for reads in [true, false] {
            let program = Program::new();
            let (pool, pointer) = (way.take)(&program);
            program.set(pointer, BEFORE, program.streams.stream(0));
            program.settle();
            if reads {
                let (from, to, stream) = (pointer as u64, program.target as u64, program.unrecorded().cu_stream());
                // SAFETY: both are live, and of this size.
                unsafe { memcpy_dtod_async(to, from, SIZE, stream) }.expect("submitted");
            } else {
                program.set(pointer, LATE, program.unrecorded());
            }
            (way.release)(&program, pool, pointer);
            // The memory of the device now belongs to another allocation.
            let other = program.allocator.allocate(0, 8 * SIZE, program.own());
            program.settle();
            let is_kept = (way.restore)(&program, pool);
            let expected = if reads { BEFORE } else { LATE };
            if reads {
                assert_eq!(program.value(program.target), expected, "{}: the read", way.name);
            }
            if is_kept {
                assert_eq!(program.value(pointer), expected, "{}, reads: {reads}", way.name);
                program.allocator.free(pointer);
                done(program.allocator.destroy_pool(pool));
            }
            program.allocator.free(other);
            program.allocator.free(program.target);
            torch::empty_cache();
        }
    }
});
