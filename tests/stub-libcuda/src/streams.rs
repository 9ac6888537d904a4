//! Streams as queues, events as positions in them, and captures as lists of ops.
//!
//! ```text
//!  numbers of a stream's work:   1 ... completed ... ran ... due ... submitted
//!                                 a host wait        │ queue ────────────────
//!                                                      ╰ front: waits for another stream, or for a library
//! ```
//!
//! Work is *due* when it is submitted. It takes effect at once, unless earlier work on its stream is blocked: a wait for another stream that
//! is itself blocked, or work of another library that waits for its peers. Work is *complete* once it has taken effect and a host wait
//! covered it, either directly, through another stream, or by sufficiently many polls (`STUB_POLLS`). A query therefore reports "not ready"
//! for as long as possible.
//!
//! With `STUB_LAZY`, work is due only when a host wait or the last of these polls covers it, directly or through another stream. A program
//! that omits a wait then sees old data. Work of another library is due when it is submitted, with all work before it, because its peers
//! may be waiting for it.
//!
//! Copies that involve pageable memory follow the driver's rules. A copy from it reads the memory when it is submitted, and a copy to it
//! waits for the work before it. Inside a graph, both are ordinary copies.

use crate::external::{Notice, PER_THREAD};
use crate::log::{Entry, STREAM_WAIT, WORK};
use crate::model::{Code, State, WAIT};
use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::Arc;
use std::thread::ThreadId;

/// Work that has an effect.
#[derive(Clone, Copy, Debug)]
pub enum Op {
    /// Sets bytes.
    Set {
        /// First byte.
        address: u64,
        /// Value of the bytes.
        value: u8,
        /// Number of bytes.
        count: usize,
    },
    /// Sets words of 4 bytes.
    Set32 {
        /// First byte.
        address: u64,
        /// Value of the words.
        value: u32,
        /// Number of words.
        count: usize,
    },
    /// Copies bytes.
    Copy {
        /// First byte written.
        to: u64,
        /// First byte read.
        from: u64,
        /// Number of bytes.
        count: usize,
    },
    /// Work of another library; see `external.rs`.
    External {
        /// The library's handle of this work.
        template: u64,
    },
}

/// An entry of a queue.
#[derive(Clone, Debug)]
enum Work {
    Set { address: u64, value: u8, count: usize },
    Set32 { address: u64, value: u32, count: usize },
    Copy { to: u64, from: u64, count: usize },
    Write { to: u64, bytes: Arc<[u8]> },
    External { instance: u64, has_arrived: bool },
    Wait { stream: u64, seq: u64 },
    Mark,
}

impl Work {
    /// Returns the entry in the log for work `seq` of a stream, if it has one.
    fn entry(&self, stream: u64, seq: u64) -> Option<Entry> {
        let of = |kind, from, to, count| Some(Entry { kind, stream, seq, from, to, count });
        match *self {
            Work::Set { address, count, .. } => of(WORK, 0, address, count as u64),
            Work::Set32 { address, count, .. } => of(WORK, 0, address, 4 * count as u64),
            Work::Copy { to, from, count } => of(WORK, from, to, count as u64),
            Work::Write { to, ref bytes } => of(WORK, 0, to, bytes.len() as u64),
            Work::Wait { stream: other, seq: last } => of(STREAM_WAIT, other, last, 0),
            Work::External { .. } | Work::Mark => None,
        }
    }
}

/// A stream.
#[derive(Clone, Debug, Default)]
pub struct Stream {
    /// Device of the stream.
    pub device: c_int,
    /// Number of the last submitted work.
    pub submitted: u64,
    /// Number of the last work that has taken effect.
    ran: u64,
    /// Number of the last work that takes effect as soon as nothing blocks it.
    due: u64,
    completed: u64,
    /// Work that has not taken effect, in order: numbers `ran + 1` to `submitted`.
    queue: VecDeque<Work>,
    /// Waits as (number of the wait, stream waited for, number of its work).
    waits: Vec<(u64, u64, u64)>,
    /// Capture that the stream is part of.
    pub capture: Option<u64>,
    /// `true` if the stream was destroyed before its work was done.
    is_gone: bool,
}

impl Stream {
    /// Creates a stream of a device, without work.
    pub fn new(device: c_int) -> Self {
        Self::after(device, 0)
    }

    /// Creates a stream whose work numbers continue after `done`.
    pub fn after(device: c_int, done: u64) -> Self {
        Stream { device, submitted: done, ran: done, due: done, completed: done, ..Stream::default() }
    }
}

