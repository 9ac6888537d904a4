//! Files that appear whole or not at all, and a folder that only this user can write.
//!
//! A program that writes to a predictable name in a shared folder can be misled: another user plants a symbolic link there, and the
//! program overwrites the link's target. This crate is the one way in which symmalloc writes a file as a whole.
//!
//! - [`write_whole`] and [`Draft`] write to a new file next to the target and rename it. The new file has a random name, is opened
//!   with `O_CREAT | O_EXCL`, and is removed after an error. The rename replaces a symbolic link and leaves its target alone.
//!   Readers see the old file or the new one.
//! - [`private_folder`] returns the user's folder for files that nobody named a place for. No third user can write it or a folder
//!   above it, so a name in it may be predictable. [`private_folder_at`] applies the same rules to a given path.
//! - [`TemporaryFolder`] is a folder for the time of a run.
//!
//! root and other processes of the same user are trusted: they can change this process in any case.
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
//! On systems other than Unix, folders are created but neither owners nor permissions are checked.

#![forbid(unsafe_code)]

mod draft;
mod private_folder;

pub use draft::{Draft, write_whole};
pub use private_folder::{PrivateFolderError, TemporaryFolder, private_folder, private_folder_at};
