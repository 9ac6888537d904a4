//! Test kernels, compiled with nvrtc.

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaContext, CudaFunction, CudaSlice, CudaStream, LaunchConfig, PushKernelArg};
use std::sync::Arc;
use symmalloc_cuda::{CudaBackend, DeviceBuffer, StreamAllocatorRef};

const SOURCE: &str = r#"
extern "C" __global__ void fill(unsigned int* to, unsigned int value, unsigned int count) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = value;
}
// Keeps one thread busy, so that later work on this stream is delayed.
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
        let ptx = cudarc::nvrtc::compile_ptx(SOURCE).expect("the kernels compile");
        let module = context.load_module(ptx).expect("the driver loads the module");
        let function = |name| module.load_function(name).expect("the kernel exists");
        Kernels { fill: function("fill"), delay: function("delay"), count_others: function("count_others") }
    }
}

/// Kernels on one stream, and a counter of the wrong elements that they found.
pub(crate) struct Worker {
    pub(crate) stream: Arc<CudaStream>,
    kernels: Kernels,
    wrong: CudaSlice<u32>,
}

impl Worker {
    pub(crate) fn new(stream: Arc<CudaStream>) -> Self {
        let kernels = Kernels::compile(stream.context());
        let wrong = stream.alloc_zeros::<u32>(1).expect("a counter");
        Worker { stream, kernels, wrong }
    }

    pub(crate) fn on_new_stream(context: &Arc<CudaContext>) -> Self {
        Self::new(context.new_stream().expect("a stream"))
    }

    /// Delays later work on the stream by about 0.2 ms.
    pub(crate) fn delay(&self) {
        let cycles = 400_000_u64;
        // SAFETY: touches no memory.
        unsafe { self.stream.launch_builder(&self.kernels.delay).arg(&cycles).launch(LaunchConfig::for_num_elems(1)) }
            .expect("launched");
    }

    pub(crate) fn fill<A>(&self, buffer: &mut DeviceBuffer<u32, A>, value: u32)
    where
        A: StreamAllocatorRef<Memory = CudaBackend>,
    {
        let count = buffer.len() as u32;
        let argument = buffer.on(&self.stream);
        // SAFETY: the buffer has `count` elements, and the argument, which orders the streams, lives until the launch.
        unsafe { self.fill_at(argument.pointer(), value, count) };
    }

    /// Counts the elements that differ from `value`.
    pub(crate) fn expect<A>(&self, buffer: &DeviceBuffer<u32, A>, value: u32)
    where
        A: StreamAllocatorRef<Memory = CudaBackend>,
    {
        let argument = buffer.read_on(&self.stream);
        // SAFETY: as in `fill`.
        unsafe { self.expect_at(argument.pointer(), value, buffer.len() as u32) };
    }

    /// # Safety
    /// At least `count` elements are at the address, and nobody else uses them before the kernel is done.
    pub(crate) unsafe fn fill_at(&self, pointer: CUdeviceptr, value: u32, count: u32) {
        let mut launch = self.stream.launch_builder(&self.kernels.fill);
        launch.arg(&pointer).arg(&value).arg(&count);
        // SAFETY: the caller's contract.
        unsafe { launch.launch(LaunchConfig::for_num_elems(count)) }.expect("launched");
    }

    /// # Safety
    /// At least `count` elements are at the address, and nobody writes them before the kernel is done.
    pub(crate) unsafe fn expect_at(&self, pointer: CUdeviceptr, value: u32, count: u32) {
        let mut launch = self.stream.launch_builder(&self.kernels.count_others);
        launch.arg(&pointer).arg(&value).arg(&count).arg(&self.wrong);
        // SAFETY: the caller's contract; only this stream uses the counter.
        unsafe { launch.launch(LaunchConfig::for_num_elems(count)) }.expect("launched");
    }

    /// Waits for the stream, and returns the number of wrong elements.
    pub(crate) fn wrong_elements(&self) -> u32 {
        self.stream.clone_dtoh(&self.wrong).expect("the kernels ran")[0]
    }
}
