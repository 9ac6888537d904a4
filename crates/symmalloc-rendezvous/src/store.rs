//! The contract of a store: the few keys and values through which ranks find each other.
//!
//! ```text
//!  Store ── TorchStore     the store that torchrun and PyTorch run         MASTER_ADDR, MASTER_PORT
//!        ├─ FolderStore    files in a folder that all machines share       a path
//!        └─ own store      a server in rank 0's process, and its clients   host:port, or a socket of one machine
//! ```
//!
//! A meeting stores little: one card of rank 0, and a note of each rank that cannot reach it. Values are at most [`VALUE_BYTES_MAX`] long.

use crate::deadline::Deadline;
use crate::error::RendezvousError;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Maximum length of a key in bytes.
pub(crate) const KEY_BYTES_MAX: usize = 256;
/// Maximum length of a value in bytes.
pub(crate) const VALUE_BYTES_MAX: usize = 64 << 10;
/// Maximum memory of an own store, which any process that can connect may fill if there is no job secret. A note takes about 200 bytes.
pub(crate) const STORE_BYTES_MAX: usize = 16 << 20;
/// Memory that an own store counts for each key, in addition to its bytes and those of its value.
const KEY_OVERHEAD_BYTES: usize = 128;

/// First pause between two reads of a key that does not exist yet.
const PAUSE_MIN: Duration = Duration::from_millis(1);
/// Longest pause between two reads of a key that does not exist yet.
const PAUSE_MAX: Duration = Duration::from_millis(100);

/// A store of keys and values that all ranks of a job can reach.
///
/// Keys are at most 256 bytes of text and values at most 64 KiB. Every call ends at its deadline. The value of a key that is both
/// [set](Self::set) and [added](Self::add) to depends on the implementation: use a key for one of them.
///
/// A process that can write to the store can prevent the ranks from meeting. With a job secret, a process without it cannot take a rank's
/// place.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use symmalloc_rendezvous::{Deadline, FolderStore, Store};
///
/// let folder = tempfile::tempdir()?;
/// let store = FolderStore::open(folder.path())?;
/// let deadline = Deadline::after(Duration::from_secs(10));
/// assert_eq!(store.get("color", &deadline)?, None);
/// store.set("color", b"blue", &deadline)?;
/// assert_eq!(store.wait("color", &deadline)?, b"blue");
/// assert_eq!((store.add("count", 2, &deadline)?, store.add("count", -1, &deadline)?), (2, 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Store: Send + Sync {
    /// Sets the value of a key, and replaces an earlier one.
    ///
    /// # Errors
    /// Returns an error if the store cannot be reached before the deadline, or rejects the key or the value.
    fn set(&self, key: &str, value: &[u8], deadline: &Deadline) -> Result<(), RendezvousError>;

    /// Returns the value of a key, or `None` if it is not set. Does not wait for the key.
    ///
    /// # Errors
    /// Returns an error if the store cannot be reached before the deadline.
    fn get(&self, key: &str, deadline: &Deadline) -> Result<Option<Vec<u8>>, RendezvousError>;

    /// Adds `amount` to the number of a key, which starts at 0, and returns the sum. Concurrent calls do not lose amounts. If
    /// the connection to the store is lost during the call, the amount may be added twice.
    ///
    /// # Errors
    /// Returns an error if the store cannot be reached before the deadline, the value is no number, or the sum overflows.
    fn add(&self, key: &str, amount: i64, deadline: &Deadline) -> Result<i64, RendezvousError>;

    /// Waits until a key is set, and returns its value.
    ///
    /// # Errors
    /// Returns [`RendezvousError::KeyMissing`] at the deadline, and the errors of [`get`](Self::get).
    fn wait(&self, key: &str, deadline: &Deadline) -> Result<Vec<u8>, RendezvousError> {
        let mut pause = PAUSE_MIN;
        loop {
            if let Some(value) = self.get(key, deadline)? {
                return Ok(value);
            }
            if deadline.is_over() {
                return Err(RendezvousError::KeyMissing { key: key.to_owned(), waited: deadline.waited() });
            }
            std::thread::sleep(pause.min(deadline.left()));
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }
}

/// Values in this process's memory, with the bounds of a store.
#[derive(Debug, Default)]
pub(crate) struct Values(Mutex<Held>);

#[derive(Debug, Default)]
struct Held {
    values: BTreeMap<String, Vec<u8>>,
    /// Sum of [`size_of_entry`] of all values. At most [`STORE_BYTES_MAX`].
    bytes: usize,
}

impl Values {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn size_of_entry(key: &str, value: &[u8]) -> usize {
    KEY_OVERHEAD_BYTES + key.len() + value.len()
}

/// Checks the lengths of a key and of a value.
pub(crate) fn check_lengths(key: &str, value: &[u8]) -> Result<(), RendezvousError> {
    if key.len() > KEY_BYTES_MAX || value.len() > VALUE_BYTES_MAX {
        return Err(RendezvousError::TooLong { key_bytes: key.len(), value_bytes: value.len() });
    }
    Ok(())
}

impl Store for Values {
    fn set(&self, key: &str, value: &[u8], _: &Deadline) -> Result<(), RendezvousError> {
        self.held().insert(key, value)
    }

    fn get(&self, key: &str, _: &Deadline) -> Result<Option<Vec<u8>>, RendezvousError> {
        Ok(self.held().values.get(key).cloned())
    }

    fn add(&self, key: &str, amount: i64, _: &Deadline) -> Result<i64, RendezvousError> {
        let mut held = self.held();
        let sum = sum_of(key, held.values.get(key).map(Vec::as_slice), amount)?;
        held.insert(key, sum.to_string().as_bytes())?;
        Ok(sum)
    }
}

impl Held {
    fn insert(&mut self, key: &str, value: &[u8]) -> Result<(), RendezvousError> {
        check_lengths(key, value)?;
        let replaced = self.values.get(key).map_or(0, |before| size_of_entry(key, before));
        let bytes = self.bytes - replaced + size_of_entry(key, value);
        if bytes > STORE_BYTES_MAX {
            return Err(RendezvousError::StoreFull { bytes_max: STORE_BYTES_MAX });
        }
        self.values.insert(key.to_owned(), value.to_owned());
        self.bytes = bytes;
        Ok(())
    }
}

/// Returns the sum of a decimal number, 0 if there is none, and an amount.
pub(crate) fn sum_of(key: &str, before: Option<&[u8]>, amount: i64) -> Result<i64, RendezvousError> {
    let before = match before {
        Some(value) => std::str::from_utf8(value).ok().and_then(|text| text.parse().ok()),
        None => Some(0_i64),
    };
    let sum = before.and_then(|before| before.checked_add(amount));
    sum.ok_or_else(|| RendezvousError::NoNumber { key: key.to_owned() })
}
