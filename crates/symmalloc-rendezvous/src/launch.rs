//! This process's rank, as set by its launcher.
//!
//! | launcher | rank, ranks | local rank, local ranks | identity of the job |
//! |---|---|---|---|
//! | torchrun | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | `TORCHELASTIC_RUN_ID` |
//! | Open MPI | `OMPI_COMM_WORLD_RANK`, `.._SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `.._LOCAL_SIZE` | `PMIX_NAMESPACE` or `OMPI_MCA_ess_base_jobid` |
//! | MPICH | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` | `PMI_JOBID` |
//! | MVAPICH | `MV2_COMM_WORLD_RANK`, `.._SIZE` | `MV2_COMM_WORLD_LOCAL_RANK`, `.._LOCAL_SIZE` | `PMI_JOBID` or `SLURM_JOB_ID`, `SLURM_STEP_ID`, `SLURM_RESTART_COUNT` |
//! | Slurm | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` | `SLURM_LOCALID`, `SLURM_STEP_TASKS_PER_NODE` | `SLURM_JOB_ID`, `SLURM_STEP_ID`, `SLURM_RESTART_COUNT` |

use std::fmt;
use thiserror::Error;

/// This process's position in its job.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Launch {
    /// Rank of this process, from 0.
    pub rank: u32,
    /// Number of processes.
    pub ranks: u32,
    /// Rank among the processes of this machine, from 0: the usual choice of a device.
    pub local_rank: u32,
    /// Number of processes on this machine.
    pub local_ranks: u32,
    /// The launcher that set the variables.
    pub launcher: Launcher,
    /// An identifier of the job, as far as the launcher provides one; can be empty. Under torchrun, it is the same after a restart.
    pub job: String,
}

/// A program that starts ranks, identified by the variables it sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Launcher {
    /// torchrun, and any program that sets `RANK` and `WORLD_SIZE`.
    Torchrun,
    /// Open MPI's mpirun.
    OpenMpi,
    /// MVAPICH's mpirun_rsh and mpiexec.
    Mvapich,
    /// MPICH's mpiexec and compatible launchers: Hydra, Intel MPI.
    Mpich,
    /// Slurm's srun.
    Slurm,
}

/// The environment does not specify this process's rank.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// No launcher's variables are set.
    #[error(
        "this process was not started as a rank: looked for RANK (torchrun), OMPI_COMM_WORLD_RANK (Open MPI), MV2_COMM_WORLD_RANK (MVAPICH), \
         PMI_RANK (MPICH, Intel MPI), and SLURM_PROCID with SLURM_STEP_NUM_TASKS (srun). Start it with `torchrun --no-python`, mpirun, \
         mpiexec or srun, or set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE"
    )]
    NotLaunched,
    /// A variable is missing although others of the same launcher are set.
    #[error("{present} of {launcher} is set, but not {missing}: set both")]
    Incomplete {
        /// The launcher.
        launcher: Launcher,
        /// A variable that is set.
        present: &'static str,
        /// The variable that is missing.
        missing: &'static str,
    },
    /// A variable has an invalid value.
    #[error("{variable} is \"{value}\", which is not {expected}")]
    Malformed {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// The expected value.
        expected: &'static str,
    },
    /// A rank is not less than the number of ranks.
    #[error("{rank_variable} is {rank}, but {ranks_variable} is {ranks}: ranks count from 0")]
    OutOfRange {
        /// The variable of the rank.
        rank_variable: &'static str,
        /// The rank.
        rank: u32,
        /// The variable of the number of ranks.
        ranks_variable: &'static str,
        /// The number of ranks.
        ranks: u32,
    },
}

/// The variables of one launcher.
struct Variables {
    launcher: Launcher,
    rank: &'static str,
    ranks: &'static str,
    local_rank: &'static str,
    local_ranks: &'static str,
    /// Variables that together identify the start of the job.
    job: &'static [&'static str],
}

