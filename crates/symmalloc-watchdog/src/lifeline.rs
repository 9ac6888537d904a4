//! An [`Endpoint`] over the connections through which the processes of a job met, and which stay open.
//!
//! Nothing here blocks. A caller polls the descriptors of all its lifelines and calls [`turn`](Lifeline::turn) on each. As for the
//! endpoint, the caller supplies the time.
//!
//! # Bounds
//! No process can delay news of the others, and none can exhaust the memory of this one:
//!
//! | item | bound | if exceeded |
//! |---|---|---|
//! | bytes from one process in a turn | [`PEER_BYTES`] | the rest is read in the next turn |
//! | bytes from all processes in a turn | [`TURN_BYTES`] | the next turn starts with the next process |
//! | answers in a turn | [`ANSWERS_MAX`], [`ANSWER_BYTES`] | the rest is sent in the next turn, which [is due](Lifeline::is_due) |
//! | a message | 4 MiB to the hub, 64 MiB from it | the sender counts as gone |
//! | ranks of one process | 4,096 | its process counts as gone |
//! | bytes pending for one process | [`OUTBOX_BYTES_MAX`] | its process counts as gone |
//!
//! The end of a connection is therefore noticed within `1 + connections / 16` turns, regardless of the amount of data that other processes
//! send. A message has at least 25 bytes, so a turn receives at most about 5,000 messages.

use crate::connection::Connection;
use crate::endpoint::{Endpoint, HUB};
use crate::ids::ProcessId;
use crate::message::{Departure, LINE_BYTES_FROM_HUB_MAX, LINE_BYTES_TO_HUB_MAX, Message};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::AsFd;
use std::io::{self, ErrorKind, Read, Write};
use std::time::Duration;
use symmalloc_files::KeptFromChildren;

/// Bytes that a turn reads from one process: more than all beats between two turns, yet few enough to read from many processes in a turn.
/// The system buffers the rest, which the next poll reports.
const PEER_BYTES: usize = 8 << 10;

/// Bytes that a turn reads in total: some milliseconds of work, even if each message is a question about a communicator of 1,000 ranks.
const TURN_BYTES: usize = 16 * PEER_BYTES;

/// Maximum number of answers that a turn sends. All ranks of a job may ask at the same time.
const ANSWERS_MAX: usize = 64;

/// Bytes after which a turn sends no further answer. An answer has about 200 bytes per rank, and more where ranks failed.
const ANSWER_BYTES: usize = 1 << 20;

/// Bytes that may be pending for a process, in addition to those that the system buffers. A stopped process reads nothing and may resume
/// later. It must then receive the news about other processes, which is far smaller than this bound. Beats do not accumulate.
const OUTBOX_BYTES_MAX: usize = 8 << 20;

/// Time between two turns for each connection: about ten times what a turn takes for it.
const PAUSE_PER_LINK: Duration = Duration::from_micros(10);

/// Number of connections from which turns are paced, and up to which their pause grows.
const PACED_LINKS_MIN: u32 = 64;
const PACED_LINKS_MAX: u32 = 2048;

/// This process's end of the connections between the processes of a job.
#[derive(Debug)]
pub struct Lifeline {
    endpoint: Endpoint,
    /// Number of processes of the job.
    processes: u32,
    /// The connections, in ascending order of processes.
    links: Vec<Link>,
    /// Index of the link that the next turn reads first.
    next: usize,
    /// `true` if the last turn left bytes that had arrived.
    is_behind: bool,
    /// Length limit of a received message.
    line_bytes_max: usize,
    /// Ends of connections since the last [`take_departures`](Lifeline::take_departures).
    departures: Vec<(ProcessId, Departure)>,
}

#[derive(Debug)]
struct Link {
    process: ProcessId,
    /// Otherwise a child that outlives this process would hide its end from the others. Dropped before the connection.
    _kept: KeptFromChildren,
    connection: Connection,
    /// The beginning of an incomplete message; contains no newline.
    inbox: Vec<u8>,
    outbox: Vec<u8>,
    /// The error of a write. The connection then accepts nothing more, but may still contain messages.
    write_error: Option<Departure>,
}

