//! A router whose choices are a function of a seed, so that every rank can say what every other one chose.

/// Which expert every token goes to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Router {
    pub(crate) seed: u64,
    pub(crate) ranks: usize,
    pub(crate) experts_per_rank: usize,
    pub(crate) tokens_per_rank: usize,
}

/// One rank's tokens, in the order in which they are sent: by expert, and so by rank.
#[derive(Clone, Debug)]
pub(crate) struct Routing {
    /// (expert, token), ascending.
    pub(crate) order: Vec<(usize, usize)>,
    /// Tokens for every rank.
    pub(crate) rows: Vec<u64>,
}

impl Router {
    /// Choices of a rank's tokens in a load pattern. Loads differ wildly: even, with a favourite, with a rank that gets
    /// nothing, and with one that gets everything.
    pub(crate) fn route(&self, pattern: u64, rank: usize) -> Routing {
        let experts = self.ranks * self.experts_per_rank;
        let draw =
            |token: usize, what: u64| mix(mix(mix(self.seed ^ pattern) ^ rank as u64) ^ token as u64 ^ (what << 32));
        let favourite = (mix(self.seed ^ pattern) % experts as u64) as usize;
        let spared = favourite / self.experts_per_rank;
        let choose = |token: usize| {
            let any = (draw(token, 0) % experts as u64) as usize;
            match pattern % 4 {
                1 if draw(token, 1).is_multiple_of(2) => favourite,
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

    /// The most rows that a rank can get.
    pub(crate) fn rows_max(&self) -> usize {
        self.ranks * self.tokens_per_rank
    }
}

/// What a token says, by element: whole numbers that `f32` holds exactly, also doubled and with an expert added.
pub(crate) fn element(step: u64, rank: usize, token: usize, column: usize) -> f32 {
    let number = mix((step << 40) ^ ((rank as u64) << 32) ^ ((token as u64) << 12) ^ column as u64);
    (number % 65_536) as f32
}

/// What an expert makes of an element.
pub(crate) fn expert_output(expert: usize, element: f32) -> f32 {
    2.0 * element + expert as f32
}

/// SplitMix64's finaliser.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
