//! Conformance tests: the backend contract, checked on every backend that runs without a device.

use symmalloc_core::backend::{Backend, BackendError, DeviceAddress, Event, Image, Part, Range, Reason};
use symmalloc_core::ids::{PoolId, StreamId};
use symmalloc_harness::conformance::conformance;
use symmalloc_sim::{Call, Delays, SimBackend};

#[test]
fn the_simulator_keeps_the_contract_on_every_rank() {
    for rank in 0..16 {
        conformance(|| SimBackend::builder().seed(1).rank(rank).build());
    }
}

#[test]
fn the_simulator_keeps_the_contract_with_every_delay_and_granularity() {
    for delays in [Delays::Immediate, Delays::UpTo { ticks: 1000 }, Delays::UntilSynchronized] {
        for granularity_bytes in [512, 64 << 10, 2 << 20] {
            conformance(|| SimBackend::builder().delays(delays).granularity_bytes(granularity_bytes).build());
        }
    }
}

#[test]
fn the_suite_leaks_nothing() {
    let device = SimBackend::builder().build();
    conformance(|| &device);
    assert!(device.leaks().is_empty(), "{}", device.leaks());
    assert!(Call::ALL.iter().all(|&call| device.calls().of(call) > 0), "{:?}", device.calls());
}

/// A violation of the contract.
#[derive(Clone, Copy, Debug)]
enum Fraud {
    RangesOverlap,
    RangesAreShort,
    UnmapCutsNothing,
    EventsAreAlike,
    WaitDoesNothing,
    SynchronizeDoesNothing,
    DoneIsForgotten,
    ImagesAreAlike,
}

/// A device that violates the contract in one way.
struct Fraudulent {
    device: SimBackend,
    fraud: Fraud,
}

impl Backend for Fraudulent {
    fn granularity_bytes(&self) -> u64 {
        self.device.granularity_bytes()
    }
    fn reserve(&self, size_bytes: u64) -> Result<Range, BackendError> {
        let range = self.device.reserve(size_bytes)?;
        Ok(match self.fraud {
            Fraud::RangesOverlap => Range { base: DeviceAddress(1 << 40), ..range },
            Fraud::RangesAreShort => Range { size_bytes: size_bytes / 2, ..range },
            _ => range,
        })
    }
    fn map(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError> {
        self.device.map(range, offset_bytes, size_bytes)
    }
    fn unmap(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError> {
        match self.fraud {
            Fraud::UnmapCutsNothing if offset_bytes > 0 => Err(BackendError::new("unmap", 1, Reason::Refused)),
            _ => self.device.unmap(range, offset_bytes, size_bytes),
        }
    }
    fn release(&self, range: Range) -> Result<(), BackendError> {
        match self.fraud {
            Fraud::RangesOverlap => Ok(()),
            _ => self.device.release(range),
        }
    }
    fn record(&self, stream: StreamId) -> Result<Event, BackendError> {
        match self.fraud {
            Fraud::EventsAreAlike => Ok(Event(1)),
            _ => self.device.record(stream),
        }
    }
    fn wait(&self, stream: StreamId, event: Event) -> Result<(), BackendError> {
        match self.fraud {
            Fraud::WaitDoesNothing => Ok(()),
            _ => self.device.wait(stream, event),
        }
    }
    fn query(&self, event: Event) -> Result<bool, BackendError> {
        match self.fraud {
            Fraud::DoneIsForgotten => Ok(false),
            _ => self.device.query(event),
        }
    }
    fn recycle(&self, event: Event) {
        if !matches!(self.fraud, Fraud::EventsAreAlike) {
            self.device.recycle(event);
        }
    }
    fn synchronize(&self, stream: StreamId) -> Result<(), BackendError> {
        match self.fraud {
            Fraud::SynchronizeDoesNothing => Ok(()),
            _ => self.device.synchronize(stream),
        }
    }
    fn save(&self, pool: PoolId, parts: &[Part]) -> Result<Image, BackendError> {
        let image = self.device.save(pool, parts)?;
        Ok(if matches!(self.fraud, Fraud::ImagesAreAlike) { Image(7) } else { image })
    }
    fn load(&self, image: Image, parts: &[Part]) -> Result<(), BackendError> {
        if matches!(self.fraud, Fraud::ImagesAreAlike) { Ok(()) } else { self.device.load(image, parts) }
    }
    fn discard(&self, image: Image) {
        if !matches!(self.fraud, Fraud::ImagesAreAlike) {
            self.device.discard(image);
        }
    }
    fn zero(&self, parts: &[Part]) -> Result<(), BackendError> {
        self.device.zero(parts)
    }
}

#[test]
fn the_suite_rejects_every_faulty_backend() {
    for fraud in [
        Fraud::RangesOverlap,
        Fraud::RangesAreShort,
        Fraud::UnmapCutsNothing,
        Fraud::EventsAreAlike,
        Fraud::WaitDoesNothing,
        Fraud::SynchronizeDoesNothing,
        Fraud::DoneIsForgotten,
        Fraud::ImagesAreAlike,
    ] {
        let make = || Fraudulent { device: SimBackend::builder().delays(Delays::UntilSynchronized).build(), fraud };
        assert!(std::panic::catch_unwind(|| conformance(make)).is_err(), "{fraud:?} was not found");
    }
}
