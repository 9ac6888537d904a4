//! The simulated backend: one instance per simulated rank, without a device, derived from one seed.

use super::address_space::AddressSpace;
use super::contents::{Contents, Pieces};
use super::contract::{
    ALIASES_FIRST, ALIGNED, CARVED, IMAGE, INSIDE, LIVE_EVENT, MAPPED, MAPPED_ONCE, NOT_CAPTURED, ORDERED, PIECE,
    QUIET, RESERVED, SYNCHRONIZED_FIRST, UNMAPPED_FIRST, violation,
};
use super::fault::{Call, CallCounts, Fault, FaultRule, Faults};
use super::leaks::Leaks;
use super::random::mix;
use super::timeline::{Race, Timeline};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use symmalloc_core::backend::{
    Backend, BackendError, Bytes, COMPARED_BYTES_MAX, Compared, Comparison, DeviceAddress, Event, Image, Part, Range,
    RangeOffset,
};
use symmalloc_core::base::{Base, BaseError, SLOT_BYTES};
use symmalloc_core::ids::{PoolId, StreamId};
use symmalloc_core::units::UNIT_BYTES;

/// A simulated device of one rank. Its addresses, handles, event timing and faults derive from its seed.
///
/// For a *correct* allocator it is an ordinary [`Backend`] whose adverse behavior differs on each rank. For an
/// *incorrect* one it is strict: it panics at the first violation of the contract in [`symmalloc_core::backend`] and
/// names the rule. It also detects missing waits that corrupt memory only rarely on a real device.
///
/// ```text
///                seed, rank
///        ┌───────────┼──────────────┬───────────────┐
///   addresses     timeline        faults         handles         each with a separate random sequence
///   reserve       record wait     any call       raw_stream
///   map unmap     query           fails at k     raw events
///   release       synchronize
///        └── submit: a kernel uses these bytes ─► Ok, or Race
/// ```
///
/// Addresses, event completion, raw handles and faults differ between ranks. By rule D1, no placement may depend on
/// them. The program is the same on all ranks, so an allocator that places identically on many simulated ranks depends
/// on the program alone.
///
/// # Time
/// Time is measured in ticks. Each call takes one tick, and [`SimBackend::tick`] adds more. No clock is read.
///
/// # Memory
/// A new instance takes at most [`SimBackend::FRESH_BYTES_MAX`] bytes and no heap memory, and grows only with live state,
/// so thousands of ranks fit on a laptop.
///
/// Aliases share the memory of their source: unordered uses through two addresses of the same memory are a race. Bytes
/// hold the last value written with [`SimBackend::write`] until their memory is unmapped. Tests use this to check that a
/// pool restores its contents after a sleep.
///
/// # Limitations
/// Kernels write no data, graphs do not exist, and mapped memory is counted without being placed physically.
///
/// # Examples
/// ```
/// use symmalloc::backend::Backend;
/// use symmalloc::ids::StreamId;
/// use symmalloc::sim::SimBackend;
///
/// let device = SimBackend::builder().seed(7).rank(3).build();
/// let range = device.reserve(2 << 20)?;
/// device.map(range, 0, 2 << 20)?;
/// device.submit(StreamId(0), range.base, 512).unwrap();
/// assert!(device.submit(StreamId(1), range.base, 512).is_err()); // nothing orders the streams
/// # Ok::<(), symmalloc::backend::BackendError>(())
/// ```
///
/// # Panics
/// [`submit`](SimBackend::submit) and every method of [`Backend`] panic if the caller violates the contract of
/// [`symmalloc_core::backend`]. The message names the rule. If the thread is already unwinding, they return an error
/// instead, so that the first report stays visible.
#[derive(Debug)]
pub struct SimBackend {
    granularity_bytes: u64,
    memory_bytes: u64,
    can_alias: bool,
    handles: u64,
    state: Mutex<SimState>,
}

/// The properties of a device that are fixed at its creation.
#[derive(Clone, Copy)]
pub(super) struct DeviceProperties {
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
    /// The results of comparisons in progress, by the event after each.
    comparisons: BTreeMap<u64, Compared>,
    /// The streams that are being captured.
    captured: BTreeSet<StreamId>,
    mapped_bytes: u64,
    mapped_bytes_peak: u64,
}

impl SimBackend {
    /// The maximum size of a new instance in bytes. A new instance owns no heap memory.
    pub const FRESH_BYTES_MAX: usize = 768;

