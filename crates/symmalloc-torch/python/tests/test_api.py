"""The package's names, and its errors without PyTorch."""

from __future__ import annotations

import ast
import json
import unittest
from pathlib import Path

import needs
import symmalloc

# Blocks the import of PyTorch, so that the tests behave the same where it is installed.
WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None
import symmalloc
"""


class Names(unittest.TestCase):
    def test_dir_lists_the_api_alone(self) -> None:
        self.assertEqual(dir(symmalloc), sorted(symmalloc.__all__))
        for name in dir(symmalloc):
            self.assertTrue(hasattr(symmalloc, name), name)

    def test_modules_form_no_circle(self) -> None:
        folder = Path(symmalloc.__file__).parent
        imports: dict[str, set[str]] = {}
        for path in folder.rglob("*.py"):
            if path.name.startswith("__"):
                continue
            package = ["symmalloc", *path.relative_to(folder).parent.parts]
            module = ".".join([*package, path.stem])
            imports[module] = set()
            # Imports within functions count, too.
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.level:
                    source = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
                    names = [".".join(source), *(".".join([*source, alias.name]) for alias in node.names)]
                    imports[module].update(names)
        while True:
            leaves = {module for module, used in imports.items() if not used & imports.keys()}
            if not leaves:
                break
            imports = {module: used for module, used in imports.items() if module not in leaves}
        self.assertEqual(sorted(imports), [], "these modules import each other")


class WithoutTorch(unittest.TestCase):
    def errors(self, *calls: str) -> dict[str, list[str]]:
        """Returns the class and the text of the error of each call, in a process without PyTorch."""
        program = WITHOUT_TORCH + (
            f"errors = {{}}\nfor call in {calls!r}:\n"
            "    try:\n        eval(call)\n"
            "    except Exception as error:\n        errors[call] = [type(error).__name__, str(error)]\n"
            "print(json.dumps(errors))\n"
        )
        done = needs.process(program)
        self.assertEqual(done.returncode, 0, done.stderr)
        found: dict[str, list[str]] = json.loads(done.stdout)
        self.assertEqual(list(found), list(calls))
        return found

    def test_a_call_that_needs_torch_raises_a_torch_error(self) -> None:
        calls = (
            "symmalloc.install()",
            "symmalloc.MemPool()",
            "symmalloc.step()",
            "symmalloc.last_step()",
            "symmalloc.assert_aligned()",
            "symmalloc.all_to_all_single(None, None)",
            "symmalloc.exchange_splits([1])",
            "symmalloc.announce('all_reduce').__enter__()",
            "symmalloc.region().__enter__()",
        )
        for call, (kind, text) in self.errors(*calls).items():
            self.assertEqual(kind, "TorchError", call)
            self.assertIn("PyTorch cannot be imported", text, call)

    def test_a_call_that_needs_an_installed_allocator_names_install(self) -> None:
        calls = ("symmalloc.stats()", "symmalloc.show()", "symmalloc.named('x').__enter__()", "symmalloc.MemPool(device=0)")
        for call, (kind, text) in self.errors(*calls).items():
            self.assertEqual(kind, "NotInstalled", call)
            self.assertIn("symmalloc.install()", text, call)

    def test_an_object_that_is_not_a_tensor_is_an_invalid_argument(self) -> None:
        calls = ("symmalloc.placement(None)", "symmalloc.placement(7)", "symmalloc.dma_buf(7)")
        for call, (kind, text) in self.errors(*calls).items():
            self.assertEqual(kind, "InvalidArgument", call)
            self.assertIn("give a CUDA tensor", text, call)


if __name__ == "__main__":
    unittest.main()
