//! A small disk that can be filled: a file system in memory, which only this process and its children see.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Size of the disk in bytes.
const SIZE_BYTES: usize = 4 << 20;

pub(crate) struct Disk(PathBuf);

impl Disk {
    /// Mounts a disk at a new folder, for this thread and the processes that it starts. Returns an error if the process may not mount one;
    /// the folder exists then as well.
    pub(crate) fn mount(folder: &Path) -> io::Result<Self> {
        fs::create_dir(folder)?;
        let path = CString::new(folder.as_os_str().as_bytes()).expect("the path should contain no zero byte");
        let options = CString::new(format!("size={SIZE_BYTES}")).expect("the text contains no zero byte");
        let check = |outcome: i32| if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
        // SAFETY: the pointers are C strings or null. The calls change only the mounts of this thread.
        unsafe {
            check(libc::unshare(libc::CLONE_NEWNS))?;
            check(libc::mount(
                std::ptr::null(),
                c"/".as_ptr(),
                std::ptr::null(),
                libc::MS_REC | libc::MS_PRIVATE,
                std::ptr::null(),
            ))?;
            check(libc::mount(c"tmpfs".as_ptr(), path.as_ptr(), c"tmpfs".as_ptr(), 0, options.as_ptr().cast()))?;
        }
        Ok(Disk(folder.to_path_buf()))
    }

    /// Fills the disk.
    pub(crate) fn fill(&self) {
        let mut file = File::create(self.ballast()).expect("a file can be created");
        let mut part = vec![0_u8; 1 << 16];
        while !part.is_empty() {
            match file.write_all(&part) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::StorageFull => part.truncate(part.len() / 2),
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Frees the disk again.
    pub(crate) fn free(&self) {
        fs::remove_file(self.ballast()).expect("the file exists");
    }

    fn ballast(&self) -> PathBuf {
        self.0.join("ballast")
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let path = CString::new(self.0.as_os_str().as_bytes()).expect("the path should contain no zero byte");
        // SAFETY: the pointer is a C string.
        unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
    }
}
