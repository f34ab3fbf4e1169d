"""Common parts of the tests of GET /openapi.json: routes in the source, schemathesis."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service import ROOT, SUPPORT, Http

SOURCES = ROOT / "rust" / "serve" / "src"
EXAMPLES = int(os.environ.get("KVFLASH_SCHEMA_EXAMPLES", "6"))
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH")


def routes(service: str) -> dict[str, set[str]]:
    """Paths and their methods, as the source of a service routes them."""
    paths = [*sorted((SOURCES / service).glob("*.rs")), SOURCES / "openapi.rs"]
    text = "".join(path.read_text(encoding="utf-8") for path in paths)
    found: dict[str, set[str]] = {}
    for part in text.split(".route(")[1:]:
        path, _, rest = part.partition(",")
        name = re.fullmatch(r'\s*"(/[^"]*)"', path)
        # Paths that only tests switch on are not part of the API.
        if name is None or name[1].startswith("/test/"):
            continue
        methods = re.findall(r"\b(get|post|put|patch|delete)\(", _call(rest))
        found.setdefault(name[1].replace("{*", "{"), set()).update(methods)
    return found


def _call(text: str) -> str:
    """The text up to the bracket that ends the call that it is in."""
    depth = 1
    for at, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return text[:at]
    return text


def check_documented(document: dict[str, Any], routed: dict[str, set[str]]) -> None:
    """Every route is documented, and every documented one is routed."""
    assert all(routed.values()), routed
    assert {path: set(methods) for path, methods in document["paths"].items()} == routed


def check_methods(http: Http, paths: Iterable[str]) -> None:
    """Documented methods are accepted and others are not."""
    documented = http.get("/openapi.json")["paths"]
    for path in paths:
        methods = documented[path]
        for method in METHODS:
            status, _, headers = http.call(method, re.sub(r"[{}]", "", path))
            assert (status != 405) == (method.lower() in methods), (method, path, status)
            if status == 405:
                assert set(methods) <= set(headers["allow"].lower().split(","))


def check_references(document: dict[str, Any]) -> None:
    """Every reference leads somewhere, and every component is referred to."""
    references = re.findall(r"'\$ref': '#/([^']+)'", str(document))
    assert len(references) > 40
    for reference in references:
        place = document
        for part in reference.split("/"):
            place = place[part]
    kinds = dict(document["components"])
    # These are referred to by name alone.
    schemes = kinds.pop("securitySchemes", {})
    assert {name for one in document.get("security", []) for name in one} == set(schemes)
    names = {f"components/{kind}/{name}" for kind, all_ in kinds.items() for name in all_}
    assert names == set(references), "nothing refers to these"


@dataclass(frozen=True)
class Conformed:
    """Operations that schemathesis tested."""

    operations: int
    cases: int


def check_answers(url: str, cwd: Path, hooks: str, *flags: str) -> Conformed:
    """Statuses, types, shapes and refusals of a service are as documented, for any body."""
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
        *("--max-examples", str(EXAMPLES), "--seed", "1", "--generation-deterministic"),
        *("--checks", "all", "--warnings", "off", "--continue-on-failure", *flags),
    ]
    env = {
        **os.environ,
        # Worked out once, not for each run: which characters there are.
        "HYPOTHESIS_STORAGE_DIRECTORY": str(ROOT / ".hypothesis"),
        # Otherwise all variables are searched for a proxy at each request.
        "no_proxy": "127.0.0.1",
        "PYTHONPATH": str(SUPPORT),
        "SCHEMATHESIS_HOOKS": hooks,
    }
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    tested = re.search(r"Tested: (\d+)", done.stdout)
    cases = re.search(r"(\d[\d,]*) generated", done.stdout)
    assert tested, done.stdout
    assert cases, done.stdout
    return Conformed(int(tested[1]), int(cases[1].replace(",", "")))
