//! How all ranks of a job come by one [`UniqueId`] without a side channel.
//!
//! ```text
//!  NCCL_COMM_ID=host:port set       every rank asks NCCL, and gets the same id: no exchange of ours
//!  one rank                         it asks NCCL
//!  otherwise                        rank 0 asks NCCL, and gives the id to all others over TCP:
//!
//!      rank r                                 rank 0
//!        │ ── hello: magic, job, ranks, r ──►   │  listens until every rank has come, or the deadline
//!        │ ◄── magic, verdict, id ───────────   │  strangers and other jobs are turned away, and do not hold it up
//!
//!  SYMMALLOC_RENDEZVOUS=host:port   where rank 0 listens; otherwise
//!  MASTER_ADDR, MASTER_PORT         there, on one of the eight ports after it (torchrun's own store sits on MASTER_PORT); otherwise
//!  all ranks on one machine         localhost, on one of eight ports that follow from the job
//! ```
//!
//! A port that is taken is passed over; the others knock at all of the eight until the right rank 0 answers. The connections on
//! which they met stay open: they are the [lifeline](crate::watch) by which each learns what became of the others.

pub(crate) mod error;
mod meeting_point;

use crate::backoff::Backoff;
use crate::error::CommError;
use crate::launch::Launch;
use crate::library::Nccl;
use crate::sequence_counter::SequenceCounter;
use crate::unique_id::{COMM_ID_VARIABLE, UniqueId};
use crate::watch::{self, MeetingId};
use error::RendezvousError;
use meeting_point::{MeetingPoint, hash, job_of};
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};
use symmalloc_watchdog::Connection;

/// First in every message.
const MAGIC: [u8; 8] = *b"symmnccl";
/// Magic, job, ranks, rank, visit.
const HELLO_BYTES: usize = 8 + 8 + 4 + 4 + 8;
/// Magic, verdict, id.
const REPLY_BYTES: usize = 8 + 1 + UniqueId::BYTES;
/// How long a visitor may take to say who it is, and rank 0 to answer.
const VISITOR_LIMIT: Duration = Duration::from_secs(5);
/// Visitors that have not said who they are: more wait outside.
const VISITORS_MAX: usize = 1024;

impl Launch {
    /// An id that all ranks of this job get alike. Every rank calls it, as often as every other.
    ///
    /// Where `NCCL_COMM_ID` is set, NCCL gives it. Otherwise rank 0 gives it to the others over TCP, at `SYMMALLOC_RENDEZVOUS`
    /// (host:port), else near `MASTER_ADDR` and `MASTER_PORT`, else, when all ranks are on one machine, on localhost.
    ///
    /// # Errors
    /// When libnccl cannot be used, or the ranks do not find each other within the deadline.
    pub fn unique_id(&self, deadline: Duration) -> Result<UniqueId, CommError> {
        self.unique_id_from(Nccl::load()?, &Backoff::new(deadline))
    }

    pub(crate) fn unique_id_from(&self, nccl: &Nccl, backoff: &Backoff) -> Result<UniqueId, CommError> {
        static COUNTER: SequenceCounter<u64> = SequenceCounter::new();
        if self.ranks == 1 || std::env::var_os(COMM_ID_VARIABLE).is_some() {
            return UniqueId::from_nccl(nccl);
        }
        let point = MeetingPoint::of(self, |name| std::env::var(name).ok())?;
        // The n-th meeting of one rank is the n-th of every other.
        let turn = COUNTER.next(hash(job_of(self).as_bytes()), self.rank);
        let meeting = Meeting::new(self, turn);
        if self.rank == 0 {
            // Listening first: visitors wait meanwhile.
            let listener = point.listen()?;
            let id = UniqueId::from_nccl(nccl)?;
            let connections = meeting.give(&listener, &id, backoff)?;
            watch::met(&id, self.rank, self.ranks, connections);
            return Ok(id);
        }
        let (id, connection) = meeting.ask(&point.addresses, self.rank, backoff)?;
        watch::met(&id, self.rank, self.ranks, vec![(0, connection.into())]);
        Ok(id)
    }
}

