#!/usr/bin/env python3
"""Write the licenses of every crate that is linked into the wheel.

    python deploy/third_party_licenses.py [--target TRIPLE] [--out THIRD_PARTY_LICENSES.txt]

pyproject.toml takes the file into the wheel if it is there (`make wheel` and the release workflow
write it first). cargo resolves the crates from Cargo.lock; their license files come from the
sources that cargo has fetched. A crate without one is listed with the text of Apache-2.0 or MIT, if
it may be used under either; otherwise the run fails: a list with holes is worse than none.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "kvflash"
FEATURES = "kvflash/python"
# Names of license files, also below the crate's root: sources in C come with their own.
NAME = re.compile(r"(licen[cs]e|copying|copyright|notice|unlicense)([-._].*)?", re.IGNORECASE)
CODE_SUFFIXES = {".c", ".h", ".html", ".json", ".py", ".rs", ".toml", ".yml"}
TEXT_BYTES_MAX = 256 * 1024
NOT_LINKED = {"tests", "test", "benches", "examples", "fuzz", "doc", "docs"}
STD = ("Rust standard library", "https://www.rust-lang.org", "MIT OR Apache-2.0")


# The MIT license, https://spdx.org/licenses/MIT.html, for crates that name it and bring no file.
MIT = """MIT License

Copyright (c) {holders}

Permission is hereby granted, free of charge, to any person obtaining a copy of this software
and associated documentation files (the "Software"), to deal in the Software without
restriction, including without limitation the rights to use, copy, modify, merge, publish,
distribute, sublicense, and/or sell copies of the Software, and to permit persons to whom the
Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or
substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING
BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM,
DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""


def command(*words: str) -> str:
    return subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def host() -> str:
    found = re.search(r"^host: (\S+)$", command("rustc", "-vV"), re.MULTILINE)
    assert found is not None, "rustc -vV names no host"
    return found[1]


def metadata(target: str) -> dict[str, Any]:
    words = ("--locked", "--format-version", "1", "--filter-platform", target)
    return json.loads(command("cargo", "metadata", *words, "--features", FEATURES))


def linked(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the foreign packages that the extension is linked from, by name and version.

    Build scripts' dependencies and procedural macros run in the compiler only.
    """
    packages = {one["id"]: one for one in found["packages"]}
    nodes = {one["id"]: one for one in found["resolve"]["nodes"]}
    ours = set(found["workspace_members"])
    queue = [key for key in ours if packages[key]["name"] == PACKAGE]
    assert len(queue) == 1, f"the workspace has no package {PACKAGE}"
    reached = set(queue)
    while queue:
        for edge in nodes[queue.pop()]["deps"]:
            key = edge["pkg"]
            kinds = {kind["kind"] for kind in edge["dep_kinds"]}
            macro = any("proc-macro" in one["kind"] for one in packages[key]["targets"])
            if None in kinds and not macro and key not in reached:
                reached.add(key)
                queue.append(key)
    foreign = [packages[key] for key in reached - ours]
    return sorted(foreign, key=lambda one: (one["name"], one["version"]))


def license_files(package: dict[str, Any]) -> list[Path]:
    folder = Path(package["manifest_path"]).parent
    found = {folder / package["license_file"]} if package["license_file"] else set()
    for path in folder.rglob("*"):
        inside = path.relative_to(folder)
        if not NAME.fullmatch(path.name) or path.suffix in CODE_SUFFIXES or not path.is_file():
            continue
        if path.stat().st_size <= TEXT_BYTES_MAX and not NOT_LINKED & set(inside.parts):
            found.add(path)
    return sorted(found)


def text_without_file(package: dict[str, Any]) -> str | None:
    """Return the text of a license that the package may be used under, or None."""
    expression = package["license"] or ""
    choices = set(re.split(r"[\s/()]+", expression)) - {"OR", ""}
    if "Apache-2.0" in choices and not choices & {"AND", "WITH"}:
        return (ROOT / "LICENSE").read_text(encoding="utf-8")
    if "MIT" in choices and not choices & {"AND", "WITH"}:
        holders = ", ".join(package["authors"]) or f"the authors of {package['name']}"
        return MIT.format(holders=holders)
    return None


def document(packages: list[dict[str, Any]], target: str) -> str:
    texts: dict[str, str] = {}
    users: dict[str, list[str]] = defaultdict(list)
    rows, missing = [], []

    def add(name: str, text: str) -> None:
        # The same license with other line breaks is printed once.
        key = " ".join(text.split())
        texts.setdefault(key, text.strip("\n"))
        if name not in users[key]:
            users[key].append(name)

    name, url, expression = STD
    rows.append(f"{name}: {expression}; {url}")
    add(name, (ROOT / "LICENSE").read_text(encoding="utf-8"))
    for package in packages:
        name = f"{package['name']} {package['version']}"
        expression = package["license"] or "see its license file"
        rows.append(f"{name}: {expression}; {package['repository'] or package['homepage'] or ''}")
        files = license_files(package)
        for path in files:
            add(name, path.read_text(encoding="utf-8", errors="replace"))
        if not files:
            text = text_without_file(package)
            if text is None:
                missing.append(f"{name} ({expression})")
            else:
                add(name, text)
    if missing:
        raise SystemExit(f"no license text: {', '.join(missing)}")
    parts = [f"Crates that are linked into kvflash's extension for {target}, and their licenses.\n"]
    parts.append("\n".join(rows) + "\n")
    parts += [f"{'=' * 80}\n{', '.join(users[key])}\n\n{texts[key]}\n" for key in texts]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--target", help="the wheel's triple; by default that of rustc's host")
    parser.add_argument("--out", type=Path, default=ROOT / "THIRD_PARTY_LICENSES.txt")
    options = parser.parse_args()
    target = options.target or host()
    packages = linked(metadata(target))
    text = document(packages, target)
    options.out.write_text(text, encoding="utf-8")
    print(f"{options.out}: {len(packages)} crates, {len(text):,} characters")


if __name__ == "__main__":
    main()
