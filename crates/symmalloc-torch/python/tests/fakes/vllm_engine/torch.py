"""The functions of PyTorch that `benches/jobs/vllm_serve.py` calls around the engine."""

from types import SimpleNamespace

__version__ = "2.14.0+fake"
cuda = SimpleNamespace(
    mem_get_info=lambda: (1 << 30, 1 << 31),
    memory_stats=lambda: {"reserved_bytes.all.peak": 7, "allocated_bytes.all.peak": 5},
    synchronize=lambda: None,
    device_count=lambda: 1,
    is_initialized=lambda: False,
)
version = SimpleNamespace(cuda=None)
