//! Tests with ranks as processes, one of which dies or gets stuck in each step of a sleep and a wake, at any NCCL call. The others end in
//! time, each in the state that the tables of `docs/sleep-protocol.md` specify, and none continues alone.

use std::path::Path;
use std::time::{Duration, Instant};
use stub_process::{nccl, nccl_test, ranks, until};
use symmalloc_core::op::Contents;
use symmalloc_core::sleep::Phase;
use symmalloc_core::{Config, PoolConfig};
use symmalloc_cuda::{CudaAllocator, CudaDevice};
use symmalloc_nccl::{
    CollectiveSleepError, CommState, Communicator, Launch, Registrar, Registration, SleepStep, UniqueId, WatchdogMode,
};

const DEADLINE: Duration = Duration::from_secs(3);
const RANKS: usize = 3;
const VICTIM: usize = 1;
const AT: &str = "SYMMALLOC_TEST_AT";
const STUCK: &str = "SYMMALLOC_TEST_STUCK";

/// Runs one rank's program: a sleep and a wake, during which rank 1 dies or gets stuck.
fn body(rank: usize) {
    let folder = std::env::var("SYMMALLOC_FLIGHT_RECORDS").expect("it should be set");
    let variables = [
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", RANKS.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("LOCAL_WORLD_SIZE", RANKS.to_string()),
        ("TORCHELASTIC_RUN_ID", folder.clone()),
    ];
    let variable = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone());
    let launch = Launch::from_variables(variable).expect("the variables should be complete");
    let id = UniqueId::for_job(&launch, Duration::from_secs(60)).expect("all ranks should meet");
    let device = CudaDevice::new(rank).expect("the stub should have a device");
    let builder = Communicator::builder(&device).deadline(DEADLINE).watchdog(WatchdogMode::Abort);
    let world = builder.connect(id, rank as u32, RANKS as u32).expect("all ranks should connect");
    let allocator = CudaAllocator::new(&device, Config::default()).expect("the allocator is created");
    let stream = device.context().new_stream().expect("the driver should create a stream");
    let registrar = Registrar::builder(&allocator).build().expect("the registrar is created");
    let config = PoolConfig::builder().fixed().symmetric(true).build().expect("the configuration should be valid");
    let pool = allocator.create_pool(config).expect("the pool should fit into the device");
    registrar.attach(&world, &[pool.id()], Registration::Windows).expect("the pool should be attachable");
    let _tensors = [20_usize, 30].map(|size| {
        allocator.with_pool(&pool).alloc_zeroed::<u8>(&stream, size << 20).expect("the allocation should fit")
    });
    registrar.sync(&[&world]).expect("the ranks should agree");
    await_syncs(rank, Path::new(&folder));
    if rank == VICTIM {
        let at = std::env::var(AT).expect("it should be set").parse().expect("it should be a number");
        let (call, nth) = if at > 100 { ("ncclCommWindowRegister", at - 100) } else { ("ncclAllGather", at) };
        match std::env::var(STUCK) {
            // The delay imitates a process that is stopped, and resumes after the others have given up on it.
            Ok(_) => nccl::slow(call, Some(VICTIM), nth, 3 * DEADLINE.as_millis() as u64),
            Err(_) => nccl::die(call, Some(VICTIM), nth),
        }
    }
    let begun = Instant::now();
    let outcome = sleep_and_wake(&registrar, &world, pool.id());
    assert!(rank == VICTIM || begun.elapsed() < 2 * DEADLINE, "{:?}", begun.elapsed());
    println!("rank {rank}: {outcome}");
    if rank == VICTIM {
        return;
    }
    // No memory is unmapped while a window still covers it.
    nccl::assert_clean();
    // Other ranks are dead or stopped, so NCCL cannot be shut down normally.
    std::process::exit(0);
}

/// Makes rank 1 wait until the others have completed the sync as well, so that its death cannot interrupt their sync.
fn await_syncs(rank: usize, folder: &Path) {
    let printed = |rank: usize| folder.join(format!("synced-{rank}"));
    std::fs::write(printed(rank), "").expect("the write should succeed");
    until(|| rank != VICTIM || (0..RANKS).all(|rank| printed(rank).exists()));
}

