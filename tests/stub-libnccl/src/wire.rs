//! Ranks in other processes: lines of JSON over a socket to the process that holds the job.
//!
//! ```text
//!  process A: made the unique id                   process B
//!  registry ◄── reader thread ◄── Join, Message ── join, send
//!           ──► link ─────────────── ToRank ─────► reader thread ──► communicator
//! ```
//!
//! The socket is a Unix socket, or a TCP socket at the address in `STUB_NCCL_SOCKET_IP`. The data of collectives does not pass through it: A
//! maps B's memory file. The end of a socket indicates the end of the process behind it.

use crate::data::Base;
use crate::member;
use crate::messages::{Join, ToJob, ToRank};
use crate::registry::{self, Link};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Time after which a process whose job does not listen gives up.
const CONNECT_MAX: Duration = Duration::from_secs(120);

/// A message from a process with ranks to the process with the job.
#[derive(Debug, Serialize, Deserialize)]
enum Up {
    Join(Join),
    Message { job: u64, rank: usize, message: ToJob },
}

/// A message from the process with the job to a process with ranks.
#[derive(Debug, Serialize, Deserialize)]
struct Down {
    member: u64,
    message: ToRank,
}

/// One end of a socket.
#[derive(Debug)]
pub struct Connection {
    stream: Mutex<File>,
}

/// Sockets to processes with jobs, by name; the number of sockets from other processes; and the names under which this process listens.
static CONNECTIONS: Mutex<BTreeMap<String, Arc<Connection>>> = Mutex::new(BTreeMap::new());
static ACCEPTED: AtomicU64 = AtomicU64::new(0);
static LISTENING: Mutex<Vec<String>> = Mutex::new(Vec::new());
/// Addresses of the mapped memory files of other processes.
static MAPPED: Mutex<BTreeMap<u32, Base>> = Mutex::new(BTreeMap::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn address(name: &str) -> SocketAddr {
    SocketAddr::from_abstract_name(name).expect("a short name")
}

/// Returns the number of sockets to other processes.
pub fn sockets() -> u64 {
    lock(&CONNECTIONS).len() as u64 + ACCEPTED.load(Ordering::Relaxed)
}

impl Connection {
    fn send(&self, message: &impl Serialize) {
        let line = serde_json::to_string(message).expect("plain data") + "\n";
        // The reader of a socket detects its end.
        let _sent = lock(&self.stream).write_all(line.as_bytes());
    }

    /// Sends a message to a rank of the other process.
    pub fn tell_rank(&self, member: u64, message: ToRank) {
        self.send(&Down { member, message });
    }

    /// Sends a message to a job of the other process.
    pub fn send_to_job(&self, job: u64, rank: usize, message: ToJob) {
        self.send(&Up::Message { job, rank, message });
    }
}

/// Calls `act` with each message until the socket ends.
fn read<T: for<'a> Deserialize<'a>>(stream: File, mut act: impl FnMut(T)) {
    for line in BufReader::new(stream).lines() {
        let Ok(message) = line.as_deref().map(serde_json::from_str::<T>) else { return };
        act(message.expect("the same stub on both sides"));
    }
}

/// Accepts ranks of other processes under a name.
pub fn listen(name: &str) {
    let mut listening = lock(&LISTENING);
    if listening.iter().any(|known| known == name) {
        return;
    }
    let listener = UnixListener::bind_addr(&address(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    listening.push(name.to_owned());
    std::thread::spawn(move || {
        listener.incoming().flatten().for_each(|stream| accept(File::from(OwnedFd::from(stream))));
    });
}

/// Accepts ranks of other processes at this address, on a port that the system chooses. Returns the port.
pub fn listen_on_network(ip: IpAddr) -> u16 {
    static PORT: OnceLock<u16> = OnceLock::new();
    *PORT.get_or_init(|| {
        let listener = TcpListener::bind((ip, 0)).unwrap_or_else(|error| panic!("{ip}: {error}"));
        let port = listener.local_addr().expect("the socket should be bound").port();
        std::thread::spawn(move || listener.incoming().flatten().for_each(|stream| accept(of_tcp(stream))));
        port
    })
}

fn of_tcp(stream: TcpStream) -> File {
    stream.set_nodelay(true).expect("the socket should accept the setting");
    File::from(OwnedFd::from(stream))
}

fn accept(stream: File) {
    ACCEPTED.fetch_add(1, Ordering::Relaxed);
    let reader = stream.try_clone().expect("a descriptor");
    let connection = Arc::new(Connection { stream: Mutex::new(stream) });
    std::thread::spawn(move || {
        read(reader, |message| match message {
            Up::Join(join) => {
                let member = join.member;
                let base = map(join.process, join.file);
                registry::join(join, Link::Remote { connection: Arc::clone(&connection), member }, base);
            }
            Up::Message { job, rank, message } => registry::send_to_job(job, rank, message),
        });
        registry::lose(&connection);
        ACCEPTED.fetch_sub(1, Ordering::Relaxed);
    });
}

/// Joins a job of another process, once that process listens.
pub fn join(name: String, join: Join) {
    let known_connection = lock(&CONNECTIONS).contains_key(&name);
    let join = move || {
        let known = lock(&CONNECTIONS).get(&name).cloned();
        known.unwrap_or_else(|| connect(&name)).send(&Up::Join(join));
    };
    // A test may refuse threads once the processes are connected.
    if known_connection {
        join();
    } else {
        std::thread::spawn(join);
    }
}

fn connect(name: &str) -> Arc<Connection> {
    let mut connections = lock(&CONNECTIONS);
    if let Some(known) = connections.get(name) {
        return Arc::clone(known);
    }
    let begun = Instant::now();
    let open = || match name.parse::<std::net::SocketAddr>() {
        Ok(address) => TcpStream::connect(address).map(of_tcp),
        Err(_) => UnixStream::connect_addr(&address(name)).map(|stream| File::from(OwnedFd::from(stream))),
    };
    let stream = loop {
        match open() {
            Ok(stream) => break stream,
            Err(error) => assert!(begun.elapsed() < CONNECT_MAX, "the job {name} does not listen: {error}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let reader = stream.try_clone().expect("a descriptor");
    let connection = Arc::new(Connection { stream: Mutex::new(stream) });
    connections.insert(name.to_owned(), Arc::clone(&connection));
    let (name, ours) = (name.to_owned(), Arc::clone(&connection));
    std::thread::spawn(move || {
        read(reader, |Down { member, message }| member::deliver(member, &message, Some(&ours)));
        lock(&CONNECTIONS).remove(&name);
        member::lose(&ours);
    });
    connection
}

/// Maps another process's memory file, once per process.
fn map(process: u32, file: i32) -> Base {
    if process == std::process::id() {
        return crate::cuda::memory_file().1;
    }
    *lock(&MAPPED).entry(process).or_insert_with(|| {
        let path = format!("/proc/{process}/fd/{file}");
        let file = File::options().read(true).write(true).open(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        let bytes = file.metadata().expect("the file should be accessible").len() as usize;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        // SAFETY: maps a file at new addresses.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, file.as_raw_fd(), 0) };
        assert!(base != libc::MAP_FAILED, "addresses for {path}");
        base as Base
    })
}
