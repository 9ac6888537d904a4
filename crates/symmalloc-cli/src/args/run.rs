//! The arguments of `symmalloc run`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;
use symmalloc_core::config::Config;

const RUN_EXAMPLES: &str = "\
Examples:
  symmalloc run -- python train.py                               cudaMalloc and cudaMallocAsync from symmalloc
  symmalloc run --stats --limit 20GiB -- ./simulate input.dat    statistics at the end, and a memory limit
  symmalloc run --record job.trace.zst -- ./simulate input.dat   only recorded, with its own allocator: for replay, report, plan
  symmalloc run --check -- torchrun --nproc-per-node 2 train.py  exits with 3 if the ranks differ

Each rank (torchrun, mpirun, srun) writes a separate file: job.rank0.trace.zst, job.rank1.trace.zst. `symmalloc diff` compares two of
them. If a program is killed, its recording is complete up to about the last second: read it with --accept-torn.

docs/run.md lists the calls that symmalloc serves and those that stay with the driver. A program with its own cache above
cudaMalloc, such as PyTorch's, gains nothing.

Exit codes: the program's; 128 plus the signal number if a signal ended it; 3 if --check found that ranks differ; 127 if the program
does not exist, 126 if it cannot be started; 2 if the input is invalid, or if the program succeeded but its recording or its statistics
could not be written.";

/// Run an unmodified CUDA program with memory from symmalloc, or record its allocations
///
/// A preloaded library (LD_PRELOAD) sits between the program and libcuda and serves cuMemAlloc, cuMemAllocAsync,
/// cuMemAllocFromPoolAsync and all frees, and therefore cudaMalloc and cudaMallocAsync as well. Memory is cached, placed the same on
/// every rank, and reused in stream order.
#[derive(Debug, clap::Args)]
#[command(after_help = RUN_EXAMPLES)]
pub(crate) struct RunArgs {
    /// Record allocations and frees as a trace (.zst and .gz compress). The program keeps its own allocator unless an allocator
    /// option is given
    #[arg(long, value_name = "FILE")]
    pub(crate) record: Option<PathBuf>,
    /// Serve the program's memory even when recording
    #[arg(long)]
    pub(crate) serve: bool,
    /// Print statistics at the end: allocations, their time, and memory that was never freed
    #[arg(long)]
    pub(crate) stats: bool,
    /// Limit of device memory on each device: 20GiB, 512MiB, or a number of bytes
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub(crate) limit: Option<Bytes>,
    /// Settings, as in docs/configuration.md: streams:shared,segments:fixed
    #[arg(long, value_name = "SETTINGS", value_parser = Config::from_str)]
    pub(crate) config: Option<Config>,
    /// Write a page about the program's memory (.html), as `symmalloc report` does
    #[arg(long, value_name = "OUT")]
    pub(crate) report: Option<PathBuf>,
    /// Compare the ranks that the program starts, and exit with 3 if they differ
    #[arg(long)]
    pub(crate) check: bool,
    /// Leave cuMemAlloc to the driver, for programs that share its memory with other processes (cuIpcGetMemHandle)
    #[arg(long)]
    pub(crate) ipc: bool,
    /// Library to preload [default: SYMMALLOC_PRELOAD, else libsymmalloc_preload.so next to this program or in ../lib]
    #[arg(long, value_name = "FILE")]
    pub(crate) library: Option<PathBuf>,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    pub(crate) command: Vec<OsString>,
}

/// An amount of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bytes(pub(crate) u64);

/// Parses a size: `20GiB`, `1.5 GiB`, `512MiB`, `1048576`. Units are powers of 1,024, with or without the `i` and the `B`.
fn parse_bytes(text: &str) -> Result<Bytes, String> {
    let unit_at = text.find(|letter: char| letter.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = (text[..unit_at].trim(), text[unit_at..].to_ascii_lowercase());
    let shift = match unit.trim_end_matches('b').trim_end_matches('i') {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return Err("use KiB, MiB, GiB or TiB, or a number of bytes".to_owned()),
    };
    let whole = number.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
    let fraction = || number.parse::<f64>().ok().filter(|number| (0.0..1e6).contains(number) && shift > 0);
    let bytes = whole.or_else(|| fraction().map(|number| (number * (1_u64 << shift) as f64) as u64));
    bytes.filter(|bytes| *bytes > 0).map(Bytes).ok_or_else(|| "give a size such as 20GiB".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        let bytes = |text| parse_bytes(text).ok().map(|bytes| bytes.0);
        assert_eq!([bytes("20GiB"), bytes("20g"), bytes("20 GB")], [Some(20 << 30); 3]);
        assert_eq!([bytes("1.5GiB"), bytes("512MiB"), bytes("4096")], [Some(3 << 29), Some(512 << 20), Some(4096)]);
        assert_eq!(
            [bytes("0"), bytes("GiB"), bytes("1.5"), bytes("3 miles"), bytes("-1k"), bytes("99999999TiB")],
            [None; 6]
        );
    }
}
