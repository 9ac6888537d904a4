//! symmalloc under any CUDA program, unchanged: a library for `LD_PRELOAD`.
//!
//! It stands between a program and libcuda. The program's allocations and frees are served by `symmalloc-cuda`, one allocator for
//! each device; everything else is the driver's. `symmalloc run -- program` sets it up, and `docs/run-calls.md` says what is served.
//!
//! # Examples
//! ```sh
//! symmalloc run --stats -- ./program                        # served
//! symmalloc run --record job.trace.zst -- ./program         # only watched
//! ```
//!
//! # Implementation
//! ```text
//!             linked symbol, dlsym, cuGetProcAddress                  libcuda
//!   program ───────── symbols/ ─────────► calls/ ─┬─ not served ──────────────► driver
//!                                                 ├─ served.rs ─► contexts.rs ─► symmalloc-cuda ─► driver
//!                                                 ╰─ watch.rs: only recorded ─► driver
//! ```
//!
//! Nothing happens when the library is loaded, and nothing in a program that never asks for a call of libcuda.
//!
//! # What there is
//! | | |
//! |---|---|
//! | `symbols/` | every way to ask for a driver's call |
//! | `calls/` | the calls that are served, each with the driver's signature |
//! | `served.rs`, `pools.rs`, `peers.rs` | allocating and freeing; memory pools; devices that share |
//! | `context.rs`, `contexts.rs`, `ending.rs` | a context's allocator; contexts found and made; what happens when one is reset |
//! | `streams.rs`, `numbers.rs`, `captures.rs` | raw streams that come and go, by number; those that are captured |
//! | `ledger.rs`, `live.rs` | what is allocated, by address |
//! | `watch.rs`, `recordings.rs` | a program that is only recorded; the traces |
//! | `tally.rs`, `exit.rs` | what `symmalloc run` tells at the end |
//! | `settings.rs`, `outcome.rs`, `forks.rs`, `libcuda.rs` | the environment; errors as codes of the driver; children; libcuda |
//!
//! `unsafe` stands where the driver's or the C library's functions are called, looked up or taken the place of.

#[cfg(not(all(target_os = "linux", target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64"))))]
compile_error!("symmalloc-preload is for Linux with the GNU C library, on x86-64 and aarch64");

mod calls;
mod captures;
mod context;
mod contexts;
mod ending;
mod exit;
mod forks;
mod ledger;
mod libcuda;
mod live;
mod numbers;
mod outcome;
mod peers;
mod pools;
mod recordings;
mod served;
mod settings;
mod streams;
mod symbols;
mod tally;
mod watch;
