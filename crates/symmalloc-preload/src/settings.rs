//! Settings from environment variables, which `symmalloc run` sets. If none is set, the library serves the program with the default
//! configuration.
//!
//! | variable | meaning |
//! |---|---|
//! | `SYMMALLOC_RUN_WATCH` | `1`: the program keeps its own allocator, and is only recorded |
//! | `SYMMALLOC_RUN_CONFIG` | the configuration, as in `docs/configuration.md` |
//! | `SYMMALLOC_RUN_LIMIT` | the maximum device memory to hold, in bytes, on each device |
//! | `SYMMALLOC_RUN_RECORD` | the trace to write, as a pattern with `%r`, `%d`, `%p` |
//! | `SYMMALLOC_RUN_FOLDER` | a folder for the reports of the run's processes to `symmalloc run` |
//! | `SYMMALLOC_RUN_IPC` | `1`: the driver serves `cuMemAlloc`, so that other processes can open its memory |

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::OnceLock;
use symmalloc_core::Config;
use symmalloc_core::config::{ConfigError, PointerLookup};
use symmalloc_core::config_text::ConfigTextError;
use symmalloc_files::say;
use thiserror::Error;

/// Settings of this process.
#[derive(Debug)]
pub(crate) struct Settings {
    /// `true` if the program keeps its own allocator and is only recorded.
    pub(crate) is_watched: bool,
    /// `true` if `cuMemAlloc` is passed to the driver.
    pub(crate) is_ipc: bool,
    pub(crate) config: Config,
    /// File name pattern of the trace.
    pub(crate) record: Option<String>,
    pub(crate) folder: Option<PathBuf>,
}

/// The reason the settings are invalid.
#[derive(Debug, Error)]
pub(crate) enum SettingsError {
    #[error("SYMMALLOC_RUN_CONFIG: {0}")]
    Text(#[from] ConfigTextError),
    #[error("SYMMALLOC_RUN_CONFIG: {0}")]
    Config(#[from] ConfigError),
    #[error("SYMMALLOC_RUN_LIMIT must be a number of bytes")]
    Limit,
    #[error("{variable} must be UTF-8")]
    NotText { variable: &'static str },
}

/// Returns the settings of this process. If they are invalid, prints the error once, and the driver serves everything.
pub(crate) fn settings() -> Option<&'static Settings> {
    static SETTINGS: OnceLock<Option<Settings>> = OnceLock::new();
    let read = || {
        Settings::read(|name| std::env::var_os(name)).inspect_err(|error| {
            say(format_args!("{error}: this program runs without symmalloc"));
        })
    };
    SETTINGS.get_or_init(|| read().ok()).as_ref()
}

impl Settings {
    /// Returns `true` if the configuration has debugging options.
    pub(crate) fn is_debugged(&self) -> bool {
        !self.config.default_pool().debug().is_off()
    }

    fn read(variable: impl Fn(&str) -> Option<OsString>) -> Result<Self, SettingsError> {
        let text = |name: &'static str| match variable(name).map(OsString::into_string) {
            None => Ok(None),
            Some(Ok(text)) => Ok(Some(text).filter(|text| !text.is_empty())),
            Some(Err(_)) => Err(SettingsError::NotText { variable: name }),
        };
        let is_set = |name: &'static str| Ok::<_, SettingsError>(text(name)?.is_some_and(|value| value != "0"));
        let config: Config = text("SYMMALLOC_RUN_CONFIG")?.unwrap_or_default().parse()?;
        // The core's own lookup is off: this library looks up handles in its ledger, which stores more data per
        // allocation.
        let mut builder = config.to_builder().pointer_lookup(PointerLookup::Off);
        if let Some(limit) = text("SYMMALLOC_RUN_LIMIT")? {
            let limit = limit.parse().map_err(|_| SettingsError::Limit)?;
            builder = builder.total_limit_bytes(Some(limit));
        }
        Ok(Settings {
            is_watched: is_set("SYMMALLOC_RUN_WATCH")?,
            is_ipc: is_set("SYMMALLOC_RUN_IPC")?,
            config: builder.build()?,
            record: text("SYMMALLOC_RUN_RECORD")?,
            folder: variable("SYMMALLOC_RUN_FOLDER").filter(|folder| !folder.is_empty()).map(PathBuf::from),
        })
    }
}

/// Returns the first of these variables that is set to a number.
fn number(names: [&str; 4]) -> Option<u64> {
    names.into_iter().find_map(|name| std::env::var(name).ok()?.parse().ok())
}

/// Returns the rank of this process in its job, as set by torchrun, Open MPI, MPICH or Slurm.
pub(crate) fn rank() -> Option<u64> {
    number(["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"])
}

/// Returns the number of ranks of the job.
pub(crate) fn ranks() -> Option<u64> {
    number(["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Settings, SettingsError> {
        Settings::read(|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into()))
    }

    #[test]
    fn no_variables_mean_the_defaults() {
        let settings = read(&[]).expect("the text should be valid");
        assert!(!settings.is_watched && !settings.is_ipc && settings.record.is_none() && settings.folder.is_none());
        assert_eq!(settings.config, Config::default());
    }

    #[test]
    fn a_limit_and_a_configuration_combine() {
        let variables = [("SYMMALLOC_RUN_CONFIG", "segments:fixed"), ("SYMMALLOC_RUN_LIMIT", "1048576")];
        let settings = read(&variables).expect("the text should be valid");
        assert_eq!(settings.config.total_limit_bytes(), Some(1 << 20));
        assert_eq!(
            settings.config.default_pool(),
            "segments:fixed".parse::<Config>().expect("the text should be valid").default_pool()
        );
    }

    #[test]
    fn errors_name_the_variable() {
        let error = |variables| read(variables).expect_err("invalid settings").to_string();
        assert!(error(&[("SYMMALLOC_RUN_CONFIG", "segment:fixed")]).starts_with("SYMMALLOC_RUN_CONFIG: byte 0"));
        assert_eq!(error(&[("SYMMALLOC_RUN_LIMIT", "1G")]), "SYMMALLOC_RUN_LIMIT must be a number of bytes");
    }
}
