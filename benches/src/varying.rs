//! Random jobs from a seed. Their steps never repeat, which is the worst case for best fit in one growing range.
//!
//! They have the sizes and the order of events of real jobs, but none of their code:
//!
//! | job | streams | contents |
//! |---|---|---|
//! | `gnn` | 1 | training on sampled graphs: features, edges and activations of 40 MiB to 1.7 GiB, with new sizes in every step |
//! | `vit` | 5 | serving: requests of 1 to 24 images on five streams with interleaved layers; two image sizes |
//! | `lengths` | 1 | training a transformer on batches of 64 to 2,048 tokens per sequence |

use crate::workload::Workload;
use symmalloc_core::ids::StreamId;
use symmalloc_sim::SplitMix64;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// The names of the jobs.
pub const JOBS: [&str; 3] = ["gnn", "vit", "lengths"];

/// Generates `steps` steps of a job, all different.
///
/// # Panics
/// Panics if there is no job with this name.
pub fn job(name: &str, seed: u64, steps: usize) -> Workload {
    let mut writer = Writer { workload: Workload::default(), random: SplitMix64::new(seed), made: 0 };
    match name {
        "gnn" => writer.gnn(steps),
        "vit" => writer.vit(steps),
        "lengths" => writer.lengths(steps),
        _ => panic!("there is no job {name}"),
    }
    writer.workload.close();
    writer.workload
}

struct Writer {
    workload: Workload,
    random: SplitMix64,
    made: u32,
}

const S0: StreamId = StreamId(0);

impl Writer {
    fn allocate(&mut self, stream: StreamId, size_bytes: u64) -> u32 {
        self.workload.allocate(stream, size_bytes);
        self.made += 1;
        self.made - 1
    }

    fn free(&mut self, number: u32) {
        self.workload.free(number);
    }

    fn between(&mut self, least: u64, most: u64) -> u64 {
        least + self.random.below(most - least + 1)
    }

    /// Allocates a temporary block and frees it immediately.
    fn scratch(&mut self, stream: StreamId, size_bytes: u64) {
        let scratch = self.allocate(stream, size_bytes);
        self.free(scratch);
    }

    /// Allocates parameters with a gradient and two moments each.
    fn model(&mut self, parameters: usize, least: u64, most: u64) {
        for _ in 0..parameters {
            let size = self.between(least / 512, most / 512) * 512;
            for _ in 0..4 {
                self.allocate(S0, size);
            }
        }
    }

    fn gnn(&mut self, steps: usize) {
        self.model(24, 64 * KIB, 4 * MIB);
        let mut next = self.sample();
        for _ in 0..steps {
            let (hops, features) = next;
            let mut kept = Vec::new();
            for layer in (0..3).rev() {
                let (nodes, sources) = (hops[layer].min(1_700_000), hops[layer + 1].min(1_700_000));
                let edges = sources * self.between(110, 160) / 100;
                let index = self.allocate(S0, edges * 16);
                let gathered = self.allocate(S0, (edges * 1024).min(1_740 * MIB));
                let aggregated = self.allocate(S0, nodes * 1024);
                self.free(gathered);
                let linear = self.allocate(S0, nodes * 1024);
                self.scratch(S0, nodes * 512);
                let activated = self.allocate(S0, nodes * 1024);
                kept.push((nodes, edges, [index, aggregated, linear, activated]));
            }
            self.scratch(S0, hops[0] * 188);
            // The next batch is loaded in the meantime.
            next = self.sample();
            while let Some((nodes, edges, blocks)) = kept.pop() {
                let gradient = self.allocate(S0, nodes * 1024);
                let scattered = self.allocate(S0, (edges * 1024).min(1_740 * MIB));
                self.scratch(S0, 256 * KIB);
                blocks.into_iter().rev().for_each(|block| self.free(block));
                self.free(gradient);
                self.free(scattered);
            }
            self.free(features);
        }
    }

    /// Draws the number of nodes of a sampled graph, hop by hop, and allocates their features: rows of 256 floats.
    fn sample(&mut self) -> ([u64; 4], u32) {
        let mut hops = [0; 4];
        hops[0] = self.between(4 << 10, 9 << 10);
        for hop in 1..4 {
            hops[hop] = hops[hop - 1] * self.between(250, 620) / 100;
        }
        (hops, self.allocate(S0, hops[3].min(1_700_000) * 1024))
    }

    fn vit(&mut self, steps: usize) {
        for at in 0..200 {
            self.allocate(S0, [3 * MIB, 12 * MIB, 9 * KIB, 3 * KIB][at % 4]);
        }
        // For each stream: the layer of its request, its tokens, and its live blocks.
        let mut requests: Vec<(usize, u64, Vec<u32>)> = vec![(0, 0, Vec::new()); 5];
        for _ in 0..steps * 60 {
            let at = self.random.below(5) as usize;
            let stream = StreamId(at as u16);
            let (layer, tokens, mut live) = std::mem::take(&mut requests[at]);
            if layer == 0 {
                let images = self.between(1, 24);
                let tokens = images * [197, 577][self.random.below(2) as usize];
                let pixels = self.allocate(stream, images * 588 * KIB);
                let embedded = self.allocate(stream, tokens * 3072);
                self.free(pixels);
                requests[at] = (1, tokens, vec![embedded]);
                continue;
            }
            let qkv = self.allocate(stream, tokens * 9216);
            let scores = self.allocate(stream, tokens * 12 * 577 * 2);
            let mixed = self.allocate(stream, tokens * 3072);
            self.free(scores);
            self.free(qkv);
            let hidden = self.allocate(stream, tokens * 12_288);
            self.free(mixed);
            let out = self.allocate(stream, tokens * 3072);
            // Outputs of other requests lie between those of a request.
            live.push(out);
            self.free(live.remove(0));
            requests[at] = if layer == 12 {
                self.free(hidden);
                live.drain(..).for_each(|block| self.free(block));
                (0, 0, Vec::new())
            } else {
                self.free(hidden);
                (layer + 1, tokens, live)
            };
        }
        requests.into_iter().flat_map(|(_, _, live)| live).for_each(|block| self.free(block));
    }

    fn lengths(&mut self, steps: usize) {
        self.model(60, 256 * KIB, 10 * MIB);
        for _ in 0..steps {
            let tokens = 16 * self.between(64, 2048);
            let length = tokens / 16;
            let mut kept = Vec::new();
            for _ in 0..8 {
                let attention = 16 * 8 * length * length * 2;
                let sizes = [tokens * 1536, tokens * 4608, attention, tokens * 1536, tokens * 6144, tokens * 6144];
                let blocks: Vec<u32> = sizes.into_iter().map(|size| self.allocate(S0, size.max(512))).collect();
                self.scratch(S0, tokens * 1536);
                kept.push((blocks, sizes));
            }
            let logits = self.allocate(S0, tokens * 32_000 * 2);
            let loss = self.allocate(S0, tokens * 32_000 * 2);
            self.free(logits);
            while let Some((blocks, sizes)) = kept.pop() {
                let mut gradient = self.allocate(S0, tokens * 1536);
                for (block, size) in blocks.into_iter().zip(sizes).rev() {
                    let next = self.allocate(S0, size.max(512));
                    self.free(block);
                    self.free(gradient);
                    gradient = next;
                }
                self.free(gradient);
            }
            self.free(loss);
        }
    }
}
