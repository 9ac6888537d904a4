//! Makes one planted memory error, and prints what was found. `benches/memory_errors/run` runs all of them with all options.
//!
//! ```text
//! cargo run --release -p symmalloc-cuda --example memory_errors -- overrun 'debug:[canary]'
//! ```
//! Prints one line: `silent`, `NaN`, `found TEXT`, `error TEXT`, or `fault CODE TEXT`. Each error ends the process, because a fault ends the
//! context. The kernels are PTX, which the driver compiles, so no other library of CUDA is needed.

use cudarc::driver::{CudaFunction, CudaStream, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use std::error::Error;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;
use symmalloc_core::config::Config;
use symmalloc_core::op::Contents;
use symmalloc_core::{Allocation, DeviceAddress, PoolId};
use symmalloc_cuda::{Access, CudaAllocator, CudaDevice, GraphPool, Import};

/// `poke` writes a word per thread, `peek` reads one word, `delay` keeps the stream busy.
const KERNELS: &str = "
.version 6.0
.target sm_50
.address_size 64
.visible .entry poke(.param .u64 to, .param .u32 value)
{
    .reg .b32 %r<4>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [to];
    ld.param.u32 %r1, [value];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r2, %tid.x;
    mul.wide.u32 %rd3, %r2, 4;
    add.s64 %rd4, %rd2, %rd3;
    st.global.u32 [%rd4], %r1;
    ret;
}
.visible .entry peek(.param .u64 from, .param .u64 to)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [from];
    ld.param.u64 %rd2, [to];
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    ld.global.u32 %r1, [%rd3];
    st.global.u32 [%rd4], %r1;
    ret;
}
.visible .entry delay(.param .u64 cycles)
{
    .reg .pred %p<2>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [cycles];
    mov.u64 %rd2, %clock64;
again:
    mov.u64 %rd3, %clock64;
    sub.s64 %rd4, %rd3, %rd2;
    setp.lt.s64 %p1, %rd4, %rd1;
    @%p1 bra again;
    ret;
}
";

/// The bits of 1.0, which every block holds.
const ONE: u32 = 0x3F80_0000;
const BYTES: u64 = 4096;
/// Larger than a granule, so that `unmap` has an effect.
const LARGE_BYTES: u64 = 8 << 20;

type Outcome<T> = Result<T, Box<dyn Error>>;

struct Job {
    device: Arc<CudaDevice>,
    allocator: CudaAllocator,
    stream: Arc<CudaStream>,
    poke: CudaFunction,
    peek: CudaFunction,
    delay: CudaFunction,
    /// A word outside of the allocator.
    word: cudarc::driver::CudaSlice<u32>,
}

impl Job {
    fn new(options: &str) -> Outcome<Self> {
        let device = CudaDevice::new(0)?;
        let config: Config = format!("pointer_lookup:exact,{options}").trim_end_matches(',').parse()?;
        let stream = device.context().new_stream()?;
        let module = device.context().load_module(Ptx::from_src(KERNELS))?;
        let function = |name| module.load_function(name);
        let word = stream.alloc_zeros(1)?;
        let allocator = CudaAllocator::new(&device, config)?;
        let (poke, peek, delay) = (function("poke")?, function("peek")?, function("delay")?);
        Ok(Job { device, allocator, stream, poke, peek, delay, word })
    }

    /// Allocates a block that holds 1.0 everywhere.
    fn block(&self, bytes: u64, name: &str) -> Outcome<Allocation> {
        let made = self.allocator.allocate_named(&self.stream, bytes, name)?;
        for offset in (0..bytes).step_by(4096) {
            self.write(&self.stream, made.address.0 + offset, ONE, (bytes - offset).min(4096) as u32 / 4)?;
        }
        Ok(made)
    }

    /// Allocates memory that does not fit into what was freed, because freed memory is poisoned at its stream's next allocation.
    fn allocate_next(&self) -> Outcome<()> {
        let _never_freed = self.allocator.allocate_named(&self.stream, 8 * LARGE_BYTES, "next")?;
        Ok(())
    }

