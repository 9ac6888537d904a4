//! Tests of the handshake on a network and on one machine, and of rejected peers.

use crate::admission::{Admission, HANDSHAKE_LIMIT};
use crate::deadline::Deadline;
use crate::endpoint::{Endpoint, Listener, foreign_user, read_until, wait_for_any};
use crate::error::{EndpointAnswer, RendezvousError};
use crate::handshake::{
    Exchange, HEAD_BYTES, HELLO_BYTES, Hello, JOIN_BYTES, SHARED_BYTES, Shared, TAIL_BYTES, Terms, Verdict, join_bytes,
};
use crate::meeting_of;
use crate::place::{EndpointList, Place};
use crate::search::{Identity, search};
use crate::secret::{PROOF_BYTES, Secret};
use crate::tests::{OTHER_SECRET, SECRET, as_another_user, launch, nobody};
use crate::version::VERSION;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};
use stub_process::scaled_to_load;
use symmalloc_watchdog::Connection;

const ID: [u8; SHARED_BYTES] = [7; SHARED_BYTES];
/// A time limit in milliseconds that suffices for all expected peers.
const PATIENT: u64 = 30_000;
/// A time limit in milliseconds that suffices for a rejection on a busy machine.
const BRIEF: u64 = 1000;

fn id() -> Shared {
    ID
}

fn endpoint(listener: &Listener) -> Endpoint {
    let Listener::Network(listener) = listener else { panic!("{listener:?} has no address") };
    Endpoint::Network(listener.local_addr().expect("the socket should be bound"))
}

fn address(endpoint: &Endpoint) -> SocketAddr {
    let Endpoint::Network(address) = endpoint else { panic!("{endpoint:?} has no address") };
    *address
}

/// Returns a listener at an unused network address, and its endpoint.
fn anywhere() -> (Listener, [Endpoint; 1]) {
    let listener = Endpoint::Network("127.0.0.1:0".parse().expect("it should be an address"))
        .listen()
        .expect("a port should be free");
    let endpoint = endpoint(&listener);
    (listener, [endpoint])
}

/// Returns an unused list of endpoints on this machine.
fn local_place(name: &str) -> EndpointList {
    let job = format!("{name}-{}", std::process::id());
    let launch = launch(2, 2, &job);
    let meeting = meeting_of(&launch, 0, None).expect("a job may have two ranks");
    match Place::of(&launch, &meeting, |_| None).expect("the launch has an address") {
        Place::Own(list) => list,
        other => panic!("{other:?}"),
    }
}

fn within(millis: u64) -> Deadline {
    Deadline::after(Duration::from_millis(millis))
}

fn meeting(ranks: u32) -> Terms {
    Terms { job: 0xABCD, ranks, has_secret: false, key: None, refusal_key: None }
}

fn secret_meeting(ranks: u32, secret: &str) -> Terms {
    let key = Some(Secret::new(secret.into()).expect("the secret is long enough"));
    Terms { has_secret: true, key, ..meeting(ranks) }
}

impl Terms {
    /// Shares the id with every other rank once. Returns the connections to these ranks, or the ranks that are missing at the deadline.
    fn serve_id(
        &self,
        listener: &Listener,
        id: &Shared,
        deadline: &Deadline,
    ) -> Result<Vec<(u32, Connection)>, Vec<u32>> {
        let mut admission = Admission::new(self.clone(), *id);
        let mut arrived: BTreeMap<u32, (u64, Connection)> = BTreeMap::new();
        while arrived.len() + 1 < self.ranks as usize {
            if deadline.is_over() {
                return Err((1..self.ranks).filter(|rank| !arrived.contains_key(rank)).collect());
            }
            let opened = [listener.as_fd()].into_iter().chain(admission.descriptors());
            let ready = wait_for_any(opened, Duration::from_millis(10));
            let is_other = |rank: &u32, session| arrived.get(rank).is_some_and(|(other, _)| *other != session);
            let admitted = admission.poll(&ready[1..], |rank, session, joined| {
                is_other(&rank, session) || joined.iter().any(|it| it.is_other(rank, session))
            });
            admission.accept(listener);
            for it in admitted {
                arrived.entry(it.rank).or_insert((it.session, it.connection));
            }
        }
        Ok(arrived.into_iter().map(|(rank, (_, connection))| (rank, connection)).collect())
    }

    /// Searches for rank 0 as another rank.
    fn request_id(
        &self,
        endpoints: &[Endpoint],
        rank: u32,
        deadline: &Deadline,
    ) -> Result<(Shared, Connection), RendezvousError> {
        let identity = Identity::new(rank, deadline).expect("random numbers should be available");
        search(self, endpoints, identity, deadline).map_err(|error| error.after(deadline.waited()))
    }
}

fn hello(rank: u32, session: u64, has_secret: bool) -> Hello {
    Hello { job: 0xABCD, ranks: 2, rank, session, has_secret, nonce: [9; 32] }
}

