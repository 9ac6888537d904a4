//! Frees in a row: one event for many buffers that are dropped one after another.
//!
//! A buffer that other streams used leaves an event on each of them when it is dropped (rule D3). Programs drop such buffers
//! in rows, at the end of a layer or of a scope. Nothing is submitted between two drops of a row, so one event says what one
//! for each drop would say: it is recorded at the first drop and, if there were more, again at the end of the row.
//!
//! ```text
//!  drop a         drop b     drop c     drop d     alloc, or a pointer is taken
//!  record e       join e     join e     join e     record e again: the row ends
//! ```
//!
//! **When a row ends.** An event may stand for more than the uses that it is for: whoever waits for it waits for too much
//! then, never for too little. So that it does not, a row ends before the program can give a stream more work that this
//! crate knows of: when it allocates, takes the pointer of a buffer on any stream, makes a stream wait, launches a graph, or
//! begins a capture. It ends as well when somebody waits for the event or asks it: that stream is not behind later drops.
//! What escapes is work that takes no pointer between the row's last drop and the next of these calls: the fences of a row of
//! several drops cover that work, too. The event of a single drop, which most rows are, stands for the drop to the letter.
//!
//! **Errors.** If the driver refuses the event at the first drop, the buffer stays allocated. One that is refused at the end
//! of a row is recorded by whoever waits for it, and gets the error if it is refused again: nobody takes the memory without
//! waiting.
//!
//! **Who takes part.** Buffers that are dropped, because a program takes their pointers to use them. Handles and addresses do
//! not, and so nothing that comes through C or from PyTorch does: what such a program submits is not seen here, and each of
//! its frees records an event at once, and for good.
//!
//! **Captures.** An event must not be recorded in a capture that began after the free. So beginning a capture ends all rows
//! of the device, and while one is under way no row begins.

use crate::device::CudaDevice;
use crate::error::{CAPTURE_UNSUPPORTED, DriverError};
use crate::order::{Order, SpareEvent};
use cudarc::driver::sys::{CUevent, CUstream};
use slab::Slab;
use std::fmt;
use symmalloc_core::backend::{BackendError, Event, InRow};
use symmalloc_core::ids::StreamId;
use symmalloc_core::lock::{Lock, LockCell, Shared};

/// Marks a share in an event: the event's number, and above it the share's. No pointer has this bit.
const SHARE: u64 = 1 << 63;
const NUMBER_BITS: u32 = 32;

/// The events of a device, of all its allocators: those in rows, and those that nobody uses. One lock is on them all, which is
/// entered once for each event that is recorded, waited for or taken back.
pub(crate) struct Rows(<Shared as Lock>::Cell<Books>);

#[derive(Default)]
struct Books {
    open: Vec<Row>,
    shared: Slab<SharedEvent>,
    owners: Slab<Owner>,
}

/// What the events of one allocator have in common. Rows and shared events name it by its number.
#[derive(Default)]
struct Owner {
    spare: Vec<SpareEvent>,
    /// Shared events that nobody has a share in, by number.
    unshared: Vec<usize>,
    calls: EventCalls,
}

/// How often the driver was told to record an event of an allocator, and to make a stream wait for one.
#[derive(Clone, Copy, Default)]
pub(crate) struct EventCalls {
    pub(crate) records: u64,
    pub(crate) waits: u64,
}

/// Drops that may not be the last of their row, on one stream of one allocator.
struct Row {
    owner: usize,
    stream: StreamId,
    event: usize,
}

/// An event of several fences. Each has a share of its own in it, which is what the core knows; frees of one heap in a row
/// have a fence in common.
struct SharedEvent {
    event: SpareEvent,
    stream: CUstream,
    owner: usize,
    /// Number of shares that were given.
    given: u64,
    /// Number of shares that were not given back.
    held: u64,
    /// Whether it stands for the last drop that joined it.
    is_recorded: bool,
}

// SAFETY: the driver lets any thread use any stream and any event.
unsafe impl Send for SharedEvent {}

impl SharedEvent {
    /// A share for one more fence of a drop that was made just now.
    fn share(&mut self, number: usize) -> Event {
        (self.given, self.held) = (self.given + 1, self.held + 1);
        Event(SHARE | (self.given << NUMBER_BITS & !SHARE) | number as u64)
    }
}

