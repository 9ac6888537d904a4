//! What ranks and their job tell each other. Ranks of the job's own process call; others send these as lines of JSON.

use serde::{Deserialize, Serialize};
use std::ffi::c_int;

/// A part of the memory file of the rank's process: offset and length in bytes.
pub type Extent = (u64, u64);

/// Which collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "NCCL's names")]
pub enum Kind {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    Reduce,
    AllToAll,
    Gather,
    Scatter,
}

/// What must be the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signature {
    /// The call.
    pub kind: Kind,
    /// Its count.
    pub count: usize,
    /// `ncclDataType_t`.
    pub data_type: c_int,
    /// `ncclRedOp_t`; 0 where there is none.
    pub op: c_int,
    /// 0 where there is none.
    pub root: c_int,
}

/// A place in a window, as the rank that asks sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowPlace {
    /// Which registration, by number within the job.
    pub round: u64,
    /// Where the window lies in the symmetric address space.
    pub space_offset: u64,
    /// From the start of the memory.
    pub offset: u64,
}

/// One rank's part of a collective.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Collective {
    /// What is called.
    pub signature: Signature,
    /// The memory read; `None`: there is none.
    pub send: Option<Vec<Extent>>,
    /// The memory written; `None`: there is none.
    pub receive: Option<Vec<Extent>>,
    /// Where the buffers lie in windows, if a symmetric kernel is used.
    pub symmetric: Option<(WindowPlace, WindowPlace)>,
}

/// A send or a receive.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Transfer {
    /// To or from whom.
    pub peer: usize,
    /// To.
    pub is_send: bool,
    /// How much.
    pub bytes: u64,
    /// The memory.
    pub extents: Option<Vec<Extent>>,
    /// Whether it happened.
    #[serde(default)]
    pub is_done: bool,
}

/// Work of one rank on its device.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Work {
    /// All ranks take part.
    Collective(Collective),
    /// The sends and receives of one group.
    Transfers(Vec<Transfer>),
}

/// What all ranks of a job do on the host together.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Round {
    /// Registers a window.
    Window {
        /// The memory that NCCL maps.
        memory: Vec<Extent>,
        /// The size of the window in bytes.
        size: u64,
    },
    /// Splits the communicator.
    Split {
        /// -1: this rank is in no part.
        color: c_int,
        /// Order within the part.
        key: c_int,
        /// The rank's new communicator.
        member: u64,
    },
    /// Compares arguments (`NCCL_CHECK_MODE=DEBUG_GLOBAL`).
    Check {
        /// The call.
        signature: Signature,
        /// Where its buffers lie in windows.
        places: (Option<WindowPlace>, Option<WindowPlace>),
    },
    /// Nothing but that all came.
    Meet,
}

/// From a rank to its job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ToJob {
    /// The rank's next work is at the front of its stream.
    Arrived {
        /// The stub's number for it.
        instance: u64,
        /// What it is.
        work: Work,
    },
    /// The rank's next common step on the host.
    Round {
        /// The rank's number for it.
        ticket: u64,
        /// What it is.
        round: Round,
    },
    /// The rank maps the window's memory no longer.
    Drop {
        /// Which registration.
        round: u64,
    },
    /// The rank's communicator was revoked: it does nothing of what it had begun.
    Withdraw,
    /// The rank's communicator is gone.
    Leave,
    /// The rank's process or thread is gone.
    Die,
}

/// From a job to a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ToRank {
    /// All ranks are there.
    Joined {
        /// The job's number.
        job: u64,
        /// The rank within it.
        rank: usize,
        /// How many there are.
        ranks: usize,
    },
    /// Or not.
    Refused {
        /// `ncclResult_t`.
        code: c_int,
    },
    /// Work took effect.
    Done {
        /// See [`ToJob::Arrived`].
        instance: u64,
    },
    /// A common step is over.
    Finished {
        /// See [`ToJob::Round`].
        ticket: u64,
        /// Its number within the job.
        round: u64,
        /// `ncclResult_t`.
        code: c_int,
    },
    /// No rank maps the memory of that registration any more.
    Free {
        /// Which.
        round: u64,
    },
    /// Something is wrong with another rank.
    Failed {
        /// `ncclResult_t`.
        code: c_int,
    },
}

/// Who wants to join a job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Join {
    /// The unique id.
    pub id: Vec<u8>,
    /// The rank within the job.
    pub rank: usize,
    /// How many there are.
    pub ranks: usize,
    /// Its rank in the first communicator, which this one may be a part of.
    pub world: usize,
    /// Its device.
    pub device: c_int,
    /// Its process.
    pub process: u32,
    /// The memory file of that process: descriptor.
    pub file: c_int,
    /// The rank's communicator.
    pub member: u64,
}