/// Returns the answers in the error of a rank that found no rank 0 on the network.
#[track_caller]
fn answers(asked: &Result<Shared, RendezvousError>) -> &[(SocketAddr, EndpointAnswer)] {
    match asked {
        Err(RendezvousError::NoAnswer { answers, .. }) => answers,
        other => panic!("{other:?}"),
    }
}

/// Asks for the id as this rank, and returns the id.
fn ask(meeting: &Terms, endpoints: &[Endpoint], rank: u32, millis: u64) -> Result<Shared, RendezvousError> {
    meeting.request_id(endpoints, rank, &within(millis)).map(|(id, _)| id)
}

#[test]
fn all_ranks_receive_the_id_in_any_order_of_arrival() {
    let (listener, endpoints) = anywhere();
    for meeting in [meeting(6), secret_meeting(6, SECRET)] {
        thread::scope(|scope| {
            let (meeting, endpoints) = (&meeting, &endpoints);
            let others: Vec<_> = (1..6_u32)
                .map(|rank| {
                    scope.spawn(move || {
                        thread::sleep(Duration::from_millis(u64::from(7 - rank) * 10));
                        ask(meeting, endpoints, rank, PATIENT)
                    })
                })
                .collect();
            let connections = meeting.serve_id(&listener, &id(), &within(PATIENT)).expect("all ranks should arrive");
            assert_eq!(connections.iter().map(|(rank, _)| *rank).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
            for other in others {
                assert_eq!(other.join().expect("the thread does not panic"), Ok(id()));
            }
        });
    }
}

#[test]
fn rank_0_may_arrive_last() {
    let (own, endpoint) = nobody();
    let endpoints = [endpoint];
    thread::scope(|scope| {
        let other = scope.spawn(|| ask(&meeting(2), &endpoints, 1, PATIENT));
        thread::sleep(Duration::from_millis(60));
        rustix::net::listen(&own, 128).expect("the socket should be bound");
        let listener = TcpListener::from(own);
        listener.set_nonblocking(true).expect("the socket should accept the setting");
        let listener = Listener::Network(listener);
        meeting(2).serve_id(&listener, &id(), &within(PATIENT)).expect("the rank should arrive");
        assert_eq!(other.join().expect("the thread does not panic"), Ok(id()));
    });
}

#[test]
fn other_processes_and_other_jobs_are_rejected_without_delay() {
    let (listener, endpoints) = anywhere();
    thread::scope(|scope| {
        let silent = TcpStream::connect(address(&endpoints[0])).expect("a process should listen");
        let mut babbling = TcpStream::connect(address(&endpoints[0])).expect("a process should listen");
        babbling
            .write_all(b"GET / HTTP/1.1\r\nHost: nobody at all\r\n\r\n and more, so that it has said enough")
            .expect("the message should be sent");
        let other_job = scope.spawn(|| ask(&Terms { job: 1, ..meeting(2) }, &endpoints, 1, 150));
        let other_size = scope.spawn(|| ask(&meeting(3), &endpoints, 1, 150));
        let late = scope.spawn(|| {
            thread::sleep(Duration::from_millis(250));
            ask(&meeting(2), &endpoints, 1, PATIENT)
        });
        let since = Instant::now();
        meeting(2).serve_id(&listener, &id(), &within(PATIENT)).expect("the rank should arrive");
        assert!(since.elapsed() < HANDSHAKE_LIMIT, "the silent peer delayed the meeting");
        for other in [other_job, other_size] {
            let asked = other.join().expect("the thread does not panic");
            assert_eq!(answers(&asked), [(address(&endpoints[0]), EndpointAnswer::DifferentJob)]);
        }
        assert_eq!(late.join().expect("the thread does not panic"), Ok(id()));
        let mut answer = vec![];
        // The connection is reset or closed without an answer.
        let _closed = babbling.read_to_end(&mut answer);
        assert_eq!(answer, [0_u8; 0]);
        drop(silent);
    });
}

#[test]
fn silent_connections_are_evicted() {
    let (listener, endpoints) = anywhere();
    thread::scope(|scope| {
        let given = scope.spawn(|| meeting(2).serve_id(&listener, &id(), &within(PATIENT)).map(|_| ()));
        let since = Instant::now();
        let _silent: Vec<_> =
            (0..300).map(|_| TcpStream::connect(address(&endpoints[0])).expect("a process should listen")).collect();
        assert_eq!(ask(&meeting(2), &endpoints, 1, PATIENT), Ok(id()));
        assert!(since.elapsed() < HANDSHAKE_LIMIT, "{:?}", since.elapsed());
        assert_eq!(given.join().expect("the thread does not panic"), Ok(()));
    });
}

#[test]
fn a_rank_that_is_missing_does_not_keep_others_from_joining() {
    let (listener, endpoints) = anywhere();
    thread::scope(|scope| {
        let other = scope.spawn(|| ask(&meeting(4), &endpoints, 2, PATIENT));
        let given = meeting(4).serve_id(&listener, &id(), &within(500));
        assert_eq!(given.expect_err("two ranks are missing"), [1, 3]);
        assert_eq!(other.join().expect("the thread does not panic"), Ok(id()), "it has its id");
    });
}

#[test]
fn without_rank_0_the_others_time_out() {
    let (listener, endpoints) = anywhere();
    drop(listener);
    let asked = ask(&meeting(2), &endpoints, 1, 120);
    assert_eq!(answers(&asked), [(address(&endpoints[0]), EndpointAnswer::NotListening)]);
    let asked = ask(&meeting(2), &local_place("nobody").endpoints, 1, 120);
    assert!(matches!(asked, Err(RendezvousError::NoLocalAnswer { foreign_user: None, .. })), "{asked:?}");
}

#[test]
fn a_duplicate_rank_is_rejected_and_a_retry_is_not() {
    let (listener, endpoints) = anywhere();
    for meeting in [meeting(3), secret_meeting(3, SECRET)] {
        thread::scope(|scope| {
            let given = scope.spawn(|| meeting.serve_id(&listener, &id(), &within(PATIENT)).map(|_| ()));
            assert_eq!(ask(&meeting, &endpoints, 1, PATIENT), Ok(id()));
            assert_eq!(ask(&meeting, &endpoints, 1, PATIENT), Err(RendezvousError::RankTwice { rank: 1 }));
            if !meeting.has_secret {
                for _ in 0..2 {
                    let again = Hello { ranks: 3, ..hello(1, 5, false) };
                    let mut stream = TcpStream::connect(address(&endpoints[0])).expect("a process should listen");
                    stream.write_all(&again.bytes()).expect("the message should be sent");
                    assert_eq!(verdict(&mut stream.into()), Some(Verdict::RankTwice), "its session differs");
                }
            }
            assert_eq!(ask(&meeting, &endpoints, 2, PATIENT), Ok(id()));
            assert_eq!(given.join().expect("the thread does not panic"), Ok(()));
        });
    }
}

fn end() -> Instant {
    Instant::now() + Duration::from_millis(PATIENT)
}

fn verdict(connection: &mut Connection) -> Option<Verdict> {
    let mut head = [0; HEAD_BYTES];
    read_until(connection, &mut head, end()).ok()?;
    Verdict::from_head(head).ok()
}

/// A peer of rank 0.
#[derive(Clone, Copy, Debug)]
struct Peer {
    hello: Hello,
    proof: Proof,
    version: u8,
}

/// Returns the peers that a meeting of three ranks may see, one for each combination of what they claim and know.
fn peers() -> Vec<Peer> {
    let mut all = Vec::new();
    for rank in [0, 1, 2, 3, u32::MAX] {
        for (job, ranks) in [(0xABCD, 3), (0xABCE, 3), (0xABCD, 2), (0xABCD, 4), (0, 0)] {
            for has_secret in [false, true] {
                for proof in Proof::ALL {
                    let hello = Hello { job, ranks, ..hello(rank, 77, has_secret) };
                    all.push(Peer { hello, proof, version: VERSION });
                }
            }
        }
    }
    all.push(Peer { hello: hello(1, 77, false), proof: Proof::Missing, version: VERSION + 1 });
    all
}

/// Returns the verdict of rank 0 before a challenge, and the one after it. `None` stands for a closed connection.
fn verdicts(has_secret: bool, peer: &Peer) -> (Verdict, Option<Verdict>) {
    let Peer { hello, proof, version } = *peer;
    if version != VERSION {
        return (Verdict::VersionMismatch, None);
    }
    if (hello.job, hello.ranks) != (0xABCD, 3) || !(1..3).contains(&hello.rank) {
        return (Verdict::DifferentJob, None);
    }
    match (has_secret, hello.has_secret) {
        (false, false) => (Verdict::Welcome, None),
        (false, true) => (Verdict::NoSecret, None),
        (true, false) => (Verdict::SecretNeeded, None),
        (true, true) => (
            Verdict::Challenge,
            match proof {
                Proof::Missing => None,
                Proof::Wrong => Some(Verdict::WrongSecret),
                Proof::Right => Some(Verdict::Welcome),
            },
        ),
    }
}

/// Rank 0 believes only what a peer proves, and no peer keeps the ranks from meeting. A peer that is welcome does not join.
#[test]
fn rank_0_answers_each_peer_by_what_it_claims_and_proves() {
    for has_secret in [false, true] {
        let meeting = if has_secret { secret_meeting(3, SECRET) } else { meeting(3) };
        let (listener, endpoints) = anywhere();
        thread::scope(|scope| {
            let given = scope.spawn(|| meeting.serve_id(&listener, &id(), &within(PATIENT)).map(|it| it.len()));
            let mut silent = Vec::new();
            for peer in peers() {
                let mut bytes = peer.hello.bytes();
                bytes[7] = b'0' + peer.version;
                let mut connection =
                    Connection::from(TcpStream::connect(address(&endpoints[0])).expect("a process should listen"));
                connection.write_all(&bytes).expect("the message should be sent");
                let (first, second) = verdicts(has_secret, &peer);
                assert_eq!(verdict(&mut connection), Some(first), "{peer:?}");
                let mut last = first;
                if first == Verdict::Challenge {
                    let mut exchange = Exchange { hello: peer.hello, nonce: [0; 32], endpoint: endpoints[0].number() };
                    read_until(&mut connection, &mut exchange.nonce, end()).expect("a nonce");
                    let secret = if peer.proof == Proof::Right { SECRET } else { OTHER_SECRET };
                    let secret = Secret::new(secret.into()).expect("the secret is long enough");
                    if peer.proof == Proof::Missing {
                        silent.push(connection);
                        continue;
                    }
                    connection.write_all(&exchange.proof(&secret)).expect("the message should be sent");
                    last = second.expect("an answer to a proof");
                    assert_eq!(verdict(&mut connection), Some(last), "{peer:?}");
                }
                let mut tail = [0; TAIL_BYTES];
                read_until(&mut connection, &mut tail, end()).expect("an answer has two parts");
                let is_told = tail[..SHARED_BYTES] == ID;
                assert_eq!(is_told, last == Verdict::Welcome, "{peer:?}: only a rank of the job gets the id");
                let _refused = connection.write_all(&[2; JOIN_BYTES]);
                let mut rest = [0; 1];
                assert!(read_until(&mut connection, &mut rest, end()).is_err(), "{peer:?}: the connection is closed");
            }
            for rank in [1, 2] {
                assert_eq!(ask(&meeting, &endpoints, rank, PATIENT), Ok(id()));
            }
            assert_eq!(given.join().expect("the thread does not panic"), Ok(2));
        });
    }
}

#[test]
fn a_rank_0_of_another_version_is_an_error_that_states_both_versions() {
    let address = Stranger::VersionMismatch.start();
    let other = Endpoint::Network(address);
    let asked = ask(&meeting(2), std::slice::from_ref(&other), 1, BRIEF);
    assert_eq!(answers(&asked), [(address, EndpointAnswer::VersionMismatch { version: VERSION + 1 })]);
    let text = asked.expect_err("another version").to_string();
    assert!(text.contains("run the same symmalloc version") && text.contains(&format!("{VERSION}")), "{text}");
    // It may belong to another job.
    let (listener, endpoints) = anywhere();
    thread::scope(|scope| {
        let rank = scope.spawn(|| ask(&meeting(2), &[&[other][..], &endpoints].concat(), 1, PATIENT));
        meeting(2).serve_id(&listener, &id(), &within(PATIENT)).expect("the rank should arrive");
        assert_eq!(rank.join().expect("the thread does not panic"), Ok(id()));
    });
}

#[test]
fn a_hello_may_arrive_in_pieces() {
    let (listener, endpoints) = anywhere();
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            let mut stream = TcpStream::connect(address(&endpoints[0])).expect("a process should listen");
            for byte in hello(1, 3, false).bytes() {
                stream.write_all(&[byte]).expect("the message should be sent");
                thread::sleep(Duration::from_millis(2));
            }
            let mut reply = [0; HEAD_BYTES + TAIL_BYTES];
            stream.read_exact(&mut reply).and_then(|()| stream.write_all(&join_bytes(Duration::ZERO))).map(|()| reply)
        });
        meeting(2).serve_id(&listener, &id(), &within(PATIENT)).expect("the rank should arrive");
        let reply = other.join().expect("the thread does not panic").expect("answered");
        assert_eq!(
            (&reply[..HEAD_BYTES], &reply[HEAD_BYTES..][..SHARED_BYTES]),
            (&Verdict::Welcome.head()[..], &ID[..])
        );
    });
}

