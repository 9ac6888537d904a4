"""SGLang on symmalloc: each of SGLang's scheduler processes installs symmalloc before it uses CUDA.

    from symmalloc.sglang import Engine        instead of: from sglang import Engine

    python -m symmalloc.sglang --model-path MODEL --tp 2 --enable-symm-mem        instead of: sglang serve

The import installs symmalloc, so it comes before `import sglang`, whose kernels use CUDA when they are imported. SGLang starts its
schedulers with a function that `Engine` names. A new process imports this file to find that function, and so installs symmalloc
first. A plug-in of SGLang would be called too late.

Raises as `symmalloc.install` does, and `InvalidState` if this SGLang does not let a program choose the function. Written for
SGLang 0.5.17.
"""

from __future__ import annotations

import sys
from typing import Any

from .errors import InvalidState
from .installation import install
from .state import installed

if not installed():
    install()

from sglang.srt.entrypoints.engine import Engine as _Engine  # noqa: E402

if not hasattr(_Engine, "run_scheduler_process_func"):
    raise InvalidState("this SGLang has no Engine.run_scheduler_process_func: use 0.5.17, for which symmalloc.sglang was written")


def run_scheduler_process(*arguments: Any, **named: Any) -> None:
    """Runs a scheduler of SGLang. Its process has imported this file, and so has symmalloc installed."""
    from sglang.srt.managers.scheduler import run_scheduler_process as run

    run(*arguments, **named)


class Engine(_Engine):  # type: ignore[misc]
    """SGLang's `Engine`, whose scheduler processes use symmalloc."""

    run_scheduler_process_func = staticmethod(run_scheduler_process)


def main(arguments: list[str]) -> None:
    """Serves a model over HTTP, with the arguments of `sglang serve`."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    # Processes look the function up in the module's real name, not in `__main__`.
    from symmalloc import sglang

    launch_server(prepare_server_args(arguments), run_scheduler_process_func=sglang.run_scheduler_process)


if __name__ == "__main__":
    main(sys.argv[1:])
