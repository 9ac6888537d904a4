//! A collective: every rank of a communicator comes with something to say, and hears what all said once all have come.
//!
//! Ranks hear it one by one: a communicator may end on one of them when others have heard already. This is why no protocol can
//! make all ranks know the same at the same time, and what the rules for failures are about.

use crate::job::RANKS_MAX;
use crate::step::{Phase, Segment};

/// What a rank says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// The number of the op, the pool's state, and the windows on the communicator as bits.
    Agree { op: u8, phase: Phase, windows: u8 },
    /// Whether it could.
    Decide { could: bool },
    /// `ncclCommWindowRegister`.
    Register { segment: Segment },
    /// The communicators that it lost, as bits.
    Check { lost: u8 },
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
    /// Whether those who came are in the same collective.
    pub fn is_one_collective(&self) -> bool {
        let mut calls = self.came.iter().flatten();
        let Some(first) = calls.next() else { return true };
        calls.all(|call| match (first, call) {
            (Call::Register { segment: one }, Call::Register { segment: other }) => one == other,
            (one, other) => std::mem::discriminant(one) == std::mem::discriminant(other),
        })
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

    /// Whether all these ranks have come to the collective that this rank waits in.
    pub fn is_complete(&self, rank: usize, mut members: impl Iterator<Item = usize>) -> bool {
        self.of(rank).is_some_and(|at| members.all(|member| self.0[at].came[member].is_some()))
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
