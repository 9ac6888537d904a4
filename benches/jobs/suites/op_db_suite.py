"""Every operator of PyTorch's `op_db` on its own samples, forward and backward. Results are compared bitwise.

The device is CUDA. `SYMMALLOC_SUITES_DEVICE=cpu` runs the suite without a GPU.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from allocators import under_allocator
from results import PASSED, Outcome

# The allocator must be installed before any use of CUDA.
under_allocator()

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.utils._pytree import tree_flatten  # noqa: E402

# Sums have a fixed order, as far as PyTorch supports it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
torch.use_deterministic_algorithms(True, warn_only=True)
torch.utils.deterministic.fill_uninitialized_memory = False

DEVICE = os.environ.get("SYMMALLOC_SUITES_DEVICE", "cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.complex64)
SAMPLES_MAX = 50
# The contents of fresh memory are undefined.
EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "empty_permuted", "new_empty_strided")

CASES = {
    f"{op.full_name} {str(dtype).removeprefix('torch.')}": (op, dtype)
    for op in op_db
    for dtype in DTYPES
    if dtype in op.supported_dtypes(DEVICE)
}
WITHOUT_CONTENTS = {name for name, (op, _) in CASES.items() if op.name in EMPTY}


def names() -> list[str]:
    return list(CASES)


def run(name: str) -> Outcome:
    op, dtype = CASES[name]
    has_gradients = op.supports_autograd and dtype in op.supported_backward_dtypes(DEVICE)
    _seed(name)
    samples = list(itertools.islice(op.sample_inputs(DEVICE, dtype, requires_grad=has_gradients), SAMPLES_MAX))
    bits = hashlib.sha256()
    for sample in samples:
        _seed(name)
        results = _tensors(op(sample.input, *sample.args, **sample.kwargs))
        for result in results:
            _add(bits, result)
        inputs = [one for one in _tensors((sample.input, sample.args, sample.kwargs)) if one.requires_grad]
        outputs = [one for one in results if one.requires_grad]
        if has_gradients and inputs and outputs:
            ones = [torch.ones_like(one) for one in outputs]
            for gradient in torch.autograd.grad(outputs, inputs, ones, allow_unused=True):
                if gradient is not None:
                    _add(bits, gradient)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return Outcome(PASSED, bits=bits.hexdigest()[:16])


def IS_BROKEN(error: Exception | None) -> bool:
    """Returns `True` after an error of the device, because all later results in this process are invalid."""
    if DEVICE != "cuda" or isinstance(error, torch.OutOfMemoryError):
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def _seed(name: str) -> None:
    torch.manual_seed(zlib.crc32(name.encode()))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _add(bits: Any, tensor: torch.Tensor) -> None:
    for part in _strided(tensor.detach()):
        # A tensor with one element counts as contiguous regardless of its strides, so it is copied.
        host = part.resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
        bits.update(repr((host.dtype, tuple(host.shape))).encode())
        bits.update(host.reshape(-1).view(torch.uint8).numpy().tobytes() if host.numel() else b"")


def _strided(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Returns the parts of a tensor that have memory."""
    if tensor.is_nested:
        yield from tensor.unbind()
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor.coalesce().indices(), tensor.coalesce().values())
    elif tensor.layout != torch.strided:
        yield tensor.to_dense()
    else:
        yield tensor
