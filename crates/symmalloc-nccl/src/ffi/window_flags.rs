//! Flags of windows, and the versions of NCCL that know them.

use crate::ffi::version::Capability;
use std::ffi::c_int;
use std::ops::BitOr;

/// `NCCL_WIN_COLL_SYMMETRIC`.
const COLL_SYMMETRIC: c_int = 1;

/// Flags of a window in addition to `NCCL_WIN_COLL_SYMMETRIC`, which every window without [`GIN_ONLY`](Self::GIN_ONLY) has. Combine them
/// with `|`. All ranks must pass the same flags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WindowFlags(u8);

impl WindowFlags {
    /// No flags.
    pub const NONE: WindowFlags = WindowFlags(0);
    /// `NCCL_WIN_STRICT_ORDERING`: operations that kernels perform on the window over the network stay in order. Requires NCCL 2.29.7.
    pub const STRICT_ORDERING: WindowFlags = WindowFlags(0x02);
    /// `NCCL_WIN_GIN_ONLY`: the window serves only communication from kernels over the network (GIN). Collectives use its memory as plain
    /// buffers. Requires NCCL 2.32.3.
    pub const GIN_ONLY: WindowFlags = WindowFlags(0x04);

    /// Returns `true` if these flags include all of `other`.
    pub fn contains(self, other: WindowFlags) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the flags as NCCL's integer, with `NCCL_WIN_COLL_SYMMETRIC` unless it contradicts them: NCCL refuses that flag together with
    /// one that restricts the window's use.
    pub(crate) fn raw(self) -> c_int {
        let symmetric = if self.contains(WindowFlags::GIN_ONLY) { 0 } else { COLL_SYMMETRIC };
        symmetric | c_int::from(self.0)
    }

    /// Returns the capabilities that the flags require of libnccl.
    pub(crate) fn required(self) -> impl Iterator<Item = Capability> {
        let all = [
            (WindowFlags::STRICT_ORDERING, Capability::StrictOrderingWindows),
            (WindowFlags::GIN_ONLY, Capability::NetworkOnlyWindows),
        ];
        all.into_iter().filter(move |(flag, _)| self.contains(*flag)).map(|(_, capability)| capability)
    }
}

impl BitOr for WindowFlags {
    type Output = WindowFlags;

    fn bitor(self, other: WindowFlags) -> WindowFlags {
        WindowFlags(self.0 | other.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_have_the_values_of_nccl_h_and_require_their_capabilities() {
        let both = WindowFlags::STRICT_ORDERING | WindowFlags::GIN_ONLY;
        assert_eq!([WindowFlags::NONE, WindowFlags::STRICT_ORDERING, both].map(WindowFlags::raw), [1, 3, 6]);
        assert!(both.contains(WindowFlags::GIN_ONLY) && !WindowFlags::GIN_ONLY.contains(both));
        assert_eq!(WindowFlags::NONE.required().count(), 0);
        let required: Vec<_> = both.required().collect();
        assert_eq!(required, [Capability::StrictOrderingWindows, Capability::NetworkOnlyWindows]);
    }
}
