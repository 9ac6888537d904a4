//! Which streams used a device buffer: what keeps its content and its memory safe across streams without a call by the user.
//!
//! A buffer that only its own stream uses, which is the rule, costs one load here. When its pointer is taken on another
//! stream, two things happen:
//! 1. The use is recorded with the allocator: whoever gets the memory after the buffer is dropped waits for that stream.
//! 2. While cudarc's event tracking is on (its default, see `CudaContext::disable_event_tracking`), the stream is made to wait
//!    for the buffer's last writer, and a writer for all readers as well: what `CudaSlice` does, but with events that are
//!    recorded when a stream changes and not at each use.
//!
//! A kernel on the buffer's own stream that takes the buffer itself as its argument is ordered like any other use.
//!
//! A stream that is not registered has no id. Its use is covered by an event that cudarc records when the pointer's guard is
//! dropped, and for which the buffer's own stream waits before the buffer is freed.
//!
//! In a stream capture only streams of the same capture are ordered; what came before is the program's to order, before it
//! launches the graph.

use crate::allocator::DropError;
use crate::backend::CudaBackend;
use crate::block::Block;
use crate::device::RestoreCurrent;
use crate::lane::Lane;
use crate::order::is_same;
use cudarc::driver::{CudaEvent, CudaStream, SyncOnDrop};
use once_cell::race::OnceBox;
use smallvec::SmallVec;
use std::mem::{self, ManuallyDrop};
use std::sync::{Mutex, OnceLock, PoisonError};
use symmalloc_core::StreamId;
use symmalloc_core::backend::{BackendError, Event};

/// How a pointer will be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// Nothing, until a second stream uses the buffer: one word of it. [`end`](Self::end) or [`forget`](Self::forget) it if it
/// is not [none](Self::are_none).
#[derive(Debug, Default)]
pub(crate) struct Uses(ManuallyDrop<OnceBox<Across>>);

/// The uses of a buffer that several streams use.
#[derive(Debug)]
struct Across {
    registered: Mutex<Registered>,
    foreign: OnceLock<Box<boxcar::Vec<ForeignUse>>>,
}

/// Uses by registered streams since the last write.
#[derive(Debug)]
struct Registered {
    writer: StreamId,
    /// Streams that read what the writer wrote, or are ordered behind it.
    readers: SmallVec<[StreamId; 2]>,
}

/// A use by a stream that is not registered.
#[derive(Debug)]
struct ForeignUse {
    stream: usize,
    /// Always `Some`: in the form that cudarc's guard takes.
    event: Option<CudaEvent>,
}

impl Uses {
    /// Notes a use of the block by work that is submitted to the stream while the guard lives.
    #[inline]
    pub(crate) fn begin<'a>(
        &'a self,
        block: &Block<CudaBackend>,
        stream: &'a CudaStream,
        access: Access,
    ) -> SyncOnDrop<'a> {
        block.lane().device.end_rows();
        let is_owner = block.lane().raw.as_ref().is_some_and(|owner| is_same(owner, stream));
        if block.address == 0 || (is_owner && self.0.get().is_none()) {
            return SyncOnDrop::Record(None);
        }
        self.begin_across(block, stream, access)
    }

    /// Notes a use of the block by work that is submitted to its own stream next.
    #[inline]
    pub(crate) fn on_own_stream(&self, block: &Block<CudaBackend>, access: Access) {
        block.lane().device.end_rows();
        if self.0.get().is_none() {
            return;
        }
        if let Some(owner) = &block.lane().raw {
            // A registered stream leaves nothing to do after its work.
            drop(self.begin_across(block, owner, access));
        }
    }

    #[cold]
    fn begin_across<'a>(
        &'a self,
        block: &Block<CudaBackend>,
        stream: &'a CudaStream,
        access: Access,
    ) -> SyncOnDrop<'a> {
        let across = self.0.get_or_init(|| Box::new(Across::new(block.lane().stream)));
        let is_ordered = stream.context().is_event_tracking();
        let outcome = match block.state().order().find(stream) {
            Some(id) => {
                if id != block.lane().stream {
                    block.record_use(id);
                }
                let ordered = if is_ordered { across.order_registered(block, id, access) } else { Ok(()) };
                ordered
                    .and_then(|()| across.order_behind_foreign(block.lane(), stream))
                    .map(|()| SyncOnDrop::Record(None))
            }
            None => across.begin_foreign(block, stream, is_ordered),
        };
        outcome.unwrap_or_else(|error| {
            block.state().note_drop_error(DropError::Order(error));
            // The host waits, before and after: slow and safe. What the driver refuses even then is a lost device.
            let _waited = block.state().order().device.synchronize();
            SyncOnDrop::sync_stream(stream)
        })
    }

    /// Brings every use behind the owner's stream that freeing does not cover: those of streams that are not registered.
    pub(crate) fn settle(&self, lane: &Lane<CudaBackend>) -> Result<(), BackendError> {
        match self.0.get() {
            Some(across) => across.settle(lane),
            None => Ok(()),
        }
    }

    /// Leaves none.
    #[inline(always)]
    pub(crate) fn take(&mut self) -> Self {
        mem::take(self)
    }

    #[inline(always)]
    pub(crate) fn are_none(&self) -> bool {
        self.0.get().is_none()
    }

    /// As [`settle`](Self::settle), where no error can be returned: it is noted. Whether it went well.
    #[cold]
    #[inline(never)]
    pub(crate) fn end(self, lane: &Lane<CudaBackend>) -> bool {
        let settled = self.settle(lane);
        self.forget();
        match settled {
            Ok(()) => true,
            Err(error) => {
                lane.state.note_drop_error(DropError::Order(error));
                false
            }
        }
    }

    /// Drops what it has: nothing else does.
    pub(crate) fn forget(self) {
        drop(ManuallyDrop::into_inner(self.0));
    }
}

