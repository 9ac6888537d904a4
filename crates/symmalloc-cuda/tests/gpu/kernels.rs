//! Kernels of the tests, compiled with nvrtc.

use cudarc::driver::{CudaContext, CudaFunction};
use std::sync::Arc;

const SOURCE: &str = r#"
extern "C" __global__ void fill(unsigned int* to, unsigned int value, unsigned int count) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = value;
}
// Keeps one thread busy, so that the work behind it on this stream is late.
extern "C" __global__ void delay(unsigned long long cycles) {
    long long start = clock64();
    while (clock64() - start < (long long)cycles) { }
}
extern "C" __global__ void count_others(const unsigned int* from, unsigned int value, unsigned int count, unsigned int* wrong) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count && from[i] != value) atomicAdd(wrong, 1u);
}
"#;

pub(crate) struct Kernels {
    pub(crate) fill: CudaFunction,
    pub(crate) delay: CudaFunction,
    pub(crate) count_others: CudaFunction,
}

impl Kernels {
    pub(crate) fn compile(context: &Arc<CudaContext>) -> Self {
        let ptx = cudarc::nvrtc::compile_ptx(SOURCE).expect("nvrtc compiles it");
        let module = context.load_module(ptx).expect("the driver takes it");
        let function = |name| module.load_function(name).expect("it is there");
        Kernels { fill: function("fill"), delay: function("delay"), count_others: function("count_others") }
    }
}
