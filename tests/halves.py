"""All Python tests, in two halves side by side: they mostly wait, for processes and for clocks.

``python tests/halves.py`` runs the folders of ``SLOW``, and beside them all others; what those say
follows what the slow ones say. With arguments it is ``pytest ARGUMENTS``. Ends
with 1 where a test fails.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from types import FrameType

PYTEST = [sys.executable, "-m", "pytest"]
FEATURES = (
    "tokens retry queue load affinity disagg health fleet frontend launch replicas demo mocker"
)
SLOW = ["tests/documents", *(f"tests/feature/{name}" for name in FEATURES.split())]
REST = [f"--ignore={folder}" for folder in SLOW]


def main(arguments: list[str]) -> int:
    """Run them; returns the exit status."""
    if arguments:
        return subprocess.call([*PYTEST, *arguments])
    print(" ".join(["pytest", *SLOW]), flush=True)
    with tempfile.TemporaryFile() as said:
        halves = [
            subprocess.Popen([*PYTEST, *REST], stdout=said, stderr=said),
            subprocess.Popen([*PYTEST, *SLOW]),
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
        print(" ".join(["pytest", *REST]), flush=True)
        sys.stdout.buffer.write(said.read())
    return int(any(ends))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
