"""torch_memory_saver's interface on symmalloc: a program changes one import.

    from symmalloc.torch_memory_saver import torch_memory_saver        instead of: from torch_memory_saver import ...

    with torch_memory_saver.region(tag="weights", enable_cpu_backup=True):
        model = load()
    with torch_memory_saver.cuda_graph(graph, tag="graph"):
        output = model(input)
    torch_memory_saver.pause()
    torch_memory_saver.resume()

The import installs symmalloc, so it comes before the program uses CUDA. With `TMS_INIT_ENABLE`, it raises `InvalidState` if
symmalloc was installed before without `tag:default`. It reads torch_memory_saver's environment variables:

    TMS_INIT_ENABLE              1: the whole process is a region with the tag "default", except for the blocks of other regions
    TMS_INIT_ENABLE_CPU_BACKUP   1: that region has a backup on the host
    TMS_INIT_ENABLE_DISK_BACKUP  1: that region has a backup on disk
    TMS_INIT_CPU_BACKUP_BACKEND  the default of `cpu_backup_backend`: pinned or mmap
    TMS_RETAIN_CPU_BACKUP        1: the initial value of `retain_cpu_backup`
    TMS_DISK_BACKUP_DIR          the initial folder of backups on disk

Both hook modes are accepted, and behave alike: nothing is preloaded, graphs can be paused in both, and `TMS_INIT_ENABLE` works
in both. A region covers the device that is current when it begins. Unlike the original's, a failed pause or resume raises, and
leaves the pool with its memory or asleep with its backup. Backups on disk are files without a name, so the folder looks empty.

`replace_original()` also serves programs that import torch_memory_saver themselves. Its modules, such as `hooks` and `utils`, are in
`symmalloc.torch_memory_saver_names`, and its C functions in `symmalloc.torch_memory_saver_regions`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from ctypes import c_uint8
from typing import TYPE_CHECKING, Any

from . import captured_buffers, sleeping, torch_memory_saver_names
from .devices import device_index, import_torch
from .errors import InvalidArgument, InvalidState
from .installation import install
from .pool import MemPool, add_tagged_device
from .pool import known as known_pool
from .scopes import use_mem_pool
from .sleeping import Backup, Tagged, backup_of, keep_in, tagged_pools
from .state import allocator, configuration, installed
from .torch_memory_saver_regions import BinaryWrapper, Functions, Region, Regions

if TYPE_CHECKING:
    import torch

DEFAULT_TAG = "default"
DEFAULT_KEY = f"tag:{DEFAULT_TAG}"
"""The configuration that makes the whole process a region."""
HOOK_MODES = ("preload", "torch")
_registered_modes: dict[str, Callable[[], Any]] = {}


class Implementation:
    """The implementation of both hook modes."""

    def __init__(self) -> None:
        self._backend = os.environ.get("TMS_INIT_CPU_BACKUP_BACKEND") or "pinned"
        self._retains = _is_set("TMS_RETAIN_CPU_BACKUP")
        self._whole_process: Backup | None = None
        has_cpu, has_disk = _is_set("TMS_INIT_ENABLE_CPU_BACKUP"), _is_set("TMS_INIT_ENABLE_DISK_BACKUP")
        # Also without a region of the whole process, so that an unknown backend is an error at once.
        backup_of(True, False, self._backend)
        if _is_set("TMS_INIT_ENABLE"):
            self._whole_process = backup_of(has_cpu, has_disk, self._backend if has_cpu else None)
        whole = Region(self._whole_process is not None, DEFAULT_TAG, has_cpu, self._backend, has_disk)
        self._regions = Regions(whole)
        self._binary_wrapper = BinaryWrapper(Functions(self, self._regions), self._regions)
        if not installed():
            conf = None
            if self._whole_process is not None:
                conf = ",".join(filter(None, (os.environ.get("SYMMALLOC_CONF"), DEFAULT_KEY)))
            install(conf)
        elif self._whole_process is not None and DEFAULT_KEY not in _keys(configuration()):
            raise InvalidState(
                f"TMS_INIT_ENABLE is set, but symmalloc is installed without {DEFAULT_KEY}, so pause() would release nothing: "
                f"import symmalloc.torch_memory_saver before install(), or add {DEFAULT_KEY} to its configuration"
            )

    @contextmanager
    def region(
        self,
        tag: str = DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: str | None = None,
    ) -> Iterator[None]:
        """Directs this thread's allocations on the current device to memory that `pause(tag)` releases, as `symmalloc.region`."""
        backend = self._backend_for(enable_cpu_backup, cpu_backup_backend)
        with (
            sleeping.region(tag, enable_cpu_backup, enable_disk_backup, backend),
            self._block(tag, enable_cpu_backup, backend, enable_disk_backup),
        ):
            yield

    @contextmanager
    def cuda_graph(
        self,
        cuda_graph: torch.cuda.CUDAGraph,
        pool: Any = None,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: str = "global",
        tag: str = DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        cpu_backup_backend: str | None = None,
    ) -> Iterator[None]:
        """Captures a graph as `torch.cuda.graph` does. `pause(tag)` releases its memory, and `resume(tag)` restores it.

        Graphs with the same `pool` have one memory. The last capture sets its tag and its backup. Without a backup, tensors of
        the capture are undefined after `resume` until the next replay.
        """
        torch = import_torch("cuda_graph()")
        backend = self._backend_for(enable_cpu_backup, cpu_backup_backend)
        backup = backup_of(enable_cpu_backup, False, backend)
        captured_buffers.turn_off()
        with torch.cuda.graph(cuda_graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode):
            device = device_index()
            of = allocator(device)
            # The capture's first allocation creates the pool. Its placement has the pool's number.
            first = torch.empty(1, dtype=torch.uint8, device=device)
            number = of.placement_of(first.data_ptr()).pool
            del first
            with self._block(tag, enable_cpu_backup, backend, False):
                yield
        sleeping.tag_graph_pool(device, number, tag)
        add_tagged_device(device)
        keep_in(of, device, number, backup)

    @contextmanager
    def disable(self, dispose_mem_pool_after_use: bool = True) -> Iterator[None]:
        """Directs this thread's allocations to memory that no pause releases, and releases it at the end of the `with` block.

        Memory of tensors that are still alive then is released by the first `torch.cuda.empty_cache()` after their end. Raises
        `InvalidArgument` for `dispose_mem_pool_after_use=False`.
        """
        if not dispose_mem_pool_after_use:
            raise InvalidArgument("disable() always disposes of its memory: leave dispose_mem_pool_after_use out")
        device = device_index()
        pool = MemPool(symmetric=False, conf="segments:expandable", device=device)
        try:
            with use_mem_pool(pool), self._regions.block(interesting=False):
                yield
        finally:
            pool.close()
            allocator(device).trim()

    def pause(self, tag: str | None = None) -> None:
        """Releases the memory with a tag to the device; None: with any tag. Tensors keep their addresses."""
        self._adopt()
        sleeping.pause(tag)

    def resume(self, tag: str | None = None) -> None:
        """Restores the memory and the backups with a tag; None: with any tag. See `symmalloc.resume`.

        Releases backups on the host, unless `retain_cpu_backup` is True.
        """
        pools = [tagged for tagged in tagged_pools() if tag is None or tagged.tag == tag]
        for tagged in pools:
            tagged.of.retain_saved(self._retains, tagged.pool)
        sleeping.resume(tag)
        if not self._retains:
            for device in sorted({tagged.device for tagged in pools}):
                allocator(device).release_host_memory()

    def get_cpu_backup(self, x: torch.Tensor, zero_copy: bool = False) -> torch.Tensor | None:
        """Returns the backup of a tensor in paused memory, or in memory whose backup is retained. Returns None if there is none.

        zero_copy   refer to the backup instead of copying it. It is valid until the next pause or resume of its memory

        Raises `InvalidArgument` unless the tensor is contiguous and on a CUDA device, `FileError` for a modified file, and
        `InvalidState` if `zero_copy` is impossible: for backups on disk, and in pinned memory across a boundary of 32 MiB.
        """
        torch = import_torch("get_cpu_backup()")
        if not x.is_cuda or not x.is_contiguous():
            raise InvalidArgument("get_cpu_backup() needs a contiguous CUDA tensor")
        of = allocator(x.device)
        if not zero_copy:
            copy = torch.empty(x.shape, dtype=x.dtype, device="cpu")
            return copy if of.saved_copy(x.data_ptr(), x.nbytes, copy.data_ptr()) else None
        address = of.saved_pointer(x.data_ptr(), x.nbytes)
        if address == 0:
            return None
        view: torch.Tensor = torch.frombuffer((c_uint8 * x.nbytes).from_address(address), dtype=x.dtype).view(x.shape)
        return view

    def set_disk_backup_dir(self, path: str | os.PathLike[str]) -> None:
        """Sets the folder of backups on disk. See `symmalloc.sleeping.set_backup_folder`. Raises `FileError`."""
        sleeping.set_backup_folder(path)

    @property
    def retain_cpu_backup(self) -> bool:
        """True: `resume` keeps backups on the host, where the next `pause` reuses their memory. Files are not retained."""
        return self._retains

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._retains = bool(value)

    @property
    def memory_margin_bytes(self) -> int:
        """Bytes of the current device that PyTorch leaves to other programs. Only the setter is supported.

        The limit is the device's total memory without them, as with `torch.cuda.set_per_process_memory_fraction`. It does not
        depend on the memory that is free at the moment, so that it is the same on every rank.
        """
        raise NotImplementedError("memory_margin_bytes can only be set")

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        torch = import_torch("memory_margin_bytes")
        total = torch.cuda.get_device_properties().total_memory
        if not 0 <= value < total:
            raise InvalidArgument(f"memory_margin_bytes={value} must be from 0 to below the device's {total} bytes")
        torch.cuda.set_per_process_memory_fraction((total - value) / total)

    def _block(self, tag: str, cpu: bool, backend: str | None, disk: bool) -> AbstractContextManager[None]:
        """Notes the region for the C functions, inside a `with` block."""
        named = {} if backend is None else {"cpu_backup_backend": backend}
        return self._regions.block(
            interesting=True, tag=tag, enable_cpu_backup=cpu, enable_disk_backup=disk, **named
        )

    def _backend_for(self, enable_cpu_backup: bool, backend: str | None) -> str | None:
        return self._backend if enable_cpu_backup and backend is None else backend

    def _adopt(self) -> None:
        """Sets the backup of the pools that belong to the region of the whole process."""
        if self._whole_process is None:
            return
        torch = import_torch("pause()")
        for device in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(device) > 0:
                add_tagged_device(device)
        for tagged in tagged_pools():
            if known_pool(tagged.device, tagged.pool) is None and not _has_backup(tagged):
                keep_in(tagged.of, tagged.device, tagged.pool, self._whole_process)


