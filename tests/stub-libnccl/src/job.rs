//! One communicator over all its ranks: a state machine that receives the ranks' messages and reports completed work to them.
//!
//! ```text
//!  rank 0 ─ Arrived ─┐                          ┌─ Done ─► rank 0
//!  rank 1 ─ Arrived ─┼─► all ranks' heads are ──┼─ Done ─► rank 1
//!  rank 2 ─ Arrived ─┘   there: data moves      └─ Done ─► rank 2
//! ```
//!
//! A job lives in the process that created the unique id. `Round`s are the host-side counterpart of collectives: registrations and splits.
//! Neither has a timeout. A collective never completes after one of its ranks left or died; a round then fails, as NCCL's sockets do.

use crate::codes::{CUDA_ERROR, INVALID_ARGUMENT, REMOTE_ERROR, SUCCESS};
use crate::data::{self, Base, Rounds};
use crate::ledger::violate;
use crate::messages::{Collective, Extent, Join, Kind, Round, ToJob, ToRank, Transfer, WindowPlace, Work};
use crate::options::options;
use crate::registry::Link;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_int;

/// The state of one rank in a job.
#[derive(Debug)]
pub struct Seat {
    /// The rank's request to join.
    pub join: Join,
    /// The channel to the rank.
    pub link: Link,
    /// The address at which its memory file is mapped in this process.
    pub base: Base,
    /// `true` once its communicator has ended.
    has_left: bool,
    /// Instance and work at the front of its stream.
    head: Option<(u64, Work)>,
    /// Host steps that the other ranks have not reached.
    rounds: Vec<(u64, Round)>,
}

/// A communicator over all its ranks; see the module documentation.
#[derive(Debug)]
pub struct Job {
    /// The ranks, in order.
    pub seats: Vec<Seat>,
    /// Memory of the registrations that some rank still maps.
    registered: Rounds,
    /// Ranks that no longer map a registration, by round.
    dropped: BTreeMap<u64, BTreeSet<usize>>,
    next_round: u64,
    /// `true` once work that can never complete was reported.
    is_stuck: bool,
}

/// Messages with their recipients.
pub type Outbox = Vec<(Link, ToRank)>;

/// Parts of a split by color: the ranks' keys, old ranks and new communicators.
pub type Parts = BTreeMap<c_int, Vec<(c_int, usize, u64)>>;

impl Job {
    /// Creates a job from all its ranks, in order.
    pub fn new(seats: Vec<(Join, Link, Base)>) -> Self {
        let seat = |(join, link, base)| Seat { join, link, base, has_left: false, head: None, rounds: Vec::new() };
        Job {
            seats: seats.into_iter().map(seat).collect(),
            registered: BTreeMap::new(),
            dropped: BTreeMap::new(),
            next_round: 0,
            is_stuck: false,
        }
    }

    /// Processes a message. Answers go to the outbox. Returns the parts of a split, from which the registry creates new jobs.
    pub fn handle(&mut self, from: usize, message: ToJob, outbox: &mut Outbox) -> Option<Parts> {
        match message {
            ToJob::Arrived { instance, work } => {
                self.seats[from].head = Some((instance, work));
                self.advance(outbox);
            }
            ToJob::Round { ticket, round } => {
                self.seats[from].rounds.push((ticket, round));
                return self.meet(outbox);
            }
            ToJob::Drop { round } => self.drop_round(from, round, outbox),
            ToJob::Leave => self.leave(from, outbox),
            ToJob::Withdraw => {
                self.seats[from].head = None;
                self.seats[from].rounds.clear();
            }
            ToJob::Die if self.seats[from].has_left => {}
            ToJob::Die => {
                self.leave(from, outbox);
                let others = self.seats.iter().filter(|seat| !seat.has_left);
                outbox.extend(others.map(|seat| (seat.link.clone(), ToRank::Failed { code: REMOTE_ERROR })));
            }
        }
        None
    }

    /// Returns `true` if the communicators of all ranks have ended.
    pub fn is_over(&self) -> bool {
        self.seats.iter().all(|seat| seat.has_left)
    }

    fn finish(&mut self, ticket_of: impl Fn(usize) -> u64, code: c_int, outbox: &mut Outbox) {
        let round = self.next_round;
        for (rank, seat) in self.seats.iter().enumerate() {
            outbox.push((seat.link.clone(), ToRank::Finished { ticket: ticket_of(rank), round, code }));
        }
        self.next_round += 1;
    }

