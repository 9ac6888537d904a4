//! Private folders: writable only by this user, below folders that no third user can write. A third user is any user except this one and
//! root.
//!
//! ```text
//!    /          home       me             .local/state         symmalloc
//!    each belongs to this user or to root, and others cannot write it         mode 0700
//! ```
//!
//! The check walks from the root down. A third user cannot replace an entry of a folder that passed, so the path stays valid after the
//! check. A world-writable folder passes if it is sticky, such as `/tmp`: a third user cannot replace an entry there that belongs to this
//! user or to root. A symbolic link owned by this user or root is followed, and its target is checked in the same way.

use std::env;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use tempfile::{Builder, TempDir};
use thiserror::Error;

/// Name of the private folder in each location.
const NAME: &str = "symmalloc";

/// The reason a folder is not private.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PrivateFolderError {
    /// A third user owns a part of the path.
    #[error("{} belongs to user {user}: choose a folder that you own", .path.display())]
    ForeignOwner {
        /// The part of the path that failed the check.
        path: PathBuf,
        /// The owner's user id.
        user: u32,
    },
    /// Other users can write a part of the path.
    #[error("others can write {}: run `chmod go-w` on it, or choose another folder", .path.display())]
    OthersWrite {
        /// The part of the path that failed the check.
        path: PathBuf,
    },
    /// A part of the path is not a folder.
    #[error("{} is not a folder: choose another path", .path.display())]
    NotAFolder {
        /// The part of the path that failed the check.
        path: PathBuf,
    },
    /// The path is relative, or has too many symbolic links.
    #[error("{} does not resolve to a folder: give an absolute path without cyclic links", .path.display())]
    Unresolved {
        /// The path.
        path: PathBuf,
    },
    /// The system denies access.
    #[error("{}: {source}: choose a folder that you can write", .path.display())]
    Io {
        /// The part of the path that failed the check.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// None of the user's folders is usable, and no new folder can be created.
    #[error("no private folder: {}", .reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    NoneUsable {
        /// The reason for each folder, in the order of the attempts.
        reasons: Vec<PrivateFolderError>,
    },
}

/// Returns the user's private folder, which is the first safe one of these:
///
/// 1. `$XDG_STATE_HOME/symmalloc`, or `~/.local/state/symmalloc` if the variable is not set
/// 2. `$XDG_RUNTIME_DIR/symmalloc`, which lasts until the user logs out
/// 3. a new folder `symmalloc-RANDOM` in the system's temporary folder; the process creates it once and then always returns it
///
/// All processes of a user share the first two folders, so the ranks of a job find each other there. A caller that writes a file should
/// print its path.
///
/// # Errors
/// Returns [`PrivateFolderError::NoneUsable`] if none of the folders can be created.
pub fn private_folder() -> Result<PathBuf, PrivateFolderError> {
    static FRESH: Mutex<Option<PathBuf>> = Mutex::new(None);
    let mut reasons = Vec::new();
    for place in places() {
        match private_folder_at(&place.join(NAME)) {
            Ok(folder) => return Ok(folder),
            Err(reason) => reasons.push(reason),
        }
    }
    let mut fresh = FRESH.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(folder) = &*fresh {
        return Ok(folder.clone());
    }
    match TemporaryFolder::new() {
        Ok(folder) => Ok(fresh.insert(folder.0.keep()).clone()),
        Err(source) => {
            reasons.push(PrivateFolderError::Io { path: env::temp_dir(), source });
            Err(PrivateFolderError::NoneUsable { reasons })
        }
    }
}

/// A new folder for this user only (mode 0700), under a random name in the system's temporary folder. Dropping it removes the folder and
/// its files.
#[derive(Debug)]
pub struct TemporaryFolder(TempDir);

impl TemporaryFolder {
    /// Creates the folder.
    ///
    /// # Errors
    /// Returns an error if the system's temporary folder is not writable.
    pub fn new() -> io::Result<Self> {
        let mut builder = Builder::new();
        builder.prefix("symmalloc-").rand_bytes(12);
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o700));
        builder.tempdir().map(TemporaryFolder)
    }

    /// Returns the folder's path.
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

/// Returns those of the user's folders that have absolute paths. The XDG specification requires relative paths to be
/// ignored.
fn places() -> Vec<PathBuf> {
    let variable = |name: &str| env::var_os(name).filter(|value: &OsString| Path::new(value).is_absolute());
    let state = variable("XDG_STATE_HOME").map(PathBuf::from);
    let state = state.or_else(|| variable("HOME").map(|home| Path::new(&home).join(".local").join("state")));
    state.into_iter().chain(variable("XDG_RUNTIME_DIR").map(PathBuf::from)).collect()
}

