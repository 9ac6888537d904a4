//! Tests of ranks that a launcher starts as processes, which share only its environment variables.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};
use stub_process::{RankOutput, nccl, nccl_test, ranks, until, until_some};
use symmalloc_core::{Config, PoolConfig};
use symmalloc_cuda::{CudaAllocator, CudaDevice};
use symmalloc_nccl::{
    CommError, CommState, Communicator, Launch, ReduceOp, Registrar, Registration, RendezvousError, UniqueId,
};

const DEADLINE: Duration = Duration::from_secs(20);

/// Returns the launch that torchrun describes to this rank.
fn as_torchrun(rank: usize, ranks: usize, job: &str) -> Launch {
    let variables = [
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", ranks.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("LOCAL_WORLD_SIZE", ranks.to_string()),
        ("TORCHELASTIC_RUN_ID", job.to_owned()),
    ];
    let variable = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone());
    Launch::from_variables(variable).expect("the variables should be complete")
}

/// Returns the ids that each rank printed.
fn ids(outputs: &[RankOutput]) -> Vec<Vec<String>> {
    let ids = |output: &RankOutput| -> Vec<String> {
        assert!(output.is_success, "rank {}:\n{}", output.rank, output.text);
        output.text.lines().filter_map(|line| line.split_once("id [")).map(|(_, id)| id.to_owned()).collect()
    };
    outputs.iter().map(ids).collect()
}

nccl_test!(processes_of_one_machine_get_the_same_ids_in_turn, {
    let job = format!("job-{}", std::process::id());
    let outputs = ranks(3, &[("TEST_JOB", &job)], |rank| {
        let launch = as_torchrun(rank, 3, &std::env::var("TEST_JOB").expect("it should be set"));
        for _ in 0..2 {
            println!("id {:?}", UniqueId::for_job(&launch, DEADLINE).expect("all ranks should meet").as_bytes());
        }
    });
    let ids = ids(&outputs);
    assert_eq!(ids[0].len(), 2);
    assert_ne!(ids[0][0], ids[0][1], "each meeting has a different id");
    assert!(ids.iter().all(|of_rank| *of_rank == ids[0]));
});

nccl_test!(borrowed_communicators_meet_at_a_named_address, {
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .expect("a port should be free")
        .local_addr()
        .expect("the socket should be bound")
        .port();
    let place = format!("127.0.0.1:{port}");
    let outputs = ranks(2, &[("SYMMALLOC_RENDEZVOUS", &place)], |rank| {
        println!(
            "id {:?}",
            UniqueId::for_job(&as_torchrun(rank, 2, "job"), DEADLINE).expect("both ranks should meet").as_bytes()
        );
    });
    let ids = ids(&outputs);
    assert_eq!((ids[0].len(), &ids[0]), (1, &ids[1]));
});

/// Returns the output of two ranks that meet with these secrets.
fn meet_with_secrets(secrets: [&str; 2]) -> Vec<RankOutput> {
    let job = format!("secrets-{}", std::process::id());
    let options = [("TEST_JOB", &*job), ("TEST_SECRET_0", secrets[0]), ("TEST_SECRET_1", secrets[1])];
    ranks(2, &options, |rank| {
        let secret = std::env::var(format!("TEST_SECRET_{rank}")).expect("it should be set");
        // SAFETY: the process has no other thread yet that reads its environment.
        unsafe { std::env::set_var("SYMMALLOC_JOB_SECRET", secret) };
        let deadline = if rank == 0 { Duration::from_secs(3) } else { DEADLINE };
        match UniqueId::for_job(&as_torchrun(rank, 2, &std::env::var("TEST_JOB").expect("it should be set")), deadline)
        {
            Ok(id) => println!("id {:?}", id.as_bytes()),
            Err(error) => println!("ERROR {error} {error:?}"),
        }
    })
}

