//! The endpoints at which rank 0 listens and to which the others connect: network addresses, and sockets of the machine.
//!
//! Sockets of the machine connect the processes of one user. Their names are in Linux's abstract namespace, so they need no folder and
//! disappear with their process. Any user can take such a name first. That exposes no data: both sides ask the system for the user of the
//! other end, and a rank that finds another user's socket tries the next name. Another user can delay a meeting only by taking all names,
//! and with a job secret some names cannot be guessed.

use crate::error::RendezvousError;
use crate::secret::{Purpose, Secret, random};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{
    set_ipv6_v6only, set_socket_keepalive, set_socket_reuseaddr, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl,
    set_tcp_user_timeout, socket_peercred,
};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};
use symmalloc_watchdog::Connection;

/// An address at which rank 0 may be found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// A network address.
    Network(SocketAddr),
    /// A socket on this machine.
    Local(LocalName),
}

/// An error returned by an attempt to connect to an endpoint.
#[derive(Debug)]
pub(crate) enum ConnectError {
    /// Nothing listens there, or the connection failed.
    Io(io::ErrorKind),
    /// The socket belongs to another user.
    Foreign(u32),
}

impl From<io::Error> for ConnectError {
    fn from(error: io::Error) -> Self {
        ConnectError::Io(error.kind())
    }
}

impl Endpoint {
    /// Starts to listen. Accepting a connection does not block.
    pub(crate) fn listen(&self) -> Result<Listener, RendezvousError> {
        match self {
            Endpoint::Network(address) => {
                let refused = |error: io::Error| RendezvousError::Listen { address: *address, kind: error.kind() };
                listen_at(*address).map(Listener::Network).map_err(refused)
            }
            Endpoint::Local(name) => {
                let refused = |error: io::Error| RendezvousError::ListenLocal { kind: error.kind() };
                name.listen().map(|listener| Listener::Local(listener, name.index)).map_err(refused)
            }
        }
    }

    /// Like [`listen`](Self::listen), for ranks of other machines too. They resolve a host name whose address is a loopback one here, as
    /// that of a machine with Debian, to another address.
    pub(crate) fn listen_for_others(&self) -> Result<Listener, RendezvousError> {
        match self {
            Endpoint::Network(address) if address.ip().is_loopback() => {
                let refused = |error: io::Error| RendezvousError::Listen { address: *address, kind: error.kind() };
                listen_beyond(*address).map(Listener::Network).map_err(refused)
            }
            _ => self.listen(),
        }
    }

    /// Connects to the endpoint. On this machine, connects only to a process of the same user.
    pub(crate) fn connect(&self, limit: Duration) -> Result<Connection, ConnectError> {
        match self {
            Endpoint::Network(address) => Ok(TcpStream::connect_timeout(address, limit)?.into()),
            Endpoint::Local(name) => {
                let stream = name.connect()?;
                if let Some(user) = foreign_user(&stream)? {
                    return Err(ConnectError::Foreign(user));
                }
                stream.set_nonblocking(false)?;
                Ok(stream.into())
            }
        }
    }

    /// Returns the network address, if it is one.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        match self {
            Endpoint::Network(address) => Some(*address),
            Endpoint::Local(_) => None,
        }
    }

    /// Returns the number by which both sides identify the endpoint, even if they use different addresses for it.
    pub(crate) fn number(&self) -> u32 {
        match self {
            Endpoint::Network(address) => address.port().into(),
            Endpoint::Local(name) => name.index,
        }
    }
}

/// Rank 0's side of an endpoint.
#[derive(Debug)]
pub(crate) enum Listener {
    Network(TcpListener),
    Local(UnixListener, u32),
}

/// An incoming connection.
#[derive(Debug)]
pub(crate) enum Incoming {
    /// A possible rank, with its network address.
    Unverified(Connection, Option<IpAddr>),
    /// A process of another user of this machine.
    Foreign(u32),
}

impl Listener {
    /// Accepts a pending connection, if any. Never blocks.
    pub(crate) fn accept(&self) -> io::Result<Incoming> {
        let guest = match self {
            Listener::Network(listener) => {
                let (stream, from) = listener.accept()?;
                stream.set_nonblocking(true)?;
                Incoming::Unverified(stream.into(), Some(from.ip()))
            }
            Listener::Local(listener, _) => {
                let (stream, _) = listener.accept()?;
                if let Some(user) = foreign_user(&stream)? {
                    return Ok(Incoming::Foreign(user));
                }
                stream.set_nonblocking(true)?;
                Incoming::Unverified(stream.into(), None)
            }
        };
        Ok(guest)
    }

