//! Calls that are rejected change nothing. Everything that a program can observe of pools and communicators is compared around each call.

use super::support::{Job, MIB, Rank, nothing_is_left};
use stub_process::{cuda, nccl, nccl_test};
use symmalloc_core::PoolId;
use symmalloc_core::op::Contents;
use symmalloc_core::sleep::Phase;
use symmalloc_cuda::{CudaBackend, DeviceBuffer, Pool};
use symmalloc_nccl::{
    Attachment, CommState, Communicator, CommunicatorStats, ReduceOp, RegistrarStats, Registration, WindowFlags,
};

const UNKNOWN: PoolId = PoolId(99);

struct Program<'a> {
    rank: &'a Rank,
    /// A communicator without pools.
    empty: Communicator,
    attached: Pool<CudaBackend>,
    /// Symmetric pools that are not attached.
    others: [Pool<CudaBackend>; 2],
    private: Pool<CudaBackend>,
    tensor: DeviceBuffer<f32>,
}

/// A pool: its registrations on both communicators, its observers, its digest and its phase.
type ObservedPool = ([Option<Registration>; 2], u32, Option<u64>, Phase);

/// Everything that a call could change.
#[derive(Debug, PartialEq)]
struct Observed {
    registrar: RegistrarStats,
    communicators: [Option<CommunicatorStats>; 2],
    pools: Vec<ObservedPool>,
    is_current: bool,
    states: [CommState; 2],
    live: Option<(nccl::Live, cuda::Live)>,
}

impl<'a> Program<'a> {
    fn new(rank: &'a Rank) -> Self {
        let empty =
            rank.world.split(Some(0), 0).expect("all ranks should split").expect("the rank should be in a part");
        let attached = rank.attached_pool();
        let others = [rank.pool(), rank.pool()];
        let private = rank
            .allocator
            .create_pool("segments:fixed".parse().expect("the text should be valid"))
            .expect("the pool should be created");
        let tensor = rank.take(&attached, 8 * MIB);
        rank.registrar.sync(&[&rank.world]).expect("the ranks should agree");
        Program { rank, empty, attached, others, private, tensor }
    }

    fn observe(&self) -> Observed {
        let Rank { registrar, world, allocator, .. } = self.rank;
        let comms = [world, &self.empty];
        let pools = [&self.attached, &self.others[0], &self.others[1], &self.private].map(Pool::id);
        let pool = |pool: PoolId| {
            let registrations = comms.map(|comm| registrar.registration(comm, pool));
            let digest = allocator.digest(pool).ok().map(|digest| digest.value);
            let phase = registrar.phase(pool).expect("the pool should exist");
            (registrations, allocator.core().observer_count(pool), digest, phase)
        };
        // Both ranks make the same calls, so a rank's resources are compared when both have made one.
        self.rank.meet();
        let live = (nccl::live(), cuda::Live { events: 0, host_bytes: 0, ..cuda::live() });
        self.rank.meet();
        let mut counts = registrar.stats();
        (counts.syncs, counts.quiet_syncs) = (0, 0);
        Observed {
            registrar: counts,
            communicators: comms.map(|comm| registrar.communicator_stats(comm)),
            pools: pools.into_iter().map(pool).collect(),
            is_current: registrar.is_current(world).expect("a pool is attached"),
            states: comms.map(Communicator::state),
            live: (self.rank.rank == 0).then_some(live),
        }
    }

    fn is_attach_rejected(&self, pools: &[PoolId], registration: Registration) -> bool {
        self.rank.registrar.attach(&self.rank.world, pools, registration).is_err()
    }
}