#[test]
fn a_port_in_use_is_skipped() {
    let (Listener::Network(taken), first) = anywhere() else { panic!("it has an address") };
    let (free, second) = anywhere();
    drop(free);
    let list = EndpointList { endpoints: [first, second.clone()].concat() };
    let listener = list.listen().expect("the second address is free");
    assert_eq!(listener.number(), second[0].number());
    thread::scope(|scope| {
        let other = scope.spawn(|| ask(&meeting(2), &list.endpoints, 1, PATIENT));
        // The stranger on the first port closes every connection.
        scope.spawn(move || {
            let until = Instant::now() + Duration::from_millis(200);
            while Instant::now() < until {
                drop(taken.accept());
                thread::sleep(Duration::from_millis(5));
            }
        });
        meeting(2).serve_id(&listener, &id(), &within(PATIENT)).expect("the rank should arrive");
        assert_eq!(other.join().expect("the thread does not panic"), Ok(id()));
    });
}

/// Asks as a rank with the secret of `theirs`, and then lets the job meet. Returns the error of that rank.
fn asked_by(ours: &Terms, theirs: &Terms, listener: &Listener, endpoints: &[Endpoint]) -> RendezvousError {
    thread::scope(|scope| {
        let since = Instant::now();
        let given = scope.spawn(|| ours.serve_id(listener, &id(), &within(PATIENT)).map(|_| ()));
        let refused = ask(theirs, endpoints, 1, BRIEF).expect_err("its secret is not rank 0's");
        assert_eq!(ask(ours, endpoints, 1, PATIENT), Ok(id()));
        assert_eq!(given.join().expect("the thread does not panic"), Ok(()));
        assert!(since.elapsed() < HANDSHAKE_LIMIT, "{:?}", since.elapsed());
        refused
    })
}

