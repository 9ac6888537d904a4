//! The simulator: a backend without a device, one instance per simulated rank, all of it from one seed.
//!
//! It is a test instrument with two faces. To a *correct* allocator it is an ordinary [`Backend`] that is merely
//! unlucky in its own way on each rank. To an *incorrect* one it is merciless: it panics at the first breach of the
//! contract in [`symmalloc_core::backend`], names the rule, and finds missing waits that a real device would punish once a week.
//!
//! ```text
//!                seed, rank
//!        ┌───────────┼──────────────┬───────────────┐
//!   addresses     timeline        faults         handles         each from its own random sequence
//!   reserve       record wait     any call       raw_stream
//!   map unmap     query           fails at k     raw events
//!   release       synchronize
//!        └── submit: a kernel uses these bytes ─► Ok, or Race
//! ```
//!
//! What differs between ranks (addresses, event completion, raw handles, faults) is exactly what rule D1 forbids to
//! decide a placement; what a program does is the same on all. So an allocator that places alike on many simulated
//! ranks does so because it looks at nothing else.
//!
//! Time is counted in ticks: each call is one, [`SimBackend::tick`] adds more. No clock is read. A fresh instance takes
//! at most [`SimBackend::FRESH_BYTES_MAX`] bytes and no heap memory, and grows with what is live only: thousands of
//! ranks fit a laptop.
//!
//! Aliases have the memory of what they name: a use by one address and a use by another race.
//!
//! Bytes hold what [`SimBackend::write`] says until their memory is gone, so that a test sees whether a pool that slept has them again.
//!
//! What it leaves out: kernels write nothing, graphs do not exist, and mappings are counted, not placed.

use super::address_space::AddressSpace;
use super::contents::{Contents, Pieces};
use super::fault::{Call, CallCounts, Fault, FaultRule, Faults};
use super::random::mix;
use super::timeline::{Race, Timeline};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use symmalloc_core::backend::{Backend, BackendError, DeviceAddress, Event, Image, Part, Place, Range};
use symmalloc_core::ids::StreamId;

/// A simulated device of one rank: addresses, handles, event timing and faults come from its seed.
///
/// # Panics
/// Every method that implements [`Backend`], and [`submit`](SimBackend::submit), panics when the caller breaches the
/// contract of [`symmalloc_core::backend`], with the rule. While the thread is unwinding already, a breach is returned as an
/// error instead, so that the first report is the one that is seen.
#[derive(Debug)]
pub struct SimBackend {
    granularity_bytes: u64,
    memory_bytes: u64,
    can_alias: bool,
    handles: u64,
    state: Mutex<SimState>,
}

/// The two sizes of a device.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) granularity_bytes: u64,
    pub(super) memory_bytes: u64,
    pub(super) can_alias: bool,
}

#[derive(Debug)]
struct SimState {
    addresses: AddressSpace,
    timeline: Timeline,
    faults: Faults,
    contents: Contents,
    mapped_bytes: u64,
    mapped_bytes_peak: u64,
}

/// What a program left behind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Leaks {
    /// Device memory still mapped, in bytes.
    pub mapped_bytes: u64,
    /// Ranges not released.
    pub ranges: usize,
    /// Events not recycled.
    pub events: usize,
    /// Images not discarded.
    pub images: usize,
}

impl Leaks {
    /// Whether nothing was left behind.
    pub fn is_empty(&self) -> bool {
        *self == Leaks::default()
    }
}

impl fmt::Display for Leaks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Leaks { mapped_bytes, ranges, events, images } = self;
        write!(f, "{mapped_bytes} bytes mapped, {ranges} ranges reserved, {events} events live, {images} images kept")
    }
}

/// The caller broke a rule of the contract: stops the test with the rule.
#[track_caller]
fn breach(call: Call, rule: &str, what: fmt::Arguments<'_>) -> BackendError {
    if !std::thread::panicking() {
        panic!("breach of the backend contract in `{call}`: {rule} ({what})");
    }
    Fault::Refused.of(call)
}

