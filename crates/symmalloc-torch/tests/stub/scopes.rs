//! Calls of engines that own their communicators: all kinds of registration and agreement, and scopes that register memory at their
//! end.

use crate::library::*;
use crate::registrar::{POOL, Windows, allocator_of_torch, flight_record, free_address, ranks, ranks_of};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};
use stub_process::{Barrier, nccl, nccl_test};
use symmalloc_nccl::Communicator;
use symmalloc_torch::*;

fn by_hand() -> symmalloc_registrar_options {
    symmalloc_registrar_options { agree_every: SYMMALLOC_AGREE_BY_HAND, ..options() }
}

fn options() -> symmalloc_registrar_options {
    symmalloc_registrar_options {
        deadline_ms: 5000,
        registration: SYMMALLOC_REGISTER_WINDOWS,
        agree_every: 0,
        rank: 0,
        world: 0,
        rendezvous: null(),
        name: null(),
    }
}

fn registered(
    allocator: Allocator,
    pool: u32,
    comm: &Communicator,
    options: symmalloc_registrar_options,
) -> Result<Windows, symmalloc_status> {
    let mut out = null_mut();
    // SAFETY: a live allocator and communicator, options with C strings or null, and an output pointer.
    match unsafe { symmalloc_registrar_create_with(allocator.0, pool, comm.raw(), &raw const options, &raw mut out) } {
        SYMMALLOC_OK => Ok(Windows(out)),
        status => Err(status),
    }
}

impl Windows {
    fn agree(&self) -> symmalloc_status {
        // SAFETY: a live registrar; null outputs.
        unsafe { symmalloc_registrar_agree(self.0, null_mut(), null_mut()) }
    }

    pub(crate) fn window(&self, pointer: Pointer, bytes: usize) -> Result<(usize, u64), symmalloc_status> {
        let (mut window, mut offset_bytes) = (null_mut(), 0);
        // SAFETY: a live registrar, and output pointers.
        match unsafe {
            symmalloc_registrar_window(self.0, pointer as *const c_void, bytes, &raw mut window, &raw mut offset_bytes)
        } {
            SYMMALLOC_OK => Ok((window as usize, offset_bytes)),
            status => Err(status),
        }
    }
}

/// Runs `inside` in a scope of the pool. Returns the numbers of windows registered and deregistered at its end.
fn scoped(device: u32, pool: u32, inside: impl FnOnce()) -> Result<(u64, u64), symmalloc_status> {
    done(symmalloc_scope_begin(device as i32, pool));
    inside();
    let (mut made, mut gone) = (0, 0);
    // SAFETY: output pointers.
    match unsafe { symmalloc_scope_end(device as i32, pool, &raw mut made, &raw mut gone) } {
        SYMMALLOC_OK => Ok((made, gone)),
        status => Err(status),
    }
}

/// Allocates through PyTorch's calls, on the default stream.
#[track_caller]
fn allocate(device: u32, bytes: usize) -> Pointer {
    torch::try_allocate(device as usize, bytes, null_mut()).expect("allocated")
}

fn free(device: u32, pointer: Pointer) {
    // SAFETY: any pointer is valid.
    done(unsafe { symmalloc_torch_deallocate(device as i32, pointer as *mut c_void, null_mut()) });
}

nccl_test!(allocations_in_a_scope_have_windows_at_its_end, {
    ranks_of(2, allocator_of_torch, |rank, allocator, comm, barrier| {
        let pool = allocator.create_pool(Some(POOL));
        let windows = registered(allocator, pool, comm, by_hand()).expect("registered");
        let mut held = 0;
        assert_eq!(scoped(rank, pool, || held = allocate(rank, 4 * MIB)), Ok((1, 0)));
        let (window, offset_bytes) = windows.window(held, 4 * MIB).expect("in a window");
        assert!(window != 0 && offset_bytes == 0);
        assert_eq!(windows.window(held + MIB, MIB).expect("within").1, MIB as u64);
        assert_eq!(windows.window(held + MIB, 32 * MIB), Err(SYMMALLOC_INVALID_STATE), "beyond it");
        barrier.wait();
        let before = nccl::all_calls();
        barrier.wait();
        for _ in 0..100 {
            assert_eq!(scoped(rank, pool, || free(rank, allocate(rank, 2 * MIB))), Ok((0, 0)));
        }
        barrier.wait();
        assert_eq!(nccl::all_calls(), before, "a scope without new segments does not call NCCL");
        barrier.wait();
        assert_eq!(allocator.placement(allocate(rank, MIB)).pool, 0, "the scope is over");
        done(windows.destroy());
        assert_eq!(scoped(rank, pool, || ()), Ok((0, 0)), "registered nowhere");
        barrier.wait();
    });
    nccl::assert_clean();
});

