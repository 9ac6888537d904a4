//! Tests that another user can neither redirect a written file nor influence the choice of the private folder.
#![cfg(unix)]

use rustix::process::{geteuid, umask};
use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use symmalloc_files::{Draft, PrivateFolderError, TemporaryFolder, private_folder, private_folder_at, write_whole};

/// A user id other than root and the user of the tests.
const OTHER_USER: u32 = 12345;

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).expect("the path should exist").mode() & 0o7777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).expect("our own");
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("the folder should be readable");
    let mut names: Vec<String> = entries
        .map(|entry| {
            entry.expect("the read should succeed").file_name().into_string().expect("the contents should be UTF-8")
        })
        .collect();
    names.sort();
    names
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder should be created")
}

/// Returns `false`, and prints a note, if files cannot be given to another user.
fn is_root() -> bool {
    let is_root = geteuid().is_root();
    if !is_root {
        eprintln!("skipped: needs root to create files of another user");
    }
    is_root
}

#[test]
fn a_planted_link_is_replaced_and_its_target_kept() {
    let folder = folder();
    let (victim, target) = (folder.path().join("victim"), folder.path().join("record.json"));
    fs::write(&victim, "precious").expect("the write should succeed");
    // Links at the name itself, and at the names that drafts once had.
    for name in ["record.json", "record.json.draft", &format!("record.json.{}.part", std::process::id())] {
        symlink(&victim, folder.path().join(name)).expect("the link should be created");
    }
    write_whole(&target, b"new").expect("the write should succeed");
    assert_eq!(fs::read(&victim).expect("the file should be kept"), b"precious");
    assert_eq!(fs::read(&target).expect("the file should have been written"), b"new");
    assert!(fs::symlink_metadata(&target).expect("the path should exist").is_file());
    assert_eq!(mode(&target), 0o600);
}

#[test]
fn a_dangling_link_is_replaced_and_its_target_not_created() {
    let folder = folder();
    symlink(folder.path().join("nowhere"), folder.path().join("record")).expect("the link should be created");
    write_whole(&folder.path().join("record"), b"new").expect("the write should succeed");
    assert_eq!(names(folder.path()), ["record"]);
}

#[test]
fn a_file_of_another_user_is_replaced_by_ours() {
    if !is_root() {
        return;
    }
    let folder = folder();
    let path = folder.path().join("record");
    fs::write(&path, "theirs").expect("the write should succeed");
    set_mode(&path, 0o666);
    chown(&path, Some(OTHER_USER), None).expect("root should be allowed to change the owner");
    write_whole(&path, b"ours").expect("the write should succeed");
    assert_eq!((fs::metadata(&path).expect("the path should exist").uid(), mode(&path)), (0, 0o600));
}

#[test]
fn concurrent_writers_leave_one_whole_file() {
    let folder = folder();
    let path = folder.path().join("record");
    let texts: Vec<Vec<u8>> = (b'a'..=b'h').map(|letter| vec![letter; 1 << 18]).collect();
    thread::scope(|scope| {
        for text in &texts {
            scope.spawn(|| (0..20).for_each(|_| write_whole(&path, text).expect("the write should succeed")));
        }
        for _ in 0..200 {
            if let Ok(seen) = fs::read(&path) {
                assert!(texts.contains(&seen), "{} bytes", seen.len());
            }
        }
    });
    assert_eq!(names(folder.path()), ["record"]);
}

#[test]
fn a_failed_write_leaves_no_file() {
    let folder = folder();
    fs::create_dir_all(folder.path().join("taken/inside")).expect("the creation should succeed");
    write_whole(&folder.path().join("taken"), b"text").expect_err("a folder has the name");
    write_whole(&folder.path().join("missing/record"), b"text").expect_err("no folder");
    write_whole(Path::new("/"), b"text").expect_err("no name");
    let mut draft = Draft::private(&folder.path().join("dropped")).expect("it should have begun");
    draft.write_all(b"half").expect("the write should succeed");
    drop(draft);
    assert_eq!(names(folder.path()), ["taken"]);
}

