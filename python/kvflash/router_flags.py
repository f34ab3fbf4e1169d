"""The routing flags, for every process that routes.

Each has its ``KVFLASH_...`` variable. Names from other versions, and Dynamo's ``DYN_...``
variables, are aliases.
"""

import argparse
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvflash._core import check_policy
from kvflash.cluster_flags import ClusterFlags
from kvflash.config import POLICY_PREFIX, add_config, policy_parts
from kvflash.dynamo_policy import translate
from kvflash.errors import ConfigError
from kvflash.flags import Flags
from kvflash.settings import Args, add_settings, table

#: Value of ``--use-remote-indexer`` without a URL: the indexer in discovery.
FOUND = "discovery"


@dataclass(init=False, frozen=True, kw_only=True)
class RoutingArgs(Args, ClusterFlags):
    """Values of these flags; see ``--help``."""

    is_kv_meant: bool = False
    is_router_ttl_meant: bool = False
    # Converted to an event plane.
    durable_kv_events: ClassVar[bool] = False

    def __init__(self, **settings: Any) -> None:
        """Set every field."""
        super().__init__(**_expanded(settings))

    @property
    def finds_indexer(self) -> bool:
        """Whether the remote indexer is found through discovery."""
        return bool(self.use_remote_indexer == FOUND)

    def core_settings(self) -> dict[str, Any]:
        """The values under the core's keys."""
        given = {"is_kv_meant": self.is_kv_meant, "is_router_ttl_meant": self.is_router_ttl_meant}
        found = {"remote_indexer": ""} if self.finds_indexer else {}
        return super().core_settings() | given | found


def parse(
    flags: Flags, service: str, argv: Any, parsers: Mapping[str, Callable[[str], Any]]
) -> dict[str, Any]:
    """Add a service's flags, as in the table of settings, and the files that may set them; parse.

    Flags that contradict each other are a ConfigError.
    """
    add_config(flags)
    settings = table(service)
    add_settings(flags, [one for one in settings if not one.is_routing], parsers)
    flags.section("Routing")
    flags.add_file(
        "--router-policy-config",
        variables=("DYN_ROUTER_POLICY_CONFIG",),
        summary="Read routing flags from this file, or Dynamo's policy file",
        translate=translate,
    )
    routing = [one for one in settings if one.is_routing]
    add_settings(flags, routing, {"policy": _policy, **parsers})
    flags.preset("load_aware", _LOAD_AWARE)
    flags.preset("durable_kv_events", {"event_plane": "nats"})
    flags.mark("is_kv_meant", [one.dest for one in routing if one.is_of_formula])
    flags.mark("is_router_ttl_meant", ("router_ttl",))
    return _settle(vars(flags.parse(argv)))


def _policy(text: str) -> str:
    try:
        if text.startswith(POLICY_PREFIX):
            policy_parts(text)
        else:
            check_policy(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    except ValueError as error:
        forms = f"a:2,b:1 for several with weights, or {POLICY_PREFIX}module:Class"
        raise argparse.ArgumentTypeError(f"{error}; also {forms}") from error
    return text


#: Settings that ``--load-aware`` expands to.
_LOAD_AWARE = {
    "router_mode": "kv",
    "router_kv_overlap_score_credit": 0.0,
    "use_kv_events": False,
    "assume_kv_reuse": False,
    "track_active_blocks": True,
    "track_prefill_tokens": True,
}


def _expanded(values: dict[str, Any]) -> dict[str, Any]:
    """Apply the preset ``load_aware`` among ``values`` to the others."""
    if not values.get("load_aware"):
        return values
    mode = values.get("router_mode")
    if mode not in (None, "kv"):
        raise ConfigError(
            f"--load-aware sets --router-mode kv, which contradicts --router-mode {mode}: "
            "leave one of them out"
        )
    return values | _LOAD_AWARE


def _settle(values: dict[str, Any]) -> dict[str, Any]:
    """Apply presets and deprecated flags among ``values`` to the others."""
    values = _expanded(values)
    if values["use_remote_indexer"] == "":
        raise ConfigError("--use-remote-indexer must be http://host:port of an indexer, got ''")
    if values["use_remote_indexer"] is not None and not values["use_kv_events"]:
        off = "--load-aware" if values["load_aware"] else "--no-kv-events"
        raise ConfigError(f"--use-remote-indexer needs KV events, which {off} switches off")
    if values.pop("durable_kv_events"):
        if not values["use_kv_events"]:
            raise ConfigError(
                "--router-durable-kv-events requires KV events: --no-kv-events is set"
            )
        message = "--router-durable-kv-events is deprecated: use --event-plane nats"
        warnings.warn(message, FutureWarning, stacklevel=3)
        values["event_plane"] = "nats"
    return values
