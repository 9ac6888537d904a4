//! All tests of the harness but those that need a process of their own. Those of one file: `cargo test -p symmalloc-harness
//! golden`.

mod agreement;
mod agreement_protocol;
mod conformance;
mod digests;
mod exhaustive;
mod faults;
mod golden;
mod layout;
mod metrics;
mod misuse;
mod model;
mod observers;
mod plans;
mod ranks;
mod recording;
mod reports;
mod revival;
mod rooms;
mod seeds;
mod shared;
mod simulate;
mod stitching;
mod stories;
mod vocabulary;
mod waits;
