"""Requirements of tests."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

device = unittest.skipUnless(
    "SYMMALLOC_TEST_STUB" in os.environ, "needs a device: pass the stub of libcuda with --stub"
)
nccl = unittest.skipUnless(
    any((Path(folder) / "libnccl.so.2").exists() for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    and "SYMMALLOC_TEST_STUB" in os.environ
    and "SYMMALLOC_TEST_STAND_INS" not in os.environ,
    "needs NCCL: build the stub of libnccl next to the stub of libcuda",
)
stand_ins = unittest.skipUnless(
    "SYMMALLOC_TEST_STAND_INS" in os.environ, "needs a PyTorch without a GPU: pass CUDA's headers with --stand-ins"
)
torch = unittest.skipUnless(importlib.util.find_spec("torch"), "needs PyTorch")


def compilation(test: Any) -> Any:
    """Skips a test of the compilation if the package contains the class for this PyTorch."""
    if importlib.util.find_spec("torch"):
        import torch
        from symmalloc import pytorch_class

        if torch.version.cuda is not None and pytorch_class.shipped(torch):
            return unittest.skip("the package contains the class for this PyTorch")(test)
    return test


def process(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a separate process, because install() applies for the rest of a process."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=120,
    )


def packages() -> str:
    """Returns the folder from which this symmalloc was imported."""
    import symmalloc

    return str(Path(symmalloc.__file__).resolve().parents[1])


def gpu(package: str) -> Callable[[Any], Any]:
    """Skips a test without a real device and a working package, and prints the reason."""
    if "SYMMALLOC_TEST_STUB" in os.environ or not Path("/dev/nvidiactl").exists():
        return unittest.skip("needs an NVIDIA device")
    return unittest.skipUnless(importlib.util.find_spec(package), f"needs {package}")
