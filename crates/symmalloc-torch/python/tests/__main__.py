"""Runs the tests of the package: `python crates/symmalloc-torch/python/tests [--stub target/debug/libstub_libcuda.so] [NAME...]`.

The library path applies at process start. With `--stub`, this process therefore restarts with that library under the name of
libcuda, and with the stub of libnccl if that is in the same folder. Without the option, tests that need a device are skipped with a
note. Tests that need PyTorch are skipped if it is missing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import unittest
from pathlib import Path

STUB = "SYMMALLOC_TEST_STUB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stub", type=Path, help="the library of tests/stub-libcuda")
    parser.add_argument("--stand-ins", type=Path, metavar="HEADERS", help="CUDA's headers: also run a PyTorch without a GPU")
    options, names = parser.parse_known_args()
    here = Path(__file__).resolve().parent
    sys.path.insert(0, str(here))
    if options.stub is not None and STUB not in os.environ:
        folder = Path(tempfile.mkdtemp())
        for name in ("libcuda.so", "libcuda.so.1"):
            (folder / name).symlink_to(options.stub.resolve())
        nccl = options.stub.resolve().with_name("libstub_libnccl.so")
        if nccl.is_file() and options.stand_ins is None:
            (folder / "libnccl.so.2").symlink_to(nccl)
        if options.stand_ins is not None:
            from stand_ins import make

            make(folder, options.stand_ins.resolve())
        environment = os.environ | {STUB: str(options.stub), "LD_LIBRARY_PATH": str(folder), "STUB_DEVICES": "2"}
        if options.stand_ins is not None:
            environment |= {"SYMMALLOC_TEST_STAND_INS": "1", "CUDA_HOME": str(options.stand_ins.resolve().parent)}
        environment["STUB_POLLS"] = "1"  # polled work completes eventually
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    arguments = [sys.argv[0], *names] if names else [sys.argv[0], "discover", "--start-directory", str(here)]
    unittest.main(module=None, argv=[*arguments, "--verbose"])


if __name__ == "__main__":
    main()
