"""Runs CuPy, JAX, Numba or cuda.core and prints a digest of the results, which is equal with and without `symmalloc run`.

`cuda_core` uses the library's own memory resource, and `cuda_core_symmalloc` that of `symmalloc.cuda_core`.
"""

import hashlib
import os
import sys

import numpy


def digest(array) -> str:
    return hashlib.sha256(numpy.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def cupy_job(pool: str) -> str:
    import cupy

    if pool == "async":
        cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
    elif pool == "none":
        cupy.cuda.set_allocator(None)
    total = cupy.zeros((512, 512), dtype=cupy.int64)
    for number in range(200):
        a = cupy.arange(512 * (256 + number % 64), dtype=cupy.int64).reshape(512, -1)
        total += a[:, :1] * number + (a @ a.T)
    return digest(cupy.asnumpy(total))


def jax_job() -> str:
    import jax
    import jax.numpy as jnp

    x = jnp.arange(1 << 18, dtype=jnp.int32).reshape(512, 512)
    for _ in range(50):
        x = jnp.roll(x, 3, axis=0) * 3 + x.T
    return digest(jax.device_get(x))


def numba_job() -> str:
    from numba import cuda

    total = numpy.zeros(1 << 16, dtype=numpy.int64)
    for number in range(100):
        array = cuda.to_device(numpy.arange(1 << 16, dtype=numpy.int64) * number)
        total += array.copy_to_host()
    return digest(total)


CUDA_CORE_KERNEL = """
extern "C" __global__ void fill(unsigned long long *words, unsigned long long value, unsigned long long count) {
    for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) words[i] = value + i;
}
extern "C" __global__ void add(unsigned long long *total, const unsigned long long *words, unsigned long long count) {
    for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) total[i] += words[i];
}
"""


def cuda_core_job(is_ours: bool) -> str:
    """Fills buffers on one stream and adds them up on another. Closes each buffer immediately."""
    from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

    device = Device(0)
    device.set_current()
    filling, adding = device.create_stream(), device.create_stream()
    options = ProgramOptions(std="c++17", arch=f"sm_{device.arch}")
    module = Program(CUDA_CORE_KERNEL, code_type="c++", options=options).compile("cubin")
    fill, add = module.get_kernel("fill"), module.get_kernel("add")
    config = LaunchConfig(grid=64, block=256)
    count = 1 << 20
    if is_ours:
        import symmalloc.cuda_core

        memory = symmalloc.cuda_core.MemoryResource(0)
    else:
        memory = device.memory_resource
    total = memory.allocate(8 * count, stream=adding)
    launch(adding, config, fill, int(total.handle), 0, count)
    for number in range(200):
        words = memory.allocate(8 * count, stream=filling)
        launch(filling, config, fill, int(words.handle), number * count, count)
        adding.wait(filling)
        launch(adding, config, add, int(total.handle), int(words.handle), count)
        if is_ours:
            symmalloc.cuda_core.record_use(words, adding)
        else:
            filling.wait(adding)
        words.close()
    result = numpy.empty(count, dtype=numpy.uint64)
    device.sync()
    from cuda.bindings import driver

    (code,) = driver.cuMemcpyDtoH(result.ctypes.data, int(total.handle), result.nbytes)
    assert int(code) == 0, code
    expected = numpy.arange(count, dtype=numpy.uint64) * 201 + sum(range(200)) * count
    assert (result == expected).all(), f"{(result != expected).sum()} wrong elements"
    total.close(adding)
    return digest(result)


def main() -> None:
    name = sys.argv[1]
    job = {
        "cupy": lambda: cupy_job("pool"),
        "cupy_async": lambda: cupy_job("async"),
        "cupy_none": lambda: cupy_job("none"),
        "jax": jax_job,
        "numba": numba_job,
        "cuda_core": lambda: cuda_core_job(False),
        "cuda_core_symmalloc": lambda: cuda_core_job(True),
    }[name]
    try:
        print(name, job())
    except ImportError as error:
        sys.exit(f"{name} is not available: {error}")


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    main()