/// Ranks that have an id already meet at the address of rank 0 ("host:port"), for their connections alone. Every rank does so, as
/// often as every other. `None` where there is one rank.
pub(crate) fn meet(
    address: &str,
    name: &str,
    rank: u32,
    ranks: u32,
    backoff: &Backoff,
) -> Result<Option<MeetingId>, CommError> {
    static COUNTER: SequenceCounter<u64> = SequenceCounter::new();
    if ranks < 2 {
        return Ok(None);
    }
    let point = MeetingPoint::at(address)?;
    let turn = COUNTER.next(hash(format!("{address} {name}").as_bytes()), rank);
    let meeting = Meeting { job: hash(format!("{address} {name} {turn}").as_bytes()), ranks };
    if rank == 0 {
        let listener = point.listen()?;
        let mut bytes = [0; UniqueId::BYTES];
        bytes[..8].copy_from_slice(&visit().to_le_bytes());
        bytes[8..16].copy_from_slice(&meeting.job.to_le_bytes());
        let id = UniqueId::from_bytes(bytes);
        let connections = meeting.give(&listener, &id, backoff)?;
        return Ok(Some(watch::met(&id, rank, ranks, connections)));
    }
    let (id, connection) = meeting.ask(&point.addresses, rank, backoff)?;
    Ok(Some(watch::met(&id, rank, ranks, vec![(0, connection.into())])))
}

/// One exchange of one job.
#[derive(Clone, Copy, Debug)]
struct Meeting {
    job: u64,
    ranks: u32,
}

/// What rank 0 thinks of a visitor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Welcome,
    OtherJob,
    RankTwice,
}

impl Verdict {
    fn byte(self) -> u8 {
        match self {
            Verdict::Welcome => 0,
            Verdict::OtherJob => 1,
            Verdict::RankTwice => 2,
        }
    }
}

/// Who a visitor says it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hello {
    job: u64,
    ranks: u32,
    rank: u32,
    /// The same each time one process comes.
    visit: u64,
}

impl Hello {
    fn bytes(self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..16].copy_from_slice(&self.job.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.ranks.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.rank.to_le_bytes());
        bytes[24..].copy_from_slice(&self.visit.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; HELLO_BYTES]) -> Option<Self> {
        let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        let hello = Hello { job: u64_at(8), ranks: u32_at(16), rank: u32_at(20), visit: u64_at(24) };
        (bytes[..8] == MAGIC).then_some(hello)
    }
}

/// A connection that has not said who it is.
struct Visitor {
    stream: TcpStream,
    hello: Vec<u8>,
    since: Instant,
}

