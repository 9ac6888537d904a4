"""NCCL's registration of the buffers of captured collectives, which a sleep would invalidate.

NCCL registers plain buffers of collectives in CUDA graphs by itself (`NCCL_GRAPH_REGISTER=1`, its default). A peer, NVLink's
multicast or a network card then uses the physical memory that a buffer had at the capture, until the graph is destroyed and
NCCL has noticed. A sleep replaces that memory: a replay would read and write the former memory, which also stays in use. A new
capture at the same addresses does not help while the former graph exists.

With NCCL 2.27.7 to 2.30.7, this concerns out-of-place all-reduces, all-gathers, broadcasts, sends and receives with the protocol
Simple, on one machine and on several (read in NCCL's source). With NVLS, it concerns all reductions. Windows are not affected:
a pool with windows deregisters them before it sleeps.
"""

from __future__ import annotations

import os
import sys

from .errors import InvalidState

VARIABLE = "NCCL_GRAPH_REGISTER"


def turn_off() -> None:
    """Turns the registration off, unless the environment sets it. NCCL reads the variable at the first captured collective."""
    os.environ.setdefault(VARIABLE, "0")


def is_off() -> bool:
    return os.environ.get(VARIABLE) == "0"


def check_off() -> None:
    """Raises `InvalidState` if NCCL may register buffers of captured collectives, and if this process has peers."""
    if is_off() or not _has_peers():
        return
    value = os.environ.get(VARIABLE)
    raise InvalidState(
        f"{VARIABLE} is {'not set' if value is None else repr(value)}, so NCCL may use the former memory of buffers in captured"
        f" collectives after a sleep: set {VARIABLE}=0 before the first capture, as creating a pool with a tag does if it is not set"
    )


def _has_peers() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized() and distributed.get_world_size() > 1
