//! The contract of a store: the few keys and values through which ranks find each other.
//!
//! ```text
//!  Store ── TorchStore     the store that torchrun and PyTorch run         MASTER_ADDR, MASTER_PORT
//!        ├─ FolderStore    files in a folder that all machines share       a path
//!        └─ own store      a server in rank 0's process, and its clients   host:port, or a socket of one machine
//! ```
//!
//! A meeting stores little: one card of rank 0, and a note of each rank that cannot reach it. Values are at most [`VALUE_BYTES_MAX`] long.

use crate::deadline::{Deadline, Pauses};
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

/// First and longest pause between two reads of a key that does not exist yet.
const PAUSE: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(100)];

/// A store of keys and values that all ranks of a job can reach.
///
/// Keys are at most 256 bytes of text and values at most 64 KiB. Every call ends at its deadline.
///
/// There is no counter. Rank 0 counts the ranks by their connections, which end with their processes. A counter in a store would count a
/// rank that ended, and would count twice a rank that restarted or whose connection was lost during the call.
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

    /// Waits until a key is set, and returns its value.
    ///
    /// # Errors
    /// Returns [`RendezvousError::KeyMissing`] at the deadline, and the errors of [`get`](Self::get).
    fn wait(&self, key: &str, deadline: &Deadline) -> Result<Vec<u8>, RendezvousError> {
        let mut pauses = Pauses::new(PAUSE);
        loop {
            if let Some(value) = self.get(key, deadline)? {
                return Ok(value);
            }
            if deadline.is_over() {
                return Err(RendezvousError::KeyMissing { key: key.to_owned(), waited: deadline.waited() });
            }
            pauses.wait(deadline);
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
