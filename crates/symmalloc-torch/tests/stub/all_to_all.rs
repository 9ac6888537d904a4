//! All-to-all-v through the C interface.

use crate::library::*;
use crate::registrar::{Windows, ranks_of};
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::slice;
use stub_process::{nccl, nccl_test};
use symmalloc_nccl::Communicator;
use symmalloc_torch::*;

const ROW_BYTES: usize = 24;
const RANKS: usize = 3;

struct AllToAll(*mut RankAllToAll);

impl AllToAll {
    fn new(windows: &Windows, options: u32) -> Self {
        let mut out = null_mut();
        // SAFETY: a live registrar, and an output pointer.
        done(unsafe { symmalloc_all_to_all_create(windows.0, options, &raw mut out) });
        AllToAll(out)
    }

    fn exchange(&self, sent: &[u64; RANKS]) -> [u64; RANKS] {
        let mut received = [0; RANKS];
        // SAFETY: it is live, and both arrays have a number for each rank.
        done(unsafe { symmalloc_all_to_all_exchange(self.0, sent.as_ptr(), received.as_mut_ptr()) });
        received
    }

    fn run(
        &self,
        stream: *mut c_void,
        (input, output): (Pointer, Pointer),
        bytes: usize,
        splits: Option<(&[u64; RANKS], &[u64; RANKS])>,
    ) -> symmalloc_status {
        let (sent, received) = splits.map_or((null(), null()), |(sent, received)| (sent.as_ptr(), received.as_ptr()));
        let (input, output) = (input as *const c_void, output as *mut c_void);
        // SAFETY: it is live, and so are the stream and the buffers until the stream is waited for; a number for each rank.
        unsafe { symmalloc_all_to_all_run(self.0, stream, input, bytes, output, bytes, ROW_BYTES, sent, received) }
    }

    fn destroy(self) {
        // SAFETY: not used after this.
        done(unsafe { symmalloc_all_to_all_destroy(self.0) });
    }
}

/// Returns device memory as host memory, which it is on the stub.
fn memory<'a>(pointer: Pointer, bytes: usize) -> &'a mut [u8] {
    // SAFETY: the tests allocate that many bytes, and wait for their users.
    unsafe { slice::from_raw_parts_mut(pointer as *mut u8, bytes) }
}

/// Returns the rows that a rank sends to another one in a step. Their numbers identify both.
fn rows_of(step: u64, from: usize, to: usize) -> Vec<u8> {
    let count = (step + 1) * (from as u64 + 1) % 5 + to as u64;
    (0..count as usize * ROW_BYTES).map(|at| (step as usize * 31 + from * 7 + to * 3 + at) as u8).collect()
}

/// Runs the body on every rank, with a registered send buffer and a registered receive buffer.
fn with_buffers(body: impl Fn(usize, &Communicator, &Windows, (Pointer, Pointer), *mut c_void) + Sync) {
    let own = |device: i32| {
        let mut out = null_mut();
        // SAFETY: no text, and an output pointer.
        done(unsafe { symmalloc_create(device, null(), &raw mut out) });
        Allocator(out)
    };
    ranks_of(RANKS as u32, own, |rank, allocator, comm, barrier| {
        let stream = comm.device().context().new_stream().expect("a stream");
        let raw = stream.cu_stream().cast();
        let pool = allocator.create_pool(Some("symmetric:true,segments:reserved,segment_bytes:4194304"));
        let windows = Windows::new(allocator, pool, comm.raw());
        let buffers = (allocator.allocate(pool, MIB, raw), allocator.allocate(pool, MIB, raw));
        assert_eq!(windows.sync(), (1, 0));
        body(rank as usize, comm, &windows, buffers, raw);
        comm.synchronize(&stream).expect("in time");
        barrier.wait();
        done(windows.destroy());
        barrier.wait();
    });
    nccl::assert_clean();
}