#[test]
fn a_full_disk_leaves_the_previous_file() {
    // The process's file size limit simulates a full disk.
    let folder = folder();
    let path = folder.path().join("record");
    write_whole(&path, b"old").expect("the write should succeed");
    let this = std::env::current_exe().expect("it should be known");
    let script = "ulimit -f 8; exec \"$0\" --exact a_megabyte_is_written --ignored";
    let done = Command::new("sh")
        .args(["-c", script])
        .arg(this)
        .env("RECORD", &path)
        .output()
        .expect("the program should start");
    assert!(!done.status.success(), "the limit was not reached");
    assert_eq!(
        (fs::read(&path).expect("the file should be kept"), names(folder.path())),
        (b"old".to_vec(), vec!["record".to_owned()])
    );
}

#[test]
#[ignore = "run by another test, under a limit"]
fn a_megabyte_is_written() {
    let path = PathBuf::from(std::env::var_os("RECORD").expect("it should be set"));
    write_whole(&path, &vec![0; 1 << 20]).expect("no limit should be reached");
}

#[test]
fn a_public_draft_has_the_permissions_of_the_umask_or_of_the_file_that_it_replaces() {
    let folder = folder();
    let path = folder.path().join("page.html");
    let allowed = umask(rustix::fs::Mode::empty());
    umask(allowed);
    Draft::public(&path).and_then(Draft::finish).expect("the write should succeed");
    assert_eq!(mode(&path), 0o666 & !allowed.bits());
    set_mode(&path, 0o640);
    Draft::public(&path).and_then(Draft::finish).expect("the write should succeed");
    assert_eq!(mode(&path), 0o640);
}

#[test]
fn a_private_folder_is_created_for_this_user_alone() {
    let base = folder();
    let created = private_folder_at(&base.path().join("state/symmalloc")).expect("the creation should succeed");
    assert_eq!((mode(&created), mode(&base.path().join("state"))), (0o700, 0o700));
    set_mode(&created, 0o755);
    assert_eq!(private_folder_at(&created).expect("the folder should be ours"), created);
    assert_eq!(mode(&created), 0o700, "others cannot read it any longer");
}

/// Regression test: a link in the place of the folder let root's flight record make `/etc` unreadable for all others.
#[test]
fn a_folder_behind_a_link_keeps_its_mode() {
    let base = folder();
    let (shared, link) = (base.path().join("shared"), base.path().join("symmalloc"));
    fs::create_dir(&shared).expect("the creation should succeed");
    set_mode(&shared, 0o755);
    symlink(&shared, &link).expect("the link should be created");
    let found = private_folder_at(&link).expect("nobody else can write it");
    assert_eq!((found.file_name(), mode(&shared)), (shared.file_name(), 0o755));
    set_mode(&shared, 0o775);
    private_folder_at(&link).expect_err("a group can write it");
}

#[test]
fn a_temporary_folder_is_private_and_removed_on_drop() {
    let folder = TemporaryFolder::new().expect("the creation should succeed");
    let path = folder.path().to_owned();
    fs::write(path.join("file"), "text").expect("the write should succeed");
    assert_eq!(mode(&path), 0o700);
    drop(folder);
    assert!(!path.exists());
}

#[test]
fn a_folder_that_others_can_write_is_refused_unless_it_is_sticky_and_above() {
    let base = folder();
    let (above, path) = (base.path().join("state"), base.path().join("state/symmalloc"));
    private_folder_at(&path).expect("the creation should succeed");
    for writable in [&above, &path] {
        for bits in [0o770, 0o707] {
            set_mode(writable, bits);
            let refused = private_folder_at(&path).expect_err("others can write it");
            assert!(
                matches!(&refused, PrivateFolderError::OthersWrite { path } if path.ends_with(writable.file_name().unwrap()))
            );
            assert!(refused.to_string().contains("chmod go-w"), "{refused}");
            set_mode(writable, 0o700);
        }
    }
    set_mode(&above, 0o1777);
    private_folder_at(&path).expect("nobody can replace it in a sticky folder");
    set_mode(&path, 0o1777);
    private_folder_at(&path).expect_err("others can write into it");
}

#[test]
fn parts_of_another_user_are_refused() {
    if !is_root() {
        return;
    }
    let base = folder();
    let (above, path) = (base.path().join("state"), base.path().join("state/symmalloc"));
    private_folder_at(&path).expect("the creation should succeed");
    for theirs in [&above, &path] {
        chown(theirs, Some(OTHER_USER), None).expect("root should be allowed to change the owner");
        let refused = private_folder_at(&path).expect_err("another user's");
        assert!(matches!(refused, PrivateFolderError::ForeignOwner { user: OTHER_USER, .. }), "{refused}");
        chown(theirs, Some(0), None).expect("root should be allowed to change the owner");
    }
    let planted = base.path().join("planted");
    symlink(&path, &planted).expect("the link should be created");
    assert_eq!(
        private_folder_at(&planted).expect("our own link"),
        private_folder_at(&path).expect("the folder should be ours")
    );
    std::os::unix::fs::lchown(&planted, Some(OTHER_USER), None).expect("root should be allowed to change the owner");
    private_folder_at(&planted).expect_err("another user's link");
}

