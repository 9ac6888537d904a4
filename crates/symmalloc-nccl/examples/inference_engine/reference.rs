//! Reference answers, computed on the host with the arithmetic of `kernels.cu`: the same operations in the same order, each rounded once.
//! A token that differs is therefore an error, never a rounding effect.

use super::model::{END, EPSILON, HEAD, HEADS, HIDDEN, Layer, Matrix, Model, PARTS, SCORE_SCALE, STEPS};
use super::requests::Request;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Number of threads of a warp, each of which adds every 32nd product.
const LANES: usize = 32;

/// Returns the expected answer of each request, computed on all processors.
pub(crate) fn answers(model: &Model, requests: &[Request]) -> Vec<Vec<u32>> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(request) = requests.get(number) else { return done };
            done.push((number, answer(model, request)));
        }
    };
    let mut all = std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("the thread does not panic")).collect::<Vec<_>>()
    });
    all.sort_unstable_by_key(|(number, _)| *number);
    all.into_iter().map(|(_, answer)| answer).collect()
}

fn answer(model: &Model, request: &Request) -> Vec<u32> {
    let mut known = Known { keys: vec![Vec::new(); model.layers.len()], values: vec![Vec::new(); model.layers.len()] };
    let (last, before) = request.prompt.split_last().expect("a prompt has a token");
    for token in before {
        known.forward(model, *token);
    }
    let (mut token, mut answer) = (*last, Vec::new());
    while answer.len() < request.answer_max {
        token = largest(&product(&model.head, &normed(&known.forward(model, token))));
        answer.push(token);
        if token == END {
            break;
        }
    }
    answer
}

/// Keys and values of the tokens so far, by layer.
struct Known {
    keys: Vec<Vec<[f32; HIDDEN]>>,
    values: Vec<Vec<[f32; HIDDEN]>>,
}

impl Known {
    fn forward(&mut self, model: &Model, token: u32) -> Vec<f32> {
        let position = self.keys[0].len();
        let (token, place) = (row(&model.tokens, token as usize), row(&model.positions, position));
        let mut x: Vec<f32> = token.iter().zip(place).map(|(token, place)| token + place).collect();
        for (number, layer) in model.layers.iter().enumerate() {
            let found = self.attention(number, layer, &normed(&x));
            add(&mut x, &product_in_parts(&layer.out, &found, PARTS));
            let inner: Vec<f32> = product(&layer.up, &normed(&x)).into_iter().map(silu).collect();
            add(&mut x, &product_in_parts(&layer.down, &inner, PARTS));
        }
        x
    }

    fn attention(&mut self, number: usize, layer: &Layer, x: &[f32]) -> Vec<f32> {
        let qkv = product(&layer.qkv, x);
        let part = |which: usize| -> [f32; HIDDEN] {
            qkv[which * HIDDEN..][..HIDDEN].try_into().expect("the slice has the array's length")
        };
        let (queries, keys, values) = (part(0), &mut self.keys[number], &mut self.values[number]);
        keys.push(part(1));
        values.push(part(2));
        (0..HEADS)
            .flat_map(|head| {
                let of = |row: &[f32; HIDDEN]| -> [f32; HEAD] {
                    row[head * HEAD..][..HEAD].try_into().expect("the slice has the array's length")
                };
                let query = of(&queries);
                let score = |key: &[f32; HIDDEN]| {
                    let products = query.iter().zip(of(key)).map(|(query, key)| query * key);
                    products.fold(0.0, |sum: f32, product| sum + product) * SCORE_SCALE
                };
                let scores: Vec<f32> = keys.iter().map(score).collect();
                let most = scores.iter().copied().fold(f32::MIN, f32::max);
                let weights: Vec<f32> = scores.iter().map(|score| exponential(score - most)).collect();
                let total = weights.iter().fold(0.0, |sum: f32, weight| sum + weight);
                let mut found = [0.0_f32; HEAD];
                for (weight, value) in weights.iter().zip(values.iter().map(of)) {
                    found.iter_mut().zip(value).for_each(|(found, value)| *found += weight * value);
                }
                found.map(|found| found / total)
            })
            .collect()
    }
}

