"""Names that tests of an older PyTorch import and a newer PyTorch lacks. Each is supplied when its module is imported."""

from __future__ import annotations

from types import ModuleType

from import_hooks import after_import

# By module: the removed name, and the name in the same module that replaced it.
REPLACED = {
    # 2.11 has no HAS_CUDA.
    "torch.testing._internal.inductor_utils": {"HAS_CUDA": "HAS_CUDA_AND_TRITON"},
}


def supply() -> None:
    """Supplies all removed names, in this process."""
    for name, replaced in REPLACED.items():
        after_import(name, lambda module, replaced=replaced: _add(module, replaced))


def _add(module: ModuleType, replaced: dict[str, str]) -> None:
    for old, new in replaced.items():
        if not hasattr(module, old):
            setattr(module, old, getattr(module, new))
