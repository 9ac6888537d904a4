//! Dma-bufs through the C interface.

use crate::library::*;
use std::ffi::c_void;
use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::fd::BorrowedFd;
use std::ptr::null_mut;
use symmalloc_torch::*;

/// A dma-buf with its descriptor and offset.
struct Opened {
    fd: i32,
    offset_bytes: u64,
    dma_buf: *mut HeldDmaBuf,
}

impl Allocator {
    fn dma_buf(self, pointer: Pointer, bytes: usize) -> Result<Opened, symmalloc_status> {
        let mut out = Opened { fd: -1, offset_bytes: u64::MAX, dma_buf: null_mut() };
        let Opened { fd, offset_bytes, dma_buf } = &mut out;
        // SAFETY: a live allocator, and output pointers.
        let status =
            unsafe { symmalloc_dma_buf_open(self.0, pointer as *const c_void, bytes, fd, offset_bytes, dma_buf) };
        match status {
            SYMMALLOC_OK => Ok(out),
            status => {
                assert_eq!((out.fd, out.offset_bytes, out.dma_buf), (-1, u64::MAX, null_mut()), "nothing is written");
                Err(status)
            }
        }
    }
}

impl Opened {
    fn file_bytes(&self) -> u64 {
        // SAFETY: open until `close`.
        let fd = unsafe { BorrowedFd::borrow_raw(self.fd) };
        File::from(fd.try_clone_to_owned().expect("a copy")).seek(SeekFrom::End(0)).expect("a file with a size")
    }

    fn is_current(&self) -> bool {
        let mut current = 2;
        // SAFETY: a live dma-buf, and an output pointer.
        done(unsafe { symmalloc_dma_buf_is_current(self.dma_buf, &raw mut current) });
        assert!(current < 2);
        current == 1
    }

    fn close(self) {
        // SAFETY: not used after this.
        done(unsafe { symmalloc_dma_buf_close(self.dma_buf) });
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("a list").count() - 1
}

stub_test!(a_dma_buf_holds_memory_of_a_destroyed_pool_until_it_is_closed, {
    let allocator = Allocator::new("");
    let pool = allocator.create_pool(Some("segments:reserved,segment_mb:64"));
    let pointer = allocator.allocate(pool, 10 * MIB, null_mut());
    let before = descriptors();
    let opened = allocator.dma_buf(pointer + 5000, 10 * MIB - 5000).expect("a dma-buf");
    assert_eq!((opened.offset_bytes, opened.file_bytes()), (904, 10 * MIB as u64 - 4096));
    assert!(opened.is_current());
    allocator.free(pointer);
    done(allocator.destroy_pool(pool));
    assert_eq!(allocator.trim(), 64 << 20, "the pool is destroyed, and the dma-buf holds its memory");
    assert_eq!(allocator.total("reserved_bytes/all/current"), 0);
    assert!(!opened.is_current());
    assert_eq!(live().device_bytes, 64 * MIB as u64);
    opened.close();
    assert_eq!((live().device_bytes, descriptors()), (0, before));
    // SAFETY: no dma-buf.
    done(unsafe { symmalloc_dma_buf_close(null_mut()) });
});

stub_test!(an_allocator_may_be_destroyed_before_its_dma_buf, {
    let allocator = Allocator::new("segments:fixed");
    let pointer = allocator.allocate(0, 10 * MIB, null_mut());
    let opened = allocator.dma_buf(pointer, 10 * MIB).expect("a dma-buf");
    allocator.destroy();
    assert!(live().device_bytes >= 10 * MIB as u64);
    opened.close();
    assert_eq!(live().device_bytes, 0);
});

stub_test!(a_refused_dma_buf_states_the_remedy_and_opens_nothing, {
    let allocator = Allocator::new("chunk_mb:2");
    let pointer = allocator.allocate(0, 10 * MIB, null_mut());
    let before = (live(), descriptors());
    let many = allocator.dma_buf(pointer, 10 * MIB).err();
    assert_eq!(many, Some(SYMMALLOC_INVALID_STATE));
    assert!(message().contains("segments:reserved or segments:fixed"), "{}", message());
    for (pointer, bytes) in [(pointer, 0), (pointer, 1000 * MIB), (0, 1)] {
        assert_eq!(allocator.dma_buf(pointer, bytes).err(), Some(SYMMALLOC_UNKNOWN_POINTER), "{}", message());
    }
    fail("cuMemRetainAllocationHandle", 1, 2);
    assert_eq!(allocator.dma_buf(pointer, MIB).err(), Some(SYMMALLOC_CUDA));
    assert_eq!((live(), descriptors()), before);
});

stub_test!(a_device_without_dma_bufs_is_an_invalid_state, ["STUB_NO_DMA_BUF" = "1"], {
    let allocator = Allocator::new("segments:fixed");
    let pointer = allocator.allocate(0, MIB, null_mut());
    assert_eq!(allocator.dma_buf(pointer, MIB).err(), Some(SYMMALLOC_INVALID_STATE));
    assert!(message().contains("nvidia-peermem"), "{}", message());
});
