//! Processes of a job over real connections: what each learns when another one goes, stops or leaves.

use rustix::event::{Timespec, poll};
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::LazyLock;
use std::time::{Duration, Instant};
use symmalloc_watchdog::{CommunicatorId, Departure, FailureReport, Lifeline, PeerEvent, ProcessId, Progress, RankId};

const WORLD: CommunicatorId = CommunicatorId(1);

fn of_world(rank: u32) -> RankId {
    RankId { communicator: WORLD, rank }
}

fn now() -> Duration {
    static BEGUN: LazyLock<Instant> = LazyLock::new(Instant::now);
    BEGUN.elapsed()
}

/// The lifelines of so many processes, all in the world.
fn job(processes: u32) -> Vec<Lifeline> {
    let mut lifelines = bare(processes);
    for (rank, lifeline) in lifelines.iter_mut().enumerate() {
        lifeline.endpoint().join(of_world(rank as u32), now());
    }
    lifelines
}

fn bare(processes: u32) -> Vec<Lifeline> {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    let (mut at_hub, mut others) = (Vec::new(), Vec::new());
    for process in (1..processes).map(ProcessId) {
        others.push((process, TcpStream::connect(address).expect("listening")));
        at_hub.push((process, listener.accept().expect("it knocked").0));
    }
    let hub = Lifeline::new(ProcessId(0), processes, at_hub, now()).expect("set up");
    let other =
        |(process, stream)| Lifeline::new(process, processes, vec![(ProcessId(0), stream)], now()).expect("set up");
    std::iter::once(hub).chain(others.into_iter().map(other)).collect()
}

/// Lets all of them have turns until it is so.
fn until(lifelines: &mut [Lifeline], mut is_so: impl FnMut(&mut [Lifeline]) -> bool) -> Duration {
    let since = Instant::now();
    while !is_so(lifelines) {
        assert!(since.elapsed() < Duration::from_secs(20), "it never came");
        let mut descriptors: Vec<_> = lifelines.iter().flat_map(Lifeline::descriptors).collect();
        let limit = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
        poll(&mut descriptors, Some(&limit)).expect("polled");
        drop(descriptors);
        lifelines.iter_mut().for_each(|lifeline| lifeline.turn(now()));
    }
    since.elapsed()
}

fn settle(lifelines: &mut [Lifeline]) {
    let begun = Instant::now();
    until(lifelines, |_| begun.elapsed() > Duration::from_millis(150));
}

fn gone(rank: u32) -> [PeerEvent; 1] {
    [PeerEvent::Gone { rank: of_world(rank), departure: Departure::Closed, after: None }]
}

#[test]
fn all_learn_within_a_second_that_a_process_is_gone() {
    let mut lifelines = job(4);
    settle(&mut lifelines);
    drop(lifelines.remove(2));
    let mut events = vec![Vec::new(); 3];
    let took = until(&mut lifelines, |lifelines| {
        for (events, lifeline) in events.iter_mut().zip(lifelines) {
            events.extend(lifeline.endpoint().take_events());
        }
        events.iter().all(|events| !events.is_empty())
    });
    assert!(took < Duration::from_secs(1), "{took:?}");
    assert!(events.iter().all(|events| events[..] == gone(2)), "{events:?}");
}

#[test]
fn all_learn_that_the_hub_is_gone() {
    let mut lifelines = job(3);
    settle(&mut lifelines);
    drop(lifelines.remove(0));
    let mut events = vec![Vec::new(); 2];
    until(&mut lifelines, |lifelines| {
        for (events, lifeline) in events.iter_mut().zip(lifelines) {
            events.extend(lifeline.endpoint().take_events());
        }
        events.iter().all(|events| !events.is_empty())
    });
    assert!(events.iter().all(|events| events[..] == gone(0)), "{events:?}");
}

#[test]
fn who_left_in_order_is_missed_by_nobody() {
    let mut lifelines = job(3);
    lifelines[1].endpoint().leave(of_world(1), now());
    settle(&mut lifelines);
    drop(lifelines.remove(1));
    settle(&mut lifelines);
    for lifeline in &mut lifelines {
        assert_eq!(lifeline.endpoint().take_events(), []);
    }
}

fn late() -> FailureReport {
    FailureReport { text: "rank 1 did not come within 60 s".to_owned(), first_rank: Some(1) }
}

#[test]
fn an_error_is_told_with_its_report() {
    let mut lifelines = job(3);
    settle(&mut lifelines);
    lifelines[2].endpoint().fail(of_world(2), &late(), now());
    settle(&mut lifelines);
    for lifeline in &mut lifelines[..2] {
        let events = lifeline.endpoint().take_events();
        assert_eq!(events, [PeerEvent::Failed { rank: of_world(2), report: late() }]);
    }
    assert_eq!(lifelines[2].endpoint().take_events(), []);
}

/// Process 2 has no turns: it is stopped.
#[test]
fn the_hub_says_who_is_silent_and_how_far_the_others_are() {
    let mut lifelines = job(3);
    settle(&mut lifelines);
    let mut stopped = lifelines.remove(2);
    lifelines[1].endpoint().set_progress(of_world(1), Progress { submitted: 42, finished: 41 }, now());
    let begun = Instant::now();
    until(&mut lifelines, |_| begun.elapsed() > Duration::from_millis(1200));
    let asked = now();
    lifelines[1].endpoint().ask(WORLD, asked);
    let mut members = Vec::new();
    until(&mut lifelines, |lifelines| {
        let endpoint = lifelines[1].endpoint();
        members = endpoint.members(WORLD, now());
        endpoint.has_answer(WORLD, asked, now())
    });
    assert_eq!(members[1].progress, Progress { submitted: 42, finished: 41 });
    assert!(members[0].silent_ms < 600 && members[1].silent_ms < 600, "{members:?}");
    assert!(members[2].silent_ms > 1000 && members[2].departure.is_none(), "{members:?}");
    stopped.turn(now());
}

#[test]
fn a_stranger_on_a_connection_is_a_broken_one() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut stranger = TcpStream::connect(listener.local_addr().expect("bound")).expect("listening");
    let (stream, _) = listener.accept().expect("it knocked");
    let mut hub = [Lifeline::new(ProcessId(0), 2, vec![(ProcessId(1), stream)], now()).expect("set up")];
    hub[0].endpoint().join(of_world(0), now());
    stranger.write_all(b"{\"joined\":{\"rank\":{\"communicator\":1,\"rank\":1}}}\nGET / HTTP/1.1\r\n").expect("sent");
    let mut events = Vec::new();
    until(&mut hub, |hub| {
        events.extend(hub[0].endpoint().take_events());
        !events.is_empty()
    });
    let [PeerEvent::Gone { departure: Departure::Broken { error }, .. }] = &events[..] else { panic!("{events:?}") };
    assert!(error.contains("our language"), "{error}");
}

/// What a stopped process is owed does not grow with the beats.
#[test]
fn a_process_that_takes_nothing_in_holds_nobody_up() {
    let mut lifelines = job(2);
    settle(&mut lifelines);
    let _stopped = lifelines.remove(1);
    for number in 0..20_000 {
        lifelines[0].endpoint().fail(of_world(0), &late(), now());
        lifelines[0].endpoint().join(RankId { communicator: CommunicatorId(number + 2), rank: 0 }, now());
        lifelines[0].turn(now());
    }
    assert_eq!(lifelines[0].endpoint().take_events(), []);
}