nccl_test!(a_scope_syncs_every_communicator_of_its_pool, {
    ranks_of(2, allocator_of_torch, |rank, allocator, comm, barrier| {
        let pool = allocator.create_pool(Some(POOL));
        let other = comm.split(Some(0), rank).expect("split").expect("with a color");
        let alone = comm.split(Some(rank), 0).expect("split").expect("with a color");
        let modes = [by_hand(), options(), symmalloc_registrar_options { agree_every: 2, ..options() }];
        let comms = [comm, &other, &alone];
        let all: Vec<_> = comms
            .iter()
            .zip(modes)
            .map(|(comm, options)| registered(allocator, pool, comm, options).expect("registered"))
            .collect();
        let mut held = 0;
        assert_eq!(scoped(rank, pool, || held = allocate(rank, 4 * MIB)), Ok((3, 0)));
        let found: Vec<_> = all.iter().map(|windows| windows.window(held, MIB).expect("in a window").0).collect();
        assert!(found[0] != found[1] && found[1] != found[2], "{found:?}");
        free(rank, held);
        allocator.trim();
        let (mut made, mut gone) = (9, 9);
        // SAFETY: a live allocator, and output pointers.
        done(unsafe { symmalloc_pool_sync(allocator.0, pool, &raw mut made, &raw mut gone) });
        assert_eq!((made, gone), (0, 3));
        barrier.wait();
        assert_eq!(nccl::live().windows, 0);
        barrier.wait();
        all.into_iter().for_each(|windows| done(windows.destroy()));
        barrier.wait();
    });
    nccl::assert_clean();
});

nccl_test!(a_failed_registration_does_not_keep_the_next_communicator_from_its_sync, {
    ranks_of(2, allocator_of_torch, |rank, allocator, comm, barrier| {
        let pool = allocator.create_pool(Some(POOL));
        let other = comm.split(Some(0), rank).expect("split").expect("with a color");
        let all = [comm, &other].map(|comm| registered(allocator, pool, comm, options()).expect("registered"));
        barrier.wait();
        // The first registration is that of the first communicator.
        nccl::fail("ncclCommWindowRegister", Some(rank as usize), 1, 2);
        barrier.wait();
        let mut held = 0;
        assert!(scoped(rank, pool, || held = allocate(rank, 4 * MIB)).is_err());
        assert!(all[0].window(held, MIB).is_err());
        all[1].window(held, MIB).expect("in a window of the second communicator");
        barrier.wait();
        all.into_iter().for_each(|windows| _ = windows.destroy());
        barrier.wait();
    });
});

nccl_test!(ranks_compare_on_request_or_at_every_nth_sync, {
    ranks(|rank, allocator, comm, barrier| {
        let pool = allocator.create_pool(Some(POOL));
        let windows = registered(allocator, pool, comm, by_hand()).expect("registered");
        // One segment on both ranks, with different offsets in it.
        allocator.allocate(pool, MIB / 4 + rank as usize * 4096, null_mut());
        assert_eq!(windows.sync(), (1, 0), "the sync does not compare histories");
        assert_eq!(windows.agree(), SYMMALLOC_MISALIGNED);
        assert!(message().contains("262,144") && message().contains("266,240"), "{}", message());
        // SAFETY: a live allocator; null outputs.
        let agreed = unsafe { symmalloc_pool_agree(allocator.0, pool, null_mut(), null_mut()) };
        assert_eq!(agreed, SYMMALLOC_MISALIGNED);
        done(windows.destroy());
        barrier.wait();
        let third = registered(allocator, pool, comm, symmalloc_registrar_options { agree_every: 3, ..options() });
        let third = third.expect("registered");
        let statuses: Vec<_> = (0..6).map(|_| third.try_sync()).collect();
        let (success, misaligned) = (SYMMALLOC_OK, SYMMALLOC_MISALIGNED);
        assert_eq!(statuses, [success, success, misaligned, success, success, misaligned]);
        done(third.destroy());
        barrier.wait();
    });
    nccl::assert_clean();
});

