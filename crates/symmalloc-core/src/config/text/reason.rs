//! Reasons for which a known key is refused or has no effect.

/// The reason for which a known key is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyRefusal {
    /// The key would make ranks differ.
    #[error(
        "it frees by each block's local age and by what the device reports, so ranks would differ; use release_threshold_mb"
    )]
    LocalAge,
    /// The value requests the driver's own allocator.
    #[error("cudaMallocAsync is another allocator, whose addresses the driver chooses; use backend:native")]
    OtherAllocator,
    /// The key is PyTorch's and has no effect here.
    #[error("{0}")]
    NoEffect(IgnoredReason),
    /// The key belongs to the whole allocator.
    #[error("it holds for the whole allocator; state it in the allocator's configuration, not in a pool's")]
    WholeAllocator,
}

/// A key of PyTorch's that was accepted and has no effect here.
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

/// The reason for which a key of PyTorch's has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IgnoredReason {
    /// It configures PyTorch's driver calls, locks or host memory.
    #[error("it configures driver calls, locks or host memory, none of which decides a placement")]
    NotPlacement,
    /// It is a fraction of the device's memory, which may differ from rank to rank.
    #[error(
        "it is a share of the device's memory, which is not the same everywhere; state bytes with total_limit_mb or range_mb"
    )]
    DeviceFraction,
    /// It refuses requests by the total memory of the device, which may differ from rank to rank.
    #[error(
        "it refuses by the total memory of the device, which is not the same everywhere; total_limit_mb refuses by stated bytes"
    )]
    DeviceTotal,
    /// It applies to other segments than the chosen ones.
    #[error("it is for fixed segments, but expandable ones are chosen")]
    OtherSegments,
}
