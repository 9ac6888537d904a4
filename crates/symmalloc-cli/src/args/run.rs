//! What `symmalloc run` is asked to do.

use super::ReadingArgs;
use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;
use symmalloc_core::config::Config;

const RUN_EXAMPLES: &str = "\
Examples:
  symmalloc run -- python train.py                               cudaMalloc and cudaMallocAsync from symmalloc
  symmalloc run --stats --limit 20GiB -- ./simulate input.dat    figures at the end, and no more memory than this
  symmalloc run --record job.trace.zst -- ./simulate input.dat   its own allocator, only watched: for replay, report, plan
  symmalloc run --check -- torchrun --nproc-per-node 2 train.py  whether all ranks did alike

Ranks (torchrun, mpirun, srun) are recorded into a file each: job.rank0.trace.zst, job.rank1.trace.zst; `symmalloc diff` compares
two. Of a program that is killed the recording is there up to the last second: read it with --accept-torn.

What is served and what is the driver's: docs/run-calls.md. A program with a cache of its own above cudaMalloc, as PyTorch's, gains nothing.

Exit codes: the program's; 128 and the signal's number if a signal ended it; 3 if --check found that ranks differ; 127 if there is no
such program, 126 if it cannot be started; 2 bad input.";

/// Run any CUDA program, unchanged, with its memory from symmalloc, or only record it
///
/// A library goes between the program and libcuda (LD_PRELOAD) and serves cuMemAlloc, cuMemAllocAsync, cuMemAllocFromPoolAsync and all
/// frees, so cudaMalloc and cudaMallocAsync, too. Memory is cached, placed the same on every rank, and given out in stream order.
#[derive(Debug, clap::Args)]
#[command(after_help = RUN_EXAMPLES)]
pub(crate) struct RunArgs {
    /// Record what is allocated and freed as a trace (.zst and .gz compress). Alone, the program keeps its own allocator
    #[arg(long, value_name = "FILE")]
    pub(crate) record: Option<PathBuf>,
    /// Serve the program's memory, also where it is recorded
    #[arg(long)]
    pub(crate) serve: bool,
    /// Say at the end what was allocated, how long that took, and what was never freed
    #[arg(long)]
    pub(crate) stats: bool,
    /// The most device memory to hold on each device: 20GiB, 512MiB, or a number of bytes
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub(crate) limit: Option<Bytes>,
    /// Settings, as in docs/configuration.md: streams:shared,segments:fixed
    #[arg(long, value_name = "SETTINGS", value_parser = Config::from_str)]
    pub(crate) config: Option<Config>,
    /// Write a page about the program's memory (.html), as `symmalloc report` does
    #[arg(long, value_name = "OUT")]
    pub(crate) report: Option<PathBuf>,
    /// Compare the ranks that the program starts: exit with 3 if they differ
    #[arg(long)]
    pub(crate) check: bool,
    /// Leave cuMemAlloc to the driver, for programs that open its memory in other processes (cuIpcGetMemHandle)
    #[arg(long)]
    pub(crate) ipc: bool,
    /// The library to preload [default: SYMMALLOC_PRELOAD, else libsymmalloc_preload.so beside this program or in ../lib]
    #[arg(long, value_name = "FILE")]
    pub(crate) library: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) reading: ReadingArgs,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    pub(crate) command: Vec<OsString>,
}

/// An amount of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bytes(pub(crate) u64);

/// `20GiB`, `1.5 GiB`, `512MiB`, `1048576`. Units are powers of 1,024, with and without the `i` and the `B`.
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
