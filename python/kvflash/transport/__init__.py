"""Event transports: opaque bytes from the engines' sockets to the core."""

from typing import TYPE_CHECKING

from kvflash.lazy import lazy_dir, lazy_names

if TYPE_CHECKING:
    from kvflash.transport.options import ZmqOptions
    from kvflash.transport.zmq import ZmqReceiver
else:
    # Imported on first use, so that a process without events need not wait for ZMQ.
    __getattr__ = lazy_names(
        __name__,
        {
            "ZmqOptions": "kvflash.transport.options",
            "ZmqReceiver": "kvflash.transport.zmq",
        },
    )

__all__ = ["ZmqOptions", "ZmqReceiver"]

__dir__ = lazy_dir(__name__, __all__)
