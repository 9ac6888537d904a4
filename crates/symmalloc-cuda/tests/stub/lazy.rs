//! The lazy mode of the stub (`STUB_LAZY`), in which work takes effect only when something waits for it.

use crate::process::{device, fail, stub_test};
use cudarc::driver::CudaStream;
use cudarc::driver::result::{malloc_host, malloc_sync, memcpy_dtoh_async, memcpy_htod_async, memset_d8_async};
use std::sync::Arc;

fn set(address: u64, value: u8, stream: &Arc<CudaStream>) {
    // SAFETY: the memory is alive until the process ends.
    unsafe { memset_d8_async(address, value, 1, stream.cu_stream()) }.expect("submitted");
}

/// Returns the byte at an address, without waiting.
fn byte(address: u64) -> u8 {
    // SAFETY: the stub's device memory is memory of this process, and it is alive until the process ends.
    unsafe { (address as *const u8).read_volatile() }
}

/// Creates two streams and two bytes of device memory.
fn two_streams() -> ([Arc<CudaStream>; 2], [u64; 2]) {
    let device = device();
    let streams = [(); 2].map(|()| device.context().new_stream().expect("a stream"));
    // SAFETY: zero is a valid byte, and new memory of the stub is zero.
    let bytes = [(); 2].map(|()| unsafe { malloc_sync(1) }.expect("memory"));
    (streams, bytes)
}

stub_test!(work_takes_effect_when_a_wait_covers_it, ["STUB_LAZY" = "1"], {
    let ([a, b], [one, other]) = two_streams();
    set(one, 1, &a);
    let event = a.record_event(None).expect("recorded");
    set(one, 2, &a);
    b.wait(&event).expect("submitted");
    set(other, 3, &b);
    assert!(!event.is_complete());
    assert_eq!((byte(one), byte(other)), (0, 0));
    b.synchronize().expect("done");
    assert_eq!((byte(one), byte(other)), (1, 3), "the second stream waited for the event, not for the work after it");
    drop(a);
    b.context().synchronize().expect("done");
    assert_eq!(byte(one), 2, "the work of a destroyed stream continues");
    set(one, 4, &b);
    fail("cuStreamSynchronize", 1, 700);
    assert!(b.synchronize().is_err());
    assert_eq!(byte(one), 4, "a wait that fails covers earlier work");
});

stub_test!(the_last_poll_runs_the_work, ["STUB_LAZY" = "1", "STUB_POLLS" = "2"], {
    let ([a, _], [one, _]) = two_streams();
    set(one, 1, &a);
    let event = a.record_event(None).expect("recorded");
    for _ in 0..2 {
        assert_eq!((event.is_complete(), byte(one)), (false, 0));
    }
    assert_eq!((event.is_complete(), byte(one)), (true, 1));
});

stub_test!(only_copies_of_pageable_memory_take_effect_without_a_wait, ["STUB_LAZY" = "1"], {
    let ([a, _], [one, other]) = two_streams();
    // SAFETY: new memory of the stub is zero. All memory is alive until the copies end.
    let pinned = unsafe {
        let pinned = malloc_host(1, 0).expect("memory").cast::<u8>();
        let mut pageable = [1_u8];
        memcpy_htod_async(one, &pageable, a.cu_stream()).expect("submitted");
        memcpy_htod_async(other, std::slice::from_raw_parts(pinned, 1), a.cu_stream()).expect("submitted");
        pageable[0] = 9;
        pinned.write(2);
        assert_eq!((byte(one), byte(other)), (0, 0));
        memcpy_dtoh_async(&mut pageable, other, a.cu_stream()).expect("submitted");
        assert_eq!((pageable[0], byte(one)), (2, 1), "pinned memory was read later than pageable memory");
        memcpy_dtoh_async(std::slice::from_raw_parts_mut(pinned, 1), one, a.cu_stream()).expect("submitted");
        pinned
    };
    assert_eq!(byte(pinned as u64), 2);
    a.synchronize().expect("done");
    assert_eq!(byte(pinned as u64), 1);
});
