//! The own store: a server in rank 0's process, and its clients. The fallback where the launcher runs no store.
//!
//! ```text
//!  client: 1 byte operation, 2 bytes length of the key, 4 bytes length of the value; key; value
//!  server: 1 byte status, 4 bytes length of the value; value
//! ```
//!
//! A client first proves that it belongs to the job, as the [handshake](crate::handshake) describes. It reconnects if the connection ends,
//! because rank 0 may have restarted. All integers are little-endian. A client that sends anything else is disconnected.

use crate::admission::Admission;
use crate::deadline::Deadline;
use crate::endpoint::{Endpoint, Listener, read_until, wait_for_any, write_until};
use crate::error::{EndpointAnswer, RendezvousError};
use crate::handshake::{SHARED_BYTES, Terms};
use crate::idle::Idle;
use crate::search::{Identity, search};
use crate::store::{KEY_BYTES_MAX, STORE_BYTES_MAX, Store, VALUE_BYTES_MAX, Values, check_lengths};
use rustix::event::{EventfdFlags, eventfd};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use symmalloc_watchdog::{Connection, threads};
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

const SET: u8 = 1;
const GET: u8 = 2;

/// The request was carried out, and the value follows.
const PRESENT: u8 = 0;
/// The key is not set.
const ABSENT: u8 = 1;
/// The store is full.
const FULL: u8 = 2;

/// Interval at which the server checks whether to stop, if nothing wakes it.
const STOP_LIMIT: Duration = Duration::from_millis(20);
/// Maximum number of clients for each rank. A rank has one for each request at a time, and another for a moment if it
/// reconnects.
const CLIENTS_PER_RANK: usize = 4;

/// The start of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RequestHead {
    operation: u8,
    key_bytes: U16,
    value_bytes: U32,
}

/// The start of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct ReplyHead {
    status: u8,
    value_bytes: U32,
}

const REQUEST_HEAD_BYTES: usize = size_of::<RequestHead>();

/// Rank 0's side. The server runs on a thread until the store is dropped.
pub(crate) struct ServedStore {
    values: Arc<Values>,
    is_over: Arc<AtomicBool>,
    /// Wakes the server; `None` if the process has no descriptor left for it.
    wake: Option<Arc<OwnedFd>>,
    /// Disconnected once the server has closed its listener.
    ended: Mutex<Receiver<()>>,
}

impl ServedStore {
    /// Starts the server. For a refused rank, `refused` returns a key and a value that record the reason.
    pub(crate) fn start(
        listener: Listener,
        terms: Terms,
        refused: impl Fn(u32, EndpointAnswer) -> (String, Vec<u8>) + Send + 'static,
    ) -> Result<Self, RendezvousError> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok().map(Arc::new);
        let (is_running, ended): (Sender<()>, _) = channel();
        let store = ServedStore { values: Arc::default(), is_over: Arc::default(), wake, ended: Mutex::new(ended) };
        let wake = store.wake.clone();
        let (values, is_over) = (Arc::clone(&store.values), Arc::clone(&store.is_over));
        let clients_max = CLIENTS_PER_RANK * terms.ranks as usize;
        let mut admission = Admission::new(terms, [0; SHARED_BYTES]);
        let serve = move || {
            let mut clients: Vec<Client> = Vec::new();
            while !is_over.load(Ordering::Acquire) {
                let connections = clients.iter().map(|client| client.connection.as_fd());
                let opened = [listener.as_fd()].into_iter().chain(admission.descriptors()).chain(connections);
                let opened = opened.chain(wake.iter().map(|wake| wake.as_fd()));
                let ready = wait_for_any(opened, STOP_LIMIT);
                let (of_peers, of_clients) = ready[1..].split_at(admission.len());
                let mut of_clients = of_clients.iter();
                clients.retain_mut(|client| of_clients.next() == Some(&false) || client.serve(&values).is_ok());
                let admitted = admission.poll(of_peers, |_, _, _| false);
                admission.accept(&listener);
                clients
                    .extend(admitted.into_iter().map(|it| Client { connection: it.connection, received: Vec::new() }));
                clients.drain(..clients.len().saturating_sub(clients_max));
                for (rank, found) in admission.take_refused() {
                    let (key, value) = refused(rank, found);
                    // If the store is full, the reason is lost.
                    let _stored = values.set(&key, &value, &Deadline::after(Duration::ZERO));
                }
            }
            drop(listener);
            drop(is_running);
        };
        threads::run(serve).map_err(|error| RendezvousError::Thread { kind: error.kind() })?;
        Ok(store)
    }
}

impl Drop for ServedStore {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        if let Some(wake) = &self.wake {
            // If it fails, the server looks at the flag soon.
            let _woken = rustix::io::write(wake, &1_u64.to_ne_bytes());
        }
        // The next meeting may listen at the same address. Nothing is sent on this channel: it is disconnected once the
        // server's thread has closed the listener.
        let _ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner).recv();
    }
}

impl Store for ServedStore {
    fn set(&self, key: &str, value: &[u8], deadline: &Deadline) -> Result<(), RendezvousError> {
        self.values.set(key, value, deadline)
    }

