//! `ncclGroupStart` and `ncclGroupEnd`: the calls of a thread that run together at the end of the outermost group.
//!
//! The host steps of all communicators begin before the first wait, so that one thread can run them for several ranks. Windows come before
//! collectives, and the sends and receives of one communicator and stream form one kernel.

use crate::codes::{IN_PROGRESS, INVALID_ARGUMENT, SUCCESS};
use crate::member::{Member, Step};
use crate::messages::{Join, Round};
use crate::options::options;
use crate::registry;
use crate::streams::{self, Kernel, Launch};
use std::cell::RefCell;
use std::ffi::c_int;
use std::mem::take;
use std::sync::Arc;

/// A call that runs at the end of its group.
#[derive(Debug)]
pub enum Action {
    /// Joins a communicator to its job; hangs if `None`.
    Init(Option<Join>),
    /// Begins a host step; hangs without a round.
    Step(Step, Option<Round>),
    /// Launches a kernel on a stream.
    Launch(Launch),
}

#[derive(Debug, Default)]
struct Group {
    depth: u32,
    actions: Vec<(Arc<Member>, Action)>,
    /// The first error of a call in the group.
    error: c_int,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

/// Opens a group, like `ncclGroupStart`.
pub fn start() -> c_int {
    GROUP.with_borrow_mut(|group| group.depth += 1);
    SUCCESS
}

/// Closes a group, like `ncclGroupEnd`.
pub fn end() -> c_int {
    let ended = GROUP.with_borrow_mut(|group| {
        if group.depth == 0 {
            return Err(crate::codes::INVALID_USAGE);
        }
        group.depth -= 1;
        if group.depth > 0 {
            return Err(SUCCESS);
        }
        Ok((take(&mut group.actions), take(&mut group.error)))
    });
    match ended {
        Err(code) => code,
        Ok((_, error)) if error != SUCCESS => error,
        Ok((actions, _)) => run(actions),
    }
}

/// Returns `true` if this thread is in a group.
pub fn is_open() -> bool {
    GROUP.with_borrow(|group| group.depth > 0)
}

/// Records the error of a call in a group, so that the end of the group returns it too.
pub fn note(code: c_int) {
    GROUP.with_borrow_mut(|group| {
        if group.depth > 0 && group.error == SUCCESS && code != IN_PROGRESS {
            group.error = code;
        }
    });
}

/// Runs a call: immediately, or at the end of the group.
pub fn submit(member: Arc<Member>, action: Action) -> c_int {
    if is_open() {
        GROUP.with_borrow_mut(|group| group.actions.push((member, action)));
        return SUCCESS;
    }
    run(vec![(member, action)])
}

/// Returns `true` if the call blocks. A grow is a call on the new communicator.
fn blocks((member, action): &(Arc<Member>, Action)) -> bool {
    match action {
        Action::Step(Step::Grow { child }, _) => child.is_blocking,
        _ => member.is_blocking,
    }
}

fn run(actions: Vec<(Arc<Member>, Action)>) -> c_int {
    let Some(first) = actions.first() else { return SUCCESS };
    let is_blocking = blocks(first);
    if actions.iter().any(|action| blocks(action) != is_blocking) {
        // NCCL's error: "Blocking and nonblocking communicators are not allowed in the same group".
        return INVALID_ARGUMENT;
    }
    let mut joining = Vec::new();
    let mut tickets = Vec::new();
    let mut launches: Vec<(Arc<Member>, Launch)> = Vec::new();
    for (member, action) in actions {
        match action {
            Action::Init(Some(join)) => {
                registry::begin(join);
                joining.push(member);
            }
            Action::Init(None) => joining.push(member),
            Action::Step(step, round) => {
                let child = if let Step::Grow { child } = &step { Some(Arc::clone(child)) } else { None };
                let ticket = member.begin(step, round);
                match child {
                    // The new communicator joins after the ranks of the old one have met.
                    Some(child) => joining.push(child),
                    None => tickets.push((member, ticket)),
                }
            }
            Action::Launch(launch) => fuse(&mut launches, member, launch),
        }
    }
    if !is_blocking {
        for (member, launch) in launches {
            for round in steps_before(&member, &launch) {
                member.begin(Step::Meet, round);
            }
            member.lock().launches.push_back(launch);
        }
        return IN_PROGRESS;
    }
    let joined = joining.iter().map(|member| member.wait_until_joined()).find(|code| *code != SUCCESS);
    let stepped: Vec<c_int> = tickets.into_iter().map(|(member, ticket)| member.wait(ticket)).collect();
    let failed = joined.or_else(|| stepped.into_iter().find(|code| *code != SUCCESS));
    if let Some(code) = failed {
        return code;
    }
    let tickets: Vec<(Arc<Member>, u64)> = launches
        .iter()
        .flat_map(|(member, launch)| {
            let steps = steps_before(member, launch).into_iter();
            steps.map(|round| (Arc::clone(member), member.begin(Step::Meet, round))).collect::<Vec<_>>()
        })
        .collect();
    let stepped: Vec<c_int> = tickets.into_iter().map(|(member, ticket)| member.wait(ticket)).collect();
    if let Some(code) = stepped.into_iter().find(|code| *code != SUCCESS) {
        return code;
    }
    let codes = launches.into_iter().map(|(member, launch)| streams::launch(&member, launch));
    codes.fold(SUCCESS, |first, code| if first == SUCCESS { code } else { first })
}

/// Returns the host steps with the other ranks before the launch of a collective; `None` for a step that hangs.
fn steps_before(member: &Member, launch: &Launch) -> Vec<Option<Round>> {
    let Kernel::Collective { signature, send, receive, .. } = &launch.kernel else { return Vec::new() };
    let mut rounds = Vec::new();
    let mut inner = member.lock();
    if options().connect_blocks && !std::mem::replace(&mut inner.is_connected, true) {
        rounds.push((!launch.is_hung).then_some(Round::Meet));
    }
    if options().checks {
        let places = (inner.windows.place(send.0), inner.windows.place(receive.0));
        rounds.push((!launch.is_hung).then_some(Round::Check { signature: *signature, places }));
    }
    rounds
}

/// Adds a kernel. Merges the transfers of one communicator and stream into one kernel.
fn fuse(launches: &mut Vec<(Arc<Member>, Launch)>, member: Arc<Member>, launch: Launch) {
    if let Kernel::Transfers(new) = &launch.kernel {
        for (other, known) in launches.iter_mut() {
            if let Kernel::Transfers(transfers) = &mut known.kernel
                && Arc::ptr_eq(other, &member)
                && known.stream == launch.stream
            {
                transfers.extend_from_slice(new);
                known.is_hung |= launch.is_hung;
                return;
            }
        }
    }
    launches.push((member, launch));
}