    /// Creates a device with no memory in use, whose raw stream handles derive from `handles`.
    pub(super) fn new(
        sizes: DeviceProperties,
        handles: u64,
        addresses: AddressSpace,
        timeline: Timeline,
        faults: Faults,
    ) -> Self {
        let DeviceProperties { granularity_bytes, memory_bytes, can_alias } = sizes;
        let state = SimState {
            addresses,
            timeline,
            faults,
            contents: Contents::default(),
            comparisons: BTreeMap::new(),
            captured: BTreeSet::new(),
            mapped_bytes: 0,
            mapped_bytes_peak: 0,
        };
        SimBackend { granularity_bytes, memory_bytes, can_alias, handles, state: Mutex::new(state) }
    }

    /// Locks the state. A panic at a violation leaves the state unchanged, so a poisoned lock is safe to use.
    fn state(&self) -> MutexGuard<'_, SimState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the raw handle of a stream: a pointer-like number that differs on each rank.
    pub fn raw_stream(&self, stream: StreamId) -> u64 {
        (mix(self.handles ^ (u64::from(stream.0) + 1)) >> 17) & !0xf
    }

    /// Advances simulated time, so that pending work and events may complete.
    pub fn tick(&self, ticks: u64) {
        self.state().timeline.tick(ticks);
    }

    /// Simulates a kernel on `stream` that reads and writes the bytes starting at `address`. It is not a backend call:
    /// it takes no tick and has no ordinal.
    ///
    /// # Errors
    /// Returns a [`Race`] if an earlier use of any of the bytes on another stream is not ordered before this one. A
    /// wait of `stream` (possibly through other streams), a synchronize, or a query that returned done establishes the
    /// order. The kernel is not submitted after an error. Uses are tracked in units of 512 bytes.
    ///
    /// # Panics
    /// Panics if not all of the bytes are mapped.
    #[track_caller]
    pub fn submit(&self, stream: StreamId, address: DeviceAddress, size_bytes: u64) -> Result<(), Race> {
        let mut state = self.state();
        let end = address.0.saturating_add(size_bytes);
        if size_bytes == 0 {
            return Ok(());
        }
        assert!(
            state.addresses.is_mapped(address.0, end),
            "violation of the backend contract in `submit`: {MAPPED} ({size_bytes} bytes at {:#x} on {stream})",
            address.0
        );
        let parts = state.addresses.memory_of(address.0, end);
        let name = state.addresses.is_alias(address.0, end).then_some((address.0, end));
        state.timeline.submit_parts(stream, &parts, name)
    }

    /// Sets all of these bytes to one value. It is not a backend call.
    ///
    /// # Panics
    /// Panics if not all of the bytes are mapped.
    #[track_caller]
    pub fn write(&self, address: DeviceAddress, size_bytes: u64, value: u64) {
        let mut state = self.state();
        for (start, end) in state.memory_of(address, size_bytes) {
            state.contents.write(start, end, value);
        }
    }

    /// Begins the capture of a stream, or ends it. Captured work is not simulated: the capture only forbids the work of
    /// debugging options. It is not a backend call.
    pub fn set_captured(&self, stream: StreamId, is_captured: bool) {
        let mut state = self.state();
        if is_captured {
            state.captured.insert(stream);
        } else {
            state.captured.remove(&stream);
        }
    }

    /// Returns the value that all of these bytes hold, or `None` if they hold several values or any was not written
    /// since it was mapped. It is not a backend call.
    ///
    /// # Panics
    /// Panics if not all of the bytes are mapped.
    #[track_caller]
    pub fn read(&self, address: DeviceAddress, size_bytes: u64) -> Option<u64> {
        let state = self.state();
        let mut values =
            state.memory_of(address, size_bytes).into_iter().map(|(start, end)| state.contents.read(start, end));
        let value = values.next()??;
        values.all(|other| other == Some(value)).then_some(value)
    }

    /// Adds a fault rule for later calls of one kind, or of any kind if `call` is `None`.
    pub fn inject(&self, call: Option<Call>, rule: FaultRule, fault: Fault) {
        self.state().faults.add(call, rule, fault);
    }

    /// Removes all faults, including the loss of the device. The limit of device memory stays in effect.
    pub fn heal(&self) {
        self.state().faults.clear();
    }

    /// Returns the number of calls of each kind made so far.
    pub fn calls(&self) -> CallCounts {
        self.state().faults.counts
    }

