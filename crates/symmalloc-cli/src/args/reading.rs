//! The flags that control how recordings are read.

use crate::escape::quoted;
use symmalloc_import::{MEMORY_LIMIT_BYTES, ReadOptions};

/// Options for reading recordings.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ReadingArgs {
    /// Device to read from a PyTorch snapshot with several devices
    #[arg(long, value_name = "D")]
    device: Option<usize>,
    /// Accept a truncated trace or log, and use the part before the truncation
    #[arg(long)]
    accept_torn: bool,
    /// Installed packages whose Python frames do not name allocations, besides PyTorch: `einops,transformers`, or `all`
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    libraries: Vec<String>,
    /// Memory limit for one recording and its copies, in MiB
    #[arg(long, value_name = "M", default_value_t = MEMORY_LIMIT_BYTES >> 20,
          value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    memory_limit_mb: u64,
}

impl Default for ReadingArgs {
    /// Returns the options of a command line without these flags.
    fn default() -> Self {
        ReadingArgs {
            device: None,
            accept_torn: false,
            libraries: Vec::new(),
            memory_limit_mb: MEMORY_LIMIT_BYTES >> 20,
        }
    }
}

impl ReadingArgs {
    /// Returns the command-line flags that set the same options, each preceded by a space.
    pub(crate) fn flags(&self) -> String {
        let mut flags = self.device.map_or_else(String::new, |device| format!(" --device {device}"));
        if self.accept_torn {
            flags += " --accept-torn";
        }
        if !self.libraries.is_empty() {
            flags += &format!(" --libraries {}", quoted(&self.libraries.join(",")));
        }
        if self.memory_limit_mb != MEMORY_LIMIT_BYTES >> 20 {
            flags += &format!(" --memory-limit-mb {}", self.memory_limit_mb);
        }
        flags
    }
}

impl From<&ReadingArgs> for ReadOptions {
    fn from(args: &ReadingArgs) -> Self {
        let mut options = ReadOptions::default().memory_limit_bytes(args.memory_limit_mb << 20);
        options.device = args.device;
        options.accept_torn = args.accept_torn;
        options.libraries.extend(args.libraries.iter().cloned());
        options
    }
}
