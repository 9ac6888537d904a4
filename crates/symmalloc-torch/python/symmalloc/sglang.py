"""SGLang on symmalloc: each of SGLang's scheduler processes installs symmalloc before it uses CUDA.

    from symmalloc.sglang import Engine        instead of: from sglang import Engine

    python -m symmalloc.sglang ...             instead of: python -m sglang.launch_server ...

Import it before `sglang`, whose kernels use CUDA when they are imported. SGLang calls its own plug-ins after that, too late to
install an allocator. `Engine` names the function that runs a scheduler. A spawned process imports this file to find that
function, and so installs symmalloc first. The schedulers inherit `SYMMALLOC_CONF`, but not the arguments of an `install()` in the program.

With data parallelism, SGLang starts its controller, and with DP attention each scheduler, with functions of its own, which import
SGLang's kernels. This file replaces both.

With `SGLANG_ENABLE_GRAPH_POOL_BORROW`, a `torch.cuda.MemPool` allocates in the free parts of the memory of CUDA graphs. symmalloc requires
segments that begin at a multiple of 2 MiB, so the schedulers offer it only the aligned part of each free part.

SGLang's memory saver (`--enable-memory-saver`) imports torch_memory_saver, whose hooks do not see symmalloc's memory. This file puts
`symmalloc.torch_memory_saver` in its place.

The import raises as `symmalloc.install` does, and `InvalidState` if this SGLang does not let a program choose the function. It warns if
torch_memory_saver was imported before, and a scheduler with the memory saver then raises `InvalidState`. It also warns if this SGLang
lacks a function of data parallelism. Written for SGLang 0.5.17 and 0.5.23.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

# This import installs symmalloc. It comes first, because it adds a tag to the configuration for `TMS_INIT_ENABLE`.
from . import torch_memory_saver as _saver
from .errors import InvalidArgument, InvalidState

if not _saver.replace_original():
    warnings.warn(
        "torch_memory_saver was imported before symmalloc.sglang: SGLang's --enable-memory-saver will release nothing",
        RuntimeWarning,
        stacklevel=2,
    )

from sglang.srt.entrypoints import engine as _engine
from sglang.srt.entrypoints.engine import Engine as _Engine

if not hasattr(_Engine, "run_scheduler_process_func"):
    raise InvalidState(
        "this SGLang has no Engine.run_scheduler_process_func: use 0.5.17 or 0.5.23, for which symmalloc.sglang was written"
    )

OTHER_SERVERS = ("encoder_only", "grpc_mode", "smg_grpc_mode", "use_ray")
"""Options of servers that start their schedulers in another way."""


SEGMENT_BYTES = 2 << 20
"""The alignment of segments that a pool takes from another allocator."""


def run_scheduler_process(*arguments: Any, **named: Any) -> None:
    """Runs a scheduler of SGLang. Its process has imported this file, and so has symmalloc installed.

    Raises `InvalidState` for a scheduler with the memory saver in whose process the original torch_memory_saver was imported.
    """
    from sglang.srt.managers.scheduler import run_scheduler_process as run

    _check_saver(*arguments, *named.values())
    _align_borrowed_memory()
    run(*arguments, **named)


def _check_saver(*arguments: Any) -> None:
    is_on = any(getattr(argument, "enable_memory_saver", False) for argument in arguments)
    if is_on and sys.modules.get("torch_memory_saver") is not _saver:
        raise InvalidState(
            "the original torch_memory_saver was imported before symmalloc.sglang, so --enable-memory-saver would release "
            "nothing: import symmalloc.sglang first"
        )


def _align_borrowed_memory() -> None:
    """Makes SGLang borrow only the aligned parts of the memory of graphs, if this version borrows."""
    try:
        from sglang.srt.model_executor.runner_utils import pool
    except ImportError:
        return
    find: Callable[[Any], list[tuple[int, int]]] | None = getattr(pool, "find_free_graph_pool_runs", None)
    if find is None:
        return

    def aligned(pool_id: Any) -> list[tuple[int, int]]:
        runs = []
        for address, size_bytes in find(pool_id):
            begin = -(-address // SEGMENT_BYTES) * SEGMENT_BYTES
            end = (address + size_bytes) // SEGMENT_BYTES * SEGMENT_BYTES
            if begin < end:
                runs.append((begin, end - begin))
        return sorted(runs, key=lambda run: run[1], reverse=True)

    pool.find_free_graph_pool_runs = aligned


def run_scheduler_process_with_init_pipe(*arguments: Any, **named: Any) -> None:
    """Runs a scheduler with data-parallel attention, as `run_scheduler_process` runs others."""
    from sglang.srt.managers.data_parallel_controller import run_scheduler_process_with_init_pipe as run

    run(*arguments, **named)


def run_data_parallel_controller_process(*arguments: Any, **named: Any) -> None:
    """Runs the controller of data parallelism. It starts schedulers, and its arguments name the function of this file that runs them."""
    from sglang.srt.managers.data_parallel_controller import run_data_parallel_controller_process as run

    run(*arguments, **named)


FIRST_FUNCTIONS: dict[Callable[..., None], tuple[str, ...]] = {
    run_data_parallel_controller_process: (),
    run_scheduler_process_with_init_pipe: ("0.5.17",),
}
"""The functions of this file that replace those of the same name in SGLang's `engine`, and the versions that have none."""


def _replace_first_functions() -> None:
    """Warns if SGLang lacks one: it may start these processes with a function that this file does not know."""
    version = _version()
    for first, without in FIRST_FUNCTIONS.items():
        if hasattr(_engine, first.__name__):
            setattr(_engine, first.__name__, first)
        elif version not in without:
            warnings.warn(
                f"SGLang {version} has no engine.{first.__name__}: with data parallelism, its processes may use CUDA before "
                "symmalloc is installed. Use 0.5.17 or 0.5.23, for which symmalloc.sglang was written",
                RuntimeWarning,
                stacklevel=3,
            )


def _version() -> str:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"


_replace_first_functions()


class Engine(_Engine):  # type: ignore[misc]
    """SGLang's `Engine`, whose scheduler processes use symmalloc."""

    run_scheduler_process_func = staticmethod(run_scheduler_process)


def main(arguments: list[str]) -> None:
    """Serves a model over HTTP, with the options of `sglang.launch_server`. Raises `InvalidArgument` for other servers."""
    from sglang import launch_server
    from sglang.srt.entrypoints import http_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.utils import kill_process_tree

    # Processes find the function under this module's name, which is `__main__` here.
    from symmalloc import sglang

    load_plugins()
    options = launch_server.prepare_server_args(arguments)
    if other := [name for name in OTHER_SERVERS if getattr(options, name, False)]:
        raise InvalidArgument(
            f"--{other[0].replace('_', '-')}: symmalloc.sglang serves over HTTP only, so leave the option out"
        )
    serve = http_server.launch_server
    http_server.launch_server = partial(serve, run_scheduler_process_func=sglang.run_scheduler_process)
    try:
        launch_server.run_server(options)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
