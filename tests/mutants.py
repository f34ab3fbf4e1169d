"""Break one rule of the request path after the other: each time a test must fail.

``python tests/mutants.py`` copies the sources, builds every mutant into one set of test programs
(an environment variable says which one is alive), and runs the tests for each. With names it does
so for these only; ``--list`` names them. Mutants of Python files are played by the gateway
contract. Ends with 1 where one survives, or where a rule is not found any more: then this table
has to follow the code.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", Path.home() / ".cache/kvflash/target"))
COPY = TARGET / "mutants"
VARIABLE = "KVFLASH_TEST_MUTANT"
# Without a mutant they take some seconds; whatever takes this long hangs, which is noticed as well.
TIMEOUT_S = 60
# Of the core's own tests: where the rules below live. Others take long and say nothing of them.
ROOMS = ["fair::", "select::", "load::", "policy::affinity"]
CORE, SERVE, PYTHON = "rust/core/src/", "rust/serve/src/", "python/kvflash/"
FRONTEND, GATEWAY = SERVE + "frontend/", SERVE + "gateway/"


@dataclass(frozen=True)
class Mutant:
    """``before``, which stands once in the file, is ``after`` while the mutant is alive.

    A statement ends with ``;``; anything else is an expression. ``$ALIVE`` in ``after`` stands for
    the question whether it is alive: then ``after`` replaces ``before`` as it is.
    """

    name: str
    path: str
    before: str
    after: str


SEED = "self.agreement.seed(lora_name, cache_salt)"
UNAVAILABLE = "parts.status == StatusCode::SERVICE_UNAVAILABLE"
MUTANTS = [
    # Identity of prompts.
    Mutant(
        "salt_is_no_identity",
        CORE + "catalog/model.rs",
        SEED,
        "self.agreement.seed(lora_name, None)",
    ),
    Mutant(
        "adapter_is_no_identity",
        CORE + "catalog/model.rs",
        SEED,
        "self.agreement.seed(None, cache_salt)",
    ),
    Mutant(
        "last_token_is_reused",
        CORE + "select/ask.rs",
        "(self.isl_tokens.max(1) - 1) / u64::from(size)",
        "self.isl_tokens / u64::from(size)",
    ),
    # Eligible workers.
    Mutant(
        "pins_are_ignored",
        CORE + "select/ask.rs",
        "self.pin.is_none_or(|pin| pin.fits(worker))",
        "true",
    ),
    Mutant(
        "pins_on_nobody_are_taken",
        GATEWAY + "plan.rs",
        "Some(id) if pool.members().get(id).is_none() =>",
        "Some(id) if !$ALIVE && pool.members().get(id).is_none() =>",
    ),
    Mutant(
        "sick_workers_are_chosen",
        FRONTEND + "engine.rs",
        "self.get(worker.instance_id).is_some_and(|engine| engine.is_healthy())",
        "self.get(worker.instance_id).is_some()",
    ),
    Mutant("adapters_are_everywhere", GATEWAY + "plan.rs", "engine.serves(name)", "true"),
    Mutant(
        "busy_is_at_the_threshold",
        CORE + "select/busy.rs",
        "|limit| tokens > limit",
        "|limit| tokens > limit || ($ALIVE && tokens == limit)",
    ),
    Mutant(
        "sessions_wander",
        CORE + "policy/affinity.rs",
        "one.worker == worker",
        "one.worker != worker",
    ),
    # Effects on the load.
    Mutant(
        "bookings_stay",
        CORE + "select/reservation.rs",
        "self.router.free(self.request);",
        "let _ = self.request;",
    ),
    Mutant(
        "prefilled_prompts_weigh",
        CORE + "select/reservation.rs",
        "self.router.mark_prefill_completed(self.request);",
        "let _ = self.request;",
    ),
    # Retries: candidates and number.
    Mutant("tried_again", FRONTEND + "engine.rs", "!tried.contains(&worker.instance_id)", "true"),
    Mutant(
        "tried_without_end",
        GATEWAY + "book.rs",
        "self.tried.len() < self.limit()",
        "true",
    ),
    Mutant(
        "wrong_requests_are_repeated",
        GATEWAY + "backend/openai.rs",
        UNAVAILABLE,
        "parts.status.as_u16() >= 400",
    ),
    Mutant("refusals_are_final", GATEWAY + "backend/openai.rs", UNAVAILABLE, "false"),
    Mutant(
        "first_byte_has_twice_the_time",
        GATEWAY + "backend/openai.rs",
        "app.options.first_byte_timeout",
        "app.options.first_byte_timeout * 2",
    ),
    Mutant(
        "silence_has_twice_the_time",
        GATEWAY + "relay.rs",
        "self.delivery.app.options.stream_idle_timeout",
        "self.delivery.app.options.stream_idle_timeout * 2",
    ),
    Mutant(
        "broken_streams_look_whole",
        GATEWAY + "relay.rs",
        "Some(Ok(Frame::data(Bytes::from(end))))",
        "None",
    ),
    # Limits and lines.
    Mutant(
        "one_more_in_flight",
        GATEWAY + "send.rs",
        "before < limit",
        "before <= limit",
    ),
    Mutant(
        "in_flight_for_ever",
        GATEWAY + "send.rs",
        "self.app.in_flight.fetch_sub(1, Ordering::Relaxed) >= limit",
        "self.app.in_flight.load(Ordering::Relaxed) >= limit",
    ),
    Mutant(
        "first_come_last_served", CORE + "fair/order.rs", "jump - arrival_s", "jump + arrival_s"
    ),
    Mutant(
        "strict_priority_is_none",
        CORE + "fair/order.rs",
        "by_priority.then_with(|| self.score.total_cmp(&other.score))",
        "self.score.total_cmp(&other.score)",
    ),
    Mutant(
        "one_more_waits",
        CORE + "fair/line.rs",
        "self.waiting.len() >= limit",
        "self.waiting.len() > limit",
    ),
    Mutant(
        "those_that_leave_wait",
        CORE + "select/queue.rs",
        "let _told = state.line.remove(self.place);",
        "let _ = self.place;",
    ),
    Mutant("waits_twice_the_time", SERVE + "queue.rs", "queue.max_wait()", "queue.max_wait() * 2"),
    Mutant(
        "service_is_free",
        CORE + "fair/queue.rs",
        "price(waiting.input, predicted)",
        "0.0",
    ),
    Mutant("turns_are_kept", GATEWAY + "turn.rs", "state.running -= 1;", "let _ = state.running;"),
    Mutant(
        "turns_wait_twice_the_time",
        GATEWAY + "turn.rs",
        "tokio::time::timeout(max_wait, ",
        "tokio::time::timeout(if $ALIVE { max_wait * 2 } else { max_wait }, ",
    ),
    # Prefill elsewhere.
    Mutant(
        "prefill_generates_all",
        GATEWAY + "backend/openai.rs",
        "(limit, one()),",
        "(limit, if $ALIVE { Some(json!(9)) } else { one() }),",
    ),
    Mutant(
        "prefilled_and_not_said",
        GATEWAY + "backend/openai.rs",
        "Handoff::Done { params, .. } => decode_changes(params)?,",
        "Handoff::Done { params, .. } if !$ALIVE => decode_changes(params)?,",
    ),
    Mutant(
        "decodes_alone",
        GATEWAY + "backend/worker.rs",
        """if self.is_enforced {
            count(app, "refused");""",
        """if !$ALIVE && self.is_enforced {
            count(app, "refused");""",
    ),
    # KvPushRouter.
    Mutant(
        "a_pinned_request_goes_elsewhere",
        PYTHON + "routing/stream.py",
        'raise NoWorkerError("the request was pinned to a worker that failed")',
        'self._is_pinned, self._options["worker_id"] = False, None',
    ),
    Mutant(
        "the_last_failure_is_forgotten",
        PYTHON + "runtime/client.py",
        "raise failure from None",
        "raise",
    ),
]
QUESTION = """
/// Whether the mutant of this number is alive.
#[doc(hidden)]
pub fn mutant(number: u32) -> bool {
    static ALIVE: std::sync::LazyLock<Option<u32>> = std::sync::LazyLock::new(|| {
        std::env::var("VARIABLE").ok().and_then(|number| number.parse().ok())
    });
    *ALIVE == Some(number)
}
""".replace("VARIABLE", VARIABLE)


def copy_sources(changed: dict[str, str]) -> None:
    """Copy what git knows; files that are the same keep their time, so that little is built."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True)
    kept = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    assert len(kept) > 500, "there is more to copy"
    for name in kept:
        text = changed.get(name)
        write(COPY / name, (ROOT / name).read_bytes() if text is None else text.encode())
    for path in COPY.rglob("*.rs"):
        if path.relative_to(COPY).as_posix() not in kept:
            path.unlink()


def write(path: Path, data: bytes) -> None:
    if not path.exists() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def mutated(text: str, mutants: Iterable[tuple[int, Mutant]]) -> str:
    """A Rust file with all of its mutants, asleep."""
    by_place: dict[str, list[tuple[int, Mutant]]] = {}
    for number, mutant in mutants:
        by_place.setdefault(mutant.before, []).append((number, mutant))
    for before, here in by_place.items():
        room = "crate" if here[0][1].path.startswith(CORE) else "kvflash_core"
        alive = [f"{room}::mutant({number})" for number, _ in here]
        if "$ALIVE" in here[0][1].after:
            (after,) = (mutant.after.replace("$ALIVE", alive[0]) for _, mutant in here)
        else:
            arms = [f"if {a} {{ {m.after} }} else " for a, (_, m) in zip(alive, here, strict=True)]
            after = "".join(arms) + f"{{ {before} }}"
            after = after if before.endswith(";") else f"({after})"
        text = text.replace(before, after)
    return text


def plant(mutants: dict[int, Mutant]) -> None:
    """Write the copy with every mutant of Rust in it."""
    lib = CORE + "lib.rs"
    changed = {lib: (ROOT / lib).read_text(encoding="utf-8") + QUESTION}
    for path in sorted({one.path for one in mutants.values() if one.path.endswith(".rs")}):
        text = (ROOT / path).read_text(encoding="utf-8")
        changed[path] = mutated(text, [(n, m) for n, m in mutants.items() if m.path == path])
    copy_sources(changed)


def build() -> list[str]:
    """Build the tests of the copy; the programs."""
    command = ["cargo", "test", "--locked", "--lib", "--test", "all", "--no-run"]
    command += ["--message-format=json-render-diagnostics"]
    # Built once and played for seconds: the time goes into compiling.
    for package in ("kvflash-core", "kvflash-serve"):
        command += ["--config", f"profile.dev.package.{package}.opt-level=0"]
    env = {**os.environ, "CARGO_TARGET_DIR": str(TARGET)}
    done = subprocess.run(command, cwd=COPY, env=env, stdout=subprocess.PIPE, text=True, check=True)
    built = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    programs = {
        one["executable"]: one["target"]["src_path"]
        for one in built
        if one.get("executable") and one.get("profile", {}).get("test")
    }
    wanted = ("rust/serve/tests/", "rust/core/src/")
    return [p for part in wanted for p, source in programs.items() if part in source]


def first_failure(number: int, programs: list[str]) -> str | None:
    """The check that noticed the mutant."""
    env = {**os.environ, VARIABLE: str(number), "CARGO_MANIFEST_DIR": ""}
    for program in programs:
        room = "serve" if "serve" in Path(program).name else "core"
        filters = ROOMS if Path(program).name.startswith("kvflash_core-") else []
        try:
            done = subprocess.run(
                [program, "--quiet", *filters],
                cwd=folder_of(program),
                env=env,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S if number else None,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"{Path(program).name} hangs"
        if done.returncode:
            failed = [line[4:] for line in done.stdout.splitlines() if line.startswith("    ")]
            names = [one.strip() for one in failed if one and " " not in one.strip()]
            return ", ".join(dict.fromkeys(names)) or f"{room}: status {done.returncode}"
    return None


FOLDERS: dict[str, Path] = {}


def folder_of(program: str) -> Path:
    """Where cargo runs it: its package."""
    name = Path(program).name
    if program not in FOLDERS:
        is_serve = name.startswith("kvflash_serve")
        if name.startswith("all-"):
            listed = subprocess.check_output([program, "--list"], text=True)
            is_serve = "retry::" in listed
        FOLDERS[program] = COPY / ("rust/serve" if is_serve else "rust/core")
    return FOLDERS[program]


def play_python(mutant: Mutant) -> str | None:
    """The check that noticed a mutant of a Python file."""
    source = (ROOT / mutant.path).read_text(encoding="utf-8")
    (extension,) = (ROOT / PYTHON).glob("_core*.so")
    write(COPY / PYTHON / extension.name, extension.read_bytes())
    target = COPY / mutant.path
    target.write_text(source.replace(mutant.before, mutant.after), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-k", "push", "tests/contract/test_gateway.py"]
    env = {**os.environ, "PYTHONPATH": str(COPY / "python")}
    try:
        done = subprocess.run(
            command, cwd=COPY, env=env, capture_output=True, text=True, check=False
        )
    finally:
        target.write_text(source, encoding="utf-8")
    failed = [
        line.split("::")[-1] for line in done.stdout.splitlines() if line.startswith("FAILED")
    ]
    return ", ".join(failed) or (None if done.returncode == 0 else done.stdout[-300:])


def main(arguments: list[str]) -> int:
    """Play them; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("names", nargs="*", help="mutants to play; all without one")
    parser.add_argument(
        "--list", action="store_true", help="name them, and check that rules are found"
    )
    args = parser.parse_args(arguments)
    mutants = dict(enumerate(MUTANTS, 1))
    lost = [
        m.name for m in MUTANTS if (ROOT / m.path).read_text(encoding="utf-8").count(m.before) != 1
    ]
    if lost:
        print(f"not found once: {', '.join(lost)}")
        return 1
    if args.list:
        print("\n".join(mutant.name for mutant in MUTANTS))
        return 0
    chosen = {n: m for n, m in mutants.items() if not args.names or m.name in args.names}
    plant(mutants)
    programs = build() if any(m.path.endswith(".rs") for m in chosen.values()) else []
    if programs and (failure := first_failure(0, programs)):
        print(f"without a mutant: {failure}")
        return 1
    survivors = 0
    for number, mutant in chosen.items():
        began = time.monotonic()
        if mutant.path.endswith(".py"):
            noticed = play_python(mutant)
        else:
            noticed = first_failure(number, programs)
        survivors += noticed is None
        seconds = time.monotonic() - began
        print(f"{mutant.name:34} {seconds:5.1f} s  {noticed or 'SURVIVES'}", flush=True)
    print(f"{len(chosen)} mutants, {survivors} survive")
    return int(survivors > 0)


if __name__ == "__main__":
    shutil.rmtree(COPY / "target", ignore_errors=True)
    sys.exit(main(sys.argv[1:]))