    /// Returns the size of the device memory in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// Returns the number of bytes of device memory that are not mapped.
    pub fn free_bytes(&self) -> u64 {
        self.memory_bytes - self.mapped_bytes()
    }

    /// Returns the number of bytes of device memory that are mapped.
    pub fn mapped_bytes(&self) -> u64 {
        self.state().mapped_bytes
    }

    /// Returns the maximum number of bytes of device memory that were mapped at once.
    pub fn mapped_bytes_peak(&self) -> u64 {
        self.state().mapped_bytes_peak
    }

    /// Returns the resources that the program has not released so far.
    pub fn leaks(&self) -> Leaks {
        let state = self.state();
        Leaks {
            mapped_bytes: state.mapped_bytes,
            ranges: state.addresses.ranges(),
            events: state.timeline.events(),
            images: state.contents.images(),
        }
    }

    /// Runs one fallible call: checks the contract, advances time by a tick, counts the call, injects a fault, and only
    /// then acts. A lost device skips the check, because cleanup cannot succeed on it.
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

    /// Returns the addresses of a part of a range, after checking that the part is valid.
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
            return Err(violation(call, RESERVED, format_args!("{of} bytes at {base:#x}")));
        }
        let aligned = |bytes: u64| bytes.is_multiple_of(self.granularity_bytes);
        if part.is_empty() || !aligned(part.start) || !aligned(part.end) {
            return Err(violation(
                call,
                ALIGNED,
                format_args!("bytes {part:?} at granularity {}", self.granularity_bytes),
            ));
        }
        if part.end > of {
            return Err(violation(call, INSIDE, format_args!("bytes {part:?} of a range of {of} bytes")));
        }
        Ok((base + part.start, base + part.end))
    }
}

impl SimState {
    /// Returns the addresses at which the memory of mapped bytes was mapped first.
    #[track_caller]
    fn memory_of(&self, address: DeviceAddress, size_bytes: u64) -> Vec<(u64, u64)> {
        let (start, end) = (address.0, address.0.saturating_add(size_bytes));
        assert!(
            self.addresses.is_mapped(start, end),
            "violation of the backend contract: {MAPPED} ({size_bytes} bytes at {start:#x})"
        );
        self.addresses.memory_of(start, end)
    }

    /// Converts the parts to pieces of memory.
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

    /// Submits a kernel of the backend that uses these bytes. Returns the memory behind them. A unit that the bytes cover only in
    /// part does not count as used: another stream may use its other bytes, and uses are tracked in whole units. A device without
    /// kernels does not check the order.
    #[track_caller]
    fn submit_own(&mut self, call: Call, stream: StreamId, bytes: Bytes) -> Result<Vec<(u64, u64)>, BackendError> {
        if self.captured.contains(&stream) {
            return Err(violation(call, NOT_CAPTURED, format_args!("{stream}")));
        }
        let Bytes { address, size_bytes } = bytes;
        let (start, end) = (address.0, address.0.saturating_add(size_bytes));
        let parts = self.addresses.memory_of(start, end);
        if !self.timeline.tracks_order() {
            return Ok(parts);
        }
        let (first, last) = (start.next_multiple_of(UNIT_BYTES), end / UNIT_BYTES * UNIT_BYTES);
        if first >= last {
            return Ok(parts);
        }
        let name = self.addresses.is_alias(start, end).then_some((first, last));
        match self.timeline.submit_parts(stream, &self.addresses.memory_of(first, last), name) {
            Ok(()) => Ok(parts),
            Err(race) => Err(violation(call, ORDERED, format_args!("{race}"))),
        }
    }

    /// Checks the rules that apply to bytes that are filled or compared.
    #[track_caller]
    fn check_bytes(&self, call: Call, bytes: Bytes) -> Result<(), BackendError> {
        let Bytes { address, size_bytes } = bytes;
        match size_bytes > 0 && self.addresses.is_mapped(address.0, address.0.saturating_add(size_bytes)) {
            true => Ok(()),
            false => Err(violation(call, MAPPED, format_args!("{size_bytes} bytes at {:#x}", address.0))),
        }
    }