impl Lifeline {
    /// Creates the lifeline of process `own` in a job of `processes` processes. Process 0 passes one connection for each other process that
    /// it met; any other process passes its connection to process 0.
    ///
    /// # Errors
    /// Returns an error if a connection cannot be set up.
    pub fn new(
        own: ProcessId,
        processes: u32,
        connections: Vec<(ProcessId, Connection)>,
        now: Duration,
    ) -> io::Result<Self> {
        let mut links = Vec::with_capacity(connections.len());
        for (process, connection) in connections {
            connection.set_prompt()?;
            let _kept = KeptFromChildren::new(connection.as_fd());
            links.push(Link { process, _kept, connection, inbox: Vec::new(), outbox: Vec::new(), write_error: None });
        }
        links.sort_by_key(|link: &Link| link.process);
        let line_bytes_max = if own == HUB { LINE_BYTES_TO_HUB_MAX } else { LINE_BYTES_FROM_HUB_MAX };
        let endpoint = Endpoint::new(own, processes, now);
        Ok(Lifeline { endpoint, processes, links, next: 0, is_behind: false, line_bytes_max, departures: Vec::new() })
    }

    /// Returns the endpoint of this process.
    pub fn endpoint(&mut self) -> &mut Endpoint {
        &mut self.endpoint
    }

    /// Returns the number of processes of the job.
    pub fn processes(&self) -> u32 {
        self.processes
    }

    /// Takes the ends of connections since the last call.
    pub fn take_departures(&mut self) -> Vec<(ProcessId, Departure)> {
        std::mem::take(&mut self.departures)
    }

    /// Returns the descriptors to poll. A turn is due when one of them is ready, and at least four times a second.
    pub fn descriptors(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.links.iter().map(|link| {
            let wanted = if link.outbox.is_empty() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
            PollFd::new(&link.connection, wanted)
        })
    }

    /// Returns `true` if the last turn left work, so that the next one is due immediately.
    pub fn is_due(&self) -> bool {
        self.is_behind || self.endpoint.has_questions()
    }

    /// Returns the time to wait between a message and the next turn. With many processes, a turn then receives many messages, because each
    /// turn takes time for every process.
    pub fn pause(&self) -> Duration {
        match self.links.len() as u32 {
            _ if self.is_due() => Duration::ZERO,
            0..PACED_LINKS_MIN => Duration::ZERO,
            links => PAUSE_PER_LINK * links.min(PACED_LINKS_MAX),
        }
    }

    /// Receives messages, advances the time, and sends what is due. Never blocks.
    pub fn turn(&mut self, now: Duration) {
        let lost = self.receive(now);
        self.drop_links(lost, now);
        self.endpoint.tick(now);
        self.send(now);
        self.answer(now);
    }

    /// Receives messages within the bounds of a turn. Returns the processes whose connections ended.
    fn receive(&mut self, now: Duration) -> Vec<(ProcessId, Departure)> {
        let mut lost = Vec::new();
        let (mut chunk, mut left) = ([0; PEER_BYTES], TURN_BYTES);
        let ready = self.ready();
        self.is_behind = false;
        for _ in 0..self.links.len() {
            if left < PEER_BYTES {
                self.is_behind = true;
                break;
            }
            let at = self.next % self.links.len();
            self.next = at + 1;
            if !ready[at] {
                continue;
            }
            let link = &mut self.links[at];
            let (bytes, end) = link.read(&mut chunk);
            left -= bytes;
            let endpoint = &mut self.endpoint;
            let process = link.process;
            let heard = link.take_messages(self.line_bytes_max, |message| endpoint.receive(process, message, now));
            if let Some(departure) = heard.err().or(end) {
                lost.push((process, departure));
            }
        }
        lost
    }

    /// Returns, for each link, whether it has something to read. One system call for all of them costs less than one for each: of a thousand
    /// processes, few have sent something since the last turn.
    fn ready(&self) -> Vec<bool> {
        let mut polled: Vec<PollFd<'_>> =
            self.links.iter().map(|link| PollFd::new(&link.connection, PollFlags::IN)).collect();
        match poll(&mut polled, Some(&Timespec::default())) {
            Ok(_) => polled.iter().map(|it| !it.revents().is_empty()).collect(),
            Err(_) => vec![true; self.links.len()],
        }
    }

