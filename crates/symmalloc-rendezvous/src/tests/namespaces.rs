//! Meetings of two [machines](Machines), with the variables of each launcher and without a setting of ours. Skipped without root, the program
//! `ip` and TUN devices.

use crate::deadline::Deadline;
use crate::error::RendezvousError;
use crate::handshake::SHARED_BYTES;
use crate::launch::Launch;
use crate::share;
use crate::tests::SECRET;
use crate::tests::torch_stand_in::StandIn;
use std::fs;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;
use stub_process::{ADDRESSES, Machines, Quality};
use symmalloc_watchdog::Connection;

/// Set for the processes of a machine: what the process is.
const ROLE: &str = "SYMMALLOC_TEST_ROLE";
/// The host name of machine 0.
const NAME: &str = "node7";
/// Time limit of a rank in milliseconds.
const LIMIT: &str = "SYMMALLOC_TEST_LIMIT";

/// Starts this executable on a machine, as a process with this role.
fn start(machines: &Machines, machine: usize, role: &str, variables: &[(&str, String)]) -> Child {
    let this = std::env::current_exe().expect("a test");
    // The name of machine 0 is what Debian writes to `/etc/hosts`.
    let hosts = tempfile::NamedTempFile::new().expect("the file should be accessible");
    let address = ["127.0.1.1", ADDRESSES[0]][machine];
    fs::write(&hosts, format!("127.0.0.1 localhost\n{address} {NAME}\n")).expect("the write should succeed");
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", "mount --bind \"$0\" /etc/hosts && rm \"$0\" && exec \"$@\""]);
    command.arg(hosts.into_temp_path().keep().expect("the file should be kept")).arg(this);
    command.args(["--exact", "tests::namespaces::process_of_a_machine", "--nocapture"]);
    command.env(ROLE, role).envs(variables.iter().map(|(name, value)| (name, value)));
    machines.enter(machine, &mut command);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("`unshare` starts it")
}

/// Runs two ranks on each machine. Returns what each printed.
fn run(machines: &Machines, limit_ms: u64, variables: impl Fn(u32) -> Vec<(&'static str, String)>) -> Vec<String> {
    let ranks: Vec<Child> = (0..4_u32)
        .map(|rank| {
            let mut variables = variables(rank);
            variables.push((LIMIT, limit_ms.to_string()));
            start(machines, rank as usize / 2, "rank", &variables)
        })
        .collect();
    ranks.into_iter().map(said).collect()
}

/// Waits until a rank ends. Returns what it printed.
fn said(rank: Child) -> String {
    let output = rank.wait_with_output().expect("the program should end");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find_map(|line| line.split_once("ended: ")).map(|(_, line)| line.to_owned());
    line.unwrap_or_else(|| panic!("no result: {text}{}", String::from_utf8_lossy(&output.stderr)))
}

/// The body of each process of a machine. Without a role, it does nothing.
#[test]
fn process_of_a_machine() {
    match std::env::var(ROLE).as_deref() {
        Ok("rank") => {
            let launch = Launch::from_env().expect("the variables of a launcher");
            let limit = std::env::var(LIMIT).expect("it should be set").parse().expect("it should be a number");
            let create = || Ok::<_, RendezvousError>([7; SHARED_BYTES]);
            let met = share(&launch, create, &Deadline::after(Duration::from_millis(limit)));
            let kind = |(_, connection): &(u32, Connection)| match connection {
                Connection::Tcp(_) => "tcp",
                _ => "unix",
            };
            match met {
                Ok(met) => {
                    assert_eq!(met.id, [7; SHARED_BYTES]);
                    println!("\nended: {}", met.connections.iter().map(kind).collect::<Vec<_>>().join(" "));
                }
                Err(error) => println!("\nended: {error}"),
            }
        }
        Ok("store") => {
            let _server = StandIn::start_at(([0, 0, 0, 0], PORT));
            thread::sleep(Duration::from_secs(60));
        }
        _ => {}
    }
}

const PORT: u16 = 29500;

/// Each rank of machine 0 connects over a Unix socket, and the others over TCP.
fn all_met() -> Vec<String> {
    ["unix tcp tcp", "unix", "tcp", "tcp"].map(str::to_owned).to_vec()
}

fn torchrun(rank: u32, host: &str) -> Vec<(&'static str, String)> {
    vec![
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", "4".to_owned()),
        ("LOCAL_RANK", (rank % 2).to_string()),
        ("LOCAL_WORLD_SIZE", "2".to_owned()),
        ("TORCHELASTIC_RUN_ID", "none".to_owned()),
        // After a failure on machine 1, only its agent has counted a restart.
        ("TORCHELASTIC_RESTART_COUNT", (rank / 2).to_string()),
        ("MASTER_ADDR", host.to_owned()),
        ("MASTER_PORT", PORT.to_string()),
    ]
}

fn srun(rank: u32, home: &str) -> Vec<(&'static str, String)> {
    vec![
        ("SLURM_PROCID", rank.to_string()),
        ("SLURM_STEP_NUM_TASKS", "4".to_owned()),
        ("SLURM_LOCALID", (rank % 2).to_string()),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x2)".to_owned()),
        ("SLURM_NODEID", (rank / 2).to_string()),
        ("SLURM_JOB_ID", "77".to_owned()),
        ("HOME", home.to_owned()),
        ("XDG_STATE_HOME", String::new()),
    ]
}

fn mpirun(rank: u32, home: &str) -> Vec<(&'static str, String)> {
    vec![
        ("OMPI_COMM_WORLD_RANK", rank.to_string()),
        ("OMPI_COMM_WORLD_SIZE", "4".to_owned()),
        ("OMPI_COMM_WORLD_LOCAL_RANK", (rank % 2).to_string()),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2".to_owned()),
        ("PMIX_NAMESPACE", "prterun-node-7@1".to_owned()),
        ("HOME", home.to_owned()),
        ("XDG_STATE_HOME", String::new()),
    ]
}