    /// Checks the rules that apply to every copy.
    #[track_caller]
    fn check_parts(&self, call: Call, parts: &[Part]) -> Result<(), BackendError> {
        for Part { address, size_bytes, .. } in parts {
            let (start, end) = (address.0, address.0.saturating_add(*size_bytes));
            if start >= end || !self.addresses.is_mapped(start, end) {
                return Err(violation(call, MAPPED, format_args!("{size_bytes} bytes at {start:#x}")));
            }
            if let Some((at, stream)) = self.timeline.pending_use(start, end) {
                return Err(violation(call, QUIET, format_args!("{stream} uses {at:#x}")));
            }
        }
        match parts.is_sorted_by(|lower, upper| lower.image_offset_bytes + lower.size_bytes <= upper.image_offset_bytes)
        {
            true => Ok(()),
            false => Err(violation(call, IMAGE, format_args!("{} parts", parts.len()))),
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
            false => Err(violation(call, ALIGNED, format_args!("{size_bytes} bytes"))),
        };
        self.call(call, check, |state| {
            let base = state.addresses.reserve(size_bytes).ok_or_else(|| Fault::OutOfMemory.of(call))?;
            Ok(Range { base: DeviceAddress(base), size_bytes })
        })
    }

    /// Counts as a [`Call::Reserve`].
    #[track_caller]
    fn reserve_at(&self, base: Base, pool: PoolId) -> Result<Range, BaseError> {
        let mut granted = Ok(());
        let reserve = |state: &mut SimState| {
            granted = state.addresses.reserve_at(base, pool);
            Ok(())
        };
        self.call(Call::Reserve, |_| Ok(()), reserve).map_err(|error| BaseError::Driver {
            base,
            call: error.call,
            code: error.code,
        })?;
        granted.map(|()| Range { base: DeviceAddress(base.address()), size_bytes: SLOT_BYTES })
    }

    /// Not a call: it takes no tick and cannot fail.
    #[track_caller]
    fn carve(&self, space: Range, part: Range) -> Result<(), BackendError> {
        let mut state = self.state();
        let (base, size_bytes) = (part.base.0, part.size_bytes);
        let is_aligned = [base, size_bytes].iter().all(|bytes| bytes.is_multiple_of(self.granularity_bytes));
        let is_inside = space.base.0 <= base && base + size_bytes <= space.base.0 + space.size_bytes;
        if size_bytes == 0 || !is_aligned || !is_inside || !state.addresses.is_carvable(base, size_bytes) {
            return Err(violation(Call::Reserve, CARVED, format_args!("{size_bytes} bytes at {base:#x}")));
        }
        state.addresses.carve(base, size_bytes);
        Ok(())
    }

    /// Counts as a [`Call::Release`].
    #[track_caller]
    fn release_space(&self, space: Range) -> Result<(), BackendError> {
        let check = |state: &SimState| match state.addresses.is_unused_space(space.base.0) {
            true => Ok(()),
            false => Err(violation(Call::Release, CARVED, format_args!("the space at {:#x}", space.base.0))),
        };
        self.call(Call::Release, check, |state| {
            state.addresses.release_space(space.base.0);
            Ok(())
        })
    }

