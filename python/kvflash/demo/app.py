"""One arm after the other, then the answer."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import aiohttp
from rich.console import Console

from kvflash.demo import screen
from kvflash.demo.args import DemoArgs
from kvflash.demo.child import ChildError, Children
from kvflash.demo.client import send_workload
from kvflash.demo.fleet import MODEL, Fleet, FleetOptions, start_fleet
from kvflash.demo.record import ArmRun
from kvflash.demo.report import BASELINE, KV, figures
from kvflash.demo.summary import judge, notes, to_json
from kvflash.demo.workload import Workload, WorkloadOptions, generate

__all__ = ["run_demo"]

INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_demo(args: DemoArgs) -> int:
    """Run the demo. Returns the exit status."""
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"kvflash.demo: --out {args.out}: {error.strerror}", file=sys.stderr)
        return 2
    return asyncio.run(_until_signal(args))


async def _until_signal(args: DemoArgs) -> int:
    """Run; the first signal ends it in order, a second one at once."""
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
    for number in _SIGNALS:
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
    workload = generate(
        WorkloadOptions(
            applications=args.applications,
            conversations=args.conversations,
            turns=args.turns,
            seed=args.seed,
        )
    )
    console.print(
        f"{args.workers} mock engines, {args.applications} applications, {args.conversations} "
        f"conversations of {args.turns} turns, {args.concurrency} users at a time; "
        f"logs and results in {args.out}/",
        highlight=False,
    )
    runs: list[ArmRun] = []
    # No limit on connections: the users are the limit.
    connector = aiohttp.TCPConnector(limit=0)
    async with children, aiohttp.ClientSession(connector=connector) as session:
        for mode in (BASELINE, KV):
            run, fleet = await _run_arm(
                args, console, children, session, mode=mode, workload=workload
            )
            runs.append(run)
            is_kept = args.keep and mode == KV
            if not is_kept:
                await children.stop(*fleet.children)
        is_good = _tell(args, console, workload, runs)
        if args.keep:
            await _keep(console, children, fleet)
    return 0 if is_good else 1


async def _run_arm(
    args: DemoArgs,
    console: Console,
    children: Children,
    session: aiohttp.ClientSession,
    *,
    mode: str,
    workload: Workload,
) -> tuple[ArmRun, Fleet]:
    options = FleetOptions(
        workers=args.workers,
        block_size=args.block_size,
        cache_blocks=args.cache_blocks,
        speedup_ratio=args.speedup_ratio,
        seed=args.seed,
    )
    with console.status(f"{mode}: starting {args.workers} cold engines and a frontend"):
        fleet = await start_fleet(children, session, mode, options)
    with screen.progress(console, mode, workload.request_count) as on_record:
        run = await children.watch(
            send_workload(
                session,
                fleet.url,
                workload,
                model=MODEL,
                mode=mode,
                concurrency=args.concurrency,
                worker_count=args.workers,
                on_record=on_record,
            )
        )
    return run, fleet


def _tell(args: DemoArgs, console: Console, workload: Workload, runs: list[ArmRun]) -> bool:
    """Show and store the result. Returns whether it is the wanted one."""
    verdict = judge(*runs)
    screen.show_table(console, [figures(run) for run in runs])
    screen.show_verdict(console, verdict)
    for run in runs:
        error = next((record.error for record in run.records if record.error), None)
        if error is not None:
            console.print(f"first failure in {run.mode}: {error}", markup=False, highlight=False)
    screen.show_notes(
        console,
        notes(
            shared_tokens=workload.shared_chars,
            cache_tokens=args.cache_blocks * args.block_size,
            speedup_ratio=args.speedup_ratio,
        ),
    )
    files = _store(args, runs, to_json(runs, verdict, {**asdict(args), "out": str(args.out)}))
    console.print("\nwritten: " + ", ".join(map(str, files)), highlight=False)
    return verdict.is_good


def _store(args: DemoArgs, runs: list[ArmRun], result: object) -> list[Path]:
    files = [args.out / "result.json", args.out / "requests.jsonl"]
    files[0].write_text(json.dumps(result, indent=2) + "\n")
    lines = [json.dumps({"mode": run.mode, **asdict(one)}) for run in runs for one in run.records]
    files[1].write_text("\n".join(lines) + "\n")
    if not args.no_plot:
        # Only now: matplotlib takes a second to import, and --no-plot does without it.
        from kvflash.demo.plot import draw  # noqa: PLC0415

        caption = (
            f"{args.workers} mock engines (no GPU, modelled time), {runs[-1].planned_requests} "
            f"requests a mode, {args.concurrency} users, "
            f"{args.cache_blocks * args.block_size:,} tokens of cache an engine"
        )
        files += draw(runs, args.out, caption=caption)
    return files


async def _keep(console: Console, children: Children, fleet: Fleet) -> None:
    """Leave the fleet running until a signal.

    Raises:
        ChildError: It ended by itself.
    """
    console.print("\n[bold]The kv fleet is running; try:[/bold]\n")
    # Copied by hand: not wrapped, not coloured.
    print(screen.examples(fleet.url, MODEL), flush=True)
    console.print("\nCtrl-C stops it.")
    try:
        await children.watch(asyncio.Event().wait())
    except asyncio.CancelledError:
        console.print("stopping")