nccl_test!(in_a_capture_a_scope_succeeds_only_without_new_segments, {
    ranks_of(2, allocator_of_torch, |rank, allocator, comm, barrier| {
        let stream = comm.device().context().new_stream().expect("a stream");
        let on_stream =
            |bytes: usize| torch::try_allocate(rank as usize, bytes, stream.cu_stream().cast()).expect("allocated");
        let mut all = Vec::new();
        for options in [by_hand(), options()] {
            let pool = allocator.create_pool(Some(POOL));
            all.push(registered(allocator, pool, comm, options).expect("registered"));
            // SAFETY: a live allocator, and a stream that outlives it.
            done(unsafe { symmalloc_reserve(allocator.0, pool, stream.cu_stream().cast(), 4 * MIB) });
            assert_eq!(scoped(rank, pool, || ()), Ok((1, 0)));
            stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).expect("begun");
            let mut captured = 0;
            assert_eq!(scoped(rank, pool, || captured = on_stream(3 << 20)), Ok((0, 0)));
            assert_eq!(all.last().expect("one").window(captured, 3 * MIB).expect("in a window").1, 0);
            let refused = scoped(rank, pool, || {
                on_stream(64 << 20);
            });
            assert_eq!(refused, Err(SYMMALLOC_INVALID_STATE));
            assert!(message().contains("before the capture begins"), "{}", message());
            drop(stream.end_capture(CUgraphInstantiate_flags(0)));
            // Ranks are threads here, so a global capture of one rank prohibits event queries on the other.
            barrier.wait();
            assert_eq!(scoped(rank, pool, || ()), Ok((1, 0)), "the window is created after the capture: {}", message());
            barrier.wait();
        }
        all.into_iter().for_each(|windows| done(windows.destroy()));
        barrier.wait();
    });
    nccl::assert_clean();
});

/// Runs two ranks, of which rank 1 exits before the end of the scope.
fn one_rank_stays_away(agree_every: u32) {
    let address = free_address();
    let barrier = Barrier::new(2);
    ranks_of(2, allocator_of_torch, |rank, allocator, comm, _| {
        let pool = allocator.create_pool(Some(POOL));
        let with_rendezvous =
            symmalloc_registrar_options { deadline_ms: 800, rendezvous: address.as_ptr(), agree_every, ..options() };
        let windows = registered(allocator, pool, comm, with_rendezvous).expect("registered");
        assert_eq!(
            scoped(rank, pool, || {
                allocate(rank, MIB);
            }),
            Ok((1, 0))
        );
        if rank == 0 {
            let begun = Instant::now();
            let alone = scoped(rank, pool, || {
                allocate(rank, 32 * MIB);
            });
            assert_eq!(alone, Err(SYMMALLOC_NCCL));
            assert!(message().contains("rank 1"), "{}", message());
            // The error is returned at most three seconds after the deadline.
            assert!(begun.elapsed() < Duration::from_millis(3800), "{:?}", begun.elapsed());
            assert_eq!(scoped(rank, pool, || ()), Err(SYMMALLOC_NCCL), "the communicator stays failed");
            let outside = allocate(rank, MIB);
            assert_eq!(allocator.placement(outside).pool, 0, "no scope is left open");
        }
        barrier.wait();
        windows.destroy();
        comm.abort().expect("in time");
    });
}

nccl_test!(a_rank_that_misses_the_end_of_a_scope_is_named, {
    one_rank_stays_away(0);
});

nccl_test!(a_missing_rank_is_named_if_only_new_segments_are_compared, {
    one_rank_stays_away(SYMMALLOC_AGREE_BY_HAND);
});

