"""Frames in: opaque bytes from the engines' sockets to the core."""

from kvflash.transport.zmq import ZmqOptions, ZmqReceiver

__all__ = ["ZmqOptions", "ZmqReceiver"]