/// Creates a private folder, or checks that an existing folder is private: it must belong to this user, and no third user may write it or a
/// folder above it. Returns its path without symbolic links.
///
/// If other users can read the folder, its mode is changed to 0700. If a symbolic link leads to the folder, the mode stays as it is,
/// because the folder may have other uses, such as `/etc` for root.
///
/// # Errors
/// Returns an error if a part of the path belongs to a third user, is writable by one, or cannot be created.
pub fn private_folder_at(path: &Path) -> Result<PathBuf, PrivateFolderError> {
    check::private(path)
}

#[cfg(unix)]
mod check {
    use super::PrivateFolderError;
    use std::ffi::OsString;
    use std::fs::{self, DirBuilder, Metadata, Permissions};
    use std::io;
    use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
    use std::path::{Component, Path, PathBuf};

    const OTHERS_WRITE: u32 = 0o022;
    const STICKY: u32 = 0o1000;
    const LINKS_MAX: u32 = 40;

    pub(super) fn private(path: &Path) -> Result<PathBuf, PrivateFolderError> {
        let is_linked = fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink());
        let (folder, metadata) = walk(path)?;
        if metadata.uid() != user() {
            return Err(PrivateFolderError::ForeignOwner { path: folder, user: metadata.uid() });
        }
        if metadata.mode() & OTHERS_WRITE != 0 {
            return Err(PrivateFolderError::OthersWrite { path: folder });
        }
        if metadata.mode() & 0o777 != 0o700 && !is_linked {
            let changed = fs::set_permissions(&folder, Permissions::from_mode(0o700));
            changed.map_err(|source| PrivateFolderError::Io { path: folder.clone(), source })?;
        }
        Ok(folder)
    }

    /// Checks every folder from the root down, and creates missing folders.
    fn walk(path: &Path) -> Result<(PathBuf, Metadata), PrivateFolderError> {
        let unresolved = || PrivateFolderError::Unresolved { path: path.to_owned() };
        if !path.is_absolute() {
            return Err(unresolved());
        }
        let mut names = names(path);
        let mut folder = PathBuf::from("/");
        let mut metadata = of(&folder)?;
        check(&folder, &metadata)?;
        let mut links = 0;
        while let Some(name) = names.pop() {
            if name == ".." {
                folder.pop();
                metadata = of(&folder)?;
                continue;
            }
            let entry = folder.join(&name);
            let found = of_entry(&entry)?;
            check(&entry, &found)?;
            if found.is_symlink() {
                links += 1;
                if links > LINKS_MAX {
                    return Err(unresolved());
                }
                let target = fs::read_link(&entry).map_err(|source| PrivateFolderError::Io { path: entry, source })?;
                if target.is_absolute() {
                    folder = PathBuf::from("/");
                    metadata = of(&folder)?;
                }
                names.extend(self::names(&target));
            } else if found.is_dir() {
                (folder, metadata) = (entry, found);
            } else {
                return Err(PrivateFolderError::NotAFolder { path: entry });
            }
        }
        Ok((folder, metadata))
    }

    /// Returns the names in a path, in reverse order.
    fn names(path: &Path) -> Vec<OsString> {
        let names = path.components().filter(|part| matches!(part, Component::Normal(_) | Component::ParentDir));
        names.map(|part| part.as_os_str().to_owned()).rev().collect()
    }

    fn of(path: &Path) -> Result<Metadata, PrivateFolderError> {
        fs::symlink_metadata(path).map_err(|source| PrivateFolderError::Io { path: path.to_owned(), source })
    }

    /// Returns the metadata of an entry. Creates the entry as a folder if it does not exist.
    fn of_entry(path: &Path) -> Result<Metadata, PrivateFolderError> {
        match fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                match DirBuilder::new().mode(0o700).create(path) {
                    // Another process of this user may have created the folder first.
                    Err(source) if source.kind() != io::ErrorKind::AlreadyExists => {
                        Err(PrivateFolderError::Io { path: path.to_owned(), source })
                    }
                    _ => of(path),
                }
            }
            found => found.map_err(|source| PrivateFolderError::Io { path: path.to_owned(), source }),
        }
    }

    /// Rejects an entry that a third user owns, and a folder whose entries a third user can replace.
    fn check(path: &Path, metadata: &Metadata) -> Result<(), PrivateFolderError> {
        if metadata.uid() != user() && metadata.uid() != 0 {
            return Err(PrivateFolderError::ForeignOwner { path: path.to_owned(), user: metadata.uid() });
        }
        if metadata.is_dir() && metadata.mode() & OTHERS_WRITE != 0 && metadata.mode() & STICKY == 0 {
            return Err(PrivateFolderError::OthersWrite { path: path.to_owned() });
        }
        Ok(())
    }

    fn user() -> u32 {
        rustix::process::geteuid().as_raw()
    }
}

#[cfg(not(unix))]
mod check {
    use super::PrivateFolderError;
    use std::path::{Path, PathBuf};

    pub(super) fn private(path: &Path) -> Result<PathBuf, PrivateFolderError> {
        let created = std::fs::create_dir_all(path);
        created.map_err(|source| PrivateFolderError::Io { path: path.to_owned(), source })?;
        Ok(path.to_owned())
    }
}