#[test]
fn different_secrets_are_reported_without_delay() {
    let (none, ours, other) = (meeting(2), secret_meeting(2, SECRET), secret_meeting(2, OTHER_SECRET));
    let (listener, endpoints) = anywhere();
    let list = local_place("secrets");
    let local = list.listen().expect("the address is free");
    let cases = [
        (&ours, &other, RendezvousError::WrongSecret, EndpointAnswer::SecretMismatch),
        (&ours, &none, RendezvousError::SecretMissing, EndpointAnswer::SecretNeeded),
        (&none, &ours, RendezvousError::SecretMissingAtRank0, EndpointAnswer::NoSecret),
    ];
    for (ours, theirs, error, answer) in cases {
        assert_eq!(asked_by(ours, theirs, &local, &list.endpoints), error);
        let refused = asked_by(ours, theirs, &listener, &endpoints);
        assert!(refused.to_string().contains("set SYMMALLOC_JOB_SECRET"));
        assert_eq!(answers(&Err(refused)), [(address(&endpoints[0]), answer)]);
    }
}

/// What a peer shows before its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Proof {
    /// It answers without a challenge.
    Missing,
    /// Its proof is not the secret's.
    Wrong,
    /// It knows the secret.
    Right,
}

impl Proof {
    const ALL: [Proof; 3] = [Proof::Missing, Proof::Wrong, Proof::Right];
}

