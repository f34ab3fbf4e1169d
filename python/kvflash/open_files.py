"""How many files a process may have open."""

import logging
import resource

logger = logging.getLogger(__name__)


def allow_open_files() -> None:
    """Raise the limit of open files to its maximum; every engine, followed or mocked, needs some.

    The usual 1,024 exists for programs that use select(2).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        logger.warning("the limit of open files stays at %d: %s", soft, error)
    else:
        logger.info("limit of open files raised to %d, from %d", hard, soft)
