//! The flags that control how recordings are read.

use crate::escape::quoted;
use symmalloc_import::ReadOptions;

/// Options for reading recordings. `default()` returns the options of a command line without these flags.
#[derive(Clone, Debug, Default, clap::Args)]
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
    /// Memory limit for one recording and its copies, in MiB [default: 4096; less for a small compressed file]
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    memory_limit_mb: Option<u64>,
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
        if let Some(limit_mb) = self.memory_limit_mb {
            flags += &format!(" --memory-limit-mb {limit_mb}");
        }
        flags
    }
}

impl From<&ReadingArgs> for ReadOptions {
    fn from(args: &ReadingArgs) -> Self {
        let mut options = ReadOptions::default();
        options.memory_limit_bytes = args.memory_limit_mb.map(|limit_mb| limit_mb << 20);
        options.device = args.device;
        options.accept_torn = args.accept_torn;
        options.libraries.extend(args.libraries.iter().cloned());
        options
    }
}
