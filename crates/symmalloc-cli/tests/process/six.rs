//! Six jobs that fail as jobs often do. Each report must state what failed, why, and what to change.
//!
//! `SYMMALLOC_SIX=FOLDER` keeps the recordings, and the reports, for a person to read.

use crate::{Folder, symmalloc};
use serde_json::{Value, json};
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use symmalloc_sim::SplitMix64;

const MIB: u64 = 1 << 20;

/// A recording in the making.
#[derive(Default)]
struct Job {
    lines: Vec<String>,
    allocations: u64,
}

impl Job {
    fn new(config: &str, streams: usize) -> Self {
        let mut job = Job::default();
        job.lines.push(format!("config {config}"));
        job.lines.extend((0..streams).map(|stream| format!("stream s{stream}")));
        job
    }

    fn line(&mut self, line: &str) {
        self.lines.push(line.to_owned());
    }

    /// Allocates in the default pool.
    fn allocate(&mut self, bytes: u64, stream: u64, name: &str) -> u64 {
        self.allocate_in(0, bytes, stream, name)
    }

    fn allocate_in(&mut self, pool: u64, bytes: u64, stream: u64, name: &str) -> u64 {
        let id = self.allocations;
        self.lines.push(format!("a {id} {bytes} s{stream} p{pool} \"{name}\""));
        self.allocations += 1;
        id
    }

    fn free(&mut self, id: u64) {
        self.lines.push(format!("f {id}"));
    }

    fn free_all(&mut self, ids: impl IntoIterator<Item = u64>) {
        ids.into_iter().for_each(|id| self.free(id));
    }

    /// Allocates the weights, gradients and optimizer states of a model.
    fn model(&mut self, layers: u64, layer_bytes: u64) {
        for _ in 0..layers {
            self.allocate(layer_bytes, 0, "model.py:22 __init__");
        }
        for _ in 0..layers {
            self.allocate(layer_bytes, 0, "train.py:54 backward");
            self.allocate(2 * layer_bytes, 0, "adamw.py:131 _init_group");
        }
    }

    fn write(&self, folder: &Folder, name: &str) -> PathBuf {
        folder.trace(name, &self.lines.iter().map(String::as_str).collect::<Vec<_>>())
    }
}

/// Writes files that a person reads, if the environment names a folder.
fn keep(name: &str, recordings: &[&Path], said: &str, page: Option<&Path>) {
    let Some(folder) = env::var_os("SYMMALLOC_SIX").map(PathBuf::from) else { return };
    fs::create_dir_all(&folder).unwrap();
    for recording in recordings {
        fs::copy(recording, folder.join(recording.file_name().unwrap())).unwrap();
    }
    // A person runs the commands in the folder of the recordings.
    let parents: Vec<String> =
        recordings.iter().filter_map(|path| path.parent()).map(|parent| format!("{}/", parent.display())).collect();
    let without_folder = |text: &str| parents.iter().fold(text.to_owned(), |text, parent| text.replace(parent, ""));
    if let Some(page) = page {
        fs::write(folder.join(format!("{name}.html")), without_folder(&fs::read_to_string(page).unwrap())).unwrap();
    }
    fs::write(folder.join(format!("{name}.txt")), without_folder(said)).unwrap();
}

/// Returns the JSON and the text of the report of a job, and asserts that text and page contain the wanted sentences.
#[track_caller]
fn reported(folder: &Folder, job: &Job, name: &str, wanted: &[&str]) -> Value {
    let (trace, page) = (job.write(folder, &format!("{name}.trace")), folder.path(&format!("{name}.html")));
    let object = symmalloc("report {} -o {} --json", &[&trace, &page]).json(0);
    let text = symmalloc("report {} -o {}", &[&trace, &page]).exited(0).stdout.clone();
    keep(name, &[&trace], &text, Some(&page));
    let html = fs::read_to_string(&page).unwrap();
    for wanted in wanted {
        assert!(text.contains(wanted) && html.contains(wanted), "no {wanted:?} in:\n{text}");
    }
    object["failure"].clone()
}

