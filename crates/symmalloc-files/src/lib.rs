//! File operations for a library: atomic replacement, a private folder that only the current user can write, and writes that never end the
//! program.
//!
//! A program that writes to a predictable name in a shared folder is open to attack: another user plants a symbolic link there, and the
//! program overwrites the link's target. symmalloc writes all complete files through this crate.
//!
//! - [`write_whole`] and [`Draft`] write to a new file next to the target and rename it. The new file has a random name, is opened with
//!   `O_CREAT | O_EXCL`, and is removed after an error. The rename replaces a symbolic link and leaves its target unchanged. Readers see
//!   either the old file or the new one.
//! - [`private_folder`] returns the user's folder for files without an explicit path. Only this user and root can write this folder and the
//!   folders above it, so names in it may be predictable. [`private_folder_at`] applies the same rules to a given path.
//! - [`TemporaryFolder`] is a folder that exists for the duration of a run.
//!
//! A library's write must not end the program. Beyond the limit on file sizes, or after the reader of a pipe has gone, the system raises a
//! signal that ends programs that do not handle it.
//!
//! - [`without_signals`] makes such writes return an error instead. [`Draft`] and [`write_whole`] use it. [`block_write_signals`] has this
//!   effect for a whole program.
//! - [`say`] writes a message to standard error in this way, for at most about a second.
//!
//! A library's descriptors must not outlive its process, and its destructors must not change objects that another process owns.
//!
//! - [`KeptFromChildren`] keeps a connection from forked children.
//! - [`is_forked`] returns `true` in a forked child, where destructors must leave the parent's objects alone.
//!
//! The crate trusts root and other processes of the same user, because both can change this process in other ways.
//!
//! # Examples
//! ```
//! let record = symmalloc_files::private_folder()?.join("example.json");
//! symmalloc_files::write_whole(&record, b"{}")?;
//! assert_eq!(std::fs::read(&record)?, b"{}");
//! # std::fs::remove_file(&record)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Platforms
//! On systems other than Unix, the crate creates folders but checks neither owners nor permissions. On systems other than Linux, writes may
//! raise signals, and forked children are not detected.

#![deny(unsafe_code)]

mod draft;
mod forks;
mod private_folder;
mod signals;
mod stderr;

pub use draft::{Draft, write_whole};
pub use forks::{KeptFromChildren, is_forked, watch_forks};
pub use private_folder::{PrivateFolderError, TemporaryFolder, private_folder, private_folder_at};
pub use signals::{block_write_signals, without_signals};
pub use stderr::say;
