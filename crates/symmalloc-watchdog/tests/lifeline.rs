//! Tests of processes over real connections: the events that each process receives when another one ends, stops or leaves.

use proptest::prelude::*;
use rustix::event::{Timespec, poll};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::LazyLock;
use std::time::{Duration, Instant};
use symmalloc_watchdog::{
    CommunicatorId, Connection, Departure, FailureReport, Lifeline, PeerEvent, ProcessId, Progress, RankId,
};

const WORLD: CommunicatorId = CommunicatorId(1);

fn of_world(rank: u32) -> RankId {
    RankId { communicator: WORLD, rank }
}

fn now() -> Duration {
    static BEGUN: LazyLock<Instant> = LazyLock::new(Instant::now);
    BEGUN.elapsed()
}

/// Returns the lifelines of `processes` processes, all of which have joined the world.
fn job(processes: u32) -> Vec<Lifeline> {
    let mut lifelines = bare(processes);
    for (rank, lifeline) in lifelines.iter_mut().enumerate() {
        lifeline.endpoint().join(of_world(rank as u32), now());
    }
    lifelines
}

fn bare(processes: u32) -> Vec<Lifeline> {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
    let address = listener.local_addr().expect("the socket should be bound");
    let (mut at_hub, mut others) = (Vec::new(), Vec::new());
    for process in (1..processes).map(ProcessId) {
        others.push((process, TcpStream::connect(address).expect("a process should listen").into()));
        at_hub.push((process, listener.accept().expect("the connection should be accepted").0.into()));
    }
    let hub = Lifeline::new(ProcessId(0), processes, at_hub, now()).expect("the setup should succeed");
    let other = |(process, stream)| {
        Lifeline::new(process, processes, vec![(ProcessId(0), stream)], now()).expect("the setup should succeed")
    };
    std::iter::once(hub).chain(others.into_iter().map(other)).collect()
}

