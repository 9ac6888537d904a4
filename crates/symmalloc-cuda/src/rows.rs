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

use crate::calls::{Call, CallCounters};
use crate::device::CudaDevice;
use crate::error::{CAPTURE_UNSUPPORTED, DriverError};
use crate::order::{Order, SpareEvent};
use cudarc::driver::sys::{CUevent, CUstream};
use slab::Slab;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use symmalloc_core::backend::{BackendError, Event, InRow};
use symmalloc_core::ids::StreamId;

/// Marks a share in an event: the event's number, and above it the share's. No pointer has this bit.
const SHARE: u64 = 1 << 63;
const NUMBER_BITS: u32 = 32;

/// The rows of a device, of all its allocators.
#[derive(Debug, Default)]
pub(crate) struct Rows(Mutex<Books>);

#[derive(Debug, Default)]
struct Books {
    open: Vec<Row>,
    shared: Slab<SharedEvent>,
}

/// Drops that may not be the last of their row, on one stream of one allocator.
#[derive(Debug)]
struct Row {
    /// The allocator's; tells it from others.
    calls: Arc<CallCounters>,
    stream: StreamId,
    event: usize,
}

/// An event of several fences. Each has a share of its own in it, which is what the core knows.
#[derive(Debug)]
struct SharedEvent {
    event: SpareEvent,
    stream: CUstream,
    calls: Arc<CallCounters>,
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
fn number_of(event: Event) -> Option<usize> {
    (event.0 & SHARE != 0).then_some(event.0 as u32 as usize)
}

impl Rows {
    fn lock(&self) -> MutexGuard<'_, Books> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Books {
    /// The driver's name of an event. It stands for its drops from now on, and no other joins it.
    fn settle(&mut self, device: &CudaDevice, number: usize) -> Result<Event, DriverError> {
        let shared = &mut self.shared[number];
        let event = Event(shared.event.0 as u64);
        if !shared.is_recorded {
            // SAFETY: registered streams are kept alive.
            if unsafe { device.captures.of(device.driver, shared.stream) }?.is_some() {
                return Err(DriverError { call: "cuEventRecord", code: CAPTURE_UNSUPPORTED });
            }
            shared.calls.count(Call::Record);
            let (event, stream) = (shared.event.0, shared.stream);
            // SAFETY: the event is a pool's and the stream is alive, both of one context.
            device.call_about(stream, || unsafe { device.driver.event_record(event, stream) })?;
            shared.is_recorded = true;
        }
        self.close(number);
        Ok(event)
    }

    /// Nothing joins this event any more.
    fn close(&mut self, number: usize) {
        self.open.retain(|row| row.event != number);
    }
}

impl CudaDevice {
    /// Ends the rows that are open: work that is submitted from now on is not part of them.
    #[inline]
    pub(crate) fn end_rows(&self) {
        if self.captures.are_rows_open() {
            self.end_open_rows();
        }
    }

    #[cold]
    #[inline(never)]
    fn end_open_rows(&self) {
        let mut books = self.rows.lock();
        while let Some(row) = books.open.pop() {
            // If it is refused, whoever waits for it tries again.
            let _settled = books.settle(self, row.event);
        }
        self.captures.set_rows_open(false);
    }
}

impl Order {
    /// See [`Backend::record_in_row`](symmalloc_core::backend::Backend::record_in_row).
    pub(crate) fn record_in_row(&self, stream: StreamId) -> Result<InRow, BackendError> {
        let Some(raw) = self.stream(stream).map(|stream| stream.cu_stream()) else {
            return self.record(stream).map(InRow::Apart);
        };
        let mut books = self.device.rows.lock();
        if self.device.captures.any() {
            drop(books);
            return self.record(stream).map(InRow::Apart);
        }
        let Books { open, shared } = &mut *books;
        if let Some(row) = open.iter().find(|row| row.stream == stream && Arc::ptr_eq(&row.calls, &self.calls)) {
            let joined = &mut shared[row.event];
            joined.is_recorded = false;
            return Ok(InRow::Joined(joined.share(row.event)));
        }
        let event = SpareEvent(self.record_raw(raw)?.0 as CUevent);
        let (calls, again) = (Arc::clone(&self.calls), Arc::clone(&self.calls));
        let number = shared.insert(SharedEvent { event, stream: raw, calls, given: 0, held: 0, is_recorded: true });
        open.push(Row { calls: again, stream, event: number });
        self.device.captures.set_rows_open(true);
        Ok(InRow::Apart(shared[number].share(number)))
    }

    /// The driver's name of an event, for whoever waits for it or asks it.
    #[inline]
    pub(crate) fn settled(&self, event: Event) -> Result<Event, DriverError> {
        match number_of(event) {
            None => Ok(event),
            Some(number) => self.device.rows.lock().settle(&self.device, number),
        }
    }

    /// Takes a share back. The event when that was the last one.
    #[inline]
    pub(crate) fn let_go(&self, event: Event) -> Option<Event> {
        let Some(number) = number_of(event) else { return Some(event) };
        let mut books = self.device.rows.lock();
        books.shared[number].held -= 1;
        if books.shared[number].held > 0 {
            return None;
        }
        books.close(number);
        Some(Event(books.shared.remove(number).event.0 as u64))
    }

    /// Leaves no row and no event behind.
    pub(crate) fn leave_rows(&self) {
        let mut books = self.device.rows.lock();
        books.open.retain(|row| !Arc::ptr_eq(&row.calls, &self.calls));
        if books.open.is_empty() {
            self.device.captures.set_rows_open(false);
        }
        let own: Vec<usize> = books
            .shared
            .iter()
            .filter(|(_, it)| Arc::ptr_eq(&it.calls, &self.calls))
            .map(|(number, _)| number)
            .collect();
        own.into_iter().for_each(|number| self.keep(books.shared.remove(number).event));
    }
}