/// An event.
#[derive(Clone, Copy, Debug, Default)]
pub struct Event {
    /// `true` if the event was created with timing, which `cuEventElapsedTime` requires.
    pub has_times: bool,
    /// `true` once the event was recorded.
    pub is_recorded: bool,
    /// Stream that the event was recorded on.
    pub stream: u64,
    /// Number of the last work before the event on that stream.
    pub seq: u64,
    /// Capture in which the event was recorded.
    pub capture: Option<u64>,
    /// Number of polls of the event before a wait covered it.
    pub polls: u64,
}

/// An active capture.
#[derive(Debug)]
pub struct Capture {
    /// Stream on which the capture began.
    origin: u64,
    /// Thread that began the capture.
    thread: ThreadId,
    /// Capture mode, which selects the threads that must not make calls that are not stream work: 0, all threads; 1, `thread`; 2, none.
    mode: c_int,
    /// `true` while no forbidden call has been made.
    pub is_valid: bool,
    /// The captured ops.
    pub ops: Vec<Op>,
}

impl Capture {
    /// Begins a capture of work submitted to `origin`, by the current thread.
    pub fn begin(origin: u64, mode: c_int) -> Self {
        let thread = std::thread::current().id();
        Capture { origin, thread, mode, is_valid: true, ops: Vec::new() }
    }

    /// Returns `true` if the capture forbids calls that are not stream work to the current thread, which is in `thread_mode`: see
    /// `cuThreadExchangeStreamCaptureMode`.
    pub fn forbids(&self, thread_mode: c_int) -> bool {
        let is_own = self.thread == std::thread::current().id();
        match thread_mode {
            0 => self.mode == 0 || self.mode == 1 && is_own,
            1 => self.mode != 2 && is_own,
            _ => false,
        }
    }
}

impl State {
    /// Returns a stream that was not destroyed.
    pub fn stream(&mut self, stream: u64) -> Option<&mut Stream> {
        if stream & PER_THREAD != 0 {
            // The default stream of a thread is created on first use.
            self.streams.entry(stream).or_insert_with(|| Stream::new((stream & 0xffff) as c_int));
        }
        self.streams.get_mut(&stream).filter(|stream| !stream.is_gone)
    }

    /// Returns the number of streams that the program created and has not destroyed.
    pub fn stream_count(&self) -> u64 {
        let made = self.streams.iter().filter(|(key, stream)| !stream.is_gone && *key & PER_THREAD == 0);
        made.count() as u64 - self.options.devices as u64
    }

    /// Destroys a stream; its work continues.
    pub fn destroy_stream(&mut self, stream: u64) -> Option<()> {
        let known = self.stream(stream)?;
        known.is_gone = true;
        self.forget_gone(stream);
        Some(())
    }

    /// Removes a destroyed stream without work. Its handle may be reused.
    fn forget_gone(&mut self, stream: u64) {
        let is_over = |stream: &&Stream| stream.is_gone && stream.queue.is_empty();
        let Some(last) = self.streams.get(&stream).filter(is_over).map(|stream| stream.submitted) else { return };
        self.streams.remove(&stream);
        if self.options.reuses_streams {
            self.gone_streams.push((stream, last));
        }
    }

    /// Submits work: runs it, queues it, or captures it.
    pub fn submit(&mut self, stream: u64, op: Op) -> Result<(), Code> {
        let capture = self.stream(stream).ok_or(Code(400))?.capture;
        if let Some(capture) = capture {
            self.captures.get_mut(&capture).expect("the capture is in progress").ops.push(op);
            self.enqueue(stream, Work::Mark);
            return Ok(());
        }
        let is_external = matches!(op, Op::External { .. });
        let work = match op {
            Op::Set { address, value, count } => Work::Set { address, value, count },
            Op::Set32 { address, value, count } => Work::Set32 { address, value, count },
            Op::Copy { to, from, count } => Work::Copy { to, from, count },
            Op::External { template } => {
                let instance = self.handle();
                self.external_streams.insert(instance, stream);
                self.notices.push(Notice::Submitted { template, instance });
                Work::External { instance, has_arrived: false }
            }
        };
        let seq = self.enqueue(stream, work);
        if is_external {
            self.run(stream, seq);
        }
        Ok(())
    }

    /// Submits a copy from pageable memory, which is read now.
    ///
    /// # Safety
    /// The bytes must be valid for reading.
    pub unsafe fn write(&mut self, stream: u64, to: u64, from: u64, count: usize) -> Result<(), Code> {
        if self.stream(stream).ok_or(Code(400))?.capture.is_some() {
            return self.submit(stream, Op::Copy { to, from, count });
        }
        if count == 0 {
            return Ok(());
        }
        // SAFETY: guaranteed by the caller.
        let bytes = unsafe { std::slice::from_raw_parts(from as *const u8, count) }.into();
        self.enqueue(stream, Work::Write { to, bytes });
        Ok(())
    }

