//! Tests of ranks that a launcher starts as processes, which share only its environment variables.

use std::time::Duration;
use stub_process::{RankOutput, nccl_test, ranks};
use symmalloc_cuda::CudaDevice;
use symmalloc_nccl::{CommError, CommState, Communicator, Launch, RendezvousError};

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
    Launch::from_variables(variable).expect("complete")
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
        let launch = as_torchrun(rank, 3, &std::env::var("TEST_JOB").expect("set"));
        for _ in 0..2 {
            println!("id {:?}", launch.unique_id(DEADLINE).expect("all ranks meet").as_bytes());
        }
    });
    let ids = ids(&outputs);
    assert_eq!(ids[0].len(), 2);
    assert_ne!(ids[0][0], ids[0][1], "each meeting has a different id");
    assert!(ids.iter().all(|of_rank| *of_rank == ids[0]));
});

nccl_test!(borrowed_communicators_meet_at_a_named_address, {
    let port = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port").local_addr().expect("bound").port();
    let place = format!("127.0.0.1:{port}");
    let outputs = ranks(2, &[("SYMMALLOC_RENDEZVOUS", &place)], |rank| {
        println!("id {:?}", as_torchrun(rank, 2, "job").unique_id(DEADLINE).expect("both ranks meet").as_bytes());
    });
    let ids = ids(&outputs);
    assert_eq!((ids[0].len(), &ids[0]), (1, &ids[1]));
});

/// Returns the output of two ranks that meet with these secrets.
fn meet_with_secrets(secrets: [&str; 2]) -> Vec<RankOutput> {
    let job = format!("secrets-{}", std::process::id());
    let options = [("TEST_JOB", &*job), ("TEST_SECRET_0", secrets[0]), ("TEST_SECRET_1", secrets[1])];
    ranks(2, &options, |rank| {
        let secret = std::env::var(format!("TEST_SECRET_{rank}")).expect("set");
        // SAFETY: the process has no other thread yet that reads its environment.
        unsafe { std::env::set_var("SYMMALLOC_JOB_SECRET", secret) };
        let deadline = if rank == 0 { Duration::from_secs(3) } else { DEADLINE };
        match as_torchrun(rank, 2, &std::env::var("TEST_JOB").expect("set")).unique_id(deadline) {
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
        assert!(outputs[0].text.contains("ERROR ranks [1] did not arrive"), "{outputs:?}");
        let is_printed = |secret: &&str| !secret.is_empty() && outputs.iter().any(|it| it.text.contains(*secret));
        assert!(!secrets.iter().any(is_printed), "{outputs:?}");
    }
});

nccl_test!(nccls_own_address_needs_no_meeting, {
    let outputs = ranks(2, &[("NCCL_COMM_ID", "127.0.0.1:4000")], |rank| {
        // Neither rank waits for the other.
        let id = as_torchrun(0, 2, "job").unique_id(Duration::ZERO).expect("from NCCL");
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
        let launch = as_torchrun(rank, 3, &std::env::var("TEST_JOB").expect("set"));
        match launch.unique_id(Duration::from_millis(800)).map(|_| ()) {
            Err(CommError::Rendezvous(RendezvousError::Missing { missing, .. })) => {
                assert_eq!((rank, missing), (0, vec![2]));
            }
            // Rank 1 has received the id. It misses the third rank only when it connects.
            met => assert_eq!((rank, met), (1, Ok(()))),
        }
    });
    ids(&outputs);
});

nccl_test!(
    one_rank_connects_from_its_environment,
    ["RANK" = "0", "WORLD_SIZE" = "1", "LOCAL_RANK" = "0", "LOCAL_WORLD_SIZE" = "1"],
    {
        let device = CudaDevice::new(0).expect("a stub device");
        let comm = Communicator::builder(&device)
            .deadline(DEADLINE)
            .name("job")
            .connect_env()
            .expect("a single rank connects");
        assert_eq!((comm.rank(), comm.ranks(), comm.name(), comm.state()), (0, 1, "job", CommState::Ready));
    }
);

nccl_test!(without_a_launcher_the_error_states_how_to_start, {
    let device = CudaDevice::new(0).expect("a stub device");
    let refused = Communicator::builder(&device).connect_env().map(|_| ());
    assert!(matches!(refused, Err(CommError::Launch(_))), "{refused:?}");
});
