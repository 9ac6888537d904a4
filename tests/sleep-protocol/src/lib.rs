//! The protocol by which the ranks of a job put a pool to sleep and wake it in place, as a model that a machine checks.
//! `docs/sleep-protocol.md` is the protocol for readers; this is the same for [`stateright`].
//!
//! A model checker does what a tester with endless patience would do. It begins with the first [`State`] of a [`Job`], takes
//! every [`Action`] that is possible there (a rank takes its next step, a message arrives, a rank dies, a deadline passes), and
//! goes on from every state that it comes to, until it has seen all of them. In each it asks every [property](properties). So what
//! it finds to hold holds for every order of things, and for a property that does not hold it gives a [`story`]: a list of actions
//! that breaks it.
//!
//! | file | |
//! |---|---|
//! | `step.rs` | the ops, their steps and how they end: the words that the registrar's code takes over |
//! | `rank.rs` | what one rank has: its memory, its windows, its communicators |
//! | `meeting.rs` | a collective: done when all ranks have come |
//! | `protocol.rs` | what a rank does in each step. This is the protocol |
//! | `job.rs` | how many ranks, which communicators, what the program does, what may go wrong |
//! | `model.rs` | what can happen next: steps and faults |
//! | `properties.rs` | what must hold |
//! | `flaw.rs` | ways to get the protocol wrong, each of which must be found |
//!
//! What it leaves out: bytes, addresses and time. A deadline may pass at any moment at which a rank waits, also when all others
//! were about to come; that covers ranks of any speed. A process that stops does so for good. Segments are mapped and unmapped
//! together, since no other rank sees them one by one.

pub mod flaw;
pub mod job;
pub mod meeting;
pub mod model;
pub mod properties;
pub mod protocol;
pub mod rank;
pub mod step;

pub use flaw::Flaw;
pub use job::{Faults, Job};
pub use model::{Action, State};
pub use step::{Op, Outcome, Phase, Step};

/// A run as text: who did what, where.
pub fn story(run: stateright::Path<State, Action>) -> String {
    let line = |(state, action): (State, Option<Action>)| {
        let action = action?;
        let rank = &state.ranks[action.rank()];
        Some(format!("{action:?}: op {}, {:?}, {:?}, memory {}\n", rank.op, rank.step, rank.phase, rank.memory))
    };
    run.into_vec().into_iter().filter_map(line).collect()
}