class TorchMemorySaver:
    """The class of `torch_memory_saver`, of which a process has one. It passes all calls to the implementation of its hook mode."""

    enabled = True

    def __init__(self) -> None:
        self._hook_mode = "preload"
        self._ours = Implementation()
        self._impl: Any = self._ours

    def region(self, *arguments: Any, **named: Any) -> AbstractContextManager[None]:
        """See `Implementation.region`."""
        return self._impl.region(*arguments, **named)  # type: ignore[no-any-return]

    def cuda_graph(self, *arguments: Any, **named: Any) -> AbstractContextManager[None]:
        """See `Implementation.cuda_graph`."""
        return self._impl.cuda_graph(*arguments, **named)  # type: ignore[no-any-return]

    def disable(self, *arguments: Any, **named: Any) -> AbstractContextManager[None]:
        """See `Implementation.disable`."""
        return self._impl.disable(*arguments, **named)  # type: ignore[no-any-return]

    def pause(self, tag: str | None = None) -> None:
        """See `Implementation.pause`."""
        self._impl.pause(tag=tag)

    def resume(self, tag: str | None = None) -> None:
        """See `Implementation.resume`."""
        self._impl.resume(tag=tag)

    def get_cpu_backup(self, x: torch.Tensor, zero_copy: bool = False) -> torch.Tensor | None:
        """See `Implementation.get_cpu_backup`."""
        return self._impl.get_cpu_backup(x, zero_copy=zero_copy)  # type: ignore[no-any-return]

    def set_disk_backup_dir(self, path: str | os.PathLike[str]) -> None:
        """See `Implementation.set_disk_backup_dir`."""
        self._impl.set_disk_backup_dir(path)

    @property
    def hook_mode(self) -> str:
        """ "preload" or "torch", which behave alike here, or the name of a registered mode."""
        return self._hook_mode

    @hook_mode.setter
    def hook_mode(self, mode: str) -> None:
        if mode not in HOOK_MODES and mode not in _registered_modes:
            known = (*HOOK_MODES, *_registered_modes)
            raise InvalidArgument(f"unknown hook_mode={mode!r}: use one of {known}, or call register_hook_mode() before")
        self._impl = self._ours if mode in HOOK_MODES else _registered_modes[mode]()
        self._hook_mode = mode

    @property
    def retain_cpu_backup(self) -> bool:
        """See `Implementation.retain_cpu_backup`."""
        return self._impl.retain_cpu_backup  # type: ignore[no-any-return]

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._impl.retain_cpu_backup = value

    @property
    def memory_margin_bytes(self) -> int:
        """See `Implementation.memory_margin_bytes`."""
        return self._impl.memory_margin_bytes  # type: ignore[no-any-return]

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        self._impl.memory_margin_bytes = value

    def _ensure_initialized(self) -> None:
        """Does nothing: the import has initialized everything. Programs call it before they use `_impl`."""


def register_hook_mode(name: str, factory: Callable[[], Any], *, uses_preload: bool = True) -> None:
    """Registers another implementation, which `hook_mode = name` selects.

    factory       returns an object with the methods of `Implementation` that the program calls
    uses_preload  ignored: nothing is preloaded

    Not in torch_memory_saver 0.0.10. Raises `InvalidArgument` if the name is taken.
    """
    if name in HOOK_MODES or name in _registered_modes:
        raise InvalidArgument(f"hook mode {name!r} is already registered: use another name")
    _registered_modes[name] = factory


def replace_original() -> bool:
    """Puts this module and its submodules in the place of torch_memory_saver's, for later imports of this process.

    Returns `False`, and changes nothing, if the original was imported before.
    """
    return torch_memory_saver_names.replace(sys.modules[__name__])


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """Does nothing: processes that are started inside need no preloaded library. They import this module themselves."""
    yield


def _has_backup(tagged: Tagged) -> bool:
    return sleeping.has_backup(tagged.device, tagged.pool)


def _keys(conf: str) -> list[str]:
    return [key.strip() for key in conf.split(",")]


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "0") in ("1", "true", "True")


torch_memory_saver = TorchMemorySaver()