nccl_test!(ranks_with_one_secret_meet, {
    let ids = ids(&meet_with_secrets(["one secret for all of them"; 2]));
    assert_eq!((ids[0].len(), &ids[0]), (1, &ids[1]));
});

nccl_test!(a_rank_with_another_secret_or_none_reports_it_and_prints_none, {
    let (ours, other) = ("one secret for all of them", "another secret, by mistake");
    for (secrets, expected) in [
        ([ours, other], "this rank and rank 0 have different job secrets"),
        ([ours, ""], "rank 0 has a job secret, and this rank has none"),
        (["", ours], "this rank has a job secret, and rank 0 has none"),
        ([ours, "too short"], "SYMMALLOC_JOB_SECRET has 9 bytes and needs 16"),
    ] {
        let outputs = meet_with_secrets(secrets);
        assert!(outputs[1].text.contains(expected), "{outputs:?}");
        assert!(outputs[0].text.contains("ERROR rank 1 did not arrive"), "{outputs:?}");
        let is_printed = |secret: &&str| !secret.is_empty() && outputs.iter().any(|it| it.text.contains(*secret));
        assert!(!secrets.iter().any(is_printed), "{outputs:?}");
    }
});

nccl_test!(nccls_own_address_needs_no_meeting, {
    let outputs = ranks(2, &[("NCCL_COMM_ID", "127.0.0.1:4000")], |rank| {
        // Neither rank waits for the other.
        let id = UniqueId::for_job(&as_torchrun(0, 2, "job"), Duration::ZERO).expect("from NCCL");
        println!("id {:?}", id.as_bytes());
        assert!(rank < 2);
    });
    let ids = ids(&outputs);
    assert_eq!((ids[0].len(), &ids[0]), (1, &ids[1]));
});

nccl_test!(a_process_that_is_never_started_is_named, {
    let job = format!("short-{}", std::process::id());
    let outputs = ranks(2, &[("TEST_JOB", &job)], |rank| {
        // The job claims three ranks, but only two start.
        let launch = as_torchrun(rank, 3, &std::env::var("TEST_JOB").expect("it should be set"));
        match UniqueId::for_job(&launch, Duration::from_millis(800)).map(|_| ()) {
            Err(CommError::Rendezvous(RendezvousError::Missing { missing, .. })) => assert_eq!(missing, [2]),
            met => panic!("rank {rank}: {met:?}"),
        }
    });
    ids(&outputs);
});

nccl_test!(
    one_rank_connects_from_its_environment,
    ["RANK" = "0", "WORLD_SIZE" = "1", "LOCAL_RANK" = "0", "LOCAL_WORLD_SIZE" = "1"],
    {
        let device = CudaDevice::new(0).expect("the stub should have a device");
        let comm = Communicator::builder(&device)
            .deadline(DEADLINE)
            .name("job")
            .connect_env()
            .expect("a single rank connects");
        assert_eq!((comm.rank(), comm.ranks(), comm.name(), comm.state()), (0, 1, "job", CommState::Ready));
    }
);

nccl_test!(without_a_launcher_the_error_states_how_to_start, {
    let device = CudaDevice::new(0).expect("the stub should have a device");
    let refused = Communicator::builder(&device).connect_env().map(|_| ());
    assert!(matches!(refused, Err(CommError::Launch(_))), "{refused:?}");
});

/// Returns the id for growing a communicator. Rank 0 of the old communicator creates it, and the others read it from a file.
fn share_grow_id(old: Option<&Communicator>, folder: &Path) -> UniqueId {
    let file = folder.join("grow.id");
    if let Some(old) = old.filter(|old| old.rank() == 0) {
        let id = old.grow_id().expect("rank 0 creates an id");
        fs::write(file.with_extension("new"), id.as_bytes()).expect("the write should succeed");
        fs::rename(file.with_extension("new"), &file).expect("the rename should succeed");
        return id;
    }
    let bytes = until_some(|| fs::read(&file).ok());
    UniqueId::from_bytes(bytes.try_into().expect("all bytes of an id"))
}

