"""``python -m demo``."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from demo.args import parse_args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Returns:
        Exit status: 0 if auto reused more than round-robin and no request failed, 1 if not, 2 if it
            could not be tried, 130 after Ctrl-C.
    """
    args = parse_args(argv)
    wanted = ["rich"] if args.no_plot else ["rich", "matplotlib"]
    missing = [name for name in wanted if find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        print(
            f"python -m demo: error: {names} not installed; run: pip install {' '.join(missing)}"
            + (" (or give --no-plot)" if missing == ["matplotlib"] else ""),
            file=sys.stderr,
        )
        return 2
    # Imported once its dependencies are known to be installed.
    from demo.app import run_demo  # noqa: PLC0415

    return run_demo(args)


if __name__ == "__main__":
    sys.exit(main())