nccl_test!(ten_thousand_shapes_have_few_windows, {
    ranks_of(2, allocator_of_torch, |rank, allocator, comm, barrier| {
        let pool = allocator.create_pool(Some(POOL));
        let windows = registered(allocator, pool, comm, by_hand()).expect("registered");
        let (mut state, mut held, mut made) = (0x2545_f491_4f6c_dd1d_u64, Vec::new(), 0);
        for _ in 0..10_000 {
            let (registered, deregistered) = scoped(rank, pool, || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                held.push(allocate(rank, 1 + (state % (64 << 20)) as usize));
                if held.len() > 4 {
                    free(rank, held.remove((state >> 32) as usize % 4));
                }
            })
            .expect("in step");
            assert_eq!(deregistered, 0);
            made += registered;
        }
        // Four tensors are live at a time. A rank has one window per segment, and needs enough segments for its largest tensors.
        assert!((4..=16).contains(&made), "{made} windows");
        barrier.wait();
        assert_eq!(nccl::live().windows, 2 * made);
        assert_eq!(windows.agree(), SYMMALLOC_OK, "{}", message());
        barrier.wait();
        done(windows.destroy());
        barrier.wait();
    });
    nccl::assert_clean();
});

nccl_test!(buffers_of_any_pool_are_registered_without_other_ranks, {
    ranks(|rank, allocator, comm, barrier| {
        let pool = allocator.create_pool(None);
        let buffers = symmalloc_registrar_options { registration: SYMMALLOC_REGISTER_BUFFERS, ..by_hand() };
        let registration = registered(allocator, pool, comm, buffers).expect("any pool");
        let bytes = MIB << (4 * rank);
        let held = allocator.allocate(pool, bytes, null_mut());
        assert!(registration.sync().0 > 0);
        assert_eq!(registration.window(held, bytes), Err(SYMMALLOC_INVALID_STATE));
        assert!(message().contains("for this rank alone"), "{}", message());
        barrier.wait();
        assert_eq!((nccl::live().windows, nccl::calls("ncclCommWindowRegister")), (0, 0));
        assert!(nccl::calls("ncclCommRegister") >= 2);
        barrier.wait();
        done(registration.destroy());
        barrier.wait();
    });
    nccl::assert_clean();
});

nccl_test!(invalid_registration_options_are_refused, {
    ranks(|rank, allocator, comm, barrier| {
        let pool = allocator.create_pool(Some(POOL));
        let wrong = [
            (symmalloc_registrar_options { rank: 1 - rank, world: 2, ..options() }, "`rank` is"),
            (symmalloc_registrar_options { rank, world: 3, ..options() }, "`world` is 3"),
            (symmalloc_registrar_options { registration: 7, ..options() }, "SYMMALLOC_REGISTER_BUFFERS"),
        ];
        for (options, says) in wrong {
            assert_eq!(registered(allocator, pool, comm, options).err(), Some(SYMMALLOC_INVALID_ARGUMENT));
            assert!(message().contains(says), "{}", message());
        }
        let mut out = null_mut();
        // SAFETY: a live allocator and communicator; null options are rejected.
        let refused = unsafe { symmalloc_registrar_create_with(allocator.0, pool, comm.raw(), null(), &raw mut out) };
        assert_eq!(refused, SYMMALLOC_INVALID_ARGUMENT);
        let right = symmalloc_registrar_options { rank, world: 2, name: c"tp".as_ptr(), ..options() };
        let windows = registered(allocator, pool, comm, right).expect("it fits");
        let mut place = (9, 9);
        // SAFETY: a live registrar, and output pointers.
        done(unsafe { symmalloc_registrar_rank(windows.0, &raw mut place.0, &raw mut place.1) });
        assert_eq!(place, (rank, 2));
        assert!(flight_record().contains("\"tp\""), "the communicator is watched");
        done(windows.destroy());
        barrier.wait();
        assert!(!flight_record().contains("\"tp\""), "the communicator is no longer watched");
        barrier.wait();
    });
    nccl::assert_clean();
});
