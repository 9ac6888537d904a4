//! Streams: what one has waited for of another, and what a free block's next user must wait for (rule D3).

pub(crate) mod clocks;
pub(crate) mod fences;
