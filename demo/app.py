"""Runs seed by seed, all modes in parallel, then shows the result."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import aiohttp
from rich.console import Console

from demo import screen
from demo.args import DemoArgs
from demo.child import ChildError, Children, together
from demo.client import send_workload
from demo.fleet import MODEL, Fleet, FleetOptions, start_fleet
from demo.record import ArmRun
from demo.report import AUTO, MODES
from demo.summary import judge, markdown, notes, summarize, to_json
from demo.workload import Workload, WorkloadOptions, generate
from kvflash.signals import ending_signals

__all__ = ["run_demo"]

INTERRUPTED = 130


def run_demo(args: DemoArgs) -> int:
    """Run the demo. Returns the exit status."""
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"python -m demo: error: --out {args.out}: {error.strerror}", file=sys.stderr)
        return 2
    return asyncio.run(_until_signal(args))


async def _until_signal(args: DemoArgs) -> int:
    """Run; the first signal stops it in order, a second one at once."""
    console = Console()
    children = Children(args.out)
    work = asyncio.ensure_future(_run(args, console, children))
    is_asked = False

    def on_signal() -> None:
        nonlocal is_asked
        if is_asked:
            children.kill()
        else:
            is_asked = True
            work.cancel()

    loop = asyncio.get_running_loop()
    for number in ending_signals():
        loop.add_signal_handler(number, on_signal)
    try:
        return await work
    except asyncio.CancelledError:
        console.print("interrupted; everything is stopped")
        return INTERRUPTED
    except ChildError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1


async def _run(args: DemoArgs, console: Console, children: Children) -> int:
    workloads = [
        generate(
            WorkloadOptions(
                applications=args.applications,
                conversations=args.conversations,
                turns=args.turns,
                seed=args.seed + number,
            )
        )
        for number in range(args.seeds)
    ]
    console.print(
        f"{args.workers} mock engines a mode, {args.applications} applications, "
        f"{args.conversations} conversations of {args.turns} turns, {args.concurrency} users at a "
        f"time; logs and results in {args.out}/",
        highlight=False,
    )
    runs: list[ArmRun] = []
    kept: Fleet | None = None
    # No limit on connections: the users are the limit.
    connector = aiohttp.TCPConnector(limit=0)
    async with children, aiohttp.ClientSession(connector=connector) as session:
        for workload in workloads:
            seed = workload.options.seed
            fleets = await _start_fleets(args, console, children, session, seed=seed)
            runs += await _send(args, console, children, session, fleets=fleets, workload=workload)
            kept = fleets[AUTO] if args.keep and workload is workloads[-1] else None
            stopped = [fleet for fleet in fleets.values() if fleet is not kept]
            await children.stop(*(child for fleet in stopped for child in fleet.children))
        is_good = _tell(args, console, workloads, runs)
        if kept is not None:
            await _keep(console, children, kept)
    return 0 if is_good else 1


async def _start_fleets(
    args: DemoArgs,
    console: Console,
    children: Children,
    session: aiohttp.ClientSession,
    *,
    seed: int,
) -> dict[str, Fleet]:
    """Start a cold fleet for each mode."""
    options = FleetOptions(
        workers=args.workers,
        block_size=args.block_size,
        cache_blocks=args.cache_blocks,
        speedup_ratio=args.speedup_ratio,
        seed=seed,
    )
    with console.status(f"seed {seed}: starting {args.workers} cold engines for each mode"):
        fleets = await together(*(start_fleet(children, session, mode, options) for mode in MODES))
    return dict(zip(MODES, fleets, strict=True))


async def _send(
    args: DemoArgs,
    console: Console,
    children: Children,
    session: aiohttp.ClientSession,
    *,
    fleets: Mapping[str, Fleet],
    workload: Workload,
) -> list[ArmRun]:
    """Send the workload to all fleets at once: other load of this machine affects them equally."""
    with screen.progress(
        console, fleets, seed=workload.options.seed, total=workload.request_count
    ) as on_record:
        sent = (
            send_workload(
                session,
                fleet.url,
                workload,
                model=MODEL,
                mode=mode,
                concurrency=args.concurrency,
                worker_count=args.workers,
                on_record=partial(on_record, mode),
            )
            for mode, fleet in fleets.items()
        )
        return await children.watch(together(*sent))


def _tell(
    args: DemoArgs, console: Console, workloads: Sequence[Workload], runs: list[ArmRun]
) -> bool:
    """Show and store the result. Returns whether it is as expected."""
    verdict = judge(runs)
    screen.show_table(console, list(summarize(runs).values()))
    screen.show_verdict(console, verdict)
    for run in runs:
        error = next((record.error for record in run.records if record.error), None)
        if error is not None:
            where = f"{run.mode}, seed {run.seed}"
            console.print(f"first failure in {where}: {error}", markup=False, highlight=False)
    screen.show_notes(
        console,
        notes(
            seeds=args.seeds,
            shared_tokens=sum(one.shared_chars for one in workloads) // len(workloads),
            cache_tokens=args.cache_blocks * args.block_size,
            speedup_ratio=args.speedup_ratio,
        ),
    )
    files = _store(args, runs, to_json(runs, verdict, {**asdict(args), "out": str(args.out)}))
    console.print("\nwritten: " + ", ".join(map(str, files)), highlight=False)
    return verdict.is_good


def _store(args: DemoArgs, runs: list[ArmRun], result: object) -> list[Path]:
    files = [args.out / name for name in ("result.json", "requests.jsonl", "table.md")]
    files[0].write_text(json.dumps(result, indent=2) + "\n")
    lines = [
        json.dumps({"mode": run.mode, "seed": run.seed, **asdict(one)})
        for run in runs
        for one in run.records
    ]
    files[1].write_text("\n".join(lines) + "\n")
    files[2].write_text(markdown(summarize(runs)))
    if not args.no_plot:
        # Imported here: matplotlib takes a second to load, and --no-plot needs none of it.
        from demo.plot import draw  # noqa: PLC0415

        caption = (
            f"{args.workers} mock engines a mode (no GPU, modelled time), "
            f"{runs[-1].planned_requests} requests a mode and seed, seeds: {args.seeds}, "
            f"{args.concurrency} users, "
            f"{args.cache_blocks * args.block_size:,} tokens of cache an engine"
        )
        files += draw(runs, args.out, caption=caption)
    return files


async def _keep(console: Console, children: Children, fleet: Fleet) -> None:
    """Leave the fleet running until a signal.

    Raises:
        ChildError: It ended on its own.
    """
    console.print("\n[bold]The auto fleet is running; try:[/bold]\n")
    # For copying by hand: without wrapping and colours.
    print(screen.examples(fleet.url, MODEL), flush=True)
    console.print("\nCtrl-C stops it.")
    try:
        await children.watch(asyncio.Event().wait())
    except asyncio.CancelledError:
        console.print("stopping")
