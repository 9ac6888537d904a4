//! The messages between ranks and their job. Ranks in the job's process pass them directly; other ranks send them as lines of JSON.

use serde::{Deserialize, Serialize};
use std::ffi::c_int;

/// A part of the memory file of a rank's process: offset and length in bytes.
pub type Extent = (u64, u64);

/// The kind of a collective.
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

/// The arguments that must be equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signature {
    /// The call.
    pub kind: Kind,
    /// Number of elements.
    pub count: usize,
    /// `ncclDataType_t`.
    pub data_type: c_int,
    /// `ncclRedOp_t`; 0 if there is none.
    pub op: c_int,
    /// 0 if there is none.
    pub root: c_int,
}

/// A position in a window, as seen by the rank that uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowPlace {
    /// The number of the registration within the job.
    pub round: u64,
    /// Offset of the window in the symmetric address space.
    pub space_offset: u64,
    /// Offset from the start of the memory.
    pub offset: u64,
}

/// One rank's part of a collective.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Collective {
    /// The call and its arguments.
    pub signature: Signature,
    /// The memory read; `None` if there is none.
    pub send: Option<Vec<Extent>>,
    /// The memory written; `None` if there is none.
    pub receive: Option<Vec<Extent>>,
    /// The positions of the buffers in windows, if a symmetric kernel is used.
    pub symmetric: Option<(WindowPlace, WindowPlace)>,
}

/// A send or a receive.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Transfer {
    /// The other rank.
    pub peer: usize,
    /// `true` for a send.
    pub is_send: bool,
    /// Number of bytes.
    pub bytes: u64,
    /// The memory.
    pub extents: Option<Vec<Extent>>,
    /// `true` once it has happened.
    #[serde(default)]
    pub is_done: bool,
}

/// Work of one rank on its device.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Work {
    /// A collective, in which all ranks take part.
    Collective(Collective),
    /// The sends and receives of one group.
    Transfers(Vec<Transfer>),
}

/// A host step that all ranks of a job take together.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Round {
    /// Registers a window.
    Window {
        /// The memory that NCCL maps.
        memory: Vec<Extent>,
        /// The size of the window in bytes.
        size: u64,
        /// Its flags.
        flags: c_int,
    },
    /// Splits the communicator.
    Split {
        /// -1 if this rank is in no part.
        color: c_int,
        /// Order within the part.
        key: c_int,
        /// The rank's new communicator.
        member: u64,
    },
    /// Creates a communicator without some ranks, which do not take this step.
    Shrink {
        /// The ranks that do not take part, in order.
        excluded: Vec<usize>,
        /// The rank's new communicator.
        member: u64,
    },
    /// Creates a communicator with more ranks.
    Grow {
        /// The unique id, on the rank that created it.
        id: Option<Vec<u8>>,
        /// Number of ranks of the new communicator.
        ranks: usize,
    },
    /// Compares arguments (`NCCL_CHECK_MODE=DEBUG_GLOBAL`).
    Check {
        /// The call.
        signature: Signature,
        /// Positions of the call's buffers in windows.
        places: (Option<WindowPlace>, Option<WindowPlace>),
    },
    /// Waits for all ranks.
    Meet,
}

/// A message from a rank to its job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ToJob {
    /// The rank's next work has reached the front of its stream.
    Arrived {
        /// The stub's number of the work.
        instance: u64,
        /// The work.
        work: Work,
    },
    /// The rank has reached its next host step.
    Round {
        /// The rank's number of the step.
        ticket: u64,
        /// The step.
        round: Round,
    },
    /// The rank no longer maps the window's memory.
    Drop {
        /// The number of the registration.
        round: u64,
    },
    /// The rank's communicator was revoked, which cancels its pending work.
    Withdraw,
    /// The rank's communicator has ended.
    Leave,
    /// The rank's process or thread has ended.
    Die,
}

/// A message from a job to a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ToRank {
    /// All ranks have joined.
    Joined {
        /// The job's number.
        job: u64,
        /// The rank within it.
        rank: usize,
        /// Number of ranks.
        ranks: usize,
    },
    /// The job cannot be created.
    Refused {
        /// `ncclResult_t`.
        code: c_int,
    },
    /// Work has taken effect.
    Done {
        /// See [`ToJob::Arrived`].
        instance: u64,
    },
    /// A host step has completed.
    Finished {
        /// See [`ToJob::Round`].
        ticket: u64,
        /// Number of the step within the job.
        round: u64,
        /// `ncclResult_t`.
        code: c_int,
    },
    /// All ranks of a communicator that grows have met: each joins the new one.
    Grown {
        /// See [`ToJob::Round`].
        ticket: u64,
        /// The unique id of the new communicator.
        id: Vec<u8>,
        /// Its number of ranks.
        ranks: usize,
    },
    /// No rank maps the memory of the registration any longer.
    Free {
        /// The number of the registration.
        round: u64,
    },
    /// Another rank has failed.
    Failed {
        /// `ncclResult_t`.
        code: c_int,
    },
}

/// A request to join a job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Join {
    /// The unique id.
    pub id: Vec<u8>,
    /// The rank within the job.
    pub rank: usize,
    /// Number of ranks.
    pub ranks: usize,
    /// Rank in the first communicator, from which this one may be split.
    pub world: usize,
    /// Device of the rank.
    pub device: c_int,
    /// Process of the rank.
    pub process: u32,
    /// Descriptor of the process's memory file.
    pub file: c_int,
    /// The rank's communicator.
    pub member: u64,
}
