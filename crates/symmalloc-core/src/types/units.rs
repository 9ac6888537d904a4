//! Sizes: the unit in which the allocator counts, and the limits that follow from it.
//!
//! Blocks start and end at multiples of [`UNIT_BYTES`], PyTorch's `kMinBlockSize`. Inside the core, sizes and offsets
//! are 32-bit numbers of units, so the key of a free block (size, sequence, offset) and its slot fit into two words.
//! The public interface uses bytes.

use std::fmt;

/// The smallest block and the alignment of every block, in bytes.
pub const UNIT_BYTES: u64 = 512;

/// One KiB in bytes.
pub const KIB: u64 = 1 << 10;
/// One MiB in bytes.
pub const MIB: u64 = 1 << 20;
/// One GiB in bytes.
pub const GIB: u64 = 1 << 30;

/// An amount of memory formatted for people, in the largest of EiB, PiB, TiB, GiB, MiB and KiB that gives at least one.
///
/// # Examples
/// ```
/// use symmalloc::units::Amount;
///
/// assert_eq!([1023, 3 << 19, 5 << 30].map(|bytes| Amount(bytes).to_string()), ["1023 B", "1.50 MiB", "5.00 GiB"]);
/// ```
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Amount(
    /// Bytes.
    pub u64,
);

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, u64); 6] =
            [("EiB", 1 << 60), ("PiB", 1 << 50), ("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)];
        match UNITS.iter().find(|(_, unit)| self.0 >= *unit) {
            Some((name, unit)) => write!(f, "{:.2} {name}", self.0 as f64 / *unit as f64),
            None => write!(f, "{} B", self.0),
        }
    }
}

/// A number with its noun, as `1 pool` or `2 pools`.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Counted<'a>(
    /// The number.
    pub u64,
    /// The noun in the singular.
    pub &'a str,
);

impl fmt::Display for Counted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}{}", self.0, self.1, if self.0 == 1 { "" } else { "s" })
    }
}

/// Returns the pronoun for a number of things.
pub(crate) fn them(number: u64) -> &'static str {
    if number == 1 { "it" } else { "them" }
}

/// The size of the largest segment, and therefore of the largest request, in bytes: 1 TiB. Its number of units fits into 32
/// bits.
pub const SEGMENT_BYTES_MAX: u64 = 1 << 40;

/// A size or an offset in units of [`UNIT_BYTES`].
pub(crate) type Units = u32;

/// Converts bytes to units. The caller has checked that `bytes` is a multiple of the unit and fits into a segment.
#[inline]
pub(crate) fn units(bytes: u64) -> Units {
    debug_assert!(bytes.is_multiple_of(UNIT_BYTES) && bytes <= SEGMENT_BYTES_MAX);
    (bytes / UNIT_BYTES) as Units
}

/// Converts units to bytes.
#[inline]
pub(crate) fn bytes(units: Units) -> u64 {
    u64::from(units) * UNIT_BYTES
}
