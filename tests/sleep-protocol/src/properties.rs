//! The properties of the protocol: those that hold always, at the end of a run, or at least in some run.
//!
//! The *sometimes* properties guard against a model in which nothing happens: a property that holds for a job that
//! never wakes proves nothing.

use crate::job::{Faults, Job};
use crate::model::State;
use crate::rank::{Health, Life, Rank, Side};
use crate::step::{Op, Outcome, Phase, Step};
use stateright::Property;

/// A window that NCCL may use refers to the memory that currently backs the pool's addresses.
pub const MAPPED: &str = "no window outlives its memory";
/// While a kernel uses windows, every living rank of its communicator has the memory that the windows refer to.
pub const USED: &str = "no kernel uses released memory";
/// Ranks that meet on a communicator call the same collective for the same segment.
pub const MET: &str = "no rank registers what another does not";
/// A communicator that two ranks can use has the same windows on both, once both have completed the same ops.
pub const EQUAL: &str = "the ranks have the same windows between ops";
/// The windows of a communicator are deregistered and registered in order, from the first segment on.
pub const ORDER: &str = "windows are registered and deregistered in log order";
/// If a rank reports that it cannot wake, every other rank receives the report before it can be awake.
pub const ALONE: &str = "no rank is awake while another one reports that it cannot wake";
/// Ranks that have completed the same ops and can still communicate are both awake, both asleep, or have just received
/// the same error.
pub const TOGETHER: &str = "no rank continues alone";
/// When a sleep has succeeded on one rank, no rank has a window: NCCL holds memory until all ranks have deregistered
/// it.
pub const BACK: &str = "memory is back on the device when a sleep has succeeded";
/// Between ops, a pool either has memory and all or none of the windows of each communicator, or has neither, or has
/// failed.
pub const WHOLE: &str = "a pool is awake, asleep or failed, and in no state in between";
/// When a wake has succeeded, a communicator that it lost on one rank has ended on all ranks.
pub const LOST: &str = "a communicator that a wake lost on one rank is lost on all";
/// All ranks are awake after a sleep and a wake over a new communicator that does not break, regardless of earlier
/// failures.
pub const HEALS: &str = "a new communicator repairs what broke";
/// A suspended communicator has neither windows nor kernels, and carries no message.
pub const QUIET: &str = "nothing uses a suspended communicator";
/// If nothing but refusals happens, and the program wakes more often than it is refused, all ranks are awake at the end.
pub const RECOVERS: &str = "a rank that makes room alone wakes with the others";
/// Every running rank reaches the end of its program.
pub const ENDS: &str = "every op ends";

/// All ranks are awake with new memory and windows on all communicators.
pub const IN_PLACE: &str = "all wake in place";
/// A device is out of memory, but all ranks wake in the end.
pub const RETRIED: &str = "a refused wake succeeds at another attempt";
/// All ranks have suspended all communicators.
pub const SUSPENDED: &str = "all communicators are suspended";
/// A communicator dies, and all ranks wake with the other communicator.
pub const FEWER: &str = "a pool wakes without a communicator that died";
/// A wake breaks, and one rank is awake and another asleep.
pub const SPLIT: &str = "a broken wake succeeds on one rank and not on another";
/// A rank cannot release its memory, because a lost communicator holds it.
pub const FAILED: &str = "a pool fails";

/// All properties that must never be broken.
pub const KEPT: [&str; 14] =
    [MAPPED, USED, MET, EQUAL, ORDER, ALONE, TOGETHER, BACK, WHOLE, LOST, HEALS, QUIET, RECOVERS, ENDS];