// Two processes form a job and register a window. A third one makes the same allocations and joins them.
nccl_test!(a_process_that_starts_later_joins_and_reduces_in_windows, ["STUB_NCCL_VERSION" = "23203"], {
    let folder = tempfile::tempdir().expect("a folder should be created");
    let options = [("TEST_FOLDER", &*folder.path().to_string_lossy())];
    let outputs = ranks(3, &options, |rank| {
        let folder = std::env::var("TEST_FOLDER").expect("it should be set");
        let device = CudaDevice::new(rank).expect("the stub should have a device");
        let old = (rank < 2).then(|| {
            let id = UniqueId::for_job(&as_torchrun(rank, 2, &folder), DEADLINE).expect("both ranks should meet");
            let builder = Communicator::builder(&device).deadline(DEADLINE);
            builder.connect(id, rank as u32, 2).expect("both ranks connect")
        });
        let allocator = CudaAllocator::new(&device, Config::default()).expect("the allocator is created");
        let registrar = Registrar::builder(&allocator).build().expect("the registrar is created");
        let stream = device.context().new_stream().expect("the driver should create a stream");
        let pool = PoolConfig::builder().fixed().symmetric(true).build().expect("the configuration should be valid");
        let pool = allocator.create_pool(pool).expect("the creation should succeed");
        let mut sums =
            allocator.with_pool(&pool).alloc_zeroed::<f32>(&stream, 1 << 20).expect("the allocation should succeed");
        let mut reduce_in_window = |comm: &Communicator| {
            registrar
                .attach(comm, &[pool.id()], Registration::Windows)
                .expect("the pool should be symmetric and registrable");
            registrar.sync(&[comm]).expect("the ranks should agree");
            registrar.window_of(comm, &sums).expect("the buffer should have been synced");
            stream.memcpy_htod(&vec![1.0 + rank as f32; 1 << 20], &mut sums).expect("the copy should succeed");
            comm.all_reduce_in_place(&mut sums, ReduceOp::Sum, &stream).expect("the work should be submitted");
            comm.synchronize(&stream).expect("all ranks should take part");
            let sums = stream.clone_dtoh(&sums).expect("the copy should succeed");
            assert!(sums.iter().all(|sum| *sum == sums[0]), "every element is reduced");
            sums[0]
        };
        if let Some(old) = &old {
            assert_eq!(reduce_in_window(old), 3.0);
        }
        let id = share_grow_id(old.as_ref(), Path::new(&folder));
        let builder = Communicator::builder(&device).deadline(DEADLINE).name("grown");
        let grown = match &old {
            Some(old) => builder.grow(old, id, 3),
            None => builder.join(id, 2, 3),
        };
        let grown = grown.expect("all ranks should arrive");
        assert_eq!((grown.rank() as usize, grown.ranks()), (rank, 3));
        assert_eq!(reduce_in_window(&grown), 6.0);
        [old, Some(grown)]
            .into_iter()
            .flatten()
            .for_each(|comm| comm.destroy().expect("the communicator should be idle"));
        nccl::assert_clean();
        // NCCL needs all processes until every rank has destroyed its communicator.
        fs::write(Path::new(&folder).join(format!("done.{rank}")), "").expect("the write should succeed");
        until(|| (0..3).all(|rank| Path::new(&folder).join(format!("done.{rank}")).exists()));
    });
    for output in outputs {
        assert!(output.is_success, "rank {}:\n{}", output.rank, output.text);
    }
});