#[test]
fn paths_that_are_not_folders_are_refused() {
    let base = folder();
    fs::write(base.path().join("file"), "").expect("the write should succeed");
    symlink("circle", base.path().join("circle")).expect("the link should be created");
    let refused = |path: PathBuf| private_folder_at(&path).expect_err("no folder");
    assert!(matches!(refused(base.path().join("file")), PrivateFolderError::NotAFolder { .. }));
    assert!(matches!(refused(base.path().join("circle")), PrivateFolderError::Unresolved { .. }));
    assert!(matches!(refused("relative".into()), PrivateFolderError::Unresolved { .. }));
}

/// Runs `private_folder` in a process with only this environment. Returns the folder that the process prints.
fn folder_with(environment: &[(&str, &Path)]) -> PathBuf {
    PathBuf::from(printed_with(environment, "folder="))
}

/// Runs `private_folder` in a process with only this environment. Returns the rest of the line that starts with `key`.
fn printed_with(environment: &[(&str, &Path)], key: &str) -> String {
    let this = std::env::current_exe().expect("it should be known");
    let mut command = Command::new(this);
    command.args(["--exact", "the_private_folder_is_reported", "--ignored", "--nocapture"]).env_clear();
    let printed = command.envs(environment.iter().copied()).output().expect("the program should start");
    let printed = String::from_utf8(printed.stdout).expect("the contents should be UTF-8");
    let line = printed.lines().find_map(|line| line.split_once(key)).unwrap_or_else(|| panic!("{printed}"));
    line.1.to_owned()
}

#[test]
#[ignore = "run by another test, in a separate environment"]
fn the_private_folder_is_reported() {
    match private_folder() {
        Ok(folder) => {
            assert_eq!(private_folder().expect("the same folder"), folder);
            println!("folder={}", folder.display());
        }
        Err(error) => println!("error={error}"),
    }
}

#[test]
fn the_folder_is_in_the_state_then_runtime_then_temporary_directory() {
    let base = folder();
    let base = base.path().canonicalize().expect("the path should exist");
    let (home, state, runtime) = (base.join("home"), base.join("state"), base.join("runtime"));
    for folder in [&home, &state, &runtime] {
        fs::create_dir(folder).expect("the creation should succeed");
    }
    let all = [("HOME", &*home), ("XDG_STATE_HOME", &*state), ("XDG_RUNTIME_DIR", &*runtime), ("TMPDIR", &*base)];
    assert_eq!(folder_with(&all), state.join("symmalloc"));
    assert_eq!(folder_with(&[all[0], all[2], all[3]]), home.join(".local/state/symmalloc"));
    set_mode(&state, 0o777);
    assert_eq!(folder_with(&all), runtime.join("symmalloc"));
    set_mode(&runtime, 0o777);
    let fresh = folder_with(&all);
    assert_eq!((fresh.parent(), mode(&fresh)), (Some(&*base), 0o700));
    assert_ne!(folder_with(&[all[3]]), fresh, "a name that nobody can predict");
}

#[test]
fn the_error_states_the_reason_for_every_folder() {
    let base = folder();
    let base = base.path().canonicalize().expect("the path should exist");
    let (state, runtime, missing) = (base.join("state"), base.join("runtime"), base.join("missing"));
    fs::create_dir(&state).expect("the creation should succeed");
    set_mode(&state, 0o777);
    fs::write(&runtime, "a file").expect("the write should succeed");
    let none = [("XDG_STATE_HOME", &*state), ("XDG_RUNTIME_DIR", &*runtime), ("TMPDIR", &*missing)];
    let error = printed_with(&none, "error=");
    let reasons = [
        format!("others can write {}: run `chmod go-w` on it", state.display()),
        format!("{} is not a folder", runtime.display()),
        format!("{}: No such file or directory", missing.display()),
    ];
    let places: Vec<_> = reasons.iter().map(|reason| error.find(reason).unwrap_or_else(|| panic!("{error}"))).collect();
    assert!(places.is_sorted(), "{error}");
}