    /// Submits a copy to pageable memory, once the work before it has taken effect.
    pub fn read(&mut self, stream: u64, to: u64, from: u64, count: usize) -> Result<(), Code> {
        let known = self.stream(stream).ok_or(Code(400))?;
        let (last, is_captured) = (known.submitted, known.capture.is_some());
        if !is_captured && !self.run(stream, last) {
            return Err(WAIT);
        }
        self.submit(stream, Op::Copy { to, from, count })?;
        if !is_captured {
            self.run(stream, last + 1);
            self.log_host_wait(stream, last + 1);
        }
        Ok(())
    }

    /// Records an event. Returns its position.
    pub fn record(&mut self, stream: u64) -> Option<Event> {
        let capture = self.stream(stream)?.capture;
        let seq = self.enqueue(stream, Work::Mark);
        Some(Event { is_recorded: true, stream, seq, capture, ..Event::default() })
    }

    /// Makes later work of the stream wait for an event.
    pub fn wait(&mut self, stream: u64, event: Event) {
        let is_captured = self.streams[&stream].capture.is_some();
        let held_by = Work::Wait { stream: event.stream, seq: event.seq };
        let seq = self.enqueue(stream, if is_captured || !event.is_recorded { Work::Mark } else { held_by });
        if event.is_recorded {
            self.streams.get_mut(&stream).expect("it should be known").waits.push((seq, event.stream, event.seq));
        }
    }

    fn enqueue(&mut self, stream: u64, work: Work) -> u64 {
        let known = self.streams.get_mut(&stream).expect("it should be known");
        known.submitted += 1;
        let seq = known.submitted;
        if !self.options.is_lazy {
            known.due = seq;
        }
        let entry = work.entry(stream, seq);
        known.queue.push_back(work);
        let is_only = known.queue.len() == 1;
        if let Some(entry) = entry {
            self.log(entry);
        }
        if is_only {
            self.advance(stream);
        }
        seq
    }

    /// Runs the due work at the front of a queue until something blocks it. Returns `true` if any work took effect.
    fn advance(&mut self, stream: u64) -> bool {
        let mut has_moved = false;
        let next = |stream: &Stream| stream.queue.front().filter(|_| stream.ran < stream.due).cloned();
        while let Some(front) = self.streams.get(&stream).and_then(next) {
            match front {
                // SAFETY: the caller of the driver's call guarantees that the bytes exist, and that nothing else uses them until the work
                // is done. If they do not exist, the test crashes, as a kernel would.
                Work::Set { address, value, count } => unsafe { self.memory.set(address, value, count) },
                // SAFETY: as above. The address is a multiple of 4.
                Work::Set32 { address, value, count } => unsafe {
                    std::slice::from_raw_parts_mut(address as *mut u32, count).fill(value);
                },
                // SAFETY: as above.
                Work::Copy { to, from, count } => unsafe { self.memory.copy(to, from, count) },
                // SAFETY: as above, for the written bytes.
                Work::Write { to, bytes } => unsafe {
                    std::ptr::copy(bytes.as_ptr(), to as *mut u8, bytes.len());
                },
                Work::Wait { stream: other, seq } if self.streams.get(&other).is_some_and(|other| other.ran < seq) => {
                    break;
                }
                Work::External { instance, has_arrived } => {
                    if !self.external_done.remove(&instance) {
                        if !has_arrived {
                            let front = self.streams.get_mut(&stream).and_then(|stream| stream.queue.front_mut());
                            *front.expect("the element should exist, because it was seen above") =
                                Work::External { instance, has_arrived: true };
                            self.notices.push(Notice::Arrived { instance });
                        }
                        break;
                    }
                    self.external_streams.remove(&instance);
                }
                Work::Wait { .. } | Work::Mark => {}
            }
            let known = self.streams.get_mut(&stream).expect("the element should exist, because it was seen above");
            known.queue.pop_front();
            known.ran += 1;
            has_moved = true;
        }
        self.forget_gone(stream);
        has_moved
    }

    /// Submits work that blocks the work after it until [`external_is_done`](Self::external_is_done) receives its instance.
    pub fn hold(&mut self, stream: u64) -> Option<u64> {
        self.stream(stream)?;
        let instance = self.handle();
        self.external_streams.insert(instance, stream);
        self.enqueue(stream, Work::External { instance, has_arrived: true });
        Some(instance)
    }

    /// Marks work of another library as done, and runs the work that it blocked.
    pub fn external_is_done(&mut self, instance: u64) {
        if !self.external_streams.contains_key(&instance) {
            return;
        }
        self.external_done.insert(instance);
        self.advance_all();
    }

