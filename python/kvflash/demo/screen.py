"""What the terminal shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.box import HORIZONTALS
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvflash.demo.record import Record
from kvflash.demo.report import P99_SAMPLES_MIN, ArmFigures
from kvflash.demo.summary import Verdict

__all__ = ["examples", "progress", "show_notes", "show_table", "show_verdict"]

NOTHING = "-"
LEGEND = (
    "From the frontend's /metrics: available = the most that any worker held; selected = held by "
    "the chosen one; delivered = reused, as the engines say. round-robin does not look at caches."
)


@contextmanager
def progress(console: Console, mode: str, total: int) -> Iterator[Callable[[Record], None]]:
    """A bar of an arm's requests, with the reuse so far; call the result after every request."""
    bar = Progress(
        TextColumn("{task.description:<12}"),
        BarColumn(bar_width=36),
        MofNCompleteColumn(),
        TextColumn("requests  reused {task.fields[reuse]:>3} %"),
        TextColumn("[red]{task.fields[failures]}"),
        TimeElapsedColumn(),
        console=console,
    )
    prompt_tokens = cached_tokens = failures = 0
    with bar:
        task = bar.add_task(mode, total=total, reuse="0", failures="")

        def on_record(record: Record) -> None:
            nonlocal prompt_tokens, cached_tokens, failures
            prompt_tokens += record.prompt_tokens
            cached_tokens += record.cached_tokens
            failures += record.error is not None
            reuse = f"{100 * cached_tokens / prompt_tokens:.0f}" if prompt_tokens else "0"
            shown = f"{failures} failed" if failures else ""
            bar.update(task, advance=1, reuse=reuse, failures=shown)

        yield on_record


def show_table(console: Console, columns: Sequence[ArmFigures]) -> None:
    """The figures, the modes side by side."""
    table = Table(box=HORIZONTALS, show_edge=False, pad_edge=False, header_style="bold")
    table.add_column("")
    for column in columns:
        table.add_column(column.mode, justify="right")
    rows: list[tuple[str, Callable[[ArmFigures], str]]] = [
        ("requests answered", lambda c: f"{c.requests:,}"),
        ("requests failed", lambda c: f"[red]{c.failures:,}[/red]" if c.failures else "0"),
        ("prompt tokens", lambda c: f"{c.prompt_tokens:,}"),
        ("  reused, as the engines say", lambda c: f"{c.reused_tokens:,}"),
        ("  reused (%)", lambda c: f"[bold]{c.reuse_percent:.1f}[/bold]"),
        ("  computed", lambda c: f"{c.computed_tokens:,}"),
        ("time to first token p50 (ms)", lambda c: f"[bold]{_number(c.ttft_ms_p50)}[/bold]"),
        ("time to first token p99 (ms)", lambda c: _number(c.ttft_ms_p99)),
        ("time to first token max (ms)", lambda c: _number(c.ttft_ms_max)),
        ("whole run (s)", lambda c: f"{c.wall_s:.1f}"),
        ("requests, busiest worker / mean", lambda c: f"{c.busiest_ratio:.2f}"),
        ("router: available (tokens)", lambda c: _number(c.available_tokens)),
        ("router: selected (tokens)", lambda c: _number(c.selected_tokens)),
        ("router: delivered (tokens)", lambda c: _number(c.delivered_tokens)),
    ]
    sections = {"prompt tokens", "time to first token p50 (ms)", "requests, busiest worker / mean"}
    sections.add("router: available (tokens)")
    for name, value in rows:
        if name in sections:
            table.add_section()
        table.add_row(name, *(value(column) for column in columns))
    console.print(Padding(table, (1, 0, 0, 0)))
    if any(column.requests < P99_SAMPLES_MIN for column in columns):
        console.print(f"[dim]p99 needs {P99_SAMPLES_MIN} requests.[/dim]")
    console.print(f"[dim]{LEGEND}[/dim]", highlight=False)


def show_verdict(console: Console, verdict: Verdict) -> None:
    """What the figures say."""
    color = "green" if verdict.is_good else "red"
    console.print()
    for sentence in verdict.sentences:
        console.print(f"[bold {color}]{sentence}[/bold {color}]", highlight=False)


def show_notes(console: Console, notes: Sequence[str]) -> None:
    """What to know before believing the figures."""
    console.print()
    for note in notes:
        grid = Table.grid(padding=(0, 1))
        grid.add_row("[dim]-[/dim]", f"[dim]{note}[/dim]")
        console.print(grid, highlight=False)


def examples(url: str, model: str) -> str:
    """Commands to copy, for a frontend that is left running."""
    # Long enough for some blocks: asked again, it is explained by what the first answer left.
    question = "Which worker holds the blocks of this prompt, and how does the router know it?"
    ask = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "{question}"}}]}}'
    json_header = "-H 'Content-Type: application/json'"
    return "\n".join(
        [
            f"curl -s {url}/workers",
            f"curl -si {url}/v1/chat/completions {json_header} -d '{ask}'",
            f"curl -s {url}/explain {json_header} -d '{ask}'",
            f"curl -s {url}/metrics | grep kvflash_tokens",
        ]
    )


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}"
