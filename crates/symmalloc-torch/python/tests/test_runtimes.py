"""Other runtimes on the process's allocator: stand-in packages on the stub, and the real packages on a device."""

from __future__ import annotations

import ctypes
import textwrap
import unittest
from pathlib import Path

import needs
import symmalloc
from symmalloc import library, onnxruntime

FAKES = str(Path(__file__).resolve().parent / "fakes")

# cuda.core works on the stub where it is installed.
try:
    import cuda.core  # noqa: F401

    CUDA_CORE = FAKES
except ImportError:
    CUDA_CORE = f"{FAKES}/cuda_core"

# Functions of the stub.
STUB = """
    import ctypes, sys
    libcuda = ctypes.CDLL("libcuda.so.1")
    libcuda.stub_calls.restype = ctypes.c_uint64
    def waits(): return libcuda.stub_calls(b"cuCtxSynchronize")
    def stream():
        out, context = ctypes.c_uint64(), ctypes.c_void_p()
        libcuda.cuInit(0); libcuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0); libcuda.cuCtxSetCurrent(context)
        assert libcuda.cuStreamCreate(ctypes.byref(out), 1) == 0
        return out.value
    MIB = 1 << 20
"""


@needs.device
class OnTheStub(unittest.TestCase):
    def passes(self, program: str, fakes: str = FAKES, **environment: str) -> None:
        program = textwrap.dedent(STUB) + textwrap.dedent(program)
        done = needs.process(program, PYTHONPATH=f"{fakes}:{needs.packages()}", **environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("Exception ignored", done.stderr)

    def test_cupys_memory_is_ordered_by_its_current_stream(self) -> None:
        self.passes("""
            import cupy, symmalloc, symmalloc.cupy
            from types import SimpleNamespace
            one, other = stream(), stream()
            symmalloc.cupy.install("total_limit_mb:100,streams:separate")
            shared = symmalloc.Allocator.shared(0)
            cupy.cuda.current[0] = one
            first = cupy.cuda.alloc(5 * MIB)
            cupy.cuda.current[0] = other
            second = cupy.cuda.alloc(5 * MIB)
            places = [shared.placement_of(it.ptr).stream for it in (first, second)]
            assert places == [0, 1], places
            address, before = first.ptr, waits()
            records = libcuda.stub_calls(b"cuEventRecord")
            array = SimpleNamespace(device=SimpleNamespace(id=0), data=SimpleNamespace(mem=first))
            symmalloc.cupy.record_use(array, SimpleNamespace(ptr=other))
            del first, array
            assert libcuda.stub_calls(b"cuEventRecord") == records + 1, "the free records an event on the other stream"
            cupy.cuda.current[0] = one
            assert cupy.cuda.alloc(5 * MIB).ptr == address
            assert waits() == before, "no call blocked the host"
            try:
                cupy.cuda.alloc(1000 * MIB)
                sys.exit("an allocation beyond the limit succeeded")
            except MemoryError as error:
                assert "limit" in str(error), error
        """)

    def test_numbas_memory_is_freed_when_the_device_is_idle(self) -> None:
        self.passes("""
            import numba.cuda, symmalloc.numba
            from types import SimpleNamespace
            stream()
            symmalloc.numba.install()
            manager = numba.cuda.manager_class(context=SimpleNamespace(device=SimpleNamespace(id=0)))
            manager.initialize()
            free, total = manager.get_memory_info()
            assert manager.deallocations.memory_capacity == total > free - 1
            shared = symmalloc.Allocator.shared(0)
            def live(): return shared.stats()["total"]["allocated_bytes"]["all"]["current"]
            before = waits()
            for _ in range(10):
                memory = manager.memalloc(MIB)
                address = memory.device_pointer.value
                assert shared.placement_of(address).requested_bytes == MIB
                del memory
            assert (live(), waits(), len(manager.deallocations)) == (10 * MIB, before, 10), "pending frees wait together"
            del address
            manager.memalloc(MIB).free()
            assert (live(), waits(), len(manager.deallocations)) == (0, before + 11, 0)
            try:
                manager.get_ipc_handle(None)
                sys.exit("get_ipc_handle() did not raise")
            except NotImplementedError:
                pass
        """)

    def test_numba_frees_what_is_pending_before_memory_is_short(self) -> None:
        self.passes(
            """
            import numba.cuda, symmalloc.numba
            from types import SimpleNamespace
            stream()
            symmalloc.numba.install()
            manager = numba.cuda.manager_class(context=SimpleNamespace(device=SimpleNamespace(id=0)))
            manager.initialize()
            for _ in range(8):
                manager.memalloc(12 * MIB).free()
            try:
                manager.memalloc(21 * MIB)
                sys.exit("an allocation beyond the limit succeeded")
            except MemoryError:
                pass
        """,
            SYMMALLOC_CONF="total_limit_mb:20",
        )

    def test_numbas_memory_of_one_stream_is_free_immediately(self) -> None:
        self.passes("""
            import numba.cuda, symmalloc.numba
            from types import SimpleNamespace
            one = stream()
            symmalloc.numba.install()
            manager = numba.cuda.manager_class(context=SimpleNamespace(device=SimpleNamespace(id=0)))
            manager.initialize()
            pending = manager.memalloc(MIB)
            symmalloc.numba.use_stream(one)
            before = waits()
            first = manager.memalloc(MIB)
            address = first.device_pointer.value
            assert symmalloc.Allocator.shared(0).placement_of(address).pool == 0
            del first
            assert manager.memalloc(MIB).device_pointer.value == address and waits() == before
            symmalloc.numba.use_stream(None)
            pending.free()
            assert len(manager.deallocations) == 1, "memory without a stream is freed after a wait"
        """)

    def test_buffers_of_cuda_core_are_ordered_by_their_streams(self) -> None:
        self.passes(
            """
            import gc, symmalloc, symmalloc.cuda_core
            from cuda.core import Stream
            one, other = Stream.from_handle(stream()), Stream.from_handle(stream())
            memory = symmalloc.cuda_core.MemoryResource(0, "total_limit_mb:100,streams:separate")
            assert (memory.device_id, memory.is_device_accessible, memory.is_host_accessible) == (0, True, False)
            shared = symmalloc.Allocator.shared(0)
            first, second = memory.allocate(5 * MIB, stream=one), memory.allocate(5 * MIB, stream=other)
            places = [shared.placement_of(int(it.handle)).stream for it in (first, second)]
            assert places == [0, 1], places
            address, before = int(first.handle), waits()
            records = libcuda.stub_calls(b"cuEventRecord")
            first.close(other)
            assert libcuda.stub_calls(b"cuEventRecord") == records + 1, "the free is ordered after the stream of close()"
            third = memory.allocate(5 * MIB, stream=one)
            assert int(third.handle) == address
            symmalloc.cuda_core.record_use(third, other)
            del third
            gc.collect()
            assert int(memory.allocate(5 * MIB, stream=one).handle) == address, "dropping a buffer frees it"
            assert waits() == before, "nothing waited on the host"
            try:
                memory.allocate(1000 * MIB, stream=one)
                sys.exit("more than the limit")
            except MemoryError as error:
                assert "limit" in str(error), error
        """,
            fakes=CUDA_CORE,
        )

    def test_onnx_runtime_gets_functions_by_address_and_a_stream(self) -> None:
        self.passes("""
            import symmalloc
            from symmalloc import onnxruntime
            one = stream()
            options = onnxruntime.provider_options(stream=one)
            assert options["user_compute_stream"] == str(one) and options["has_user_compute_stream"] == "1"
            assert set(onnxruntime.provider_options()) == {
                "device_id", "gpu_external_alloc", "gpu_external_free", "gpu_external_empty_cache"
            }
            alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(int(options["gpu_external_alloc"]))
            free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(int(options["gpu_external_free"]))
            empty_cache = ctypes.CFUNCTYPE(None)(int(options["gpu_external_empty_cache"]))
            shared, before = symmalloc.Allocator.shared(0), waits()
            pointer = alloc(MIB)
            place = shared.placement_of(pointer)
            assert (place.pool, place.stream) == (0, 0x1_0000), "the group of stream 0"
            free(pointer)
            assert waits() == before
            empty_cache()
            assert shared.stats()["total"]["reserved_bytes"]["all"]["current"] == 0
        """)

    def test_unordered_memory_can_be_allocated_and_freed_from_python(self) -> None:
        with symmalloc.Allocator(0) as allocator:
            pointer = allocator.allocate_unordered(100)
            self.assertNotEqual(allocator.placement_of(pointer).pool, 0)
            allocator.free_unordered(pointer)
            self.assertRaises(symmalloc.UnknownPointer, allocator.free_unordered, pointer)

    def test_a_missing_device_is_refused(self) -> None:
        self.assertRaises(symmalloc.CudaError, onnxruntime.provider_options, 100, 7)


class Header(unittest.TestCase):
    def test_the_functions_for_onnx_runtime_have_its_signatures(self) -> None:
        header = (Path(__file__).resolve().parents[2] / "include" / "symmalloc.h").read_text()
        for declaration in (
            "void *symmalloc_ort_alloc(size_t bytes);",
            "void symmalloc_ort_free(void *pointer);",
            "void symmalloc_ort_empty_cache(void);",
        ):
            self.assertIn(declaration, header)
            function = declaration.split("(")[0].split("*")[-1].split()[-1]
            self.assertTrue(ctypes.cast(getattr(library.library(), function), ctypes.c_void_p).value)


@needs.gpu("cupy")
class CupyOnADevice(unittest.TestCase):
    def test_arrays_on_two_streams_are_correct_and_use_symmalloc(self) -> None:
        done = needs.process("""
            import time
            import cupy, symmalloc, symmalloc.cupy
            def loop(rounds):
                a, b = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
                wrong = 0
                for number in range(rounds):
                    with a:
                        x = cupy.full(1 << 20, number, dtype=cupy.float32)
                        y = x * 2 + 1
                        done = a.record()
                    with b:
                        b.wait_event(done)
                        z = y.sum()
                        if symmalloc_is_used: symmalloc.cupy.record_use(y, b)
                    del x, y
                    wrong += float(z) != (2 * number + 1) * float(1 << 20)
                return wrong, (a, b)
            def time_of(stream):
                start = time.perf_counter()
                with stream:
                    for _ in range(20000):
                        cupy.empty(1 << 20, dtype=cupy.uint8)
                return (time.perf_counter() - start) / 20000 * 1e9
            symmalloc_is_used = False
            stream = cupy.cuda.Stream(non_blocking=True)
            time_of(stream); pool = time_of(stream)
            cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
            time_of(stream); asynchronous = time_of(stream)
            symmalloc.cupy.install()
            symmalloc_is_used = True
            time_of(stream); ours = time_of(stream)
            wrong, streams = loop(64)
            assert wrong == 0, wrong
            shared = symmalloc.Allocator.shared(0)
            total = shared.stats()["total"]
            allocations = total["allocation"]["all"]["allocated"]
            print(f"cupy {cupy.__version__}: {allocations} allocations; empty() of 1 MiB on one stream: pool {pool:.0f} ns,",
                  f"MemoryAsyncPool {asynchronous:.0f} ns, symmalloc {ours:.0f} ns")
            big = cupy.ones((4096, 4096), dtype=cupy.float32)
            assert shared.placement_of(big.data.mem.ptr).requested_bytes == 4096 * 4096 * 4
            assert float((big @ big)[0, 0]) == 4096.0
        """)
        print(done.stdout, done.stderr)
        self.assertEqual(done.returncode, 0, done.stderr)


@needs.gpu("numba")
class NumbaOnADevice(unittest.TestCase):
    PROGRAM = """
        import time
        import numpy
        if not hasattr(numpy, "row_stack"):
            numpy.row_stack = numpy.vstack  # numba-cuda uses this name, which NumPy 2.5 removed
        import symmalloc, numba
        from numba import cuda
        @cuda.jit
        def double(x, y):
            i = cuda.grid(1)
            if i < x.size: y[i] = 2 * x[i]
        def loop(rounds, stream):
            host = numpy.arange(1 << 20, dtype=numpy.float32)
            for number in range(rounds):
                x = cuda.to_device(host + number, stream=stream)
                y = cuda.device_array(x.shape, dtype=x.dtype)
                double[4096, 256, stream](x, y)
                del x
                result = y.copy_to_host(stream=stream)
                stream.synchronize()
                assert (result == 2 * (host + number)).all(), number
        def time_of():
            cuda.synchronize()
            start = time.perf_counter()
            for _ in range(5000):
                cuda.device_array(1 << 20, dtype=numpy.uint8)
            return (time.perf_counter() - start) / 5000 * 1e9
    """

    def test_the_cost_of_numbas_own_manager(self) -> None:
        done = needs.process(
            self.PROGRAM
            + """
        time_of()
        print(f"numba's own manager: device_array of 1 MiB {time_of():.0f} ns")
        """
        )
        print(done.stdout, done.stderr)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_kernels_and_copies_are_correct_and_use_symmalloc(self) -> None:
        done = needs.process(
            self.PROGRAM
            + """
        shared = symmalloc.Allocator.shared(0)
        a, b = cuda.stream(), cuda.stream()
        for _ in range(16):
            loop(2, a); loop(2, b)
        live = shared.stats()["total"]["allocation"]["all"]["allocated"]
        assert live >= 128, live
        time_of(); unordered = time_of()
        import symmalloc.numba
        symmalloc.numba.use_stream(a.handle.value if hasattr(a.handle, "value") else int(a.handle))
        loop(16, a)
        time_of(); ordered = time_of()
        free, total = cuda.current_context().get_memory_info()
        assert 0 < free < total
        version = __import__("importlib.metadata", fromlist=["version"]).version
        print(f"numba {numba.__version__}: {live} allocations; device_array of 1 MiB",
              f"{unordered:.0f} ns, on one stream {ordered:.0f} ns")
        """,
            NUMBA_CUDA_MEMORY_MANAGER="symmalloc.numba",
        )
        print(done.stdout, done.stderr)
        self.assertEqual(done.returncode, 0, done.stderr)


@needs.gpu("onnxruntime")
class OnnxRuntimeOnADevice(unittest.TestCase):
    def test_a_session_uses_symmalloc(self) -> None:
        done = needs.process("""
            import sys
            import numpy, onnx, onnxruntime, symmalloc.onnxruntime
            if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
                print("skipped: this ONNX Runtime has no CUDA provider"); sys.exit(0)
            from onnx import TensorProto, helper
            x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1024, 1024]) for name in "xy")
            graph = helper.make_graph([helper.make_node("MatMul", ["x", "x"], ["y"])], "square", [x], [y])
            model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
            model.ir_version = 8
            options = symmalloc.onnxruntime.provider_options()
            session = onnxruntime.InferenceSession(model.SerializeToString(), providers=[("CUDAExecutionProvider", options)])
            ones = numpy.ones((1024, 1024), dtype=numpy.float32)
            assert (session.run(None, {"x": ones})[0] == 1024).all()
            allocated = symmalloc.Allocator.shared(0).stats()["total"]["allocation"]["all"]["allocated"]
            print(f"onnxruntime {onnxruntime.__version__}: {allocated} allocations")
            assert allocated > 0
        """)
        print(done.stdout, done.stderr)
        self.assertEqual(done.returncode, 0, done.stderr)


@needs.gpu("torch")
class BesidePytorchOnADevice(unittest.TestCase):
    def test_pytorch_and_cupy_share_the_memory_and_a_free_without_a_stream_waits(self) -> None:
        done = needs.process("""
            import ctypes, time
            import torch, symmalloc
            symmalloc.install()
            from symmalloc import onnxruntime
            stream = torch.cuda.Stream()
            tensor = torch.ones(1 << 20, device="cuda")
            shared = symmalloc.Allocator.shared(0)
            assert symmalloc.allocator(0).placement_of(tensor.data_ptr()) == shared.placement_of(tensor.data_ptr())
            try:
                import cupy, symmalloc.cupy
                symmalloc.cupy.install()
                array = cupy.arange(1 << 20, dtype=cupy.float32)
                assert shared.placement_of(array.data.ptr).requested_bytes == 4 << 20
                assert float(torch.from_dlpack(array).sum() + tensor.sum()) == float(array.sum()) + (1 << 20)
                print("PyTorch and CuPy:", shared.stats()["total"]["allocated_bytes"]["all"]["current"], "bytes live")
            except ImportError as error:
                print("skipped:", error)

            options = onnxruntime.provider_options()
            alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(int(options["gpu_external_alloc"]))
            free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(int(options["gpu_external_free"]))
            def time_of_free():
                pointer = alloc(4 << 20)
                torch.cuda.synchronize()
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(100_000_000)  # about 50 ms
                start = time.perf_counter()
                free(pointer)
                return (time.perf_counter() - start) * 1e3
            time_of_free(); unordered = time_of_free()
            onnxruntime.provider_options(stream=stream.cuda_stream)
            time_of_free(); ordered = time_of_free()
            torch.cuda.synchronize()
            print(f"a free during 100M cycles of work: {unordered:.2f} ms without a stream, {ordered:.2f} ms with one")
            assert unordered > 20 and ordered < 5, (unordered, ordered)
        """)
        print(done.stdout, done.stderr)
        self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    unittest.main()
