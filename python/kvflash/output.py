"""Standard output of a command, which may take no more."""

import errno
import os
import sys
from collections.abc import Callable

# Of a write to a pipe, a file or a terminal that takes no more.
_ERRNOS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def ended(command: Callable[[], int]) -> int:
    """Run a command to its end, without a traceback for what its caller does. The exit status."""
    try:
        try:
            return command()
        finally:
            # Flush here: what can't be written would otherwise be reported when the interpreter
            # ends. Without a descriptor 1 there is no standard output.
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except UnicodeEncodeError as error:
        word = next((word for word in sys.argv[1:] if error.object in word), None)
        if word is None:
            raise
        print(f"kvflash: error: {word!r} is not UTF-8; every argument must be", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in _ERRNOS or error.filename is not None:
            raise
        # Discard what is left in the buffer.
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # A reader that has closed the pipe wants no more.
        if error.errno != errno.EPIPE:
            reason = f"standard output can't be written: {error.strerror}"
            print(f"kvflash: error: {reason}", file=sys.stderr)
        return 1
