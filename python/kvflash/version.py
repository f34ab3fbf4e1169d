"""The version of the installed package, and how it was installed."""

from importlib import metadata

__version__ = metadata.version("kvflash")

# Set this to True in the commit that publishes the first release to PyPI, then run `make settings`:
# README and messages then name the package instead of a checkout. Until then the name on PyPI does
# not belong to this project.
IS_RELEASED = False


def install_command(extra: str) -> str:
    """The shell command that adds an extra, such as ``nats``, to an installed kvflash."""
    if IS_RELEASED:
        return f"pip install 'kvflash[{extra}]'"
    return f"pip install '.[{extra}]' in a checkout of kvflash"
