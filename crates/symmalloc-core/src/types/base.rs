//! The base of a pool: the address at which all of the pool's memory starts, equal in every process.
//!
//! ```text
//!  0x1000_0000_0000        0x1100_0000_0000        0x1200_0000_0000                  0x5000_0000_0000
//!  ├─────── slot:0 ────────┼─────── slot:1 ────────┼─ ...                ─ slot:63 ──┤
//! ```
//!
//! A pool with a base owns the [`SLOT_BYTES`] addresses from there on. Slots only number such ranges, so that programs
//! do not need to agree on addresses. A base that is not the start of a slot overlaps one or two of them.

use crate::types::ids::PoolId;
use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;
use thiserror::Error;

/// Number of addresses that a pool with a base owns: 1 TiB.
pub const SLOT_BYTES: u64 = 1 << 40;

/// First address of slot 0. The addresses below belong to the program, its heap, and small reservations of the driver.
pub const FIRST_SLOT: u64 = 0x1000_0000_0000;

/// Number of slots. Linux loads position-independent programs at random addresses from `0x5555_5555_4000` on, and puts
/// libraries, stacks and reservations without a base above them. A slot there would be free in some processes only.
pub const SLOT_COUNT: u32 = 64;

/// A base is a multiple of this many bytes: 1 GiB. CUDA's driver aligns large reservations to more than a device's
/// granularity, to 32 MiB or more, and moves those at other addresses.
pub const BASE_ALIGNMENT_BYTES: u64 = 1 << 30;

/// End of the addresses that a driver can choose: 47 bits.
const ADDRESSES_END: u64 = 1 << 47;

/// The first address of a pool's memory. Equal bases are equal in every process and on every rank.
///
/// # Examples
/// ```
/// use symmalloc::base::Base;
///
/// let base: Base = "slot:1".parse()?;
/// assert_eq!(base.address(), 0x1100_0000_0000);
/// assert_eq!(base, Base::at(0x1100_0000_0000)?);
/// assert_eq!(base.to_string(), "slot:1");
/// assert_eq!(Base::at(0x2000_4000_0000)?.to_string(), "0x200040000000");
/// # Ok::<(), symmalloc::base::BaseError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Base(NonZeroU64);

impl Base {
    /// Returns the base of a slot.
    ///
    /// # Errors
    /// Returns [`BaseError::NoSuchSlot`] if `slot` is not below [`SLOT_COUNT`].
    pub fn slot(slot: u32) -> Result<Self, BaseError> {
        match slot {
            0..SLOT_COUNT => Base::at(FIRST_SLOT + u64::from(slot) * SLOT_BYTES),
            _ => Err(BaseError::NoSuchSlot { slot: slot.into() }),
        }
    }

    /// Returns the base at an address.
    ///
    /// # Errors
    /// Returns an error if the address is not a multiple of 1 GiB, or if fewer than [`SLOT_BYTES`] addresses follow it.
    pub fn at(address: u64) -> Result<Self, BaseError> {
        let nonzero = NonZeroU64::new(address).filter(|_| address.is_multiple_of(BASE_ALIGNMENT_BYTES));
        let base = nonzero.ok_or(BaseError::Unaligned { address, alignment_bytes: BASE_ALIGNMENT_BYTES })?;
        if address > ADDRESSES_END - SLOT_BYTES {
            return Err(BaseError::BeyondLimit { address });
        }
        Ok(Base(base))
    }

    /// Returns the first address.
    pub fn address(self) -> u64 {
        self.0.get()
    }

    /// Returns `true` if two pools with these bases would own a common address.
    pub fn overlaps(self, other: Base) -> bool {
        self.address().abs_diff(other.address()) < SLOT_BYTES
    }

    /// Returns the first slot that overlaps none of these bases.
    pub fn free_slot(bases: &(impl Iterator<Item = Base> + Clone)) -> Option<u32> {
        (0..SLOT_COUNT).find(|slot| {
            let base = Base::slot(*slot).expect("the slot exists");
            !bases.clone().any(|other| other.overlaps(base))
        })
    }

    /// Returns the number of the slot that starts here.
    pub fn slot_number(self) -> Option<u32> {
        let offset = self.address().checked_sub(FIRST_SLOT)?;
        let slot = (offset / SLOT_BYTES) as u32;
        (offset.is_multiple_of(SLOT_BYTES) && slot < SLOT_COUNT).then_some(slot)
    }
}

impl fmt::Display for Base {
    /// Writes `slot:N` if the base is the start of a slot, and the address otherwise.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.slot_number() {
            Some(slot) => write!(f, "slot:{slot}"),
            None => write!(f, "{:#x}", self.address()),
        }
    }
}

impl FromStr for Base {
    type Err = BaseError;

    /// Reads `slot:N`, or a hexadecimal address such as `0x200000000000`.
    fn from_str(text: &str) -> Result<Self, BaseError> {
        let is_digits = |digits: &str, radix| !digits.is_empty() && digits.chars().all(|digit| digit.is_digit(radix));
        if let Some(slot) = text.strip_prefix("slot:").filter(|slot| is_digits(slot, 10)) {
            let slot = slot.parse().unwrap_or(u64::MAX);
            return Base::slot(u32::try_from(slot).unwrap_or(u32::MAX)).map_err(|_| BaseError::NoSuchSlot { slot });
        }
        match text.strip_prefix("0x").filter(|digits| is_digits(digits, 16)) {
            Some(digits) => Base::at(u64::from_str_radix(digits, 16).unwrap_or(u64::MAX / 2 + 1)),
            None => Err(BaseError::Syntax),
        }
    }
}

