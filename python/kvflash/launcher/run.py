"""The main loop of a launcher: start, wait, register, wait, unregister, stop."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvflash.address import reachable
from kvflash.ask import ask
from kvflash.console import LogLine, announce, log_to_stderr, refuse
from kvflash.errors import ConfigError, KvflashError, OverloadedError, TransportError
from kvflash.launcher.child import Child
from kvflash.launcher.command import Arguments, EngineCommand
from kvflash.launcher.events import EngineEvents
from kvflash.launcher.options import LauncherOptions, parse_options
from kvflash.llm import ModelInput, ModelRuntimeConfig, ModelType, register_llm
from kvflash.outage import Outage
from kvflash.runtime import DistributedRuntime, Endpoint
from kvflash.settings import warn_of_misspelt

if TYPE_CHECKING:
    from kvflash.launcher.probe import Found

logger = logging.getLogger(__name__)

# Longest wait for an answer at the engine's address before it is started.
CONNECT_S = 1.0
# Pause between two attempts to register.
REGISTER_PAUSE_S = 1.0

# Builds an engine's command line.
Build = Callable[[LauncherOptions, Arguments, str], EngineCommand]


def main(
    engine: str, program: Sequence[str], build: Build, argv: Sequence[str] | None = None
) -> int:
    """Run an engine until it ends or a signal comes, and return its exit status.

    ``build`` makes its command line from the options, the engine's arguments, and the host under
    which others reach it. The status is 2 for invalid settings, 1 if the engine could not be
    registered.
    """
    options, arguments = parse_options(engine, program, sys.argv[1:] if argv is None else argv)
    log_to_stderr(logging.INFO, LogLine("%(levelname)5s %(name)s: %(message)s"))
    warn_of_misspelt()
    try:
        return asyncio.run(_run(options, arguments, build))
    except KvflashError as error:
        return refuse(engine, error)


async def _run(options: LauncherOptions, arguments: Arguments, build: Build) -> int:
    async with DistributedRuntime.detached() as runtime:
        try:
            endpoint = runtime.endpoint(options.endpoint)
        except ValueError as error:
            raise ConfigError(f"--endpoint: {error}") from error
        command = build(options, arguments, runtime.host)
        events = EngineEvents(options, command.events, command.ranks, endpoint.component)
        await events.check()
        await _check_port(_url(command, runtime))
        child = await Child.start(command.words)
        try:
            return await _attend(options, command, child, endpoint, events)
        finally:
            if child.is_running:
                await child.kill()
            await events.close()


def _url(command: EngineCommand, runtime: DistributedRuntime) -> str:
    return f"http://{reachable(command.host or '', runtime.host)}:{command.port}"


async def _check_port(url: str) -> None:
    """Refuse an address at which a server is healthy: it would be taken for the engine."""
    # A proxy accepts for an engine that is not there yet, and hangs up or answers 502.
    answer = await asyncio.to_thread(ask, url, "/health", timeout_s=CONNECT_S)
    if answer.status == 200:
        parts = urlsplit(url)
        raise ConfigError(
            f"--port {parts.port}: another server answers at {parts.netloc}; choose another port,"
            " or stop that process"
        )


async def _attend(
    options: LauncherOptions,
    command: EngineCommand,
    child: Child,
    endpoint: Endpoint,
    events: EngineEvents,
) -> int:
    # Here, so that the HTTP client is loaded while the engine starts.
    from kvflash.launcher.probe import wait_until_idle, wait_until_ready  # noqa: PLC0415

    runtime = endpoint.runtime
    url = _url(command, runtime)
    found = await wait_until_ready(url, command, child, options.ready_timeout_s)
    if found is None:
        if child.is_running:
            return await child.stop(options.stop_timeout_s)
        status = await child.ended()
        logger.error("the engine ended with status %d before it was ready", status)
        # It serves nothing, whatever it says.
        return status or 1
    ended = asyncio.ensure_future(child.ended())
    stopping = asyncio.ensure_future(child.stopping.wait())
    registering = asyncio.ensure_future(
        _register(options, command, found, endpoint, url=url, events=events)
    )
    await asyncio.wait({registering, ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if registering.done():
        places = registering.result()
        logger.info("%s serves %s as instance %d", url, found.model_name, runtime.instance_id)
        ready = {
            "event": "ready",
            "engine": command.engine,
            "url": url,
            "endpoint": endpoint.path.replace("/", "."),
            "instance_id": runtime.instance_id,
            "model": found.model_name,
            "events": places,
        }
        announce(ready)
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
    for task in (registering, stopping):
        task.cancel()
    await asyncio.gather(registering, stopping, return_exceptions=True)
    # First no router finds it any more, then its requests end, then it does.
    await runtime.close()
    if not ended.done():
        ended.cancel()
        await wait_until_idle(url, child, options.drain_timeout_s, command.api_key)
        return await child.stop(options.stop_timeout_s)
    logger.error("the engine ended with status %d", ended.result())
    return ended.result()


async def _register(
    options: LauncherOptions,
    command: EngineCommand,
    found: Found,
    endpoint: Endpoint,
    *,
    url: str,
    events: EngineEvents,
) -> list[str]:
    """Announce the engine and its events, trying until it works: it took minutes to load."""
    runtime = endpoint.runtime
    block_size = command.event_block_size(found.block_size)
    is_prefill = options.role == "prefill"
    has_room = is_prefill and command.bootstrap_port is not None
    outage = Outage(logger, "discovery takes the engine")
    while True:
        try:
            places = await events.announce(block_size)
            await register_llm(
                ModelInput.Text,
                ModelType.Prefill if is_prefill else ModelType.Chat | ModelType.Completions,
                endpoint,
                model_path=command.model_path,
                model_name=found.model_name,
                context_length=found.context_length,
                kv_cache_block_size=block_size,
                runtime_config=ModelRuntimeConfig(
                    total_kv_blocks=found.total_kv_blocks,
                    max_num_seqs=found.max_num_seqs,
                    data_parallel_size=command.ranks,
                    bootstrap_host=runtime.host if has_room else None,
                    bootstrap_port=command.bootstrap_port if has_room else None,
                ),
                user_data={"engine": command.engine, "role": options.role},
                lora_names=found.lora_names,
            )
            await runtime.announce_instance(endpoint.path, {"kind": "openai", "url": url})
            outage.ends()
            return places
        except (TransportError, OverloadedError, OSError) as error:
            outage.lasts(f"the engine can't be registered: {error}; trying again")
        await asyncio.sleep(REGISTER_PAUSE_S)
