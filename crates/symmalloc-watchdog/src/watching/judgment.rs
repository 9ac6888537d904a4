//! Determines why a collective missed its deadline, from the known state of all ranks.

use crate::endpoint::SILENT_AFTER;
use crate::message::Member;
use crate::watching::failure::FailureCause;
use crate::watching::recorder::UnfinishedWork;
use crate::watching::watched::Identity;
use std::time::Duration;

/// The decision about unfinished work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Judgment {
    /// End the communicator.
    End(FailureCause),
    /// The awaited ranks make progress, if slowly. Check again after this time.
    Wait(Duration),
}

impl Judgment {
    /// Determines why work has stalled past its deadline.
    pub(super) fn new(identity: &Identity, unfinished: &UnfinishedWork, members: &[Member]) -> Self {
        let others = || members.iter().filter(|member| member.rank != identity.rank);
        // A rank that destroyed the communicator normally may exit.
        let gone = others().filter(|it| !it.has_left).find_map(|it| Some((it.rank, it.departure.clone()?)));
        if let Some((rank, departure)) = gone {
            return Judgment::End(FailureCause::RankGone { rank, departure, after: None });
        }
        if let Some((rank, report)) = others().find_map(|it| Some((it.rank, it.failure.clone()?))) {
            return Judgment::End(FailureCause::RankFailed { rank, report });
        }
        let behind: Vec<&Member> = match unfinished.peer {
            // It is unknown which calls the peer of a send or receive has made.
            Some(peer) => others().filter(|it| it.rank == peer).collect(),
            None => others().filter(|it| is_behind(it, unfinished)).collect(),
        };
        let all_submitted = behind.is_empty();
        let is_open = |it: &&Member| {
            if unfinished.is_destruction { !it.has_left } else { it.progress.finished < unfinished.last }
        };
        let waited_for = if all_submitted { others().filter(is_open).collect() } else { behind };
        let mut stalled: Vec<&Member> =
            waited_for.iter().copied().filter(|it| stalled_for(it) >= identity.deadline).collect();
        // If all ranks submitted the collective, each rank that makes progress may still be running its own kernels before the collective.
        // If some ranks did not submit it, one stalled rank is enough.
        let moving = waited_for.iter().filter(|it| stalled_for(it) < identity.deadline);
        if let Some(longest) = moving.map(stalled_for).max()
            && (all_submitted || stalled.is_empty())
        {
            return Judgment::Wait(identity.deadline.saturating_sub(longest));
        }
        if all_submitted {
            // A rank that was stopped after it completed the collective may not have sent everything that others wait for.
            stalled.extend(others().filter(|it| !is_open(it) && is_silent(it)));
        }
        Judgment::End(cause(identity, unfinished, members, &stalled, all_submitted))
    }
}

fn is_silent(member: &Member) -> bool {
    Duration::from_millis(member.silent_ms) >= SILENT_AFTER
}

/// Returns the minimum time for which the rank has been stalled. A live rank may have made progress since its last message.
fn stalled_for(member: &&Member) -> Duration {
    let unknown_ms = if is_silent(member) { 0 } else { member.silent_ms };
    Duration::from_millis(member.still_ms.saturating_sub(unknown_ms))
}

/// Returns `true` if the rank missed a pending collective. Marks show the first pending collective only approximately: it may have
/// completed while a later one is pending. A rank that has unfinished work is not behind, because it is waiting as well.
fn is_behind(member: &Member, UnfinishedWork { first, last, is_destruction, .. }: &UnfinishedWork) -> bool {
    let progress = member.progress;
    if *is_destruction {
        return !progress.is_destroying && !member.has_left;
    }
    progress.submitted < first.number || progress.submitted < *last && progress.finished == progress.submitted
}