impl Across {
    fn new(owner: StreamId) -> Self {
        let registered = Mutex::new(Registered { writer: owner, readers: SmallVec::new() });
        Across { registered, foreign: OnceLock::new() }
    }

    /// Makes a registered stream wait for whom it must. The use is noted also when that fails: the host waits then.
    fn order_registered(
        &self,
        block: &Block<CudaBackend>,
        stream: StreamId,
        access: Access,
    ) -> Result<(), BackendError> {
        let mut registered = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
        let is_behind_writer = registered.writer == stream || registered.readers.contains(&stream);
        let mut behind: SmallVec<[StreamId; 3]> = SmallVec::new();
        if !is_behind_writer {
            behind.push(registered.writer);
        }
        match access {
            Access::Read if !is_behind_writer => registered.readers.push(stream),
            Access::Read => {}
            Access::Write => {
                behind.extend(registered.readers.iter().copied().filter(|reader| *reader != stream));
                *registered = Registered { writer: stream, readers: SmallVec::new() };
            }
        }
        behind.into_iter().try_for_each(|on| order_behind(block, stream, on))
    }

    fn settle(&self, lane: &Lane<CudaBackend>) -> Result<(), BackendError> {
        lane.raw.as_ref().map_or(Ok(()), |owner| self.order_behind_foreign(lane, owner))
    }

    /// Makes a stream wait for all uses by streams that are not registered.
    fn order_behind_foreign(&self, lane: &Lane<CudaBackend>, stream: &CudaStream) -> Result<(), BackendError> {
        let Some(foreign) = self.foreign.get() else { return Ok(()) };
        for event in foreign.iter().filter_map(|(_, entry)| entry.event.as_ref()) {
            lane.state.order().wait_raw(stream.cu_stream(), Event(event.cu_event() as u64))?;
        }
        Ok(())
    }

    fn begin_foreign<'a>(
        &'a self,
        block: &Block<CudaBackend>,
        stream: &'a CudaStream,
        is_ordered: bool,
    ) -> Result<SyncOnDrop<'a>, BackendError> {
        let order = block.state().order();
        if stream.context().cu_ctx() != order.device.context().cu_ctx() {
            // Events of this context cannot be recorded on a stream of another one: the host waits, before and after.
            order.device.synchronize()?;
            return Ok(SyncOnDrop::sync_stream(stream));
        }
        if is_ordered {
            let registered = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
            for &user in std::iter::once(&registered.writer).chain(&registered.readers) {
                let event = order.record(user)?;
                let waited = order.wait_raw(stream.cu_stream(), event);
                order.recycle(event);
                waited?;
            }
        }
        // Also its own earlier uses: recording its event again must not lose them.
        self.order_behind_foreign(block.lane(), stream)?;
        if !stream.context().is_managing_stream_synchronization() {
            // cudarc would not record the event: the host waits.
            return Ok(SyncOnDrop::sync_stream(stream));
        }
        Ok(SyncOnDrop::record_event(self.foreign_event(block, stream)?, stream))
    }

    fn foreign_event(
        &self,
        block: &Block<CudaBackend>,
        stream: &CudaStream,
    ) -> Result<&Option<CudaEvent>, BackendError> {
        let uses = self.foreign.get_or_init(Box::default);
        let raw = stream.cu_stream() as usize;
        if let Some((_, entry)) = uses.iter().find(|(_, entry)| entry.stream == raw) {
            return Ok(&entry.event);
        }
        let device = &block.state().order().device;
        let _restore = RestoreCurrent::of(device.driver)?;
        let event = device.context().new_event(None);
        let event = event.map_err(|error| crate::error::DriverError { call: "cuEventCreate", code: error.0 as i32 })?;
        let index = uses.push(ForeignUse { stream: raw, event: Some(event) });
        Ok(&uses[index].event)
    }
}

/// Orders `stream` behind `on`, unless a capture separates them.
fn order_behind(block: &Block<CudaBackend>, stream: StreamId, on: StreamId) -> Result<(), BackendError> {
    let order = block.state().order();
    if order.device.captures.any() {
        let capture_of = |id| match order.stream(id) {
            Some(stream) => order.capture_of(stream.cu_stream()),
            None => Ok(None),
        };
        if capture_of(stream)? != capture_of(on)? {
            return Ok(());
        }
    }
    block.state().wait(stream, on)
}
