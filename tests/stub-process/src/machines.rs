//! Two machines, each a network namespace of Linux, and a proxy between them that delays, limits and cuts.
//!
//! ```text
//!  machine 0                                  this process                               machine 1
//!   10.213.77.1, fd77::1 ── link0 (TUN) ── packets ─► delay, limit, cut ─► packets ── link0 (TUN) ── 10.213.77.2, fd77::2
//!   10.213.78.1 ── an address that machine 1 cannot reach
//! ```
//!
//! A cut loses packets without an answer, as a network does: connections do not end, and neither side learns that its packets are lost. No
//! packet leaves the two namespaces, which end with this value and with their processes: they have no names.

use std::collections::VecDeque;
use std::ffi::c_char;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The addresses of the machines on the link.
pub const ADDRESSES: [&str; 2] = ["10.213.77.1", "10.213.77.2"];

/// Interval at which the proxy looks whether it is over.
const CHECK: Duration = Duration::from_millis(20);
/// The kernel's maximum, with room for the longest packet of any link.
const PACKET_BYTES_MAX: usize = 1 << 16;
/// Maximum number of bytes that wait in one direction. Further packets are lost, as in a router.
const QUEUE_BYTES_MAX: usize = 4 << 20;

/// The quality of the link in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quality {
    /// Time that each packet takes.
    pub delay: Duration,
    /// Bytes per second; `None` is unlimited.
    pub bytes_per_second: Option<u64>,
    /// `true` if all packets are lost.
    pub is_cut: bool,
}

/// Two machines with a link.
#[derive(Debug)]
pub struct Machines {
    namespaces: [File; 2],
    /// The link from machine 0, and that from machine 1.
    link: Arc<[Mutex<Quality>; 2]>,
    is_over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Machines {
    /// Creates the machines. Prints the reason and returns `None` if this process may not.
    pub fn new() -> Option<Self> {
        let skipped =
            |reason: io::Error| println!("skipped: only root can create network namespaces and TUN devices: {reason}");
        Self::create().map_err(skipped).ok()
    }

    fn create() -> io::Result<Self> {
        let [(first, a), (second, b)] = [end_of_link()?, end_of_link()?];
        let (link, is_over) = (Arc::<[Mutex<Quality>; 2]>::default(), Arc::<AtomicBool>::default());
        let directions = [(a.try_clone()?, b.try_clone()?, 0), (b, a, 1)];
        let threads = directions.map(|(from, to, direction)| {
            let (link, is_over) = (Arc::clone(&link), Arc::clone(&is_over));
            thread::spawn(move || forward(from, to, &link[direction], &is_over))
        });
        let machines = Machines { namespaces: [first, second], link, is_over, threads: threads.into() };
        for (machine, address) in ADDRESSES.iter().enumerate() {
            for command in
                [format!("addr add {address}/24 dev link0"), "link set lo up".into(), "link set link0 up".into()]
            {
                machines.ip(machine, &command)?;
            }
            // A machine may have no IPv6.
            let _added = machines.ip(machine, &format!("addr add fd77::{}/64 dev link0 nodad", machine + 1));
        }
        machines.ip(0, "addr add 10.213.78.1/32 dev lo")?;
        Ok(machines)
    }

    fn ip(&self, machine: usize, arguments: &str) -> io::Result<()> {
        let mut command = Command::new("ip");
        self.enter(machine, command.args(arguments.split_whitespace()).stderr(Stdio::null()));
        if command.status()?.success() { Ok(()) } else { Err(io::Error::other(format!("`ip {arguments}` fails"))) }
    }

    /// Makes a command run on a machine.
    pub fn enter(&self, machine: usize, command: &mut Command) {
        let namespace = self.namespaces[machine].as_raw_fd();
        // SAFETY: between fork and exec, makes one system call, which uses neither memory nor locks.
        unsafe { command.pre_exec(move || join(namespace)) };
    }

    /// Changes the quality of the link in both directions.
    pub fn set(&self, quality: Quality) {
        self.link.iter().for_each(|direction| *lock(direction) = quality);
    }

    /// Changes the quality of the link from a machine to the other one.
    pub fn set_from(&self, machine: usize, quality: Quality) {
        *lock(&self.link[machine]) = quality;
    }

    /// Loses all packets in both directions from now on.
    pub fn cut(&self) {
        self.set(Quality { is_cut: true, ..Quality::default() });
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| thread.join().expect("the thread should not panic"));
    }
}

/// Moves the calling thread to a namespace.
fn join(namespace: RawFd) -> io::Result<()> {
    // SAFETY: the call changes only the calling thread.
    match unsafe { libc::setns(namespace, libc::CLONE_NEWNET) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Creates a namespace with an end of the link. Reads and writes of the second file are packets, and do not block.
fn end_of_link() -> io::Result<(File, File)> {
    let create = || {
        // SAFETY: the call changes only the calling thread.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let device = File::options().read(true).write(true).open("/dev/net/tun")?;
        // SAFETY: all bits of the structure may be zero.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(b"link0") {
            *to = *from as c_char;
        }
        request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as i16;
        // SAFETY: the file is a TUN device, and the structure is valid during the call.
        let created = unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
        // SAFETY: changes a flag of a descriptor that this function owns.
        if created != 0 || unsafe { libc::fcntl(device.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok((File::open("/proc/thread-self/ns/net")?, device))
    };
    // The thread stays in the namespace, and ends.
    thread::scope(|scope| scope.spawn(create).join().expect("the thread should not panic"))
}

/// Forwards packets of one direction.
fn forward(mut from: File, mut to: File, quality: &Mutex<Quality>, is_over: &AtomicBool) {
    let mut bytes = vec![0; PACKET_BYTES_MAX];
    let mut waiting: VecDeque<(Instant, Vec<u8>)> = VecDeque::new();
    let (mut waiting_bytes, mut free_at) = (0, Instant::now());
    while !is_over.load(Ordering::Relaxed) {
        let now = Instant::now();
        while let Some((due, packet)) = waiting.pop_front() {
            if due > now {
                waiting.push_front((due, packet));
                break;
            }
            waiting_bytes -= packet.len();
            if !lock(quality).is_cut {
                // The interface may be full or down.
                let _sent = to.write(&packet);
            }
        }
        let limit = waiting.front().map_or(CHECK, |(due, _)| due.saturating_duration_since(now).min(CHECK));
        match from.read(&mut bytes) {
            Ok(count) => {
                let Quality { delay, bytes_per_second, is_cut } = *lock(quality);
                if is_cut || waiting_bytes + count > QUEUE_BYTES_MAX {
                    continue;
                }
                let sending = bytes_per_second
                    .map_or(Duration::ZERO, |rate| Duration::from_nanos(count as u64 * 1_000_000_000 / rate.max(1)));
                free_at = free_at.max(now) + sending;
                // A shorter delay does not reorder packets.
                let due = (free_at + delay).max(waiting.back().map_or(now, |(due, _)| *due));
                waiting_bytes += count;
                waiting.push_back((due, bytes[..count].to_vec()));
            }
            Err(_) => await_packet(&from, limit),
        }
    }
}

/// Waits until a packet can be read, or a time limit.
fn await_packet(file: &File, limit: Duration) {
    let mut polled = libc::pollfd { fd: file.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let limit = libc::timespec { tv_sec: 0, tv_nsec: i64::from(limit.subsec_nanos()) };
    // SAFETY: the structures are valid during the call.
    unsafe { libc::ppoll(&raw mut polled, 1, &raw const limit, std::ptr::null()) };
}