    /// Writes words, one per thread.
    fn write(&self, stream: &Arc<CudaStream>, address: u64, value: u32, words: u32) -> Outcome<()> {
        let launch = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (words, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the arguments are those of the kernel. The errors of this program are planted.
        unsafe { stream.launch_builder(&self.poke).arg(&address).arg(&value).launch(launch) }?;
        Ok(())
    }

    /// Submits the read of a word.
    fn submit_read(&mut self, stream: &Arc<CudaStream>, address: u64) -> Outcome<()> {
        let launch = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: as above.
        unsafe { stream.launch_builder(&self.peek).arg(&address).arg(&mut self.word).launch(launch) }?;
        Ok(())
    }

    /// Returns the word that was read last, as `silent` or `NaN`.
    fn read(&self, stream: &Arc<CudaStream>) -> Outcome<String> {
        stream.synchronize()?;
        let bits = stream.clone_dtoh(&self.word)?[0];
        Ok(if f32::from_bits(bits).is_nan() {
            format!("NaN {bits:#x}")
        } else {
            format!("silent, the value is {}", f32::from_bits(bits))
        })
    }

    /// Checks the memory after a write.
    fn check(&self) -> Outcome<String> {
        self.stream.synchronize()?;
        Ok(match self.allocator.core().check_memory() {
            Ok(_) => "silent".to_owned(),
            Err(damage) => format!("found {damage}"),
        })
    }

    fn plant(&mut self, error: &str) -> Outcome<String> {
        let stream = Arc::clone(&self.stream);
        match error {
            "overrun" | "overrun_page" | "underrun" => {
                let [first, second, _third] =
                    [self.block(BYTES, "first")?, self.block(BYTES, "second")?, self.block(BYTES, "third")?];
                match error {
                    "overrun" => self.write(&stream, first.address.0 + BYTES, 7, 1)?,
                    "overrun_page" => self.write(&stream, first.address.0 + BYTES, 7, 1024)?,
                    _ => self.write(&stream, second.address.0 - 4, 7, 1)?,
                }
                self.check()
            }
            "read_after_free" | "write_after_free" => {
                let _before = self.block(BYTES, "before")?;
                let block = self.block(LARGE_BYTES, "block")?;
                let _after = self.block(BYTES, "after")?;
                stream.synchronize()?;
                self.allocator.free(block.handle)?;
                self.allocate_next()?;
                let address = block.address.0 + LARGE_BYTES / 2;
                if error == "read_after_free" {
                    self.submit_read(&stream, address)?;
                    return self.read(&stream);
                }
                // At the start, which a comparison covers.
                self.write(&stream, block.address.0, 7, 1)?;
                self.write(&stream, address, 7, 1)?;
                stream.synchronize()?;
                for _ in 0..64 {
                    let other = self.block(LARGE_BYTES, "other")?;
                    self.allocator.free(other.handle)?;
                }
                self.check()
            }
            "read_after_sleep" | "write_after_sleep" => {
                let block = self.block(BYTES, "block")?;
                self.allocator.core().sleep(PoolId::DEFAULT, Contents::Keep)?;
                if error == "read_after_sleep" {
                    self.submit_read(&stream, block.address.0)?;
                } else {
                    self.write(&stream, block.address.0, 7, 1)?;
                }
                stream.synchronize().map_err(|error| self.explained(&error, block.address))?;
                Ok("silent".to_owned())
            }
            "other_stream" => {
                let other = self.device.context().new_stream()?;
                let block = self.block(BYTES, "block")?;
                stream.synchronize()?;
                let launch = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
                let cycles = 300_000_000_u64;
                // SAFETY: the arguments are those of the kernel.
                unsafe { other.launch_builder(&self.delay).arg(&cycles).launch(launch) }?;
                self.submit_read(&other, block.address.0)?;
                // The use by the other stream is not recorded, so nothing waits for it.
                self.allocator.free(block.handle)?;
                self.allocate_next()?;
                self.read(&other)
            }
            "double_free" => {
                let block = self.block(BYTES, "block")?;
                self.allocator.free(block.handle)?;
                Ok(self
                    .allocator
                    .free(block.handle)
                    .map_or_else(|error| format!("error {error}"), |()| "silent".to_owned()))
            }
            "inner_free" => {
                let block = self.block(BYTES, "block")?;
                let freed = self.allocator.core().free_at(DeviceAddress(block.address.0 + 16));
                Ok(freed.map_or_else(|error| format!("error {error}"), |_| "silent".to_owned()))
            }
            "graph_pool" => {
                let pool = GraphPool::new(&self.allocator, self.allocator.core().config().default_pool().clone())?;
                let capture = pool.begin(&stream)?;
                let inside = self.allocator.allocate_named(&stream, LARGE_BYTES, "inside")?;
                self.write(&stream, inside.address.0, ONE, 1)?;
                self.allocator.free(inside.handle)?;
                let graph = capture.end()?;
                graph.launch(&stream)?;
                stream.synchronize()?;
                drop((graph, pool));
                self.submit_read(&stream, inside.address.0)?;
                self.read(&stream).map_err(|error| self.explained(&error, inside.address))
            }
            "stale_import" => self.stale_import(),
            _ => Err(format!("unknown error {error}").into()),
        }
    }

    /// Reads memory of another process, which frees it in the meantime. Both ends are in this process.
    fn stale_import(&mut self) -> Outcome<String> {
        let stream = Arc::clone(&self.stream);
        let buffer = self.allocator.alloc_zeroed_named::<u32>(&stream, (LARGE_BYTES / 4) as usize, "weights")?;
        stream.synchronize()?;
        let export = self.allocator.export()?;
        let (server, client) = UnixStream::pair()?;
        let device = Arc::clone(&self.device);
        let import = std::thread::scope(|scope| {
            let timeout = Duration::from_secs(10);
            let importer = scope.spawn(move || Import::attach(&device, &client, Access::Read, timeout));
            export.serve(&server, Access::Read, timeout)?;
            Ok::<_, Box<dyn Error>>(importer.join().expect("no panic")?)
        })?;
        drop(buffer);
        std::thread::sleep(Duration::from_millis(100));
        Ok(import.check().map_or_else(|error| format!("error {error}"), |()| "silent".to_owned()))
    }

    /// Adds what the allocator knows about the address of a fault.
    fn explained(&self, error: &dyn std::fmt::Display, address: DeviceAddress) -> Box<dyn Error> {
        let explained = self.allocator.core().explain_address(address).to_string();
        format!("{error}; {}", explained.replace('\n', "; ")).into()
    }
}

fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let error = arguments.next().ok_or("usage: memory_errors ERROR [OPTIONS]")?;
    let mut job = Job::new(&arguments.next().unwrap_or_default())?;
    match job.plant(&error) {
        Ok(found) => println!("{found}"),
        Err(fault) => println!("fault {fault}"),
    }
    // After a fault, nothing can be released.
    std::process::exit(0)
}