    /// Runs the due work of all streams until something blocks all of it.
    fn advance_all(&mut self) {
        let mut has_moved = true;
        while has_moved {
            let held: Vec<u64> =
                self.streams.iter().filter(|(_, of)| !of.queue.is_empty()).map(|(id, _)| *id).collect();
            has_moved = false;
            for stream in held {
                has_moved |= self.advance(stream);
            }
        }
    }

    /// Makes work of a stream due, and the work that it waits for.
    fn make_due(&mut self, stream: u64, seq: u64) {
        let Some(known) = self.streams.get_mut(&stream).filter(|known| known.due < seq) else { return };
        known.due = seq;
        let waits: Vec<_> = known.waits.iter().filter(|(own, _, _)| *own <= seq).copied().collect();
        waits.into_iter().for_each(|(_, other, work)| self.make_due(other, work));
    }

    /// Runs work of a stream, and the work that it waits for. Returns `true` if it has taken effect, and `false` if something blocks it.
    pub fn run(&mut self, stream: u64, seq: u64) -> bool {
        self.make_due(stream, seq);
        self.advance_all();
        self.has_run(stream, seq)
    }

    /// Runs all work of a device, like [`run`](Self::run).
    pub fn run_all(&mut self, device: c_int) -> bool {
        let of_device = self.streams.iter().filter(|(_, stream)| stream.device == device);
        let all: Vec<_> = of_device.map(|(id, stream)| (*id, stream.submitted)).collect();
        all.iter().for_each(|(stream, seq)| self.make_due(*stream, *seq));
        self.advance_all();
        all.iter().all(|(stream, seq)| self.has_run(*stream, *seq))
    }

    /// Runs the work of all devices until something blocks it.
    pub fn run_everything(&mut self) {
        (0..self.options.devices).for_each(|device| {
            self.run_all(device);
        });
        let ran: Vec<(u64, u64)> = self.streams.iter().map(|(id, stream)| (*id, stream.ran)).collect();
        ran.into_iter().for_each(|(id, ran)| self.log_host_wait(id, ran));
    }

    /// Returns `true` if the work has taken effect.
    pub fn has_run(&self, stream: u64, seq: u64) -> bool {
        self.streams.get(&stream).is_none_or(|stream| seq <= stream.ran)
    }

    /// Returns `true` if the work before the event counts as complete, which sufficiently many polls achieve.
    pub fn poll(&mut self, event: u64) -> bool {
        let Event { stream, seq, .. } = self.events[&event];
        if self.streams.get(&stream).is_none_or(|stream| seq <= stream.completed) {
            return true;
        }
        let known = self.events.get_mut(&event).expect("the element should exist, because it was seen above");
        known.polls += 1;
        let is_enough = self.options.polls > 0 && known.polls > self.options.polls;
        let has_run = is_enough && self.run(stream, seq);
        if has_run {
            self.complete(stream, seq);
        }
        has_run
    }

    /// Completes work of a stream that has taken effect, and the work that it waited for.
    pub fn complete(&mut self, stream: u64, seq: u64) {
        self.log_host_wait(stream, seq);
        let Some(known) = self.streams.get_mut(&stream) else { return };
        if seq <= known.completed {
            return;
        }
        known.completed = seq;
        let (due, later) = std::mem::take(&mut known.waits).into_iter().partition(|(own, _, _)| *own <= seq);
        known.waits = later;
        let due: Vec<_> = due;
        due.into_iter().for_each(|(_, other, work)| self.complete(other, work));
    }

    /// Completes all work of a device that has taken effect.
    pub fn complete_all(&mut self, device: c_int) {
        let mut covered = Vec::new();
        for (id, stream) in self.streams.iter_mut().filter(|(_, stream)| stream.device == device) {
            stream.completed = stream.ran;
            stream.waits.clear();
            covered.push((*id, stream.ran));
        }
        covered.into_iter().for_each(|(id, ran)| self.log_host_wait(id, ran));
    }

    /// Returns `true` if the origin of a capture waits for the last work of every other stream in the capture.
    pub fn is_joined(&self, capture: u64) -> bool {
        let origin = self.captures[&capture].origin;
        let waits = &self.streams[&origin].waits;
        let others = self.streams.iter().filter(|(id, stream)| stream.capture == Some(capture) && **id != origin);
        others.into_iter().all(|(id, stream)| waits.contains(&(waits_at(waits, *id), *id, stream.submitted)))
    }
}

/// Returns the number of the origin's last wait for `stream`.
fn waits_at(waits: &[(u64, u64, u64)], stream: u64) -> u64 {
    waits.iter().rev().find(|(_, other, _)| *other == stream).map_or(0, |(own, _, _)| *own)
}
