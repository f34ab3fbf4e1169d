"""All Python tests, in two halves side by side: they mostly wait, for processes and for clocks.

``python tests/halves.py`` runs ``pytest --ignore=tests/e2e`` and ``pytest tests/e2e``; what the
first one says follows what the second one says. With arguments it is ``pytest ARGUMENTS``. Ends
with 1 where a test fails.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from types import FrameType

PYTEST = [sys.executable, "-m", "pytest"]


def main(arguments: list[str]) -> int:
    """Run them; returns the exit status."""
    if arguments:
        return subprocess.call([*PYTEST, *arguments])
    print("pytest tests/e2e, and beside it pytest --ignore=tests/e2e", flush=True)
    with tempfile.TemporaryFile() as said:
        halves = [
            subprocess.Popen([*PYTEST, "--ignore=tests/e2e"], stdout=said, stderr=said),
            subprocess.Popen([*PYTEST, "tests/e2e"]),
        ]

        def interrupt(_number: int, _frame: FrameType | None) -> None:
            # Fixtures end what they have started.
            for half in halves:
                if half.poll() is None:
                    half.send_signal(signal.SIGINT)

        signal.signal(signal.SIGTERM, interrupt)
        # From a terminal they have it themselves.
        signal.signal(signal.SIGINT, lambda *_: None)
        ends = [half.wait() for half in halves]
        said.seek(0)
        print("pytest --ignore=tests/e2e", flush=True)
        sys.stdout.buffer.write(said.read())
    return int(any(ends))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