/// A process at an address where rank 0 may be.
#[derive(Clone, Copy, Debug)]
enum Stranger {
    /// Accepts connections and does not answer.
    Silent,
    /// Does not accept connections. The system does so.
    Stopped,
    /// Closes each connection.
    Closing,
    /// Sends a byte a second.
    Slow,
    /// Sends the text of another protocol.
    Foreign,
    /// Sends a rank 0's answer.
    Lying(Proof, Verdict),
    /// Sends the version of another build.
    VersionMismatch,
}

impl Stranger {
    /// Runs the process until the test ends. Returns its address.
    fn start(self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
        let address = listener.local_addr().expect("the socket should be bound");
        thread::spawn(move || {
            if matches!(self, Stranger::Stopped) {
                thread::park();
            }
            let connections = listener.incoming().flatten().map(|stream| thread::spawn(move || self.talk(stream)));
            connections.for_each(drop);
        });
        address
    }

    fn talk(self, mut stream: TcpStream) -> std::io::Result<()> {
        if matches!(self, Stranger::Closing) {
            return Ok(());
        }
        let mut hello = [0; HELLO_BYTES];
        stream.read_exact(&mut hello)?;
        match self {
            Stranger::Slow => loop {
                stream.write_all(b"s")?;
                thread::sleep(Duration::from_secs(1));
            },
            Stranger::Foreign => stream.write_all(&b"HTTP/1.1 400 Bad Request\r\n".repeat(10))?,
            Stranger::VersionMismatch => {
                let mut head = Verdict::VersionMismatch.head();
                head[7] += 1;
                stream.write_all(&[&head[..], &[0; TAIL_BYTES]].concat())?;
            }
            Stranger::Lying(proof, verdict) => {
                let hello = Hello::from_bytes(&hello).expect("a rank's hello");
                let endpoint = stream.local_addr()?.port().into();
                if proof != Proof::Missing {
                    stream.write_all(&[&Verdict::Challenge.head()[..], &[1; 32]].concat())?;
                    stream.read_exact(&mut [0; PROOF_BYTES])?;
                }
                let secret = if proof == Proof::Right { SECRET } else { OTHER_SECRET };
                let secret = Secret::new(secret.into()).expect("the secret is long enough");
                let exchange = Exchange { hello, nonce: [1; 32], endpoint };
                let proof = exchange.answer_proof(&secret, verdict, &id());
                stream.write_all(&[&verdict.head()[..], &id(), &proof].concat())?;
            }
            _ => {}
        }
        stream.read_to_end(&mut Vec::new()).map(drop)
    }
}

