//! Buffers: memory that is freed when it is dropped, on the device and pinned on the host.

mod block;
mod device_buffer;
mod pinned_buffer;
mod tracked_block;
mod uses;
mod view;

pub use device_buffer::{DeviceBuffer, RawDeviceBuffer};
pub use pinned_buffer::{PinnedAllocator, PinnedBuffer};
pub use view::{BufferView, BufferViewMut, KernelArg};
