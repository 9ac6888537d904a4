//! Which rank this process is, as its launcher says.

use std::fmt;
use thiserror::Error;

/// This process's place in its job.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Launch {
    /// This process's number, from 0.
    pub rank: u32,
    /// Number of processes.
    pub ranks: u32,
    /// This process's number among those of its machine, from 0: the usual choice of a device.
    pub local_rank: u32,
    /// Number of processes on this machine.
    pub local_ranks: u32,
    /// Who said so.
    pub launcher: Launcher,
    /// What tells this start of this job from all others, as far as the launcher gives it.
    pub job: String,
}

/// A program that starts ranks, known by the variables it sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Launcher {
    /// torchrun, and whatever sets `RANK` and `WORLD_SIZE`.
    Torchrun,
    /// Open MPI's mpirun.
    OpenMpi,
    /// MPICH's mpiexec, and those that follow it: Hydra, Intel MPI, MVAPICH.
    Mpich,
    /// Slurm's srun.
    Slurm,
}

/// The environment does not say which rank this is.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// No launcher's variables are set.
    #[error(
        "this process was not started as a rank: start it with `torchrun --no-python`, mpirun, mpiexec or srun, or set RANK, \
         WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE"
    )]
    NotLaunched,
    /// A launcher's variable is missing beside others of its.
    #[error("{launcher} set {present} but not {missing}: set both")]
    Incomplete {
        /// The launcher.
        launcher: Launcher,
        /// A variable that is set.
        present: &'static str,
        /// The variable that is missing.
        missing: &'static str,
    },
    /// A variable does not hold a number.
    #[error("{variable} is \"{value}\", not a number")]
    NotANumber {
        /// The variable.
        variable: &'static str,
        /// What it holds.
        value: String,
    },
    /// A rank is not below the number of ranks.
    #[error("{rank_variable} is {rank}, but {ranks_variable} is {ranks}")]
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

impl Launch {
    /// From this process's environment.
    ///
    /// Launchers are asked in this order: torchrun, Open MPI, MPICH, Slurm; the first whose rank is set answers. (A program that
    /// sets `RANK` and `WORLD_SIZE` under mpirun means them.)
    ///
    /// # Errors
    /// When no launcher's variables are set, or they do not fit together.
    pub fn from_env() -> Result<Self, LaunchError> {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    /// As [`from_env`](Self::from_env), from other variables.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self, LaunchError> {
        let _ = variable;
        todo!()
    }
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Launcher::Torchrun => "torchrun",
            Launcher::OpenMpi => "Open MPI",
            Launcher::Mpich => "MPICH",
            Launcher::Slurm => "Slurm",
        })
    }
}