fn cause(
    identity: &Identity,
    unfinished: &UnfinishedWork,
    members: &[Member],
    stalled: &[&Member],
    all_submitted: bool,
) -> FailureCause {
    if let Some(left) = stalled.iter().find(|it| it.has_left || it.progress.is_destroying).filter(|_| !all_submitted) {
        return FailureCause::RankLeft { rank: left.rank };
    }
    // A rank that was stopped after it submitted the collective also blocks the other ranks, because NCCL's threads are stopped with it.
    if let Some(stopped) = stalled.iter().find(|it| !it.has_left && is_silent(it)) {
        let (silent, submitted) = (Duration::from_millis(stopped.silent_ms), stopped.progress.submitted);
        return FailureCause::RankStopped { rank: stopped.rank, silent, submitted };
    }
    match unfinished.peer {
        Some(rank) if !stalled.is_empty() => FailureCause::PeerWaits { rank },
        _ if !stalled.is_empty() && !all_submitted => {
            FailureCause::RanksBehind { ranks: stalled.iter().map(|it| (it.rank, it.progress.submitted)).collect() }
        }
        _ if members.len() < identity.ranks as usize => FailureCause::Unknown,
        _ => FailureCause::Hanging,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flight_record::{CollectiveRecord, CollectiveState, Signature};
    use crate::ids::{CommunicatorId, ProcessId, Progress};
    use crate::message::Departure;
    use crate::watching::clock::Tick;
    use std::sync::Arc;

    const DEADLINE: Duration = Duration::from_secs(5);

    /// Returns a member that has been stalled for the deadline and silent for `silent_ms`.
    fn member(rank: u32, submitted: u64, silent_ms: u64) -> Member {
        Member {
            rank,
            process: ProcessId(rank),
            progress: Progress { submitted, finished: 0, is_destroying: false },
            still_ms: 5_000 + silent_ms,
            silent_ms,
            departure: None,
            has_left: false,
            failure: None,
        }
    }

    fn judgment(ranks: u32, peer: Option<u32>, members: &[Member]) -> Judgment {
        let name = Arc::from("world");
        let identity = Identity { id: CommunicatorId(1), name, rank: 0, ranks, deadline: DEADLINE, meeting: None };
        let signature = Signature { kind: "ncclAllReduce".to_owned(), elements: None, data_type: None, detail: None };
        let first = CollectiveRecord {
            number: 5,
            is_point_to_point: peer.is_some(),
            signature,
            stream: Some(0),
            state: CollectiveState::Running,
            age_ms: 0,
        };
        Judgment::new(
            &identity,
            &UnfinishedWork { first, last: 6, peer, is_destruction: false, since: Tick::default() },
            members,
        )
    }

    #[test]
    fn the_most_severe_known_state_is_the_cause() {
        let cause = |members: &[Member]| match judgment(members.len() as u32, None, members) {
            Judgment::End(cause) => cause,
            Judgment::Wait(time) => panic!("waits {time:?}"),
        };
        assert_eq!(judgment(3, None, &[member(0, 5, 0)]), Judgment::End(FailureCause::Unknown));
        assert_eq!(cause(&[member(0, 5, 0), member(1, 5, 90)]), FailureCause::Hanging);
        let behind = [member(0, 5, 0), member(1, 4, 90), member(2, 5, 0), member(3, 3, 0)];
        assert_eq!(cause(&behind), FailureCause::RanksBehind { ranks: vec![(1, 4), (3, 3)] });
        let stopped = [member(0, 5, 0), member(1, 4, 90), member(2, 5, 9000), member(3, 3, 7000)];
        let silent = Duration::from_secs(7);
        assert_eq!(cause(&stopped), FailureCause::RankStopped { rank: 3, silent, submitted: 3 });
        let silent = Duration::from_secs(9);
        let came = [member(0, 5, 0), member(1, 5, 9000)];
        assert_eq!(cause(&came), FailureCause::RankStopped { rank: 1, silent, submitted: 5 });
        let done = Member {
            progress: Progress { submitted: 6, finished: 6, is_destroying: false },
            still_ms: 1_000,
            ..member(1, 6, 9000)
        };
        assert_eq!(
            cause(&[member(0, 5, 0), done.clone()]),
            FailureCause::RankStopped { rank: 1, silent, submitted: 6 }
        );
        assert_eq!(cause(&[member(0, 5, 0), Member { silent_ms: 90, ..done }]), FailureCause::Hanging);
        let left = Member { has_left: true, ..member(1, 4, 0) };
        assert_eq!(cause(&[member(0, 5, 0), left.clone()]), FailureCause::RankLeft { rank: 1 });
        let gone = Member { departure: Some(Departure::Closed), ..member(2, 5, 9000) };
        let departure = Departure::Closed;
        let left = Member { departure: Some(Departure::Closed), silent_ms: 9000, ..left };
        assert_eq!(cause(&[member(0, 5, 0), left]), FailureCause::RankLeft { rank: 1 }, "its process may end");
        let (stuck, through) = (member(1, 4, 0), Member { has_left: true, ..gone.clone() });
        let through = Member { progress: Progress { submitted: 6, finished: 6, is_destroying: false }, ..through };
        let behind = FailureCause::RanksBehind { ranks: vec![(1, 4)] };
        assert_eq!(
            cause(&[member(0, 5, 0), stuck, through]),
            behind,
            "a rank that completed the collective is not blamed"
        );
        assert_eq!(
            cause(&[member(0, 5, 0), member(1, 4, 0), gone]),
            FailureCause::RankGone { rank: 2, departure, after: None }
        );
    }

    #[test]
    fn a_rank_without_unfinished_work_is_behind() {
        let done = Member { progress: Progress { submitted: 5, finished: 5, is_destroying: false }, ..member(1, 5, 0) };
        let behind = FailureCause::RanksBehind { ranks: vec![(1, 5)] };
        assert_eq!(judgment(2, None, &[member(0, 6, 0), done.clone()]), Judgment::End(behind));
        let slow = Member { still_ms: 1_000, ..done };
        assert_eq!(judgment(2, None, &[member(0, 6, 0), slow]), Judgment::Wait(Duration::from_secs(4)));
    }

    #[test]
    fn a_rank_that_makes_progress_is_awaited() {
        let slow = |submitted| Member { still_ms: 1_500, ..member(1, submitted, 0) };
        assert_eq!(judgment(2, None, &[member(0, 5, 0), slow(3)]), Judgment::Wait(Duration::from_millis(3_500)));
        assert_eq!(judgment(2, None, &[member(0, 5, 0), slow(5)]), Judgment::Wait(Duration::from_millis(3_500)));
        // The rank that has been stalled for the longest time determines the next check.
        let quick = Member { still_ms: 500, ..member(2, 3, 0) };
        for submitted in [3, 5] {
            let members = [
                member(0, 5, 0),
                slow(submitted),
                Member { progress: Progress { submitted, finished: 0, is_destroying: false }, ..quick.clone() },
            ];
            assert_eq!(judgment(3, None, &members), Judgment::Wait(Duration::from_millis(3_500)));
        }
        // The progress of one rank does not excuse another rank that is stalled.
        let members = [member(0, 5, 0), slow(3), member(2, 4, 0)];
        assert_eq!(judgment(3, None, &members), Judgment::End(FailureCause::RanksBehind { ranks: vec![(2, 4)] }));
    }

    #[test]
    fn time_since_the_last_message_counts_as_progress() {
        let heard = |silent_ms| Member { still_ms: 5_100, ..member(1, 4, silent_ms) };
        assert_eq!(judgment(2, None, &[member(0, 5, 0), heard(240)]), Judgment::Wait(Duration::from_millis(140)));
        assert_eq!(judgment(2, None, &[member(0, 5, 0), heard(999)]), Judgment::Wait(Duration::from_millis(899)));
        let silent = Duration::from_secs(1);
        let stopped = FailureCause::RankStopped { rank: 1, silent, submitted: 4 };
        assert_eq!(judgment(2, None, &[member(0, 5, 0), heard(1_000)]), Judgment::End(stopped));
    }

    #[test]
    fn a_send_depends_only_on_its_peer() {
        let members = [member(0, 5, 0), member(1, 9, 0), member(2, 2, 9000)];
        assert_eq!(judgment(3, Some(1), &members), Judgment::End(FailureCause::PeerWaits { rank: 1 }));
        let silent = Duration::from_secs(9);
        let stopped = FailureCause::RankStopped { rank: 2, silent, submitted: 2 };
        assert_eq!(judgment(3, Some(2), &members), Judgment::End(stopped));
    }
}
