"""The terminal output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.box import HORIZONTALS
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from demo.record import Record
from demo.report import P99_SAMPLES_MIN, ArmFigures
from demo.summary import HEADLINES, ModeFigures, Verdict

__all__ = ["examples", "progress", "show_notes", "show_table", "show_verdict"]

NOTHING = "-"
LEGEND = (
    "From the frontend's /metrics, of the prompt tokens: available = the most that any worker "
    "held; selected = held by the chosen one; delivered = reused, as the engines say. round-robin "
    "does not look at caches."
)


@contextmanager
def progress(
    console: Console, modes: Iterable[str], *, seed: int, total: int
) -> Iterator[Callable[[str, Record], None]]:
    """A bar for each mode, with the reuse so far; call the result after every request."""
    bar = Progress(
        TextColumn("{task.description:<21}"),
        BarColumn(bar_width=36),
        MofNCompleteColumn(),
        TextColumn("requests  reused {task.fields[reuse]:>3} %"),
        TextColumn("[red]{task.fields[failures]}"),
        TimeElapsedColumn(),
        console=console,
    )
    with bar:
        tasks = {
            mode: bar.add_task(f"seed {seed}: {mode}", total=total, reuse="0", failures="")
            for mode in modes
        }
        counts = {mode: Counter[str]() for mode in tasks}

        def on_record(mode: str, record: Record) -> None:
            count = counts[mode]
            count["prompt"] += record.prompt_tokens
            count["cached"] += record.cached_tokens
            count["failures"] += record.error is not None
            reuse = f"{100 * count['cached'] / count['prompt']:.0f}" if count["prompt"] else "0"
            shown = f"{count['failures']} failed" if count["failures"] else ""
            bar.update(tasks[mode], advance=1, reuse=reuse, failures=shown)

        yield on_record


def show_table(console: Console, columns: Sequence[ModeFigures]) -> None:
    """Show the figures of all seeds, the modes side by side."""
    table = Table(box=HORIZONTALS, show_edge=False, pad_edge=False, header_style="bold")
    table.add_column("")
    for column in columns:
        table.add_column(column.mode, justify="right")

    def add(name: str, figure: Callable[[ArmFigures], float | None], digits: int = 0) -> None:
        spreads = [column.over_seeds(figure) for column in columns]
        table.add_row(name, *(NOTHING if one is None else one.text(digits) for one in spreads))

    def add_sum(name: str, count: Callable[[ArmFigures], int]) -> None:
        sums = [sum(map(count, column.by_seed)) for column in columns]
        table.add_row(name, *(f"{one:,}" for one in sums))

    add_sum("requests answered, all seeds", lambda one: one.requests)
    add_sum("requests failed, all seeds", lambda one: one.failures)
    table.add_section()
    add("prompt tokens computed (thousands)", lambda one: one.computed_tokens / 1_000)
    for headline in HEADLINES:
        add(f"[bold]{headline.title}[/bold]", headline.figure, headline.digits)
    add("time to first token max (ms)", lambda one: one.ttft_ms_max)
    table.add_section()
    add("whole run (s)", lambda one: one.wall_s, 1)
    add("requests, busiest worker / mean", lambda one: one.busiest_ratio, 2)
    table.add_section()
    add("available (%)", lambda one: _percent(one.available_tokens, one), 1)
    add("selected (%)", lambda one: _percent(one.selected_tokens, one), 1)
    add("delivered (%)", lambda one: _percent(one.delivered_tokens, one), 1)
    console.print(Padding(table, (1, 0, 0, 0)))
    if any(one.requests < P99_SAMPLES_MIN for column in columns for one in column.by_seed):
        console.print(f"[dim]p99 needs {P99_SAMPLES_MIN} requests.[/dim]")
    console.print(f"[dim]{LEGEND}[/dim]", highlight=False)


def _percent(tokens: int | None, of: ArmFigures) -> float | None:
    """Tokens as a share of the prompt tokens."""
    return None if tokens is None or of.prompt_tokens == 0 else 100 * tokens / of.prompt_tokens


def show_verdict(console: Console, verdict: Verdict) -> None:
    """Show the verdict."""
    color = "green" if verdict.is_good else "red"
    console.print()
    for sentence in verdict.sentences:
        console.print(f"[bold {color}]{sentence}[/bold {color}]", highlight=False)


def show_notes(console: Console, notes: Sequence[str]) -> None:
    """Show the limits of the figures."""
    console.print()
    for note in notes:
        grid = Table.grid(padding=(0, 1))
        grid.add_row("[dim]-[/dim]", f"[dim]{note}[/dim]")
        console.print(grid, highlight=False)


def examples(url: str, model: str) -> str:
    """Commands to copy, for a frontend that keeps running."""
    # Long enough for some blocks: a repeated request shows the blocks of the first answer.
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
