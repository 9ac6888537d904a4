//! Tests of meetings through each store: with delays, restarts of a rank, wrong secrets, missing ranks, values of earlier runs and floods.

use crate::admission::Admission;
use crate::card::{Card, MISSING_MAX, Outcome};
use crate::deadline::Deadline;
use crate::endpoint::{Endpoint, Listener, wait_for_any};
use crate::error::{EndpointAnswer, RendezvousError};
use crate::folder::FolderStore;
use crate::handshake::SHARED_BYTES;
use crate::launch::Launch;
use crate::meeting::{Meeting, Met, RANKS_MAX, Reach};
use crate::own::{RemoteStore, ServedStore};
use crate::place::{EndpointList, Place};
use crate::search::{Identity, search};
use crate::secret::{Secret, TOKEN_BYTES, random};
use crate::store::{Store, Values};
use crate::tests::torch_stand_in::StandIn;
use crate::tests::{OTHER_SECRET, SECRET, launch};
use crate::torch_store::TorchStore;
use crate::{Job, meet, share, share_through};
use std::io::Write;
use std::net::{Ipv6Addr, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use stub_process::{scaled_to_load, until};

const ID: [u8; SHARED_BYTES] = [7; SHARED_BYTES];
/// A time limit in milliseconds that suffices for all expected ranks.
const PATIENT: u64 = 30_000;

fn within(millis: u64) -> Deadline {
    Deadline::after(Duration::from_millis(millis))
}

fn secret(text: &str) -> Option<Secret> {
    Some(Secret::new(text.into()).expect("the secret is long enough"))
}

/// The result of a rank: the id, or its error.
type Ended = Result<[u8; SHARED_BYTES], RendezvousError>;

fn ended(met: Result<Met, RendezvousError>) -> Ended {
    met.map(|met| met.id)
}

/// A place where the ranks of one test meet.
enum Venue {
    Memory(Values),
    /// A place, and a folder that it needs until the test ends.
    Place {
        place: Place,
        _folder: Option<tempfile::TempDir>,
    },
}

impl Venue {
    const KINDS: u64 = 6;

    fn new(kind: u64, meeting: &Meeting) -> Self {
        match kind % Self::KINDS {
            0 => Venue::Memory(Values::default()),
            1 => {
                let server = StandIn::start();
                let place = Place::Torch { host: "127.0.0.1".to_owned(), port: server.address.port() };
                Venue::Place { place, _folder: None }
            }
            2 => {
                let folder = tempfile::tempdir().expect("a folder should be created");
                Venue::Place { place: Place::Folder(folder.path().join("job")), _folder: Some(folder) }
            }
            3 => Venue::Place { place: Place::at("127.0.0.1:29999", meeting).expect("an address"), _folder: None },
            kind => {
                let [v4, v6] = [([127, 0, 0, 1], 0).into(), (Ipv6Addr::LOCALHOST, 0).into()].map(Endpoint::Network);
                // A machine may have no IPv6.
                let free = if kind == 4 { v4.listen() } else { v6.listen().or_else(|_| v4.listen()) };
                let Ok(Listener::Network(free)) = free else { panic!("{free:?} has no address") };
                let endpoints = vec![Endpoint::Network(free.local_addr().expect("the socket should be bound"))];
                Venue::Place { place: Place::Own(EndpointList { endpoints }), _folder: None }
            }
        }
    }

    fn hold(&self, meeting: &Meeting, rank: u32, deadline: &Deadline) -> Ended {
        let create = || Ok(ID);
        ended(match self {
            Venue::Memory(values) => meeting.hold(values, &Reach::Machine, rank, create, deadline),
            Venue::Place { place, .. } => place.hold(meeting, rank, create, deadline),
        })
    }

    /// Calls `body` with the store that a rank opens. Rank 0's own store ends afterward.
    fn with_store(&self, meeting: &Meeting, rank: u32, body: impl FnOnce(&dyn Store)) {
        match self {
            Venue::Memory(values) => body(values),
            Venue::Place { place: Place::Torch { host, port }, .. } => {
                body(&TorchStore::connect(host, *port, &within(PATIENT)).expect("it should run"));
            }
            Venue::Place { place: Place::Folder(folder), .. } => {
                body(&FolderStore::open(folder).expect("it should be private"));
            }
            Venue::Place { place: Place::Own(list), .. } if rank == 0 => {
                let refused = |_, _| ("refused".to_owned(), Vec::new());
                let listener = list.listen().expect("the address is free");
                body(&ServedStore::start(listener, meeting.store_terms(), refused).expect("a thread should start"));
            }
            Venue::Place { place: Place::Own(list), .. } => {
                let identity = Identity { rank, session: 1, deadline: within(PATIENT) };
                body(&RemoteStore::new(meeting.store_terms(), list.endpoints.clone(), identity));
            }
        }
    }
}

/// Runs ranks as threads, each with its meeting, and returns their results.
fn run(venue: &Venue, meetings: &[Meeting], millis: u64, delay: impl Fn(u32) -> u64 + Sync) -> Vec<Ended> {
    thread::scope(|scope| {
        let threads: Vec<_> = (0_u32..)
            .zip(meetings)
            .map(|(rank, meeting)| {
                let delay = &delay;
                scope.spawn(move || {
                    thread::sleep(Duration::from_millis(delay(rank)));
                    venue.hold(meeting, rank, &within(millis))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("the thread does not panic")).collect()
    })
}

/// Returns a new meeting.
fn meeting(ranks: u32, secret: Option<Secret>) -> Meeting {
    Meeting { job: u64::from_le_bytes(random().expect("random numbers should be available")), ranks, secret }
}

#[test]
fn ranks_meet_through_every_store_with_and_without_a_secret() {
    for secret in [None, secret(SECRET)] {
        for kind in 0..Venue::KINDS {
            let meeting = meeting(4, secret.clone());
            let venue = Venue::new(kind, &meeting);
            let results = run(&venue, &vec![meeting; 4], PATIENT, |rank| u64::from(3 - rank) * 20);
            assert_eq!(results, vec![Ok(ID); 4], "store {kind}");
        }
    }
}

/// The ranks that arrived learn the same outcome, at the first deadline.
#[test]
fn ranks_without_one_of_them_name_it_alike() {
    for kind in 0..Venue::KINDS {
        let meeting = meeting(4, None);
        let venue = Venue::new(kind, &meeting);
        let results = run(&venue, &vec![meeting; 3], 400, |_| 0);
        let Err(RendezvousError::Missing { missing, found, .. }) = &results[0] else { panic!("{results:?}") };
        assert_eq!((&missing[..], &found[..]), (&[3][..], &[][..]), "store {kind}");
        assert_eq!(results, vec![results[0].clone(); 3], "store {kind}");
    }
}

/// Regression test: the names of more than 10,900 missing ranks did not fit into the store, so a rank that came later learned nothing.
#[test]
fn a_meeting_without_most_of_its_ranks_names_the_first_ones() {
    let meeting = meeting(20_000, None);
    let venue = Venue::new(0, &meeting);
    let results = run(&venue, &vec![meeting.clone(); 2], 300, |_| 0);
    let Err(RendezvousError::Missing { missing, more, .. }) = &results[0] else { panic!("{results:?}") };
    assert_eq!((missing.len(), missing[0], *more), (MISSING_MAX, 2, 19_998 - MISSING_MAX as u32));
    let text = results[0].as_ref().expect_err("missing").to_string();
    assert!(text.starts_with("ranks 2-1025 and 18974 more did not arrive within"), "{text}");
    assert_eq!(results[1], results[0]);
    assert_eq!(venue.hold(&meeting, 9, &within(100)), results[0], "a rank that comes later");
}

#[test]
fn the_first_deadline_of_a_rank_that_arrived_ends_the_meeting_of_all() {
    let meeting = meeting(4, None);
    let venue = Venue::new(0, &meeting);
    thread::scope(|scope| {
        let start = |rank, millis| {
            let (venue, meeting) = (&venue, &meeting);
            scope.spawn(move || venue.hold(meeting, rank, &within(millis)))
        };
        let since = Instant::now();
        let ranks = [start(0, PATIENT), start(1, PATIENT), start(2, 300)];
        let results = ranks.map(|rank| rank.join().expect("the thread does not panic"));
        let Err(RendezvousError::Missing { missing, .. }) = &results[0] else { panic!("{results:?}") };
        assert_eq!(missing, &[3]);
        assert_eq!(results, [results[0].clone(), results[0].clone(), results[0].clone()]);
        assert!(since.elapsed() < Duration::from_millis(PATIENT / 2));
    });
}

#[test]
fn a_rank_with_another_secret_or_none_ends_the_meeting_of_all() {
    for kind in 0..Venue::KINDS {
        for (theirs, found, own) in [
            (secret(OTHER_SECRET), EndpointAnswer::SecretMismatch, RendezvousError::WrongSecret),
            (None, EndpointAnswer::SecretNeeded, RendezvousError::SecretMissing),
        ] {
            let ours = meeting(3, secret(SECRET));
            let venue = Venue::new(kind, &ours);
            let other = Meeting { secret: theirs, ..ours.clone() };
            let results = run(&venue, &[ours.clone(), ours, other], 700, |_| 0);
            let Err(RendezvousError::Missing { missing, found: noted, .. }) = &results[0] else {
                panic!("{results:?}")
            };
            assert_eq!((&missing[..], &noted[..]), (&[2][..], &[(2, found)][..]), "store {kind}: {results:?}");
            assert_eq!(results[1], results[0], "store {kind}");
            let text = results[0].as_ref().expect_err("missing").to_string();
            assert!(text.contains("Rank 2 could not join") && text.contains("job secret"), "{text}");
            match &results[2] {
                // An own store on a network cannot prove who refuses, so the rank looks for another one until its deadline.
                Err(RendezvousError::NoAnswer { answers, .. }) if kind > 3 => assert_eq!(answers[0].1, found),
                result => assert_eq!(result, &Err(own), "store {kind}"),
            }
        }
    }
}

/// Joins as a process that ends before all ranks have arrived.
fn join_and_end(venue: &Venue, meeting: &Meeting, rank: u32) {
    venue.with_store(meeting, rank, |store| {
        let identity = Identity { rank, session: 1, deadline: within(PATIENT) };
        let key = format!("symmalloc/{:016x}/card", meeting.job);
        let card = store.wait(&key, &identity.deadline).expect("rank 0 arrives");
        let card = Card::from_bytes(&card, meeting.ranks).expect("a card");
        drop(search(&meeting.terms(&card.token), &card.endpoints, identity, &identity.deadline));
    });
}

#[test]
fn a_rank_that_restarts_takes_its_place_again() {
    for kind in 0..Venue::KINDS {
        let meeting = meeting(4, None);
        let venue = Venue::new(kind, &meeting);
        thread::scope(|scope| {
            let start = |rank| {
                let (venue, meeting) = (&venue, &meeting);
                scope.spawn(move || venue.hold(meeting, rank, &within(PATIENT)))
            };
            let early = [start(0), start(2)];
            join_and_end(&venue, &meeting, 1);
            // Rank 3 comes last, so that the others wait for it when rank 1 ends.
            let late = start(3);
            assert_eq!(venue.hold(&meeting, 1, &within(PATIENT)), Ok(ID), "store {kind}");
            for rank in early.into_iter().chain([late]) {
                assert_eq!(rank.join().expect("the thread does not panic"), Ok(ID), "store {kind}");
            }
        });
    }
}

/// Acts as a rank 0 that accepts ranks for some time and then ends without an outcome.
fn host_and_end(venue: &Venue, meeting: &Meeting, millis: u64) {
    venue.with_store(meeting, 0, |store| {
        let token = random::<TOKEN_BYTES>().expect("random numbers should be available");
        let listener = Endpoint::Network(([127, 0, 0, 1], 0).into()).listen().expect("a port should be free");
        let Listener::Network(bound) = &listener else { panic!("it has an address") };
        let endpoints = vec![Endpoint::Network(bound.local_addr().expect("the socket should be bound"))];
        let key = format!("symmalloc/{:016x}/card", meeting.job);
        store.set(&key, &Card { token, endpoints, outcome: None }.bytes(), &within(PATIENT)).expect("it should be set");
        let mut admission = Admission::new(meeting.terms(&token), ID);
        let (end, mut admitted) = (within(millis), Vec::new());
        while !end.is_over() {
            let opened = [listener.as_fd()].into_iter().chain(admission.descriptors());
            let ready = wait_for_any(opened, Duration::from_millis(5));
            admitted.extend(admission.poll(&ready[1..], |_, _, _| false));
            admission.accept(&listener);
        }
    });
}

#[test]
fn a_rank_0_that_restarts_is_found_again() {
    for kind in 0..Venue::KINDS {
        let meeting = meeting(3, secret(SECRET));
        let venue = Venue::new(kind, &meeting);
        thread::scope(|scope| {
            let others = [1, 2].map(|rank| {
                let (venue, meeting) = (&venue, &meeting);
                scope.spawn(move || venue.hold(meeting, rank, &within(PATIENT)))
            });
            host_and_end(&venue, &meeting, 60);
            assert_eq!(venue.hold(&meeting, 0, &within(PATIENT)), Ok(ID), "store {kind}");
            for rank in others {
                assert_eq!(rank.join().expect("the thread does not panic"), Ok(ID), "store {kind}");
            }
        });
    }
}

/// A store that lasts longer than a job keeps its card, also that of a failed one. Neither misleads the next job with the same name.
#[test]
fn cards_of_earlier_runs_do_not_mislead_the_next_one() {
    let (_port, nobody) = crate::tests::nobody();
    let found = vec![(1, EndpointAnswer::Silent)];
    let failed = Outcome::Missing { missing: vec![1], more: 0, found, waited: Duration::from_secs(9) };
    for kind in 0..3 {
        for outcome in [None, Some(failed.clone())] {
            let meeting = meeting(2, None);
            let venue = Venue::new(kind, &meeting);
            let key = format!("symmalloc/{:016x}/card", meeting.job);
            let stale = Card { token: [1; TOKEN_BYTES], endpoints: vec![nobody.clone()], outcome: outcome.clone() };
            venue.with_store(&meeting, 0, |store| {
                store.set(&key, &stale.bytes(), &within(PATIENT)).expect("it should be set");
            });
            let results = run(&venue, &vec![meeting.clone(); 2], PATIENT, |rank| u64::from(1 - rank) * 150);
            assert_eq!(results, vec![Ok(ID); 2], "store {kind}");
            // A rank that comes after the others gave up reports why they did.
            venue.with_store(&meeting, 0, |store| {
                store.set(&key, &stale.bytes(), &within(PATIENT)).expect("it should be set");
            });
            let late = venue.hold(&meeting, 1, &within(100));
            match outcome {
                Some(outcome) => assert_eq!(late, Err(outcome.result().expect_err("missing")), "store {kind}"),
                None => assert!(matches!(late, Err(RendezvousError::NoAnswer { .. })), "store {kind}: {late:?}"),
            }
        }
    }
}

#[test]
fn two_processes_with_one_rank_are_an_error_of_the_later_one() {
    for kind in 0..Venue::KINDS {
        let meeting = meeting(3, secret(SECRET));
        let venue = Venue::new(kind, &meeting);
        thread::scope(|scope| {
            let first = [0, 1].map(|rank| {
                let (venue, meeting) = (&venue, &meeting);
                scope.spawn(move || venue.hold(meeting, rank, &within(PATIENT)))
            });
            thread::sleep(scaled_to_load(Duration::from_millis(300)));
            let twice = venue.hold(&meeting, 1, &within(PATIENT));
            assert_eq!(twice, Err(RendezvousError::RankTwice { rank: 1 }), "store {kind}");
            assert_eq!(venue.hold(&meeting, 2, &within(PATIENT)), Ok(ID), "store {kind}");
            for rank in first {
                assert_eq!(rank.join().expect("the thread does not panic"), Ok(ID), "store {kind}");
            }
        });
    }
}

/// The n-th meeting at an address is the n-th of every rank. A rank that is ahead does not meet one that is behind.
#[test]
fn only_ranks_in_the_same_turn_meet() {
    let name = format!("turns-{}", std::process::id());
    let meet = |rank, millis| meet("127.0.0.1:29999", &name, rank, 2, &within(millis)).map(|met| met.is_some());
    let both = |millis| {
        thread::scope(|scope| {
            let other = scope.spawn(|| meet(1, millis));
            (meet(0, millis), other.join().expect("the thread does not panic"))
        })
    };
    assert_eq!(both(PATIENT), (Ok(true), Ok(true)));
    assert!(meet(1, 50).is_err(), "rank 0 is not there");
    let (rank_0, rank_1) = both(400);
    assert!(rank_0.is_err() && rank_1.is_err(), "one is in its second turn, the other in its third");
    assert!(meet(0, 50).is_err(), "rank 1 is not there");
    assert_eq!(both(PATIENT), (Ok(true), Ok(true)), "both are in their fourth turn");
}

/// Regression test: rank 0 allocated 64 GB for `WORLD_SIZE=4294967295`.
#[test]
fn a_number_of_ranks_that_no_job_has_is_an_error() {
    let refused = |ranks| Err(RendezvousError::TooManyRanks { ranks, ranks_max: RANKS_MAX });
    let create = || Ok::<_, RendezvousError>(ID);
    for ranks in [RANKS_MAX + 1, u32::MAX] {
        for rank in [0, 1, ranks - 1] {
            let launch = Launch { rank, ..launch(ranks, 1, "many") };
            assert_eq!(ended(share(&launch, create, &within(PATIENT))), refused(ranks), "rank {rank}");
            let job = Job { name: "many", rank, ranks };
            assert_eq!(ended(share_through(&Values::default(), job, create, &within(PATIENT))), refused(ranks));
            let met = meet("/nowhere", "many", rank, ranks, &within(PATIENT));
            assert_eq!(met.map(|_| ID), refused(ranks));
        }
    }
    assert!(Meeting::new(1, RANKS_MAX, None).is_ok());
}

#[test]
fn meetings_differ_by_job_and_turn() {
    let job = |text, turn| crate::meeting_of(&launch(2, 2, text), turn, None).map(|meeting| meeting.job);
    assert_eq!(job("a", 0), job("a", 0));
    assert_ne!(job("a", 0), job("b", 0));
    assert_ne!(job("a", 0), job("a", 1));
}

#[test]
fn a_program_meets_through_a_store_of_its_own_in_turns() {
    let values = Values::default();
    let share = |rank| {
        let job = Job { name: "own", rank, ranks: 2 };
        share_through(&values, job, || Ok::<_, RendezvousError>([rank as u8; SHARED_BYTES]), &within(PATIENT))
    };
    for _ in 0..2 {
        thread::scope(|scope| {
            let other = scope.spawn(|| share(1));
            let met = share(0).expect("both arrive");
            assert_eq!(met.connections.iter().map(|(rank, _)| *rank).collect::<Vec<_>>(), [1]);
            assert_eq!(other.join().expect("the thread does not panic").expect("both arrive").id, [0; SHARED_BYTES]);
        });
    }
}

/// The cost of a meeting at rank 0 grows with the number of ranks, and not with its square. `SYMMALLOC_RANKS` sets the number.
#[test]
fn many_ranks_meet() {
    let ranks: u32 = std::env::var("SYMMALLOC_RANKS").map_or(128, |text| text.parse().expect("it should be a number"));
    let meeting = meeting(ranks, secret(SECRET));
    let venue = Venue::new(0, &meeting);
    let since = Instant::now();
    let results = run(&venue, &vec![meeting; ranks as usize], PATIENT, |_| 0);
    println!("{ranks} ranks met in {:?}", since.elapsed());
    assert!(results.iter().all(|result| *result == Ok(ID)));
}

/// Connects to an address as fast as it can until the flag is set, and sends garbage or nothing.
fn flood(address: SocketAddr, is_over: &AtomicBool) {
    let mut open = std::collections::VecDeque::new();
    while !is_over.load(Ordering::Relaxed) {
        let Ok(mut stream) = TcpStream::connect_timeout(&address, Duration::from_millis(100)) else { continue };
        if open.len() % 2 == 0 {
            let _sent = stream.write_all(b"GET / HTTP/1.1\r\n\r\n");
        }
        open.push_back(stream);
        if open.len() > 200 {
            open.pop_front();
        }
    }
}

/// Strangers flood the port of the own store, and the one at which rank 0 accepts the others.
#[test]
fn a_flood_of_foreign_connections_costs_less_than_a_second() {
    for kind in [0, 5] {
        let meeting = meeting(4, secret(SECRET));
        let venue = Venue::new(kind, &meeting);
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let (venue, meeting, is_over) = (&venue, &meeting, &is_over);
            let rank_0 = scope.spawn(move || match venue {
                Venue::Memory(values) => {
                    let reach = Reach::Network { toward: vec![([127, 0, 0, 1], 9).into()], named: Vec::new() };
                    ended(meeting.hold(values, &reach, 0, || Ok(ID), &within(PATIENT)))
                }
                Venue::Place { .. } => venue.hold(meeting, 0, &within(PATIENT)),
            });
            let address = match venue {
                Venue::Memory(values) => {
                    let key = format!("symmalloc/{:016x}/card", meeting.job);
                    let card = values.wait(&key, &within(PATIENT)).expect("rank 0 arrives");
                    let card = Card::from_bytes(&card, 4).expect("a card");
                    let addresses: Vec<SocketAddr> = card.endpoints.iter().filter_map(Endpoint::address).collect();
                    // With IPv6, the flood leaves the ports of IPv4 to the other tests.
                    *addresses.iter().find(|it| it.is_ipv6()).unwrap_or(&addresses[0])
                }
                Venue::Place { place: Place::Own(list), .. } => list.endpoints[0].address().expect("a network address"),
                Venue::Place { .. } => panic!("not flooded here"),
            };
            for _ in 0..4 {
                scope.spawn(move || flood(address, is_over));
            }
            thread::sleep(Duration::from_millis(200));
            let since = Instant::now();
            let others = [1, 2, 3].map(|rank| scope.spawn(move || venue.hold(meeting, rank, &within(PATIENT))));
            for rank in others.into_iter().chain([rank_0]) {
                assert_eq!(rank.join().expect("the thread does not panic"), Ok(ID), "store {kind}");
            }
            let elapsed = since.elapsed();
            is_over.store(true, Ordering::Relaxed);
            assert!(elapsed < scaled_to_load(Duration::from_secs(1)), "store {kind}: {elapsed:?}");
        });
    }
}

/// A generator of numbers that follow from a seed (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}

/// A fault of one rank in a generated meeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// The rank ends while it waits for the others, and starts again. One of the others waits for that, so that not all have arrived.
    Restart(u32),
    /// Rank 0 ends after this many milliseconds, and starts again.
    RestartOfRank0(u64),
    SecretMismatch(u32),
    NoSecret(u32),
    /// The rank never starts.
    Missing(u32),
}

impl Fault {
    fn draw(random: &mut Random, ranks: u32) -> Self {
        let rank = 1 + random.below(u64::from(ranks) - 1) as u32;
        match random.below(10) {
            4 if ranks > 2 => Fault::Restart(rank),
            5 => Fault::RestartOfRank0(random.below(80)),
            6 => Fault::SecretMismatch(rank),
            7 => Fault::NoSecret(rank),
            8..10 => Fault::Missing(rank),
            _ => Fault::None,
        }
    }
}

/// Checks that all ranks meet, or that all that arrived end with one cause.
fn generated_meeting(seed: u64) {
    let mut random = Random(seed);
    let ranks = 2 + random.below(5) as u32;
    let fault = Fault::draw(&mut random, ranks);
    let delays: Vec<u64> = (0..ranks).map(|_| random.below(80)).collect();
    let ours = meeting(ranks, secret(SECRET));
    let kind = random.below(Venue::KINDS);
    let venue = Venue::new(kind, &ours);
    let theirs = |text| Meeting { secret: text, ..ours.clone() };
    let of_rank = |rank| match fault {
        Fault::SecretMismatch(of) if of == rank => theirs(secret(OTHER_SECRET)),
        Fault::NoSecret(of) if of == rank => theirs(None),
        _ => ours.clone(),
    };
    let fails = matches!(fault, Fault::SecretMismatch(_) | Fault::NoSecret(_) | Fault::Missing(_));
    let millis = if fails { 700 } else { PATIENT };
    let has_restarted = AtomicBool::new(false);
    let results: Vec<Option<Ended>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                let (venue, delay, meeting) = (&venue, delays[rank as usize], of_rank(rank));
                let has_restarted = &has_restarted;
                scope.spawn(move || {
                    thread::sleep(Duration::from_millis(delay));
                    match fault {
                        Fault::Missing(of) if of == rank => return None,
                        Fault::Restart(of) if of == rank => {
                            join_and_end(venue, &meeting, rank);
                            has_restarted.store(true, Ordering::Release);
                        }
                        Fault::Restart(of) if rank == 1 + of % (ranks - 1) => {
                            until(|| has_restarted.load(Ordering::Acquire));
                        }
                        Fault::RestartOfRank0(millis) if rank == 0 => host_and_end(venue, &meeting, millis),
                        _ => {}
                    }
                    Some(venue.hold(&meeting, rank, &within(millis)))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("the thread does not panic")).collect()
    });
    let story = format!("seed {seed}: store {kind}, {fault:?}, delays {delays:?}: {results:#?}");
    if !fails {
        assert!(results.iter().all(|result| *result == Some(Ok(ID))), "{story}");
        return;
    }
    let Some(Err(cause @ RendezvousError::Missing { missing, .. })) = &results[0] else { panic!("{story}") };
    let (Fault::SecretMismatch(at) | Fault::NoSecret(at) | Fault::Missing(at)) = fault else { panic!("{story}") };
    assert!(missing.contains(&at), "{story}");
    for (rank, result) in (0..).zip(&results) {
        match result {
            // On a busy machine, another rank may be late.
            Some(result) if missing.contains(&rank) => assert!(result.is_err(), "{story}"),
            Some(result) => assert_eq!(result, &Err(cause.clone()), "rank {rank} of {story}"),
            None => assert_eq!(rank, at, "{story}"),
        }
    }
}

/// Meetings with random delays and one fault. `SYMMALLOC_SEEDS` sets their number, and `SYMMALLOC_FIRST_SEED` the first one.
#[test]
fn generated_meetings_succeed_or_end_with_one_cause() {
    const AT_A_TIME: u64 = 8;
    let number =
        |name, default| std::env::var(name).map_or(default, |text| text.parse().expect("it should be a number"));
    let first = number("SYMMALLOC_FIRST_SEED", 0);
    let (next, end) = (AtomicU64::new(first), first + number("SYMMALLOC_SEEDS", 40));
    thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end {
                        return;
                    }
                    generated_meeting(seed);
                }
            });
        }
    });
}