    fn get(&self, key: &str, deadline: &Deadline) -> Result<Option<Vec<u8>>, RendezvousError> {
        self.values.get(key, deadline)
    }
}

/// A client, as the server sees it.
struct Client {
    connection: Connection,
    /// The start of the next request.
    received: Vec<u8>,
}

impl Client {
    /// Reads what has arrived and answers complete requests. Fails if the client must be disconnected.
    fn serve(&mut self, values: &Values) -> io::Result<()> {
        let mut bytes = [0; 4096];
        match self.connection.read(&mut bytes) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => self.received.extend_from_slice(&bytes[..count]),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                return Ok(());
            }
            Err(error) => return Err(error),
        }
        while let Some((head, rest)) = self.received.split_at_checked(REQUEST_HEAD_BYTES) {
            let head = RequestHead::read_from_bytes(head).map_err(|_| io::ErrorKind::InvalidData)?;
            let (key_bytes, value_bytes) = (usize::from(head.key_bytes.get()), head.value_bytes.get() as usize);
            if key_bytes > KEY_BYTES_MAX || value_bytes > VALUE_BYTES_MAX {
                return Err(io::ErrorKind::InvalidData.into());
            }
            let Some((request, _)) = rest.split_at_checked(key_bytes + value_bytes) else { break };
            let (key, value) = request.split_at(key_bytes);
            let key = std::str::from_utf8(key).map_err(|_| io::ErrorKind::InvalidData)?;
            let (status, reply) = answer(values, head.operation, key, value)?;
            let reply_head = ReplyHead { status, value_bytes: (reply.len() as u32).into() };
            // A client has one request at a time, so its socket's buffer is empty. A client that does not read is disconnected.
            self.connection.write_all(&[reply_head.as_bytes(), &reply].concat())?;
            self.received.drain(..REQUEST_HEAD_BYTES + key_bytes + value_bytes);
        }
        Ok(())
    }
}

/// Carries out a request. Returns the status and the value of the reply.
fn answer(values: &Values, operation: u8, key: &str, value: &[u8]) -> io::Result<(u8, Vec<u8>)> {
    let now = Deadline::after(Duration::ZERO);
    let done = match operation {
        SET => values.set(key, value, &now).map(|()| (PRESENT, Vec::new())),
        GET => values.get(key, &now).map(|value| value.map_or((ABSENT, Vec::new()), |value| (PRESENT, value))),
        _ => return Err(io::ErrorKind::InvalidData.into()),
    };
    Ok(done.unwrap_or((FULL, Vec::new())))
}

/// The side of the other ranks.
pub(crate) struct RemoteStore {
    terms: Terms,
    endpoints: Vec<Endpoint>,
    identity: Identity,
    idle: Idle,
}

impl RemoteStore {
    /// Creates a client, which connects when it is used first.
    pub(crate) fn new(terms: Terms, endpoints: Vec<Endpoint>, identity: Identity) -> Self {
        RemoteStore { terms, endpoints, identity, idle: Idle::default() }
    }

    fn request(
        &self,
        operation: u8,
        key: &str,
        value: &[u8],
        deadline: &Deadline,
    ) -> Result<(u8, Vec<u8>), RendezvousError> {
        check_lengths(key, value)?;
        let head =
            RequestHead { operation, key_bytes: (key.len() as u16).into(), value_bytes: (value.len() as u32).into() };
        let request = [head.as_bytes(), key.as_bytes(), value].concat();
        let reply = self.idle.request(
            deadline,
            || self.connect(deadline),
            |connection, end| exchange(connection, &request, end),
        )?;
        let waited = deadline.waited();
        reply.map_err(|_| match operation {
            GET => RendezvousError::KeyMissing { key: key.to_owned(), waited },
            _ => RendezvousError::NoOutcome { waited },
        })
    }

    fn connect(&self, deadline: &Deadline) -> Result<Connection, RendezvousError> {
        let found = search(&self.terms, &self.endpoints, self.identity, deadline);
        found.map(|(_, connection)| connection).map_err(|error| error.after(deadline.waited()))
    }
}

/// Sends a request and reads the reply.
fn exchange(connection: &mut Connection, request: &[u8], end: Instant) -> io::Result<(u8, Vec<u8>)> {
    write_until(connection, request, end)?;
    let mut head = ReplyHead::new_zeroed();
    read_until(connection, head.as_mut_bytes(), end)?;
    let bytes = head.value_bytes.get() as usize;
    if bytes > VALUE_BYTES_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut value = vec![0; bytes];
    read_until(connection, &mut value, end)?;
    Ok((head.status, value))
}

impl Store for RemoteStore {
    fn set(&self, key: &str, value: &[u8], deadline: &Deadline) -> Result<(), RendezvousError> {
        match self.request(SET, key, value, deadline)? {
            (PRESENT, _) => Ok(()),
            _ => Err(RendezvousError::StoreFull { bytes_max: STORE_BYTES_MAX }),
        }
    }

    fn get(&self, key: &str, deadline: &Deadline) -> Result<Option<Vec<u8>>, RendezvousError> {
        let (status, value) = self.request(GET, key, &[], deadline)?;
        Ok((status == PRESENT).then_some(value))
    }
}
