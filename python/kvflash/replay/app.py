"""Replays a trace, and prints the measurements."""

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvflash.ask import add_key_file, parse_url, read_key
from kvflash.config import bounded_float, bounded_int
from kvflash.console import counted, refuse
from kvflash.errors import KvflashError
from kvflash.flags import Flags
from kvflash.percentile import percentile
from kvflash.replay.send import Result, send
from kvflash.replay.trace import read_trace
from kvflash.table import printable, table

# With fewer samples the nearest rank of a percentile is the maximum, and is not shown.
_SAMPLES_MIN = {50: 2, 90: 10, 99: 100, 100: 1}
_WORKERS_SHOWN = 20
_ERRORS_SHOWN = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Replay a trace. Returns the exit status: 1 when a request failed, 130 after Ctrl-C."""
    args = _flags().parse(argv)
    try:
        url, key = parse_url(args.url), read_key(args.service_key_file)
        calls = read_trace(args.trace, limit=args.max_requests)
    except KvflashError as error:
        return refuse("replay", error)
    started_s = time.monotonic()
    results: list[Result] = []
    sending = send(
        url,
        calls,
        model=args.model,
        speed=args.speed,
        timeout_s=args.timeout,
        in_flight_max=args.max_in_flight,
        api_key=key,
        on_result=results.append,
    )
    is_interrupted = False
    try:
        asyncio.run(sending)
    except KeyboardInterrupt:
        is_interrupted = True
        unfinished = len(calls) - len(results)
        told = f"replay: interrupted; the report leaves out {unfinished} of {len(calls)} requests"
        print(told, file=sys.stderr)
    report = report_of(results, time.monotonic() - started_s)
    for line in [json.dumps(report)] if args.is_json else map(printable, _lines(report)):
        print(line)
    if is_interrupted:
        return 130
    return 1 if report["failed"] else 0


def _flags() -> Flags:
    flags = Flags(
        "replay",
        "Send a trace of prompts to a frontend or an engine at the recorded times, and report "
        "cache reuse and latency.",
        has_variables=False,
    )
    flags.add_positionals("url", metavar="URL", summary="A frontend or an engine", nargs=None)
    flags.add_positionals(
        "trace",
        metavar="TRACE",
        summary="A file of JSON lines, such as Mooncake's traces; see docs/command.md",
        nargs=None,
    )
    flags.add("--model", metavar="NAME", summary="The model of all requests")
    flags.add(
        "--speed",
        parse=bounded_float(0.001, 1e6),
        default=1.0,
        summary="Recorded time divided by real time; 2 sends twice as fast",
    )
    flags.add(
        "--max-requests",
        parse=bounded_int(1, 10**7),
        summary="Replay only the first lines of the trace",
    )
    flags.add(
        "--max-in-flight",
        parse=bounded_int(1, 10**5),
        default=1_024,
        summary="Maximum concurrent requests; others wait, and the report shows the delay",
    )
    flags.add(
        "--timeout",
        parse=bounded_float(0.05, 86_400),
        default=600.0,
        metavar="SECONDS",
        summary="Longest time for one request",
    )
    flags.add_toggle("is_json", on=["--json"], summary="Print one JSON object")
    add_key_file(flags)
    return flags


def report_of(results: Sequence[Result], wall_s: float) -> dict[str, Any]:
    """The figures of all results; latencies cover answered requests only."""
    good = [one for one in results if one.error is None]
    told = [one for one in good if one.cached_tokens is not None]
    prompt_tokens = sum(one.prompt_tokens for one in told)
    cached_tokens = sum(one.cached_tokens or 0 for one in told)
    errors = Counter(one.error for one in results if one.error is not None)
    return {
        "requests": len(results),
        "failed": len(results) - len(good),
        "errors": dict(errors.most_common(_ERRORS_SHOWN)),
        "wall_s": round(wall_s, 3),
        "prompt_tokens": sum(one.prompt_tokens for one in good),
        "reported": len(told),
        "cached_tokens": cached_tokens if told else None,
        "cached_percent": round(100 * cached_tokens / prompt_tokens, 2) if prompt_tokens else None,
        "first_token_ms": _spread([one.first_s for one in good if one.first_s is not None]),
        "total_ms": _spread([one.total_s for one in good]),
        "late_ms": _spread([one.late_s for one in results]),
        "workers": dict(Counter(one.worker for one in good if one.worker).most_common()),
    }


def _spread(samples_s: Sequence[float]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for percent, least in _SAMPLES_MIN.items():
        value = percentile(samples_s, percent) if len(samples_s) >= least else None
        name = "max" if percent == 100 else f"p{percent}"
        found[name] = None if value is None else round(1_000 * value, 2)
    return found


def _lines(report: dict[str, Any]) -> list[str]:
    sent = counted(report["requests"], "request", "requests")
    lines = [f"{sent} in {report['wall_s']:.1f} s, {report['failed']} failed"]
    lines += [
        f"  {counted(count, 'time', 'times')}: {error}" for error, count in report["errors"].items()
    ]
    if report["cached_percent"] is None:
        lines.append(f"{report['prompt_tokens']} prompt tokens; cached tokens were not reported")
    else:
        lines.append(
            f"{report['cached_percent']:.1f} % of the prompt tokens were cached, as reported for "
            f"{counted(report['reported'], 'request', 'requests')}"
        )
    rows: list[list[object]] = [["", "P50", "P90", "P99", "MAX"]]
    for name, words in (
        ("first_token_ms", "first token, ms"),
        ("total_ms", "whole answer, ms"),
        ("late_ms", "sent late, ms"),
    ):
        rows.append([words, *("" if ms is None else f"{ms:.1f}" for ms in report[name].values())])
    lines += ["", *table(rows)]
    if report["workers"]:
        workers = list(report["workers"].items())
        shown = ", ".join(f"{name} {count}" for name, count in workers[:_WORKERS_SHOWN])
        rest = len(workers) - _WORKERS_SHOWN
        lines += ["", f"by worker: {shown}" + (f", and {rest} more" if rest > 0 else "")]
    return lines
