//! Buffers of device memory and of pinned host memory, which are freed when they are dropped.

mod block;
mod copies;
mod device_buffer;
mod lent;
mod part;
mod pinned_buffer;
mod slicing;
mod tracked_block;
mod uses;
mod view;

pub use device_buffer::{DeviceBuffer, RawDeviceBuffer};
pub use lent::{LentSlice, LentSliceMut};
pub use part::{BufferPart, SharedPart};
pub use pinned_buffer::{PinnedAllocator, PinnedBuffer};
pub use view::{BufferView, BufferViewMut, KernelArg};
