//! Leak checks for file descriptors, device memory and address space.

use crate::job::{Calls, MIB, Rank, descriptors, devices, fixed, ranks};
use symmalloc_core::PoolId;
use symmalloc_nccl::{ReduceOp, Registration, UniqueId};

const ROUNDS: usize = 4;

/// Resources in use by the process and by one device.
#[derive(Clone, Copy, Debug)]
struct InUse {
    descriptors: usize,
    device_bytes: u64,
    address_bytes: u64,
}

fn in_use(rank: &Rank<'_>) -> InUse {
    let info = rank.device.memory_info().expect("the driver reports free memory");
    let pages = std::fs::read_to_string("/proc/self/statm").expect("a page count");
    let pages: u64 = pages.split(' ').next().and_then(|pages| pages.parse().ok()).expect("it should be a number");
    InUse { descriptors: descriptors(), device_bytes: info.total_bytes - info.free_bytes, address_bytes: pages * 4096 }
}

/// The call or event that ends a communicator.
#[derive(Clone, Copy, Debug)]
enum End {
    DetachAndDestroy,
    Destroy,
    Abort,
    Drop,
}

fn live(rank: &Rank<'_>, id: UniqueId, calls: Calls, end: End) {
    let comm = rank.connect(id, calls);
    let allocator = rank.allocator(fixed());
    let registrar = rank.registrar(&allocator);
    registrar.attach(&comm, &[PoolId::DEFAULT], Registration::Windows).expect("the pool should be attachable");
    let mut buffer =
        allocator.alloc_zeroed::<f32>(&rank.stream, (64 << 20) / 4).expect("the allocation should succeed");
    let _small: Vec<_> = (0..8)
        .map(|_| allocator.alloc_zeroed::<u8>(&rank.stream, MIB as usize).expect("the allocation should succeed"))
        .collect();
    registrar.sync(&[&comm]).expect("the registration should succeed");
    rank.write(&mut buffer, 3);
    comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum, &rank.stream).expect("the work should be submitted");
    assert_eq!(rank.wrong_sums(&buffer, 3), 0);
    rank.meet();
    match end {
        End::DetachAndDestroy => {
            registrar.detach(&comm, &[PoolId::DEFAULT]).expect("attached before");
            registrar.sync(&[&comm]).expect("the deregistration should succeed");
            comm.destroy().expect("the communicator should be destroyed");
        }
        End::Destroy => comm.destroy().expect("the communicator should be destroyed"),
        End::Abort => comm.abort().expect("the communicator should be aborted"),
        End::Drop => {}
    }
}

#[test]
fn nothing_leaks_for_any_way_in_which_a_communicator_ends() {
    let Some(count) = devices() else { return };
    for calls in [Calls::Blocking, Calls::Nonblocking] {
        for end in [End::DetachAndDestroy, End::Destroy, End::Abort, End::Drop] {
            // The first round loads kernels and starts threads, which NCCL keeps.
            let id: Vec<UniqueId> = (0..=ROUNDS).map(|_| UniqueId::new().expect("NCCL creates an id")).collect();
            let seen = ranks(count, |rank| {
                let mut seen: Vec<InUse> = Vec::new();
                for id in &id {
                    live(rank, *id, calls, end);
                    rank.meet();
                    seen.push(in_use(rank));
                    rank.meet();
                }
                (seen[0], seen[ROUNDS])
            });
            for (rank, (first, last)) in seen.iter().enumerate() {
                println!(
                    "{calls:?}, {end:?}, rank {rank}, {ROUNDS} rounds: descriptors {} to {}, device memory {:+} MiB, addresses \
                     {:+} MiB",
                    first.descriptors,
                    last.descriptors,
                    (last.device_bytes as i64 - first.device_bytes as i64) >> 20,
                    (last.address_bytes as i64 - first.address_bytes as i64) >> 20,
                );
                assert!(last.descriptors <= first.descriptors, "{end:?}: {first:?}, {last:?}");
                assert!(last.device_bytes <= first.device_bytes + (2 << 20), "{end:?}: {first:?}, {last:?}");
                // Threads leave arenas of the host's allocator behind, but no symmetric address ranges, which are far larger.
                assert!(last.address_bytes <= first.address_bytes + (1 << 30), "{end:?}: {first:?}, {last:?}");
            }
        }
    }
}
