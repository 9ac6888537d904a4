//! Doctests for every Rust listing in the pages and READMEs: `cargo test -p symmalloc-book`.
//!
//! Listings that work without a GPU run. A listing that needs a device is only compiled: it is either a function that takes the device as a
//! parameter, or is marked `no_run`.
#![cfg(doctest)]

include!(concat!(env!("OUT_DIR"), "/pages.rs"));