/// A call, which returns `true` if it was rejected.
type Rejected = (&'static str, fn(&Program) -> bool);

const REJECTED: &[Rejected] = &[
    ("attach an attached pool", |it| it.is_attach_rejected(&[it.attached.id()], Registration::Windows)),
    ("attach a pool twice", |it| it.is_attach_rejected(&[it.others[0].id(); 2], Registration::Windows)),
    ("attach an attached pool after others", |it| {
        it.is_attach_rejected(&[it.others[0].id(), it.others[1].id(), it.attached.id()], Registration::Windows)
    }),
    ("attach an attached pool before others", |it| {
        it.is_attach_rejected(&[it.attached.id(), it.others[0].id()], Registration::Windows)
    }),
    ("attach a private pool for windows", |it| {
        it.is_attach_rejected(&[it.others[0].id(), it.private.id()], Registration::Windows)
    }),
    ("attach no pool", |it| it.is_attach_rejected(&[it.others[0].id(), UNKNOWN], Registration::Windows)),
    ("attach a private pool twice", |it| it.is_attach_rejected(&[it.private.id(); 2], Registration::Buffers)),
    ("attach no pool for buffers", |it| it.is_attach_rejected(&[it.private.id(), UNKNOWN], Registration::Buffers)),
    ("attach an attached pool with flags", |it| {
        let pools = [it.others[1].id(), it.attached.id()];
        it.rank.registrar.attach(&it.rank.world, &pools, with_flags(WindowFlags::NONE)).is_err()
    }),
    ("attach with flags that the library does not have", |it| {
        it.rank.registrar.attach(&it.rank.world, &[it.others[0].id()], with_flags(WindowFlags::GIN_ONLY)).is_err()
    }),
    ("detach a pool that is not attached", |it| {
        it.rank.registrar.detach(&it.rank.world, &[it.others[0].id(), it.private.id()]).is_err()
    }),
    ("detach from a communicator without pools", |it| {
        it.rank.registrar.detach(&it.empty, &[it.attached.id()]).is_err()
    }),
    ("sync a communicator without pools", |it| it.rank.registrar.sync(&[&it.rank.world, &it.empty]).is_err()),
    ("agree on a communicator without pools", |it| it.rank.registrar.agree(&[&it.empty]).is_err()),
    ("put a pool to sleep that is not attached", |it| {
        it.rank.registrar.sleep(&it.rank.world, it.others[0].id(), Contents::Keep).is_err()
    }),
    ("put no pool to sleep", |it| it.rank.registrar.sleep(&it.rank.world, UNKNOWN, Contents::Keep).is_err()),
    ("wake no pool", |it| it.rank.registrar.wake(&it.rank.world, UNKNOWN).is_err()),
    ("put a pool to sleep over a communicator without pools", |it| {
        it.rank.registrar.sleep(&it.empty, it.attached.id(), Contents::Keep).is_err()
    }),
    ("allocate symmetric memory in a pool that is not attached", |it| {
        it.rank.registrar.with_symmetric(&[&it.rank.world], &it.others[0], |_| ()).is_err()
    }),
    ("register a window that is not aligned", |it| it.rank.world.register_window(0x1001, MIB).is_err()),
    ("register an empty window", |it| it.rank.world.register_window(0x1000, 0).is_err()),
    ("register an empty buffer", |it| it.rank.world.register_buffer(0x1000, 0).is_err()),
    ("find a window on a communicator without pools", |it| it.rank.registrar.window_of(&it.empty, &it.tensor).is_err()),
    ("reduce into a shorter buffer", |it| {
        let mut short = it.rank.take(&it.attached, MIB);
        it.rank.world.all_reduce(&it.tensor, &mut short, ReduceOp::Sum, &it.rank.stream).is_err()
    }),
];

nccl_test!(rejected_calls_change_nothing, ["STUB_NCCL_VERSION" = "23007"], {
    Job::new(2).run(|rank| {
        let program = Program::new(rank);
        // The first use of the smaller buffer reserves memory.
        drop(rank.take(&program.attached, MIB));
        rank.registrar.sync(&[&rank.world]).expect("the ranks should agree");
        for (what, call) in REJECTED {
            let before = program.observe();
            assert!(call(&program), "{what}: it must be rejected");
            let after = program.observe();
            let digests_of = |observed: &Observed| observed.pools.iter().map(|pool| pool.2).collect::<Vec<_>>();
            if digests_of(&after) != digests_of(&before) {
                // Only the calls that allocate on the way change digests.
                assert!(what.starts_with("reduce"), "{what}: digests");
            }
            let without_digests = |mut observed: Observed| {
                observed.pools.iter_mut().for_each(|pool| pool.2 = None);
                observed
            };
            assert_eq!(without_digests(after), without_digests(before), "{what}");
        }
        // All pools can be attached now.
        let pools = program.others.each_ref().map(Pool::id);
        rank.registrar.attach(&rank.world, &pools, Registration::Windows).expect("symmetric and not attached");
        rank.registrar.sync(&[&rank.world]).expect("the ranks should agree");
        let Program { empty, .. } = program;
        empty.destroy().expect("the communicator should be idle");
    });
    nothing_is_left();
});

/// An attachment for windows with flags.
fn with_flags(flags: WindowFlags) -> Attachment {
    Attachment { flags, ..Attachment::default() }
}
