//! Transfer of file descriptors between processes.
//!
//! For each chunk, the client sends 16 bytes: the chunk's number and size. The server answers with one byte: 1, together with a descriptor,
//! or 0 if the chunk cannot be exported. Closing the connection ends the exchange.

use crate::error::Error;
use crate::shared_chunks::Ticket;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;
use symmalloc_cuda::{Channel, ShareError};

/// The timeout of sends and receives, on both sides.
const PATIENCE: Duration = Duration::from_secs(30);
/// The pause after a connection could not be accepted, for example for lack of file descriptors.
const PAUSE: Duration = Duration::from_millis(100);
/// The number of server threads. While each of them serves a slow client, further clients wait in the socket's queue.
const ANSWERING: usize = 8;
const TICKET_BYTES: usize = 16;

/// The id of the process that serves, and the name of its socket. A forked child has a different id, and no socket.
static SERVED: Mutex<Option<(u32, String)>> = Mutex::new(None);

/// Exports a chunk if its number is still valid.
pub(super) type Export = fn(Ticket) -> Result<OwnedFd, Error>;

/// Returns the name of this process's socket. The first call starts the server.
pub(super) fn serve(export: Export) -> Result<String, Error> {
    let process = std::process::id();
    let mut served = SERVED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((owner, name)) = &*served
        && *owner == process
    {
        return Ok(name.clone());
    }
    // The name is random, so that it cannot be guessed, and differs between containers with equal process ids.
    let name = format!("symmalloc-{process}-{:016x}", RandomState::new().build_hasher().finish());
    let listener = SocketAddr::from_abstract_name(&name).and_then(|address| UnixListener::bind_addr(&address));
    let listener = Arc::new(listener.map_err(Error::Sharing)?);
    let start = || {
        let listener = Arc::clone(&listener);
        let accept = move || answer_all(listener.incoming(), export);
        thread::Builder::new().name("symmalloc-share".to_owned()).spawn(accept)
    };
    start().map_err(Error::Sharing)?;
    // If a thread cannot be started, the earlier threads serve all clients.
    let _started = (1..ANSWERING).try_for_each(|_| start().map(drop));
    Ok(served.insert((process, name)).1.clone())
}

/// Serves clients one after the other, indefinitely.
fn answer_all(connections: impl Iterator<Item = io::Result<UnixStream>>, export: Export) {
    for connection in connections {
        match connection {
            Ok(stream) => answer(&stream, export),
            Err(error) => {
                tracing::warn!(name: "sharing.unanswered", target: "symmalloc", %error);
                thread::sleep(PAUSE);
            }
        }
    }
}

fn answer(stream: &UnixStream, export: Export) {
    if let Err(error) = check_user(&Channel::new(stream, PATIENCE)) {
        tracing::warn!(name: "sharing.refused", target: "symmalloc", %error);
        return;
    }
    let outcome = loop {
        let channel = Channel::new(stream, PATIENCE);
        let mut request = [0; TICKET_BYTES];
        if let Err(error) = channel.receive(&mut request, 0) {
            break error;
        }
        let ticket = Ticket { number: word(&request[..8]), bytes: word(&request[8..]) };
        let answered = match export(ticket) {
            Ok(file) => channel.send(&[1], &[file.as_fd()]),
            Err(error) => {
                tracing::warn!(name: "sharing.refused", target: "symmalloc", %error);
                channel.send(&[0], &[])
            }
        };
        if let Err(error) = answered {
            break error;
        }
    };
    if outcome != ShareError::HungUp {
        tracing::debug!(name: "sharing.broken", target: "symmalloc", error = %outcome);
    }
}

/// Checks that the process at the other end belongs to the same user. Another user could modify the shared memory, or take the name of a
/// socket whose process has ended.
fn check_user(channel: &Channel<'_>) -> Result<(), Error> {
    // SAFETY: the call only returns a number.
    let ours = unsafe { libc::geteuid() };
    match channel.peer() {
        Some((_, theirs)) if theirs == ours => Ok(()),
        peer => Err(Error::OtherUser { theirs: peer.map(|(_, theirs)| theirs), ours }),
    }
}

/// Requests chunks from another process, and processes each one before receiving the next.
pub(super) fn fetch(
    socket: &str,
    tickets: &[Ticket],
    mut take: impl FnMut(Ticket, OwnedFd) -> Result<(), Error>,
) -> Result<(), Error> {
    let broken = |error| Error::Sharing(io::Error::other(error));
    let stream = Channel::connect(socket, PATIENCE).map_err(broken)?;
    let channel = Channel::new(&stream, PATIENCE);
    check_user(&channel)?;
    for &ticket in tickets {
        let request = [ticket.number.to_le_bytes(), ticket.bytes.to_le_bytes()].concat();
        channel.send(&request, &[]).map_err(broken)?;
        let file = channel.receive_at_most(&mut [0], 1).map_err(broken)?.pop();
        take(ticket, file.ok_or(Error::SharedMemoryGone { bytes: ticket.bytes })?)?;
    }
    Ok(())
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn a_system_without_descriptors_is_left_alone_for_a_while() {
        let refused = || Err(io::Error::from_raw_os_error(libc::EMFILE));
        let begun = Instant::now();
        answer_all([refused(), refused()].into_iter(), |ticket| Err(Error::SharedMemoryGone { bytes: ticket.bytes }));
        assert!(begun.elapsed() >= 2 * PAUSE, "{:?}", begun.elapsed());
    }
}