    #[track_caller]
    fn map(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError> {
        let call = Call::Map;
        let part = offset_bytes..offset_bytes.saturating_add(size_bytes);
        let check = |state: &SimState| {
            let (start, end) = self.part(state, call, range, part.clone())?;
            match state.addresses.is_any_mapped(start, end) {
                true => Err(violation(call, MAPPED_ONCE, format_args!("bytes {part:?} at {:#x}", range.base.0))),
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

    /// Counts as a [`Call::Map`], because a driver maps memory for an alias too.
    #[track_caller]
    fn alias(&self, at: RangeOffset, source: RangeOffset, piece_bytes: u64) -> Result<(), BackendError> {
        let call = Call::Map;
        let part_from = |(_, offset): RangeOffset| offset..offset.saturating_add(piece_bytes);
        let check = |state: &SimState| {
            let (start, end) = self.part(state, call, at.0, part_from(at))?;
            let (from, to) = self.part(state, call, source.0, part_from(source))?;
            if state.addresses.is_any_mapped(start, end) {
                return Err(violation(call, MAPPED_ONCE, format_args!("{piece_bytes} bytes at {start:#x}")));
            }
            match state.addresses.is_mapped(from, to) && !state.addresses.is_alias(from, to) {
                true => Ok(()),
                false => Err(violation(call, PIECE, format_args!("{piece_bytes} bytes at {from:#x}"))),
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
                return Err(violation(call, MAPPED, format_args!("bytes {part:?} at {:#x}", range.base.0)));
            }
            if state.addresses.has_alias(start, end) {
                return Err(violation(call, ALIASES_FIRST, format_args!("bytes {part:?} at {:#x}", range.base.0)));
            }
            match state.timeline.pending_use(start, end) {
                Some((at, stream)) => Err(violation(call, SYNCHRONIZED_FIRST, format_args!("{stream} uses {at:#x}"))),
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
                true => Err(violation(call, UNMAPPED_FIRST, format_args!("{} bytes at {start:#x}", range.size_bytes))),
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

    /// Recycles an event, even on a lost device.
    #[track_caller]
    fn recycle(&self, event: Event) {
        let mut state = self.state();
        assert!(
            state.timeline.is_event(event.0) || std::thread::panicking(),
            "violation of the backend contract in `recycle`: {LIVE_EVENT} (event {:#x})",
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
    fn save(&self, _pool: PoolId, parts: &[Part]) -> Result<Image, BackendError> {
        let call = Call::Save;
        let check = |state: &SimState| {
            state.check_parts(call, parts)?;
            let mut sum = 0;
            let has_gap = parts.iter().any(|part| {
                sum += part.size_bytes;
                sum != part.image_offset_bytes + part.size_bytes
            });
            if has_gap { Err(violation(call, IMAGE, format_args!("{} parts", parts.len()))) } else { Ok(()) }
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
                false => Err(violation(call, IMAGE, format_args!("image {}", image.0))),
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
        assert!(is_kept || std::thread::panicking(), "violation of the backend contract in `discard`: {IMAGE}");
    }

    #[track_caller]
    fn zero(&self, parts: &[Part]) -> Result<(), BackendError> {
        let call = Call::Zero;
        let is_mapped = |state: &SimState| {
            let all =
                parts.iter().all(|part| state.addresses.is_mapped(part.address.0, part.address.0 + part.size_bytes));
            if all { Ok(()) } else { Err(violation(call, MAPPED, format_args!("{} parts", parts.len()))) }
        };
        self.call(call, is_mapped, |state| {
            for (start, end, _) in state.pieces(parts) {
                state.contents.write(start, end, 0);
            }
            Ok(())
        })
    }

    fn is_captured(&self, stream: StreamId) -> bool {
        self.state().captured.contains(&stream)
    }

    #[track_caller]
    fn fill(&self, stream: StreamId, bytes: Bytes, pattern: u32) -> Result<(), BackendError> {
        let check = |state: &SimState| state.check_bytes(Call::Fill, bytes);
        self.call(Call::Fill, check, |state| {
            for (start, end) in state.submit_own(Call::Fill, stream, bytes)? {
                state.contents.write(start, end, pattern.into());
            }
            Ok(())
        })
    }

    /// The result is that of the moment of the call, and becomes available when the stream has reached it.
    #[track_caller]
    fn compare(&self, stream: StreamId, bytes: Bytes, pattern: u32) -> Result<Option<Comparison>, BackendError> {
        assert!(bytes.size_bytes <= COMPARED_BYTES_MAX, "{} bytes are compared at once", bytes.size_bytes);
        let check = |state: &SimState| state.check_bytes(Call::Compare, bytes);
        self.call(Call::Compare, check, |state| {
            let (mut offset, mut compared) = (0, Compared::Equal);
            for (start, end) in state.submit_own(Call::Compare, stream, bytes)? {
                if let (Compared::Equal, Some(at)) = (compared, state.contents.first_other(start, end, pattern.into()))
                {
                    compared = Compared::Different { offset_bytes: offset + at };
                }
                offset += end - start;
            }
            let event = state.timeline.record(stream);
            state.comparisons.insert(event, compared);
            Ok(Some(Comparison(event)))
        })
    }

    #[track_caller]
    fn compared(&self, comparison: Comparison) -> Result<Compared, BackendError> {
        let mut state = self.state();
        assert!(state.comparisons.contains_key(&comparison.0), "a comparison has ended: {comparison:?}");
        state.timeline.tick(1);
        if !state.faults.lost() && !state.timeline.query(comparison.0) {
            return Ok(Compared::Pending);
        }
        state.timeline.recycle(comparison.0);
        let compared = state.comparisons.remove(&comparison.0).expect("it exists");
        if state.faults.lost() { Err(Fault::DeviceLost.of(Call::Compare)) } else { Ok(compared) }
    }
}

#[track_caller]
fn live(state: &SimState, call: Call, event: Event) -> Result<(), BackendError> {
    match state.timeline.is_event(event.0) {
        true => Ok(()),
        false => Err(violation(call, LIVE_EVENT, format_args!("event {:#x}", event.0))),
    }
}

#[cfg(test)]
mod tests;
