//! A serving job: weights, and then batches of 1 to 64 images in random order on five streams that share memory.

use symmalloc_plan::{Problem, Rectangle, SearchBudget, solve, solve_watched};

/// xorshift64*, so that the job is the same everywhere.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) % bound
    }
}

/// The way in which the job loads its weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loading {
    /// Each weight is allocated and stays.
    Direct,
    /// All weights are allocated in single precision, and then converted one by one.
    Converted,
}

/// Writes the rectangles of a job, in the order of its calls.
#[derive(Default)]
struct Job {
    rectangles: Vec<Rectangle>,
    now: u64,
}

impl Job {
    fn allocate(&mut self, bytes: u64) -> usize {
        self.now += 1;
        self.rectangles.push(Rectangle { lower: self.now, upper: u64::MAX, size: bytes.div_ceil(512) });
        self.rectangles.len() - 1
    }

    fn free(&mut self, allocation: usize) {
        self.now += 1;
        self.rectangles[allocation].upper = self.now;
    }

    fn finish(mut self) -> Vec<Rectangle> {
        let end = self.now + 1;
        self.rectangles.iter_mut().for_each(|it| it.upper = it.upper.min(end));
        self.rectangles
    }
}

/// One call of a forward pass.
#[derive(Clone, Copy)]
enum Call {
    /// Allocates a tensor.
    Allocate(u64),
    /// Frees the tensor with this number in the pass.
    Free(usize),
}

const TOKENS: u64 = 197;
const DIM: u64 = 768;
const LAYERS: u64 = 12;

/// Returns the calls of a ViT-B/16 in half precision on a batch of images.
fn forward(images: u64) -> Vec<Call> {
    let (mut calls, mut made) = (Vec::new(), 0);
    let hidden = images * TOKENS * DIM * 2;
    let mut allocate = |calls: &mut Vec<Call>, bytes: u64| {
        calls.push(Call::Allocate(bytes));
        made += 1;
        made - 1
    };
    let input = allocate(&mut calls, images * 3 * 224 * 224 * 4);
    let half = allocate(&mut calls, images * 3 * 224 * 224 * 2);
    let patches = allocate(&mut calls, images * (TOKENS - 1) * DIM * 2);
    let joined = allocate(&mut calls, hidden);
    calls.push(Call::Free(patches));
    let mut residual = allocate(&mut calls, hidden);
    calls.push(Call::Free(joined));
    for _ in 0..LAYERS {
        let mut layer = |calls: &mut Vec<Call>, wide: [u64; 3]| {
            let normed = allocate(calls, hidden);
            let first = allocate(calls, hidden * wide[0]);
            calls.push(Call::Free(normed));
            let second = allocate(calls, hidden * wide[1]);
            let small = allocate(calls, images * 12 * TOKENS * 4 * wide[2]);
            calls.push(Call::Free(first));
            let projected = allocate(calls, hidden);
            calls.extend([Call::Free(second), Call::Free(small)]);
            let sum = allocate(calls, hidden);
            calls.extend([Call::Free(projected), Call::Free(residual)]);
            residual = sum;
        };
        layer(&mut calls, [3, 1, 2]);
        layer(&mut calls, [4, 4, 1]);
    }
    let logits = allocate(&mut calls, images * 1000 * 2);
    calls.extend([residual, input, half, logits].map(Call::Free));
    calls
}

/// Returns the rectangles of the job.
fn serving(seed: u64, batches_per_stream: usize, loading: Loading) -> Vec<Rectangle> {
    let (mut random, mut job) = (Random(seed), Job::default());
    let weights: Vec<u64> = (0..LAYERS)
        .flat_map(|_| {
            [DIM, DIM, 3 * DIM * DIM, 3 * DIM, DIM * DIM, DIM, DIM, DIM, 4 * DIM * DIM, 4 * DIM, 4 * DIM * DIM, DIM]
        })
        .chain([DIM * 3 * 256, DIM, TOKENS * DIM, DIM, DIM * 1000, 1000])
        .collect();
    if loading == Loading::Direct {
        weights.iter().for_each(|count| _ = job.allocate(count * 2));
    } else {
        let loaded: Vec<usize> = weights.iter().map(|count| job.allocate(count * 4)).collect();
        for (count, single) in weights.iter().zip(loaded) {
            job.allocate(count * 2);
            job.free(single);
        }
    }
    // Each stream serves its batches one after the other. The host interleaves their calls.
    let mut streams: Vec<(usize, Vec<Call>, Vec<usize>)> =
        (0..5).map(|_| (batches_per_stream, Vec::new(), Vec::new())).collect();
    while !streams.is_empty() {
        let number = random.below(streams.len() as u64) as usize;
        let (left, calls, made) = &mut streams[number];
        // A burst of calls before another thread runs.
        for _ in 0..=random.below(40) {
            if calls.is_empty() {
                if *left == 0 {
                    break;
                }
                *left -= 1;
                made.clear();
                *calls = forward(1 + random.below(64));
                calls.reverse();
            }
            match calls.pop().expect("filled above") {
                Call::Allocate(bytes) => made.push(job.allocate(bytes)),
                Call::Free(number) => job.free(made[number]),
            }
        }
        if *left == 0 && calls.is_empty() {
            streams.remove(number);
        }
    }
    job.finish()
}

#[test]
fn a_plan_of_a_serving_job_needs_little_more_than_its_live_memory() {
    for loading in [Loading::Direct, Loading::Converted] {
        for seed in 1..=3 {
            let problem = Problem::new(serving(seed, 20, loading)).expect("the job should be valid");
            let solution = solve(&problem, SearchBudget(4_000_000));
            assert_eq!(solution.check(&problem), Ok(()));
            let share = problem.lower_bound() as f64 / solution.height() as f64;
            assert!(share >= 0.98, "{loading:?}, seed {seed}: live memory is {share:.4} of the plan");
        }
    }
}

#[test]
fn a_watched_search_finds_the_same_and_improves() {
    let problem = Problem::new(serving(1, 10, Loading::Converted)).expect("the job should be valid");
    let mut states = Vec::new();
    let solution = solve_watched(&problem, SearchBudget(1_000_000), |state| states.push(state));
    assert_eq!(solution, solve(&problem, SearchBudget(1_000_000)));
    assert!(states.is_sorted_by(|one, next| one.work <= next.work && one.height >= next.height), "{states:?}");
    let last = states.last().expect("the search was watched");
    assert_eq!((last.height, last.lower_bound), (solution.height(), problem.lower_bound()));
}
