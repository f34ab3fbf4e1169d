"""Which signals end a process."""

import signal


def ending_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM and SIGINT, and SIGHUP unless it is ignored, as under nohup: it stays so."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        return signal.SIGTERM, signal.SIGINT, signal.SIGHUP
    return signal.SIGTERM, signal.SIGINT
