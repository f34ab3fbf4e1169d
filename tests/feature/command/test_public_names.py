"""The public names of ``import kvflash``: one sorted list, each name documented."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module, metadata
from types import ModuleType

import pytest

import kvflash
from kvflash import _core, errors


def test_all_is_sorted_and_equals_the_public_names() -> None:
    # The lazy ones are there once they were asked for.
    assert all(hasattr(kvflash, name) for name in kvflash.__all__)
    public = {
        name
        for name, value in vars(kvflash).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    } - {"TYPE_CHECKING", "lazy_names"}
    assert len(public) > 10
    assert kvflash.__all__ == sorted(kvflash.__all__)
    assert set(kvflash.__all__) == public


def test_importing_the_package_is_light() -> None:
    """Optional parts are imported on demand: import kvflash needs no broker."""
    heavy = ("asyncio", "aiohttp", "msgpack", "zmq", "grpc", "aetcd", "nats", "numpy")
    script = f"""import sys, kvflash
found = [name for name in {heavy!r} if name in sys.modules]
assert not found, found
from kvflash import DistributedRuntime, ModelType
assert 'msgpack' in sys.modules
found = [name for name in ('aiohttp', 'zmq', 'grpc', 'aetcd', 'nats') if name in sys.modules]
assert not found, found"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("service", ["frontend", "router", "indexer"])
def test_a_service_imports_packages_when_it_uses_them(service: str) -> None:
    heavy = ("asyncio", "aiohttp", "msgpack", "zmq", "nats", "ssl", "yaml", "importlib.metadata")
    script = f"""import sys, kvflash.{service}.__main__
found = [name for name in {heavy!r} if name in sys.modules]
assert not found, found"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", ["discovery", "publisher"])
def test_names_that_are_imported_later_are_all_there(path: str) -> None:
    lobby = import_module(f"kvflash.{path}")
    assert lobby.__all__ == sorted(lobby.__all__)
    assert set(lobby.__all__) <= set(dir(lobby))
    for name in lobby.__all__:
        assert getattr(lobby, name).__name__ == name


def test_dir_and_the_version_are_complete_before_anything_is_loaded() -> None:
    script = """import sys, kvflash
assert set(kvflash.__all__) < set(dir(kvflash)), set(kvflash.__all__) - set(dir(kvflash))
assert "__version__" in dir(kvflash)
assert "importlib.metadata" not in sys.modules
print(kvflash.__version__)"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert (done.stderr, done.stdout.strip()) == ("", metadata.version("kvflash"))


def test_a_name_that_is_not_there_is_refused_as_python_does() -> None:
    with pytest.raises(AttributeError, match="module 'kvflash' has no attribute 'Nothing'"):
        _ = kvflash.Nothing


def test_every_public_name_is_documented() -> None:
    for name in kvflash.__all__:
        text = getattr(kvflash, name).__doc__
        assert text, f"{name} has no docstring"
        assert text.strip().endswith(".") or "\n" in text, f"{name}: {text!r}"


def test_all_of_the_core_has_its_manual_at_run_time() -> None:
    members = 0
    for name in _core.__all__:
        value = getattr(_core, name)
        assert value.__doc__, name
        for member, what in vars(value).items() if inspect.isclass(value) else ():
            if not member.startswith("_"):
                members += 1
                assert what.__doc__, f"{name}.{member}"
    assert members > 120


def test_every_error_is_exported_and_drawn_in_the_tree() -> None:
    found = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert len(found) > 10
    assert found <= set(kvflash.__all__)
    for name in found:
        assert issubclass(getattr(errors, name), kvflash.KvflashError)
        assert errors.__doc__ is not None
        assert name in errors.__doc__, f"{name} is missing in the tree"