fn sleep_and_wake(registrar: &Registrar, world: &Communicator, pool: symmalloc_core::PoolId) -> String {
    let phase = || registrar.phase(pool).expect("the pool should exist");
    match registrar.sleep(world, pool, Contents::Drop) {
        Ok(_) => assert_eq!(phase(), Phase::Asleep),
        Err(CollectiveSleepError::Broken { step, is_asleep, error, .. }) => {
            // A lost communicator may hold the memory. Then the pool has failed, which counts as asleep.
            let allowed: &[Phase] =
                if step == SleepStep::Check { &[Phase::Asleep, Phase::Held] } else { &[Phase::Awake] };
            assert!(allowed.contains(&phase()), "{step:?}, {:?}: {error}", phase());
            assert_eq!(is_asleep, step == SleepStep::Check, "{step:?}: {error}");
            assert_ne!(world.state(), CommState::Ready, "{error}");
            return format!("sleep broken in {step:?}, asleep {is_asleep}");
        }
        Err(error) => panic!("{error}"),
    }
    match registrar.wake(world, pool) {
        Ok(_) => {
            assert_eq!(phase(), Phase::Awake);
            "done".to_owned()
        }
        Err(CollectiveSleepError::Broken { step, is_asleep, error, .. }) => {
            assert_eq!(phase() == Phase::Asleep, is_asleep, "{error}");
            assert_eq!(is_asleep, matches!(step, SleepStep::Agree | SleepStep::Decide), "{step:?}: {error}");
            assert_ne!(world.state(), CommState::Ready, "{error}");
            format!("wake broken in {step:?}, asleep {is_asleep}")
        }
        // The watchdog ended the communicator before the call.
        Err(CollectiveSleepError::Gone { .. }) => {
            assert_eq!(phase(), Phase::Asleep);
            "gone before the wake".to_owned()
        }
        Err(error) => panic!("{error}"),
    }
}

/// Returns the outcomes that the survivors report when rank 1 dies or gets stuck in call number `at`.
fn meet(at: u64, is_stuck: bool) -> Vec<String> {
    let folder = tempfile::tempdir().expect("a folder should be created");
    let (place, at) = (folder.path().to_string_lossy().into_owned(), at.to_string());
    let mut options = vec![("SYMMALLOC_FLIGHT_RECORDS", &*place), (AT, &*at)];
    if is_stuck {
        options.push((STUCK, "1"));
    }
    let outputs = ranks(RANKS, &options, body);
    let survivors = outputs.into_iter().filter(|output| output.rank != VICTIM);
    survivors
        .map(|output| {
            assert!(output.is_success, "at {at}, rank {}:\n{}", output.rank, output.text);
            let prefix = format!("rank {}: ", output.rank);
            let line =
                output.text.lines().find_map(|line| line.split_once(&*prefix)).map(|(_, printed)| printed.to_owned());
            line.unwrap_or_else(|| panic!("at {at}, rank {} reports nothing:\n{}", output.rank, output.text))
        })
        .collect()
}

nccl_test!(a_rank_that_dies_in_any_step_leaves_the_others_in_the_documented_state, {
    let mut seen = Vec::new();
    // Agree, Decide and Check of the sleep, and Agree, Decide and Check of the wake, are one gather each.
    for at in 1..=6 {
        let printed = meet(at, false);
        println!("gather {at}: {printed:?}");
        seen.push(printed);
    }
    for at in 101..=102 {
        let printed = meet(at, false);
        println!("registration {}: {printed:?}", at - 100);
        seen.push(printed);
    }
    // Rank 1 dies before it sends anything in that step, so no survivor receives all messages of the step. The communicator may also end
    // while a rank has not yet received all messages of the previous step. That rank fails one step earlier.
    let steps = [
        "sleep broken in Agree, asleep false",
        "sleep broken in Decide, asleep false",
        "sleep broken in Check, asleep true",
        "wake broken in Agree, asleep true",
        "wake broken in Decide, asleep true",
        "wake broken in Register, asleep false",
        "wake broken in Check, asleep false",
    ];
    let at_step = [0, 1, 2, 3, 4, 6, 5, 5];
    for (at, printed) in seen.iter().enumerate() {
        let step = at_step[at];
        let allowed = [steps[step], steps[step.saturating_sub(1)], if step == 3 { "gone before the wake" } else { "" }];
        assert!(
            printed.iter().all(|printed| allowed.contains(&&**printed)),
            "{at}: {printed:?}, expected one of {allowed:?}"
        );
        assert!(printed.iter().any(|printed| printed != "done"), "{at}: no survivor noticed");
    }
});

nccl_test!(a_rank_that_is_stuck_in_a_step_ends_the_op_within_the_deadline, {
    let steps = [
        (2, "sleep broken in Decide, asleep false"),
        (3, "sleep broken in Check, asleep true"),
        (5, "wake broken in Decide, asleep true"),
        (101, "wake broken in Register, asleep false"),
    ];
    for (at, expected) in steps {
        let printed = meet(at, true);
        println!("{at}: {printed:?}");
        assert!(printed.iter().all(|printed| printed == expected), "{at}: {printed:?}");
    }
});
