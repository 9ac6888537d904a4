//! Names of picture files.

use crate::error::CliError;
use std::path::Path;

/// Checks that a file name has the extension `.svg`. SVG is the only format of pictures.
///
/// # Errors
/// Returns an error if the extension is different.
pub(super) fn require_svg(path: &Path) -> Result<(), CliError> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("svg") => Ok(()),
        _ => Err(CliError::UnknownPicture { path: path.to_path_buf() }),
    }
}

/// Returns the last part of a path, for titles.
pub(crate) fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
