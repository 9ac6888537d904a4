//! The context of a rank: everything in which the rank differs from other ranks that run the same program.

use crate::device::{Call, Delays, Fault, SplitMix64};
use crate::job::schedule::Schedule;
use std::fmt;
use symmalloc_core::AllocationId;

/// The context of one rank. It does not list addresses, raw handles and event timing, because they are drawn from
/// (seed, rank).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankContext {
    /// The rank's number. It does not change when another rank is removed.
    pub rank: u32,
    /// The order in which steps of the rank's threads are interleaved.
    pub schedule: Schedule,
    /// Duration of the work on the rank's device.
    pub delays: Delays,
    /// Maximum number of ticks that pass between two steps.
    pub pace_ticks: u32,
    /// Rate, per million steps, at which the rank asks the driver which fences have completed, and drops these fences.
    pub asks_per_million: u32,
    /// Device memory in bytes; `None` for ample memory.
    pub memory_bytes: Option<u64>,
    /// Driver calls that fail.
    pub faults: Vec<RankFault>,
    /// Rate of private work in separate pools, per million steps.
    pub private_per_million: u32,
    /// Number of syncs after which the rank restarts without having failed; `None` if it does not restart.
    pub restart_at: Option<u32>,
    /// Reaction of the job if the rank's device is lost.
    pub after_loss: AfterLoss,
    /// Deviation of the rank's program from the program of all other ranks. The simulator must detect it.
    pub deviation: Option<Deviation>,
}

/// A driver call that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankFault {
    /// The kind of call; `None` for any kind.
    pub call: Option<Call>,
    /// Ordinal of the call among the calls of its kind, from 0.
    pub ordinal: u64,
    /// The error that the call returns.
    pub fault: Fault,
}

/// The reaction of a job to the loss of a rank's device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum AfterLoss {
    /// The job continues without the rank.
    #[default]
    Leave,
    /// The rank restarts at the next sync.
    Restart,
}

/// A deviation of a rank's program from the program of all other ranks. Only tests of the simulator use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Deviation {
    /// The rank does not free this allocation.
    KeepAllocation {
        /// The allocation.
        id: AllocationId,
    },
    /// The rank requests a different size.
    DifferentSize {
        /// The allocation.
        id: AllocationId,
        /// The size, in bytes.
        size_bytes: u64,
    },
}

impl RankContext {
    /// Creates a quiet context: steps in program order, work that completes immediately, and no faults.
    pub fn quiet(rank: u32) -> Self {
        RankContext {
            rank,
            schedule: Schedule::JobProgram,
            delays: Delays::Immediate,
            pace_ticks: 0,
            asks_per_million: 0,
            memory_bytes: None,
            faults: Vec::new(),
            private_per_million: 0,
            restart_at: None,
            after_loss: AfterLoss::Leave,
            deviation: None,
        }
    }

    /// Creates an adverse context without faults. The context is drawn from (seed, rank).
    pub fn adverse(seed: u64, rank: u32) -> Self {
        let mut random = sequence(seed, Purpose::RankContext, rank.into());
        let mut pick = |choices: u64| random.below(choices) as usize;
        RankContext {
            schedule: Schedule::ALL[pick(4)],
            delays: [Delays::Immediate, Delays::UntilSynchronized, Delays::UpTo { ticks: 40 }, Delays::FromSeed]
                [pick(4)],
            pace_ticks: [0, 0, 3, 200][pick(4)],
            asks_per_million: [0, 10_000, 200_000][pick(3)],
            ..RankContext::quiet(rank)
        }
    }

    /// Returns `true` if the rank may encounter a failed call, a lost device or a deviation.
    pub fn is_faulty(&self) -> bool {
        !self.faults.is_empty() || self.memory_bytes.is_some() || self.deviation.is_some()
    }
}

/// The purpose of a random sequence. Each purpose has a separate sequence, so that no purpose affects another.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Purpose {
    JobPlan,
    Steps,
    RankContext,
    JobFaults,
    Schedule,
    Moments,
    Private,
    Checks,
    Repeats,
    Sleeps,
    Groups,
}

/// Returns the sequence for a purpose under a seed.
pub(crate) fn sequence(seed: u64, purpose: Purpose, of: u64) -> SplitMix64 {
    SplitMix64::new(seed).split(purpose as u64).split(of)
}

