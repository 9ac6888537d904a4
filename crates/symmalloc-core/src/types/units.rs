//! Sizes: the unit in which the allocator counts, and the limits that follow from it.
//!
//! Blocks start and end at multiples of [`UNIT_BYTES`], PyTorch's `kMinBlockSize`. Inside the core sizes and offsets
//! are counted in units of 32 bits, so a free block's whole key (size, sequence, offset) and its slot fit into one
//! 128-bit integer; at the public edge everything is bytes.

/// The smallest block and the alignment of every block, in bytes.
pub const UNIT_BYTES: u64 = 512;

/// One KiB in bytes.
pub const KIB: u64 = 1 << 10;
/// One MiB in bytes.
pub const MIB: u64 = 1 << 20;
/// One GiB in bytes.
pub const GIB: u64 = 1 << 30;

/// The largest segment, and so the largest request, in bytes: 1 TiB. Units of a segment fit into 31 bits.
pub const SEGMENT_BYTES_MAX: u64 = 1 << 40;

/// A size or an offset, in units of [`UNIT_BYTES`].
pub(crate) type Units = u32;

/// Units in so many bytes. The caller has checked that `bytes` is a multiple of the unit and within a segment.
#[inline]
pub(crate) fn units(bytes: u64) -> Units {
    debug_assert!(bytes.is_multiple_of(UNIT_BYTES) && bytes <= SEGMENT_BYTES_MAX);
    (bytes / UNIT_BYTES) as Units
}

/// Bytes in so many units.
#[inline]
pub(crate) fn bytes(units: Units) -> u64 {
    u64::from(units) * UNIT_BYTES
}
