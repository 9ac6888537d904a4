//! A client of the store that PyTorch and torchrun run (c10d's TCPStore).
//!
//! ```text
//!  connect   ── 0 magic(4) ── 13 nonce(4) ──►   ◄── nonce(4)                 both backends of the server, since PyTorch 2.2
//!  set       ── 1 key value ───────────────►   no reply
//!  get       ── 3 key ─────────────────────►   ◄── value
//!  check     ── 5 count(8) keys ───────────►   ◄── 0: all are set, 1: not all
//!  wait      ── 6 count(8) keys ───────────►   ◄── 0, once all are set
//! ```
//!
//! A key, and a value, is its length in 8 bytes and then its bytes. Integers have the order of the server's machine, which is little-endian
//! on all machines with an NVIDIA GPU. Like PyTorch's own client, this one puts `/` before each key, so a
//! Python program reads the same keys.
//!
//! The protocol has no authentication: any process that can connect to the port can read and write all keys. It has no version either. The
//! ping tells a store from another program.

use crate::deadline::{Deadline, Pauses};
use crate::endpoint::{read_until, write_until};
use crate::error::RendezvousError;
use crate::idle::{Idle, PAUSE};
use crate::secret::random;
use crate::store::{Store, VALUE_BYTES_MAX, check_lengths};
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};
use symmalloc_watchdog::Connection;

const VALIDATE: u8 = 0;
const SET: u8 = 1;
const GET: u8 = 3;
const CHECK: u8 = 5;
const WAIT: u8 = 6;
const PING: u8 = 13;

/// The number with which a client of PyTorch introduces itself.
const MAGIC: u32 = 0x3C85_F7CE;

/// Longest attempt to connect to one of several addresses.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);
/// Longest time in which a server that runs answers a ping.
const PING_LIMIT: Duration = Duration::from_secs(5);
/// Time after which a wait for a key is repeated. It bounds the wait for a server that is gone without a trace.
const WAIT_LIMIT: Duration = Duration::from_secs(30);

/// A client of PyTorch's store. It reconnects if the connection is lost, and tries all addresses of the host in turn. The
/// system's name resolution can outlast a deadline.
///
/// # Examples
/// ```no_run
/// use std::time::Duration;
/// use symmalloc_rendezvous::{Deadline, Store, TorchStore};
///
/// // As torchrun sets MASTER_ADDR and MASTER_PORT.
/// let deadline = Deadline::after(Duration::from_secs(60));
/// let store = TorchStore::connect("node7", 29500, &deadline)?;
/// store.set("color", b"blue", &deadline)?;
/// # Ok::<(), symmalloc_rendezvous::RendezvousError>(())
/// ```
pub struct TorchStore {
    host: String,
    port: u16,
    idle: Idle,
}

impl fmt::Debug for TorchStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TorchStore({})", self.address())
    }
}

impl TorchStore {
    /// Connects to the store. Resolves the host again in each round, because a name may get its address after the ranks have started.
    ///
    /// # Errors
    /// Returns an error if no address of the host accepts a connection before the deadline, or another program answers there.
    pub fn connect(host: &str, port: u16, deadline: &Deadline) -> Result<Self, RendezvousError> {
        let store = TorchStore { host: host.to_owned(), port, idle: Idle::default() };
        store.idle.keep(store.open(deadline)?);
        Ok(store)
    }

    /// Returns the network address of the server that this client uses, or `None` while its connection is lost or in use.
    pub(crate) fn peer(&self) -> Option<SocketAddr> {
        let connection = self.idle.take()?;
        let peer = match &connection {
            Connection::Tcp(stream) => stream.peer_addr().ok(),
            _ => None,
        };
        self.idle.keep(connection);
        peer
    }