    /// Returns the number of the endpoint; see [`Endpoint::number`].
    pub(crate) fn number(&self) -> u32 {
        match self {
            Listener::Network(listener) => listener.local_addr().map_or(0, |address| address.port().into()),
            Listener::Local(_, index) => *index,
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Network(listener) => listener.as_fd(),
            Listener::Local(listener, _) => listener.as_fd(),
        }
    }
}

/// Waits until one of these has bytes, a connection or an error, or the time has passed. Returns `true` for each that must be read, in their
/// order.
pub(crate) fn wait_for_any<'a>(descriptors: impl Iterator<Item = BorrowedFd<'a>>, limit: Duration) -> Vec<bool> {
    let mut polled: Vec<PollFd<'_>> = descriptors.map(|it| PollFd::from_borrowed_fd(it, PollFlags::IN)).collect();
    let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) };
    if poll(&mut polled, Some(&limit)).is_err() {
        // A signal, or more descriptors than the limit of this process: read all of them.
        std::thread::sleep(Duration::from_millis(1));
        return vec![true; polled.len()];
    }
    polled.iter().map(|it| !it.revents().is_empty()).collect()
}

/// Reads exactly `bytes.len()` bytes. Fails if they do not arrive before `end`.
pub(crate) fn read_until(connection: &mut Connection, bytes: &mut [u8], end: Instant) -> io::Result<()> {
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

/// Writes all bytes. Fails if the peer does not take them before `end`.
pub(crate) fn write_until(connection: &mut Connection, mut bytes: &[u8], end: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        set_timeouts(connection, end)?;
        match connection.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Makes the system end a connection if the other machine does not answer for [`UNREACHABLE_LIMIT`]. A machine that is lost or cannot be reached
/// then looks like a process that ended. A process that is stopped does not, because its machine answers.
pub(crate) fn end_if_unreachable(connection: &Connection) -> io::Result<()> {
    const PROBES: u32 = 5;
    let Connection::Tcp(stream) = connection else { return Ok(()) };
    set_tcp_keepidle(stream, UNREACHABLE_LIMIT / PROBES)?;
    set_tcp_keepintvl(stream, UNREACHABLE_LIMIT / PROBES)?;
    set_tcp_keepcnt(stream, PROBES)?;
    set_socket_keepalive(stream, true)?;
    // Probes are sent only while no data is on the way.
    Ok(set_tcp_user_timeout(stream, UNREACHABLE_LIMIT.as_millis() as u32)?)
}

/// Undoes [`end_if_unreachable`]: the watchdog has its own deadlines.
pub(crate) fn stay_if_unreachable(connection: &Connection) -> io::Result<()> {
    let Connection::Tcp(stream) = connection else { return Ok(()) };
    set_socket_keepalive(stream, false)?;
    Ok(set_tcp_user_timeout(stream, 0)?)
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
    match TcpListener::bind(address) {
        Ok(listener) => accept_many(listener),
        // The address is one of this machine that only other machines know.
        Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => listen_beyond(address),
        Err(error) => Err(error),
    }
}

/// Listens on all addresses, and logs it, because `address` is not the one at which other machines reach this one.
fn listen_beyond(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = listen_on_all(address.port())?;
    let listening = listener.local_addr()?;
    tracing::warn!(name: "rendezvous.listens_everywhere", target: "symmalloc", %address, %listening);
    Ok(listener)
}

/// Makes a listener nonblocking, with room for many connections.
fn accept_many(listener: TcpListener) -> io::Result<TcpListener> {
    listener.set_nonblocking(true)?;
    // The standard library's backlog of 128 connections overflows if many ranks or strangers connect at once. A second call replaces it.
    listen(&listener, BACKLOG)?;
    Ok(listener)
}

/// Listens on a port of all addresses of this machine, IPv4 and, where there is one, IPv6. The system chooses the port if it is 0.
fn listen_on_all(port: u16) -> io::Result<TcpListener> {
    let both = || {
        let socket = socket_with(AddressFamily::INET6, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        // Otherwise the sysctl `net.ipv6.bindv6only` decides.
        set_ipv6_v6only(&socket, false)?;
        // As the standard library does: connections of an earlier process may still occupy the port for a minute.
        set_socket_reuseaddr(&socket, true)?;
        bind(&socket, &SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port))?;
        Ok::<_, io::Error>(TcpListener::from(socket))
    };
    let listener = both().or_else(|_| TcpListener::bind(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port)))?;
    accept_many(listener)
}

/// Listens on a port of all addresses of this machine, which the system chooses.
pub(crate) fn listen_everywhere() -> Result<Listener, RendezvousError> {
    let address = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0);
    let refused = |error: io::Error| RendezvousError::Listen { address, kind: error.kind() };
    listen_on_all(0).map(Listener::Network).map_err(refused)
}

