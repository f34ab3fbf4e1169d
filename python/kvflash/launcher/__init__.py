"""Starts a real engine with its events switched on, and registers it where frontends look."""

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