/// Runs turns of all lifelines until the predicate holds. Returns the elapsed time.
fn until(lifelines: &mut [Lifeline], mut is_so: impl FnMut(&mut [Lifeline]) -> bool) -> Duration {
    let since = Instant::now();
    while !is_so(lifelines) {
        assert!(since.elapsed() < Duration::from_secs(20), "the predicate does not hold after 20 seconds");
        let mut descriptors: Vec<_> = lifelines.iter().flat_map(Lifeline::descriptors).collect();
        let limit = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
        poll(&mut descriptors, Some(&limit)).expect("the poll succeeds");
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
fn all_processes_are_notified_of_a_death_within_a_second() {
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
fn all_processes_are_notified_of_the_death_of_the_hub() {
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
fn an_orderly_departure_is_not_reported() {
    let mut lifelines = job(3);
    lifelines[1].endpoint().leave(of_world(1), now());
    settle(&mut lifelines);
    drop(lifelines.remove(1));
    settle(&mut lifelines);
    for lifeline in &mut lifelines {
        assert_eq!(lifeline.endpoint().take_events(), []);
    }
}

/// Regression test: the hub wrote to the closed connection before it read the last message, and reported the process as gone.
#[test]
fn a_process_that_left_and_ended_is_not_gone_if_the_hub_writes_before_it_reads() {
    // A turn reads no more than 8 KiB from each of 16 connections. The process that leaves has the next one.
    const BUSY: u32 = 16;
    let leaver = ProcessId(BUSY + 1);
    let (mut at_hub, mut ends) = (Vec::new(), Vec::new());
    for process in (1..=leaver.0).map(ProcessId) {
        let (hub, end) = UnixStream::pair().expect("the system should create a pair of sockets");
        at_hub.push((process, hub.into()));
        ends.push(end);
    }
    let own = ends.pop().expect("the end of the last process");
    let mut hub = Lifeline::new(ProcessId(0), leaver.0 + 1, at_hub, Duration::ZERO).expect("the setup should succeed");
    let mut other = Lifeline::new(leaver, leaver.0 + 1, vec![(ProcessId(0), own.into())], Duration::ZERO)
        .expect("the setup should succeed");
    hub.endpoint().join(of_world(0), Duration::ZERO);
    other.endpoint().join(of_world(leaver.0), Duration::ZERO);
    other.turn(Duration::ZERO);
    hub.turn(Duration::ZERO);
    let member =
        |hub: &mut Lifeline, now| hub.endpoint().members(WORLD, now).into_iter().find(|it| it.rank == leaver.0);
    assert!(member(&mut hub, Duration::ZERO).is_some_and(|it| !it.has_left));

    let mut now = Duration::from_secs(1);
    let beats = "{\"beat\":{\"standings\":[]}}\n".repeat(400);
    ends.iter_mut().for_each(|end| end.write_all(beats.as_bytes()).expect("the system buffers it"));
    other.endpoint().leave(of_world(leaver.0), now);
    other.turn(now);
    drop(other);
    // The first turn writes a beat to the closed connection and does not reach its last message.
    for _ in 0..3 {
        hub.turn(now);
        assert_eq!(hub.endpoint().take_events(), []);
        now += Duration::from_millis(10);
    }
    assert!(member(&mut hub, now).is_some_and(|it| it.has_left), "the hub received the last message");
}

#[test]
fn a_process_whose_connection_is_closed_is_gone() {
    let (at_hub, end) = UnixStream::pair().expect("the system should create a pair of sockets");
    let mut hub = Lifeline::new(ProcessId(0), 2, vec![(ProcessId(1), at_hub.into())], Duration::ZERO)
        .expect("the setup should succeed");
    let peer = end.try_clone().expect("a second handle");
    let mut other = Lifeline::new(ProcessId(1), 2, vec![(ProcessId(0), end.into())], Duration::ZERO)
        .expect("the setup should succeed");
    hub.endpoint().join(of_world(0), Duration::ZERO);
    other.endpoint().join(of_world(1), Duration::ZERO);
    other.turn(Duration::ZERO);
    hub.turn(Duration::ZERO);
    assert_eq!(hub.endpoint().take_events(), []);
    // From now on, writes of the hub fail. Its reads only find no data, because the peer's end stays open.
    peer.shutdown(std::net::Shutdown::Read).expect("an open connection");
    for second in 1..=3 {
        hub.turn(Duration::from_secs(second));
    }
    let events = hub.endpoint().take_events();
    assert!(!events.is_empty(), "the process is reported as gone");
}

fn late() -> FailureReport {
    FailureReport { text: "rank 1 did not arrive within 60 s".to_owned(), first_rank: Some(1), stopped_ms: None }
}

#[test]
fn an_error_is_forwarded_with_its_report() {
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

/// Process 2 runs no turns, like a stopped process.
#[test]
fn the_hub_reports_silence_and_progress() {
    let mut lifelines = job(3);
    settle(&mut lifelines);
    let mut stopped = lifelines.remove(2);
    lifelines[1].endpoint().set_progress(
        of_world(1),
        Progress { submitted: 42, finished: 41, is_destroying: false },
        now(),
    );
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
    assert_eq!(members[1].progress, Progress { submitted: 42, finished: 41, is_destroying: false });
    assert!(members[0].silent_ms < 600 && members[1].silent_ms < 600, "{members:?}");
    assert!(members[2].silent_ms > 1000 && members[2].departure.is_none(), "{members:?}");
    stopped.turn(now());
}

/// Blocks SIGPIPE on this thread. A blocked signal stays pending, although this process ignores it.
fn block_sigpipe() {
    // SAFETY: the set is initialized before it is used.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGPIPE);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
    }
}

fn is_sigpipe_pending() -> bool {
    // SAFETY: the set is initialized before it is used.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigpending(&raw mut set);
        libc::sigismember(&raw const set, libc::SIGPIPE) == 1
    }
}

/// A program in C does not ignore SIGPIPE, which would end the survivors of a rank.
#[test]
fn a_message_to_a_process_that_ended_raises_no_signal() {
    block_sigpipe();
    let (unix, _) = UnixStream::pair().expect("the system should create a pair of sockets");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
    let tcp = TcpStream::connect(listener.local_addr().expect("the socket should be bound"))
        .expect("a process should listen");
    drop(listener.accept().expect("the connection should be accepted"));
    for mut connection in [Connection::from(unix), Connection::from(tcp)] {
        // The first write to a network socket succeeds, and the next ones report the end.
        while let Ok(_written) = connection.write(b"{}\n") {
            std::thread::sleep(Duration::from_millis(5));
        }
        let error = connection.write(b"{}\n").expect_err("the other end is closed");
        assert_eq!(error.kind(), ErrorKind::BrokenPipe);
        assert!(!is_sigpipe_pending(), "{connection:?} raised SIGPIPE");
    }
}

#[test]
fn foreign_data_breaks_the_connection() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
    let mut stranger = TcpStream::connect(listener.local_addr().expect("the socket should be bound"))
        .expect("a process should listen");
    let (stream, _) = listener.accept().expect("the connection should be accepted");
    let mut hub =
        [Lifeline::new(ProcessId(0), 2, vec![(ProcessId(1), stream.into())], now()).expect("the setup should succeed")];
    hub[0].endpoint().join(of_world(0), now());
    stranger
        .write_all(b"{\"joined\":{\"rank\":{\"communicator\":1,\"rank\":1}}}\nGET / HTTP/1.1\r\n")
        .expect("the message should be sent");
    let mut events = Vec::new();
    until(&mut hub, |hub| {
        events.extend(hub[0].endpoint().take_events());
        !events.is_empty()
    });
    let [PeerEvent::Gone { departure: Departure::Broken { error }, .. }] = &events[..] else { panic!("{events:?}") };
    assert!(error.contains("malformed message"), "{error}");
}

/// The bytes pending for a stopped process do not grow with the number of beats.
#[test]
fn a_process_that_reads_nothing_delays_no_other() {
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

/// Number of turns within which the hub notices a death, regardless of the data that another process sends.
const TURNS_MAX: u32 = 2;
/// Processor time that a turn may take: a tenth of the time after which a process counts as silent. A turn usually takes a few
/// milliseconds.
const TURN_MAX: Duration = Duration::from_millis(100);

/// Returns the processor time of this thread, which does not depend on the load of the machine.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// A hub with two other processes: process 1 sends whatever the test chooses; process 2 has joined the world and is healthy.
struct Flooded {
    hub: Lifeline,
    flood: UnixStream,
    other: Lifeline,
}

impl Flooded {
    fn new() -> Self {
        let [(hub_1, flood), (hub_2, other)] =
            [0, 1].map(|_| UnixStream::pair().expect("the system should create a pair of sockets"));
        let at_hub = vec![(ProcessId(1), hub_1.into()), (ProcessId(2), hub_2.into())];
        let mut hub = Lifeline::new(ProcessId(0), 3, at_hub, now()).expect("the setup should succeed");
        let mut other = Lifeline::new(ProcessId(2), 3, vec![(ProcessId(0), other.into())], now())
            .expect("the setup should succeed");
        hub.endpoint().join(of_world(0), now());
        other.endpoint().join(of_world(2), now());
        flood.set_nonblocking(true).expect("the socket should accept the setting");
        let mut both = [hub, other];
        settle(&mut both);
        let [hub, other] = both;
        Flooded { hub, flood, other }
    }

    /// Runs one turn of the hub and asserts that it is short.
    fn turn(&mut self) {
        let begun = processor_time();
        self.hub.turn(now());
        let took = processor_time() - begun;
        assert!(took < TURN_MAX, "a turn took {took:?}");
    }

    /// Sends `text` repeatedly, from offset `at` on, until the socket is full. Returns the offset at which it stopped; `None` if the hub
    /// closed the connection.
    fn pour(&mut self, text: &[u8], mut at: usize) -> Option<usize> {
        loop {
            match self.flood.write(&text[at..]) {
                Ok(count) => at = (at + count) % text.len(),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Some(at),
                Err(_) => return None,
            }
        }
    }

    /// Keeps the hub's connection to the flooding process full, ends process 2, and asserts that the hub notices within [`TURNS_MAX`]
    /// turns.
    fn notices_a_death(mut self, text: &[u8]) -> Self {
        let mut at = Some(0);
        for _ in 0..200 {
            at = at.and_then(|at| self.pour(text, at));
            self.turn();
            self.other.turn(now());
        }
        let before = self.hub.endpoint().take_events();
        let is_of_the_flooding = |event: &PeerEvent| match event {
            PeerEvent::Gone { rank, .. } => rank.rank == 1,
            PeerEvent::NeverJoined { process, .. } => *process == ProcessId(1),
            _ => false,
        };
        assert!(before.iter().all(is_of_the_flooding), "{before:?}");
        let Flooded { other, .. } = &mut self;
        *other = Lifeline::new(ProcessId(0), 1, Vec::new(), now()).expect("a lifeline needs no connections");
        for _ in 0..TURNS_MAX {
            at = at.and_then(|at| self.pour(text, at));
            self.turn();
        }
        let events = self.hub.endpoint().take_events();
        assert!(events.iter().any(|event| *event == gone(2)[0]), "{events:?}");
        self
    }

    fn has_hung_up(&mut self) -> bool {
        // The connection is reset if the hub left data unread.
        let rest = self.flood.read_to_end(&mut Vec::new());
        !rest.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    }
}

#[test]
fn a_flood_of_newlines_disconnects_only_its_sender() {
    let mut flooded = Flooded::new().notices_a_death(&[b'\n'; 1 << 16]);
    assert!(flooded.has_hung_up());
}

#[test]
fn messages_after_an_invalid_one_are_ignored() {
    let mut flooded = Flooded::new();
    flooded
        .flood
        .write_all(b"nonsense\n{\"joined\":{\"rank\":{\"communicator\":1,\"rank\":1}}}\n")
        .expect("the message should be sent");
    flooded.turn();
    assert_eq!(flooded.hub.endpoint().members(WORLD, now()).len(), 2);
}

#[test]
fn a_flood_of_beats_delays_no_other() {
    let beats = b"{\"beat\":{\"standings\":[]}}\n".repeat(4096);
    let mut flooded = Flooded::new().notices_a_death(&beats);
    assert!(!flooded.has_hung_up(), "its messages are valid");
}

#[test]
fn a_flood_of_questions_delays_no_other() {
    let joined = b"{\"joined\":{\"rank\":{\"communicator\":1,\"rank\":1}}}\n";
    let questions = [&joined[..], &b"{\"ask\":{\"communicator\":1}}\n".repeat(4096)].concat();
    let mut flooded = Flooded::new();
    // The process reads nothing, so the bytes pending for it grow.
    flooded = flooded.notices_a_death(&questions);
    assert!(flooded.hub.endpoint().members(WORLD, now()).iter().any(|member| member.rank == 1));
}

#[test]
fn a_flood_of_joins_disconnects_only_its_sender() {
    let join = |number: u32| format!("{{\"joined\":{{\"rank\":{{\"communicator\":{number},\"rank\":1}}}}}}\n");
    let joins: String = (2..10_000).map(join).collect();
    let mut flooded = Flooded::new().notices_a_death(joins.as_bytes());
    assert!(flooded.has_hung_up(), "a process with thousands of communicators is disconnected");
}

#[test]
fn an_endless_message_disconnects_only_its_sender() {
    let mut flooded = Flooded::new().notices_a_death(&[b'['; 1 << 16]);
    for _ in 0..1000 {
        if flooded.pour(&[b'['; 1 << 16], 0).is_none() {
            return;
        }
        flooded.turn();
    }
    panic!("the hub did not close the connection");
}

#[test]
fn a_process_with_too_much_unread_data_is_gone() {
    let mut flooded = Flooded::new();
    flooded
        .flood
        .write_all(b"{\"joined\":{\"rank\":{\"communicator\":1,\"rank\":1}}}\n")
        .expect("the message should be sent");
    let report = FailureReport { text: "x".repeat(10_000), first_rank: None, stopped_ms: None };
    let mut events = Vec::new();
    for number in 2..4_000 {
        let rank = RankId { communicator: CommunicatorId(number), rank: 0 };
        flooded.hub.endpoint().join(rank, now());
        flooded.hub.endpoint().fail(rank, &report, now());
        flooded.turn();
        flooded.other.turn(now());
        events.extend(flooded.hub.endpoint().take_events());
        if !events.is_empty() {
            break;
        }
    }
    let [PeerEvent::Gone { rank, departure: Departure::Stalled { unsent_bytes }, .. }] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(*rank, of_world(1));
    assert!(*unsent_bytes > 8 << 20 && *unsent_bytes < 9 << 20, "{unsent_bytes}");
    // The news reaches process 2 after the messages that were already pending for it.
    let mut events = Vec::new();
    let begun = Instant::now();
    while events.is_empty() && begun.elapsed() < Duration::from_secs(20) {
        flooded.turn();
        flooded.other.turn(now());
        events = flooded.other.endpoint().take_events();
    }
    assert!(matches!(&events[..], [PeerEvent::Gone { departure: Departure::Stalled { .. }, .. }]), "{events:?}");
}

/// Text that controls a terminal, disguises other text, forges a line or fills a log, by class.
fn hostile_texts() -> Vec<(&'static str, String)> {
    let mut texts: Vec<(&str, String)> = [
        ("color", "\u{1b}[31mred"),
        ("title", "\u{1b}]0;title\u{7}"),
        ("cursor", "\u{1b}[2J\u{1b}[H"),
        ("overwriting", "lost\r\u{8}\u{8}found"),
        ("NUL and DEL", "\0\u{7f}"),
        ("C1", "\u{9b}31m\u{85}\u{90}"),
        ("a forged line", "ended\nsymmalloc: all ranks are done"),
        ("a forged line of Unicode", "ended\u{2028}symmalloc: done\u{2029}"),
        ("direction", "\u{202e}desrever\u{2066}\u{200f}\u{61c}"),
        ("zero width", "a\u{200b}b\u{feff}c\u{2060}d\u{ad}"),
        ("tags", "\u{e0041}\u{e007f}"),
    ]
    .map(|(class, text)| (class, text.to_owned()))
    .into();
    texts.push(("too long", "é".repeat(1 << 20)));
    texts.push(("too long once escaped", "\u{1b}".repeat(1 << 14)));
    texts
}

/// Returns the messages of the hub, and one to the hub, that contain the text.
fn messages_with(text: &str) -> Vec<(&'static str, Value)> {
    let rank = json!({ "communicator": WORLD, "rank": 1 });
    let report = json!({ "text": text, "first_rank": null });
    let broken = json!({ "broken": { "error": text } });
    let member = |departure: &Value, failure: &Value| {
        json!({
            "rank": 5, "process": 1, "progress": { "submitted": 0, "finished": 0 }, "still_ms": 0, "silent_ms": 0,
            "departure": departure, "has_left": false, "failure": failure,
        })
    };
    let told = |member: Value| json!({ "told": { "communicator": WORLD, "members": [member] } });
    let gone = |departure: &Value, after: &Value| json!({ "gone": { "departure": departure, "ranks": [rank], "after": after } });
    vec![
        ("failed", json!({ "failed": { "rank": rank, "report": report } })),
        ("rank_failed", json!({ "rank_failed": { "rank": rank, "report": report } })),
        ("the end of a connection", gone(&broken, &Value::Null)),
        ("an earlier report", gone(&json!("closed"), &report)),
        ("the end of a member's connection", told(member(&broken, &Value::Null))),
        ("a member's report", told(member(&Value::Null, &report))),
    ]
}

/// Sends a message to a process. Returns the texts that this process then knows.
fn texts_from(message: &Value) -> Vec<String> {
    let (mut peer, stream) = UnixStream::pair().expect("the system should create a pair of sockets");
    let is_to_hub = message.get("failed").is_some();
    let (own, other) = if is_to_hub { (0, 1) } else { (2, 0) };
    let connections = vec![(ProcessId(other), stream.into())];
    let mut process = [Lifeline::new(ProcessId(own), 3, connections, now()).expect("the setup should succeed")];
    process[0].endpoint().join(of_world(own), now());
    let sent = format!("{}\n{message}\n", json!({ "joined": { "rank": of_world(1) } }));
    let (mut texts, mut reader) = (Vec::new(), peer.try_clone().expect("the socket should accept the setting"));
    std::thread::scope(|scope| {
        scope.spawn(|| peer.write_all(sent.as_bytes()).expect("the message should be sent"));
        scope.spawn(|| std::io::copy(&mut reader, &mut std::io::sink()));
        until(&mut process, |process| {
            let endpoint = process[0].endpoint();
            for event in endpoint.take_events() {
                match event {
                    PeerEvent::Failed { report, .. } => texts.push(report.text),
                    PeerEvent::Gone { departure, after, .. } => {
                        texts.push(departure.to_string());
                        texts.extend(after.map(|report| report.text));
                    }
                    other => panic!("{other:?}"),
                }
            }
            for member in endpoint.members(WORLD, now()) {
                texts.extend(member.departure.map(|departure| departure.to_string()));
                texts.extend(member.failure.map(|report| report.text));
            }
            !texts.is_empty()
        });
        drop(process);
    });
    texts
}

/// Returns `true` if a terminal acts on the character, ends a line after it, or does not show it.
fn is_hostile(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}')
        || matches!(character, '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{e0000}'..='\u{e007f}')
}

#[test]
fn no_text_of_a_peer_reaches_this_process_raw_or_without_bound() {
    for (class, text) in hostile_texts() {
        for (kind, message) in messages_with(&text) {
            let texts = texts_from(&message);
            assert!(texts.iter().any(|text| text.len() > 4), "{kind} with {class} did not arrive");
            for text in texts {
                assert!(!text.contains(is_hostile), "{class} in {kind}: {text:?}");
                assert!(text.len() < 17 << 10, "{class} in {kind}: {} bytes", text.len());
            }
        }
    }
}

/// A rank's own report is the same on all ranks, including this one.
#[test]
fn an_own_report_is_sent_as_others_receive_it() {
    for (class, text) in hostile_texts() {
        let mut lifelines = job(2);
        lifelines[1].endpoint().join(RankId { rank: 2, ..of_world(0) }, now());
        settle(&mut lifelines);
        lifelines[1].endpoint().fail(of_world(1), &FailureReport { text, first_rank: None, stopped_ms: None }, now());
        let mut events = [Vec::new(), Vec::new()];
        until(&mut lifelines, |lifelines| {
            for (events, lifeline) in events.iter_mut().zip(lifelines) {
                events.extend(lifeline.endpoint().take_events());
            }
            events.iter().all(|events| !events.is_empty())
        });
        assert_eq!(events[0], events[1], "{class}");
    }
}

/// Pieces of messages, valid and invalid.
fn piece() -> impl Strategy<Value = Vec<u8>> {
    let known = prop::sample::select(vec![
        "{\"beat\":{\"standings\":[]}}\n",
        "{\"joined\":{\"rank\":{\"communicator\":1,\"rank\":1}}}\n",
        "{\"left\":{\"last\":{\"rank\":{\"communicator\":1,\"rank\":1},\"progress\":{\"submitted\":1,\"finished\":1},\"still_ms\":1}}}\n",
        "{\"failed\":{\"rank\":{\"communicator\":1,\"rank\":1},\"report\":{\"text\":\"\",\"first_rank\":null}}}\n",
        "{\"ask\":{\"communicator\":1}}\n",
        "{\"gone\":{\"departure\":\"closed\",\"ranks\":[],\"after\":null}}\n",
        "{\"beat\":",
        "\n",
    ]);
    prop_oneof![8 => known.prop_map(|text| text.as_bytes().to_vec()), 1 => prop::collection::vec(any::<u8>(), 0..40)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn no_message_delays_the_detection_of_a_death(
        pieces in prop::collection::vec(piece(), 0..400),
        cut in 1..5000_usize,
    ) {
        let [(hub_1, mut sender), (hub_2, other)] = [0, 1].map(|_| UnixStream::pair().expect("the system should create a pair of sockets"));
        let at_hub = vec![(ProcessId(1), hub_1.into()), (ProcessId(2), hub_2.into())];
        let mut hub = Lifeline::new(ProcessId(0), 3, at_hub, now()).expect("the setup should succeed");
        let mut other = Lifeline::new(ProcessId(2), 3, vec![(ProcessId(0), other.into())], now()).expect("the setup should succeed");
        hub.endpoint().join(of_world(0), now());
        other.endpoint().join(of_world(2), now());
        other.turn(now());
        for part in pieces.concat().chunks(cut) {
            // Fails if the hub has closed the connection.
            let _sent = sender.write_all(part);
            hub.turn(now());
        }
        drop(other);
        hub.endpoint().take_events();
        (0..TURNS_MAX).for_each(|_| hub.turn(now()));
        prop_assert!(hub.endpoint().take_events().contains(&gone(2)[0]));
    }
}