/// Time after which a machine that does not answer is lost for a meeting.
const UNREACHABLE_LIMIT: Duration = Duration::from_secs(5);

/// Number of names of a meeting: more than one, in case another user has taken the first.
const NAMES: u32 = 32;

/// Maximum number of ranks that wait to be accepted. The system may allow fewer.
const BACKLOG: i32 = 4096;

/// The name of a socket of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LocalName {
    name: String,
    /// Index among the names of the meeting.
    pub(crate) index: u32,
}

/// Returns the names of an own store, equal on all ranks of one user. With a secret, there are additional names that other users cannot guess.
///
/// The first names are the same with and without a secret, so that a rank without the secret finds rank 0 and receives the reason for its
/// rejection.
pub(crate) fn names(meeting: u64, port: u16, secret: Option<&Secret>) -> Vec<LocalName> {
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
    /// Returns a new name, which only the readers of rank 0's card know.
    pub(crate) fn random() -> Result<Self, RendezvousError> {
        let part = u128::from_le_bytes(random()?);
        Ok(LocalName { name: format!("symmalloc-{}-{part:032x}", own_user()), index: 0 })
    }

    /// Returns the name in a card.
    pub(crate) fn from_text(name: &str) -> Self {
        LocalName { name: name.to_owned(), index: 0 }
    }

    /// Returns the name as text.
    pub(crate) fn as_str(&self) -> &str {
        &self.name
    }

    fn address(&self) -> io::Result<SocketAddrUnix> {
        Ok(SocketAddrUnix::new_abstract_name(self.name.as_bytes())?)
    }

    /// Starts to listen. Accepting a connection does not block.
    pub(crate) fn listen(&self) -> io::Result<UnixListener> {
        let socket = new_socket()?;
        bind(&socket, &self.address()?)?;
        listen(&socket, BACKLOG)?;
        Ok(UnixListener::from(socket))
    }

    /// Connects without blocking.
    pub(crate) fn connect(&self) -> io::Result<UnixStream> {
        let socket = new_socket()?;
        connect(&socket, &self.address()?)?;
        Ok(UnixStream::from(socket))
    }
}

/// Returns the FNV-1a hash, which is the same on every machine.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

fn new_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// Returns the user of the process at the other end if it differs from this process's.
pub(crate) fn foreign_user(connection: impl AsFd) -> io::Result<Option<u32>> {
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

    /// Regression test: with `net.ipv6.bindv6only=1`, a socket for all addresses accepted no IPv4. The setting belongs to a network namespace.
    #[test]
    fn all_addresses_include_ipv4_and_ipv6_whatever_the_system_sets() {
        const BIND_V6_ONLY: &str = "/proc/sys/net/ipv6/bindv6only";
        std::thread::spawn(|| {
            // SAFETY: the call changes only the calling thread, which ends soon.
            let is_own = unsafe { libc::unshare(libc::CLONE_NEWNET) } == 0;
            // `lo` is down in a new namespace.
            let is_up = is_own && std::process::Command::new("ip").args(["link", "set", "lo", "up"]).status().is_ok();
            if !is_up || std::fs::write(BIND_V6_ONLY, "1").is_err() {
                println!("skipped: only root can create network namespaces, with the program `ip`");
                return;
            }
            let listener = listen_everywhere().expect("a port should be free");
            for ip in [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()] {
                let address = SocketAddr::new(ip, listener.number() as u16);
                TcpStream::connect(address).unwrap_or_else(|error| panic!("{address}: {error}"));
            }
        })
        .join()
        .expect("the thread should not panic");
    }

    #[test]
    fn a_process_of_the_same_user_is_not_foreign() {
        let names = names(u64::from(std::process::id()), 0, None);
        let _listener = names[1].listen().expect("the address is free");
        assert!(names[0].connect().is_err(), "nobody listens");
        let connection = names[1].connect().expect("a process should listen");
        assert_eq!(foreign_user(&connection).expect("the connection should succeed"), None);
    }
}
