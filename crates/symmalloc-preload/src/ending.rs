//! The end of a context: all of its memory is returned to the device.

use crate::context::Context;
use crate::live::{LIVE, Live};
use crate::{exit, libcuda, pools, recordings, streams};

/// Ends a context that is about to be reset.
pub(crate) fn end(context: &'static Context) {
    if context.is_gone() {
        return;
    }
    exit::keep(context);
    // The reset releases the memory.
    exit::report_damage(context);
    // The device may still use the memory. If the context is lost, the call fails and the context ends anyway.
    let _lost = context.allocator().device().synchronize();
    for found in LIVE.all().into_iter().filter(|found| std::ptr::eq(found.known.context, context)) {
        if let Some(found) = LIVE.take(found.address) {
            let Live { handle, .. } = found.known;
            let _refused = context.allocator().core().free(handle);
        }
    }
    let _refused = context.allocator().trim_all();
    recordings::stop(context.allocator());
    context.close();
    pools::end_all_of(context.id());
    streams::forget_all_of(context);
    // The allocator is never dropped, so its own reference to the context is released here.
    if let Some(driver) = libcuda::driver() {
        // SAFETY: `CudaDevice::new` retained the context.
        let _refused = unsafe { driver.primary_release(context.device()) };
    }
}
