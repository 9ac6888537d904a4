//! An [`Endpoint`] over TCP: the connections on which the processes of a job met stay open.
//!
//! Nothing here waits: a caller polls the descriptors of all its lifelines, and gives each its turn. A process that is stopped takes
//! nothing in; what it is owed waits here, and beats are not added to it. Times are the caller's, as for the endpoint.

use crate::endpoint::Endpoint;
use crate::ids::ProcessId;
use crate::message::{Departure, LINE_BYTES_MAX, Message};
use rustix::event::{PollFd, PollFlags};
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// This process's end of the connections between the processes of a job.
#[derive(Debug)]
pub struct Lifeline {
    endpoint: Endpoint,
    links: Vec<Link>,
}

#[derive(Debug)]
struct Link {
    process: ProcessId,
    stream: TcpStream,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
}

impl Lifeline {
    /// Process `own` of so many, with its connections: of process 0 one to each other process that it met, of any other the one to
    /// process 0.
    ///
    /// # Errors
    /// When a connection cannot be set up.
    pub fn new(
        own: ProcessId,
        processes: u32,
        connections: Vec<(ProcessId, TcpStream)>,
        now: Duration,
    ) -> io::Result<Self> {
        let mut links = Vec::with_capacity(connections.len());
        for (process, stream) in connections {
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
            links.push(Link { process, stream, inbox: Vec::new(), outbox: Vec::new() });
        }
        Ok(Lifeline { endpoint: Endpoint::new(own, processes, now), links })
    }

    /// What this process says and hears.
    pub fn endpoint(&mut self) -> &mut Endpoint {
        &mut self.endpoint
    }

    /// What to poll for. A turn is due when one of them is ready, and four times a second.
    pub fn descriptors(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.links.iter().map(|link| {
            let wanted = if link.outbox.is_empty() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
            PollFd::new(&link.stream, wanted)
        })
    }

    /// Takes in what came, lets time pass, and sends what is due. Never waits.
    pub fn turn(&mut self, now: Duration) {
        let mut lost = Vec::new();
        for link in &mut self.links {
            let (messages, end) = link.receive();
            for message in messages {
                self.endpoint.receive(link.process, message, now);
            }
            if let Some(departure) = end {
                lost.push((link.process, departure));
            }
        }
        self.drop_links(lost, now);
        self.endpoint.tick(now);
        self.send(now);
    }

    /// Sends what is due. Never waits.
    fn send(&mut self, now: Duration) {
        for (process, message) in self.endpoint.take_outbox() {
            if let Some(link) = self.links.iter_mut().find(|link| link.process == process) {
                link.queue(&message);
            }
        }
        let ends = self.links.iter_mut().filter_map(|link| Some((link.process, link.flush()?)));
        let lost: Vec<_> = ends.collect();
        self.drop_links(lost, now);
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
    /// The whole messages that came, and how the connection ended, if it did.
    fn receive(&mut self) -> (Vec<Message>, Option<Departure>) {
        let mut end = None;
        let mut chunk = [0; 4096];
        loop {
            match self.stream.read(&mut chunk) {
                Ok(0) => end = Some(Departure::Closed),
                Ok(count) => {
                    self.inbox.extend_from_slice(&chunk[..count]);
                    if self.inbox.len() <= LINE_BYTES_MAX {
                        continue;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => end = Some(departure(&error)),
            }
            break;
        }
        let mut messages = Vec::new();
        while let Some(length) = self.inbox.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.inbox.drain(..=length).collect();
            match serde_json::from_slice(&line) {
                Ok(message) => messages.push(message),
                Err(error) => {
                    end.get_or_insert(Departure::Broken { error: format!("it does not speak our language: {error}") });
                }
            }
        }
        if self.inbox.len() > LINE_BYTES_MAX {
            end.get_or_insert(Departure::Broken { error: "a message without an end".to_owned() });
        }
        (messages, end)
    }

    fn queue(&mut self, message: &Message) {
        if matches!(message, Message::Beat { .. }) && !self.outbox.is_empty() {
            return;
        }
        self.outbox.extend(serde_json::to_vec(message).expect("strings and numbers alone"));
        self.outbox.push(b'\n');
    }

    /// Sends what fits. How the connection ended, if it did.
    fn flush(&mut self) -> Option<Departure> {
        while !self.outbox.is_empty() {
            match self.stream.write(&self.outbox) {
                Ok(0) => return Some(Departure::Closed),
                Ok(count) => drop(self.outbox.drain(..count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Some(departure(&error)),
            }
        }
        None
    }
}

/// The system closes the sockets of a process that died, and says so in one of these ways.
fn departure(error: &io::Error) -> Departure {
    match error.kind() {
        ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted | ErrorKind::BrokenPipe => Departure::Closed,
        _ => Departure::Broken { error: error.to_string() },
    }
}