/// Returns all properties.
pub fn all() -> Vec<Property<Job>> {
    vec![
        Property::always(MAPPED, |_, state| living(state).all(windows_are_mapped)),
        Property::always(USED, memory_in_use_is_there),
        Property::always(MET, ranks_meet_in_one_collective),
        Property::always(EQUAL, |job, state| pairs(job, state).all(|(one, other)| windows_are_equal(job, one, other))),
        Property::always(ORDER, |job, state| living(state).all(|rank| windows_are_in_order(job, rank))),
        Property::always(ALONE, |job, state| {
            !(living(state).any(is_awake) && living(state).any(|rank| reports_failure(job, rank)))
        }),
        Property::always(TOGETHER, |job, state| pairs(job, state).all(|(one, other)| are_together(job, one, other))),
        Property::always(BACK, |job, state| {
            !living(state).any(|rank| has_slept_well(job, rank)) || living(state).all(has_no_window)
        }),
        Property::always(WHOLE, |job, state| {
            living(state).all(|rank| !job.is_between_ops(rank) || is_whole(job, rank))
        }),
        Property::always(LOST, |job, state| {
            pairs(job, state).all(|(one, other)| what_is_lost_is_lost(job, one, other))
        }),
        Property::always(HEALS, |job, state| !should_be_healed(job, state) || are_all_awake(job, state, &[1])),
        Property::always(QUIET, |job, state| living(state).all(|rank| suspended_is_quiet(job, rank))),
        Property::always(RECOVERS, |job, state| !should_recover(job, state) || are_all_awake(job, state, &[0, 1])),
        // Once true, the property stays true, and no run revisits a state (`State::progress`), so the checker's answer is
        // exact.
        Property::eventually(ENDS, |_, state| running(state).all(|rank| rank.step == Step::Done)),
        Property::sometimes(IN_PLACE, |job, state| are_all_awake(job, state, &[0, 1])),
        Property::sometimes(RETRIED, |job: &Job, state: &State| {
            state.left.refusals < job.faults.refusals && are_all_awake(job, state, &[0, 1])
        }),
        Property::sometimes(SUSPENDED, |job: &Job, state: &State| {
            state.ranks[..job.ranks].iter().enumerate().all(|(number, rank)| {
                (0..job.comms.len()).all(|comm| !job.is_member(comm, number) || rank.sides[comm].is_suspended)
            })
        }),
        Property::sometimes(FEWER, |job, state| {
            are_all_awake_without(job, state, 0) || are_all_awake_without(job, state, 1)
        }),
        Property::sometimes(SPLIT, |job, state| {
            pairs(job, state).any(|(one, other)| {
                (one.phase, one.last, other.phase) == (Phase::Awake, Outcome::Done, Phase::Awake)
                    && other.last == Outcome::Broken
            })
        }),
        Property::sometimes(FAILED, |_, state| living(state).any(|rank| rank.phase == Phase::Held)),
    ]
}

/// Returns the ranks whose process exists, stopped or not, so that their kernels may be running.
fn living(state: &State) -> impl Iterator<Item = &Rank> {
    state.ranks.iter().filter(|rank| rank.life != Life::Dead)
}

fn running(state: &State) -> impl Iterator<Item = &Rank> {
    state.ranks.iter().filter(|rank| rank.life == Life::Running)
}

/// Returns the pairs of ranks that have completed the same ops and are not inside another op, in both orders.
fn pairs<'a>(job: &'a Job, state: &'a State) -> impl Iterator<Item = (&'a Rank, &'a Rank)> {
    let between = || state.ranks.iter().filter(|rank| job.is_between_ops(rank));
    between().flat_map(move |one| between().map(move |other| (one, other))).filter(|(one, other)| one.op == other.op)
}

fn windows_are_mapped(rank: &Rank) -> bool {
    let held = rank.sides.iter().filter(|side| side.health != Health::Aborted);
    held.flat_map(|side| side.windows).all(|window| window == 0 || window == rank.memory)
}

fn memory_in_use_is_there(job: &Job, state: &State) -> bool {
    living(state).all(|rank| {
        let busy = rank.sides.iter().enumerate().filter(|(_, side)| side.is_busy);
        busy.into_iter().all(|(comm, side)| {
            let others = job.members(comm).map(|member| &state.ranks[member]).filter(|it| it.life != Life::Dead);
            others.into_iter().all(|other| other.memory == side.windows[0])
        })
    })
}

fn ranks_meet_in_one_collective(job: &Job, state: &State) -> bool {
    (0..job.comms.len()).all(|comm| {
        let can_talk = |rank: &usize| state.ranks[*rank].sides[comm].is_ready();
        state.meetings[comm].iter().all(|meeting| meeting.is_one_collective(job.members(comm).filter(can_talk)))
    })
}

fn windows_are_equal(job: &Job, one: &Rank, other: &Rank) -> bool {
    (0..job.comms.len()).all(|comm| {
        let (one, other) = (one.sides[comm], other.sides[comm]);
        let are_equal = (one.windows, one.is_suspended) == (other.windows, other.is_suspended);
        !one.is_ready() || !other.is_ready() || are_equal
    })
}

fn windows_are_in_order(job: &Job, rank: &Rank) -> bool {
    rank.ready().all(|(_, side)| {
        let has_window = |segment: usize| side.windows[segment] != 0;
        (1..job.segments).all(|segment| match rank.step {
            Step::Deregister(..) | Step::Unmap => has_window(segment) || !has_window(segment - 1),
            _ => has_window(segment - 1) || !has_window(segment),
        })
    })
}

fn is_awake(rank: &Rank) -> bool {
    rank.phase == Phase::Awake
}

fn reports_failure(job: &Job, rank: &Rank) -> bool {
    let is_reporting = rank.step == Step::Decide && rank.is_waiting && !rank.could;
    let has_reported = job.is_between_ops(rank) && rank.last == Outcome::Refused { mine: true };
    rank.phase == Phase::Asleep && (is_reporting || has_reported)
}

