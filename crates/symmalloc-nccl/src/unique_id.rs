//! The id that the ranks of a communicator have in common before they know each other.

use crate::error::CommError;
use crate::library::Nccl;
use std::ffi::c_char;
use std::fmt;

/// NCCL's variable for the address of rank 0. Set, every rank gets the same id from NCCL.
pub(crate) const COMM_ID_VARIABLE: &str = "NCCL_COMM_ID";

/// What all ranks of one communicator give to connect: 128 bytes that one rank gets from NCCL and the others from it.
///
/// [`Launch::unique_id`](crate::Launch::unique_id) brings one to all ranks of a job without a side channel.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UniqueId {
    bytes: [u8; Self::BYTES],
}

impl UniqueId {
    /// Size of an id in bytes.
    pub const BYTES: usize = 128;

    /// A new id from NCCL. Where `NCCL_COMM_ID` is set, it is the same id on every rank and at every call; otherwise it is
    /// another one at every call, and the process that made it must live until all ranks have connected.
    ///
    /// # Errors
    /// When NCCL cannot be used, or finds no network interface.
    pub fn new() -> Result<Self, CommError> {
        Self::from_nccl(Nccl::load()?)
    }

    /// As [`new`](Self::new), from this library.
    ///
    /// # Errors
    /// When NCCL finds no network interface.
    pub fn from_nccl(nccl: &Nccl) -> Result<Self, CommError> {
        Ok(UniqueId { bytes: nccl.calls().unique_id()? })
    }

    /// An id that came from another rank.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        UniqueId { bytes }
    }

    /// An id in C's form, for example `cudarc::nccl::Id::internal()`.
    pub fn from_c_chars(internal: &[c_char; Self::BYTES]) -> Self {
        UniqueId { bytes: internal.map(|byte| byte as u8) }
    }

    /// The bytes, to be sent to other ranks.
    pub fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.bytes
    }

    /// The id in C's form, for example for `cudarc::nccl::Id::uninit`.
    pub fn to_c_chars(self) -> [c_char; Self::BYTES] {
        self.bytes.map(|byte| byte as c_char)
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // NCCL's handle begins with a random number and an address; the rest is zero.
        f.write_str("UniqueId(")?;
        for byte in &self.bytes[..16] {
            write!(f, "{byte:02x}")?;
        }
        f.write_str("..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_c_chars_are_one_id() {
        let bytes: [u8; UniqueId::BYTES] = std::array::from_fn(|index| (index * 2) as u8);
        let id = UniqueId::from_bytes(bytes);
        assert_eq!(UniqueId::from_c_chars(&id.to_c_chars()), id);
        assert_eq!(id.as_bytes(), &bytes);
        assert_eq!(
            UniqueId::from_c_chars(cudarc::nccl::Id::uninit(id.to_c_chars()).internal()),
            id,
            "and one for cudarc"
        );
        assert_eq!(format!("{id:?}"), "UniqueId(00020406080a0c0e10121416181a1c1e..)");
    }
}
