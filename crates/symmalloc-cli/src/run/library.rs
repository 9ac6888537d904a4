//! Location of the preload library.

use crate::error::CliError;
use std::path::{Path, PathBuf};

const NAME: &str = "libsymmalloc_preload.so";

/// Returns the path of the option, or else of `SYMMALLOC_PRELOAD`, or else a path next to this program or in `../lib`.
pub(super) fn find(option: Option<&Path>) -> Result<PathBuf, CliError> {
    let named = option.map(Path::to_path_buf).or_else(|| std::env::var_os("SYMMALLOC_PRELOAD").map(PathBuf::from));
    let candidates = match named {
        Some(path) => vec![path],
        None => beside_this_program(),
    };
    let found = candidates.iter().find(|path| path.is_file()).cloned();
    // The program may start in a different folder.
    let found = found.and_then(|path| std::path::absolute(path).ok());
    found.ok_or(CliError::NoPreloadLibrary { tried: candidates })
}

fn beside_this_program() -> Vec<PathBuf> {
    let program = std::env::current_exe().and_then(|path| path.canonicalize()).unwrap_or_default();
    let folder = program.parent().unwrap_or(Path::new("."));
    vec![folder.join(NAME), folder.join("../lib").join(NAME)]
}
