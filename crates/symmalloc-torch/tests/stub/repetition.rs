//! Repetition: no operation of the C interface keeps host memory, however often a program repeats it.

use crate::library::*;
use crate::sharing::{opened, shared};
use std::ptr::null_mut;
use stub_process::keeps_no_host_memory;
use symmalloc_torch::*;

struct Program {
    allocator: Allocator,
    streams: Streams,
    folder: tempfile::TempDir,
    /// A number that no other round has.
    round: usize,
}

type Operation = fn(&Program);

const OPERATIONS: &[(&str, Operation)] = &[
    ("allocate and free", |it| {
        let pointer = torch::allocate(MIB, it.streams.get(0));
        torch::record_use(pointer, it.streams.get(1));
        torch::free(pointer);
    }),
    ("create and destroy a pool", |it| {
        let pool = it.allocator.create_pool(None);
        it.allocator.free(it.allocator.allocate(pool, MIB, it.streams.get(0)));
        done(it.allocator.destroy_pool(pool));
        it.allocator.trim();
    }),
    ("put a pool to sleep that is destroyed", |it| {
        let pool = it.allocator.create_pool(None);
        let pointer = it.allocator.allocate(pool, MIB, it.streams.get(0));
        // SAFETY: a live allocator, and no output.
        unsafe {
            done(symmalloc_save_in(it.allocator.0, pool, SYMMALLOC_STORAGE_PAGEABLE, std::ptr::null()));
            done(symmalloc_retain_saved(it.allocator.0, pool, 1));
            done(symmalloc_sleep(it.allocator.0, pool, SYMMALLOC_CONTENTS_KEEP, null_mut()));
            done(symmalloc_wake(it.allocator.0, pool, null_mut()));
        }
        it.allocator.free(pointer);
        done(it.allocator.destroy_pool(pool));
        it.allocator.trim();
    }),
    ("use a mempool", |it| {
        let id = (it.round as u64 + 1, 0);
        torch::begin(id);
        torch::free(torch::allocate(MIB, it.streams.get(0)));
        torch::end(id);
        torch::release(id);
        torch::empty_cache();
    }),
    ("return to a checkpoint", |it| {
        let (id, mut checkpoint) = ((it.round as u64 + 1, 1), null_mut());
        torch::begin(id);
        let pointer = torch::allocate(MIB, it.streams.get(0));
        torch::end(id);
        // SAFETY: an output pointer, then a live checkpoint that is not used after its end.
        unsafe {
            done(symmalloc_torch_checkpoint(0, id.0, id.1, &raw mut checkpoint));
            done(symmalloc_torch_restore(0, checkpoint, None, null_mut()));
            symmalloc_torch_checkpoint_destroy(checkpoint);
        }
        torch::free(pointer);
        torch::release(id);
        torch::empty_cache();
    }),
    ("share memory", |it| {
        let pointer = torch::allocate(50 * MIB, it.streams.get(0));
        let (text, _) = shared(pointer).expect("shared");
        let (_, handle) = opened(&text).expect("opened");
        // SAFETY: opened above, and not used after this.
        unsafe { symmalloc_torch_close(handle) };
        torch::free(pointer);
        torch::empty_cache();
    }),
    ("hold a descriptor", |it| {
        let pointer = it.allocator.allocate(0, MIB, it.streams.get(0));
        let (mut fd, mut offset, mut held) = (0, 0, null_mut());
        // SAFETY: a live allocator, and output pointers; then the end of what was opened.
        unsafe {
            let (fd, offset) = (&raw mut fd, &raw mut offset);
            done(symmalloc_dma_buf_open(it.allocator.0, pointer as *const _, MIB, fd, offset, &raw mut held));
            done(symmalloc_dma_buf_close(held));
        }
        it.allocator.free(pointer);
    }),
    ("push a pool and a name", |it| {
        let name = c_text(&format!("layer {}", it.round));
        done(symmalloc_torch_push_pool(0, 0));
        // SAFETY: a C string.
        done(unsafe { symmalloc_torch_push_name(0, name.as_ptr()) });
        torch::free(torch::allocate(MIB, it.streams.get(0)));
        done(symmalloc_torch_pop_name(0));
        done(symmalloc_torch_pop_pool(0));
    }),
    ("record a trace", |it| {
        let path = c_text(it.folder.path().join("a.trace").to_str().expect("text"));
        // A recording begins before the first allocation.
        let allocator = Allocator::new("stitching:false");
        // SAFETY: a live allocator, and a C string.
        done(unsafe { symmalloc_trace_start(allocator.0, path.as_ptr()) });
        allocator.free(allocator.allocate(0, MIB, it.streams.get(0)));
        // SAFETY: a live allocator.
        done(unsafe { symmalloc_trace_stop(allocator.0) });
        allocator.destroy();
    }),
    ("name pools that do not exist", |it| {
        let pool = 1000 + it.round as u32;
        // SAFETY: a live allocator.
        unsafe {
            symmalloc_save_in(it.allocator.0, pool, SYMMALLOC_STORAGE_PAGEABLE, std::ptr::null());
            symmalloc_retain_saved(it.allocator.0, pool, 1);
            symmalloc_sleep(it.allocator.0, pool, SYMMALLOC_CONTENTS_KEEP, null_mut());
            symmalloc_step_begin(it.allocator.0, pool, 0);
        }
        it.allocator.destroy_pool(pool);
    }),
    ("free unknown memory", |it| {
        it.allocator.try_free(0x1000 + it.round);
        torch::free(0x1000 + it.round);
    }),
];

stub_test!(no_operation_keeps_host_memory, ["SYMMALLOC_CONF" = "stitching:false"], {
    let mut program = Program {
        allocator: Allocator::of_torch(),
        streams: Streams::new(2),
        folder: tempfile::tempdir().expect("a temporary folder"),
        round: 0,
    };
    for (what, operation) in OPERATIONS {
        keeps_no_host_memory(what, 100, |round| {
            program.round = round;
            operation(&program);
        });
    }
});
