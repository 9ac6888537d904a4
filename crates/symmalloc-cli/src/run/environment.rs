//! The environment variables that configure the preload library: see `settings.rs` of `symmalloc-preload`.

use crate::args::RunArgs;
use crate::error::CliError;
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::Command;

/// Environment variables of the program.
pub(super) struct Environment {
    variables: Vec<(&'static str, OsString)>,
    is_watched: bool,
}

impl Environment {
    pub(super) fn new(args: &RunArgs, library: &Path, folder: Option<&Path>) -> Result<Self, CliError> {
        // A recording alone does not change the program's allocator.
        let is_watched =
            args.record.is_some() && !args.serve && !args.ipc && args.limit.is_none() && args.config.is_none();
        let mut environment = Environment { variables: Vec::new(), is_watched };
        environment.set("LD_PRELOAD", preloads(library)?);
        if is_watched {
            environment.set("SYMMALLOC_RUN_WATCH", "1");
        }
        if args.ipc {
            environment.set("SYMMALLOC_RUN_IPC", "1");
        }
        if let Some(config) = &args.config {
            environment.set("SYMMALLOC_RUN_CONFIG", config.to_string());
        }
        if let Some(limit) = args.limit {
            environment.set("SYMMALLOC_RUN_LIMIT", limit.0.to_string());
        }
        let kept = args.record.as_deref().map(|path| std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf()));
        let passing = folder.filter(|_| args.report.is_some()).map(|folder| folder.join("run.trace.zst"));
        if let Some(record) = kept.or(passing) {
            environment.set("SYMMALLOC_RUN_RECORD", record);
        }
        if let Some(folder) = folder {
            environment.set("SYMMALLOC_RUN_FOLDER", folder);
        }
        Ok(environment)
    }

    fn set(&mut self, name: &'static str, value: impl AsRef<OsStr>) {
        self.variables.push((name, value.as_ref().to_owned()));
    }

    /// Returns `true` if the program keeps its own allocator.
    pub(super) fn is_watched(&self) -> bool {
        self.is_watched
    }

    pub(super) fn apply(&self, command: &mut Command) {
        // Remove the settings of an outer run.
        for name in ["WATCH", "CONFIG", "LIMIT", "RECORD", "FOLDER", "IPC"] {
            command.env_remove(format!("SYMMALLOC_RUN_{name}"));
        }
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
    }
}

/// Returns the value of `LD_PRELOAD`. Our library comes first, so that it overrides libcuda and the caller's preloads.
fn preloads(library: &Path) -> Result<OsString, CliError> {
    if library.as_os_str().as_encoded_bytes().iter().any(|byte| b" :".contains(byte)) {
        return Err(CliError::PreloadPath { path: library.to_path_buf() });
    }
    let mut preloads = library.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preloads.push(":");
        preloads.push(others);
    }
    Ok(preloads)
}

/// Returns `true` if a launcher started this program as one of several ranks.
pub(super) fn has_rank() -> bool {
    ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"].into_iter().any(|name| std::env::var_os(name).is_some())
}
