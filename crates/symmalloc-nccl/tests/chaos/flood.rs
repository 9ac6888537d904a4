//! A flood of connections to the sockets on which ranks listen: garbage, connections that stay silent, and connections that close at once.

use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;
use symmalloc_sim::SplitMix64;

/// Number of connections that are open at once.
const OPEN_MAX: usize = 200;
/// Number of connections between two looks for new sockets.
const BURST: usize = 20;

/// A socket on which a rank listens.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Target {
    Network(SocketAddrV4),
    /// The name in the abstract namespace.
    Machine(String),
}

/// The connections of a flood, and their number so far.
pub(crate) struct Flood {
    random: SplitMix64,
    open: VecDeque<OwnedFd>,
    reached: BTreeSet<Target>,
    connections: u64,
}

impl Flood {
    pub(crate) fn new(seed: u64) -> Self {
        Flood { random: SplitMix64::new(seed), open: VecDeque::new(), reached: BTreeSet::new(), connections: 0 }
    }

    /// Connects to all sockets of these processes several times.
    pub(crate) fn rush(&mut self, processes: &[i32]) {
        for target in targets(processes) {
            for _ in 0..BURST {
                self.connect(&target);
            }
        }
    }

    fn connect(&mut self, target: &Target) {
        let socket: OwnedFd = match target {
            Target::Network(address) => {
                let Ok(stream) = TcpStream::connect_timeout(&(*address).into(), Duration::from_millis(50)) else {
                    return;
                };
                stream.set_nonblocking(true).expect("a socket");
                stream.into()
            }
            Target::Machine(name) => {
                let Some(socket) = connect_to(name) else { return };
                socket
            }
        };
        self.connections += 1;
        self.reached.insert(target.clone());
        match self.random.below(4) {
            0 => return,
            1 => self.open.push_back(socket),
            _ => {
                let garbage: Vec<u8> = (0..1 + self.random.below(300)).map(|_| self.random.next_u64() as u8).collect();
                let mut file = fs::File::from(socket);
                // The rank may have closed the connection.
                let _written = file.write(&garbage);
                self.open.push_back(file.into());
            }
        }
        if self.open.len() > OPEN_MAX {
            self.open.pop_front();
        }
    }

    /// Returns the number of connections, and of sockets that accepted one.
    pub(crate) fn counts(&self) -> (u64, usize) {
        (self.connections, self.reached.len())
    }
}

/// Connects to a socket in the abstract namespace. Returns `None` if it does not accept the connection at once: the standard library would
/// wait while its queue is full.
fn connect_to(name: &str) -> Option<OwnedFd> {
    // SAFETY: an address of zeros is valid.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    // The first byte is zero: the name is not a path.
    for (to, byte) in address.sun_path[1..].iter_mut().zip(name.bytes()) {
        *to = byte as libc::c_char;
    }
    let len = (size_of::<libc::sa_family_t>() + 1 + name.len()) as libc::socklen_t;
    // SAFETY: the descriptor is new, and the address is valid for this length.
    unsafe {
        let socket = libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC, 0);
        assert!(socket >= 0, "a socket is created");
        let socket = OwnedFd::from_raw_fd(socket);
        (libc::connect(socket.as_raw_fd(), (&raw const address).cast(), len) == 0).then_some(socket)
    }
}

/// Returns the sockets of symmalloc on which these processes listen. Those of the stub of libnccl stand for a library that is not under test.
fn targets(processes: &[i32]) -> BTreeSet<Target> {
    let inodes: BTreeSet<String> = processes.iter().flat_map(|process| sockets_of(*process)).collect();
    let mut found = BTreeSet::new();
    for line in fs::read_to_string("/proc/net/tcp").unwrap_or_default().lines().skip(1) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, local, _, "0A", ..] = words[..] else { continue };
        if words.get(9).is_some_and(|inode| inodes.contains(*inode)) {
            let (ip, port) = local.split_once(':').expect("an address and a port");
            let ip = Ipv4Addr::from(u32::from_str_radix(ip, 16).expect("a number").to_le_bytes());
            let port = u16::from_str_radix(port, 16).expect("a number");
            found.insert(Target::Network(SocketAddrV4::new(ip, port)));
        }
    }
    for line in fs::read_to_string("/proc/net/unix").unwrap_or_default().lines().skip(1) {
        let words: Vec<&str> = line.split_whitespace().collect();
        // A socket that listens has this flag.
        let [_, _, _, "00010000", _, _, inode, path] = words[..] else { continue };
        if let Some(name) = path.strip_prefix("@symmalloc")
            && inodes.contains(inode)
        {
            found.insert(Target::Machine(format!("symmalloc{name}")));
        }
    }
    found
}

/// Returns the inodes of the sockets of a process.
fn sockets_of(process: i32) -> Vec<String> {
    let Ok(entries) = fs::read_dir(format!("/proc/{process}/fd")) else { return Vec::new() };
    let links = entries.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    links.filter_map(|link| Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())).collect()
}
