"""Sections of ``benches/RESULTS.md`` that scripts write; the rest of the file is written by hand.

A section lies between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` and is replaced whole: what
was measured, by which command, when and where, then the tables as they came out, losses included.
"""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "benches" / "RESULTS.md"


class SectionError(ValueError):
    """The file has no place for a section, or more than one."""


class Section:
    """One section of the file.

    Args:
        name: The name in its marks.
        path: The file.

    Raises:
        SectionError: The marks are not there once each and in order. Raised before anything is
            measured, so that no run is lost.
    """

    def __init__(self, name: str, path: Path = RESULTS) -> None:
        self._name = name
        self._path = path
        self._machine_load = os.getloadavg()[0]
        self.replaced("")

    def replaced(self, body: str) -> str:
        """The file's text with ``body`` between the marks."""
        text = self._path.read_text(encoding="utf-8")
        begin, end = f"<!-- begin {self._name} -->\n", f"<!-- end {self._name} -->\n"
        counts = text.count(begin), text.count(end)
        if counts != (1, 1) or text.index(begin) > text.index(end):
            raise SectionError(
                f"{self._path} must have {begin.strip()!r} and, after it, {end.strip()!r}, each on "
                f"a line of its own and once; found {counts[0]} and {counts[1]}"
            )
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        return f"{before}{begin}{body}{end}{after}"

    def write(self, tables: str) -> None:
        """Replace the section, at once: a reader sees the old file or the new one."""
        head = f"{stamp(self._machine_load)}\n\n"
        beside = self._path.with_suffix(".new")
        beside.write_text(self.replaced(f"{head}{tables.strip()}\n"), encoding="utf-8")
        beside.replace(self._path)
        print(f"wrote the section {self._name!r} of {self._path}", file=sys.stderr)


def stamp(machine_load: float) -> str:
    """By which command, when, from which commit, on what machine."""
    today = datetime.datetime.now(datetime.timezone.utc).date()
    script, *arguments = sys.argv
    script = os.path.relpath(script, REPOSITORY)
    command = shlex.join(["python", script, *arguments])
    return (
        f"`{command}`, {today}, commit {_commit()}; {_machine()}; "
        f"load average {machine_load:.1f} before it began."
    )


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        run = subprocess.run(command, cwd=REPOSITORY, check=False, capture_output=True, text=True)
        return run.stdout.strip()

    # What this module writes itself is no change of what is measured.
    changes = git("status", "--porcelain", "--", ".", ":!benches/RESULTS.md")
    return git("rev-parse", "--short", "HEAD") + (" with changes" if changes else "")


def _machine() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}, "
        f"{memory_gib:.0f} GiB, {platform.system()} {platform.release().partition('-')[0]}, "
        f"Python {platform.python_version()}"
    )
