//! The two ends of a connection that is being established: rank 0 listens at a door, and the others knock at it.

use crate::rendezvous::error::RendezvousError;
use crate::rendezvous::local::{self, LocalName};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};
use symmalloc_watchdog::Connection;

/// An address at which rank 0 may be found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Door {
    /// A network address.
    Network(SocketAddr),
    /// A socket on this machine.
    Local(LocalName),
}

/// An error returned by an attempt to open a door.
#[derive(Debug)]
pub(super) enum Closed {
    /// Nothing listens there, or the connection failed.
    Io,
    /// The socket belongs to another user.
    Foreign(u32),
}

impl From<io::Error> for Closed {
    fn from(_: io::Error) -> Self {
        Closed::Io
    }
}

impl Door {
    /// Starts to listen. Accepting a connection does not block.
    pub(super) fn listen(&self) -> Result<Listener, RendezvousError> {
        match self {
            Door::Network(address) => {
                let refused = |error: io::Error| RendezvousError::Listen { address: *address, kind: error.kind() };
                listen_at(*address).map(Listener::Network).map_err(refused)
            }
            Door::Local(name) => {
                let refused = |error: io::Error| RendezvousError::ListenLocal { kind: error.kind() };
                name.listen().map(|listener| Listener::Local(listener, name.index)).map_err(refused)
            }
        }
    }

    /// Connects to the door. On this machine, connects only to a process of the same user.
    pub(super) fn open(&self, limit: Duration) -> Result<Connection, Closed> {
        match self {
            Door::Network(address) => Ok(TcpStream::connect_timeout(address, limit)?.into()),
            Door::Local(name) => {
                let stream = name.connect()?;
                if let Some(user) = local::foreign_user(&stream)? {
                    return Err(Closed::Foreign(user));
                }
                stream.set_nonblocking(false)?;
                Ok(stream.into())
            }
        }
    }

    /// Returns the number by which both sides identify the door, even if they use different addresses for it.
    pub(super) fn number(&self) -> u32 {
        match self {
            Door::Network(address) => address.port().into(),
            Door::Local(name) => name.index,
        }
    }
}

/// Rank 0's side of a door.
#[derive(Debug)]
pub(super) enum Listener {
    Network(TcpListener),
    Local(UnixListener, u32),
}

/// A process that knocked.
#[derive(Debug)]
pub(super) enum Guest {
    /// A possible rank, with its network address.
    Stranger(Connection, Option<IpAddr>),
    /// A process of another user of this machine.
    Foreign(u32),
}

impl Listener {
    /// Accepts a pending connection, if any. Never blocks.
    pub(super) fn accept(&self) -> io::Result<Guest> {
        let guest = match self {
            Listener::Network(listener) => {
                let (stream, from) = listener.accept()?;
                stream.set_nonblocking(true)?;
                Guest::Stranger(stream.into(), Some(from.ip()))
            }
            Listener::Local(listener, _) => {
                let (stream, _) = listener.accept()?;
                if let Some(user) = local::foreign_user(&stream)? {
                    return Ok(Guest::Foreign(user));
                }
                stream.set_nonblocking(true)?;
                Guest::Stranger(stream.into(), None)
            }
        };
        Ok(guest)
    }

    /// Returns the number of the door; see [`Door::number`].
    pub(super) fn number(&self) -> u32 {
        match self {
            Listener::Network(listener) => listener.local_addr().map_or(0, |address| address.port().into()),
            Listener::Local(_, index) => *index,
        }
    }
}

/// Reads exactly `bytes.len()` bytes. Fails if they do not arrive before `end`.
pub(super) fn read_until(connection: &mut Connection, bytes: &mut [u8], end: Instant) -> io::Result<()> {
    let mut at = 0;
    while at < bytes.len() {
        set_timeouts(connection, end)?;
        match connection.read(&mut bytes[at..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => at += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Writes all bytes, with the time limit `end`. The bytes are few, and the system's buffer is empty.
pub(super) fn write_until(connection: &mut Connection, bytes: &[u8], end: Instant) -> io::Result<()> {
    set_timeouts(connection, end)?;
    connection.write_all(bytes)
}

fn set_timeouts(connection: &Connection, end: Instant) -> io::Result<()> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    match connection {
        Connection::Tcp(stream) => {
            stream.set_read_timeout(Some(left)).and_then(|()| stream.set_write_timeout(Some(left)))
        }
        Connection::Unix(stream) => {
            stream.set_read_timeout(Some(left)).and_then(|()| stream.set_write_timeout(Some(left)))
        }
        _ => Ok(()),
    }
}

fn listen_at(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = match TcpListener::bind(address) {
        // The address is one of this machine that only other machines know.
        Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {
            let everywhere = match address {
                SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
                SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            };
            let listening = SocketAddr::new(everywhere, address.port());
            tracing::warn!(name: "rendezvous.listens_everywhere", target: "symmalloc", %address, %listening);
            TcpListener::bind(listening)
        }
        bound => bound,
    }?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
