//! CUDA graphs and the memory pools that they use.

mod graph_pool;

pub use graph_pool::{DeviceGraph, GraphCapture, GraphPool};
