"""Runs CuPy, JAX or Numba and prints a digest of the results on one line, the same with and without `symmalloc run`."""

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


def main() -> None:
    name = sys.argv[1]
    job = {
        "cupy": lambda: cupy_job("pool"),
        "cupy_async": lambda: cupy_job("async"),
        "cupy_none": lambda: cupy_job("none"),
        "jax": jax_job,
        "numba": numba_job,
    }[name]
    try:
        print(name, job())
    except ImportError as error:
        print(name, "is not available:", error)


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    main()
