//! A router whose choices are a function of a seed, so that every rank can compute the choices of all others.

/// Assigns tokens to experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Router {
    pub(crate) seed: u64,
    pub(crate) ranks: usize,
    pub(crate) experts_per_rank: usize,
    pub(crate) tokens_per_rank: usize,
}

/// One rank's tokens in sending order: by expert, and therefore by rank.
#[derive(Clone, Debug)]
pub(crate) struct Routing {
    /// Pairs of (expert, token), in ascending order.
    pub(crate) order: Vec<(usize, usize)>,
    /// Number of tokens for every rank.
    pub(crate) rows: Vec<u64>,
}

impl Router {
    /// Routes a rank's tokens in a load pattern. Loads vary widely: they are even, have a favorite expert, or have a rank that receives
    /// nothing or everything.
    pub(crate) fn route(&self, pattern: u64, rank: usize) -> Routing {
        let experts = self.ranks * self.experts_per_rank;
        let draw =
            |token: usize, what: u64| mix(mix(mix(self.seed ^ pattern) ^ rank as u64) ^ token as u64 ^ (what << 32));
        let favorite = (mix(self.seed ^ pattern) % experts as u64) as usize;
        let spared = favorite / self.experts_per_rank;
        let choose = |token: usize| {
            let any = (draw(token, 0) % experts as u64) as usize;
            match pattern % 4 {
                1 if draw(token, 1).is_multiple_of(2) => favorite,
                2 if self.ranks > 1 && any / self.experts_per_rank == spared => (any + self.experts_per_rank) % experts,
                3 => spared * self.experts_per_rank + any % self.experts_per_rank,
                _ => any,
            }
        };
        let mut order: Vec<(usize, usize)> = (0..self.tokens_per_rank).map(|token| (choose(token), token)).collect();
        order.sort_unstable();
        let mut rows = vec![0; self.ranks];
        order.iter().for_each(|(expert, _)| rows[expert / self.experts_per_rank] += 1);
        Routing { order, rows }
    }

    /// Returns the maximum number of rows that a rank can receive.
    pub(crate) fn rows_max(&self) -> usize {
        self.ranks * self.tokens_per_rank
    }
}

/// Returns an element of a token: an integer that `f32` represents exactly, even when doubled and with an expert added.
pub(crate) fn element(step: u64, rank: usize, token: usize, column: usize) -> f32 {
    let number = mix((step << 40) ^ ((rank as u64) << 32) ^ ((token as u64) << 12) ^ column as u64);
    (number % 65_536) as f32
}

/// Returns an expert's output for an element.
pub(crate) fn expert_output(expert: usize, element: f32) -> f32 {
    2.0 * element + expert as f32
}

/// Computes the finalizer of SplitMix64.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