/// The number of the event that this is a share in.
#[inline]
fn number_of(event: Event) -> Option<usize> {
    (event.0 & SHARE != 0).then_some(event.0 as u32 as usize)
}

impl Default for Rows {
    fn default() -> Self {
        Rows(LockCell::new(Books::default()))
    }
}

impl fmt::Debug for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rows").finish_non_exhaustive()
    }
}

impl Books {
    /// The driver's name of an event. It stands for its drops from now on, and no other joins it.
    #[inline]
    fn settle(&mut self, device: &CudaDevice, number: usize) -> Result<Event, DriverError> {
        let shared = &self.shared[number];
        let event = Event(shared.event.0 as u64);
        if !shared.is_recorded {
            self.record_again(device, number)?;
        }
        self.close(number);
        Ok(event)
    }

    /// Records the event of a row that several drops joined.
    #[inline(never)]
    fn record_again(&mut self, device: &CudaDevice, number: usize) -> Result<(), DriverError> {
        let shared = &mut self.shared[number];
        let (event, stream) = (shared.event.0, shared.stream);
        // SAFETY: registered streams are kept alive.
        if unsafe { device.captures.of(device.driver, stream) }?.is_some() {
            return Err(DriverError { call: "cuEventRecord", code: CAPTURE_UNSUPPORTED });
        }
        self.owners[shared.owner].calls.records += 1;
        // SAFETY: the event is a pool's and the stream is alive, both of one context.
        device.call_about(stream, || unsafe { device.driver.event_record(event, stream) })?;
        shared.is_recorded = true;
        Ok(())
    }

    /// Nothing joins this event any more.
    #[inline]
    fn close(&mut self, number: usize) {
        if let Some(at) = self.open.iter().position(|row| row.event == number) {
            self.open.swap_remove(at);
        }
    }
}

impl CudaDevice {
    /// A capture begins. Ends all rows, and while it is under way none begins.
    pub(crate) fn begin_capture(&self) {
        let mut books = self.rows.0.lock();
        self.captures.begin();
        self.end_rows_of(&mut books);
    }

    /// The capture is over.
    pub(crate) fn end_capture(&self) {
        let _books = self.rows.0.lock();
        self.captures.end();
    }

    /// Ends the rows that are open: work that is submitted from now on is not part of them.
    #[inline]
    pub(crate) fn end_rows(&self) {
        if self.captures.are_rows_open() {
            self.end_open_rows();
        }
    }

    /// Ends the rows that are open, for work that is in no capture. Whether there is none that it could be in.
    #[inline]
    pub(crate) fn is_quiet(&self) -> bool {
        self.captures.is_quiet() || {
            self.end_rows();
            !self.captures.any()
        }
    }

    #[inline(never)]
    fn end_open_rows(&self) {
        self.end_rows_of(&mut self.rows.0.lock());
    }

    fn end_rows_of(&self, books: &mut Books) {
        while let Some(row) = books.open.pop() {
            // If it is refused, whoever waits for it tries again.
            let _settled = books.settle(self, row.event);
        }
        self.captures.set_rows_open(false);
    }
}

impl Order {
    /// Enters an allocator in the device's books. Returns its number.
    pub(crate) fn enter_books(device: &CudaDevice) -> usize {
        device.rows.0.lock().owners.insert(Owner::default())
    }

    /// See [`Backend::record_in_row`](symmalloc_core::backend::Backend::record_in_row).
    pub(crate) fn record_in_row(&self, stream: StreamId) -> Result<InRow, BackendError> {
        let device = &*self.device;
        let mut books = device.rows.0.lock();
        let Books { open, shared, .. } = &mut *books;
        // None is open while a capture is under way.
        if let Some(row) = open.iter().find(|row| row.stream == stream && row.owner == self.number) {
            let joined = &mut shared[row.event];
            joined.is_recorded = false;
            return Ok(InRow::Joined(joined.share(row.event)));
        }
        let raw = self.stream(stream).filter(|_| !device.captures.any()).map(|stream| stream.cu_stream());
        let Some(raw) = raw else {
            drop(books);
            return self.record(stream).map(InRow::Apart);
        };
        Ok(InRow::Apart(self.begin_row(&mut books, stream, raw)?))
    }

