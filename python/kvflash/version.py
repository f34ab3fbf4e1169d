"""The version of the installed package."""

from importlib import metadata

__all__ = ["__version__"]

__version__ = metadata.version("kvflash")