    /// Completes the next round once all ranks have reached it.
    fn meet(&mut self, outbox: &mut Outbox) -> Option<Parts> {
        let shrinks = self.next_shrinks();
        if !shrinks.is_empty() {
            return shrinks.iter().find_map(|excluded| self.shrink(excluded, outbox));
        }
        if self.seats.iter().any(|seat| seat.has_left) {
            self.fail_rounds(outbox);
            return None;
        }
        if self.seats.iter().any(|seat| seat.rounds.is_empty()) {
            return None;
        }
        let came: Vec<(u64, Round)> = self.seats.iter_mut().map(|seat| seat.rounds.remove(0)).collect();
        let ticket_of = |rank: usize| came[rank].0;
        let kind = std::mem::discriminant(&came[0].1);
        if came.iter().any(|(_, round)| std::mem::discriminant(round) != kind) {
            let names: Vec<_> = came.iter().map(|(_, round)| round.name()).collect();
            violate(format!("ranks take different host steps: {}", names.join(", ")));
            // In NCCL, they would wait indefinitely for each other's messages.
            return None;
        }
        let mut parts = None;
        let code = match &came[0].1 {
            Round::Window { .. } => self.register(&came),
            Round::Check { .. } => check(&came),
            Round::Meet => SUCCESS,
            Round::Shrink { .. } => unreachable!("not all ranks take part in a shrink"),
            Round::Grow { .. } => match self.grow(&came, outbox) {
                Ok(()) => return None,
                Err(code) => code,
            },
            Round::Split { .. } => {
                let mut by_color = Parts::new();
                for (rank, (_, round)) in came.iter().enumerate() {
                    if let Round::Split { color, key, member } = round
                        && *color >= 0
                    {
                        by_color.entry(*color).or_default().push((*key, rank, *member));
                    }
                }
                by_color.values_mut().for_each(|part| part.sort_unstable());
                parts = Some(by_color);
                SUCCESS
            }
        };
        self.finish(ticket_of, code, outbox);
        parts
    }

    /// Passes the id of the grown communicator to all ranks.
    fn grow(&mut self, came: &[(u64, Round)], outbox: &mut Outbox) -> Result<(), c_int> {
        let requests: Vec<(&Option<Vec<u8>>, usize)> = came
            .iter()
            .map(|(_, round)| match round {
                Round::Grow { id, ranks } => (id, *ranks),
                _ => unreachable!("all ranks grow"),
            })
            .collect();
        let ids: Vec<&Vec<u8>> = requests.iter().filter_map(|(id, _)| id.as_ref()).collect();
        let ranks = requests[0].1;
        if ids.len() != 1 || requests.iter().any(|(_, other)| *other != ranks) {
            let numbers: Vec<_> = requests.iter().map(|(_, ranks)| ranks).collect();
            violate(format!("{} ranks have an id for a grow, which is to have {numbers:?} ranks", ids.len()));
            return Err(INVALID_ARGUMENT);
        }
        for (seat, (ticket, _)) in self.seats.iter().zip(came) {
            outbox.push((seat.link.clone(), ToRank::Grown { ticket: *ticket, id: ids[0].clone(), ranks }));
        }
        self.next_round += 1;
        Ok(())
    }

    /// Returns the excluded ranks of each shrink that is the next host step of a rank. A rank that one shrink excludes may already ask for
    /// the following one.
    fn next_shrinks(&self) -> BTreeSet<Vec<usize>> {
        let next = self.seats.iter().filter_map(|seat| match seat.rounds.first() {
            Some((_, Round::Shrink { excluded, .. })) => Some(excluded.clone()),
            _ => None,
        });
        next.collect()
    }

    /// Creates a communicator of the ranks that are not excluded, once all of these have asked for it.
    fn shrink(&mut self, excluded: &[usize], outbox: &mut Outbox) -> Option<Parts> {
        let remaining: Vec<usize> = (0..self.seats.len()).filter(|rank| !excluded.contains(rank)).collect();
        if remaining.iter().any(|rank| self.seats[*rank].has_left) {
            self.fail_rounds(outbox);
            return None;
        }
        let mut parts = Vec::new();
        for rank in &remaining {
            match self.seats[*rank].rounds.first() {
                Some((_, Round::Shrink { excluded: others, member })) if *others == excluded => {
                    parts.push((0, *rank, *member));
                }
                None | Some((_, Round::Shrink { .. })) => return None,
                Some((_, round)) => {
                    violate(format!("rank {rank} takes {}, others shrink without {excluded:?}", round.name()));
                    return None;
                }
            }
        }
        for rank in remaining {
            let (ticket, _) = self.seats[rank].rounds.remove(0);
            let done = ToRank::Finished { ticket, round: self.next_round, code: SUCCESS };
            outbox.push((self.seats[rank].link.clone(), done));
        }
        self.next_round += 1;
        Some(Parts::from([(0, parts)]))
    }

