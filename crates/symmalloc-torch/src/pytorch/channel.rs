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
use symmalloc_files::KeptFromChildren;

/// The timeout of sends and receives, on both sides.
const PATIENCE: Duration = Duration::from_secs(30);
/// The pause after a connection could not be accepted, for example for lack of file descriptors.
const PAUSE: Duration = Duration::from_millis(100);
/// The number of server threads. While each of them serves a slow client, further clients wait in the socket's queue.
const ANSWERING: usize = 8;
const TICKET_BYTES: usize = 16;

/// This process's socket. A forked child has none.
static SERVED: Mutex<Option<Served>> = Mutex::new(None);

struct Served {
    process: u32,
    name: String,
    /// A child that outlives this process would keep the socket open, and a client would wait for an answer until the timeout. Dropped
    /// before the listener.
    _kept: KeptFromChildren,
    _listener: Arc<UnixListener>,
}

/// Exports a chunk if its number is still valid.
pub(super) type Export = fn(Ticket) -> Result<OwnedFd, Error>;

/// Returns the name of this process's socket. The first call starts the server.
pub(super) fn serve(export: Export) -> Result<String, Error> {
    let process = std::process::id();
    let mut served = SERVED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(served) = &*served
        && served.process == process
    {
        return Ok(served.name.clone());
    }
    // In a forked child, this is the parent's.
    drop(served.take());
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
    let _kept = KeptFromChildren::new(listener.as_fd());
    Ok(served.insert(Served { process, name, _kept, _listener: listener }).name.clone())
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
        peer => Err(Error::ForeignUser { theirs: peer.map(|(_, theirs)| theirs), ours }),
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
    use std::ffi::CString;
    use std::fs;
    use std::os::unix::ffi::OsStrExt;
    use std::path::PathBuf;
    use std::time::Instant;

    #[test]
    fn a_system_without_descriptors_is_left_alone_for_a_while() {
        let refused = || Err(io::Error::from_raw_os_error(libc::EMFILE));
        let begun = Instant::now();
        answer_all([refused(), refused()].into_iter(), |ticket| Err(Error::SharedMemoryGone { bytes: ticket.bytes }));
        assert!(begun.elapsed() >= 2 * PAUSE, "{:?}", begun.elapsed());
    }

    /// A process that was forked, such as one of a data loader, does not keep the socket of its parent open.
    #[test]
    fn a_forked_child_does_not_have_the_socket() {
        let name = serve(|ticket| Err(Error::SharedMemoryGone { bytes: ticket.bytes })).expect("an abstract socket");
        let sockets = fs::read_to_string("/proc/net/unix").expect("Linux lists its sockets");
        let line = sockets.lines().find(|line| line.ends_with(&name)).expect("the socket is listed");
        let inode = line.split_whitespace().nth(6).expect("the seventh column is the inode");
        let socket = PathBuf::from(format!("socket:[{inode}]"));
        let of_socket = |path: &PathBuf| fs::read_link(path).is_ok_and(|target| target == socket);
        let open = fs::read_dir("/proc/self/fd").expect("Linux lists its descriptors");
        let open: Vec<_> = open.map(|entry| entry.expect("a descriptor").path()).filter(of_socket).collect();
        assert!(!open.is_empty(), "the process serves {name}");
        let paths: Vec<_> =
            open.iter().map(|path| CString::new(path.as_os_str().as_bytes()).expect("no zero byte")).collect();
        let mut target = [0_u8; 64];
        // SAFETY: the child only makes system calls, with buffers from before the fork.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                let is_open = |path: &CString| {
                    let length = libc::readlink(path.as_ptr(), target.as_mut_ptr().cast(), target.len());
                    usize::try_from(length).is_ok_and(|length| target[..length] == *socket.as_os_str().as_bytes())
                };
                libc::_exit(paths.iter().any(is_open).into());
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "the child has the socket: {status}");
        }
    }
}
