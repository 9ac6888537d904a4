//! A store of files in a folder that all machines of a job share. It needs no server and no open port.
//!
//! ```text
//!  FOLDER/                      mode 0700, owned by this user; nobody else can write it or a folder above it
//!    symmalloc%2fcard           the value of the key "symmalloc/card", written whole and renamed
//! ```
//!
//! A client of NFS keeps what it knows about a folder for seconds, also that a file does not exist. Listing the folder makes it ask the
//! server, so each read lists the folder first.

use crate::deadline::Deadline;
use crate::error::RendezvousError;
use crate::store::{Store, VALUE_BYTES_MAX, check_lengths};
use rustix::fs::OFlags;
use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use symmalloc_files::{PrivateFolderError, private_folder_at, write_whole};

/// A store of files in a shared folder.
///
/// The folder belongs to this user and has mode 0700, or is created so. No third user can write it or a folder above it. Links in it are not
/// followed. Use a new folder for each job: a value that a job left behind is still set. A key is the name of a file, so file systems limit it
/// to about 200 letters and digits. The system does not end a call to a file server that does not answer, so such a call can outlast its
/// deadline.
///
/// # Examples
/// See [`Store`].
#[derive(Debug)]
pub struct FolderStore {
    folder: PathBuf,
    /// The file that this client has set last, and its content.
    last: Mutex<Option<(String, Vec<u8>)>>,
}

impl FolderStore {
    /// Opens a folder, and creates it if it does not exist. The path is absolute.
    ///
    /// # Errors
    /// Returns an error if the folder or one above it belongs to another user or is writable by others, or cannot be created.
    pub fn open(folder: &Path) -> Result<Self, RendezvousError> {
        match private_folder_at(folder) {
            Ok(folder) => Ok(FolderStore { folder, last: Mutex::new(None) }),
            Err(PrivateFolderError::ForeignOwner { path, user }) => Err(RendezvousError::FolderOwner { path, user }),
            Err(PrivateFolderError::OthersWrite { path }) => Err(RendezvousError::FolderWritable { path }),
            Err(PrivateFolderError::Io { path, source }) => Err(RendezvousError::Folder { path, kind: source.kind() }),
            Err(_) => Err(RendezvousError::Folder { path: folder.to_owned(), kind: io::ErrorKind::NotADirectory }),
        }
    }

    /// Removes the folder and its files, unless somebody has replaced the value that this client has set last: rank 0's card.
    pub(crate) fn remove_own(&self) {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let is_own = |(name, value): &(String, Vec<u8>)| self.read(name).is_ok_and(|now| now.as_ref() == Some(value));
        if !last.as_ref().is_some_and(is_own) {
            return;
        }
        // The files of a job that has met are of no use. If they cannot be removed, they do no harm: a later job has another name.
        let _removed = fs::remove_dir_all(&self.folder);
    }

    /// Removes the folder if it has no files.
    pub(crate) fn remove_if_empty(&self) {
        let _removed = fs::remove_dir(&self.folder);
    }

    fn failed(&self, path: &Path, error: &io::Error) -> RendezvousError {
        RendezvousError::Folder { path: path.to_owned(), kind: error.kind() }
    }

    /// Returns the names of all files. The folder may be removed while a rank still waits for it.
    fn names(&self) -> Result<Vec<String>, RendezvousError> {
        let failed = |error: io::Error| self.failed(&self.folder, &error);
        let entries = match fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed(error)),
        };
        let name =
            |entry: io::Result<fs::DirEntry>| entry.map(|entry| entry.file_name().into_string().unwrap_or_default());
        entries.map(name).collect::<io::Result<_>>().map_err(failed)
    }

    /// Returns the content of a file, or `None` if it does not exist.
    fn read(&self, name: &str) -> Result<Option<Vec<u8>>, RendezvousError> {
        let path = self.folder.join(name);
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits();
        let mut bytes = Vec::new();
        let opened = OpenOptions::new().read(true).custom_flags(flags as i32).open(&path);
        match opened.and_then(|file| file.take(VALUE_BYTES_MAX as u64 + 1).read_to_end(&mut bytes)) {
            Ok(count) if count > VALUE_BYTES_MAX => {
                Err(RendezvousError::TooLong { key_bytes: name.len(), value_bytes: count })
            }
            Ok(_) => Ok(Some(bytes)),
            // On NFS, a file that is replaced while it is read is stale.
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::StaleNetworkFileHandle) => {
                Ok(None)
            }
            Err(error) => Err(self.failed(&path, &error)),
        }
    }
}

impl Store for FolderStore {
    fn set(&self, key: &str, value: &[u8], _: &Deadline) -> Result<(), RendezvousError> {
        check_lengths(key, value)?;
        let name = file_name(key);
        let path = self.folder.join(&name);
        write_whole(&path, value).map_err(|error| self.failed(&path, &error))?;
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some((name, value.to_owned()));
        Ok(())
    }

    fn get(&self, key: &str, _: &Deadline) -> Result<Option<Vec<u8>>, RendezvousError> {
        check_lengths(key, &[])?;
        let name = file_name(key);
        if self.names()?.contains(&name) { self.read(&name) } else { Ok(None) }
    }
}

/// Returns the name of the file of a key, in which characters other than letters, digits, `-` and `_` are numbers.
fn file_name(key: &str) -> String {
    let mut name = String::new();
    for byte in key.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => name.push(byte.into()),
            _ => write!(name, "%{byte:02x}").expect("text takes everything"),
        }
    }
    name
}
