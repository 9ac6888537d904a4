//! Numbers of chunks that other processes can open. The number of a chunk is valid as long as the chunk's memory
//! exists.

use std::fmt;
use std::str::FromStr;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A chunk's number and its size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket {
    pub(crate) number: u64,
    pub(crate) bytes: u64,
}

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.number, self.bytes)
    }
}

impl FromStr for Ticket {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (number, bytes) = text.split_once(':').ok_or(())?;
        Ok(Ticket { number: number.parse().map_err(drop)?, bytes: bytes.parse().map_err(drop)? })
    }
}

struct Entry {
    ticket: Ticket,
    device: usize,
    address: u64,
}

struct Registry {
    next: u64,
    entries: Vec<Entry>,
}

static REGISTRY: Mutex<Registry> = Mutex::new(Registry { next: 1, entries: Vec::new() });

fn lock() -> MutexGuard<'static, Registry> {
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the numbers of chunks, given as (address, bytes). A chunk without a number gets the next free one.
pub(crate) fn tickets(device: usize, chunks: &[(u64, u64)]) -> Vec<Ticket> {
    let mut registry = lock();
    let ticket = |&(address, bytes): &(u64, u64)| {
        let same = |entry: &&Entry| (entry.device, entry.address, entry.ticket.bytes) == (device, address, bytes);
        if let Some(known) = registry.entries.iter().find(same) {
            return known.ticket;
        }
        let ticket = Ticket { number: registry.next, bytes };
        registry.next += 1;
        registry.entries.push(Entry { ticket, device, address });
        ticket
    };
    chunks.iter().map(ticket).collect()
}

/// Returns the device and address of the chunk with this number.
pub(crate) fn find(ticket: Ticket) -> Option<(usize, u64)> {
    lock().entries.iter().find(|entry| entry.ticket == ticket).map(|entry| (entry.device, entry.address))
}

/// Removes the numbers of chunks in memory that is about to be unmapped.
pub(crate) fn forget(device: usize, address: u64, bytes: u64) {
    let touches = |entry: &Entry| {
        entry.device == device && entry.address < address + bytes && address < entry.address + entry.ticket.bytes
    };
    lock().entries.retain(|entry| !touches(entry));
}
