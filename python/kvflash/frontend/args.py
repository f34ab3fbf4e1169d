"""Flags of the frontend."""

import argparse
from collections.abc import Sequence
from typing import ClassVar

from kvflash.flags import Flags
from kvflash.roster.flags import PARSERS, FleetFlags
from kvflash.router_flags import RoutingArgs, parse
from kvflash.settings import of_table

# The most important flags, in the order of the help.
_FIRST = """
    --config --worker --discovery --namespace --tokenizer --host --port --router-mode
    --router-replica-sync --log-level
"""


@of_table("frontend")
class FrontendArgs(RoutingArgs, FleetFlags):
    """The frontend's settings; see ``--help``."""

    worker_flags: ClassVar = (
        ("--worker", "workers", ""),
        ("--decode-worker", "decode_workers", ""),
        ("--prefill-worker", "prefill_workers", ",role=prefill"),
    )

    def __post_init__(self) -> None:
        self.check_dns()

    @property
    def discovery_kind(self) -> str | None:
        """The kind of discovery that is watched, if any."""
        has_flags = self.workers or self.prefill_workers or self.decode_workers
        kind = self.discovery or ("none" if has_flags else "file")
        return None if kind == "none" else kind


def _weights(text: str) -> list[tuple[str, float]]:
    """Parse ``client=2,other=0.5``."""
    weights = []
    for item in filter(None, text.split(",")):
        client, equals, weight = item.rpartition("=")
        try:
            share = float(weight)
        except ValueError:
            share = 0.0
        if not equals or not 0 < share < float("inf"):
            raise argparse.ArgumentTypeError(
                f"must be client=weight with a weight above 0, separated by commas, got {item!r}"
            )
        weights.append((client.strip(), share))
    return weights


def parse_args(argv: Sequence[str] | None = None) -> FrontendArgs:
    """Parse the command line and the environment; ConfigError if flags contradict each other."""
    flags = Flags(
        "frontend",
        "OpenAI-compatible HTTP frontend. Sends each request to the worker with the lowest cost: "
        "prompt tokens to compute, plus the other work there.",
        first=_FIRST.split(),
    )
    parsers = {**PARSERS, "fairness_weight": _weights}
    return FrontendArgs(**parse(flags, "frontend", argv, parsers))