    fn address(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    fn open(&self, deadline: &Deadline) -> Result<Connection, RendezvousError> {
        let mut pauses = Pauses::new(PAUSE);
        let mut is_foreign = false;
        let mut last = io::ErrorKind::TimedOut;
        loop {
            let addresses = (self.host.as_str(), self.port).to_socket_addrs();
            let addresses = addresses.map_err(|error| last = error.kind()).into_iter().flatten();
            let mut found = None;
            for address in addresses {
                let limit = deadline.left().min(CONNECT_LIMIT);
                if limit.is_zero() {
                    break;
                }
                match TcpStream::connect_timeout(&address, limit) {
                    Ok(stream) => match introduce(stream, deadline.at_most(PING_LIMIT).end()) {
                        Ok(connection) => return Ok(connection),
                        // It answered wrongly, closed the connection or is silent.
                        Err(error) => found = Some((true, error.kind())),
                    },
                    Err(error) => found = Some((found.is_some_and(|(is_foreign, _)| is_foreign), error.kind())),
                }
            }
            (is_foreign, last) = found.unwrap_or((is_foreign, last));
            if deadline.is_over() {
                let (address, waited) = (self.address(), deadline.waited());
                return Err(if is_foreign {
                    RendezvousError::ForeignStore { address }
                } else {
                    RendezvousError::StoreUnreachable { address, kind: last, waited }
                });
            }
            pauses.wait(deadline);
        }
    }

    /// Sends a request and reads its reply, on a new connection if the old one is lost.
    fn request<R>(
        &self,
        request: &[u8],
        deadline: &Deadline,
        read_reply: impl Fn(&mut Connection, Instant) -> io::Result<R>,
    ) -> Result<R, RendezvousError> {
        let exchange = |connection: &mut Connection, end| {
            write_until(connection, request, end)?;
            read_reply(connection, end)
        };
        let reply = self.idle.request(deadline, || self.open(deadline), exchange)?;
        let (address, waited) = (self.address(), deadline.waited());
        reply.map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => RendezvousError::ForeignStore { address },
            kind => RendezvousError::StoreUnreachable { address, kind, waited },
        })
    }

    /// Returns `true` once a key is set, or `false` after a time limit or if the connection is lost.
    fn is_set_within(&self, key: &str, limit: Duration, deadline: &Deadline) -> Result<bool, RendezvousError> {
        let end = deadline.at_most(limit).end();
        let mut connection = self.idle.take().map_or_else(|| self.open(deadline), Ok)?;
        let reply = write_until(&mut connection, &keys(WAIT, key), end).and_then(|()| read::<1>(&mut connection, end));
        match reply {
            Ok([0]) => {
                self.idle.keep(connection);
                Ok(true)
            }
            Ok(_) => Err(RendezvousError::ForeignStore { address: self.address() }),
            // The connection is closed: after a time limit, the reply may still come; and the server may be gone.
            Err(_) => Ok(false),
        }
    }
}

impl Store for TorchStore {
    fn set(&self, key: &str, value: &[u8], deadline: &Deadline) -> Result<(), RendezvousError> {
        check_lengths(key, value)?;
        let mut request = named(SET, key);
        request.extend((value.len() as u64).to_le_bytes());
        request.extend(value);
        // There is no reply to a `set`. The reply to a `check` on the same connection shows that the server has carried it out.
        request.extend(keys(CHECK, key));
        self.request(&request, deadline, read::<1>).map(drop)
    }

    fn get(&self, key: &str, deadline: &Deadline) -> Result<Option<Vec<u8>>, RendezvousError> {
        check_lengths(key, &[])?;
        // A `get` of a key that is not set ends the connection in some versions of the server.
        let [missing] = self.request(&keys(CHECK, key), deadline, read::<1>)?;
        if missing != 0 {
            return Ok(None);
        }
        self.request(&named(GET, key), deadline, read_value).map(Some)
    }

    fn wait(&self, key: &str, deadline: &Deadline) -> Result<Vec<u8>, RendezvousError> {
        check_lengths(key, &[])?;
        let mut pauses = Pauses::new(PAUSE);
        loop {
            if self.is_set_within(key, WAIT_LIMIT, deadline)? {
                return self.request(&named(GET, key), deadline, read_value);
            }
            if deadline.is_over() {
                return Err(RendezvousError::KeyMissing { key: key.to_owned(), waited: deadline.waited() });
            }
            pauses.wait(deadline);
        }
    }
}

/// Introduces this client, and checks that a store answers.
fn introduce(stream: TcpStream, end: Instant) -> io::Result<Connection> {
    stream.set_nodelay(true)?;
    let mut connection = Connection::from(stream);
    let nonce: [u8; 4] = random().map_err(|_| io::ErrorKind::Other)?;
    let mut request = vec![VALIDATE];
    request.extend(MAGIC.to_le_bytes());
    request.push(PING);
    request.extend(nonce);
    write_until(&mut connection, &request, end)?;
    match read::<4>(&mut connection, end) {
        Ok(reply) if reply == nonce => Ok(connection),
        Ok(_) => Err(io::ErrorKind::InvalidData.into()),
        Err(error) => Err(error),
    }
}

/// Returns a request with one key.
fn named(operation: u8, key: &str) -> Vec<u8> {
    let mut request = vec![operation];
    request.extend((key.len() as u64 + 1).to_le_bytes());
    request.push(b'/');
    request.extend(key.as_bytes());
    request
}

/// Returns a request with a list of one key.
fn keys(operation: u8, key: &str) -> Vec<u8> {
    let mut request = named(operation, key);
    request.splice(1..1, 1_u64.to_le_bytes());
    request
}

fn read<const BYTES: usize>(connection: &mut Connection, end: Instant) -> io::Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    read_until(connection, &mut bytes, end)?;
    Ok(bytes)
}

fn read_value(connection: &mut Connection, end: Instant) -> io::Result<Vec<u8>> {
    let count = u64::from_le_bytes(read(connection, end)?);
    let count =
        usize::try_from(count).ok().filter(|count| *count <= VALUE_BYTES_MAX).ok_or(io::ErrorKind::InvalidData)?;
    let mut value = vec![0; count];
    read_until(connection, &mut value, end)?;
    Ok(value)
}