nccl_test!(rows_arrive_with_changing_splits_and_exchanges_are_explicit, {
    with_buffers(|rank, comm, windows, (input, output), stream| {
        let all_to_all = AllToAll::new(windows, SYMMALLOC_ALL_TO_ALL_REGISTERED);
        for step in 0..8 {
            let parts: Vec<_> = (0..RANKS).map(|to| rows_of(step, rank, to)).collect();
            let sent: [u64; RANKS] = std::array::from_fn(|to| (parts[to].len() / ROW_BYTES) as u64);
            let expected: Vec<_> = (0..RANKS).map(|from| rows_of(step, from, rank)).collect();
            let known: [u64; RANKS] = std::array::from_fn(|from| (expected[from].len() / ROW_BYTES) as u64);
            let received = if step < 4 { all_to_all.exchange(&sent) } else { known };
            assert_eq!(received, known);
            let bytes = parts.concat();
            memory(input, bytes.len()).copy_from_slice(&bytes);
            done(all_to_all.run(stream, (input, output), MIB, Some((&sent, &received))));
            // SAFETY: a live stream of the device.
            let stream = unsafe { comm.device().context().wrap_borrowed_stream(stream.cast()) };
            comm.synchronize(&stream).expect("in time");
            let expected = expected.concat();
            assert!(*memory(output, expected.len()) == *expected, "step {step} on rank {rank}");
        }
        all_to_all.destroy();
    });
    // Each rank makes one comparison in the first sync, one in the last, and four exchanges.
    assert_eq!(nccl::calls("ncclAllGather"), 6 * RANKS as u64);
});

nccl_test!(a_rank_with_invalid_splits_fails_the_exchange_on_all_ranks, {
    with_buffers(|rank, _, windows, _, _| {
        let all_to_all = AllToAll::new(windows, 0);
        let sent = if rank == 1 { null() } else { [1; RANKS].as_ptr() };
        let mut received = [7; RANKS];
        // SAFETY: it is live; null or a number for each rank, and an output array.
        let status = unsafe { symmalloc_all_to_all_exchange(all_to_all.0, sent, received.as_mut_ptr()) };
        let expected = if rank == 1 { SYMMALLOC_INVALID_ARGUMENT } else { SYMMALLOC_MISALIGNED };
        assert_eq!((status, received), (expected, [7; RANKS]), "{}", message());
        assert_eq!(message().contains("rank 1"), rank != 1, "{}", message());
        assert_eq!(all_to_all.exchange(&[2; RANKS]), [2; RANKS], "the next exchange succeeds");
        all_to_all.destroy();
    });
});

nccl_test!(without_splits_both_buffers_are_split_equally, {
    with_buffers(|rank, comm, windows, (input, output), stream| {
        let all_to_all = AllToAll::new(windows, 0);
        let bytes = RANKS * 2 * ROW_BYTES;
        memory(input, bytes).fill(rank as u8 + 1);
        done(all_to_all.run(stream, (input, output), bytes, None));
        // SAFETY: a live stream of the device.
        let stream = unsafe { comm.device().context().wrap_borrowed_stream(stream.cast()) };
        comm.synchronize(&stream).expect("in time");
        let expected: Vec<u8> = (0..RANKS).flat_map(|from| [from as u8 + 1; 2 * ROW_BYTES]).collect();
        assert_eq!(memory(output, bytes), expected);
        all_to_all.destroy();
    });
});

nccl_test!(invalid_calls_are_refused_and_submit_nothing, {
    with_buffers(|rank, _, windows, (input, output), stream| {
        let all_to_all = AllToAll::new(windows, SYMMALLOC_ALL_TO_ALL_REGISTERED);
        let one = [1; RANKS];
        let refused = |status, says: &str| {
            assert!(message().contains(says), "{}", message());
            status
        };
        let elsewhere = all_to_all.run(stream, (input, output + (1 << 40)), MIB, Some((&one, &one)));
        assert_eq!(refused(elsewhere, "not in registered memory"), SYMMALLOC_INVALID_STATE);
        let overlapping = all_to_all.run(stream, (input, input + ROW_BYTES), MIB, Some((&one, &one)));
        assert_eq!(refused(overlapping, "overlap"), SYMMALLOC_INVALID_ARGUMENT);
        let long = [1 << 40; RANKS];
        let too_long = all_to_all.run(stream, (input, output), MIB, Some((&long, &long)));
        assert_eq!(refused(too_long, "longer buffer"), SYMMALLOC_INVALID_ARGUMENT);
        let mut out = null_mut();
        // SAFETY: a live registrar; the options are rejected.
        let unknown = unsafe { symmalloc_all_to_all_create(windows.0, 8, &raw mut out) };
        assert_eq!(refused(unknown, "SYMMALLOC_ALL_TO_ALL"), SYMMALLOC_INVALID_ARGUMENT);
        all_to_all.destroy();
        let checked = AllToAll::new(windows, SYMMALLOC_ALL_TO_ALL_CHECKED);
        let mut sent = one;
        sent[(rank + 1) % RANKS] += u64::from(rank == 0);
        let differing = checked.run(stream, (input, output), MIB, Some((&sent, &one)));
        assert_eq!(refused(differing, "rank 0 sends 2 rows"), SYMMALLOC_MISALIGNED);
        checked.destroy();
    });
    assert_eq!((nccl::calls("ncclSend"), nccl::calls("ncclRecv")), (0, 0));
});
