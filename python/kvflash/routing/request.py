"""A request's fields that concern routing, as options of the core."""

from collections.abc import Mapping
from typing import Any

from kvflash.errors import InvalidArgumentError

# Both names of the worker that must take the request.
_PINS = ("worker_id", "backend_instance_id")
_ROUTING = (
    *("allowed_worker_ids", "user", "session_key", "lora_path", "mm", "embeds"),
    *("priority", "strict_priority", "expected_output_tokens"),
)
#: Fields that a worker has no use for.
ROUTING_ONLY = frozenset({"router_config_override", "request_id", *_PINS, *_ROUTING})
# Settings that a request may override; the core has no prefix before the last one.
_OVERRIDES = (
    *("overlap_score_weight", "overlap_score_credit", "prefill_load_scale", "router_temperature"),
    *("assume_kv_reuse", "router_assume_kv_reuse"),
)


def routing_options(request: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ``RouterCore`` in a request; InvalidArgumentError for an unknown override."""
    options = override_options(request.get("router_config_override"))
    for name in (*_ROUTING, "dp_rank", "lora_name", "cache_salt"):
        options[name] = request.get(name)
    pinned = (request.get(name) for name in _PINS)
    options["worker_id"] = next((one for one in pinned if one is not None), None)
    if not options["expected_output_tokens"]:
        stop = request.get("stop_conditions")
        limit = stop.get("max_tokens") if isinstance(stop, Mapping) else None
        is_limit = isinstance(limit, int) and limit > 0
        options["expected_output_tokens"] = limit if is_limit else None
    return options


def override_options(override: Mapping[str, Any] | None) -> dict[str, Any]:
    """A request's overrides, under the core's names; InvalidArgumentError for an unknown one."""
    if not isinstance(override, Mapping | None):
        raise InvalidArgumentError(
            f"router_config_override must be a mapping of settings, got {override!r}"
        )
    options: dict[str, Any] = {}
    for name, value in (override or {}).items():
        if name not in _OVERRIDES:
            raise InvalidArgumentError(
                f"router_config_override: unknown setting {name!r}; known are "
                f"{', '.join(_OVERRIDES)}"
            )
        if value is not None:
            options[name.replace("router_assume", "assume")] = value
    return options
