//! The allocators behind PyTorch's entry points: one per device of this process, made at its first use and never destroyed.
//!
//! PyTorch frees tensors while the process ends, after static destructors have run and after CUDA is gone. What lives for ever
//! can be asked at any time; the driver then refuses, and `free` says so to nobody.
//!
//! A child that was forked has no CUDA. It finds no allocators here: allocating is an error, freeing does nothing.

use crate::device::{DeviceAllocator, Tracing};
use crate::error::Error;
use crate::settings::TorchSettings;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

/// The environment's settings.
pub(crate) const CONF_VARIABLE: &str = "SYMMALLOC_CONF";

/// Devices that can be found without a lock; PyTorch has no more.
const DEVICES_MAX: usize = 128;

static DEVICES: [AtomicPtr<DeviceAllocator>; DEVICES_MAX] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; DEVICES_MAX];

/// What [`configure`] said. Held while an allocator is made.
static SETTINGS: Mutex<Option<TorchSettings>> = Mutex::new(None);

/// Whether this process is a child of the one that made the allocators.
static IS_FORKED: AtomicBool = AtomicBool::new(false);

/// The allocator of a device, if it was made.
#[inline]
pub(crate) fn existing(device: c_int) -> Option<&'static DeviceAllocator> {
    let place = DEVICES.get(usize::try_from(device).ok()?)?;
    // SAFETY: null, or a leaked allocator.
    unsafe { place.load(Ordering::Acquire).as_ref() }
}

/// The allocators that were made, by device.
pub(crate) fn all() -> impl Iterator<Item = &'static DeviceAllocator> {
    (0..DEVICES_MAX as c_int).filter_map(existing)
}

/// The allocator of a device, made with the settings that hold if it is the first use.
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
    let place = DEVICES.get(ordinal).ok_or_else(out_of_range)?;
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
    place.store(allocator, Ordering::Release);
    Ok(allocator)
}

/// Settings for allocators that are made later, in place of the environment's.
pub(crate) fn configure(text: &str) -> Result<(), Error> {
    let settings: TorchSettings = text.parse()?;
    let mut current = SETTINGS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(allocator) = all().next() {
        return Err(Error::TooLate { device: allocator.ordinal() });
    }
    *current = Some(settings);
    Ok(())
}

/// The settings that hold. They do so from now on.
pub(crate) fn settings() -> Result<TorchSettings, Error> {
    let mut settings = SETTINGS.lock().unwrap_or_else(PoisonError::into_inner);
    match &*settings {
        Some(settings) => Ok(settings.clone()),
        None => Ok(settings.insert(from_environment()?).clone()),
    }
}

pub(crate) fn from_environment() -> Result<TorchSettings, Error> {
    match std::env::var(CONF_VARIABLE) {
        Ok(text) => Ok(text.parse::<TorchSettings>()?),
        Err(std::env::VarError::NotPresent) => Ok(TorchSettings::default()),
        Err(std::env::VarError::NotUnicode(_)) => Err(Error::NotText { argument: CONF_VARIABLE }),
    }
}

#[inline]
pub(crate) fn is_forked() -> bool {
    IS_FORKED.load(Ordering::Relaxed)
}

/// Sees to it that a child that is forked from now on knows that it is one.
pub(crate) fn watch_forks() {
    static IS_WATCHING: std::sync::Once = std::sync::Once::new();
    IS_WATCHING.call_once(|| {
        // SAFETY: the function does nothing but store to atomics, which a child of a process with threads may do.
        let refused = unsafe { libc::pthread_atfork(None, None, Some(forget_all)) };
        if refused != 0 {
            tracing::warn!(name: "fork.unwatched", target: "symmalloc", "the system has no memory to watch forks");
        }
    });
}

/// In a child: the allocators are the parent's, and their locks may be held by threads that the child does not have.
unsafe extern "C" fn forget_all() {
    IS_FORKED.store(true, Ordering::Relaxed);
    DEVICES.iter().for_each(|place| place.store(std::ptr::null_mut(), Ordering::Relaxed));
}