/// Returns the answer that a rank notes, or `None` if it believes the stranger.
fn noted(has_secret: bool, proof: Proof, verdict: Verdict) -> Option<EndpointAnswer> {
    use EndpointAnswer::{Contradiction, DifferentJob, NoSecret, SecretMismatch, SecretNeeded};
    match (has_secret, proof, verdict) {
        // A rank without a secret is never challenged.
        (false, Proof::Wrong | Proof::Right, _) => Some(Contradiction),
        (true, Proof::Missing | Proof::Wrong, Verdict::Welcome | Verdict::RankTwice) => Some(Contradiction),
        (_, _, Verdict::Welcome | Verdict::RankTwice) => None,
        (_, _, Verdict::DifferentJob) => Some(DifferentJob),
        (false, _, Verdict::SecretNeeded) => Some(SecretNeeded),
        (true, Proof::Missing, Verdict::NoSecret) => Some(NoSecret),
        (true, Proof::Wrong | Proof::Right, Verdict::WrongSecret) => Some(SecretMismatch),
        _ => Some(Contradiction),
    }
}

/// All strangers, with their answers to a rank. `None` if the rank believes them.
fn strangers(has_secret: bool) -> Vec<(Stranger, Option<EndpointAnswer>)> {
    use EndpointAnswer::{Foreign, Silent};
    let version = EndpointAnswer::VersionMismatch { version: VERSION + 1 };
    let mut all = vec![
        (Stranger::Silent, Some(Silent)),
        (Stranger::Stopped, Some(Silent)),
        (Stranger::Closing, Some(Silent)),
        (Stranger::Slow, Some(Silent)),
        (Stranger::Foreign, Some(Foreign)),
        (Stranger::VersionMismatch, Some(version)),
    ];
    for proof in Proof::ALL {
        // An answer that is a challenge is a proof of its own.
        let verdicts =
            Verdict::ALL.into_iter().filter(|verdict| proof != Proof::Missing || *verdict != Verdict::Challenge);
        all.extend(verdicts.map(|verdict| (Stranger::Lying(proof, verdict), noted(has_secret, proof, verdict))));
    }
    all
}

/// Rank 0 arrives at the last of eight addresses, and late. Strangers listen at all others.
#[test]
fn strangers_at_other_addresses_cost_less_than_a_second() {
    for has_secret in [true, false] {
        let meeting = if has_secret { secret_meeting(3, SECRET) } else { meeting(3) };
        let strangers = strangers(has_secret).into_iter().filter(|(_, answer)| answer.is_some()).map(|(it, _)| it);
        let strangers: Vec<_> = strangers.collect();
        // Seven of each kind that sends no verdict, and the others seven at a time.
        let (lying, others): (Vec<_>, Vec<_>) = strangers.into_iter().partition(|it| matches!(it, Stranger::Lying(..)));
        let groups = others.iter().map(|it| vec![*it; 7]).chain(lying.chunks(7).map(<[_]>::to_vec));
        for group in groups {
            let (own, endpoint) = nobody();
            let others = group.iter().map(|it| Endpoint::Network(it.start()));
            let endpoints: Vec<Endpoint> = others.chain([endpoint]).collect();
            thread::scope(|scope| {
                let (meeting, endpoints) = (&meeting, &endpoints);
                let ranks = [1, 2].map(|rank| scope.spawn(move || ask(meeting, endpoints, rank, PATIENT)));
                thread::sleep(Duration::from_millis(100));
                let since = Instant::now();
                rustix::net::listen(&own, 128).expect("the socket should be bound");
                let listener = TcpListener::from(own);
                listener.set_nonblocking(true).expect("the socket should accept the setting");
                let listener = Listener::Network(listener);
                let connections = meeting.serve_id(&listener, &id(), &within(PATIENT)).expect("the ranks arrive");
                for rank in ranks {
                    assert_eq!(rank.join().expect("the thread does not panic"), Ok(id()), "{group:?}");
                }
                let limit = scaled_to_load(Duration::from_secs(1));
                assert!(since.elapsed() < limit, "{:?} with {group:?}", since.elapsed());
                drop(connections);
            });
        }
    }
}