    /// Sends pending messages. Drops processes for which too much is pending, and sends the news of it to the others as well. Returns the
    /// number of bytes queued.
    fn send(&mut self, now: Duration) -> usize {
        let mut queued = 0;
        loop {
            for (process, message) in self.endpoint.take_outbox() {
                if let Ok(at) = self.links.binary_search_by_key(&process, |link| link.process) {
                    queued += self.links[at].queue(&message);
                }
            }
            let ends = self.links.iter_mut().filter_map(|link| Some((link.process, link.flush()?)));
            let lost: Vec<_> = ends.collect();
            if lost.is_empty() {
                return queued;
            }
            self.drop_links(lost, now);
        }
    }

    /// Answers questions within the bounds of a turn.
    fn answer(&mut self, now: Duration) {
        let mut bytes = 0;
        for _ in 0..ANSWERS_MAX {
            if bytes > ANSWER_BYTES || !self.endpoint.answer(now) {
                break;
            }
            bytes += self.send(now);
        }
    }

    fn drop_links(&mut self, lost: Vec<(ProcessId, Departure)>, now: Duration) {
        for (process, departure) in lost {
            self.links.retain(|link| link.process != process);
            self.endpoint.lose(process, &departure, now);
            self.departures.push((process, departure));
        }
    }
}

impl Link {
    /// Reads once. Returns the number of bytes, and the departure if the connection ended.
    fn read(&mut self, chunk: &mut [u8]) -> (usize, Option<Departure>) {
        loop {
            match self.connection.read(chunk) {
                Ok(0) => return (0, Some(self.write_error.take().unwrap_or(Departure::Closed))),
                Ok(count) => {
                    self.inbox.extend_from_slice(&chunk[..count]);
                    return (count, None);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return (0, None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return (0, Some(departure(&error))),
            }
        }
    }

    /// Passes the complete messages of the inbox to `pass_on`. Stops at the first malformed one.
    fn take_messages(
        &mut self,
        line_bytes_max: usize,
        mut pass_on: impl FnMut(Message) -> Result<(), Departure>,
    ) -> Result<(), Departure> {
        let mut begin = 0;
        // Only the bytes of the last read can contain newlines.
        let mut searched = self.inbox.len().saturating_sub(PEER_BYTES);
        while let Some(length) = self.inbox[searched..].iter().position(|byte| *byte == b'\n') {
            let end = searched + length;
            // The parser's own error text is not used, because it quotes the message.
            let malformed = |error: serde_json::Error| Departure::Broken {
                error: format!("it does not follow the protocol: malformed message at byte {}", error.column()),
            };
            let message = serde_json::from_slice(&self.inbox[begin..end]).map_err(malformed)?;
            pass_on(message)?;
            begin = end + 1;
            searched = begin;
        }
        self.inbox.drain(..begin);
        if self.inbox.len() > line_bytes_max {
            return Err(Departure::Broken { error: format!("it sent a message of more than {line_bytes_max} bytes") });
        }
        Ok(())
    }

    /// Queues a message. Returns its length in bytes, or 0 if it is a beat and other messages are pending.
    fn queue(&mut self, message: &Message) -> usize {
        if matches!(message, Message::Beat { .. }) && !self.outbox.is_empty() {
            return 0;
        }
        let before = self.outbox.len();
        serde_json::to_writer(&mut self.outbox, message).expect("a message contains only strings and numbers");
        self.outbox.push(b'\n');
        self.outbox.len() - before
    }

    /// Writes as much as the connection accepts. Returns the departure if too much is pending.
    ///
    /// After an error, discards the outbox and ends the connection. The process may have left in its last messages, so only
    /// [`read`](Self::read) reports the end, after these.
    fn flush(&mut self) -> Option<Departure> {
        let mut sent = 0;
        while sent < self.outbox.len() {
            match self.connection.write(&self.outbox[sent..]) {
                Ok(0) => {
                    self.connection.shut_down();
                    sent = self.outbox.len();
                }
                Ok(count) => sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    self.write_error.get_or_insert_with(|| departure(&error));
                    self.connection.shut_down();
                    sent = self.outbox.len();
                }
            }
        }
        self.outbox.drain(..sent);
        let unsent = self.outbox.len();
        (unsent > OUTBOX_BYTES_MAX).then_some(Departure::Stalled { unsent_bytes: unsent as u64 })
    }
}

/// Translates an I/O error. The system closes the sockets of a process that died, and reports it as one of these errors.
fn departure(error: &io::Error) -> Departure {
    match error.kind() {
        ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted | ErrorKind::BrokenPipe => Departure::Closed,
        _ => Departure::Broken { error: error.to_string() },
    }
}
