//! A model of the protocol by which the ranks of a job put a pool to sleep and wake it in place, for exhaustive
//! checking. `docs/sleep-protocol.md` describes the protocol; this crate encodes it for [`stateright`].
//!
//! The model checker starts with the initial [`State`] of a [`Job`] and applies every possible [`Action`]: a rank takes
//! its next step, a collective completes, a rank dies, a deadline expires. It repeats this for every new state until it
//! has explored all of them, and evaluates every [property](properties) in each state. A property that holds therefore
//! holds for every order of events. For a property that does not hold, the checker gives a [`story`]: a list of actions
//! that violates it.
//!
//! | file | contents |
//! |---|---|
//! | `step.rs` | the ops, their steps and their outcomes, in the terms that the registrar uses |
//! | `rank.rs` | the state of one rank: its memory, its windows, its communicators |
//! | `meeting.rs` | a collective, which completes when all ranks have joined |
//! | `protocol.rs` | the actions of a rank in each step, which form the protocol |
//! | `job.rs` | the number of ranks, the communicators, the program, the possible faults |
//! | `model.rs` | the possible next actions: steps and faults |
//! | `properties.rs` | the properties that must hold |
//! | `flaw.rs` | deliberate flaws in the protocol, each of which must be found |
//!
//! The model omits bytes, addresses and time. A deadline may expire whenever a rank waits, even if all others are about
//! to arrive, which covers ranks of any speed. A stopped process never resumes. Segments are mapped and unmapped
//! together, because no other rank can observe them individually.

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

/// Formats a run as text, with one line per action.
pub fn story(run: stateright::Path<State, Action>) -> String {
    let line = |(state, action): (State, Option<Action>)| {
        let action = action?;
        let rank = &state.ranks[action.rank()];
        Some(format!("{action:?}: op {}, {:?}, {:?}, memory {}\n", rank.op, rank.step, rank.phase, rank.memory))
    };
    run.into_vec().into_iter().filter_map(line).collect()
}
