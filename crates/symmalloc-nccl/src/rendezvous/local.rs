//! Sockets by which the processes of one user meet on one machine.
//!
//! The names are in Linux's abstract namespace, so they need no folder and disappear with their process. Any user can take such a name
//! first. That exposes no data: both sides ask the system for the user of the other end, and a rank that finds another user's socket tries
//! the next name. Another user can delay a meeting only by taking all names, and with a job secret some names cannot be guessed.

use crate::rendezvous::meeting::hash;
use crate::rendezvous::secret::{Purpose, Secret};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};

/// Number of names of a meeting: more than one, in case another user has taken the first.
const NAMES: u32 = 32;

/// Maximum number of ranks that wait to be accepted. The system may allow fewer.
const BACKLOG: i32 = 4096;

/// The name of a meeting's socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LocalName {
    name: String,
    /// Index among the names of the meeting.
    pub(super) index: u32,
}

/// Returns the names of a meeting, equal on all ranks of one user. With a secret, there are additional names that other users cannot guess.
///
/// The first names are the same with and without a secret, so that a rank without the secret finds rank 0 and receives the reason for its
/// rejection.
pub(super) fn names(meeting: u64, port: u16, secret: Option<&Secret>) -> Vec<LocalName> {
    let user = own_user();
    let place = format!("{meeting:016x} {port}");
    let plain = format!("{:016x}", hash(place.as_bytes()));
    let hidden = secret.map(|secret| {
        let code = secret.prove(Purpose::SocketName, &[place.as_bytes()]);
        format!("{:032x}", u128::from_le_bytes(std::array::from_fn(|at| code[at])))
    });
    let parts = [Some(plain), hidden].into_iter().flatten();
    let names = parts.flat_map(|part| (0..NAMES).map(move |number| format!("symmalloc-{user}-{part}-{number}")));
    names.zip(0..).map(|(name, index)| LocalName { name, index }).collect()
}

impl LocalName {
    fn address(&self) -> io::Result<SocketAddrUnix> {
        Ok(SocketAddrUnix::new_abstract_name(self.name.as_bytes())?)
    }

    /// Starts to listen. Accepting a connection does not block.
    pub(super) fn listen(&self) -> io::Result<UnixListener> {
        let socket = new_socket()?;
        bind(&socket, &self.address()?)?;
        listen(&socket, BACKLOG)?;
        Ok(UnixListener::from(socket))
    }

    /// Connects without blocking.
    pub(super) fn connect(&self) -> io::Result<UnixStream> {
        let socket = new_socket()?;
        connect(&socket, &self.address()?)?;
        Ok(UnixStream::from(socket))
    }
}

fn new_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// Returns the user of the process at the other end if it differs from this process's.
pub(super) fn foreign_user(connection: impl AsFd) -> io::Result<Option<u32>> {
    let user = socket_peercred(connection)?.uid.as_raw();
    Ok((user != own_user()).then_some(user))
}

fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_from_meeting_port_and_secret() {
        let secret = Secret::new("0123456789abcdef".into()).expect("the secret is long enough");
        let plain = names(7, 0, None);
        assert_eq!(plain, names(7, 0, None));
        assert_eq!(plain.len(), NAMES as usize);
        let hidden = names(7, 0, Some(&secret)).split_off(plain.len());
        assert_eq!(hidden.len(), NAMES as usize);
        for other in [names(8, 0, None), names(7, 1, None), hidden] {
            assert!(plain.iter().all(|name| !other.contains(name)));
        }
    }

    #[test]
    fn a_process_of_the_same_user_is_known_as_such() {
        let names = names(u64::from(std::process::id()), 0, None);
        let _listener = names[1].listen().expect("the address is free");
        assert!(names[0].connect().is_err(), "nobody listens");
        let connection = names[1].connect().expect("listening");
        assert_eq!(foreign_user(&connection).expect("connected"), None);
    }
}
