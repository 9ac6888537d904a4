//! Every Rust listing of the pages and READMEs is a doctest of this crate: `cargo test -p symmalloc-book`.
//!
//! A listing that works without a GPU runs. One that needs a device is a function that takes what it needs, or is marked
//! `no_run`; it is compiled.
#![cfg(doctest)]

include!(concat!(env!("OUT_DIR"), "/pages.rs"));
