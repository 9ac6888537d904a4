//! The id that the ranks of a communicator share before they connect.

use std::ffi::c_char;
use std::fmt;

/// NCCL's variable for the address of rank 0. If set, NCCL returns the same id to every rank.
pub(crate) const COMM_ID_VARIABLE: &str = "NCCL_COMM_ID";

/// The id with which all ranks of one communicator connect: 128 bytes that one rank obtains from NCCL and sends to the others.
///
/// [`for_job`](Self::for_job) distributes an id to all ranks of a job without a side channel.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UniqueId {
    bytes: [u8; Self::BYTES],
}

impl UniqueId {
    /// Size of an id in bytes.
    pub const BYTES: usize = 128;

    /// Creates an id from the bytes that another rank sent.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        UniqueId { bytes }
    }

    /// Creates an id from its C representation, for example `cudarc::nccl::Id::internal()`.
    pub fn from_c_chars(internal: &[c_char; Self::BYTES]) -> Self {
        UniqueId { bytes: internal.map(|byte| byte as u8) }
    }

    /// Returns the bytes, to be sent to other ranks.
    pub fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.bytes
    }

    /// Returns the C representation, for example for `cudarc::nccl::Id::uninit`.
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