/// Returns the processor time of the watchdog's thread.
fn watchdog_time() -> Duration {
    let tasks = fs::read_dir("/proc/self/task")
        .expect("this test should run on Linux")
        .map(|task| task.expect("it should be readable").path());
    let read = |task: &Path, file| fs::read_to_string(task.join(file)).unwrap_or_default();
    let watchdog =
        tasks.into_iter().find(|task| read(task, "comm").starts_with("symmalloc-watch")).expect("it should run");
    // Nanoseconds on a processor, nanoseconds in its queue, and the number of times.
    let nanoseconds = read(&watchdog, "schedstat").split(' ').next().and_then(|text| text.parse().ok());
    Duration::from_nanos(nanoseconds.expect("it should be a number"))
}

/// Returns the number of open sockets.
fn sockets() -> usize {
    let links = fs::read_dir("/proc/self/fd")
        .expect("this test should run on Linux")
        .flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok());
    links.filter(|link| link.to_string_lossy().starts_with("socket:")).count()
}

// The cost of the star at rank 0, with real processes. `SYMMALLOC_RANKS=64` sets their number.
nccl_test!(rank_0_has_one_connection_to_each_other_rank_and_syncs_use_none, {
    const SYNCS: u32 = 50;
    const MEASURED: Duration = Duration::from_secs(2);
    let count: usize = std::env::var("SYMMALLOC_RANKS").map_or(6, |text| text.parse().expect("it should be a number"));
    let folder = tempfile::tempdir().expect("a folder should be created");
    let options = [("TEST_FOLDER", &*folder.path().to_string_lossy()), ("STUB_DEVICES", &*count.to_string())];
    let outputs = ranks(count, &options, |rank| {
        let folder = std::env::var("TEST_FOLDER").expect("it should be set");
        let all_are = |what: &str| {
            fs::write(Path::new(&folder).join(format!("{what}.{rank}")), "").expect("the write should succeed");
            until(|| (0..count).all(|rank| Path::new(&folder).join(format!("{what}.{rank}")).exists()));
        };
        let deadline = Duration::from_secs(100);
        let id = UniqueId::for_job(&as_torchrun(rank, count, &folder), deadline).expect("all ranks should meet");
        // The connections to rank 0's store end soon after the meeting.
        let is_star = |sockets: &usize| rank > 0 || (count - 1..count + 3).contains(sockets);
        let of_star = until_some(|| Some(sockets()).filter(is_star));
        // The stub of NCCL connects the others to rank 0, too.
        all_are("counted");
        let device = CudaDevice::new(rank).expect("the stub should have a device");
        let comm = Communicator::builder(&device).deadline(deadline).connect(id, rank as u32, count as u32);
        let comm = comm.expect("all ranks should connect");
        let allocator = CudaAllocator::new(&device, Config::default()).expect("the allocator is created");
        let registrar = Registrar::builder(&allocator).build().expect("the registrar is created");
        let pool = PoolConfig::builder().fixed().symmetric(true).build().expect("the configuration should be valid");
        let pool = allocator.create_pool(pool).expect("the creation should succeed");
        registrar
            .attach(&comm, &[pool.id()], Registration::Windows)
            .expect("the pool should be symmetric and registrable");
        registrar.sync(&[&comm]).expect("the ranks should agree");
        let begun = Instant::now();
        for _ in 0..SYNCS {
            registrar.sync(&[&comm]).expect("the ranks should agree");
        }
        let sync = begun.elapsed() / SYNCS;
        all_are("synced");
        let before = watchdog_time();
        std::thread::sleep(MEASURED);
        let processor = (watchdog_time() - before).as_secs_f64() / MEASURED.as_secs_f64() * 100.0;
        all_are("measured");
        if rank == 0 {
            println!("\nSTAR | {count} | {of_star} | {processor:.1} % | {sync:?} |");
        }
        comm.destroy().expect("the communicator should be idle");
        // NCCL needs all processes until every rank has destroyed its communicator.
        all_are("done");
    });
    for output in &outputs {
        assert!(output.is_success, "rank {}:\n{}", output.rank, output.text);
    }
    println!("{}", outputs[0].text.lines().find(|line| line.starts_with("STAR")).expect("printed"));
});
