//! Reasons why a known key is refused or has no effect.

/// The reason why a known key is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyRefusal {
    /// The key would make ranks differ.
    #[error(
        "it frees by local block age and by the free memory that the device reports, so ranks would differ; use release_threshold_mb"
    )]
    LocalAge,
    /// The value requests the driver's own allocator.
    #[error("cudaMallocAsync is another allocator, whose addresses the driver chooses; use backend:native")]
    DriverAllocator,
    /// The key is PyTorch's and has no effect here.
    #[error("{0}")]
    NoEffect(IgnoredReason),
    /// The key belongs to the whole allocator.
    #[error("it applies to the whole allocator; set it in the allocator's configuration, not in a pool's")]
    WholeAllocator,
}

/// A PyTorch key that was accepted and has no effect here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("byte {offset}: {key} has no effect: {reason}")]
#[non_exhaustive]
pub struct IgnoredKey {
    /// Offset of the key in the text.
    pub offset: usize,
    /// The key.
    pub key: &'static str,
    /// The reason.
    pub reason: IgnoredReason,
}

/// The reason why a PyTorch key has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IgnoredReason {
    /// It configures PyTorch's driver calls, locks or host memory.
    #[error("it configures driver calls, locks or host memory, none of which affects a placement")]
    NotPlacement,
    /// It is a fraction of the device's memory, which may differ from rank to rank.
    #[error(
        "it is a fraction of the device's memory, which may differ between ranks; set total_limit_mb or range_mb instead"
    )]
    DeviceFraction,
    /// It refuses requests by the total memory of the device, which may differ from rank to rank.
    #[error(
        "it refuses requests by the device's total memory, which may differ between ranks; set total_limit_mb instead"
    )]
    DeviceTotal,
    /// It does not apply to the selected segments.
    #[error("it applies to fixed segments, but the segments are expandable")]
    WrongSegments,
}