const ALIGNED: &str = "offsets and sizes are multiples of the granularity, and sizes are not zero";
const RESERVED: &str = "a range is what `reserve` returned, and is not released yet";
const INSIDE: &str = "what is mapped or unmapped lies inside of its range";
const MAPPED_ONCE: &str = "a granule is mapped at most once";
const MAPPED: &str = "only what is mapped is unmapped or used";
const UNMAPPED_FIRST: &str = "everything is unmapped before its range is released";
const PIECE: &str = "an alias has the memory of bytes that are mapped, and are no alias themselves";
const ALIASES_FIRST: &str = "memory is unmapped after all of its aliases";
const SYNCHRONIZED_FIRST: &str = "every stream that may still use the bytes is synchronised before they are unmapped";
const QUIET: &str = "no stream uses bytes that are copied";
const IMAGE: &str = "parts follow each other in the order of their offsets, and lie in an image that is kept";
const LIVE_EVENT: &str = "an event is recycled once and not used afterwards";

impl SimBackend {
    /// No fresh instance is larger than this, in bytes, and none owns heap memory.
    pub const FRESH_BYTES_MAX: usize = 768;

    /// A device without memory in use, whose raw stream handles come from a number.
    pub(super) fn new(sizes: Sizes, handles: u64, addresses: AddressSpace, timeline: Timeline, faults: Faults) -> Self {
        let Sizes { granularity_bytes, memory_bytes, can_alias } = sizes;
        let state = SimState {
            addresses,
            timeline,
            faults,
            contents: Contents::default(),
            mapped_bytes: 0,
            mapped_bytes_peak: 0,
        };
        SimBackend { granularity_bytes, memory_bytes, can_alias, handles, state: Mutex::new(state) }
    }

    /// A panic at a breach leaves the state as it was before the call, so a poisoned lock does no harm.
    fn state(&self) -> MutexGuard<'_, SimState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The raw handle the simulated driver gave to a stream: a pointer-like number, another on each rank.
    pub fn raw_stream(&self, stream: StreamId) -> u64 {
        (mix(self.handles ^ (u64::from(stream.0) + 1)) >> 17) & !0xf
    }

    /// Lets simulated time pass: work and events may come to be done.
    pub fn tick(&self, ticks: u64) {
        self.state().timeline.tick(ticks);
    }

    /// Pretends that a kernel on `stream` reads and writes the bytes from `address` on. Not a call of the backend: it
    /// takes no tick and has no ordinal.
    ///
    /// # Errors
    /// When an earlier use of any of the bytes on another stream does not come before this one: by a wait of `stream`
    /// (through any number of streams), by a synchronise, or by a query that said done. The kernel is not submitted
    /// then. Bytes are told apart in steps of 512.
    ///
    /// # Panics
    /// When not all of the bytes are mapped.
    #[track_caller]
    pub fn submit(&self, stream: StreamId, address: DeviceAddress, size_bytes: u64) -> Result<(), Race> {
        let mut state = self.state();
        let end = address.0.saturating_add(size_bytes);
        if size_bytes == 0 {
            return Ok(());
        }
        assert!(
            state.addresses.is_mapped(address.0, end),
            "breach of the backend contract in `submit`: {MAPPED} ({size_bytes} bytes at {:#x} on {stream})",
            address.0
        );
        let parts = state.addresses.memory_of(address.0, end);
        let name = state.addresses.is_alias(address.0, end).then_some((address.0, end));
        state.timeline.submit_parts(stream, &parts, name)
    }

    /// Writes one value to all of these bytes, whatever a value is. Not a call of the backend.
    ///
    /// # Panics
    /// When not all of the bytes are mapped.
    #[track_caller]
    pub fn write(&self, address: DeviceAddress, size_bytes: u64, value: u64) {
        let mut state = self.state();
        for (start, end) in state.memory_of(address, size_bytes) {
            state.contents.write(start, end, value);
        }
    }

    /// What all of these bytes hold; `None` where they hold several values, or were not written since they were mapped. Not a call of
    /// the backend.
    ///
    /// # Panics
    /// When not all of the bytes are mapped.
    #[track_caller]
    pub fn read(&self, address: DeviceAddress, size_bytes: u64) -> Option<u64> {
        let state = self.state();
        let mut values =
            state.memory_of(address, size_bytes).into_iter().map(|(start, end)| state.contents.read(start, end));
        let value = values.next()??;
        values.all(|other| other == Some(value)).then_some(value)
    }

    /// From now on calls fail as the rule says: calls of one kind, or (`None`) of any.
    pub fn inject(&self, call: Option<Call>, rule: FaultRule, fault: Fault) {
        self.state().faults.add(call, rule, fault);
    }

