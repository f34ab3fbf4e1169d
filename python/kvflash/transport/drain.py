"""Receiving without Python between messages, where libzmq's functions can be found."""

from __future__ import annotations

import logging

from kvflash._core import ZmqDrain

logger = logging.getLogger(__name__)


def find_drain() -> ZmqDrain | None:
    """The native receiver, from the libzmq that pyzmq has loaded; None if not found."""
    try:
        from zmq.backend.cython import _zmq  # noqa: PLC0415

        return ZmqDrain(_zmq.__file__)
    except (ImportError, ConnectionError) as error:
        logger.warning("events are received in Python, which is slower: %s", error)
        return None