const TORCHRUN: Variables = Variables {
    launcher: Launcher::Torchrun,
    rank: "RANK",
    ranks: "WORLD_SIZE",
    local_rank: "LOCAL_RANK",
    local_ranks: "LOCAL_WORLD_SIZE",
    // TORCHELASTIC_RESTART_COUNT does not work: only the agent whose workers failed counts the restart, so it differs between machines.
    job: &["TORCHELASTIC_RUN_ID"],
};
const OPEN_MPI: Variables = Variables {
    launcher: Launcher::OpenMpi,
    rank: "OMPI_COMM_WORLD_RANK",
    ranks: "OMPI_COMM_WORLD_SIZE",
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    local_ranks: "OMPI_COMM_WORLD_LOCAL_SIZE",
    job: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
};
const MVAPICH: Variables = Variables {
    launcher: Launcher::Mvapich,
    rank: "MV2_COMM_WORLD_RANK",
    ranks: "MV2_COMM_WORLD_SIZE",
    local_rank: "MV2_COMM_WORLD_LOCAL_RANK",
    local_ranks: "MV2_COMM_WORLD_LOCAL_SIZE",
    job: &["PMI_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"],
};
const MPICH: Variables = Variables {
    launcher: Launcher::Mpich,
    rank: "PMI_RANK",
    ranks: "PMI_SIZE",
    local_rank: "MPI_LOCALRANKID",
    local_ranks: "MPI_LOCALNRANKS",
    job: &["PMI_JOBID"],
};
const SLURM: Variables = Variables {
    launcher: Launcher::Slurm,
    rank: "SLURM_PROCID",
    // SLURM_NTASKS does not work: it is also set for a batch script, which is not a rank.
    ranks: "SLURM_STEP_NUM_TASKS",
    local_rank: "SLURM_LOCALID",
    local_ranks: "SLURM_STEP_TASKS_PER_NODE",
    job: &["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"],
};
/// The index of a Slurm process's machine in the step.
const SLURM_NODE: &str = "SLURM_NODEID";
/// Set in a step with a terminal: `srun --pty`, and the shell that salloc starts.
const SLURM_PTY: &str = "SLURM_PTY_PORT";

impl Launch {
    /// Reads this process's environment.
    ///
    /// Launchers are tried in this order: torchrun, Open MPI, MVAPICH, MPICH, Slurm. The first one whose rank is set is used. (A program that sets
    /// `RANK` and `WORLD_SIZE` under mpirun does so intentionally; mpiexec may start its helpers with srun.) `PMI_RANK` without a local
    /// rank, as srun sets it, counts as Slurm.
    ///
    /// # Errors
    /// Returns an error if no launcher's variables are set, or they are inconsistent.
    pub fn from_env() -> Result<Self, LaunchError> {
        // A value that is not UTF-8 is not a number either, and must not count as missing.
        Self::from_variables(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// Like [`from_env`](Self::from_env), but looks variables up with `variable`.
    ///
    /// # Errors
    /// Same as [`from_env`](Self::from_env).
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self, LaunchError> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let is_set = |name| variable(name).is_some();
        let variables = if is_set(TORCHRUN.rank) {
            &TORCHRUN
        } else if is_set(OPEN_MPI.rank) {
            &OPEN_MPI
        } else if is_set(MVAPICH.rank) {
            &MVAPICH
        } else if is_set(MPICH.rank) && is_set(MPICH.local_rank) {
            &MPICH
        } else if is_set(SLURM.rank) && is_set(SLURM.ranks) {
            &SLURM
        } else if is_set(MPICH.rank) {
            &MPICH
        } else {
            return Err(LaunchError::NotLaunched);
        };
        variables.read(variable)
    }
}

impl Variables {
    fn read(&self, variable: impl Fn(&str) -> Option<String>) -> Result<Launch, LaunchError> {
        let Variables { launcher, .. } = *self;
        let text = |name: &'static str| {
            variable(name).ok_or(LaunchError::Incomplete { launcher, present: self.rank, missing: name })
        };
        let number = |name: &'static str| {
            let value = text(name)?;
            let parsed = value.trim().parse::<u32>();
            parsed.map_err(|_| LaunchError::Malformed { variable: name, value, expected: "a number" })
        };
        let (rank, ranks) = (number(self.rank)?, number(self.ranks)?);
        let local_rank = number(self.local_rank)?;
        let local_ranks = match launcher {
            Launcher::Slurm => {
                let (value, node) = (text(self.local_ranks)?, number(SLURM_NODE)?);
                tasks_of_node(&value, node).ok_or(LaunchError::Malformed {
                    variable: self.local_ranks,
                    value,
                    expected: "a list like 4(x2),3 with an entry for this machine",
                })?
            }
            _ => number(self.local_ranks)?,
        };
        let places =
            [(self.rank, rank, self.ranks, ranks), (self.local_rank, local_rank, self.local_ranks, local_ranks)];
        for (rank_variable, rank, ranks_variable, ranks) in places {
            if rank >= ranks {
                return Err(LaunchError::OutOfRange { rank_variable, rank, ranks_variable, ranks });
            }
        }
        let mut job: Vec<String> = self.job.iter().filter_map(|name| variable(name)).collect();
        let is_set = |name| variable(name).is_some();
        // All jobs of one allocation have its SLURM_JOB_ID, and all that are started in the shell of one `srun --pty` its SLURM_STEP_ID.
        let is_step = is_set("SLURM_STEP_ID") && !is_set(SLURM_PTY);
        if launcher == Launcher::Mvapich && !is_set("PMI_JOBID") && !is_step {
            job.clear();
        }
        Ok(Launch { rank, ranks, local_rank, local_ranks, launcher, job: job.join(".") })
    }
}

