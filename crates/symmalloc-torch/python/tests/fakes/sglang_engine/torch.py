"""The functions of PyTorch that `benches/jobs/sglang_serve.py` calls around the engine."""

import os
from types import SimpleNamespace

__version__ = os.environ.get("FAKE_TORCH", "2.14.1+fake")
free_bytes = [1 << 30]
cuda = SimpleNamespace(
    mem_get_info=lambda: (free_bytes[0], 1 << 31),
    memory_stats=lambda: {"reserved_bytes.all.peak": 7, "allocated_bytes.all.peak": 5},
    synchronize=lambda: None,
    device_count=lambda: 1,
    is_initialized=lambda: False,
)
distributed = SimpleNamespace(rank=0, get_rank=lambda: distributed.rank)
version = SimpleNamespace(cuda=None)
