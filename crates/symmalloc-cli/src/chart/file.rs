//! Picture files: their formats and names.

use crate::error::CliError;
use crate::picture::png::png;
use std::path::Path;

/// Format of a picture file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Svg,
    Png,
}

impl Format {
    /// Returns the format that a file name has.
    ///
    /// # Errors
    /// Returns an error if no format has this extension.
    pub(super) fn of(path: &Path) -> Result<Self, CliError> {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("svg") => Ok(Format::Svg),
            Some("png") => Ok(Format::Png),
            _ => Err(CliError::UnknownPicture { path: path.to_path_buf() }),
        }
    }

    /// Returns the content of the picture's file.
    pub(super) fn file(self, picture: String) -> Result<Vec<u8>, CliError> {
        match self {
            Format::Png => Ok(png(&picture)?),
            Format::Svg => Ok(picture.into_bytes()),
        }
    }
}

/// Returns the last part of a path, for titles.
pub(crate) fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