impl fmt::Display for RankContext {
    /// Writes the context as one line of a story.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank:{} schedule:{}", self.rank, self.schedule.name())?;
        match self.delays {
            Delays::Immediate => {}
            Delays::UpTo { ticks } => write!(f, " delays:{ticks}")?,
            Delays::UntilSynchronized => f.write_str(" delays:until_synchronized")?,
            _ => f.write_str(" delays:from_seed")?,
        }
        let numbers = [
            ("pace", u64::from(self.pace_ticks)),
            ("asks", self.asks_per_million.into()),
            ("private", self.private_per_million.into()),
            ("memory", self.memory_bytes.unwrap_or(0)),
            ("restart_at", self.restart_at.unwrap_or(0).into()),
        ];
        for (name, number) in numbers.into_iter().filter(|(_, number)| *number > 0) {
            write!(f, " {name}:{number}")?;
        }
        if self.after_loss == AfterLoss::Restart {
            f.write_str(" after_loss:restart")?;
        }
        for RankFault { call, ordinal, fault } in &self.faults {
            write!(f, " fault:{}@{ordinal}={}", call.map_or("any", Call::name), fault_name(*fault))?;
        }
        match self.deviation {
            None => Ok(()),
            Some(Deviation::KeepAllocation { id }) => write!(f, " keeps:{}", id.0),
            Some(Deviation::DifferentSize { id, size_bytes }) => write!(f, " size:{}={size_bytes}", id.0),
        }
    }
}

fn fault_name(fault: Fault) -> &'static str {
    match fault {
        Fault::OutOfMemory => "out_of_memory",
        Fault::DeviceLost => "device_lost",
        _ => "refused",
    }
}

impl std::str::FromStr for RankContext {
    type Err = BadContext;

    /// Parses the output of `Display`.
    fn from_str(text: &str) -> Result<Self, BadContext> {
        let mut read = RankContext::quiet(0);
        for word in text.split_ascii_whitespace() {
            let bad = || BadContext { word: word.into() };
            let (key, value) = word.split_once(':').ok_or_else(bad)?;
            let number = || value.parse::<u64>().map_err(|_| bad());
            let small = || value.parse::<u32>().map_err(|_| bad());
            match key {
                "rank" => read.rank = small()?,
                "schedule" => {
                    read.schedule = Schedule::ALL.into_iter().find(|style| style.name() == value).ok_or_else(bad)?;
                }
                "delays" => {
                    read.delays = match value {
                        "until_synchronized" => Delays::UntilSynchronized,
                        "from_seed" => Delays::FromSeed,
                        _ => Delays::UpTo { ticks: small()? },
                    };
                }
                "pace" => read.pace_ticks = small()?,
                "asks" => read.asks_per_million = small()?,
                "private" => read.private_per_million = small()?,
                "memory" => read.memory_bytes = Some(number()?),
                "restart_at" => read.restart_at = Some(small()?),
                "after_loss" if value == "restart" => read.after_loss = AfterLoss::Restart,
                "fault" => read.faults.push(fault(value).ok_or_else(bad)?),
                "keeps" => read.deviation = Some(Deviation::KeepAllocation { id: AllocationId(number()?) }),
                "size" => {
                    let (id, size) = value.split_once('=').ok_or_else(bad)?;
                    let number = |text: &str| text.parse().map_err(|_| bad());
                    let id = AllocationId(number(id)?);
                    read.deviation = Some(Deviation::DifferentSize { id, size_bytes: number(size)? });
                }
                _ => return Err(bad()),
            }
        }
        Ok(read)
    }
}

/// Parses a fault such as `map@3=refused`.
fn fault(text: &str) -> Option<RankFault> {
    let (call, rest) = text.split_once('@')?;
    let (ordinal, fault) = rest.split_once('=')?;
    let call = match call {
        "any" => None,
        name => Some(Call::ALL.into_iter().find(|call| call.name() == name)?),
    };
    let faults = [Fault::OutOfMemory, Fault::Refused, Fault::DeviceLost];
    let fault = faults.into_iter().find(|known| fault_name(*known) == fault)?;
    Some(RankFault { call, ordinal: ordinal.parse().ok()?, fault })
}

/// A word that is not part of a rank's context.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid word `{word}` in a rank's context: use key:value words such as `rank:3` or `fault:map@1=refused`")]
pub struct BadContext {
    /// The word.
    pub word: Box<str>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::plan::{JobPlan, Size};
    use std::num::NonZeroU32;

    #[test]
    fn a_context_survives_a_round_trip_through_text() {
        let size = Size { ranks: NonZeroU32::new(64).expect("the number should not be zero"), ops: 10 };
        let mut faulty = 0;
        for seed in 0..50 {
            for mut rank in JobPlan::from_seed(seed, &size).ranks {
                faulty += usize::from(rank.is_faulty());
                if rank.rank % 9 == 0 {
                    rank.deviation = Some(Deviation::DifferentSize { id: AllocationId(7), size_bytes: 513 });
                }
                assert_eq!(rank.to_string().parse(), Ok(rank));
            }
        }
        assert!(faulty > 100, "{faulty}");
    }

    #[test]
    fn invalid_words_are_named() {
        for word in ["rank", "rank:x", "delays:soon", "fault:map@1", "fault:none@1=refused", "speed:9"] {
            let error = format!("rank:1 {word} pace:3").parse::<RankContext>().expect_err("the word is invalid");
            assert_eq!(&*error.word, word);
        }
    }
}