    /// Takes all faults away, a lost device included. What limited memory refuses, it still refuses.
    pub fn heal(&self) {
        self.state().faults.clear();
    }

    /// How often each call was made so far.
    pub fn calls(&self) -> CallCounts {
        self.state().faults.counts
    }

    /// Device memory, in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// Device memory that is not mapped, in bytes.
    pub fn free_bytes(&self) -> u64 {
        self.memory_bytes - self.mapped_bytes()
    }

    /// Device memory that is mapped, in bytes.
    pub fn mapped_bytes(&self) -> u64 {
        self.state().mapped_bytes
    }

    /// The most device memory that was ever mapped at once, in bytes.
    pub fn mapped_bytes_peak(&self) -> u64 {
        self.state().mapped_bytes_peak
    }

    /// What would be left behind if the program ended now.
    pub fn leaks(&self) -> Leaks {
        let state = self.state();
        Leaks {
            mapped_bytes: state.mapped_bytes,
            ranges: state.addresses.ranges(),
            events: state.timeline.events(),
            images: state.contents.images(),
        }
    }

    /// Makes one fallible call: counts it, lets a tick pass, checks the contract, injects a fault, and only then acts.
    /// A lost device answers before the contract is checked, since nothing can be done properly any more.
    #[track_caller]
    fn call<T>(
        &self,
        call: Call,
        check: impl FnOnce(&SimState) -> Result<(), BackendError>,
        act: impl FnOnce(&mut SimState) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let mut state = self.state();
        if !state.faults.lost() {
            check(&state)?;
        }
        state.timeline.tick(1);
        let answer = match state.faults.enter(call) {
            Some(fault) => Err(fault.of(call)),
            None => act(&mut state),
        };
        if answer.is_err() {
            state.faults.counts.add_failed();
        }
        answer
    }

    /// The addresses of a part of a range, if it may be named.
    #[track_caller]
    fn part(
        &self,
        state: &SimState,
        call: Call,
        range: Range,
        part: std::ops::Range<u64>,
    ) -> Result<(u64, u64), BackendError> {
        let (base, of) = (range.base.0, range.size_bytes);
        if !state.addresses.is_reserved(base, of) {
            return Err(breach(call, RESERVED, format_args!("{of} bytes at {base:#x}")));
        }
        let aligned = |bytes: u64| bytes.is_multiple_of(self.granularity_bytes);
        if part.is_empty() || !aligned(part.start) || !aligned(part.end) {
            return Err(breach(
                call,
                ALIGNED,
                format_args!("bytes {part:?} at granularity {}", self.granularity_bytes),
            ));
        }
        if part.end > of {
            return Err(breach(call, INSIDE, format_args!("bytes {part:?} of a range of {of} bytes")));
        }
        Ok((base + part.start, base + part.end))
    }
}

impl SimState {
    /// Where the memory of mapped bytes was mapped first.
    #[track_caller]
    fn memory_of(&self, address: DeviceAddress, size_bytes: u64) -> Vec<(u64, u64)> {
        let (start, end) = (address.0, address.0.saturating_add(size_bytes));
        assert!(
            self.addresses.is_mapped(start, end),
            "breach of the backend contract: {MAPPED} ({size_bytes} bytes at {start:#x})"
        );
        self.addresses.memory_of(start, end)
    }

    /// The parts, as they lie in memory.
    fn pieces(&self, parts: &[Part]) -> Pieces {
        let mut pieces = Pieces::new();
        for part in parts {
            let mut offset = part.image_offset_bytes;
            for (start, end) in self.addresses.memory_of(part.address.0, part.address.0 + part.size_bytes) {
                pieces.push((start, end, offset));
                offset += end - start;
            }
        }
        pieces
    }

    /// What every copy must keep to.
    #[track_caller]
    fn check_parts(&self, call: Call, parts: &[Part]) -> Result<(), BackendError> {
        for Part { address, size_bytes, .. } in parts {
            let (start, end) = (address.0, address.0.saturating_add(*size_bytes));
            if start >= end || !self.addresses.is_mapped(start, end) {
                return Err(breach(call, MAPPED, format_args!("{size_bytes} bytes at {start:#x}")));
            }
            if let Some((at, stream)) = self.timeline.pending_use(start, end) {
                return Err(breach(call, QUIET, format_args!("{stream} uses {at:#x}")));
            }
        }
        match parts.is_sorted_by(|lower, upper| lower.image_offset_bytes + lower.size_bytes <= upper.image_offset_bytes)
        {
            true => Ok(()),
            false => Err(breach(call, IMAGE, format_args!("{} parts", parts.len()))),
        }
    }
}

