//! The flags that say how recordings are read.

use symmalloc_import::{MEMORY_LIMIT_BYTES, ReadOptions};

/// How recordings are read.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ReadingArgs {
    /// Device of a PyTorch snapshot that recorded several
    #[arg(long, value_name = "D")]
    device: Option<usize>,
    /// Take a trace or log that ends in the middle up to there
    #[arg(long)]
    accept_torn: bool,
    /// Memory that one recording may take while it is read, in MiB
    #[arg(long, value_name = "M", default_value_t = MEMORY_LIMIT_BYTES >> 20,
          value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    memory_limit_mb: u64,
}

impl ReadingArgs {
    /// The flags that say the same, each after a blank.
    pub(crate) fn flags(&self) -> String {
        let mut flags = self.device.map_or_else(String::new, |device| format!(" --device {device}"));
        if self.accept_torn {
            flags += " --accept-torn";
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
        options
    }
}
