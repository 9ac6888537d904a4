//! Flight records of this process: written at a failure, on request, and on a signal.

use crate::flight_record::{FlightRecord, FlightRecordError};
use crate::watching::handle;
use crate::watching::watched::{self, Identity};
use signal_hook::consts::{SIGUSR1, SIGUSR2};
use std::env;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// The environment variable with the folder of flight records. The default is the user's private folder.
const FOLDER_VARIABLE: &str = "SYMMALLOC_FLIGHT_RECORDS";
/// The environment variable with the signal on which a record is written: "USR1" or "USR2".
const SIGNAL_VARIABLE: &str = "SYMMALLOC_FLIGHT_SIGNAL";

/// Returns the current state of this process's communicators: the last 256 collectives of each with their progress, and
/// the known state of the other ranks. Takes at most a second.
///
/// # Examples
/// ```
/// let record = symmalloc_watchdog::flight_record("asked for by the operator");
/// assert_eq!(record.communicators, []);
/// ```
pub fn flight_record(reason: &str) -> FlightRecord {
    let watched = watched::all();
    let communicators = watched.iter().map(|it| it.record(&handle::members(it.identity()))).collect();
    FlightRecord::new(host(), reason.to_owned(), communicators)
}

/// Writes [`flight_record`] to the folder in `SYMMALLOC_FLIGHT_RECORDS`, by default to the user's [private
/// folder](symmalloc_files::private_folder). All records of the process go to one file, so the file contains the latest record.
/// `symmalloc diff` compares the records of all ranks. Returns the file's path.
///
/// # Errors
/// Returns an error if the file cannot be written, or no private folder is available.
pub fn write_flight_record(reason: &str) -> Result<PathBuf, FlightRecordError> {
    static PATH: Mutex<Option<PathBuf>> = Mutex::new(None);
    // Records are written one after the other, because they share a file.
    let mut path = PATH.lock().unwrap_or_else(PoisonError::into_inner);
    let first = || watched::all().first().map(|watched| name(watched.identity()));
    let process = || format!("symmalloc-flight-{}-process{}.json", sanitized(&host()), std::process::id());
    let file = match &*path {
        Some(file) => file.clone(),
        None => folder()?.join(first().unwrap_or_else(process)),
    };
    flight_record(reason).write(&file)?;
    Ok(path.insert(file).clone())
}

fn folder() -> Result<PathBuf, FlightRecordError> {
    match env::var_os(FOLDER_VARIABLE) {
        Some(named) => Ok(PathBuf::from(named)),
        None => Ok(symmalloc_files::private_folder()?),
    }
}

/// Returns a file name that starts with the process's first communicator, so that the records of all ranks sort together.
fn name(Identity { name, id, rank, .. }: &Identity) -> String {
    format!("symmalloc-flight-{}-{id}-rank{rank}.json", sanitized(name))
}

/// Maximum number of characters of a name in a file name, which has at most 255 bytes.
const NAME_CHARS_MAX: usize = 64;

/// Converts the beginning of a text to a part of a file name.
fn sanitized(text: &str) -> String {
    let visible = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '-' };
    text.chars().take(NAME_CHARS_MAX).map(visible).collect()
}

fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Set by the signal that the environment specifies.
static SIGNAL_ARRIVED: LazyLock<Arc<AtomicBool>> = LazyLock::new(|| {
    let flag = Arc::new(AtomicBool::new(false));
    let signal = match env::var(SIGNAL_VARIABLE).as_deref() {
        Ok("USR1" | "SIGUSR1") => SIGUSR1,
        Ok("USR2" | "SIGUSR2") => SIGUSR2,
        Ok(other) => {
            let error = format!("{SIGNAL_VARIABLE}={other}: use USR1 or USR2");
            tracing::warn!(name: "watchdog.failed", target: "symmalloc", error);
            return flag;
        }
        Err(_) => return flag,
    };
    if let Err(error) = signal_hook::flag::register(signal, Arc::clone(&flag)) {
        tracing::warn!(name: "watchdog.failed", target: "symmalloc", %error);
    }
    flag
});

/// Returns `true` if the signal arrived since the last call.
pub(super) fn has_signal_arrived() -> bool {
    SIGNAL_ARRIVED.swap(false, Ordering::AcqRel)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::CommunicatorId;
    use std::time::Duration;

    #[test]
    fn a_communicator_with_a_long_name_has_a_record_with_a_valid_file_name() {
        let (id, deadline) = (CommunicatorId(u64::MAX), Duration::MAX);
        let identity = Identity {
            id,
            name: "\u{1b}é/".repeat(2000).into(),
            rank: u32::MAX,
            ranks: u32::MAX,
            deadline,
            meeting: None,
        };
        let folder = symmalloc_files::TemporaryFolder::new().expect("a writable folder");
        let record = folder.path().join(name(&identity));
        flight_record("a test").write(&record).expect("the name is short enough");
        assert_eq!(FlightRecord::read(&record).expect("written above").reason, "a test");
    }
}
