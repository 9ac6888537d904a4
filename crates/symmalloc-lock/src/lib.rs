//! A mutex for one thread that comes again and again, and seldom for another.
//!
//! A mutex costs a locked instruction to enter, which waits until all earlier stores have left the processor: on those
//! beside today's GPUs a good part of what an allocation takes. A [`BiasedMutex`] costs none while one thread comes
//! many times in a row. It is then *biased* to that thread, which announces itself with a plain store and looks whether
//! it still is. Another thread *revokes* the bias and makes all threads of the process agree on the order of their
//! stores and loads with one system call, `membarrier`. That takes microseconds, so a bias is given only to a thread
//! that came often enough to be worth it.
//!
//! ```text
//!  bias.rs            who enters how: the protocol, on atomics alone
//!  membarrier.rs      the two halves of an asymmetric fence
//!  thread_number.rs   a small number for each live thread
//!  wait.rs            how a thread waits for another one to leave
//! ```
//!
//! Where the system has no `membarrier` (other systems than Linux, an old kernel, a filter of system calls) no bias is given,
//! and it is a spin lock that lets waiters sleep.
//!
//! # Examples
//! ```
//! use symmalloc_lock::BiasedMutex;
//!
//! let count = BiasedMutex::new(0);
//! for _ in 0..1_000_000 {
//!     *count.lock() += 1; // from some turn on, without a locked instruction
//! }
//! std::thread::scope(|scope| scope.spawn(|| *count.lock() += 1).join()).expect("no panic");
//! assert_eq!(*count.lock(), 1_000_001);
//! ```

mod bias;
mod membarrier;
mod sync;
mod thread_number;
mod wait;

#[cfg(not(all(symmalloc_loom, test)))]
mod mutex;
#[cfg(not(all(symmalloc_loom, test)))]
pub use mutex::{BiasedMutex, BiasedMutexGuard, RawBiasedMutex};

#[cfg(all(symmalloc_loom, test))]
mod interleavings;