/// Activations of other lengths in each step leave holes between blocks that stay.
#[test]
fn one_lengths_that_vary() {
    let folder = Folder::new();
    let mut job = Job::new("segments:fixed,total_limit_mb:6144,reclaim:never", 1);
    job.model(8, 40 * MIB);
    let mut random = SplitMix64::new(1);
    let mut kept = Vec::new();
    for step in 0..60 {
        let tokens = 64 + random.below(20) * 32;
        let mut step_ids = Vec::new();
        for layer in 0..8 {
            step_ids.push(job.allocate(tokens * 96 * 1024, 0, "model.py:61 attention"));
            step_ids.push(job.allocate(tokens * 160 * 1024, 0, "model.py:74 mlp"));
            if layer == 3 && step % 3 == 0 {
                kept.push(job.allocate(tokens * 24 * 1024, 0, "eval.py:19 keep_features"));
            }
        }
        job.free_all(step_ids);
        if kept.len() > 6 {
            job.free(kept.remove(0));
        }
    }
    job.allocate(2600 * MIB, 0, "model.py:90 logits");
    let failure = reported(
        &folder,
        &job,
        "one",
        &[
            "requested 2.54 GiB by model.py:90 logits",
            "fragmentation: 2.15 GiB of the limit of all pools (6.00 GiB) are unreserved, and the request needs 2.54 GiB; \
             the 2.55 GiB that are free are in 40 pieces of at most 106.00 MiB. reclaim:never keeps the free segments",
            "free: 2.55 GiB in 40 pieces",
            "symmalloc serves it within the same 6,144 MiB with segments:fixed,total_limit_mb:6144 (reclaim:heap instead of reclaim:never)",
            "nothing refused instead of 1 per pass (5 in 5 passes)",
        ],
    );
    assert_eq!((&failure["cause"], &failure["attempts"][0]["is_served"]), (&json!("fragmentation"), &json!(false)));
}

/// A list keeps the loss of every step, and with it its graph.
#[test]
fn two_a_list_that_grows() {
    let folder = Folder::new();
    let mut job = Job::new("segments:expandable,total_limit_mb:8192", 1);
    job.model(8, 40 * MIB);
    for _ in 0..400 {
        let activations: Vec<u64> = (0..8).map(|_| job.allocate(30 * MIB, 0, "model.py:61 attention")).collect();
        job.allocate(18 * MIB, 0, "train.py:88 losses.append");
        job.free_all(activations);
    }
    let failure = reported(
        &folder,
        &job,
        "two",
        &[
            "in 370 allocations by train.py:88 losses.append",
            "train.py:88 losses.append grows through the whole job: free what is no longer needed",
            "1.62 GiB live after a quarter of these ops",
            "the limit of all pools is 8.00 GiB",
            "raise total_limit_mb from 8,192 to at least 8,198 (8.01 GiB)",
            "no tested setting serves the request",
            "a plan needs at least 8.52 GiB, and the limit of all pools is 8.00 GiB",
        ],
    );
    assert_eq!(failure["cause"], "too much");
}

/// A pool for the cache of a server has a limit that is too low for its batch; the device has much more memory.
#[test]
fn three_a_limit_of_a_pool() {
    let folder = Folder::new();
    let mut job = Job::new("segments:expandable,total_limit_mb:20480", 1);
    job.line("pool p1 limit_mb:1024");
    for _ in 0..24 {
        job.allocate(200 * MIB, 0, "llama.py:30 load_weights");
    }
    let mut random = SplitMix64::new(3);
    let mut live = Vec::new();
    for _ in 0..2000 {
        let temporary = job.allocate(MIB + random.below(64 * MIB), 0, "sampler.py:12 logits");
        if random.below(3) > 0 {
            live.push(job.allocate_in(1, 16 * MIB, 0, "cache.py:45 append_block"));
        } else if !live.is_empty() {
            job.free(live.swap_remove(random.below(live.len() as u64) as usize));
        }
        job.free(temporary);
        if live.len() == 60 {
            break;
        }
    }
    job.allocate_in(1, 160 * MIB, 0, "cache.py:71 swap_in");
    let failure = reported(
        &folder,
        &job,
        "three",
        &[
            "raise limit_mb of pool 1 from 1,024 to at least 1,120 (1.09 GiB), free 96.00 MiB of pool 1",
            "; the limit of all pools leaves 14.31 GiB of 20.00 GiB",
            "no tested setting serves the request",
            "a plan needs at least 1.09 GiB, and the limit of pool 1 is 1.00 GiB",
            "960.00 MiB in 60 allocations by cache.py:45 append_block",
            "live memory of pool 1 and the request need 1.09 GiB, but the pool's limit is 1.00 GiB",
        ],
    );
    assert_eq!((&failure["limit"], &failure["pool"]), (&json!("pool"), &json!(1)));
}