impl Visitor {
    /// What it has said: `None` while it has not finished, an error when it is not to be heard any longer.
    fn listen(&mut self) -> io::Result<Option<Option<Hello>>> {
        let mut rest = [0; HELLO_BYTES];
        let missing = HELLO_BYTES - self.hello.len();
        match self.stream.read(&mut rest[..missing]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => self.hello.extend_from_slice(&rest[..count]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        match <&[u8; HELLO_BYTES]>::try_from(self.hello.as_slice()) {
            Ok(bytes) => Ok(Some(Hello::from_bytes(bytes))),
            Err(_) if self.since.elapsed() > VISITOR_LIMIT => Err(io::ErrorKind::TimedOut.into()),
            Err(_) => Ok(None),
        }
    }

    fn answer(&mut self, verdict: Verdict, id: &UniqueId) -> io::Result<()> {
        let mut reply = [0; REPLY_BYTES];
        reply[..8].copy_from_slice(&MAGIC);
        reply[8] = verdict.byte();
        if verdict == Verdict::Welcome {
            reply[9..].copy_from_slice(id.as_bytes());
        }
        // It fits into the socket's buffer, which is empty.
        self.stream.write_all(&reply)
    }
}

impl Meeting {
    fn new(launch: &Launch, turn: u32) -> Self {
        Meeting { job: hash(format!("{}.{turn}", job_of(launch)).as_bytes()), ranks: launch.ranks }
    }

    /// Rank 0's side: gives the id to every other rank, once each. Returns the connections to them.
    fn give(
        &self,
        listener: &TcpListener,
        id: &UniqueId,
        backoff: &Backoff,
    ) -> Result<Vec<(u32, Connection)>, RendezvousError> {
        // By rank: the visit that it came with.
        let mut came: Vec<Option<u64>> = vec![None; self.ranks as usize];
        let mut connections: BTreeMap<u32, TcpStream> = BTreeMap::new();
        let mut visitors: Vec<Visitor> = vec![];
        while came.iter().skip(1).any(Option::is_none) {
            while visitors.len() < VISITORS_MAX
                && let Ok((stream, _)) = listener.accept()
            {
                if stream.set_nonblocking(true).is_ok() {
                    visitors.push(Visitor { stream, hello: vec![], since: Instant::now() });
                }
            }
            visitors.retain_mut(|visitor| match visitor.listen() {
                Ok(Some(Some(hello))) => {
                    let verdict = self.verdict(&came, hello);
                    let answered = visitor.answer(verdict, id);
                    if verdict == Verdict::Welcome
                        && answered.is_ok()
                        && let Ok(stream) = visitor.stream.try_clone()
                    {
                        came[hello.rank as usize] = Some(hello.visit);
                        connections.insert(hello.rank, stream);
                    }
                    false
                }
                Ok(None) => true,
                // A stranger: it gets nothing.
                Ok(Some(None)) | Err(_) => false,
            });
            if !backoff.pause() {
                let missing = (1..self.ranks).filter(|rank| came[*rank as usize].is_none()).collect();
                return Err(RendezvousError::Missing { missing, waited: backoff.waited() });
            }
        }
        Ok(connections.into_iter().map(|(rank, stream)| (rank, stream.into())).collect())
    }

    fn verdict(&self, came: &[Option<u64>], hello: Hello) -> Verdict {
        if (hello.job, hello.ranks) != (self.job, self.ranks) || hello.rank == 0 || hello.rank >= self.ranks {
            return Verdict::OtherJob;
        }
        match came[hello.rank as usize] {
            // Again the same process: the answer did not reach it.
            Some(visit) if visit != hello.visit => Verdict::RankTwice,
            _ => Verdict::Welcome,
        }
    }

    /// The others' side: knocks until the right rank 0 answers. Returns the connection to it.
    fn ask(
        &self,
        addresses: &[SocketAddr],
        rank: u32,
        backoff: &Backoff,
    ) -> Result<(UniqueId, TcpStream), RendezvousError> {
        let hello = Hello { job: self.job, ranks: self.ranks, rank, visit: visit() }.bytes();
        loop {
            for address in addresses {
                let limit = backoff.left().min(VISITOR_LIMIT);
                if limit.is_zero() {
                    break;
                }
                match knock(*address, &hello, limit) {
                    Ok((Verdict::Welcome, id, stream)) => return Ok((id, stream)),
                    Ok((Verdict::RankTwice, ..)) => return Err(RendezvousError::RankTwice { rank }),
                    // Not there yet, another program's port, or another job's rank 0.
                    Ok((Verdict::OtherJob, ..)) | Err(_) => {}
                }
            }
            // Not more often than a hundred times a second, whatever the backoff: a knock is a packet.
            std::thread::sleep(backoff.left().min(Duration::from_millis(10)));
            if !backoff.pause() {
                return Err(RendezvousError::NoAnswer { address: addresses[0], waited: backoff.waited() });
            }
        }
    }
}

fn knock(
    address: SocketAddr,
    hello: &[u8; HELLO_BYTES],
    limit: Duration,
) -> io::Result<(Verdict, UniqueId, TcpStream)> {
    let mut stream = TcpStream::connect_timeout(&address, limit)?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    stream.write_all(hello)?;
    let mut reply = [0; REPLY_BYTES];
    stream.read_exact(&mut reply)?;
    let verdict =
        [Verdict::Welcome, Verdict::OtherJob, Verdict::RankTwice].into_iter().find(|it| it.byte() == reply[8]);
    match verdict {
        Some(verdict) if reply[..8] == MAGIC => {
            Ok((verdict, UniqueId::from_bytes(std::array::from_fn(|index| reply[9 + index])), stream))
        }
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// A number that another process with the same rank would not have.
fn visit() -> u64 {
    let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let nanos = since_epoch.map_or(0, |since| since.as_nanos() as u64);
    nanos ^ u64::from(std::process::id()).rotate_left(40)
}

#[cfg(test)]
mod tests {
    use super::meeting_point::listen_at;
    use super::*;
    use std::thread;

    const ID: [u8; UniqueId::BYTES] = [7; UniqueId::BYTES];

    fn launch(ranks: u32, local_ranks: u32, job: &str) -> Launch {
        let variables = [
            ("RANK", "0".to_owned()),
            ("WORLD_SIZE", ranks.to_string()),
            ("LOCAL_RANK", "0".to_owned()),
            ("LOCAL_WORLD_SIZE", local_ranks.to_string()),
            ("TORCHELASTIC_RUN_ID", job.to_owned()),
        ];
        let variable = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone());
        Launch::from_variables(variable).expect("complete")
    }

    fn anywhere() -> (TcpListener, SocketAddr) {
        let listener = listen_at("127.0.0.1:0".parse().expect("an address")).expect("a free port");
        let address = listener.local_addr().expect("bound");
        (listener, address)
    }

    fn backoff(millis: u64) -> Backoff {
        Backoff::new(Duration::from_millis(millis))
    }

    fn meeting(ranks: u32) -> Meeting {
        Meeting { job: 0xABCD, ranks }
    }

    #[test]
    fn all_ranks_get_the_id_in_whatever_order_they_come() {
        let (listener, address) = anywhere();
        thread::scope(|scope| {
            let others: Vec<_> = (1..6_u32)
                .map(|rank| {
                    scope.spawn(move || {
                        thread::sleep(Duration::from_millis(u64::from(7 - rank) * 10));
                        meeting(6).ask(&[address], rank, &backoff(10_000)).map(|(id, _)| id)
                    })
                })
                .collect();
            meeting(6).give(&listener, &UniqueId::from_bytes(ID), &backoff(10_000)).expect("all come");
            for other in others {
                assert_eq!(other.join().expect("no panic"), Ok(UniqueId::from_bytes(ID)));
            }
        });
    }

    #[test]
    fn rank_0_may_come_last() {
        let (listener, address) = anywhere();
        drop(listener);
        thread::scope(|scope| {
            let other = scope.spawn(move || meeting(2).ask(&[address], 1, &backoff(10_000)).map(|(id, _)| id));
            thread::sleep(Duration::from_millis(60));
            let listener = listen_at(address).expect("still free");
            meeting(2).give(&listener, &UniqueId::from_bytes(ID), &backoff(10_000)).expect("it comes");
            assert_eq!(other.join().expect("no panic"), Ok(UniqueId::from_bytes(ID)));
        });
    }

    #[test]
    fn strangers_and_other_jobs_neither_get_the_id_nor_hold_it_up() {
        let (listener, address) = anywhere();
        thread::scope(|scope| {
            let silent = TcpStream::connect(address).expect("listening");
            let mut babbling = TcpStream::connect(address).expect("listening");
            babbling.write_all(b"GET / HTTP/1.1\r\nHost: nobody at all\r\n\r\n").expect("sent");
            let other_job = scope.spawn(move || Meeting { job: 1, ranks: 2 }.ask(&[address], 1, &backoff(150)));
            let other_size = scope.spawn(move || meeting(3).ask(&[address], 1, &backoff(150)));
            let late = scope.spawn(move || {
                thread::sleep(Duration::from_millis(250));
                meeting(2).ask(&[address], 1, &backoff(10_000)).map(|(id, _)| id)
            });
            let since = Instant::now();
            meeting(2).give(&listener, &UniqueId::from_bytes(ID), &backoff(10_000)).expect("it comes");
            assert!(since.elapsed() < VISITOR_LIMIT, "the silent one held it up");
            assert!(matches!(other_job.join().expect("no panic"), Err(RendezvousError::NoAnswer { .. })));
            assert!(matches!(other_size.join().expect("no panic"), Err(RendezvousError::NoAnswer { .. })));
            assert_eq!(late.join().expect("no panic"), Ok(UniqueId::from_bytes(ID)));
            let mut answer = vec![];
            // Reset or closed, but not answered.
            let _closed = babbling.read_to_end(&mut answer);
            assert_eq!(answer, [0_u8; 0]);
            drop(silent);
        });
    }

    #[test]
    fn rank_0_names_the_ranks_that_did_not_come() {
        let (listener, address) = anywhere();
        thread::scope(|scope| {
            let other = scope.spawn(move || meeting(4).ask(&[address], 2, &backoff(5_000)).map(|(id, _)| id));
            let given = meeting(4).give(&listener, &UniqueId::from_bytes(ID), &backoff(300));
            let Err(RendezvousError::Missing { missing, waited }) = given else { panic!("{given:?}") };
            assert_eq!(missing, [1, 3]);
            assert!(waited >= Duration::from_millis(300));
            assert_eq!(other.join().expect("no panic"), Ok(UniqueId::from_bytes(ID)), "it has its id all the same");
        });
    }

    #[test]
    fn without_rank_0_the_others_say_so_in_time() {
        let (listener, address) = anywhere();
        drop(listener);
        let since = Instant::now();
        let asked = meeting(2).ask(&[address], 1, &backoff(120));
        assert!(matches!(asked, Err(RendezvousError::NoAnswer { address: at, .. }) if at == address));
        assert!(since.elapsed() < Duration::from_secs(2));
    }

    #[test]
    fn a_second_process_with_a_rank_is_turned_away_and_the_same_one_again_is_not() {
        let came = [None, Some(5), None];
        let hello = |rank, visit| Hello { job: 0xABCD, ranks: 3, rank, visit };
        assert_eq!(meeting(3).verdict(&came, hello(1, 6)), Verdict::RankTwice);
        assert_eq!(meeting(3).verdict(&came, hello(1, 5)), Verdict::Welcome);
        assert_eq!(meeting(3).verdict(&came, hello(2, 6)), Verdict::Welcome);
        assert_eq!(meeting(3).verdict(&came, hello(0, 6)), Verdict::OtherJob);
        assert_eq!(meeting(3).verdict(&came, hello(3, 6)), Verdict::OtherJob);
    }

    #[test]
    fn a_hello_that_comes_in_pieces_is_heard() {
        let (listener, address) = anywhere();
        thread::scope(|scope| {
            let other = scope.spawn(move || {
                let mut stream = TcpStream::connect(address).expect("listening");
                for byte in (Hello { job: 0xABCD, ranks: 2, rank: 1, visit: 3 }).bytes() {
                    stream.write_all(&[byte]).expect("sent");
                    thread::sleep(Duration::from_millis(2));
                }
                let mut reply = [0; REPLY_BYTES];
                stream.read_exact(&mut reply).map(|()| reply)
            });
            meeting(2).give(&listener, &UniqueId::from_bytes(ID), &backoff(10_000)).expect("it comes");
            let reply = other.join().expect("no panic").expect("answered");
            assert_eq!((&reply[..8], reply[8], &reply[9..]), (&MAGIC[..], 0, &ID[..]));
        });
    }

    #[test]
    fn a_port_that_is_taken_is_passed_over_and_still_found() {
        let (taken, first) = anywhere();
        let (free, second) = anywhere();
        drop(free);
        let point = MeetingPoint { addresses: vec![first, second] };
        let listener = point.listen().expect("the second is free");
        assert_eq!(listener.local_addr().expect("bound"), second);
        thread::scope(|scope| {
            let addresses = &point.addresses;
            let other = scope.spawn(move || meeting(2).ask(addresses, 1, &backoff(20_000)).map(|(id, _)| id));
            // The stranger on the first port hangs up on every visitor.
            scope.spawn(move || {
                let until = Instant::now() + Duration::from_millis(200);
                while Instant::now() < until {
                    drop(taken.accept());
                    thread::sleep(Duration::from_millis(5));
                }
            });
            meeting(2).give(&listener, &UniqueId::from_bytes(ID), &backoff(20_000)).expect("it comes");
            assert_eq!(other.join().expect("no panic"), Ok(UniqueId::from_bytes(ID)));
        });
    }

    #[test]
    fn meetings_differ_by_job_restart_and_turn() {
        let job = |text, turn| Meeting::new(&launch(2, 2, text), turn).job;
        assert_eq!(job("a.0", 0), job("a.0", 0));
        assert_ne!(job("a.0", 0), job("a.1", 0));
        assert_ne!(job("a.0", 0), job("a.0", 1));
    }
}
