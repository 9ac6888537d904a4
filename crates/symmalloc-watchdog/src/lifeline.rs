//! An [`Endpoint`] over connections: those on which the processes of a job met stay open.
//!
//! Nothing here waits. A caller polls the descriptors of all its lifelines and gives each its turn. Times are the caller's, as
//! for the endpoint.
//!
//! # Bounds
//! No process can keep the others' news from being noticed, and none can make this one run out of memory:
//!
//! | of | bound | beyond it |
//! |---|---|---|
//! | bytes from one process in a turn | [`PEER_BYTES`] | the rest waits for the next turn |
//! | bytes from all processes in a turn | [`TURN_BYTES`] | the next turn begins with the next process |
//! | answers in a turn | [`ANSWERS_MAX`], [`ANSWER_BYTES`] | the rest waits for the next turn, which [is due](Lifeline::is_due) |
//! | a message | 4 MiB to the hub, 64 MiB from it | its process counts as gone |
//! | ranks of one process | 4,096 | its process counts as gone |
//! | bytes that wait for one process | [`OUTBOX_BYTES_MAX`] | its process counts as gone |
//!
//! So the end of a connection is noticed within `1 + connections / 16` turns, however much others send. A message has at least 25 bytes,
//! so a turn takes in about 5,000 of them at most.

use crate::connection::Connection;
use crate::endpoint::{Endpoint, HUB};
use crate::ids::ProcessId;
use crate::message::{Departure, LINE_BYTES_FROM_HUB_MAX, LINE_BYTES_TO_HUB_MAX, Message};
use rustix::event::{PollFd, PollFlags};
use std::io::{self, ErrorKind, Read, Write};
use std::time::Duration;

/// Bytes that a turn takes in from one process: more than all beats between two turns, and little enough to read many processes in a
/// turn. The system keeps the rest, and poll reports it.
const PEER_BYTES: usize = 8 << 10;

/// Bytes that a turn takes in: some milliseconds of work, also if each message is a question about a communicator of 1,000 ranks.
const TURN_BYTES: usize = 16 * PEER_BYTES;

/// Answers of a turn. All ranks of a job may ask at the same time.
const ANSWERS_MAX: usize = 64;

/// Bytes after which a turn gives no further answer. An answer has about 200 bytes per rank, and more where ranks failed.
const ANSWER_BYTES: usize = 1 << 20;

/// Bytes that may wait for a process, on top of what the system keeps. A process that is stopped takes nothing in, and may go on
/// later: what it is owed then is what became of others, which is far less than this. Beats do not accumulate.
const OUTBOX_BYTES_MAX: usize = 8 << 20;

/// This process's end of the connections between the processes of a job.
#[derive(Debug)]
pub struct Lifeline {
    endpoint: Endpoint,
    /// Ascending by process.
    links: Vec<Link>,
    /// Index of the link that the next turn reads first.
    next: usize,
    /// Longest message that comes.
    line_bytes_max: usize,
}

#[derive(Debug)]
struct Link {
    process: ProcessId,
    connection: Connection,
    /// The beginning of a message: it has no line end.
    inbox: Vec<u8>,
    outbox: Vec<u8>,
}

impl Lifeline {
    /// Process `own` of so many, with its connections: of process 0 one to each other process that it met, of any other the one to
    /// process 0.
    ///
    /// # Errors
    /// If a connection cannot be set up.
    pub fn new(
        own: ProcessId,
        processes: u32,
        connections: Vec<(ProcessId, Connection)>,
        now: Duration,
    ) -> io::Result<Self> {
        let mut links = Vec::with_capacity(connections.len());
        for (process, connection) in connections {
            connection.set_prompt()?;
            links.push(Link { process, connection, inbox: Vec::new(), outbox: Vec::new() });
        }
        links.sort_by_key(|link: &Link| link.process);
        let line_bytes_max = if own == HUB { LINE_BYTES_TO_HUB_MAX } else { LINE_BYTES_FROM_HUB_MAX };
        Ok(Lifeline { endpoint: Endpoint::new(own, processes, now), links, next: 0, line_bytes_max })
    }

