//! A library for `LD_PRELOAD` that serves the device memory of unmodified CUDA programs with symmalloc.
//!
//! The library is interposed between a program and libcuda. `symmalloc-cuda` serves the program's allocations and frees, with one allocator
//! per device; the driver serves everything else. `symmalloc run -- program` sets it up, and `docs/run.md` lists the served calls.
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
//!   program ────────────────────────────► calls/ ─┬─ not served ──────────────► driver
//!                                                 ├─ served.rs ─► contexts.rs ─► symmalloc-cuda ─► driver
//!                                                 ╰─ watch.rs: only recorded ─► driver
//! ```
//!
//! A program looks up driver calls in three ways. Each of them finds this library's function for a served call:
//!
//! | lookup | interposed by |
//! |---|---|
//! | a linked symbol | this library exports the name, and is searched before libcuda |
//! | `dlsym`, `dlvsym` | `interposed.rs` |
//! | `cuGetProcAddress`, `cuGetProcAddress_v2` | `calls/proc_address.rs` |
//!
//! Loading the library has no effect by itself. A program that never looks up a call of libcuda runs unchanged.
//!
//! # Modules
//! | | |
//! |---|---|
//! | `interposed.rs`, `libc_symbols.rs` | the `dlsym` and `dlvsym` that a program finds; those of the C library |
//! | `calls/`, `served_call.rs` | the served calls, each with the driver's signature; the names and addresses of a call |
//! | `served.rs`, `pools.rs`, `peers.rs` | allocating and freeing; memory pools; peer access |
//! | `context.rs`, `contexts.rs`, `ending.rs` | a context's allocator; lookup and creation of contexts; the end of a context |
//! | `streams.rs`, `numbers.rs`, `captures.rs` | raw streams and their numbers; captures in progress |
//! | `ledger.rs`, `live.rs` | live allocations by address |
//! | `watch.rs`, `recordings.rs` | recording without serving; the traces |
//! | `tally.rs`, `exit.rs` | counters, and the report to `symmalloc run` |
//! | `settings.rs`, `outcome.rs`, `forks.rs`, `libcuda.rs` | environment variables; conversion of errors to driver codes; forked children; libcuda |
//!
//! `unsafe` code is limited to the places where functions of the driver or the C library are called, looked up or replaced.

#[cfg(not(all(target_os = "linux", target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64"))))]
compile_error!("symmalloc-preload is for Linux with the GNU C library, on x86-64 and aarch64");

mod calls;
mod captures;
mod context;
mod contexts;
mod ending;
mod exit;
mod forks;
mod interposed;
mod ledger;
mod libc_symbols;
mod libcuda;
mod live;
mod numbers;
mod outcome;
mod peers;
mod pools;
mod recordings;
mod served;
mod served_call;
mod settings;
mod streams;
mod tally;
mod watch;
