//! The connection of a client to its store: kept between requests, and replaced when it is lost.

use crate::deadline::{Deadline, Pauses};
use crate::error::RendezvousError;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use symmalloc_watchdog::Connection;

/// Longest time for a reply to a request that does not wait for a key. A server answers at once unless its process is stopped, or a firewall
/// has dropped an idle connection.
const REPLY_LIMIT: Duration = Duration::from_secs(5);
/// First and longest pause before a lost connection is replaced.
pub(crate) const PAUSE: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(500)];

/// A connection without an open request, if there is one. A thread takes it for its request, so that no other thread waits for it.
#[derive(Debug, Default)]
pub(crate) struct Idle(Mutex<Option<Connection>>);

impl Idle {
    /// Keeps a connection for the next request.
    pub(crate) fn keep(&self, connection: Connection) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(connection);
    }

    /// Takes the connection.
    pub(crate) fn take(&self) -> Option<Connection> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Carries out a request with `exchange`, whose second argument is the end of its time. Repeats it on a connection that `open` returns
    /// if the old one is lost.
    ///
    /// Returns the error of the last exchange if the deadline is over, or if the reply violates the protocol (`InvalidData`).
    pub(crate) fn request<R>(
        &self,
        deadline: &Deadline,
        open: impl Fn() -> Result<Connection, RendezvousError>,
        exchange: impl Fn(&mut Connection, Instant) -> io::Result<R>,
    ) -> Result<io::Result<R>, RendezvousError> {
        let mut pauses = Pauses::new(PAUSE);
        loop {
            let mut connection = self.take().map_or_else(&open, Ok)?;
            match exchange(&mut connection, deadline.at_most(REPLY_LIMIT).end()) {
                Ok(reply) => {
                    self.keep(connection);
                    return Ok(Ok(reply));
                }
                // The server would answer later requests with the reply to this one, so the connection is not used again.
                Err(error) if deadline.is_over() || error.kind() == io::ErrorKind::InvalidData => {
                    return Ok(Err(error));
                }
                Err(_) => {}
            }
            pauses.wait(deadline);
        }
    }
}