fn are_together(job: &Job, one: &Rank, other: &Rank) -> bool {
    let is_used = |comm: usize| job.comms[comm].from_op < one.op;
    let can_talk = |comm: usize| one.sides[comm].is_ready() && other.sides[comm].is_ready();
    let are_apart = (one.phase, other.phase) == (Phase::Awake, Phase::Asleep);
    let has_error = |rank: &Rank| matches!(rank.last, Outcome::Differ | Outcome::Refused { .. });
    !are_apart
        || (has_error(one) && has_error(other))
        || !(0..job.comms.len()).any(|comm| is_used(comm) && can_talk(comm))
}

fn has_slept_well(job: &Job, rank: &Rank) -> bool {
    job.is_between_ops(rank) && (rank.phase, rank.last) == (Phase::Asleep, Outcome::Done)
}

fn has_no_window(rank: &Rank) -> bool {
    rank.sides.iter().all(|side| !side.holds_memory())
}

fn is_whole(job: &Job, rank: &Rank) -> bool {
    let windows = |side: &Side| side.windows[..job.segments].iter().filter(|window| **window != 0).count();
    match rank.phase {
        Phase::Awake => rank.memory != 0 && rank.ready().all(|(_, side)| [0, job.segments].contains(&windows(side))),
        Phase::Asleep => rank.memory == 0 && has_no_window(rank),
        Phase::Held => rank.memory != 0 && rank.ready().all(|(_, side)| windows(side) == 0),
    }
}

fn what_is_lost_is_lost(job: &Job, one: &Rank, other: &Rank) -> bool {
    let are_well = one.last == Outcome::Done && other.last == Outcome::Done;
    !are_well || (0..job.comms.len()).all(|comm| one.lost & 1 << comm == 0 || !other.sides[comm].is_ready())
}

fn suspended_is_quiet(job: &Job, rank: &Rank) -> bool {
    rank.sides.iter().enumerate().filter(|(_, side)| side.is_suspended).all(|(comm, side)| {
        let is_talking = rank.is_waiting && job.comm_of(rank) == comm && !matches!(rank.step, Step::Resume(_));
        !side.holds_memory() && !is_talking
    })
}

/// Returns `true` if the program has ended on all ranks, nothing but refusals has happened, and it contains more wakes
/// than refusals.
fn should_recover(job: &Job, state: &State) -> bool {
    let others = |faults: &Faults| Faults { refusals: 0, ..*faults };
    let wakes = job.program.iter().filter(|op| matches!(op, Op::Wake(_))).count();
    let refused = usize::from(job.faults.refusals - state.left.refusals);
    let ends_with_wake = matches!(job.program.last(), Some(Op::Wake(_)));
    !job.has_deadlines
        && others(&state.left) == others(&job.faults)
        && ends_with_wake
        && wakes > refused
        && state.ranks[..job.ranks].iter().all(|rank| rank.step == Step::Done)
}

fn is_registered(job: &Job, rank: &Rank, comm: usize) -> bool {
    let side = rank.sides[comm];
    side.is_ready() && rank.memory > 1 && side.windows[..job.segments].iter().all(|window| *window == rank.memory)
}

/// Returns `true` if all ranks have completed the job and are awake, with new memory and windows on the given
/// communicators.
fn are_all_awake(job: &Job, state: &State, comms: &[usize]) -> bool {
    state.ranks[..job.ranks].iter().enumerate().all(|(number, rank)| {
        let comms = comms.iter().filter(|comm| **comm < job.comms.len());
        let mut comms = comms.filter(|comm| job.is_member(**comm, number));
        rank.life == Life::Running
            && (rank.step, rank.phase, rank.last) == (Step::Done, Phase::Awake, Outcome::Done)
            && comms.all(|comm| is_registered(job, rank, *comm))
    })
}

/// Returns `true` if communicator `comm` has ended on all ranks and all are awake with the other communicator.
fn are_all_awake_without(job: &Job, state: &State, comm: usize) -> bool {
    let is_there = comm < job.comms.len();
    is_there && running(state).all(|rank| !rank.sides[comm].is_ready()) && are_all_awake(job, state, &[1 - comm])
}

/// Returns `true` if the program has ended on all ranks, its second communicator is new and did not break, and no rank
/// lacked memory or time.
fn should_be_healed(job: &Job, state: &State) -> bool {
    let is_new = job.comms.get(1).is_some_and(|comm| comm.from_op > 0) && !job.has_lost;
    let left = |faults: &Faults| (faults.refusals, faults.delays, faults.skips);
    let were_able = left(&state.left) == left(&job.faults);
    let is_through = |rank: &Rank| rank.life == Life::Running && rank.step == Step::Done && rank.sides[1].is_ready();
    is_new && were_able && state.ranks[..job.ranks].iter().all(is_through)
}