    /// Registers windows over the ranks' memory. The number of the registration is `next_round`.
    fn register(&mut self, came: &[(u64, Round)]) -> c_int {
        let memories: Vec<(Vec<Extent>, u64)> = came
            .iter()
            .map(|(_, round)| match round {
                Round::Window { memory, size, .. } => (memory.clone(), *size),
                _ => unreachable!("all ranks register"),
            })
            .collect();
        let flags: BTreeSet<c_int> = came
            .iter()
            .map(|(_, round)| match round {
                Round::Window { flags, .. } => *flags,
                _ => unreachable!("all ranks register"),
            })
            .collect();
        if flags.len() > 1 {
            violate(format!("windows with different flags: {flags:?}"));
        }
        let sizes: BTreeSet<u64> = memories.iter().map(|(_, size)| *size).collect();
        let mapped: BTreeSet<u64> =
            memories.iter().map(|(memory, _)| memory.iter().map(|(_, length)| length).sum()).collect();
        if (sizes.len() > 1 || mapped.len() > 1) && options().version < 23_006 {
            violate(format!(
                "windows of different sizes: {:?}",
                memories.iter().map(|(_, size)| size).collect::<Vec<_>>()
            ));
            return CUDA_ERROR;
        }
        self.registered.insert(self.next_round, memories.into_iter().map(|(memory, _)| memory).collect());
        SUCCESS
    }

    fn drop_round(&mut self, from: usize, round: u64, outbox: &mut Outbox) {
        if !self.registered.contains_key(&round) {
            return;
        }
        let dropped = self.dropped.entry(round).or_default();
        dropped.insert(from);
        if dropped.len() == self.seats.len() {
            self.dropped.remove(&round);
            self.registered.remove(&round);
            outbox.extend(self.seats.iter().map(|seat| (seat.link.clone(), ToRank::Free { round })));
        }
    }

    fn leave(&mut self, from: usize, outbox: &mut Outbox) {
        if std::mem::replace(&mut self.seats[from].has_left, true) {
            return;
        }
        self.seats[from].head = None;
        for round in self.registered.keys().copied().collect::<Vec<_>>() {
            self.drop_round(from, round, outbox);
        }
        self.seats[from].rounds.clear();
        self.fail_rounds(outbox);
    }

    /// Fails the rounds that a rank will never reach.
    fn fail_rounds(&mut self, outbox: &mut Outbox) {
        let left: Vec<bool> = self.seats.iter().map(|seat| seat.has_left).collect();
        for seat in &mut self.seats {
            // A shrink completes without the ranks that it excludes.
            let is_possible = |round: &Round| match round {
                Round::Shrink { excluded, .. } => (0..left.len()).all(|rank| !left[rank] || excluded.contains(&rank)),
                _ => false,
            };
            for (ticket, _) in seat.rounds.extract_if(.., |(_, round)| !is_possible(round)) {
                let failed = ToRank::Finished { ticket, round: u64::MAX, code: REMOTE_ERROR };
                outbox.push((seat.link.clone(), failed));
            }
        }
    }

    /// Runs all possible work at the fronts of the ranks' streams.
    fn advance(&mut self, outbox: &mut Outbox) {
        self.transfer(outbox);
        let heads: Option<Vec<&Collective>> = self
            .seats
            .iter()
            .map(|seat| match &seat.head {
                Some((_, Work::Collective(collective))) => Some(collective),
                _ => None,
            })
            .collect();
        let Some(heads) = heads else { return };
        let first = heads[0].signature;
        if self.is_stuck {
            return;
        }
        if let Some(rank) = heads.iter().position(|head| head.signature != first) {
            violate(format!("collectives differ: rank 0 {first:?}, rank {rank} {:?}", heads[rank].signature));
            self.is_stuck = true;
            return;
        }
        let symmetric = heads.iter().filter(|head| head.symmetric.is_some()).count();
        if symmetric != 0 && symmetric != heads.len() {
            violate(format!("{:?}: {symmetric} of {} ranks have both buffers in windows", first.kind, heads.len()));
            self.is_stuck = true;
            return;
        }
        if let Some(text) = differing(&heads) {
            violate(text);
        }
        let parts: Vec<Collective> = heads.into_iter().cloned().collect();
        let bases: Vec<Base> = self.seats.iter().map(|seat| seat.base).collect();
        data::run(&bases, &self.registered, &parts);
        for seat in &mut self.seats {
            let (instance, _) = seat.head.take().expect("every rank has a head");
            outbox.push((seat.link.clone(), ToRank::Done { instance }));
        }
    }

