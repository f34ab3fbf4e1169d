"""What a handler knows about its request besides the payload."""

import asyncio


class Context:
    """A request's name, and whether its answer is still wanted.

    The handler of a stopped request should end soon with what it has. The handler of a killed
    request is cancelled.
    """

    def __init__(self, request_id: str) -> None:
        self._id = request_id
        self._is_killed = False
        self._stopped = asyncio.Event()

    def id(self) -> str:
        """The request's name."""
        return self._id

    def is_stopped(self) -> bool:
        """Whether the answer is no longer wanted."""
        return self._stopped.is_set()

    def is_killed(self) -> bool:
        """Whether the handler is being cancelled."""
        return self._is_killed

    def stop_generating(self) -> None:
        """Ask the handler to end."""
        self._stopped.set()

    def kill(self) -> None:
        """Note that the handler is being cancelled."""
        self._is_killed = True
        self.stop_generating()

    async def async_killed_or_stopped(self) -> bool:
        """Wait until the request is stopped or killed; True then."""
        return await self._stopped.wait()
