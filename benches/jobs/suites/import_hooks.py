"""Changes to modules right after their import: `after_import("torch", change)`. A module that is never imported costs nothing."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    """Calls `change` with the module after its first import, and immediately if it is imported already."""
    if name in sys.modules:
        change(sys.modules[name])
    else:
        sys.meta_path.insert(0, _ChangingFinder(name, change))


class _ChangingFinder(MetaPathFinder):
    """Finds one module with the other finders, and extends its loader."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self.name, self.change = name, change
        self.is_searching = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name or self.is_searching:
            return None
        self.is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.is_searching = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                # Not for a later reload.
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self.change(module)

            spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec
