"""Generated parts of README and manuals: ``make settings`` writes them.

A table of flags, made of the table of settings, stands between ``<!-- settings SERVICE: SECTION;
SECTION -->`` and ``<!-- end -->``. How to install stands in README between ``<!-- begin install
-->`` and ``<!-- end install -->``; kvflash.version says whether there is a release.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from kvflash.settings import Setting, table
from kvflash.version import IS_RELEASED

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
INSTALL = {
    True: """\
    python3 -m venv .venv
    . .venv/bin/activate
    pip install kvflash

Add `'kvflash[nats]'` for events and requests over NATS.
""",
    False: """\
kvflash is not on PyPI yet. Build it in a clone; the build takes a few minutes the first time:

    git clone https://github.com/kvflash/kvflash
    cd kvflash
    make dev
    . .venv/bin/activate

To install it into another environment, activate that environment and run `pip install .` in the
clone (`pip install '.[nats]'` for events and requests over NATS).
""",
}
_PLACE = re.compile(r"(<!-- settings (\w+): ([^>]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
# Flags that name files, before the first setting of these.
_FILES = {
    "log_level": "| `--config` | none | Read flags from this YAML, TOML or JSON "
    "[file](command.md#--config-file) |\n",
    "policy": "| `--router-policy-config` | none | Read routing flags from this "
    "[file](routing.md#settings-in-a-file), or from Dynamo's policy file |\n",
}


def written(text: str) -> tuple[str, list[Setting]]:
    """A page with its tables as they should be, and the settings that are in them."""
    found: list[Setting] = []

    def made(place: re.Match[str]) -> str:
        head, service, sections, _, end = place.groups()
        rows = []
        for section in re.split(r";\s+", sections):
            group = [one for one in table(service) if one.section == section and one.flags]
            assert group, f"{service} has no section {section!r}"
            rows += group
        found.extend(rows)
        first = _FILES.get(rows[0].key, "")
        lines = "".join(map(_row, rows))
        return f"{head}| flag | default | meaning |\n|---|---|---|\n{first}{lines}{end}"

    return _PLACE.sub(made, text), found


def installing(text: str, is_released: bool = IS_RELEASED) -> str:
    """README with its section about installing as it should be."""
    head, begin, rest = text.partition("<!-- begin install -->\n")
    _, end, tail = rest.partition("<!-- end install -->\n")
    assert begin and end, "README.md has no section <!-- begin install -->"
    return f"{head}{begin}{INSTALL[is_released]}{end}{tail}"


def _row(one: Setting) -> str:
    names = ", ".join(f"`{name}`" for name in one.flags)
    words = one.choices or []
    legal = f": {', '.join(words)}" if words and one.metavar is None else ""
    details = " ".join(one.help[2:])
    page = one.help[0] + legal + (f". {details}" if details else "")
    return f"| {names} | {_default(one)} | {page} |\n"


def _default(one: Setting) -> str:
    if one.default in (None, "", []):
        return "none"
    if one.kind == "bool":
        return "on" if one.default else "off"
    if "bytes" in one.legal and one.default:
        return f"{one.default >> 20}MiB"
    unit = " s" if one.metavar == "SECONDS" else ""
    return f"{one.default:g}{unit}" if isinstance(one.default, float) else str(one.default)


def main() -> None:
    """Write every page that has a generated part."""
    for path in [README, *sorted(DOCS.rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        fresh = installing(text) if path == README else written(text)[0]
        if fresh != text:
            path.write_text(fresh, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
