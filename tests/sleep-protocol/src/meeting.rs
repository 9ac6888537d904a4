//! A collective: every rank of a communicator comes with something to say, and hears what all said once all have come.
//!
//! Ranks hear it one by one: a communicator may end on one of them when others have heard already. This is why no protocol can
//! make all ranks know the same at the same time, and what the rules for failures are about.

use crate::job::RANKS_MAX;
use crate::step::{Phase, Segment};
use std::ops::Range;

/// What a rank says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// In [`Step::Agree`](crate::Step::Agree).
    Agree {
        /// The number of its op.
        op: u8,
        /// What the pool is on it.
        phase: Phase,
        /// In a sync, its windows on the communicator as bits.
        windows: u8,
    },
    /// In [`Step::Decide`](crate::Step::Decide).
    Decide {
        /// Whether it could.
        could: bool,
    },
    /// `ncclCommWindowRegister`.
    Register {
        /// Of this segment.
        segment: Segment,
    },
    /// In [`Step::Check`](crate::Step::Check).
    Check {
        /// The communicators that it lost on the way, as bits.
        lost: u8,
        /// Whether its pool has failed.
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
    /// What the ranks that have come say.
    pub came: [Option<Call>; RANKS_MAX],
    /// The ranks that have heard the others.
    pub heard: [bool; RANKS_MAX],
}

impl Meeting {
    /// Whether those of these ranks who have come are in the same collective.
    pub fn is_one_collective(&self, ranks: impl Iterator<Item = usize>) -> bool {
        let mut calls = ranks.filter_map(|rank| self.came[rank]);
        let Some(first) = calls.next() else { return true };
        calls.all(|call| call.is_same_collective(first))
    }
}

/// The collectives of one communicator that are under way: at most two, since the one after the next cannot be done before all
/// ranks have come to the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Meetings([Meeting; 2]);

impl Meetings {
    /// The collectives, the earlier one first.
    pub fn iter(&self) -> impl Iterator<Item = &Meeting> {
        self.0.iter()
    }

    /// A rank comes to its next collective.
    ///
    /// # Panics
    /// When it has come to two that are not over.
    pub fn come(&mut self, rank: usize, call: Call) {
        let next = self.0.iter_mut().find(|meeting| meeting.came[rank].is_none());
        next.expect("at most two are under way").came[rank] = Some(call);
    }

    /// The collective that this rank waits in.
    fn of(&self, rank: usize) -> Option<usize> {
        self.0.iter().position(|meeting| meeting.came[rank].is_some() && !meeting.heard[rank])
    }

    /// Whether the collective that this rank waits in is done: all these ranks have come to it, and to no other.
    pub fn is_complete(&self, rank: usize, mut members: Range<usize>) -> bool {
        self.of(rank).map(|at| self.0[at]).is_some_and(|meeting| {
            meeting.is_one_collective(members.clone()) && members.all(|member| meeting.came[member].is_some())
        })
    }

    /// This rank hears what all said.
    ///
    /// # Panics
    /// When it waits in none.
    pub fn hear(&mut self, rank: usize) -> impl Iterator<Item = Call> + use<> {
        let at = self.of(rank).expect("it waits in one");
        self.0[at].heard[rank] = true;
        self.0[at].came.into_iter().flatten()
    }

    /// Forgets collectives that nobody will hear any more.
    pub fn forget(&mut self, is_over_for: impl Fn(usize) -> bool) {
        while self.0[0] != Meeting::default() && (0..RANKS_MAX).all(|rank| self.0[0].heard[rank] || is_over_for(rank)) {
            self.0 = [self.0[1], Meeting::default()];
        }
    }
}
