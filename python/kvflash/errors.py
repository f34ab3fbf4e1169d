"""The errors that kvflash raises, by cause.

::

    KvflashError
    ├── ConfigError (ValueError)            fix the flag or the file
    ├── InvalidArgumentError (ValueError)   fix the call
    ├── DecodeError (ValueError)            the bytes are not what they claim to be
    ├── NotFoundError (LookupError)         the named object does not exist
    ├── NoWorkerError (LookupError)         no worker can take the request
    ├── ConflictError                       conflicts with the existing state
    ├── OverloadedError                     a named limit is reached; try again later
    │   └── AllBusyError                    every worker is busier than the thresholds allow
    ├── DeadlineError (TimeoutError)        the time limit has passed
    ├── TransportError (ConnectionError)    the other side could not be reached
    ├── WorkerError                         the worker's own code failed; has its code and message
    └── ClosedError                         the service is shutting down
        └── DrainingError               the worker is shutting down; no handler saw the request

A gap, a duplicate or an unknown parent in an event stream is an outcome, not an error.
"""

from __future__ import annotations


class KvflashError(Exception):
    """Base of all errors of this package."""


class ConfigError(KvflashError, ValueError):
    """A flag or file is invalid; the message names it and what is legal."""


class InvalidArgumentError(KvflashError, ValueError):
    """An argument is invalid; the message names it, the limit and the value."""


class DecodeError(KvflashError, ValueError):
    """Bytes do not have the expected format; the message has the offset."""


class NotFoundError(KvflashError, LookupError):
    """The named object does not exist."""


class NoWorkerError(KvflashError, LookupError):
    """No worker is registered, healthy or allowed."""


class ConflictError(KvflashError):
    """The call conflicts with the existing state."""


class OverloadedError(KvflashError):
    """A named limit is reached; try again later."""


class AllBusyError(OverloadedError):
    """Every worker that could take the request is busier than the thresholds allow."""


class DeadlineError(KvflashError, TimeoutError):
    """The time limit has passed."""


class TransportError(KvflashError, ConnectionError):
    """The other side could not be reached or hung up.

    Attributes:
        was_sent: Whether it had been sent the whole request: that may be what ended it.
    """

    def __init__(self, *args: object, was_sent: bool = False) -> None:
        super().__init__(*args)
        self.was_sent = was_sent


class WorkerError(KvflashError):
    """The worker's own code failed while it served a request.

    Attributes:
        code: The cause in one word; ``internal`` if the worker sent none.
        message: The worker's message.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[type[WorkerError], tuple[str, str]]:
        return type(self), (self.code, self.message)


class ClosedError(KvflashError):
    """The service is shutting down."""


class DrainingError(ClosedError):
    """The worker is shutting down and refused the request before its handler saw it."""
