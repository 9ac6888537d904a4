//! The files that `symmalloc diff` is given: two recordings, or flight records. Their content says which.

use super::{flights, report};
use crate::Verdict;
use crate::args::DiffArgs;
use crate::error::CliError;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// So much of a file says what it is.
const HEAD_BYTES: u64 = 4096;

/// What a file is meant to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileKind {
    FlightRecord,
    Recording,
}

/// Compares what is given; the verdict is `Differ` if ranks do.
pub(crate) fn run(args: &DiffArgs) -> Result<Verdict, CliError> {
    let first = |kind| args.files.iter().find(|path| kind_of(path) == Some(kind));
    match (first(FileKind::FlightRecord), first(FileKind::Recording)) {
        (Some(record), Some(recording)) => {
            Err(CliError::DiffOfBoth { record: record.clone(), recording: recording.clone() })
        }
        (Some(_), None) => flights::run(args),
        (None, _) => match &args.files[..] {
            [a, b] => report::run(a, b, args),
            files => Err(CliError::DiffOfNotTwo { recordings: files.len() }),
        },
    }
}

/// A flight record is JSON, and no recording is. `None` where nothing can be told: whoever reads the file says why. A pipe
/// is left alone, as what is read of it is gone.
fn kind_of(path: &Path) -> Option<FileKind> {
    let file = path.is_file().then(|| File::open(path).ok())??;
    let mut head = Vec::new();
    file.take(HEAD_BYTES).read_to_end(&mut head).ok()?;
    let first = head.trim_ascii_start().first()?;
    Some(if *first == b'{' { FileKind::FlightRecord } else { FileKind::Recording })
}