#[test]
fn the_error_contains_the_answer_of_each_address_and_the_most_likely_cause() {
    let (_port, nobody) = nobody();
    let causes = [
        (EndpointAnswer::VersionMismatch { version: VERSION + 1 }, "run the same symmalloc version"),
        (EndpointAnswer::NoSecret, "Rank 0 probably lacks the job secret"),
        (EndpointAnswer::SecretNeeded, "This rank probably lacks the job secret"),
        (EndpointAnswer::SecretMismatch, "set SYMMALLOC_JOB_SECRET"),
        (EndpointAnswer::DifferentJob, "all ranks have the same job"),
        (EndpointAnswer::Silent, "stopped or late"),
        (EndpointAnswer::Foreign, "Another program probably uses rank 0's port"),
        (EndpointAnswer::Contradiction, "Another program probably uses rank 0's port"),
    ];
    for has_secret in [true, false] {
        let meeting = if has_secret { secret_meeting(3, SECRET) } else { meeting(3) };
        // All at the same time, because each answer is collected until the deadline.
        thread::scope(|scope| {
            for (number, (stranger, expected)) in (0..).zip(strangers(has_secret)) {
                let (meeting, nobody, causes) = (&meeting, &nobody, &causes);
                scope.spawn(move || {
                    let (address, rank) = (stranger.start(), 1 + number % 2);
                    let patience = if expected.is_some() { 2 * BRIEF } else { PATIENT };
                    let asked = ask(meeting, &[Endpoint::Network(address), nobody.clone()], rank, patience);
                    let Some(expected) = expected else {
                        let believed = match stranger {
                            Stranger::Lying(_, Verdict::RankTwice) => Err(RendezvousError::RankTwice { rank }),
                            _ => Ok(id()),
                        };
                        return assert_eq!(asked, believed, "{stranger:?}, secret: {has_secret}");
                    };
                    let nobody = (self::address(nobody), EndpointAnswer::NotListening);
                    assert_eq!(answers(&asked), [(address, expected), nobody], "{stranger:?}, secret: {has_secret}");
                    let text = asked.expect_err("no rank 0").to_string();
                    let (_, cause) = causes.iter().find(|(answer, _)| *answer == expected).expect("all are listed");
                    let parts =
                        [*cause, &format!("{address}: {expected}"), &format!("{}: no process listens there", nobody.0)];
                    assert!(parts.iter().all(|part| text.contains(part)), "{stranger:?}: {text}");
                });
            }
        });
    }
}

/// Rank 0 listens first and may then be busy for longer than an attempt lasts. Connections that the rank gave up must not count.
#[test]
fn a_rank_that_gave_up_its_first_attempts_meets_on_its_last_one() {
    let list = local_place("late");
    let listener = list.listen().expect("the address is free");
    thread::scope(|scope| {
        let other = scope.spawn(|| meeting(2).request_id(&list.endpoints, 1, &within(PATIENT)));
        thread::sleep(Duration::from_millis(2500));
        let connections = meeting(2).serve_id(&listener, &id(), &within(PATIENT)).expect("the rank should arrive");
        let [(1, mut at_rank_0)] = <[_; 1]>::try_from(connections).expect("one rank should suffice") else {
            panic!("another rank")
        };
        let (_, mut at_rank) = other.join().expect("the thread does not panic").expect("rank 0 answers");
        at_rank_0.write_all(b"the same connection").expect("the connection should be open");
        let mut text = [0; 19];
        read_until(&mut at_rank, &mut text, end()).expect("the connection should be open");
        assert_eq!(&text, b"the same connection");
    });
}

/// Takes part as rank 1 with the secret, or with a replayed earlier proof. Returns the answer and the proof.
fn speak(to: SocketAddr, earlier: Option<[u8; PROOF_BYTES]>) -> (Option<Verdict>, [u8; PROOF_BYTES]) {
    let hello = hello(1, 3, true);
    let mut connection = Connection::from(TcpStream::connect(to).expect("a process should listen"));
    connection.write_all(&hello.bytes()).expect("the message should be sent");
    assert_eq!(verdict(&mut connection), Some(Verdict::Challenge));
    let mut exchange = Exchange { hello, nonce: [0; 32], endpoint: to.port().into() };
    read_until(&mut connection, &mut exchange.nonce, end()).expect("a nonce");
    let secret = Secret::new(SECRET.into()).expect("the secret is long enough");
    let proof = earlier.unwrap_or_else(|| exchange.proof(&secret));
    connection.write_all(&proof).expect("the message should be sent");
    let answer = verdict(&mut connection);
    if answer == Some(Verdict::Welcome) {
        connection.write_all(&join_bytes(Duration::ZERO)).expect("the message should be sent");
    }
    (answer, proof)
}

#[test]
fn a_proof_cannot_be_replayed() {
    let (listener, endpoints) = anywhere();
    let meeting = Terms { ranks: 2, ..secret_meeting(2, SECRET) };
    thread::scope(|scope| {
        let first = scope.spawn(|| meeting.serve_id(&listener, &id(), &within(PATIENT)).map(|_| ()));
        let (answer, proof) = speak(address(&endpoints[0]), None);
        assert_eq!(answer, Some(Verdict::Welcome));
        assert_eq!(first.join().expect("the thread does not panic"), Ok(()));
        // The next meeting has the same name, as after a restart of the job.
        let second = scope.spawn(|| meeting.serve_id(&listener, &id(), &within(PATIENT)).map(|_| ()));
        assert_eq!(speak(address(&endpoints[0]), Some(proof)).0, Some(Verdict::WrongSecret));
        assert_eq!(ask(&meeting, &endpoints, 1, PATIENT), Ok(id()));
        assert_eq!(second.join().expect("the thread does not panic"), Ok(()));
    });
}

