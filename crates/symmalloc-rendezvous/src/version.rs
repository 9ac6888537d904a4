//! The version of the rendezvous.

/// Version of the messages. Increment it when they change, but keep the length of the hello and of the head.
pub(crate) const VERSION: u8 = 6;