impl Backend for SimBackend {
    fn granularity_bytes(&self) -> u64 {
        self.granularity_bytes
    }

    #[track_caller]
    fn reserve(&self, size_bytes: u64) -> Result<Range, BackendError> {
        let call = Call::Reserve;
        let check = |_: &SimState| match size_bytes != 0 && size_bytes.is_multiple_of(self.granularity_bytes) {
            true => Ok(()),
            false => Err(breach(call, ALIGNED, format_args!("{size_bytes} bytes"))),
        };
        self.call(call, check, |state| {
            let base = state.addresses.reserve(size_bytes).ok_or_else(|| Fault::OutOfMemory.of(call))?;
            Ok(Range { base: DeviceAddress(base), size_bytes })
        })
    }

    #[track_caller]
    fn map(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError> {
        let call = Call::Map;
        let part = offset_bytes..offset_bytes.saturating_add(size_bytes);
        let check = |state: &SimState| {
            let (start, end) = self.part(state, call, range, part.clone())?;
            match state.addresses.is_any_mapped(start, end) {
                true => Err(breach(call, MAPPED_ONCE, format_args!("bytes {part:?} at {:#x}", range.base.0))),
                false => Ok(()),
            }
        };
        self.call(call, check, |state| {
            if size_bytes > self.memory_bytes - state.mapped_bytes {
                return Err(Fault::OutOfMemory.of(call));
            }
            state.addresses.map(range.base.0 + part.start, range.base.0 + part.end);
            state.mapped_bytes += size_bytes;
            state.mapped_bytes_peak = state.mapped_bytes_peak.max(state.mapped_bytes);
            Ok(())
        })
    }

    fn can_alias(&self) -> bool {
        self.can_alias
    }

    /// A call of the kind [`Call::Map`], as it is for a driver.
    #[track_caller]
    fn alias(&self, at: Place, source: Place, piece_bytes: u64) -> Result<(), BackendError> {
        let call = Call::Map;
        let part_from = |(_, offset): Place| offset..offset.saturating_add(piece_bytes);
        let check = |state: &SimState| {
            let (start, end) = self.part(state, call, at.0, part_from(at))?;
            let (from, to) = self.part(state, call, source.0, part_from(source))?;
            if state.addresses.is_any_mapped(start, end) {
                return Err(breach(call, MAPPED_ONCE, format_args!("{piece_bytes} bytes at {start:#x}")));
            }
            match state.addresses.is_mapped(from, to) && !state.addresses.is_alias(from, to) {
                true => Ok(()),
                false => Err(breach(call, PIECE, format_args!("{piece_bytes} bytes at {from:#x}"))),
            }
        };
        self.call(call, check, |state| {
            let (start, source) = (at.0.base.0 + at.1, source.0.base.0 + source.1);
            state.addresses.alias(start, start + piece_bytes, source);
            Ok(())
        })
    }

    #[track_caller]
    fn unmap(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError> {
        let call = Call::Unmap;
        let part = offset_bytes..offset_bytes.saturating_add(size_bytes);
        let check = |state: &SimState| {
            let (start, end) = self.part(state, call, range, part.clone())?;
            if !state.addresses.is_mapped(start, end) {
                return Err(breach(call, MAPPED, format_args!("bytes {part:?} at {:#x}", range.base.0)));
            }
            if state.addresses.has_alias(start, end) {
                return Err(breach(call, ALIASES_FIRST, format_args!("bytes {part:?} at {:#x}", range.base.0)));
            }
            match state.timeline.pending_use(start, end) {
                Some((at, stream)) => Err(breach(call, SYNCHRONIZED_FIRST, format_args!("{stream} uses {at:#x}"))),
                None => Ok(()),
            }
        };
        self.call(call, check, |state| {
            let (start, end) = (range.base.0 + part.start, range.base.0 + part.end);
            if !state.addresses.is_alias(start, end) {
                state.contents.forget(start, end);
            }
            state.mapped_bytes -= state.addresses.unmap(start, end);
            state.timeline.forget(start, end);
            Ok(())
        })
    }

    #[track_caller]
    fn release(&self, range: Range) -> Result<(), BackendError> {
        let call = Call::Release;
        let check = |state: &SimState| {
            let (start, end) = self.part(state, call, range, 0..range.size_bytes)?;
            match state.addresses.is_any_mapped(start, end) {
                true => Err(breach(call, UNMAPPED_FIRST, format_args!("{} bytes at {start:#x}", range.size_bytes))),
                false => Ok(()),
            }
        };
        self.call(call, check, |state| {
            state.addresses.release(range.base.0);
            Ok(())
        })
    }

    #[track_caller]
    fn record(&self, stream: StreamId) -> Result<Event, BackendError> {
        self.call(Call::Record, |_| Ok(()), |state| Ok(Event(state.timeline.record(stream))))
    }

    #[track_caller]
    fn wait(&self, stream: StreamId, event: Event) -> Result<(), BackendError> {
        self.call(
            Call::Wait,
            |state| live(state, Call::Wait, event),
            |state| {
                state.timeline.wait(stream, event.0);
                Ok(())
            },
        )
    }

    #[track_caller]
    fn query(&self, event: Event) -> Result<bool, BackendError> {
        self.call(Call::Query, |state| live(state, Call::Query, event), |state| Ok(state.timeline.query(event.0)))
    }

    /// Takes an event back, on a lost device too.
    #[track_caller]
    fn recycle(&self, event: Event) {
        let mut state = self.state();
        assert!(
            state.timeline.is_event(event.0) || std::thread::panicking(),
            "breach of the backend contract in `recycle`: {LIVE_EVENT} (event {:#x})",
            event.0
        );
        state.timeline.tick(1);
        state.timeline.recycle(event.0);
        state.faults.counts.add_recycle();
    }

    #[track_caller]
    fn synchronize(&self, stream: StreamId) -> Result<(), BackendError> {
        self.call(
            Call::Synchronize,
            |_| Ok(()),
            |state| {
                state.timeline.synchronize(stream);
                Ok(())
            },
        )
    }

    #[track_caller]
    fn save(&self, parts: &[Part]) -> Result<Image, BackendError> {
        let call = Call::Save;
        let check = |state: &SimState| {
            state.check_parts(call, parts)?;
            let mut sum = 0;
            let has_gap = parts.iter().any(|part| {
                sum += part.size_bytes;
                sum != part.image_offset_bytes + part.size_bytes
            });
            if has_gap { Err(breach(call, IMAGE, format_args!("{} parts", parts.len()))) } else { Ok(()) }
        };
        self.call(call, check, |state| {
            let pieces = state.pieces(parts);
            Ok(Image(state.contents.save(&pieces)))
        })
    }

    #[track_caller]
    fn load(&self, image: Image, parts: &[Part]) -> Result<(), BackendError> {
        let call = Call::Load;
        let check = |state: &SimState| {
            state.check_parts(call, parts)?;
            match state.contents.has(image.0, parts) {
                true => Ok(()),
                false => Err(breach(call, IMAGE, format_args!("image {}", image.0))),
            }
        };
        self.call(call, check, |state| {
            let pieces = state.pieces(parts);
            state.contents.load(image.0, &pieces);
            Ok(())
        })
    }

    #[track_caller]
    fn discard(&self, image: Image) {
        let is_kept = self.state().contents.discard(image.0);
        assert!(is_kept || std::thread::panicking(), "breach of the backend contract in `discard`: {IMAGE}");
    }

    #[track_caller]
    fn zero(&self, parts: &[Part]) -> Result<(), BackendError> {
        let call = Call::Zero;
        let is_mapped = |state: &SimState| {
            let all =
                parts.iter().all(|part| state.addresses.is_mapped(part.address.0, part.address.0 + part.size_bytes));
            if all { Ok(()) } else { Err(breach(call, MAPPED, format_args!("{} parts", parts.len()))) }
        };
        self.call(call, is_mapped, |state| {
            for (start, end, _) in state.pieces(parts) {
                state.contents.write(start, end, 0);
            }
            Ok(())
        })
    }
}

#[track_caller]
fn live(state: &SimState, call: Call, event: Event) -> Result<(), BackendError> {
    match state.timeline.is_event(event.0) {
        true => Ok(()),
        false => Err(breach(call, LIVE_EVENT, format_args!("event {:#x}", event.0))),
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
