"""Event transports: opaque bytes from the engines' sockets to the core."""

from kvflash.transport.options import ZmqOptions
from kvflash.transport.zmq import ZmqReceiver

__all__ = ["ZmqOptions", "ZmqReceiver"]
