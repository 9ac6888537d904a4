"""The names of torch_memory_saver's modules, for programs that import them: `replace` puts all of them in the original's place.

The original preloads or loads a library that intercepts `cudaMalloc`. There is no such library here, so hooks have no effect: a
path is that of symmalloc's library, and there is no allocator for a `torch.cuda.MemPool`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Literal

from .devices import import_torch
from .library import library_path
from .torch_memory_saver_regions import BinaryWrapper  # noqa: F401

HookMode = Literal["preload", "torch"]
ORIGINAL = "torch_memory_saver"
MODULES: dict[str, tuple[str, ...]] = {
    "binary_wrapper": ("BinaryWrapper",),
    "entrypoint": ("TorchMemorySaver", "register_hook_mode"),
    "hooks": (),
    "hooks.base": ("HookMode", "HookUtilBase"),
    "hooks.mode_preload": ("HookUtilModePreload", "configure_subprocess", "get_binary_path_from_package"),
    "hooks.mode_torch": ("HookUtilModeTorch",),
    "testing_utils": ("empty_cache", "get_and_print_gpu_memory", "get_device", "is_xpu"),
    "utils": ("change_env", "get_binary_path_from_package", "is_xpu"),
}
"""The names in each module of the original's package. They are names of this module or of `symmalloc.torch_memory_saver`."""


class HookUtilBase:
    """The base of the hooks. Replacing `create` has no effect here: use `register_hook_mode`."""

    @staticmethod
    def create(hook_mode: str) -> HookUtilBase:
        return {"preload": HookUtilModePreload, "torch": HookUtilModeTorch}[hook_mode]()

    def get_path_binary(self) -> str:
        return str(library_path())

    def get_allocator(self) -> None:
        """Returns None: pools take their memory from symmalloc."""


class HookUtilModePreload(HookUtilBase):
    pass


class HookUtilModeTorch(HookUtilBase):
    pass


def get_binary_path_from_package(stem: str) -> Path:
    """Returns the path of symmalloc's library, which has no effect if it is preloaded."""
    return library_path()


@contextmanager
def change_env(key: str, value: str) -> Iterator[None]:
    """Sets a variable of the environment inside a `with` block."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before


def is_xpu() -> bool:
    return False


def get_device() -> str:
    return "cuda"


def empty_cache() -> None:
    import_torch("empty_cache()").cuda.empty_cache()


def get_and_print_gpu_memory(message: str, gpu_id: int = 0) -> int:
    """Returns the used memory of a device, by all programs."""
    free, total = import_torch("get_and_print_gpu_memory()").cuda.mem_get_info(gpu_id)
    print(f"GPU {gpu_id} memory: {(total - free) / 1024**3:.2f} GB ({message})", flush=True)
    return int(total - free)


def replace(package: ModuleType) -> bool:
    """Puts a package, which is `symmalloc.torch_memory_saver`, and `MODULES` in the original's place, for later imports.

    Returns `False`, and changes nothing, if the original was imported before.
    """
    if sys.modules.setdefault(ORIGINAL, package) is not package:
        return False
    known = vars(package) | globals()
    for path, names in MODULES.items():
        module = ModuleType(f"{ORIGINAL}.{path}", f"Names of torch_memory_saver's `{path}`. See `{__name__}`.")
        vars(module).update({name: known[name] for name in names})
        parent, _, name = module.__name__.rpartition(".")
        sys.modules[module.__name__] = module
        setattr(sys.modules[parent], name, module)
    return True