/// A base that cannot be used. Nothing is reserved or mapped.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum BaseError {
    /// The text is not a valid base.
    #[error("a base must be slot:N, or a hexadecimal address such as 0x200000000000")]
    Syntax,
    /// There is no slot of this number.
    #[error("slot:{slot} does not exist: use slot:0 to slot:{}", SLOT_COUNT - 1)]
    NoSuchSlot {
        /// The given number.
        slot: u64,
    },
    /// The address is 0 or not aligned.
    #[error("the base {address:#x} must be a multiple of {alignment_bytes:#x}, and not 0: use a multiple, or slot:N")]
    Unaligned {
        /// The given address.
        address: u64,
        /// The required alignment, [`BASE_ALIGNMENT_BYTES`].
        alignment_bytes: u64,
    },
    /// The range of the base would end above the addresses that a driver can choose.
    #[error(
        "the base {address:#x} is too high: a pool's addresses must end at {ADDRESSES_END:#x} or below; use at most {:#x}, \
         or slot:N",
        ADDRESSES_END - SLOT_BYTES
    )]
    BeyondLimit {
        /// The given address.
        address: u64,
    },
    /// Something else uses an address of the range.
    #[error("base:{base} is occupied: {occupant}; {}", use_slot(*free_slot))]
    Occupied {
        /// The base.
        base: Base,
        /// The user of the range.
        occupant: Occupant,
        /// The first slot in which this process uses no address.
        free_slot: Option<u32>,
    },
    /// The backend cannot choose addresses: its memory comes from the driver or the program as a whole.
    #[error("this backend cannot choose virtual addresses: remove base, or use a device with virtual memory")]
    Unsupported,
    /// A driver call failed.
    #[error(
        "the addresses of base:{base} cannot be reserved: {call} failed with {code}; use another slot, or remove base"
    )]
    Driver {
        /// The base.
        base: Base,
        /// The driver call.
        call: &'static str,
        /// The driver's code; 0 if the backend returned other addresses than the base.
        code: i32,
    },
}

fn use_slot(free: Option<u32>) -> String {
    match free {
        Some(slot) => format!("use base:slot:{slot}, which is free in this process"),
        None => "no slot is free in this process: use an address between the mappings".into(),
    }
}

/// The user of addresses that a pool requested.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Occupant {
    /// Another pool of this process, possibly of another allocator or device.
    #[error("{pool} of device {device} in this process has base:{base}")]
    Pool {
        /// The pool.
        pool: PoolId,
        /// Ordinal of its device.
        device: usize,
        /// Its base.
        base: Base,
    },
    /// A mapping of the process, such as a library, a stack, or a reservation of the driver.
    #[error("{} is mapped at {start:#x} to {end:#x}", if name.is_empty() { "anonymous memory" } else { name })]
    Mapping {
        /// First address of the mapping.
        start: u64,
        /// End of the mapping.
        end: u64,
        /// Its name in `/proc/self/maps`: a path, `[stack]`, or nothing.
        name: Box<str>,
    },
    /// Unknown: the driver returned other addresses, and the process maps nothing there.
    #[error("the driver returned {returned:#x} instead, and no mapping of the process explains it")]
    Unknown {
        /// The address that the driver returned.
        returned: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_base_reads_back_and_has_one_spelling() {
        for text in ["slot:0", "slot:63", "0x40000000", "0x100040000000", "0x7f0000000000"] {
            assert_eq!(text.parse::<Base>().expect(text).to_string(), text);
        }
        assert_eq!("0x100000000000".parse::<Base>(), Base::slot(0));
        assert_eq!(Base::slot(63).expect("the last").address() + SLOT_BYTES, 0x5000_0000_0000);
        assert_eq!("0x500000000000".parse::<Base>().expect("aligned").slot_number(), None);
    }

    #[test]
    fn each_wrong_base_has_its_error() {
        let error = |text: &str| text.parse::<Base>().expect_err(text);
        for text in ["", "0", "slot", "slot:", "slot:-1", "slot:+1", "0x", "0xg", "0x+1", "100000000000", "slot:0 "] {
            assert_eq!(error(text), BaseError::Syntax, "{text:?}");
        }
        assert_eq!(error("slot:64"), BaseError::NoSuchSlot { slot: 64 });
        assert_eq!(error("slot:4294967296"), BaseError::NoSuchSlot { slot: 1 << 32 });
        assert_eq!(error("slot:99999999999999999999"), BaseError::NoSuchSlot { slot: u64::MAX });
        for address in [0, 0x1000, 0x1000_0010_0000, 0x2000_0020_0000, 0x2000_2000_0000] {
            let unaligned = BaseError::Unaligned { address, alignment_bytes: BASE_ALIGNMENT_BYTES };
            assert_eq!(error(&format!("{address:#x}")), unaligned);
        }
        for text in ["0x7f0040000000", "0x7fffc0000000", "0x800000000000", "0xffffffffc0000000", "0x10000000000000000"]
        {
            assert!(matches!(error(text), BaseError::BeyondLimit { .. }), "{text}");
        }
    }
}
