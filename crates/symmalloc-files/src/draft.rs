//! A file under a random name next to its target, renamed when it is complete.

use std::fs::{self, Permissions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use tempfile::{Builder, NamedTempFile};

/// Writes a file as a whole. Only this user can read and write it (mode 0600).
///
/// An existing file or symbolic link of that name is replaced once the new file is complete. The target of a link stays as it is.
///
/// # Errors
/// If the file cannot be written. Then the path is unchanged, and no other file is left.
pub fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut draft = Draft::private(path)?;
    draft.write_all(bytes)?;
    draft.finish()
}

/// A file that gets its name when it is complete. Dropped before [`finish`](Draft::finish), it leaves nothing.
#[derive(Debug)]
pub struct Draft {
    file: NamedTempFile,
    path: PathBuf,
}

impl Draft {
    /// Begins a file that only this user can read and write (mode 0600).
    ///
    /// # Errors
    /// If no file can be created in the folder of the path.
    pub fn private(path: &Path) -> io::Result<Self> {
        Draft::new(path, None)
    }

    /// Begins a file with the permissions of the one that it replaces, or with those that the umask leaves to a new file. Use it
    /// where a user names the file.
    ///
    /// # Errors
    /// If no file can be created in the folder of the path.
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
    /// If it cannot be renamed. Then the path is unchanged, and no other file is left.
    pub fn finish(self) -> io::Result<()> {
        self.file.persist(self.path).map(drop).map_err(|refused| refused.error)
    }
}

impl Write for Draft {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Permissions of a file that is created without any in mind. The umask restricts them further.
#[cfg(unix)]
fn new_file() -> Option<Permissions> {
    use std::os::unix::fs::PermissionsExt;
    Some(Permissions::from_mode(0o666))
}

#[cfg(not(unix))]
fn new_file() -> Option<Permissions> {
    None
}
