//! The settings of the watchdog for a communicator, which the program and the environment choose.

use crate::watching::failure::Failure;
use std::env;
use std::fmt;
use std::sync::{Arc, LazyLock};

/// The environment variable that selects the watchdog's mode. It takes precedence over the program's choice.
pub(super) const MODE_VARIABLE: &str = "SYMMALLOC_WATCHDOG";

/// The watchdog's action when a rank is gone, stopped or stuck. The environment variable `SYMMALLOC_WATCHDOG` (`exit`, `abort` or `off`)
/// takes precedence over the program's choice. Set the variable when you use a debugger, which stops processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WatchdogMode {
    /// Aborts the communicator. If a kernel of NCCL cannot be aborted, ends the process with
    /// [`FAILURE_EXIT_CODE`](crate::FAILURE_EXIT_CODE).
    #[default]
    Exit,
    /// Aborts the communicator, and never ends the process.
    Abort,
    /// Keeps the flight record and takes no action. Host calls still have their deadline.
    Off,
}

impl WatchdogMode {
    fn from_word(word: &str) -> Option<Self> {
        match word.trim() {
            "exit" => Some(WatchdogMode::Exit),
            "abort" => Some(WatchdogMode::Abort),
            "off" => Some(WatchdogMode::Off),
            _ => None,
        }
    }
}

/// A callback that is called once, on a separate thread, when the watchdog ends the communicator.
pub type Callback = Arc<dyn Fn(&Failure) + Send + Sync>;

/// The watchdog's mode and the program's callback, see [`WatchdogMode`].
#[derive(Clone, Default)]
pub struct WatchSettings {
    mode: WatchdogMode,
    callback: Option<Callback>,
}

impl WatchSettings {
    /// Sets the program's choice, which the environment can override.
    pub fn set_mode(&mut self, mode: WatchdogMode) {
        self.mode = mode;
    }

    /// Sets the program's callback.
    pub fn set_callback(&mut self, callback: Callback) {
        self.callback = Some(callback);
    }

    pub(super) fn callback(&self) -> Option<Callback> {
        self.callback.clone()
    }

    /// Returns the mode. It is needed for every collective, so the environment is read only once.
    #[inline]
    pub fn mode(&self) -> WatchdogMode {
        static FROM_ENV: LazyLock<Option<WatchdogMode>> = LazyLock::new(|| {
            let word = env::var(MODE_VARIABLE).ok()?;
            let mode = WatchdogMode::from_word(&word);
            if mode.is_none() {
                let error =
                    format!("{MODE_VARIABLE} is {word:?}, which is not exit, abort or off: the value is ignored");
                tracing::warn!(name: "watchdog.failed", target: "symmalloc", %error);
            }
            mode
        });
        FROM_ENV.unwrap_or(self.mode)
    }
}

impl fmt::Debug for WatchSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let has_callback = self.callback.is_some();
        f.debug_struct("WatchSettings").field("mode", &self.mode).field("has_callback", &has_callback).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_words_select_no_mode() {
        assert_eq!(WatchdogMode::from_word(" off"), Some(WatchdogMode::Off));
        assert_eq!(WatchdogMode::from_word("exit"), Some(WatchdogMode::Exit));
        assert_eq!(WatchdogMode::from_word("abort"), Some(WatchdogMode::Abort));
        assert_eq!(WatchdogMode::from_word("no"), None);
    }
}