/// Each captured graph has a private pool, and each pool keeps the memory of its warm-up.
#[test]
fn four_private_pools() {
    let folder = Folder::new();
    let mut job = Job::new("segments:expandable,total_limit_mb:10240,reclaim:never", 1);
    job.model(8, 30 * MIB);
    for pool in 1..=32 {
        job.line(&format!("pool p{pool} reclaim:never"));
        let batch = 33 - pool;
        let workspace = job.allocate_in(pool, 180 * MIB + batch * 3 * MIB, 0, "graphs.py:40 warm_up");
        job.free(workspace);
        job.allocate_in(pool, batch * MIB, 0, "graphs.py:52 capture");
    }
    job.allocate(3000 * MIB, 0, "train.py:97 evaluate");
    let failure = reported(
        &folder,
        &job,
        "four",
        &[
            "if they share one",
            "1.88 GiB of the limit of all pools (10.00 GiB) are unreserved, and the request needs 2.93 GiB; \
             the 6.67 GiB that are free are in 32 other pools, where it cannot use them",
            "free: 6.67 GiB in 32 pools",
            "let the 32 private pools with equal settings share one",
            "the request is then served. Graphs that share a pool must be replayed in the order of their capture",
            "no tested setting serves the request",
        ],
    );
    assert_eq!(failure["limit"], "total");
}

/// A prefetching stream and a communication stream each keep the peak of what they once needed.
#[test]
fn five_streams_that_hold_memory_of_each_other() {
    let folder = Folder::new();
    let mut job = Job::new("segments:expandable,limit_mb:4096,reclaim:never", 3);
    job.model(6, 30 * MIB);
    let mut random = SplitMix64::new(5);
    for phase in 0..3 {
        for _ in 0..30 {
            let inputs: Vec<u64> =
                (0..4).map(|_| job.allocate(10 * MIB + random.below(150 * MIB), 1, "data.py:33 prefetch")).collect();
            let buckets: Vec<u64> = (0..if phase == 1 { 8 } else { 2 })
                .map(|_| job.allocate(128 * MIB, 2, "ddp.py:210 all_reduce_bucket"))
                .collect();
            let activations: Vec<u64> = (0..6).map(|_| job.allocate(40 * MIB, 0, "model.py:61 attention")).collect();
            job.free_all(activations);
            job.free_all(buckets);
            job.free_all(inputs);
        }
    }
    job.allocate(2000 * MIB, 0, "model.py:90 logits");
    let failure = reported(
        &folder,
        &job,
        "five",
        &[
            "1.55 GiB of the pool's limit (4.00 GiB) are unreserved, and the request needs 1.95 GiB",
            "of the 1.75 GiB that are free, 1.51 GiB are in other streams of the pool, where it cannot use them",
            "reclaim:never keeps the free segments",
            "free: 1.75 GiB in 3 streams",
            "with segments:expandable,limit_mb:4096,reclaim:pool (reclaim:pool instead of reclaim:never)",
            "streams:shared",
        ],
    );
    assert_eq!((&failure["cause"], &failure["limit"]), (&json!("fragmentation"), &json!("pool")));
}

/// Rank 1 pads one batch to another length, so that its memory differs from rank 0's from then on.
#[test]
fn six_a_rank_that_diverges() {
    let folder = Folder::new();
    let ranks: Vec<PathBuf> = (0..2)
        .map(|rank| {
            let mut job = Job::new("segments:expandable,total_limit_mb:16384", 1);
            job.model(8, 20 * MIB);
            let mut random = SplitMix64::new(6);
            for step in 0..120 {
                let mut tokens = 128 + random.below(8) * 64;
                if rank == 1 && step == 77 {
                    tokens -= 64;
                }
                let batch = job.allocate(tokens * 8 * 1024, 0, "data.py:31 collate");
                let hidden: Vec<u64> =
                    (0..8).map(|_| job.allocate(tokens * 64 * 1024, 0, "model.py:61 attention")).collect();
                job.free_all(hidden);
                job.free(batch);
            }
            job.write(&folder, &format!("six-rank{rank}.trace"))
        })
        .collect();
    let text = symmalloc("diff {} {}", &[&ranks[0], &ranks[1]]).exited(3).stdout.clone();
    keep("six", &[&ranks[0], &ranks[1]], &text, None);
    assert_eq!(text.matches("data.py:31 collate").count(), 3, "{text}");
    for wanted in [
        "ranks must make the same requests. The first difference is op 1,411, data.py:31 collate:",
        "3.50 MiB in six-rank0.trace and 3.00 MiB in six-rank1.trace. Make it equal on all ranks",
        "8 later requests differ in size, and all other ops are the same",
        "placements  neither recording contains placements",
    ] {
        assert!(text.contains(wanted), "no {wanted:?} in:\n{text}");
    }
    let object = symmalloc("diff {} {} --json", &[&ranks[0], &ranks[1]]).json(3);
    // A stream, 24 allocations of the model, and 18 ops in each of 77 steps.
    assert_eq!(object["first_op_difference"]["a"]["op"], 1 + 24 + 18 * 77);
    assert_eq!(object["first_op_difference"]["b"]["op"], 1 + 24 + 18 * 77);
}
