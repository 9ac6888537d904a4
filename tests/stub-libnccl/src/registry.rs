//! The jobs of this process: the joining of ranks, and messages between ranks and jobs.

use crate::calls::UniqueId;
use crate::codes::{INVALID_USAGE, REMOTE_ERROR};
use crate::cuda;
use crate::data::Base;
use crate::job::{Job, Outbox, Parts};
use crate::ledger::violate;
use crate::member::{self, fresh};
use crate::messages::{Join, ToJob, ToRank};
use crate::options::options;
use crate::wire::{self, Connection};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The channel to a rank.
#[derive(Clone, Debug)]
pub enum Link {
    /// The rank is a communicator of this process.
    Local {
        /// Handle of the communicator.
        member: u64,
    },
    /// The rank is a communicator of another process.
    Remote {
        /// Socket to the process.
        connection: Arc<Connection>,
        /// Handle of the communicator.
        member: u64,
    },
}

/// A job that waits for ranks to join, by rank.
type Forming = BTreeMap<usize, (Join, Link, Base)>;

/// The jobs of this process.
#[derive(Debug, Default)]
struct Registry {
    forming: BTreeMap<Vec<u8>, Forming>,
    jobs: BTreeMap<u64, Arc<Mutex<Job>>>,
    next_job: u64,
    /// Ranks of first communicators that have died.
    dead: BTreeSet<usize>,
}

static REGISTRY: Mutex<Option<Registry>> = Mutex::new(None);

