//! The builder of a simulated device.

use super::address_space::{AddressSpace, Addresses};
use super::backend::{DeviceProperties, SimBackend};
use super::fault::{Call, Fault, FaultRule, Faults};
use super::random::{SplitMix64, mix};
use super::timeline::{Delays, Timeline};
use symmalloc_core::units::{GIB, MIB, UNIT_BYTES};

/// A builder for [`SimBackend`]. Properties that differ between ranks are drawn from (seed, rank) unless set
/// explicitly.
#[derive(Clone, Debug)]
#[must_use]
pub struct SimBuilder {
    seed: u64,
    rank: u32,
    memory_bytes: u64,
    granularity_bytes: u64,
    can_alias: bool,
    delays: Delays,
    addresses: Addresses,
    has_kernels: bool,
    faults: Vec<(Option<Call>, FaultRule, Fault)>,
}

impl Default for SimBuilder {
    /// Uses seed 0, rank 0, 80 GiB in granules of 2 MiB, scattered addresses, delays from the seed, and no faults.
    fn default() -> Self {
        SimBuilder {
            seed: 0,
            rank: 0,
            memory_bytes: 80 * GIB,
            granularity_bytes: 2 * MIB,
            can_alias: true,
            delays: Delays::FromSeed,
            addresses: Addresses::default(),
            has_kernels: true,
            faults: Vec::new(),
        }
    }
}

impl SimBuilder {
    /// Sets the seed of the simulated job. Devices with the same seed and rank always behave identically.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Sets the rank of the job that owns this device. Ranks with the same seed behave independently of each other.
    pub fn rank(mut self, rank: u32) -> Self {
        self.rank = rank;
        self
    }

    /// Sets the size of the device memory in bytes. A `map` that would exceed this size fails with
    /// [`Reason::OutOfMemory`](symmalloc_core::backend::Reason::OutOfMemory).
    pub fn memory_bytes(mut self, memory_bytes: u64) -> Self {
        self.memory_bytes = memory_bytes;
        self
    }

    /// Sets the unit of mapping in bytes: a power of two from 512 to 1 GiB.
    pub fn granularity_bytes(mut self, granularity_bytes: u64) -> Self {
        self.granularity_bytes = granularity_bytes;
        self
    }

    /// Sets whether memory can be mapped at several addresses. The default is `true`.
    pub fn can_alias(mut self, can_alias: bool) -> Self {
        self.can_alias = can_alias;
        self
    }

    /// Sets how long simulated work takes.
    pub fn delays(mut self, delays: Delays) -> Self {
        self.delays = delays;
        self
    }

    /// Sets the order in which addresses are handed out.
    pub fn addresses(mut self, addresses: Addresses) -> Self {
        self.addresses = addresses;
        self
    }

    /// Promises that the program submits no kernels. The device then does not track the order of work, so `record` and
    /// `wait` take constant time, regardless of the number of streams. [`SimBackend::submit`] panics. The fills and
    /// comparisons of pools with debugging options are executed, but races with them are not detected.
    pub fn without_kernels(mut self) -> Self {
        self.has_kernels = false;
        self
    }

    /// Makes the fallible call with this ordinal fail. Ordinals start at 0 and count calls of all kinds.
    pub fn fail_at(self, ordinal: u64, fault: Fault) -> Self {
        self.fail(None, FaultRule::At { ordinal }, fault)
    }

    /// Makes calls of one kind fail as the rule states, or calls of any kind if `call` is `None`. If several rules
    /// match, the first one applies.
    pub fn fail(mut self, call: Option<Call>, rule: FaultRule, fault: Fault) -> Self {
        self.faults.push((call, rule, fault));
        self
    }

    /// Creates the device.
    ///
    /// # Panics
    /// Panics if the granularity is not a power of two from 512 to 1 GiB.
    pub fn build(self) -> SimBackend {
        let granularity_bytes = self.granularity_bytes;
        assert!(
            granularity_bytes.is_power_of_two() && (UNIT_BYTES..=GIB).contains(&granularity_bytes),
            "the granularity is {granularity_bytes} bytes: use a power of two from {UNIT_BYTES} to {GIB}"
        );
        let random = SplitMix64::new(mix(self.seed)).split(u64::from(self.rank));
        let [addresses, timeline, faults, handles] = [1, 2, 3, 4].map(|label| random.split(label));
        let mut faults = Faults::new(faults);
        for (call, rule, fault) in self.faults {
            faults.add(call, rule, fault);
        }
        let timeline = Timeline::new(timeline, self.delays);
        let timeline = if self.has_kernels { timeline } else { timeline.without_order() };
        SimBackend::new(
            DeviceProperties { granularity_bytes, memory_bytes: self.memory_bytes, can_alias: self.can_alias },
            handles.clone().next_u64(),
            AddressSpace::new(addresses, granularity_bytes, self.addresses),
            timeline,
            faults,
        )
    }
}

impl SimBackend {
    /// Returns a builder with the default settings; see [`SimBuilder`].
    pub fn builder() -> SimBuilder {
        SimBuilder::default()
    }
}
