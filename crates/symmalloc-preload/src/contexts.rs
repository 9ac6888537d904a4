//! Lookup and creation of contexts: a device's primary context gets an allocator at the first allocation in it.

use crate::context::Context;
use crate::libcuda::{self, Driver};
use crate::pools::{MemPool, PoolRole};
use crate::settings::{Settings, settings};
use crate::{forks, peers, recordings};
use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};
use symmalloc_core::Retry;
use symmalloc_cuda::{CudaAllocator, CudaDevice, CudaError};
use symmalloc_files::say;

/// Returns the calling thread's current context, if it is served.
#[inline]
pub(crate) fn current() -> Option<&'static Context> {
    of(libcuda::driver()?.current()?)
}

/// Returns a context by its handle, if it is served.
#[inline]
pub(crate) fn of(raw: usize) -> Option<&'static Context> {
    match Context::existing(raw) {
        Some(context) => Some(context),
        None => make(raw),
    }
}

#[cold]
fn make(raw: usize) -> Option<&'static Context> {
    static IS_MAKING: Mutex<()> = Mutex::new(());
    let driver = libcuda::driver()?;
    let device = driver.device_of(raw)?;
    let (mut flags, mut active) = (0, 0);
    // SAFETY: the pointers are valid for writing.
    unsafe { driver.primary_state(device, &raw mut flags, &raw mut active) }.ok()?;
    let settings = settings().filter(|settings| !settings.is_watched && active != 0)?;
    // Otherwise, the program created this context, while the primary context is also active.
    driver.primary_of(device).filter(|primary| *primary == raw)?;
    let _one_at_a_time = IS_MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(context) = Context::existing(raw) {
        return Some(context);
    }
    match new(driver, raw, device, settings) {
        Ok(context) => {
            let context: &'static Context = Box::leak(Box::new(context));
            forks::watch();
            if let Err(error) = context.default_pool().make(context.id(), context.allocator()) {
                say(format_args!("the driver serves the memory pool of device {device}: {error}"));
            }
            context.find_current_pool(driver);
            let is_known = context.publish();
            peers::grant_to(context);
            is_known.then_some(context)
        }
        Err(error) => {
            say(format_args!("the driver serves device {device}: {error}"));
            None
        }
    }
}

fn new(driver: &Driver, raw: usize, ordinal: c_int, settings: &Settings) -> Result<Context, CudaError> {
    let device = CudaDevice::new(usize::try_from(ordinal).unwrap_or(0))?;
    let allocator = CudaAllocator::new(&device, settings.config.clone())?;
    allocator.set_failure_callback(|core, _| {
        // If the driver fails to release some of the memory, the rest may suffice.
        let _kept = core.trim_all();
        Retry::IfReleased
    });
    recordings::start(&allocator, settings);
    let host = allocator.register_host_stream()?;
    let mut handle = 0;
    // SAFETY: the pointer is valid for writing. Devices without pools report none, and support no call that would use
    // one.
    let _missing = unsafe { driver.default_pool(&raw mut handle, ordinal) };
    let default_pool = MemPool::of_driver(handle, ordinal, PoolRole::Default);
    Ok(Context::new(raw, ordinal, allocator, host, default_pool))
}