fn with<T>(act: impl FnOnce(&mut Registry) -> T) -> T {
    act(REGISTRY.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

fn lock(job: &Mutex<Job>) -> MutexGuard<'_, Job> {
    job.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds a rank to a job. The rank is notified once all ranks have joined.
pub fn join(join: Join, link: Link, base: Base) {
    let mut outbox = Outbox::new();
    with(|registry| {
        if registry.dead.contains(&join.world) {
            return;
        }
        let (id, ranks, rank) = (join.id.clone(), join.ranks, join.rank);
        let forming = registry.forming.entry(id.clone()).or_default();
        if forming.values().any(|(other, ..)| other.ranks != ranks) || forming.contains_key(&rank) {
            violate(format!("rank {rank} of {ranks} joins twice, or the ranks disagree on their number"));
            outbox.push((link, ToRank::Refused { code: INVALID_USAGE }));
            return;
        }
        forming.insert(rank, (join, link, base));
        if forming.len() < ranks {
            return;
        }
        let forming = registry.forming.remove(&id).expect("the element should exist, because it was seen above");
        let devices: BTreeSet<_> = forming.values().map(|(join, ..)| join.device).collect();
        if devices.len() < ranks {
            // NCCL's error: "Duplicate GPU detected".
            outbox.extend(forming.into_values().map(|(_, link, _)| (link, ToRank::Refused { code: INVALID_USAGE })));
            return;
        }
        registry.found(forming.into_values().collect(), &mut outbox);
    });
    deliver(outbox);
}

impl Registry {
    /// Creates a job of these ranks.
    fn found(&mut self, seats: Vec<(Join, Link, Base)>, outbox: &mut Outbox) {
        self.next_job += 1;
        let (job, ranks) = (self.next_job, seats.len());
        for (rank, (_, link, _)) in seats.iter().enumerate() {
            outbox.push((link.clone(), ToRank::Joined { job, rank, ranks }));
        }
        self.jobs.insert(job, Arc::new(Mutex::new(Job::new(seats))));
    }
}

/// Delivers a message of a rank to its job.
pub fn send_to_job(job: u64, rank: usize, message: ToJob) {
    let Some(found) = with(|registry| registry.jobs.get(&job).cloned()) else { return };
    let mut outbox = Outbox::new();
    let (parts, is_over) = {
        let mut found = lock(&found);
        let parts = found.handle(rank, message, &mut outbox);
        (parts, found.is_over())
    };
    if is_over {
        with(|registry| registry.jobs.remove(&job));
    }
    if let Some(parts) = parts {
        divide(&found, parts, &mut outbox);
    }
    deliver(outbox);
}

/// Creates the jobs of a split. Their messages precede those of the parent.
fn divide(parent: &Mutex<Job>, parts: Parts, outbox: &mut Outbox) {
    let mut joined = Outbox::new();
    let parent = lock(parent);
    with(|registry| {
        for part in parts.into_values() {
            let ranks = part.len();
            let seat = |(rank, (_, old, member)): (usize, (i32, usize, u64))| {
                let seat = &parent.seats[old];
                let join = Join { rank, ranks, member, ..seat.join.clone() };
                (join, seat.link.to_member(member), seat.base)
            };
            let seats = part.into_iter().enumerate().map(seat).collect();
            registry.found(seats, &mut joined);
        }
    });
    joined.append(outbox);
    *outbox = joined;
}

impl Link {
    /// Returns the channel to another communicator of the same process.
    fn to_member(&self, member: u64) -> Link {
        match self {
            Link::Local { .. } => Link::Local { member },
            Link::Remote { connection, .. } => Link::Remote { connection: Arc::clone(connection), member },
        }
    }
}

/// Delivers messages, first to ranks in other processes: once a local rank continues, this process may end.
fn deliver(mut outbox: Outbox) {
    outbox.sort_by_key(|(link, _)| matches!(link, Link::Local { .. }));
    for (link, message) in outbox {
        match link {
            Link::Local { member } => member::deliver(member, &message, None),
            Link::Remote { connection, member } => connection.tell_rank(member, message),
        }
    }
}

/// Ends all communicators of a rank at once, without notice. The other ranks get the same errors as from broken sockets.
pub fn kill(world: usize) {
    let jobs: Vec<_> = with(|registry| {
        registry.dead.insert(world);
        registry.jobs.iter().map(|(id, job)| (*id, Arc::clone(job))).collect()
    });
    for (id, job) in jobs {
        let rank = lock(&job).seats.iter().position(|seat| seat.join.world == world);
        if let Some(rank) = rank {
            send_to_job(id, rank, ToJob::Die);
        }
    }
    // Ranks that wait for it in a job that is still forming get a socket error too.
    let forming = with(|registry| std::mem::take(&mut registry.forming));
    let links = forming.into_values().flat_map(BTreeMap::into_values).map(|(_, link, _)| link);
    deliver(links.map(|link| (link, ToRank::Refused { code: REMOTE_ERROR })).collect());
}

/// Fails all ranks of the process behind a lost socket.
pub fn lose(connection: &Arc<Connection>) {
    let is_lost =
        |link: &Link| matches!(link, Link::Remote { connection: other, .. } if Arc::ptr_eq(other, connection));
    let jobs: Vec<_> = with(|registry| {
        for forming in registry.forming.values_mut() {
            forming.retain(|_, (_, link, _)| !is_lost(link));
        }
        registry.jobs.iter().map(|(id, job)| (*id, Arc::clone(job))).collect()
    });
    for (id, job) in jobs {
        let ranks: Vec<usize> = {
            let job = lock(&job);
            (0..job.seats.len()).filter(|rank| is_lost(&job.seats[*rank].link)).collect()
        };
        ranks.into_iter().for_each(|rank| send_to_job(id, rank, ToJob::Die));
    }
}

/// Prefix of a unique id that names a process.
const OF_PROCESS: &str = "stub-nccl of ";
/// Prefix of a unique id that names an address, like `NCCL_COMM_ID`.
const AT_PLACE: &str = "stub-nccl at ";

/// Creates a unique id, like `ncclGetUniqueId`. It names this process, or the address in `NCCL_COMM_ID`.
pub fn unique_id() -> UniqueId {
    let name = match std::env::var("NCCL_COMM_ID") {
        Ok(place) => format!("{AT_PLACE}{place}"),
        Err(_) => {
            let process = std::process::id();
            let place = match options().socket_ip {
                Some(ip) => SocketAddr::new(ip, wire::listen_on_network(ip)).to_string(),
                None => {
                    wire::listen(&format!("{OF_PROCESS}{process}"));
                    String::new()
                }
            };
            format!("{OF_PROCESS}{process} {place} {:x}", fresh())
        }
    };
    let mut internal = [0; 128];
    let length = name.len().min(internal.len());
    internal[..length].copy_from_slice(&name.as_bytes()[..length]);
    UniqueId { internal }
}

/// Joins a rank of this process to a job, here or in the process that the id names.
pub fn begin(wanted: Join) {
    let text = String::from_utf8_lossy(&wanted.id);
    let text = text.trim_end_matches('\0');
    if let Some((process, place)) = text.strip_prefix(OF_PROCESS).and_then(|rest| rest.split_once(' '))
        && process != std::process::id().to_string()
    {
        let at = place.split(' ').next().filter(|address| !address.is_empty());
        return wire::join(at.map_or_else(|| format!("{OF_PROCESS}{process}"), str::to_owned), wanted);
    }
    if text.starts_with(AT_PLACE) {
        let place = text.to_owned();
        if wanted.rank > 0 {
            return wire::join(place, wanted);
        }
        wire::listen(&place);
    }
    let link = Link::Local { member: wanted.member };
    join(wanted, link, cuda::memory_file().1);
}
