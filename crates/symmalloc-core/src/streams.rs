//! Streams: the waits between them, and the fences of free blocks (rule D3).

pub(crate) mod clocks;
pub(crate) mod fences;
