//! The project's recorded jobs, embedded in the program: `symmalloc replay gpt2`. `tests/traces/README.md` describes them.

use std::path::Path;

/// A recorded job.
struct RecordedJob {
    /// File name, followed by the short names.
    names: &'static [&'static str],
    /// Compressed trace.
    trace: &'static [u8],
}

macro_rules! jobs {
    ($($file:literal $(, $short:literal)*;)*) => {
        &[$(RecordedJob {
            names: &[$file $(, $short)*],
            trace: include_bytes!(concat!("../jobs/", $file, ".trace.zst")),
        }),*]
    };
}

static JOBS: &[RecordedJob] = jobs! {
    "gpt2_train_varlen", "gpt2";
    "moe_train", "moe";
    "resnet50_multiscale", "resnet50";
    "llama_generate", "llama";
    "gnn_sampled", "gnn";
    "transformer_named", "demo";
    "fsdp_train_rank0", "fsdp", "fsdp_rank0";
    "fsdp_train_rank1", "fsdp_rank1";
    "fsdp1_train_rank0", "fsdp1", "fsdp1_rank0";
    "fsdp1_train_rank1", "fsdp1_rank1";
};

/// Returns the compressed trace of the job with this name.
pub(crate) fn trace(name: &Path) -> Option<&'static [u8]> {
    let name = name.to_str()?;
    JOBS.iter().find(|job| job.names.contains(&name)).map(|job| job.trace)
}

/// Returns the short name of each job.
pub(crate) fn short_names() -> impl Iterator<Item = &'static str> {
    JOBS.iter().map(|job| job.names.get(1).copied().unwrap_or(job.names[0]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use symmalloc_import::{ReadOptions, read_bytes};

    #[test]
    fn each_name_is_one_job_that_can_be_read() {
        let mut names: Vec<&str> = JOBS.iter().flat_map(|job| job.names).copied().collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all, "a name twice");
        for job in JOBS {
            assert!(
                read_bytes(job.trace, &ReadOptions::default()).unwrap().summary.allocations > 1000,
                "{}",
                job.names[0]
            );
        }
        assert!(trace(Path::new("gpt2")).is_some() && trace(Path::new("gpt3")).is_none());
    }
}
