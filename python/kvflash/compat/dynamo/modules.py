"""The modules that a script imports, filled with kvflash's names."""

import sys
from types import ModuleType
from typing import Any

from kvflash import _core, llm, publisher, runtime
from kvflash.compat.dynamo import classes


def _named(home: object, names: str) -> dict[str, Any]:
    return {name: getattr(home, name) for name in names.split()}


_LLM: dict[str, Any] = {
    **_named(_core, "ApproxKvIndexer OverlapScores RadixTree compute_block_hash_for_seq"),
    **_named(llm, "ModelInput ModelRuntimeConfig ModelType register_llm unregister_llm"),
    **_named(
        publisher,
        "ForwardPassMetrics KvEventPublisher KvStats SpecDecodeStats WorkerMetricsPublisher "
        "WorkerStats ZmqKvEventListener ZmqKvEventPublisher ZmqKvEventPublisherConfig",
    ),
    **_named(
        classes,
        "KvIndexer KvPushRouter KvRouterConfig RouterConfig RouterConfigOverride RouterMode",
    ),
    "KvRouter": classes.KvPushRouter,
    "compute_block_hash_for_seq_py": _core.compute_block_hash_for_seq,
}
_RUNTIME: dict[str, Any] = {
    **_named(runtime, "Component Context Endpoint Namespace"),
    **_named(classes, "Client DistributedRuntime dynamo_worker"),
}

# Each module with its names; any other name is an ImportError.
MODULES: dict[str, dict[str, Any]] = {
    "dynamo.llm": _LLM,
    "dynamo.runtime": _RUNTIME,
    "dynamo._core": {**_LLM, **_RUNTIME},
}


def install() -> None:
    """Register the modules for ``import`` in this process."""
    package = ModuleType("dynamo", "Dynamo's names, made of kvflash's.")
    package.__path__ = []
    sys.modules["dynamo"] = package
    for path, names in MODULES.items():
        module = ModuleType(path, "Dynamo's names, made of kvflash's.")
        vars(module).update(names, __all__=sorted(names))
        sys.modules[path] = module
        setattr(package, path.partition(".")[2], module)
