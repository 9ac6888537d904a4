//! A collective: every rank of a communicator joins with a message, and receives all messages once all ranks have
//! joined.
//!
//! Ranks receive the messages one by one: a communicator may end on one rank after others have already received them.
//! No protocol can therefore give all ranks the same knowledge at the same time. The rules for failures account for
//! this.

use crate::job::RANKS_MAX;
use crate::step::{Phase, Segment};
use std::ops::Range;

/// The message of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// In [`Step::Agree`](crate::Step::Agree).
    Agree {
        /// Number of the rank's op.
        op: u8,
        /// Ops of the rank's history beyond those of the program.
        extra_ops: u8,
        /// Phase of the rank's pool.
        phase: Phase,
        /// In a sync, the rank's windows on the communicator as a bit set.
        windows: u8,
    },
    /// In [`Step::Decide`](crate::Step::Decide) and [`Step::DecideAsleep`](crate::Step::DecideAsleep).
    Decide {
        /// Set if the rank succeeded.
        could: bool,
    },
    /// `ncclCommWindowRegister`.
    Register {
        /// The segment to register.
        segment: Segment,
    },
    /// `ncclCommSuspend`.
    Suspend,
    /// `ncclCommResume`.
    Resume,
    /// In [`Step::Check`](crate::Step::Check).
    Check {
        /// Communicators that the rank lost during registration, as a bit set.
        lost: u8,
        /// Set if the rank's pool has failed.
        failed: bool,
    },
}

impl Call {
    fn is_same_collective(self, other: Call) -> bool {
        match (self, other) {
            (Call::Register { segment: one }, Call::Register { segment: other }) => one == other,
            (one, other) => std::mem::discriminant(&one) == std::mem::discriminant(&other),
        }
    }
}

/// One collective.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Meeting {
    /// Messages of the ranks that have joined, by rank.
    pub came: [Option<Call>; RANKS_MAX],
    /// Ranks that have received the messages.
    pub heard: [bool; RANKS_MAX],
}

impl Meeting {
    /// Returns `true` if all of these ranks that have joined called the same collective.
    pub fn is_one_collective(&self, ranks: impl Iterator<Item = usize>) -> bool {
        let mut calls = ranks.filter_map(|rank| self.came[rank]);
        let Some(first) = calls.next() else { return true };
        calls.all(|call| call.is_same_collective(first))
    }
}

/// The collectives of one communicator that are in progress. There are at most two, because a third cannot begin before
/// all ranks have joined the second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Meetings([Meeting; 2]);

impl Meetings {
    /// Returns the collectives, the earlier one first.
    pub fn iter(&self) -> impl Iterator<Item = &Meeting> {
        self.0.iter()
    }

    /// Joins the next collective of a rank.
    ///
    /// # Panics
    /// Panics if the rank has joined two collectives that are still in progress.
    pub fn come(&mut self, rank: usize, call: Call) {
        let next = self.0.iter_mut().find(|meeting| meeting.came[rank].is_none());
        next.expect("at most two collectives are in progress").came[rank] = Some(call);
    }

    /// Returns the index of the collective that this rank waits in.
    fn of(&self, rank: usize) -> Option<usize> {
        self.0.iter().position(|meeting| meeting.came[rank].is_some() && !meeting.heard[rank])
    }

    /// Returns `true` if the collective that this rank waits in is complete: all members have joined it, and no other
    /// one.
    pub fn is_complete(&self, rank: usize, mut members: Range<usize>) -> bool {
        self.of(rank).map(|at| self.0[at]).is_some_and(|meeting| {
            meeting.is_one_collective(members.clone()) && members.all(|member| meeting.came[member].is_some())
        })
    }

    /// Marks the messages as received by this rank and returns them.
    ///
    /// # Panics
    /// Panics if the rank does not wait in a collective.
    pub fn hear(&mut self, rank: usize) -> impl Iterator<Item = Call> + use<> {
        let at = self.of(rank).expect("the rank waits in a collective");
        self.0[at].heard[rank] = true;
        self.0[at].came.into_iter().flatten()
    }

    /// Removes collectives from which no rank will receive messages anymore.
    pub fn forget(&mut self, is_over_for: impl Fn(usize) -> bool) {
        while self.0[0] != Meeting::default() && (0..RANKS_MAX).all(|rank| self.0[0].heard[rank] || is_over_for(rank)) {
            self.0 = [self.0[1], Meeting::default()];
        }
    }
}
