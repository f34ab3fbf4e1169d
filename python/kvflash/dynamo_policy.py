"""Dynamo's router policy file, for settings that have a counterpart here.

In Dynamo the file of ``--router-policy-config`` describes queues: a profile has classes of
requests, each with its own queue. kvflash has one queue per model. A profile with one class
corresponds to that queue, and its settings mean the same. Everything else is refused by name,
because ignoring it would route differently than the file says.
"""

from typing import Any

_PROFILE = ("default_policy_family", "policy_classes", "uncached_isl_buckets")
#: Settings of a class, and the equivalent flags.
_SAME = {
    "queue_policy": "router-queue-policy",
    "prefill_busy_threshold_frac": "router-queue-threshold",
}
#: Settings that only separate classes, or share between them.
_OF_ONE_CLASS = ("name", "policy_family", "cache_bucket", "quantum")
_OTHERS = {
    "models": "start one frontend per model, each with its own settings",
    "worker_selection": "use router-mode, or python:module:Class for a policy of your own",
    "prefill_busy_threshold": "use prefill_busy_threshold_frac, a multiple of the largest batch",
    "request_queue_limit_per_worker": "use router-queue-limit, the limit of one model",
}


def translate(given: dict[str, Any]) -> dict[str, Any]:
    """Convert a file of Dynamo's to our keys; any other file is returned unchanged.

    A setting without counterpart is a ValueError that names it and the alternative.
    """
    if given.keys().isdisjoint({*_PROFILE, "models", "worker_selection"}):
        return given
    for key in given:
        if key not in _PROFILE:
            raise _unsupported(key)
    classes = given.get("policy_classes")
    if not isinstance(classes, list) or not classes:
        raise ValueError("policy_classes must be a list with a class")
    if len(classes) > 1:
        raise ValueError(
            f"policy_classes has {len(classes)} classes, and kvflash has one queue per model; "
            "keep one class, or use --fairness to share between clients"
        )
    (fields,) = classes
    if not isinstance(fields, dict):
        raise ValueError("policy_classes: a class must be a mapping")
    for key in fields:
        if key not in _SAME and key not in _OF_ONE_CLASS:
            raise _unsupported(key)
    return {_SAME[key]: value for key, value in fields.items() if key in _SAME}


def _unsupported(key: str) -> ValueError:
    more = f": {_OTHERS[key]}" if key in _OTHERS else ""
    return ValueError(f"{key!r} of Dynamo's policy file is not supported{more}")