    /// What this process says and hears.
    pub fn endpoint(&mut self) -> &mut Endpoint {
        &mut self.endpoint
    }

    /// Descriptors to poll. A turn is due when one of them is ready, and four times a second.
    pub fn descriptors(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.links.iter().map(|link| {
            let wanted = if link.outbox.is_empty() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
            PollFd::new(&link.connection, wanted)
        })
    }

    /// Returns `true` if the last turn left something to do: the next one is due at once.
    pub fn is_due(&self) -> bool {
        self.endpoint.has_questions()
    }

    /// Takes in what came, lets time pass, and sends what is due. Never waits.
    pub fn turn(&mut self, now: Duration) {
        let lost = self.receive(now);
        self.drop_links(lost, now);
        self.endpoint.tick(now);
        self.send(now);
        self.answer(now);
    }

    /// Takes in what came, within the bounds of a turn. Returns the processes whose connections ended.
    fn receive(&mut self, now: Duration) -> Vec<(ProcessId, Departure)> {
        let mut lost = Vec::new();
        let (mut chunk, mut left) = ([0; PEER_BYTES], TURN_BYTES);
        for _ in 0..self.links.len() {
            if left < PEER_BYTES {
                break;
            }
            let at = self.next % self.links.len();
            self.next = at + 1;
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

    /// Sends what is due. A connection that ends by that is news for the others, which goes out as well.
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

    /// Answers questions, within the bounds of a turn.
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
            tracing::warn!(name: "peer.gone", target: "symmalloc", process = process.0, %departure);
            self.links.retain(|link| link.process != process);
            self.endpoint.lose(process, &departure, now);
        }
    }
}

impl Link {
    /// Reads once. Returns the number of bytes, and how the connection ended, if it did.
    fn read(&mut self, chunk: &mut [u8]) -> (usize, Option<Departure>) {
        loop {
            match self.connection.read(chunk) {
                Ok(0) => return (0, Some(Departure::Closed)),
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

    /// Passes on the whole messages that came. Stops at the first that is none.
    fn take_messages(
        &mut self,
        line_bytes_max: usize,
        mut pass_on: impl FnMut(Message) -> Result<(), Departure>,
    ) -> Result<(), Departure> {
        let mut begin = 0;
        // Only the last read can have brought line ends.
        let mut searched = self.inbox.len().saturating_sub(PEER_BYTES);
        while let Some(length) = self.inbox[searched..].iter().position(|byte| *byte == b'\n') {
            let end = searched + length;
            // Not the parser's own words, which quote the message.
            let malformed = |error: serde_json::Error| Departure::Broken {
                error: format!("it does not speak our language: malformed message at byte {}", error.column()),
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

    /// Returns the number of bytes that the message has.
    fn queue(&mut self, message: &Message) -> usize {
        if matches!(message, Message::Beat { .. }) && !self.outbox.is_empty() {
            return 0;
        }
        let before = self.outbox.len();
        serde_json::to_writer(&mut self.outbox, message).expect("strings and numbers alone");
        self.outbox.push(b'\n');
        self.outbox.len() - before
    }

    /// Sends what fits. Returns how the connection ended, if it did.
    fn flush(&mut self) -> Option<Departure> {
        let mut sent = 0;
        let end = loop {
            if sent == self.outbox.len() {
                break None;
            }
            match self.connection.write(&self.outbox[sent..]) {
                Ok(0) => break Some(Departure::Closed),
                Ok(count) => sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break None,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => break Some(departure(&error)),
            }
        };
        self.outbox.drain(..sent);
        let unsent = self.outbox.len();
        end.or_else(|| (unsent > OUTBOX_BYTES_MAX).then_some(Departure::Stalled { unsent_bytes: unsent as u64 }))
    }
}

/// The system closes the sockets of a process that died, and reports it in one of these ways.
fn departure(error: &io::Error) -> Departure {
    match error.kind() {
        ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted | ErrorKind::BrokenPipe => Departure::Closed,
        _ => Departure::Broken { error: error.to_string() },
    }
}