const PATIENT: u64 = 30_000;

#[test]
fn ranks_of_two_machines_meet_through_the_store_of_torchrun() {
    let Some(machines) = Machines::new() else { return };
    let mut store = start(&machines, 0, "store", &[]);
    let agent = |rank| {
        let is_served = ("TORCHELASTIC_USE_AGENT_STORE", "True".to_owned());
        torchrun(rank, ADDRESSES[0]).into_iter().chain([is_served]).collect::<Vec<_>>()
    };
    let results = run(&machines, PATIENT, agent);
    store.kill().and_then(|()| store.wait()).expect("it ran");
    assert_eq!(results, all_met());
}

#[test]
fn ranks_of_two_machines_meet_near_the_masters_port() {
    let Some(machines) = Machines::new() else { return };
    assert_eq!(run(&machines, PATIENT, |rank| torchrun(rank, ADDRESSES[0])), all_met());
    let with_secret = |rank| {
        let secret = ("SYMMALLOC_JOB_SECRET", SECRET.to_owned());
        torchrun(rank, ADDRESSES[0]).into_iter().chain([secret]).collect::<Vec<_>>()
    };
    assert_eq!(run(&machines, PATIENT, with_secret), all_met());
}

/// Regression test: Debian resolves a machine's own name to 127.0.1.1. Rank 0 listened only there, and the ranks of the other machine waited
/// for it until their deadlines.
#[test]
fn ranks_meet_at_a_machine_whose_own_name_is_a_loopback_address() {
    let Some(machines) = Machines::new() else { return };
    assert_eq!(run(&machines, PATIENT, |rank| torchrun(rank, NAME)), all_met());
    let at = |rank| {
        let place = ("SYMMALLOC_RENDEZVOUS", format!("{NAME}:{PORT}"));
        torchrun(rank, "unused.invalid").into_iter().chain([place]).collect::<Vec<_>>()
    };
    assert_eq!(run(&machines, PATIENT, at), all_met());
}

#[test]
fn ranks_of_two_machines_meet_in_the_home_directory_under_srun_and_mpirun() {
    let Some(machines) = Machines::new() else { return };
    let home = tempfile::tempdir().expect("a folder should be created");
    let home = home.path().to_str().expect("the contents should be UTF-8");
    assert_eq!(run(&machines, PATIENT, |rank| srun(rank, home)), all_met());
    assert_eq!(run(&machines, PATIENT, |rank| mpirun(rank, home)), all_met());
    let folder = std::path::Path::new(home).join(".local/state/symmalloc/rendezvous");
    assert_eq!(
        fs::read_dir(folder).expect("the creation should succeed").count(),
        0,
        "rank 0 removes what it published"
    );
}

const CUT: Quality = Quality { delay: Duration::ZERO, bytes_per_second: None, is_cut: true };

/// Each side names the other, whichever direction is lost. Ranks that reach the store note what they found, and rank 0 quotes it.
#[test]
fn each_side_of_a_partition_names_the_other() {
    let late = Quality { delay: Duration::from_secs(60), ..Quality::default() };
    thread::scope(|scope| {
        for quality in [[CUT, CUT], [CUT, Quality::default()], [Quality::default(), CUT], [late, late]] {
            scope.spawn(move || {
                let Some(machines) = Machines::new() else { return };
                (0..).zip(quality).for_each(|(machine, quality)| machines.set_from(machine, quality));
                let home = tempfile::tempdir().expect("a folder should be created");
                let home = home.path().to_str().expect("the contents should be UTF-8");
                for has_folder in [true, false] {
                    let variables = |rank| if has_folder { srun(rank, home) } else { torchrun(rank, ADDRESSES[0]) };
                    let results = run(&machines, 3000, variables);
                    for result in &results[..2] {
                        assert!(result.contains("ranks 2-3 did not arrive within"), "{quality:?}: {results:?}");
                        let is_quoted =
                            |rank| result.contains(&format!("Rank {rank} could not join: it cannot be reached"));
                        assert_eq!([is_quoted(2), is_quoted(3)], [has_folder; 2], "{quality:?}: {results:?}");
                    }
                    for result in &results[2..] {
                        assert!(result.contains("rank 0 did not answer within"), "{quality:?}: {results:?}");
                        assert!(result.contains("check the address and the firewall"), "{quality:?}: {results:?}");
                    }
                }
            });
        }
    });
}

/// Rank 2 has arrived when the link is cut, and rank 3 is never started. A rank 2 that was killed would be missing as well.
#[test]
fn a_rank_that_is_cut_off_after_it_arrived_is_missing() {
    const LIMIT_MS: u64 = 14_000;
    let Some(machines) = Machines::new() else { return };
    let variables = |rank| {
        let limit = (LIMIT, LIMIT_MS.to_string());
        torchrun(rank, ADDRESSES[0]).into_iter().chain([limit]).collect::<Vec<_>>()
    };
    let ranks = [0, 1, 2].map(|rank| start(&machines, rank as usize / 2, "rank", &variables(rank)));
    // All three have arrived. On a machine that is too busy for that, the outcome is the same.
    thread::sleep(Duration::from_secs(4));
    machines.cut();
    let results = ranks.map(said);
    for result in &results[..2] {
        assert!(result.contains("ranks 2-3 did not arrive within"), "{results:?}");
    }
    assert!(results[2].contains("rank 0 did not answer within"), "{results:?}");
}
