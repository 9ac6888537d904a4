//! Measurements of syncs and registrations, compared with NCCL's own calls.

use crate::job::{Calls, MIB, Rank, devices, fixed, ranks, reserved};
use cudarc::driver::DevicePtrMut;
use std::time::{Duration, Instant};
use symmalloc_agreement::{Mode, Transport};
use symmalloc_core::backend::Backend;
use symmalloc_core::{Config, PoolId};
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaDevice, DeviceBuffer};
use symmalloc_nccl::{Attachment, Communicator, Nccl, NcclTransport, ReduceOp, Registered, Registrar, UniqueId};

const WINDOWS: usize = 16;

/// Returns the median and the 99th percentile of `count` runs, in microseconds.
fn timed(count: usize, mut run: impl FnMut()) -> (f64, f64) {
    let mut times: Vec<f64> = Vec::new();
    for _ in 0..count {
        let begun = Instant::now();
        run();
        times.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    (times[count / 2], times[count * 99 / 100])
}

fn registrar(allocator: &CudaAllocator, mode: Mode, comms: &[&Communicator]) -> Registrar {
    let registrar = Registrar::builder(allocator).build().expect("the registrar is created");
    let attachment = Attachment { agreement: mode, ..Attachment::default() };
    for comm in comms {
        registrar.attach(comm, &[PoolId::DEFAULT], attachment).expect("the pool should be attachable");
    }
    registrar.sync(comms).expect("the registration should succeed");
    registrar
}

/// Runs one all-reduce and waits on the host until it has finished.
fn small_all_reduce<T: DevicePtrMut<f32>>(rank: &Rank<'_>, comm: &Communicator, buffer: &mut T) {
    comm.all_reduce_in_place(buffer, ReduceOp::Sum, &rank.stream).expect("the work should be submitted");
    rank.stream.synchronize().expect("the work should complete");
}

#[test]
fn a_sync_with_nothing_new_is_cheap() {
    let Some(count) = devices() else { return };
    for calls in [Calls::Blocking, Calls::Nonblocking] {
        let id = [(); 2].map(|()| UniqueId::new().expect("NCCL creates an id"));
        let quiet = ranks(count, |rank| {
            let comms = id.map(|id| rank.connect(id, calls));
            let allocator = rank.allocator(reserved(8 * MIB));
            let mut buffer = allocator.alloc_zeroed::<f32>(&rank.stream, 16).expect("the allocation should succeed");
            let off = registrar(&allocator, Mode::Off, &[&comms[0], &comms[1]]);
            let mut quiet = [0.0; 2];
            for (many, quiet) in quiet.iter_mut().enumerate() {
                let both = [&comms[0], &comms[1]];
                let mut best = f64::MAX;
                for _ in 0..20 {
                    let begun = Instant::now();
                    for _ in 0..10_000 {
                        off.sync(&both[..=many]).expect("the call should have nothing to do");
                    }
                    best = best.min(begun.elapsed().as_secs_f64() * 1e9 / 10_000.0);
                }
                *quiet = best;
            }
            drop(off);
            let agreeing = registrar(&allocator, Mode::AtSync, &[&comms[0]]);
            (0..100).for_each(|_| small_all_reduce(rank, &comms[0], &mut buffer));
            (0..100).for_each(|_| {
                assert_eq!(agreeing.sync(&[&comms[0]]).expect("the ranks should agree").registrations, 0);
            });
            rank.meet();
            let collective = timed(2000, || small_all_reduce(rank, &comms[0], &mut buffer));
            rank.meet();
            let transport = NcclTransport::new(&comms[0]).expect("memory should suffice");
            (0..100).for_each(|_| drop(transport.all_gather(&[0; 64]).expect("the ranks should gather")));
            rank.meet();
            let gather = timed(2000, || drop(transport.all_gather(&[0; 64]).expect("the ranks should gather")));
            rank.meet();
            let sync =
                timed(2000, || assert_eq!(agreeing.sync(&[&comms[0]]).expect("the ranks should agree").rounds, 1));
            if rank.is_first() {
                println!(
                    "{calls:?}, {count} ranks: sync with nothing new {:.0} ns (two communicators {:.0} ns); with agreement {:.1} us \
                     (p99 {:.1}); until the host sees the result, an all-gather of 64 bytes {:.1} us (p99 {:.1}), an all-reduce {:.1} us \
                     (p99 {:.1})",
                    quiet[0], quiet[1], sync.0, sync.1, gather.0, gather.1, collective.0, collective.1
                );
            }
            quiet[0]
        });
        assert!(quiet.iter().all(|nanoseconds| *nanoseconds <= 200.0), "{quiet:?} ns");
    }
}

#[test]
fn a_registration_costs_what_nccls_own_does() {
    let Some(count) = devices() else { return };
    for calls in [Calls::Blocking, Calls::Nonblocking] {
        let id = UniqueId::new().expect("NCCL creates an id");
        ranks(count, |rank| {
            let comm = rank.connect(id, calls);
            // First, make NCCL's calls directly, on memory from the backend.
            let backend = CudaBackend::builder(&rank.device).build().expect("the options should be supported");
            let segments: Vec<_> = (0..WINDOWS)
                .map(|_| {
                    let range = backend.reserve(2 * MIB).expect("the reservation should succeed");
                    backend.map(range, 0, 2 * MIB).expect("the mapping should succeed");
                    range
                })
                .collect();
            let mut windows: Vec<Registered> = Vec::new();
            rank.meet();
            let first = timed(1, || {
                windows
                    .push(comm.register_window(segments[0].base.0, 2 * MIB).expect("the registration should succeed"));
            });
            let mut rest = segments[1..].iter();
            let own = timed(WINDOWS - 1, || {
                let segment = rest.next().expect("there are as many segments as windows");
                windows.push(comm.register_window(segment.base.0, 2 * MIB).expect("the registration should succeed"));
            });
            let mut gone = windows.into_iter();
            let own_back = timed(WINDOWS, || match gone.next().expect("there are as many segments as windows") {
                Registered::Window(window) => {
                    comm.deregister_window(window).expect("the deregistration should succeed");
                }
                Registered::Plain(registration) => {
                    comm.deregister_buffer(registration).expect("the deregistration should succeed");
                }
            });
            for segment in segments {
                backend.unmap(segment, 0, 2 * MIB).expect("unmapped");
                backend.release(segment).expect("the memory should be released");
            }
            // Then register the same number of segments of a pool with one sync of a registrar.
            let allocator = rank.allocator(fixed());
            let registrar = registrar(&allocator, Mode::AtSync, &[&comm]);
            let blocks: Vec<_> = (0..2 * WINDOWS)
                .map(|_| allocator.allocate(&rank.stream, MIB).expect("the allocation should succeed").handle)
                .collect();
            rank.meet();
            let begun = Instant::now();
            assert_eq!(
                registrar.sync(&[&comm]).expect("the registration should succeed").registrations,
                WINDOWS as u64
            );
            let ours = begun.elapsed().as_secs_f64() * 1e6 / WINDOWS as f64;
            blocks.into_iter().for_each(|block| allocator.free(block).expect("the memory should be freed"));
            allocator.trim_all().expect("the driver releases the memory");
            rank.meet();
            let begun = Instant::now();
            let synced = registrar.sync(&[&comm]).expect("the deregistration should succeed");
            let ours_back = begun.elapsed().as_secs_f64() * 1e6 / WINDOWS as f64;
            assert_eq!((synced.deregistrations, synced.released_bytes), (WINDOWS as u64, 2 * MIB * WINDOWS as u64));
            if rank.is_first() {
                println!(
                    "{calls:?}, {count} ranks: window of 2 MiB, us: first {:.0}, NCCL's call {:.0}, in a sync of {WINDOWS} {ours:.0}; \
                     deregister {:.0}, in a sync with the memory given back {ours_back:.0}",
                    first.0, own.0, own_back.0
                );
            }
            assert!(ours <= 1.5 * own.0 + 500.0, "{ours} us, NCCL alone {} us", own.0);
        });
    }
}

/// Measures the cost that the watchdog adds to each collective: an entry in the flight record, a query whether the stream is capturing, and
/// an occasional event. Compares it with the submission of a small fill, and the device's time of large fills with and without it. One
/// device and one rank suffice.
#[test]
fn watching_costs_less_than_a_tenth_of_a_submission() {
    if let Err(error) = CudaDevice::count().map_err(|error| error.to_string()).and_then(|count| match count {
        0 => Err("no device".to_owned()),
        _ => Nccl::load().map(|_| ()).map_err(|error| error.to_string()),
    }) {
        println!("skipped: {error}");
        return;
    }
    const OPS: u32 = 10_000;
    let device = CudaDevice::new(0).expect("the device should be created");
    let stream = device.context().new_stream().expect("the driver should create a stream");
    let id = UniqueId::new().expect("NCCL creates an id");
    let comm = Communicator::builder(&device).connect(id, 0, 1).expect("a single rank connects");
    let allocator = CudaAllocator::new(&device, Config::default()).expect("the allocator is created");
    let mut small = allocator.alloc_zeroed::<u8>(&stream, 4 << 10).expect("the allocation should succeed");
    // The device takes longer for it than the host does to submit it.
    let mut large = allocator.alloc_zeroed::<u8>(&stream, 32 << 20).expect("the allocation should succeed");
    let per_op = |time: Duration| time.as_secs_f64() * 1e9 / f64::from(OPS);
    let announced = || {
        let begun = Instant::now();
        for _ in 0..OPS {
            comm.announce("nothing", None, &stream, || ()).expect("the communicator is ready");
        }
        let time = begun.elapsed();
        comm.synchronize(&stream).expect("the work should complete");
        per_op(time)
    };
    let fills = |buffer: &mut DeviceBuffer<u8>, is_announced: bool| {
        let begun = Instant::now();
        for _ in 0..OPS {
            if is_announced {
                let fill = || stream.memset_zeros(buffer);
                comm.announce("fill", None, &stream, fill)
                    .expect("the communicator is ready")
                    .expect("the work should be submitted");
            } else {
                stream.memset_zeros(buffer).expect("the work should be submitted");
            }
        }
        stream.synchronize().expect("the work should complete");
        per_op(begun.elapsed())
    };
    let mut watch = Vec::new();
    let (mut submission, mut plain, mut watched) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..20 {
        watch.push(announced());
        submission.push(fills(&mut small, false));
        plain.push(fills(&mut large, false));
        watched.push(fills(&mut large, true));
    }
    [&mut watch, &mut submission, &mut plain, &mut watched].into_iter().for_each(|times| times.sort_by(f64::total_cmp));
    println!("watching: median {:.0} ns, least {:.0}, most {:.0}", watch[10], watch[0], watch[19]);
    println!("submitting a fill of 4 KiB: {:.0} ns", submission[0]);
    println!("a fill of 32 MiB: {:.0} ns, watched {:.0} ns", plain[0], watched[0]);
    // Use the minima, because other load on the machine only adds to the times.
    assert!(watch[0] < 0.1 * submission[0], "{watch:?} and {submission:?}");
    assert!(watched[0] < 1.05 * plain[0], "{plain:?} and {watched:?}");
}
