"""Files that need each other, directly or through others, are few: no ring has more than three."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from test_doors import sources

ROOT = Path(__file__).parents[2]
FILES_MAX = 3
CRATES = ("rust/core", "rust/serve", "rust/publish", "rust/sim", "capi", ".")
Module = tuple[str, ...]
USE = re.compile(r"(pub(?:\([^)]*\))? )?use ([^;]+);")
TEST_MODULE = re.compile(r"#\[cfg\((?:all\()?test\b[^\n]*\n(?:#\[[^\n]*\n)*mod \w+ \{")


def rings(needs: Mapping[Module, set[Module]]) -> list[list[Module]]:
    """The strongly connected components of more than one file, the largest first."""
    number: dict[Module, int] = {}
    lowest: dict[Module, int] = {}
    path: list[Module] = []
    found: list[list[Module]] = []

    def visit(file: Module) -> None:
        number[file] = lowest[file] = len(number)
        path.append(file)
        for other in needs.get(file, ()):
            if other not in number:
                visit(other)
            if other in path:
                lowest[file] = min(lowest[file], lowest[other])
        if lowest[file] == number[file]:
            ring = path[path.index(file) :]
            del path[path.index(file) :]
            if len(ring) > 1:
                found.append(sorted(ring))

    for file in needs:
        if file not in number:
            visit(file)
    return sorted(found, key=len, reverse=True)


class Crate:
    """What the files of a crate name of each other, followed through what `mod.rs` passes on."""

    def __init__(self, files: Mapping[Module, str]) -> None:
        self.files = files
        self._passed_on: dict[tuple[Module, str], Module] = {}
        self._named: dict[Module, list[Module]] = {}
        for file, text in files.items():
            code = re.sub(r"//[^\n]*", "", TEST_MODULE.split(text)[0])
            self._named[file] = []
            for public, tree in USE.findall(code):
                for name in leaves(re.sub(r"\s+", " ", tree)):
                    self._note(file, name, is_passed_on=bool(public))
            for name in re.findall(r"\b(?:crate|super)(?:::\w+)+", USE.sub("", code)):
                self._note(file, name, is_passed_on=False)

    def needs(self) -> dict[Module, set[Module]]:
        """Files by those that name something of them."""
        found = {}
        for file, names in self._named.items():
            owners = {self._owner(name) for name in names}
            found[file] = owners - {file}
        return found

    def _note(self, file: Module, name: str, *, is_passed_on: bool) -> None:
        path = self._absolute(file, name.split("::"))
        if path is not None and is_passed_on:
            self._passed_on[file, path[-1]] = path
        elif path is not None:
            self._named[file].append(path)

    def _absolute(self, file: Module, parts: list[str]) -> Module | None:
        base, rest = file, parts
        if parts[0] == "crate":
            base, rest = (), parts[1:]
        elif parts[0] == "self":
            rest = parts[1:]
        elif parts[0] == "super":
            while rest and rest[0] == "super":
                base, rest = base[:-1], rest[1:]
        elif (*file, parts[0]) not in self.files:
            return None
        return (*base, *rest) or None

    def _owner(self, path: Module) -> Module:
        length = max(n for n in range(len(path) + 1) if path[:n] in self.files)
        file, rest = path[:length], path[length:]
        target = self._passed_on.get((file, rest[0])) if rest else None
        return file if target is None or target == path else self._owner((*target, *rest[1:]))


def leaves(tree: str) -> Iterator[str]:
    """The paths of a tree of names: `a::{b, c::{d}}` has `a::b` and `a::c::d`."""
    start, brace, body = tree.strip().partition("{")
    if not brace:
        if start:
            yield start.split(" as ")[0].strip()
        return
    depth, branch = 0, ""
    for char in body.rpartition("}")[0] + ",":
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            yield from (start + leaf for leaf in leaves(branch))
            branch = ""
        else:
            branch += char


def crate(folder: str) -> Crate:
    source = ROOT / folder / ("rust/src" if folder == "." else "src")
    files = {}
    for path in sorted(source.rglob("*.rs")):
        parts = path.relative_to(source).with_suffix("").parts
        if not any(part.startswith("tests") for part in parts):
            module = parts[:-1] if parts[-1] in ("mod", "lib", "main") else parts
            files[module] = path.read_text(encoding="utf-8")
    return Crate(files)


@pytest.mark.parametrize("folder", CRATES)
def test_no_ring_of_rust_files_is_large(folder: str) -> None:
    needs = crate(folder).needs()
    assert any(needs.values()) or folder in ("capi", "rust/publish")
    large = [
        "  ".join("::".join(file) for file in ring)
        for ring in rings(needs)
        if len(ring) > FILES_MAX
    ]
    assert not large, "files that all need each other:\n" + "\n".join(large)


def test_no_ring_of_python_files_is_large() -> None:
    files = {tuple(one.path.removesuffix(".py").split("/")): one for one in sources()}
    needs: dict[Module, set[Module]] = {}
    for file, source in files.items():
        names = {tuple(name.split(".")[1:]) for name in source.imported()}
        near = {name if name in files else name[:-1] for name in names}
        needs[file] = {one for one in near if one in files and one != file}
    assert sum(map(len, needs.values())) > len(needs)
    assert not [ring for ring in rings(needs) if len(ring) > FILES_MAX]


def test_a_ring_is_found_through_a_lobby_and_a_tree_of_names() -> None:
    texts = {
        (): "mod a; mod b; pub use b::c::Thing;",
        ("a",): "use crate::{Thing, other::Not};",
        ("b",): "mod c;\npub(crate) use c::Thing;",
        ("b", "c"): "fn f() { super::d::g() }",
        ("b", "d"): "use crate::a::{X as Y, self};\n#[cfg(test)]\nmod tests { use super::c; }",
    }
    assert rings(Crate(texts).needs()) == [[("a",), ("b", "c"), ("b", "d")]]
    assert list(leaves("a::{b, c::{d, e as f}}")) == ["a::b", "a::c::d", "a::c::e"]
