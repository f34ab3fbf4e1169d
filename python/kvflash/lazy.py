"""Names that are imported on first use (PEP 562)."""

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Create a module's ``__getattr__`` that imports a name from its home and keeps it.

    ``modules`` has the names of each home, separated by spaces.
    """
    homes = {name: home for home, names in modules.items() for name in names.split()}

    def load(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home), name)
        setattr(sys.modules[package], name, value)
        return value

    return load


def lazy_dir(package: str, names: Iterable[str]) -> Callable[[], list[str]]:
    """Create a module's ``__dir__``: its own names and ``names``, which are imported later."""

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return listed
