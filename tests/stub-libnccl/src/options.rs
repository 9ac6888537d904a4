//! The version and features of NCCL, from the environment.

use std::net::IpAddr;
use std::sync::OnceLock;

/// The options of a process.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// `STUB_NCCL_VERSION`: 22809 by default, which is 2.28.9.
    pub version: i32,
    /// `STUB_NCCL_NO_SYMMETRIC`: devices cannot reach each other's memory.
    pub no_symmetric: bool,
    /// `STUB_NCCL_WIN_STRIDE`: symmetric address space in bytes. By default a device's memory, rounded up to 4 GiB.
    pub stride_bytes: Option<u64>,
    /// `STUB_NCCL_CHECK_MODE`: the same as `NCCL_CHECK_MODE=DEBUG_GLOBAL`.
    pub checks: bool,
    /// `STUB_NCCL_REUSE_WINDOWS`: a communicator's next window gets the lowest handle that was freed.
    pub reuses_windows: bool,
    /// `STUB_NCCL_CONNECT_BLOCKS`: a communicator's first collective waits for the other ranks on the host.
    pub connect_blocks: bool,
    /// `STUB_NCCL_SOCKET_IP`: processes reach each other over TCP at this address of this machine.
    pub socket_ip: Option<IpAddr>,
}

/// Returns the options of this process.
pub fn options() -> &'static Options {
    static OPTIONS: OnceLock<Options> = OnceLock::new();
    OPTIONS.get_or_init(|| {
        let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
        let flag = |name| std::env::var_os(name).is_some();
        Options {
            version: number("STUB_NCCL_VERSION").map_or(22_809, |version| version as i32),
            no_symmetric: flag("STUB_NCCL_NO_SYMMETRIC"),
            stride_bytes: number("STUB_NCCL_WIN_STRIDE"),
            checks: flag("STUB_NCCL_CHECK_MODE")
                || std::env::var("NCCL_CHECK_MODE").is_ok_and(|mode| mode.eq_ignore_ascii_case("DEBUG_GLOBAL")),
            reuses_windows: flag("STUB_NCCL_REUSE_WINDOWS"),
            connect_blocks: flag("STUB_NCCL_CONNECT_BLOCKS"),
            socket_ip: std::env::var("STUB_NCCL_SOCKET_IP")
                .ok()
                .map(|text| text.parse().expect("it should be an address")),
        }
    })
}