/// Relays data in both directions until one side closes the connection.
fn relay(from: TcpStream, to: SocketAddr) {
    let Ok(to) = TcpStream::connect(to) else { return };
    let copy = |mut from: TcpStream, mut to: TcpStream| {
        thread::spawn(move || {
            let _copied = std::io::copy(&mut from, &mut to);
            let _closed = to.shutdown(std::net::Shutdown::Both);
        })
    };
    copy(
        from.try_clone().expect("the socket should accept the setting"),
        to.try_clone().expect("the socket should accept the setting"),
    );
    copy(to, from);
}

#[test]
fn a_relay_is_detected() {
    let (listener, endpoints) = anywhere();
    let relaying = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
    let in_between = [Endpoint::Network(relaying.local_addr().expect("the socket should be bound"))];
    let meeting = secret_meeting(2, SECRET);
    thread::scope(|scope| {
        let to = address(&endpoints[0]);
        thread::spawn(move || relaying.incoming().flatten().for_each(|stream| relay(stream, to)));
        let given = scope.spawn(|| meeting.serve_id(&listener, &id(), &within(PATIENT)).map(|_| ()));
        assert_eq!(answers(&ask(&meeting, &in_between, 1, BRIEF))[0].1, EndpointAnswer::SecretMismatch);
        assert_eq!(ask(&meeting, &endpoints, 1, PATIENT), Ok(id()));
        assert_eq!(given.join().expect("the thread does not panic"), Ok(()));
    });
}

#[test]
fn a_socket_name_in_use_is_skipped() {
    let list = local_place("squatted");
    let squatter = list.endpoints[0].listen().expect("the address is free");
    let listener = list.listen().expect("the second address is free");
    assert_eq!((listener.number(), list.endpoints[1].number()), (1, 1));
    thread::scope(|scope| {
        let other = scope.spawn(|| ask(&meeting(2), &list.endpoints, 1, PATIENT));
        scope.spawn(move || {
            let until = Instant::now() + Duration::from_millis(200);
            while Instant::now() < until {
                drop(squatter.accept());
                thread::sleep(Duration::from_millis(5));
            }
        });
        let connections = meeting(2).serve_id(&listener, &id(), &within(PATIENT)).expect("the rank should arrive");
        assert!(matches!(connections[..], [(1, Connection::Unix(_))]));
        assert_eq!(other.join().expect("the thread does not panic"), Ok(id()));
    });
}

#[test]
fn another_user_is_rejected() {
    let list = local_place("intruder");
    let listener = list.listen().expect("the address is free");
    thread::scope(|scope| {
        let given = scope.spawn(|| meeting(2).serve_id(&listener, &id(), &within(PATIENT)).map(|_| ()));
        // The other user knows the names because they can be guessed.
        let intruded = as_another_user(|| {
            let Endpoint::Local(name) = &list.endpoints[0] else { panic!("a socket") };
            let mut connection = Connection::from(name.connect().expect("any user can connect"));
            let _sent = connection.write_all(&hello(1, 3, false).bytes());
            verdict(&mut connection)
        });
        assert_eq!(intruded.flatten(), None, "it gets no answer");
        assert_eq!(ask(&meeting(2), &list.endpoints, 1, PATIENT), Ok(id()));
        assert_eq!(given.join().expect("the thread does not panic"), Ok(()));
    });
}

#[test]
fn a_socket_name_of_another_user_is_skipped() {
    let list = local_place("foreign");
    let Some(_squatter) = as_another_user(|| list.endpoints[0].listen().expect("the address is free")) else { return };
    let listener = list.listen().expect("the second address is free");
    assert_eq!(listener.number(), 1);
    let Endpoint::Local(name) = &list.endpoints[0] else { panic!("a socket") };
    let connection = name.connect().expect("any user can connect");
    assert_eq!(foreign_user(&connection).expect("the connection should succeed"), Some(65534));
    let asked = ask(&meeting(2), &list.endpoints[..1], 1, 100);
    assert!(matches!(asked, Err(RendezvousError::NoLocalAnswer { foreign_user: Some(65534), .. })), "{asked:?}");
    thread::scope(|scope| {
        let other = scope.spawn(|| ask(&meeting(2), &list.endpoints, 1, PATIENT));
        meeting(2).serve_id(&listener, &id(), &within(PATIENT)).expect("the rank should arrive");
        assert_eq!(other.join().expect("the thread does not panic"), Ok(id()));
    });
}