fn row(matrix: &Matrix, number: usize) -> &[f32] {
    &matrix.weights[number * matrix.inputs..][..matrix.inputs]
}

fn add(x: &mut [f32], more: &[f32]) {
    x.iter_mut().zip(more).for_each(|(x, more)| *x += more);
}

/// Computes a dot product in the order of a warp: each lane adds its products, then the lanes are added in pairs.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    for (a, b) in a.chunks_exact(LANES).zip(b.chunks_exact(LANES)) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    for apart in [16, 8, 4, 2, 1] {
        lanes = std::array::from_fn(|lane| lanes[lane] + lanes[lane ^ apart]);
    }
    lanes[0]
}

/// Multiplies a matrix by a vector.
fn product(matrix: &Matrix, x: &[f32]) -> Vec<f32> {
    matrix.rows().map(|weights| dot(weights, x)).collect()
}

/// Like [`product`], in equal parts of the inputs. Each part is rounded to a multiple of `1 / STEPS`, so that their sum is exact.
fn product_in_parts(matrix: &Matrix, x: &[f32], parts: usize) -> Vec<f32> {
    let length = matrix.inputs / parts;
    let sum = |weights: &[f32]| {
        let sums = weights.chunks_exact(length).zip(x.chunks_exact(length)).map(|(weights, x)| dot(weights, x));
        sums.map(|part| (part * STEPS).round_ties_even() / STEPS).fold(0.0, |sum, part| sum + part)
    };
    matrix.rows().map(sum).collect()
}

fn normed(x: &[f32]) -> Vec<f32> {
    let scale = 1.0 / (dot(x, x) / HIDDEN as f32 + EPSILON).sqrt();
    x.iter().map(|x| x * scale).collect()
}

fn silu(x: f32) -> f32 {
    x / (1.0 + exponential(-x))
}

/// Returns the first of the largest scores.
fn largest(scores: &[f32]) -> u32 {
    let first = (0..scores.len()).reduce(|best, at| if scores[at] > scores[best] { at } else { best });
    first.expect("there is a vocabulary") as u32
}

/// Approximates `exp` with operations that host and device round identically.
fn exponential(x: f32) -> f32 {
    let x = x.clamp(-80.0, 80.0);
    let whole = (x * std::f32::consts::LOG2_E).round_ties_even();
    let rest = x - whole * 0.693_359_4;
    let rest = rest - whole * -0.000_212_194_44;
    let mut sum = 0.008_333_333_f32;
    for factor in [0.041_666_668, 0.166_666_67, 0.5, 1.0, 1.0] {
        sum = sum * rest + factor;
    }
    sum * f32::from_bits(((whole as i32 + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_close() {
        for step in -800..800_i16 {
            let x = f32::from(step) / 10.0;
            let (found, expected) = (f64::from(exponential(x)), f64::from(x).exp());
            assert!((found / expected - 1.0).abs() < 1e-5, "{x}: {found} {expected}");
        }
    }

    #[test]
    fn partial_results_add_up_to_the_result_of_one_rank_in_any_order() {
        let model = Model::new(3);
        let x: Vec<f32> = (0..HIDDEN).map(|at| (at as f32 * 0.37).sin()).collect();
        let whole = product_in_parts(&model.layers[0].out, &x, PARTS);
        for ranks in [2, 4, 8] {
            for first in 0..ranks {
                let mut sum = vec![0.0; HIDDEN];
                for rank in (0..ranks).map(|rank| (first + 3 * rank) % ranks) {
                    let share = &x[rank * HIDDEN / ranks..][..HIDDEN / ranks];
                    add(&mut sum, &product_in_parts(&model.part(rank, ranks).layers[0].out, share, PARTS / ranks));
                }
                assert_eq!(sum, whole, "{ranks} ranks, from rank {first}");
            }
        }
    }

    #[test]
    fn an_answer_depends_only_on_its_request() {
        let model = Model::new(3);
        let requests = Request::generate(7, 3);
        let together = answers(&model, &requests);
        for (request, answer) in requests.iter().zip(&together) {
            assert_eq!(answers(&model, std::slice::from_ref(request))[0], *answer);
            assert!(!answer.is_empty() && answer.len() <= request.answer_max);
        }
    }
}
