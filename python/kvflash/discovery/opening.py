"""Chooses the discovery of a process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvflash.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from kvflash.discovery.base import Discovery

KINDS = ("mem", "file", "etcd")
VARIABLES = ("KVFLASH_DISCOVERY", "KVFLASH_STORE_KV", "DYN_STORE_KV")


def discovery_kind() -> str:
    """The kind set in the environment: mem, file or etcd; default file."""
    # Here, so that services that name their discovery need not wait for it.
    from kvflash.servers import agreed  # noqa: PLC0415

    name, value = agreed(*VARIABLES) or ("", "file")
    if value not in KINDS:
        raise ConfigError(f"{name} must be one of {', '.join(KINDS)}, got {value!r}")
    return value


def open_discovery(
    kind: str | None = None, *, folder: str | Path | None = None, endpoints: str | None = None
) -> Discovery:
    """Open a discovery.

    Args:
        kind: ``mem`` (this process), ``file`` (this machine) or ``etcd``; default:
            KVFLASH_DISCOVERY, else ``file``.
        folder: For ``file``; default: KVFLASH_DISCOVERY_DIR, else a folder of this user.
        endpoints: For ``etcd``: addresses, separated by commas; default: ETCD_ENDPOINTS, else
            ``http://127.0.0.1:2379``.

    Raises:
        ConfigError: An unknown kind, an unusable folder, or an invalid setting of etcd.
    """
    kind = kind or discovery_kind()
    # Each is imported on first use: they need asyncio, and etcd an HTTP client.
    if kind == "mem":
        from kvflash.discovery.memory import MemoryDiscovery  # noqa: PLC0415

        return MemoryDiscovery()
    if kind == "file":
        from kvflash.discovery.file import FileDiscovery  # noqa: PLC0415

        return FileDiscovery(folder)
    if kind == "etcd":
        from kvflash.discovery.etcd import EtcdDiscovery  # noqa: PLC0415

        return EtcdDiscovery(endpoints)
    raise ConfigError(f"discovery must be one of {', '.join(KINDS)}, got {kind!r}")
