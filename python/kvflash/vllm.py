"""Starts vLLM with KV events enabled, and registers it."""

import json
import sys
from collections.abc import Sequence

from kvflash.errors import ConfigError
from kvflash.launcher import run
from kvflash.launcher.command import Arguments, EngineCommand
from kvflash.launcher.options import LauncherOptions, api_key, engine_events, http_port
from kvflash.output import ended

PROGRAM = ("vllm", "serve")
# How vLLM's workers transfer prompts by default.
TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def build(options: LauncherOptions, arguments: Arguments, host: str) -> EngineCommand:
    """Add the arguments that routing needs to those of ``vllm serve``; given arguments stay.

    The model comes first, or by ``--model``. vLLM listens on all interfaces by default.
    """
    del host
    model = arguments.drop("--model")
    if model is not None:
        arguments.words.insert(0, model)
    if not arguments.words or arguments.words[0].startswith("-"):
        raise ConfigError("vLLM needs a model: kvflash vllm MODEL, or --model MODEL")
    ranks = arguments.number("--data-parallel-size", "-dp") or 1
    decode_ranks = arguments.number("--decode-context-parallel-size", "-dcp") or 1
    prefill_ranks = arguments.number("--prefill-context-parallel-size", "-pcp") or 1
    port = http_port(arguments)
    arguments.add("--enable-prompt-tokens-details")
    events = engine_events(options, arguments, ranks, enable_kv_cache_events=True)
    if options.role != "agg":
        arguments.add("--kv-transfer-config", json.dumps(TRANSFER))
    return EngineCommand(
        engine="vllm",
        words=[*options.program, *arguments.words],
        host=arguments.value("--host"),
        port=port,
        events=events,
        model_path=arguments.words[0],
        block_size=arguments.number("--block-size"),
        ranks=ranks,
        context_ranks=decode_ranks * prefill_ranks,
        details="/metrics",
        api_key=api_key(arguments, "VLLM_API_KEY"),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the engine until it ends. Returns the exit status."""
    return run.main("vllm", PROGRAM, build, argv)


if __name__ == "__main__":
    sys.exit(ended(main))
