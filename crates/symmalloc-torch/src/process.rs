//! The allocators behind PyTorch's entry points: one per device of this process, created at its first use and never destroyed.
//!
//! PyTorch frees tensors during process exit, after static destructors have run and after CUDA was shut down. Because the allocators are
//! never destroyed, they accept these calls. The driver calls then fail, and `free` does not report the failures.
//!
//! A forked child cannot use CUDA and has no allocators. Allocating in a child returns an error. Calls that release something have no
//! effect, and take no lock, because a thread that does not exist in the child may have held the lock at the fork.

use crate::device::{DeviceAllocator, Tracing};
use crate::error::Error;
use crate::settings::TorchSettings;
use std::ffi::c_int;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};
use symmalloc_files::is_forked;

/// The environment variable with the settings.
pub(crate) const CONF_VARIABLE: &str = "SYMMALLOC_CONF";

/// The maximum number of devices, as in PyTorch. With this limit, a table without a lock can hold the allocators.
const DEVICES_MAX: usize = 128;

static DEVICES: [AtomicPtr<DeviceAllocator>; DEVICES_MAX] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; DEVICES_MAX];

/// The settings, from [`configure`] or the environment. Locked while an allocator is created.
static SETTINGS: Mutex<Option<TorchSettings>> = Mutex::new(None);

/// Returns the allocator of a device, if it was created.
#[inline]
pub(crate) fn existing(device: c_int) -> Option<&'static DeviceAllocator> {
    let slot = DEVICES.get(usize::try_from(device).ok()?)?;
    // SAFETY: the pointer is null, or points to a leaked allocator.
    unsafe { slot.load(Ordering::Acquire).as_ref() }
}

/// Returns the existing allocators in order of their devices.
pub(crate) fn all() -> impl Iterator<Item = &'static DeviceAllocator> {
    (0..DEVICES_MAX as c_int).filter_map(existing)
}

/// Returns the allocator of a device. The first use creates it with the current settings.
#[inline]
pub(crate) fn allocator(device: c_int) -> Result<&'static DeviceAllocator, Error> {
    match existing(device) {
        Some(allocator) => Ok(allocator),
        None => make(device),
    }
}

#[cold]
fn make(device: c_int) -> Result<&'static DeviceAllocator, Error> {
    if is_forked() {
        return Err(Error::Forked);
    }
    let expected = "a device number";
    let out_of_range = || Error::Argument { argument: "device", value: device.into(), expected };
    let ordinal = usize::try_from(device).map_err(|_| out_of_range())?;
    let slot = DEVICES.get(ordinal).ok_or_else(out_of_range)?;
    let mut settings = SETTINGS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(allocator) = existing(device) {
        return Ok(allocator);
    }
    let current = match &*settings {
        Some(settings) => settings.clone(),
        None => settings.insert(from_environment()?).clone(),
    };
    watch_forks();
    let allocator = Box::leak(Box::new(DeviceAllocator::new(ordinal, current, Tracing::FromFirstUse)?));
    slot.store(allocator, Ordering::Release);
    Ok(allocator)
}

/// Configures allocators that are created later. Overrides the environment.
pub(crate) fn configure(text: &str) -> Result<(), Error> {
    if is_forked() {
        return Err(Error::Forked);
    }
    let settings = TorchSettings::of_process(text)?;
    let mut current = SETTINGS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(allocator) = all().next() {
        return Err(Error::TooLate { device: allocator.ordinal() });
    }
    *current = Some(settings);
    Ok(())
}

/// Returns the settings. If none were configured, reads them from the environment, and keeps them from then on.
pub(crate) fn settings() -> Result<TorchSettings, Error> {
    if is_forked() {
        return Err(Error::Forked);
    }
    let mut settings = SETTINGS.lock().unwrap_or_else(PoisonError::into_inner);
    match &*settings {
        Some(settings) => Ok(settings.clone()),
        None => Ok(settings.insert(from_environment()?).clone()),
    }
}

pub(crate) fn from_environment() -> Result<TorchSettings, Error> {
    match std::env::var(CONF_VARIABLE) {
        Ok(text) => Ok(TorchSettings::of_process(&text)?),
        Err(std::env::VarError::NotPresent) => Ok(TorchSettings::of_process("")?),
        Err(std::env::VarError::NotUnicode(_)) => Err(Error::NotText { argument: CONF_VARIABLE }),
    }
}

/// Detects processes that are forked later, and removes the allocators from them.
pub(crate) fn watch_forks() {
    static IS_WATCHING: std::sync::Once = std::sync::Once::new();
    IS_WATCHING.call_once(|| {
        symmalloc_files::watch_forks();
        // SAFETY: the function only stores to atomics, which a child of a process with threads may do.
        let refused = unsafe { libc::pthread_atfork(None, None, Some(forget_all)) };
        if refused != 0 {
            tracing::warn!(name: "fork.unwatched", target: "symmalloc", "out of memory: forked processes are not detected");
        }
    });
}

/// Runs in a child. The allocators belong to the parent, and their locks may have been held by threads that do not exist in the child.
unsafe extern "C" fn forget_all() {
    DEVICES.iter().for_each(|slot| slot.store(std::ptr::null_mut(), Ordering::Relaxed));
}
