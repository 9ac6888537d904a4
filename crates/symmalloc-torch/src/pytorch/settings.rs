//! The settings of the process's allocators.

use crate::c_interface::arguments::{hand_out_text, required_text, write};
use crate::guard::report;
use crate::process;
use crate::status::symmalloc_status;
use std::ffi::c_char;
use symmalloc_core::config::{PlanPolicy, SegmentPolicy};

/// Configures the process's allocators, instead of `SYMMALLOC_CONF`. Call it before the first use of CUDA memory.
///
/// # Safety
/// `conf` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_torch_configure(conf: *const c_char) -> symmalloc_status {
    // SAFETY: the caller's contract.
    report(|| process::configure(unsafe { required_text(conf, "conf") }?))
}

/// Checks the current settings, to report their errors early.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_torch_check() -> symmalloc_status {
    report(|| process::settings().map(drop))
}

/// Writes the settings of all devices' allocators, including future ones. Release the text with `symmalloc_release_bytes`.
///
/// # Safety
/// `text` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_torch_settings(text: *mut *mut c_char) -> symmalloc_status {
    report(|| {
        let settings = process::settings()?.to_string();
        // SAFETY: the caller's contract.
        unsafe { hand_out_text(text, "text", &settings) }
    })
}

/// Properties of the settings of all devices' allocators, for callers that would otherwise parse the settings' text.
#[allow(non_camel_case_types, reason = "C's names")]
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct symmalloc_properties {
    /// `true` if the segments of the default pool grow.
    pub is_expandable: bool,
    /// `true` if the default pool learns plans from repeated steps.
    pub learns_plans: bool,
}

/// Writes properties of the settings.
///
/// # Safety
/// `out` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_torch_properties(out: *mut symmalloc_properties) -> symmalloc_status {
    report(|| {
        let settings = process::settings()?;
        let pool = settings.config.default_pool();
        let properties = symmalloc_properties {
            is_expandable: matches!(pool.segments(), SegmentPolicy::Expandable(_)),
            learns_plans: pool.plan() == PlanPolicy::Learn,
        };
        // SAFETY: the caller's contract.
        unsafe { write(out, "out", properties) }
    })
}
