//! CUDA graphs and the memory that they keep.

mod graph_pool;

pub use graph_pool::{DeviceGraph, GraphCapture, GraphPool};
