//! The structs of nccl.h, with the same layout.

use std::ffi::{CStr, c_char, c_int, c_uint};

/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: c_int = c_int::MIN;

/// `ncclUniqueId`, which is passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct RawUniqueId {
    pub(super) internal: [u8; 128],
}

/// `ncclConfig_t` as of NCCL 2.27.
///
/// The struct has only ever grown at its end. A library copies at most `size` bytes and at most the size of its own struct, and fills in
/// defaults for fields that `version` did not have. This layout therefore works with 2.18, which reads it up to `split_share`, and with
/// all newer versions, which treat missing fields as unset.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct RawConfig {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
    comm_name: *const c_char,
    collnet_enable: c_int,
    cta_policy: c_int,
    shrink_share: c_int,
    nvls_ctas: c_int,
}

impl RawConfig {
    /// Sets only the blocking flag and the name.
    ///
    /// NCCL keeps the pointer to the name, which must live as long as the communicator.
    pub(super) fn new(blocking: bool, comm_name: Option<&CStr>) -> Self {
        RawConfig {
            size: size_of::<RawConfig>(),
            magic: 0xcafe_beef,
            version: 22_700,
            blocking: c_int::from(blocking),
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
            comm_name: comm_name.map_or(std::ptr::null(), CStr::as_ptr),
            collnet_enable: UNDEFINED,
            cta_policy: UNDEFINED,
            shrink_share: UNDEFINED,
            nvls_ctas: UNDEFINED,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn the_configuration_is_laid_out_as_in_nccl_h() {
        // From nccl.h of 2.27.3, on a 64-bit machine; 2.18 ends before traffic_class.
        assert_eq!(offset_of!(RawConfig, size), 0);
        assert_eq!(offset_of!(RawConfig, magic), 8);
        assert_eq!(offset_of!(RawConfig, version), 12);
        assert_eq!(offset_of!(RawConfig, blocking), 16);
        assert_eq!(offset_of!(RawConfig, cga_cluster_size), 20);
        assert_eq!(offset_of!(RawConfig, min_ctas), 24);
        assert_eq!(offset_of!(RawConfig, max_ctas), 28);
        assert_eq!(offset_of!(RawConfig, net_name), 32);
        assert_eq!(offset_of!(RawConfig, split_share), 40);
        assert_eq!(offset_of!(RawConfig, traffic_class), 44);
        assert_eq!(offset_of!(RawConfig, comm_name), 48);
        assert_eq!(offset_of!(RawConfig, collnet_enable), 56);
        assert_eq!(offset_of!(RawConfig, cta_policy), 60);
        assert_eq!(offset_of!(RawConfig, shrink_share), 64);
        assert_eq!(offset_of!(RawConfig, nvls_ctas), 68);
        assert_eq!(size_of::<RawConfig>(), 72);
        assert_eq!((size_of::<RawUniqueId>(), align_of::<RawUniqueId>()), (128, 1));
    }

    #[test]
    fn a_configuration_sets_nothing_but_what_it_is_told() {
        let config = RawConfig::new(false, None);
        assert_eq!((config.size, config.magic, config.version), (72, 0xcafe_beef, 22_700));
        assert_eq!(config.blocking, 0);
        assert!(config.net_name.is_null() && config.comm_name.is_null());
        let unset = [
            config.cga_cluster_size,
            config.min_ctas,
            config.max_ctas,
            config.split_share,
            config.traffic_class,
            config.collnet_enable,
            config.cta_policy,
            config.shrink_share,
            config.nvls_ctas,
        ];
        assert_eq!(unset, [c_int::MIN; 9]);
    }
}
