"""Starts an engine with events enabled, and registers it for frontends."""

from kvflash.launcher.command import Arguments, EngineCommand, EventPorts
from kvflash.launcher.options import LauncherOptions, parse_options
from kvflash.launcher.run import main

__all__ = [
    "Arguments",
    "EngineCommand",
    "EventPorts",
    "LauncherOptions",
    "main",
    "parse_options",
]