    /// See [`Backend::extend_row`](symmalloc_core::backend::Backend::extend_row).
    #[inline(always)]
    pub(crate) fn extend_row(&self, event: Event) -> bool {
        match number_of(event) {
            Some(number) if self.device.captures.are_rows_open() => {
                let Books { open, shared, .. } = &mut *self.device.rows.0.lock();
                let is_open = open.iter().any(|row| row.event == number);
                if is_open {
                    shared[number].is_recorded = false;
                }
                is_open
            }
            _ => false,
        }
    }

    /// The first event of a row.
    fn begin_row(&self, books: &mut Books, stream: StreamId, raw: CUstream) -> Result<Event, DriverError> {
        let Books { open, shared, owners } = books;
        let owner = &mut owners[self.number];
        let number = match owner.unshared.pop() {
            Some(number) => number,
            None => {
                let event = owner.spare.pop().map_or_else(|| self.new_event(), Ok)?;
                shared.insert(SharedEvent {
                    event,
                    stream: raw,
                    owner: self.number,
                    given: 0,
                    held: 0,
                    is_recorded: true,
                })
            }
        };
        let event = &mut shared[number];
        owner.calls.records += 1;
        if let Err(error) = self.record_now(raw, &event.event) {
            owner.unshared.push(number);
            return Err(error);
        }
        (event.stream, event.is_recorded) = (raw, true);
        let share = event.share(number);
        open.push(Row { owner: self.number, stream, event: number });
        self.device.captures.set_rows_open(true);
        Ok(share)
    }

    /// The driver's name of an event, for whoever waits for it or asks it.
    #[inline]
    pub(crate) fn settled(&self, event: Event) -> Result<Event, DriverError> {
        match number_of(event) {
            None => Ok(event),
            Some(number) => self.device.rows.0.lock().settle(&self.device, number),
        }
    }

    /// As [`settled`](Self::settled), of an event that a stream is told to wait for, which counts.
    #[inline(always)]
    pub(crate) fn settled_for_wait(&self, event: Event) -> Result<Event, DriverError> {
        let mut books = self.device.rows.0.lock();
        books.owners[self.number].calls.waits += 1;
        match number_of(event) {
            None => Ok(event),
            Some(number) => books.settle(&self.device, number),
        }
    }

    /// Takes an event back that is of no capture; of a share the event with the last one.
    #[inline(always)]
    pub(crate) fn put_back(&self, event: Event) {
        let mut books = self.device.rows.0.lock();
        let Some(number) = number_of(event) else {
            return books.owners[self.number].spare.push(SpareEvent(event.0 as CUevent));
        };
        let shared = &mut books.shared[number];
        shared.held -= 1;
        if shared.held == 0 {
            books.close(number);
            books.owners[self.number].unshared.push(number);
        }
    }

    /// A spare event, or a new one, to be recorded.
    pub(crate) fn take_event(&self) -> Result<SpareEvent, DriverError> {
        let spare = {
            let Books { shared, owners, .. } = &mut *self.device.rows.0.lock();
            let owner = &mut owners[self.number];
            owner.calls.records += 1;
            owner.spare.pop().or_else(|| Some(shared.remove(owner.unshared.pop()?).event))
        };
        match spare {
            Some(event) => Ok(event),
            None => self.new_event(),
        }
    }

    pub(crate) fn event_calls(&self) -> EventCalls {
        self.device.rows.0.lock().owners[self.number].calls
    }

    /// Takes back an event that no fence has.
    pub(crate) fn keep(&self, event: SpareEvent) {
        self.device.rows.0.lock().owners[self.number].spare.push(event);
    }

    /// Leaves no row and no event behind. Returns all events.
    pub(crate) fn leave_books(&self) -> Vec<SpareEvent> {
        let mut books = self.device.rows.0.lock();
        let Books { open, shared, owners } = &mut *books;
        open.retain(|row| row.owner != self.number);
        if open.is_empty() {
            self.device.captures.set_rows_open(false);
        }
        let mut events = owners.remove(self.number).spare;
        let own: Vec<_> = shared.iter().filter(|(_, it)| it.owner == self.number).map(|(number, _)| number).collect();
        events.extend(own.into_iter().map(|number| shared.remove(number).event));
        events
    }
}
