"""Starts SGLang with KV events enabled, and registers it."""

import sys
from collections.abc import Sequence

from kvflash.errors import ConfigError
from kvflash.launcher import run
from kvflash.launcher.command import Arguments, EngineCommand
from kvflash.launcher.options import LauncherOptions, api_key, engine_events, http_port
from kvflash.output import ended

PROGRAM = (sys.executable, "-m", "sglang.launch_server")
# SGLang's own default.
BOOTSTRAP_PORT = 8998


def build(options: LauncherOptions, arguments: Arguments, host: str) -> EngineCommand:
    """Add the arguments that routing needs to those of SGLang's server; given arguments stay.

    By default SGLang listens at ``host``, under which others reach this machine.
    """
    model = arguments.value("--model-path", "--model")
    if model is None:
        raise ConfigError("SGLang needs a model: kvflash sglang --model-path MODEL")
    ranks = arguments.number("--dp-size", "--data-parallel-size", "--dp") or 1
    port = http_port(arguments)
    arguments.add("--host", host)
    arguments.add("--enable-cache-report")
    events = engine_events(options, arguments, ranks)
    bootstrap_port = None
    if options.role != "agg":
        arguments.add("--disaggregation-mode", options.role)
    if options.role == "prefill":
        bootstrap_port = arguments.number("--disaggregation-bootstrap-port") or BOOTSTRAP_PORT
    return EngineCommand(
        engine="sglang",
        words=[*options.program, *arguments.words],
        host=arguments.value("--host"),
        port=port,
        events=events,
        model_path=model,
        block_size=arguments.number("--page-size"),
        ranks=ranks,
        bootstrap_port=bootstrap_port,
        details="/get_server_info",
        api_key=api_key(arguments),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the engine until it ends. Returns the exit status."""
    return run.main("sglang", PROGRAM, build, argv)


if __name__ == "__main__":
    sys.exit(ended(main))
