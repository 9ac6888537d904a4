//! A burn program without any reference to symmalloc. It learns to distinguish two spirals, on generated data, in
//! batches of varying sizes. `symmalloc run -- burn-train` runs it on the allocator.
//!
//! Exits with 0 if it classifies at least 98 of 100 new points correctly.

use burn::backend::{Autodiff, Cuda};
use burn::module::{AutodiffModule, Module};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::activation::relu;
use burn::tensor::backend::Backend;
use burn::tensor::{Device, Int, Tensor, TensorData};
use std::process::ExitCode;

type Training = Autodiff<Cuda>;

const STEPS: usize = 600;
const WIDTH: usize = 256;
const LEARNING_RATE: f64 = 3e-3;
const NEW_POINTS: usize = 10_000;
const ACCURACY_MIN: f64 = 0.98;

#[derive(Module, Debug)]
struct Network<B: Backend> {
    layers: Vec<Linear<B>>,
    scores: Linear<B>,
}

impl<B: Backend> Network<B> {
    fn new(device: &Device<B>) -> Self {
        let layers = [(2, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH)];
        let layers = layers.map(|(inputs, outputs)| LinearConfig::new(inputs, outputs).init(device));
        Network { layers: layers.into(), scores: LinearConfig::new(WIDTH, 2).init(device) }
    }

    fn forward(&self, points: Tensor<B, 2>) -> Tensor<B, 2> {
        self.scores.forward(self.layers.iter().fold(points, |x, layer| relu(layer.forward(x))))
    }
}

/// A random number generator that gives the same numbers in every run (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 24) as f32
    }

    /// Generates points of two spirals, and the spiral to which each point belongs.
    fn spirals<B: Backend>(&mut self, count: usize, device: &Device<B>) -> (Tensor<B, 2>, Tensor<B, 1, Int>) {
        let (mut points, mut labels) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let label = (self.next() % 2) as i64;
            let distance = 0.1 + 0.9 * self.unit();
            let angle = distance * 9.0 + label as f32 * std::f32::consts::PI;
            points.extend([distance * angle.cos(), distance * angle.sin()]);
            labels.push(label);
        }
        let points = Tensor::from_data(TensorData::new(points, [count, 2]), device);
        (points, Tensor::from_data(TensorData::new(labels, [count]), device))
    }
}

fn main() -> ExitCode {
    let device = Device::<Training>::default();
    Training::seed(&device, 1);
    let mut random = Random(1);
    let (mut network, mut optimizer) = (Network::<Training>::new(&device), AdamWConfig::new().init());
    let loss_of = CrossEntropyLossConfig::new().init(&device);
    for step in 0..STEPS {
        let count = 256 + (random.next() % 3840) as usize;
        let (points, labels) = random.spirals(count, &device);
        let loss = loss_of.forward(network.forward(points), labels);
        let gradients = GradientsParams::from_grads(loss.backward(), &network);
        network = optimizer.step(LEARNING_RATE, network, gradients);
        if step % 100 == 0 || step + 1 == STEPS {
            println!("step {step}: loss {:.4}", loss.into_scalar());
        }
    }
    let (points, labels) = random.spirals::<Cuda>(NEW_POINTS, &device);
    let found = network.valid().forward(points).argmax(1).squeeze_dim::<1>(1);
    let right: i64 = found.equal(labels).int().sum().into_data().iter::<i64>().sum();
    let accuracy = right as f64 / NEW_POINTS as f64;
    println!("accuracy {accuracy:.4} of {NEW_POINTS} new points");
    if accuracy >= ACCURACY_MIN { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
