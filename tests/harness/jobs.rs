//! The recorded jobs: traces of real PyTorch programs, in `tests/traces/`.
//!
//! | job | description | streams |
//! |---|---|---|
//! | `gpt2_train_varlen` | GPT-2 124M training, sequence lengths 64 to 1024 | 1 |
//! | `moe_train` | Mixtral-style mixture of experts | 1 |
//! | `resnet50_multiscale` | ResNet-50, image and batch size vary | 1 |
//! | `llama_generate` | 1B Llama-style generation, growing KV cache | 1 |
//! | `fsdp_train_rank{0,1}` | FSDP2 on 2 GPUs, both ranks | 3 |
//! | `fsdp1_train_rank{0,1}` | FSDP1 on 2 GPUs, `record_stream`, both ranks | 4 |

use std::path::PathBuf;
use symmalloc_core::op::Record;
use symmalloc_import::{ReadOptions, read_path};
use symmalloc_trace::replay::Program;

/// The recorded jobs, by file name without extension.
pub const JOBS: [&str; 8] = [
    "gpt2_train_varlen",
    "moe_train",
    "resnet50_multiscale",
    "llama_generate",
    "fsdp_train_rank0",
    "fsdp_train_rank1",
    "fsdp1_train_rank0",
    "fsdp1_train_rank1",
];

/// Returns the path of a recorded job's file: in the folder `SYMMALLOC_TRACES`, for executables that were copied to another machine, or
/// otherwise in the folder where this package was built.
pub fn path(job: &str) -> PathBuf {
    let traces = std::env::var_os("SYMMALLOC_TRACES").map(PathBuf::from);
    let traces = traces.unwrap_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/traces")));
    traces.join(format!("{job}.trace.zst"))
}

/// Returns the records of a recorded job.
///
/// # Panics
/// Panics if the file is missing or damaged.
pub fn records(job: &str) -> Vec<Record> {
    let read = read_path(&path(job), &ReadOptions::default());
    read.unwrap_or_else(|error| panic!("the recorded job {job} cannot be read: {error}")).records
}

/// Returns a recorded job as a program to replay.
///
/// # Panics
/// Panics if the file is missing or damaged.
pub fn program(job: &str) -> Program {
    Program::new(&records(job)).unwrap_or_else(|error| panic!("the recorded job {job} is not a program: {error}"))
}
