"""The standalone router: ``python -m kvflash.router``, or an object in the caller's process."""

from kvflash.router.args import RouterArgs, parse_args
from kvflash.router.service import RouterService

__all__ = ["RouterArgs", "RouterService", "parse_args"]
