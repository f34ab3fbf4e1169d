"""Several frontends and mock workers of the runtime, found through discovery."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType
from typing import Any

from service import Process, until
from support_frontend import COMPLETIONS, Call, FrontendProcess, ask

MODEL = "m"
# Prompts here are token ids. A frontend loads this one in an eighth of the time that tiny-llama
# takes: each text that its encoder is checked with is one word.
TOKENIZER = Path(__file__).parents[1] / "vectors" / "tiny-ids"
BLOCK = 16
REMOTE = "kvflash_sync_bookings_remote_requests"


def prompt(family: int, blocks: int = 8) -> list[int]:
    """Tokens of a prompt that shares no block with other families; one token over whole blocks."""
    return [family * 1_000 + at for at in range(blocks * BLOCK + 1)]


def body(family: int, tokens: int = 1, blocks: int = 8, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt(family, blocks), "max_tokens": tokens, **more}


class Workers:
    """A mocker process with workers of the runtime."""

    def __init__(self, env: dict[str, str], *flags: str, count: int = 2) -> None:
        self.process = Process(
            "kvflash.mocker",
            *("--endpoint", "ns.backend.generate", "--model-name", MODEL, "--log-level", "error"),
            *("--block-size", str(BLOCK), "--num-workers", str(count), "--speedup-ratio", "10"),
            *("--tokenizer", str(TOKENIZER)),
            *flags,
            env=env,
        )
        try:
            self.ids = [int(self.process.ready()["instance_id"]) for _ in range(count)]
        except BaseException:
            self.process.close()
            raise

    def close(self) -> None:
        self.process.close()


class Cluster:
    """Frontends and workers of one discovery; all of them end with it."""

    def __init__(self, env: dict[str, str]) -> None:
        self.env = env
        self.open = contextlib.ExitStack()

    def workers(self, *flags: str, count: int = 2) -> Workers:
        return self.open.enter_context(contextlib.closing(Workers(self.env, *flags, count=count)))

    def frontend(self, workers: Workers | None, *flags: str) -> FrontendProcess:
        kind = self.env["KVFLASH_DISCOVERY"]
        made = self.open.enter_context(FrontendProcess("--discovery", kind, *flags, env=self.env))
        if workers is not None:
            made.wait_healthy(*workers.ids)
        return made

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.open.close()


def overlap(frontend: FrontendProcess, family: int, blocks: int = 8) -> int:
    """Send a prompt; the blocks of it that the chosen worker held."""
    answer = ask(frontend.url, COMPLETIONS, body(family, blocks=blocks))
    assert answer.status == 200, answer.body
    return int(answer.headers["x-kvflash-overlap-blocks"])


def active_blocks(frontend: FrontendProcess) -> int:
    """Blocks of running requests on all workers, as this frontend knows it."""
    metrics = frontend.metrics()
    return int(sum(v for k, v in metrics.items() if k.startswith("kvflash_worker_active_blocks")))


def hold(frontend: FrontendProcess, family: int) -> Call:
    """A stream that runs until it is closed."""
    call = Call(frontend.url, COMPLETIONS, body(family, 100_000, stream=True, ignore_eos=True))
    call.read_event()
    return call


def wait_known(frontend: FrontendProcess, family: int, blocks: int = 8) -> None:
    """Wait until some worker is known to hold a prompt."""
    until(
        lambda: blocks in frontend.overlaps(body(family, blocks=blocks)).values(),
        f"family {family} to be known",
    )
