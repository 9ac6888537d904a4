//! Drafts: files that are written under a random name next to their target and renamed once complete.

use crate::signals::without_signals;
use std::fs::{self, Permissions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use tempfile::{Builder, NamedTempFile};

/// Atomically writes a file that only this user can read and write (mode 0600).
///
/// Replaces an existing file or symbolic link of that name once the new file is complete. The target of a link is
/// unchanged.
///
/// # Errors
/// Returns an error if the file cannot be written. The path is then unchanged, and no temporary file remains.
pub fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut draft = Draft::private(path)?;
    draft.write_all(bytes)?;
    draft.finish()
}

/// A file that gets its name once it is complete. Dropping it before [`finish`](Draft::finish) removes it.
#[derive(Debug)]
pub struct Draft {
    file: NamedTempFile,
    path: PathBuf,
}

impl Draft {
    /// Creates a draft that only this user can read and write (mode 0600).
    ///
    /// # Errors
    /// Returns an error if no file can be created in the path's folder.
    pub fn private(path: &Path) -> io::Result<Self> {
        Draft::new(path, None)
    }

    /// Creates a draft with the permissions of the file that it replaces. Without such a file, the umask determines
    /// them, as for any new file. Use this function if a user names the file.
    ///
    /// # Errors
    /// Returns an error if no file can be created in the path's folder.
    pub fn public(path: &Path) -> io::Result<Self> {
        let replaced = fs::metadata(path).ok().map(|metadata| metadata.permissions());
        let draft = Draft::new(path, new_file())?;
        if let Some(permissions) = replaced {
            draft.file.as_file().set_permissions(permissions)?;
        }
        Ok(draft)
    }

    fn new(path: &Path, permissions: Option<Permissions>) -> io::Result<Self> {
        if path.file_name().is_none() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the path names no file: add a file name"));
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut builder = Builder::new();
        builder.prefix(".symmalloc-").suffix(".part").rand_bytes(12);
        if let Some(permissions) = permissions {
            builder.permissions(permissions);
        }
        Ok(Draft { file: builder.tempfile_in(folder)?, path: path.to_owned() })
    }

    /// Renames the file to its path.
    ///
    /// # Errors
    /// Returns an error if the rename fails. The path is then unchanged, and no temporary file remains.
    pub fn finish(self) -> io::Result<()> {
        self.file.persist(self.path).map(drop).map_err(|refused| refused.error)
    }
}

impl Write for Draft {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        without_signals(|| self.file.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Returns the default permissions of a new file, before the umask.
#[cfg(unix)]
fn new_file() -> Option<Permissions> {
    use std::os::unix::fs::PermissionsExt;
    Some(Permissions::from_mode(0o666))
}

#[cfg(not(unix))]
fn new_file() -> Option<Permissions> {
    None
}
