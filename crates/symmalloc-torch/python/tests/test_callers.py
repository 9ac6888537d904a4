"""Names of allocations by their callers, and the import time of the package."""

from __future__ import annotations

import inspect
import json
import sys
import types
import unittest
from pathlib import Path

import needs
from symmalloc.callers import caller, is_programs


def frame(path: str, line: int, function: str, back: object = None) -> types.SimpleNamespace:
    code = types.SimpleNamespace(co_filename=path, co_name=function)
    return types.SimpleNamespace(f_code=code, f_lineno=line, f_back=back)


class Callers(unittest.TestCase):
    def test_files_outside_of_pytorch_and_python_belong_to_the_program(self) -> None:
        # This is the table of crates/symmalloc-import/src/pytorch/frames.rs, because both must use equal names.
        for path, expected in [
            ("/home/me/job/model.py", True),
            ("train.py", True),
            ("/usr/lib/python3/dist-packages/transformers/modeling.py", True),
            ("/opt/venv/lib/python3.12/site-packages/diffusers/unet.py", True),
            ("/opt/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py", False),
            ("/usr/lib/python3.12/contextlib.py", False),
            ("/pytorch/c10/cuda/CUDACachingAllocator.cpp", False),
            ("??", False),
            ("<string>", False),
        ]:
            self.assertEqual(is_programs(path), expected, path)

    def test_the_innermost_frame_of_the_program_names_an_allocation(self) -> None:
        torch = "/venv/lib/python3.12/site-packages/torch/"
        main = frame("/home/me/job/train.py", 7, "main")
        block = frame("/home/me/job/model/block.py", 12, "make", main)
        linear = frame(torch + "nn/modules/linear.py", 96, "__init__", block)
        self.assertEqual(caller(linear), "model/block.py:12 make")
        # Without a frame of the program, PyTorch's frame shows the purpose.
        self.assertEqual(caller(frame(torch + "optim/adam.py", 40, "step")), "optim/adam.py:40 step")
        self.assertEqual(caller(frame("train.py", 3, "<module>")), "train.py:3 <module>")
        self.assertEqual(caller(frame("<string>", 1, "<module>")), "")

    def test_the_frame_of_this_test_is_found(self) -> None:
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        self.assertEqual(caller(), f"tests/test_callers.py:{line} test_the_frame_of_this_test_is_found")


class Import(unittest.TestCase):
    def test_the_package_imports_only_a_few_standard_modules(self) -> None:
        done = needs.process(
            """
            import json, sys
            before = set(sys.modules)
            import symmalloc
            print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
            """,
            PYTHONPATH=needs.packages(),
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        imported = set(json.loads(done.stdout))
        self.assertEqual({name for name in imported if name not in sys.stdlib_module_names}, {"symmalloc"})
        # Importing any of these takes as long as importing the whole package.
        slow = {"asyncio", "concurrent", "email", "http", "logging", "multiprocessing", "ssl", "unittest", "xml"}
        self.assertEqual(imported & slow, set())

    def test_the_package_is_typed(self) -> None:
        import symmalloc

        self.assertTrue(Path(symmalloc.__file__).with_name("py.typed").is_file())


if __name__ == "__main__":
    unittest.main()
