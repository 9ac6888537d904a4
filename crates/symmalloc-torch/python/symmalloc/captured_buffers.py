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
from .library import library

VARIABLE = "NCCL_GRAPH_REGISTER"

# True if the variable was set after NCCL may have read it.
_is_late = False


def turn_off() -> None:
    """Turns the registration off, unless the environment sets it. NCCL reads the variable at the first captured collective."""
    global _is_late
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = "0"
        _is_late = _may_matter()


def is_off() -> bool:
    """Returns `True` if NCCL does not register captured buffers."""
    try:
        return int(os.environ.get(VARIABLE, "1").strip() or "1", 0) == 0 and not _is_late
    except ValueError:
        return False


def check_off() -> None:
    """Raises `InvalidState` if NCCL may have registered buffers of captured collectives of this process and its peers."""
    if is_off() or not _may_matter():
        return
    state = "was set too late" if _is_late else f"is {os.environ[VARIABLE]!r}" if VARIABLE in os.environ else "is not set"
    raise InvalidState(
        f"{VARIABLE} {state}, so NCCL may use the former memory of buffers in captured collectives after a sleep: start the job"
        f" with {VARIABLE}=0 (symmalloc sets it only if it creates a pool with a tag before the first capture)"
    )


def _may_matter() -> bool:
    """Returns `True` if the process has peers, and if it may have captured a graph."""
    distributed = sys.modules.get("torch.distributed")
    has_peers = distributed is not None and distributed.is_initialized() and distributed.get_world_size() > 1
    return has_peers and bool(library().symmalloc_torch_has_captured())
