"""The modules that a script imports, filled with kvflash's names."""

import sys
from types import ModuleType
from typing import Any

from kvflash import _core, llm, publisher, runtime
from kvflash.compat.dynamo import classes

_LLM: dict[str, Any] = {
    "ApproxKvIndexer": _core.ApproxKvIndexer,
    "ForwardPassMetrics": publisher.ForwardPassMetrics,
    "KvEventPublisher": publisher.KvEventPublisher,
    "KvIndexer": classes.KvIndexer,
    "KvPushRouter": classes.KvPushRouter,
    "KvRouter": classes.KvPushRouter,
    "KvRouterConfig": classes.KvRouterConfig,
    "KvStats": publisher.KvStats,
    "ModelInput": llm.ModelInput,
    "ModelRuntimeConfig": llm.ModelRuntimeConfig,
    "ModelType": llm.ModelType,
    "OverlapScores": _core.OverlapScores,
    "RadixTree": _core.RadixTree,
    "RouterConfig": classes.RouterConfig,
    "RouterConfigOverride": classes.RouterConfigOverride,
    "RouterMode": classes.RouterMode,
    "SpecDecodeStats": publisher.SpecDecodeStats,
    "WorkerMetricsPublisher": publisher.WorkerMetricsPublisher,
    "WorkerStats": publisher.WorkerStats,
    "ZmqKvEventListener": publisher.ZmqKvEventListener,
    "ZmqKvEventPublisher": publisher.ZmqKvEventPublisher,
    "ZmqKvEventPublisherConfig": publisher.ZmqKvEventPublisherConfig,
    "compute_block_hash_for_seq": _core.compute_block_hash_for_seq,
    "compute_block_hash_for_seq_py": _core.compute_block_hash_for_seq,
    "register_llm": llm.register_llm,
    "unregister_llm": llm.unregister_llm,
}
_RUNTIME: dict[str, Any] = {
    "Client": classes.Client,
    "Component": runtime.Component,
    "Context": runtime.Context,
    "DistributedRuntime": classes.DistributedRuntime,
    "Endpoint": runtime.Endpoint,
    "Namespace": runtime.Namespace,
    "dynamo_worker": classes.dynamo_worker,
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