    /// Matches sends with receives.
    fn transfer(&mut self, outbox: &mut Outbox) {
        for from in 0..self.seats.len() {
            for to in 0..self.seats.len() {
                while let Some((send, receive)) = self.pair(from, to) {
                    if send.bytes != receive.bytes {
                        violate(format!(
                            "rank {from} sends {} bytes, rank {to} receives {}",
                            send.bytes, receive.bytes
                        ));
                        break;
                    }
                    let bytes =
                        data::read(self.seats[from].base, send.extents.as_deref().unwrap_or_default(), 0, send.bytes);
                    data::write(self.seats[to].base, receive.extents.as_deref().unwrap_or_default(), 0, &bytes);
                    *self
                        .open(from, to, true)
                        .map(|transfer| &mut transfer.is_done)
                        .expect("the element should exist, because it was seen above") = true;
                    *self
                        .open(to, from, false)
                        .map(|transfer| &mut transfer.is_done)
                        .expect("the element should exist, because it was seen above") = true;
                }
            }
        }
        for seat in &mut self.seats {
            if let Some((instance, Work::Transfers(transfers))) = &seat.head
                && transfers.iter().all(|transfer| transfer.is_done)
            {
                outbox.push((seat.link.clone(), ToRank::Done { instance: *instance }));
                seat.head = None;
            }
        }
    }

    /// Returns the first transfer of a rank with a peer that has not happened yet.
    fn open(&mut self, rank: usize, peer: usize, is_send: bool) -> Option<&mut Transfer> {
        match &mut self.seats[rank].head {
            Some((_, Work::Transfers(transfers))) => transfers
                .iter_mut()
                .find(|transfer| transfer.peer == peer && transfer.is_send == is_send && !transfer.is_done),
            _ => None,
        }
    }

    fn pair(&mut self, from: usize, to: usize) -> Option<(Transfer, Transfer)> {
        let send = self.open(from, to, true)?.clone();
        let receive = self.open(to, from, false)?.clone();
        Some((send, receive))
    }
}

impl Round {
    fn name(&self) -> &'static str {
        match self {
            Round::Window { .. } => "ncclCommWindowRegister",
            Round::Split { .. } => "ncclCommSplit",
            Round::Shrink { .. } => "ncclCommShrink",
            Round::Grow { .. } => "ncclCommGrow",
            Round::Check { .. } => "a collective, with checks",
            Round::Meet => "connecting",
        }
    }
}

/// Returns `true` if all ranks use the same place for a buffer.
fn is_one(places: &[WindowPlace]) -> bool {
    places.iter().all(|place| (place.space_offset, place.offset) == (places[0].space_offset, places[0].offset))
}

/// Returns, for the send and for the receive buffers, whether their places must be equal, as in `ncclArgsGlobalCheck`.
fn counts(kind: Kind) -> (bool, bool) {
    (matches!(kind, Kind::AllReduce | Kind::ReduceScatter), matches!(kind, Kind::AllReduce | Kind::AllGather))
}

/// Describes the differing places of ranks that all use symmetric kernels; `None` if the places agree.
fn differing(heads: &[&Collective]) -> Option<String> {
    let places: Option<Vec<(WindowPlace, WindowPlace)>> = heads.iter().map(|head| head.symmetric).collect();
    let (sends, receives): (Vec<_>, Vec<_>) = places?.into_iter().unzip();
    let kind = heads[0].signature.kind;
    let (send_counts, receive_counts) = counts(kind);
    let is_wrong = (send_counts && !is_one(&sends)) || (receive_counts && !is_one(&receives));
    let show = |places: &[WindowPlace]| {
        let texts: Vec<_> = places.iter().map(|place| format!("{:#x}+{}", place.space_offset, place.offset)).collect();
        texts.join(" ")
    };
    is_wrong
        .then(|| format!("{kind:?} at different window offsets: send {}, receive {}", show(&sends), show(&receives)))
}

/// Compares the buffers that the ranks report, like `ncclArgsGlobalCheck`.
fn check(came: &[(u64, Round)]) -> c_int {
    let reports = came.iter().map(|(_, round)| match round {
        Round::Check { signature, places } => (signature.kind, *places),
        _ => unreachable!("all ranks check"),
    });
    let (kinds, places): (Vec<_>, Vec<_>) = reports.unzip();
    let (send_counts, receive_counts) = counts(kinds[0]);
    let agrees = |places: Vec<Option<WindowPlace>>, place_counts: bool| {
        let are_equal = places.iter().all(|place| place.is_some() == places[0].is_some());
        let known: Vec<WindowPlace> = places.into_iter().flatten().collect();
        are_equal && (!place_counts || known.is_empty() || is_one(&known))
    };
    let (sends, receives) = places.into_iter().unzip();
    if agrees(sends, send_counts) && agrees(receives, receive_counts) { SUCCESS } else { INVALID_ARGUMENT }
}
