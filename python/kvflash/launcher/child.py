"""An engine's process: forwards signals to it and waits for its end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
from collections.abc import Iterator, Sequence

from kvflash.errors import ConfigError
from kvflash.launcher.command import split_flag
from kvflash.signals import ending_signals

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


# Flags of engines whose values are secret.
_SECRET_FLAGS = ("--admin-api-key", "--api-key", "--hf-token", "--ssl-keyfile-password")


def _shown(words: Sequence[str]) -> Iterator[str]:
    """The words of a command, for the log: without the values of secret flags."""
    is_secret = False
    for word in words:
        if word.startswith("-"):
            name, _, value = split_flag(word)
            is_secret = name in _SECRET_FLAGS
            yield word.removesuffix(value) + "***" if is_secret and value else word
        else:
            # A flag may have several.
            yield "***" if is_secret else word


class Child:
    """A process in its own process group; the first signal sets ``stopping``."""

    _process: asyncio.subprocess.Process

    def __init__(self) -> None:
        self._received: signal.Signals | None = None
        self.stopping = asyncio.Event()

    @classmethod
    async def start(cls, words: Sequence[str]) -> Child:
        """Start it; it inherits our output streams. ConfigError if the program can't be started."""
        logger.info("starting %s", " ".join(_shown(words)))
        child = cls()
        loop = asyncio.get_running_loop()
        # Before anything exists that a signal would leave behind.
        for number in ending_signals():
            loop.add_signal_handler(number, child._receive, number)
        try:
            child._process = await asyncio.create_subprocess_exec(
                *words, start_new_session=True, preexec_fn=_die_with_parent
            )
        except OSError as error:
            hint = ""
            if isinstance(error, FileNotFoundError):
                hint = ": install the engine, or set --engine-command to the command that starts it"
            message = f"can't start {words[0]}: {error.strerror or error}{hint}"
            raise ConfigError(message) from error
        return child

    @property
    def is_running(self) -> bool:
        """Whether it is still running."""
        return self._process.returncode is None

    async def ended(self) -> int:
        """Wait for its end; returns the exit status as shells do: 128 + n after signal n."""
        status = await self._process.wait()
        return status if status >= 0 else 128 - status

    async def stop(self, timeout_s: float) -> int:
        """Forward the signal and wait; after the time limit the whole group is killed."""
        self._signal(self._received or signal.SIGTERM)
        try:
            return await asyncio.wait_for(asyncio.shield(self.ended()), timeout_s)
        except asyncio.TimeoutError:
            logger.warning("the engine did not exit within %g s; killing it", timeout_s)
            return await self.kill()

    async def kill(self) -> int:
        """Kill the whole group now."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return await self.ended()

    def _receive(self, number: signal.Signals) -> None:
        if self.stopping.is_set():
            # A second signal is forwarded at once.
            self._signal(number)
            return
        logger.info("stopping on %s", number.name)
        self._received = number
        self.stopping.set()

    def _signal(self, number: signal.Signals) -> None:
        # To the engine only: it stops its own children in order.
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)


def _die_with_parent() -> None:
    """Stop the engine if the launcher dies: it would no longer be registered anywhere."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