/// Returns the number of tasks on a machine, from Slurm's list: `4(x2),3` denotes 4, 4, 3.
fn tasks_of_node(list: &str, node: u32) -> Option<u32> {
    let mut before = 0_u32;
    for entry in list.split(',') {
        let (tasks, times) = match entry.split_once("(x") {
            Some((tasks, times)) => (tasks, times.strip_suffix(')')?.parse().ok()?),
            None => (entry, 1),
        };
        before = before.checked_add(times)?;
        if node < before {
            return tasks.trim().parse().ok();
        }
    }
    None
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Launcher::Torchrun => "torchrun",
            Launcher::OpenMpi => "Open MPI",
            Launcher::Mvapich => "MVAPICH",
            Launcher::Mpich => "MPICH",
            Launcher::Slurm => "Slurm",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::process::Command;

    fn launch(variables: &[(&str, &str)]) -> Result<Launch, LaunchError> {
        Launch::from_variables(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    const TORCH: [(&str, &str); 5] = [
        ("RANK", "5"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "4"),
        ("TORCHELASTIC_RUN_ID", "none"),
    ];
    const SRUN: [(&str, &str); 6] = [
        ("SLURM_PROCID", "9"),
        ("SLURM_STEP_NUM_TASKS", "11"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_STEP_TASKS_PER_NODE", "4(x2),3"),
        ("SLURM_NODEID", "2"),
        ("SLURM_JOB_ID", "77"),
    ];

    #[test]
    fn torchrun_sets_all_fields() {
        let launch = launch(&TORCH).expect("the environment should be complete");
        assert_eq!((launch.rank, launch.ranks, launch.local_rank, launch.local_ranks), (5, 8, 1, 4));
        assert_eq!((launch.launcher, launch.job.as_str()), (Launcher::Torchrun, "none"));
    }

    #[test]
    fn a_variable_that_is_not_utf8_is_malformed_and_not_missing() {
        const CHILD: &str = "SYMMALLOC_TEST_LAUNCH_CHILD";
        if std::env::var_os(CHILD).is_some() {
            let launch = Launch::from_env();
            assert!(matches!(launch, Err(LaunchError::Malformed { variable: "RANK", .. })), "{launch:?}");
            return;
        }
        let test = "launch::tests::a_variable_that_is_not_utf8_is_malformed_and_not_missing";
        let mut child = Command::new(std::env::current_exe().expect("the test's executable should be known"));
        child.args(["--exact", test]).envs(TORCH).env("RANK", OsStr::from_bytes(b"\xff")).env(CHILD, "");
        let output = child.output().expect("it starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"));
    }

    #[test]
    fn open_mpi_sets_all_fields() {
        let launch = launch(&[
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
            ("PMIX_NAMESPACE", "prterun-7@1"),
        ]);
        let launch = launch.expect("it should be complete");
        assert_eq!((launch.rank, launch.ranks, launch.local_rank, launch.local_ranks), (1, 2, 0, 1));
        assert_eq!((launch.launcher, launch.job.as_str()), (Launcher::OpenMpi, "prterun-7@1"));
    }

    #[test]
    fn mvapich_sets_all_fields_and_takes_precedence_over_srun() {
        let mut variables = vec![
            ("MV2_COMM_WORLD_RANK", "2"),
            ("MV2_COMM_WORLD_SIZE", "4"),
            ("MV2_COMM_WORLD_LOCAL_RANK", "0"),
            ("MV2_COMM_WORLD_LOCAL_SIZE", "2"),
        ];
        variables.extend(SRUN);
        let start = launch(&variables).expect("the environment should be complete");
        assert_eq!((start.rank, start.ranks, start.local_rank, start.local_ranks), (2, 4, 0, 2));
        assert_eq!((start.launcher, start.job.as_str()), (Launcher::Mvapich, ""), "two jobs of one allocation");
        variables.push(("SLURM_STEP_ID", "3"));
        assert_eq!(launch(&variables).expect("the environment should be complete").job, "77.3");
        variables.push(("SLURM_PTY_PORT", "40123"));
        assert_eq!(
            launch(&variables).expect("the environment should be complete").job,
            "",
            "two jobs in one `srun --pty bash`"
        );
        variables.push(("PMI_JOBID", "kvs_9"));
        assert_eq!(launch(&variables).expect("the environment should be complete").job, "kvs_9.77.3");
    }

    #[test]
    fn the_error_names_the_variable_of_each_launcher() {
        let text = LaunchError::NotLaunched.to_string();
        for variables in [TORCHRUN, OPEN_MPI, MVAPICH, MPICH, SLURM] {
            assert!(text.contains(variables.rank), "{}: {text}", variables.rank);
        }
    }

    #[test]
    fn mpich_takes_precedence_over_srun() {
        let mut variables =
            vec![("PMI_RANK", "3"), ("PMI_SIZE", "4"), ("MPI_LOCALRANKID", "3"), ("MPI_LOCALNRANKS", "4")];
        variables.extend(SRUN);
        let launch = launch(&variables).expect("the environment should be complete");
        assert_eq!((launch.rank, launch.ranks, launch.local_rank, launch.local_ranks), (3, 4, 3, 4));
        assert_eq!((launch.launcher, launch.job.as_str()), (Launcher::Mpich, ""));
    }

    #[test]
    fn srun_sets_all_fields_with_and_without_pmi() {
        for extra in [vec![], vec![("PMI_RANK", "9"), ("PMI_SIZE", "11")]] {
            let launch = launch(&[&SRUN[..], &extra].concat()).expect("the environment should be complete");
            assert_eq!((launch.rank, launch.ranks, launch.local_rank, launch.local_ranks), (9, 11, 1, 3));
            assert_eq!((launch.launcher, launch.job.as_str()), (Launcher::Slurm, "77"));
        }
    }

    #[test]
    fn a_batch_script_is_not_a_rank() {
        assert_eq!(launch(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")]), Err(LaunchError::NotLaunched));
        assert_eq!(launch(&[]), Err(LaunchError::NotLaunched));
        assert_eq!(launch(&[("RANK", "")]), Err(LaunchError::NotLaunched));
    }

    #[test]
    fn variables_of_torchrun_take_precedence_over_mpi() {
        let mut variables = TORCH.to_vec();
        variables.extend([("OMPI_COMM_WORLD_RANK", "0"), ("PMI_RANK", "0"), ("MPI_LOCALRANKID", "0")]);
        assert_eq!(launch(&variables).expect("the environment should be complete").launcher, Launcher::Torchrun);
    }

    #[test]
    fn every_missing_variable_is_named() {
        for missing in ["WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"] {
            let variables: Vec<_> = TORCH.into_iter().filter(|(name, _)| *name != missing).collect();
            let expected = LaunchError::Incomplete { launcher: Launcher::Torchrun, present: "RANK", missing };
            assert_eq!(launch(&variables), Err(expected));
        }
        let only_pmi = launch(&[("PMI_RANK", "0"), ("PMI_SIZE", "1")]);
        let expected =
            LaunchError::Incomplete { launcher: Launcher::Mpich, present: "PMI_RANK", missing: "MPI_LOCALRANKID" };
        assert_eq!(only_pmi, Err(expected.clone()));
        assert_eq!(expected.to_string(), "PMI_RANK of MPICH is set, but not MPI_LOCALRANKID: set both");
    }

    #[test]
    fn invalid_numbers_and_ranks_are_errors() {
        let with = |name: &str, value: &'static str| {
            let variables: Vec<_> =
                TORCH.iter().map(|(key, old)| (*key, if *key == name { value } else { old })).collect();
            launch(&variables)
        };
        for value in ["x", "-1", "1.5", "4294967296"] {
            let expected = LaunchError::Malformed { variable: "RANK", value: value.to_owned(), expected: "a number" };
            assert_eq!(with("RANK", value), Err(expected));
        }
        assert!(matches!(with("RANK", "8"), Err(LaunchError::OutOfRange { rank: 8, ranks: 8, .. })));
        assert!(matches!(with("LOCAL_RANK", "4"), Err(LaunchError::OutOfRange { rank_variable: "LOCAL_RANK", .. })));
        assert!(matches!(with("WORLD_SIZE", "0"), Err(LaunchError::OutOfRange { ranks: 0, .. })));
    }

    #[test]
    fn slurms_lists_are_counted_by_machine() {
        let tasks = |list, node| tasks_of_node(list, node);
        assert_eq!([0, 1, 2].map(|node| tasks("4(x2),3", node)), [Some(4), Some(4), Some(3)]);
        assert_eq!(tasks("4(x2),3", 3), None);
        assert_eq!(tasks("8", 0), Some(8));
        for wrong in ["", "x", "4(x", "4(xy)", "4(x2"] {
            assert_eq!(tasks(wrong, 0), None, "{wrong}");
        }
    }
}
