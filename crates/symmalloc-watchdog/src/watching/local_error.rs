//! Errors of the driver or NCCL, type-erased.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

/// An error that a library reported on this rank. Two errors are equal if their texts are equal.
///
/// # Examples
/// ```
/// use std::io;
/// use symmalloc_watchdog::LocalError;
///
/// let error = LocalError::new(io::Error::from(io::ErrorKind::BrokenPipe));
/// let source = error.downcast_ref::<io::Error>().expect("the type that was passed");
/// assert_eq!(source.kind(), io::ErrorKind::BrokenPipe);
/// ```
#[derive(Clone)]
pub struct LocalError(Arc<dyn Error + Send + Sync>);

impl LocalError {
    /// Wraps the error of a library.
    pub fn new(error: impl Error + Send + Sync + 'static) -> Self {
        LocalError(Arc::new(error))
    }

    /// Returns the library's error if it has this type.
    pub fn downcast_ref<E: Error + 'static>(&self) -> Option<&E> {
        self.0.downcast_ref()
    }
}

impl PartialEq for LocalError {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

impl Eq for LocalError {}

impl fmt::Debug for LocalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for LocalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl Error for LocalError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}
