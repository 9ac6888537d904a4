//! The model: a small transformer with weights generated from a seed, and its partition over ranks.
//!
//! Each rank has some of the heads and some of the inner units (tensor parallelism). Two products per layer end in sums over all of them:
//! `PARTS` partial sums, which one rank adds itself and several ranks add in an all-reduce. Partial sums are rounded to multiples of
//! `1 / STEPS`, so that adding them is exact. The results are therefore bitwise equal on any number of ranks and in any order of the
//! all-reduce.

/// Size of a hidden state.
pub(crate) const HIDDEN: usize = 256;
/// Number of attention heads over all ranks.
pub(crate) const HEADS: usize = 8;
/// Size of a head.
pub(crate) const HEAD: usize = HIDDEN / HEADS;
/// Factor of the scores of a head: `1 / sqrt(HEAD)`.
pub(crate) const SCORE_SCALE: f32 = 0.176_776_7;
/// Number of units between the two products after the attention.
pub(crate) const INNER: usize = 1024;
/// Number of layers.
pub(crate) const LAYERS: usize = 4;
/// Number of distinct tokens.
pub(crate) const VOCABULARY: usize = 1024;
/// Maximum number of tokens of a request, prompt and answer together.
pub(crate) const POSITIONS: usize = 256;
/// Number of partial sums of a product over units that ranks share. It is a multiple of every supported number of ranks.
pub(crate) const PARTS: usize = 8;
/// Number of steps from 0 to 1 to which partial sums are rounded. Sums of multiples of `1 / STEPS` up to 4,096 are exact in 24 bits.
pub(crate) const STEPS: f32 = 4096.0;
/// The token that ends an answer.
pub(crate) const END: u32 = 0;
/// A small number that keeps the root of a mean positive.
pub(crate) const EPSILON: f32 = 1e-5;

/// A matrix with a row of weights for each output.
#[derive(Clone)]
pub(crate) struct Matrix {
    /// Number of weights per output.
    pub(crate) inputs: usize,
    /// The weights, row by row.
    pub(crate) weights: Vec<f32>,
}

impl Matrix {
    fn random(random: &mut Random, outputs: usize, inputs: usize) -> Self {
        let scale = (3.0 / inputs as f32).sqrt();
        Matrix { inputs, weights: (0..outputs * inputs).map(|_| scale * random.unit()).collect() }
    }

    /// Returns the number of outputs.
    pub(crate) fn outputs(&self) -> usize {
        self.weights.len() / self.inputs
    }

    /// Returns the weights of each output.
    pub(crate) fn rows(&self) -> impl Iterator<Item = &[f32]> {
        self.weights.chunks_exact(self.inputs)
    }

    /// Returns one of `count` equal groups of outputs.
    fn outputs_of(&self, part: usize, count: usize) -> Vec<f32> {
        let length = self.weights.len() / count;
        self.weights[part * length..][..length].to_vec()
    }

    /// Returns one of `count` equal groups of inputs.
    fn inputs_of(&self, part: usize, count: usize) -> Matrix {
        let inputs = self.inputs / count;
        let weights = self.rows().flat_map(|row| &row[part * inputs..][..inputs]).copied().collect();
        Matrix { inputs, weights }
    }
}

/// One layer, or a rank's part of it.
#[derive(Clone)]
pub(crate) struct Layer {
    /// Queries, keys and values, concatenated.
    pub(crate) qkv: Matrix,
    /// Projection of the heads' outputs to `HIDDEN` numbers.
    pub(crate) out: Matrix,
    /// Projection to the inner units.
    pub(crate) up: Matrix,
    /// Projection back to `HIDDEN` numbers.
    pub(crate) down: Matrix,
}

/// The whole model, or a rank's part of it.
#[derive(Clone)]
pub(crate) struct Model {
    /// Token embeddings.
    pub(crate) tokens: Matrix,
    /// Position embeddings.
    pub(crate) positions: Matrix,
    /// The layers in order of execution.
    pub(crate) layers: Vec<Layer>,
    /// Projection to a score for each token of the vocabulary.
    pub(crate) head: Matrix,
}

impl Model {
    /// Generates the model of a seed.
    pub(crate) fn new(seed: u64) -> Self {
        let random = &mut Random(seed);
        let layer = |random: &mut Random| Layer {
            qkv: Matrix::random(random, 3 * HIDDEN, HIDDEN),
            out: Matrix::random(random, HIDDEN, HIDDEN),
            up: Matrix::random(random, INNER, HIDDEN),
            down: Matrix::random(random, HIDDEN, INNER),
        };
        Model {
            tokens: Matrix::random(random, VOCABULARY, HIDDEN),
            positions: Matrix::random(random, POSITIONS, HIDDEN),
            layers: (0..LAYERS).map(|_| layer(random)).collect(),
            head: Matrix::random(random, VOCABULARY, HIDDEN),
        }
    }

    /// Returns a rank's part: its heads and its inner units. Embeddings and scores are on every rank.
    pub(crate) fn part(&self, rank: usize, ranks: usize) -> Model {
        let layer = |layer: &Layer| {
            let [queries, keys, values] = [0, 1, 2].map(|which| {
                let all = Matrix { inputs: HIDDEN, weights: layer.qkv.outputs_of(which, 3) };
                all.outputs_of(rank, ranks)
            });
            Layer {
                qkv: Matrix { inputs: HIDDEN, weights: [queries, keys, values].concat() },
                out: layer.out.inputs_of(rank, ranks),
                up: Matrix { inputs: HIDDEN, weights: layer.up.outputs_of(rank, ranks) },
                down: layer.down.inputs_of(rank, ranks),
            }
        };
        Model { layers: self.layers.iter().map(layer).collect(), ..self.clone() }
    }
}

/// A pseudorandom generator with the same sequence on every machine (SplitMix64).
pub(crate) struct Random(pub u64);

impl Random {
    /// Returns the next number.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number in `low..high`.
    pub(crate) fn between(&mut self, low: usize, high: usize) -> usize {
        low + (self.next() % (high - low) as u64) as usize
    }

    /// Returns a number in `-1.0..1.0`.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}
