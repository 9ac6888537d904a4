//! Versions of NCCL and their capabilities.

use std::fmt;

/// A version of NCCL. Versions are ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub struct NcclVersion {
    /// Major version; always 2 so far.
    pub major: u32,
    /// Minor version, which adds features.
    pub minor: u32,
    /// Patch version.
    pub patch: u32,
}

/// A capability that only some versions of NCCL have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Capability {
    /// `ncclCommRegister`: buffers registered for one communicator (2.19).
    BufferRegistration,
    /// `ncclCommWindowRegister`: symmetric windows (2.27).
    Windows,
    /// `ncclCommShrink`: a communicator of the remaining ranks, without the ranks that leave (2.27).
    Shrink,
    /// An error for a window that cannot be symmetric (2.29). Earlier versions return a plain registration that looks like a window.
    WindowRefusal,
    /// `ncclCommRevoke`: a communicator's operations can be stopped without freeing it, even while another thread hangs in a call (2.28.7).
    Revoke,
    /// `ncclCommGrow`: a communicator with more ranks (2.29.2).
    Grow,
    /// `NCCL_WIN_STRICT_ORDERING`: windows whose operations on the network stay in order (2.29.7).
    StrictOrderingWindows,
    /// `NCCL_WIN_GIN_ONLY`: windows that serve only kernels that communicate over the network (2.32.3).
    NetworkOnlyWindows,
    /// Windows can be registered while a stream is being captured into a graph (2.30.7).
    RegistrationInCapture,
    /// `ncclCommSuspend` and `ncclCommResume`: an idle communicator's memory can be released (2.29.7).
    Suspension,
}

impl NcclVersion {
    /// The oldest version that this crate works with: the first with `ncclCommSplit`.
    pub const OLDEST: NcclVersion = NcclVersion::new(2, 18, 1);

    /// Creates a version from its numbers.
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        NcclVersion { major, minor, patch }
    }

    /// Decodes the code of `ncclGetVersion`: 22809 is 2.28.9, and 2808 is 2.8.8.
    pub const fn from_code(code: u32) -> Self {
        let major = if code < 10_000 { code / 1000 } else { code / 10_000 };
        let rest = if code < 10_000 { code % 1000 } else { code % 10_000 };
        NcclVersion { major, minor: rest / 100, patch: rest % 100 }
    }
}

impl fmt::Display for NcclVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl Capability {
    /// Returns the first version that has the capability.
    pub fn since(self) -> NcclVersion {
        match self {
            Capability::BufferRegistration => NcclVersion::new(2, 19, 1),
            Capability::Windows | Capability::Shrink => NcclVersion::new(2, 27, 3),
            Capability::Revoke => NcclVersion::new(2, 28, 7),
            Capability::WindowRefusal => NcclVersion::new(2, 29, 1),
            Capability::RegistrationInCapture => NcclVersion::new(2, 30, 7),
            Capability::Grow => NcclVersion::new(2, 29, 2),
            Capability::Suspension | Capability::StrictOrderingWindows => NcclVersion::new(2, 29, 7),
            Capability::NetworkOnlyWindows => NcclVersion::new(2, 32, 3),
        }
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Capability::BufferRegistration => "ncclCommRegister",
            Capability::Windows => "symmetric windows",
            Capability::Shrink => "ncclCommShrink",
            Capability::Revoke => "ncclCommRevoke",
            Capability::WindowRefusal => "refusal of windows that cannot be symmetric",
            Capability::RegistrationInCapture => "registration while a stream is captured",
            Capability::Suspension => "ncclCommSuspend",
            Capability::Grow => "ncclCommGrow",
            Capability::StrictOrderingWindows => "the window flag NCCL_WIN_STRICT_ORDERING",
            Capability::NetworkOnlyWindows => "the window flag NCCL_WIN_GIN_ONLY",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_decoded_as_nccl_encodes_them() {
        assert_eq!(NcclVersion::from_code(22_809), NcclVersion::new(2, 28, 9));
        assert_eq!(NcclVersion::from_code(23_007), NcclVersion::new(2, 30, 7));
        assert_eq!(NcclVersion::from_code(21_805), NcclVersion::new(2, 18, 5));
        assert_eq!(NcclVersion::from_code(20_903), NcclVersion::new(2, 9, 3));
        assert_eq!(NcclVersion::from_code(2_808), NcclVersion::new(2, 8, 8));
        assert_eq!(NcclVersion::from_code(22_809).to_string(), "2.28.9");
    }

    #[test]
    fn versions_compare_by_number_and_not_by_text() {
        assert!(NcclVersion::new(2, 9, 6) < NcclVersion::OLDEST);
        assert!(NcclVersion::new(2, 30, 7) > NcclVersion::new(2, 30, 3));
    }
}
