"""The core's settings, one table for all services: flags, variables, files, classes."""

import functools
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from kvflash._core import settings_table
from kvflash.config import bounded_float, bounded_int, bounded_size, number_or_auto, optional
from kvflash.config_file import joined
from kvflash.errors import ConfigError
from kvflash.flags import Flags, mode, variable_of
from kvflash.spelling import nearest

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
# Settings of kv's formula, by key: giving any of them, even its default, makes kv the default.
_OF_FORMULA = (
    "overlap_score_weight",
    "overlap_score_credit",
    "overlap_score_credit_decay",
    "prefill_load_scale",
    "prefill_tokens_per_s",
    "active_request_weight",
    "track_active_blocks",
    "track_output_blocks",
    "track_prefill_tokens",
    "assume_kv_reuse",
)
# Settings outside of the core: locations of workers, replica sync, Python's log.
_OUR_SECTIONS = ("Workers", "Replicas")
_OUR_KEYS = ("log_level", "log_format")

# Variables that are not settings: of tools, of the runtime, of publishing processes.
_OTHERS = """
    CONFIG DISCOVERY_DIR ENDPOINT EVENTS_PORT FILE INDEXER_TEST_ENDPOINTS JSON LISTEN
    MAX_IN_FLIGHT MODEL NATS_STREAM_MAX_AGE NATS_STREAM_MAX_BYTES PROMPT REPLAY_PORT
    ROUTER_POLICY_CONFIG RUNTIME_PORT SPEED STRICT TIMEOUT TOKENS
"""
# Variables for tests and benchmarks.
_OF_TESTS = """
    BENCH_SHARERS CHAOS_SECONDS CHURN_BLOCKS FLAPS FUZZ_FRAMES MODEL_EVENTS MODEL_SEEDS MODEL_SKIP
    REFERENCE_DOCUMENTS SCHEMA_EXAMPLES SIM_SEED SIM_SEEDS SOAK_BLOCKS SOAK_SECONDS
    STRESS_SECONDS TEST_ASK TRACE VLLM VLLM_ENGINE
"""
_OF_DYNAMO = (
    "DYN_KV_INDEXER_TEST_ENDPOINTS",
    "DYN_NATS_STREAM_MAX_AGE",
    "DYN_ROUTER_POLICY_CONFIG",
)
# Poor guesses at what was meant: those of tests, and a flag that no manual names as a variable.
_NOT_SUGGESTED = frozenset(f"KVFLASH_{name}" for name in ("FILE", *_OF_TESTS.split()))
# Prefixes of variables, and how similar a name must be to one that is read: other products have
# many more with theirs, for their own components.
_SIMILARITY = {"KVFLASH_": 0.8, "DYN_": 0.9, "AIBRIX_": 0.9}
# Set by Kubernetes for pods when a Service's name begins with "kvflash".
_OF_SERVICES = re.compile(r"_SERVICE_(HOST|PORT)(_|$)|_PORT_\d+_(TCP|UDP|SCTP)")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting; the core's ``settings.rs`` explains the fields.

    The help shows the first of its flags. If ``is_routing``, a routing file may also set it.
    """

    key: str
    section: str
    kind: str
    is_optional: bool
    legal: Mapping[str, Any]
    default: Any
    help: tuple[str, ...]
    flags: tuple[str, ...]
    metavar: str | None
    variables: tuple[str, ...]
    is_routing: bool

    @property
    def dest(self) -> str:
        """The attribute that its flags set."""
        is_named = self.kind not in ("bool", "texts") and self.flags
        return _field(self.flags[0]) if is_named else self.key

    @property
    def is_of_formula(self) -> bool:
        """Whether giving it makes ``kv`` the default policy."""
        return self.key in _OF_FORMULA

    @property
    def names(self) -> set[str]:
        """All its names in Python."""
        return {self.key, self.dest, *map(_field, self.flags)}

    @property
    def choices(self) -> list[str] | None:
        """The legal values, if there are few."""
        words: list[str] | None = self.legal.get("words") or self.legal.get("mode", [None])[0]
        return words

    def all_variables(self) -> Iterator[str]:
        """Every environment variable that is read for it."""
        yield from map(variable_of, self.flags)
        yield from self.variables

    def parser(self) -> Callable[[str], Any]:
        """The parser for a flag's value."""
        if "bytes" in self.legal:
            return bounded_size(*self.legal["bytes"])
        if self.kind == "int":
            parse: Callable[[str], Any] = bounded_int(*self.legal["whole"])
        elif self.kind == "float":
            low, high = self.legal["number"]
            parse = bounded_float(low, float("inf") if high is None else high)
        else:
            return optional(number_or_auto) if self.kind == "speed" else str
        return optional(parse) if self.is_optional else parse

    def check(self, name: str, value: Any) -> None:
        """Refuse a caller's value of ``name`` that is not legal; None unsets an optional one."""
        wanted = None
        if self.kind == "bool":
            wanted = None if isinstance(value, bool) else "True or False"
        elif (value is None and self.is_optional) or (self.kind == "speed" and value == "auto"):
            return
        elif self.choices is not None:
            wanted = None if value in self.choices else f"one of {', '.join(self.choices)}"
        elif self.kind == "speed" and isinstance(value, str):
            wanted = "a number or 'auto'"
        elif self.kind in ("int", "float", "speed"):
            wanted = self._range(value)
        if wanted is not None:
            raise ConfigError(f"{name} must be {wanted}, got {value!r}")

    def _range(self, value: Any) -> str | None:
        """The legal range, if ``value`` is outside of it."""
        if "bytes" in self.legal:
            least, has_zero = self.legal["bytes"]
            low, high = 0 if has_zero else least, 2**63 - 1
        else:
            low, high = self.legal.get("whole") or self.legal["number"]
        what = "a whole number" if self.kind == "int" else "a number"
        is_number = isinstance(value, int if self.kind == "int" else int | float)
        is_high = high is None or high >= 2**62
        within = is_number and low <= value and value != float("inf")
        if within and not isinstance(value, bool) and (high is None or value <= high):
            return None
        return f"{what} of at least {low:g}" if is_high else f"{what} in {low:g}..={high:.9g}"


@functools.cache
def _tables() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(settings_table())
    return found


@functools.cache
def table(service: str) -> tuple[Setting, ...]:
    """Every setting of ``frontend``, ``router`` or ``indexer``, in the order of the help."""
    groups = _tables()["services"][service]
    return tuple(
        _setting(row, group == "routing") for group, rows in groups.items() for row in rows
    )


def _setting(row: dict[str, Any], is_routing: bool) -> Setting:
    words = row.pop("spelled").split()
    flags = tuple(word for word in words if word.startswith("--"))
    variables = tuple(word for word in words if word.startswith(("DYN_", "KVFLASH_")))
    rest = [word for word in words if word not in (*flags, *variables)]
    row["legal"] = row["legal"] if isinstance(row["legal"], dict) else {}
    return Setting(
        **{**row, "help": tuple(row["help"])},
        flags=flags,
        variables=variables,
        metavar=rest[0] if rest else None,
        is_routing=is_routing,
    )


def _field(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def add_settings(
    flags: Flags, settings: Iterable[Setting], parsers: Mapping[str, Callable[[str], Any]]
) -> None:
    """Add the flags of ``settings``; ``parsers`` are for values that only Python understands."""
    for one in settings:
        if not one.flags:
            continue
        flags.section(one.section)
        summary, metavar, parse = one.help[0], one.metavar, parsers.get(one.key)
        if one.kind == "bool":
            flags.add_toggle(
                one.key,
                on=[name for name in one.flags if not name.startswith("--no-")],
                off=[name for name in one.flags if name.startswith("--no-")],
                default=one.default,
                summary=summary,
                variables=one.variables,
            )
        elif one.kind == "texts" and parse is None:
            flags.add_list(one.flags[0], dest=one.key, metavar=metavar or "TEXT", summary=summary)
        else:
            parse = parse or one.parser()
            in_file, bare = None, one.legal.get("bare")
            if "mode" in one.legal:
                bare = one.legal["mode"][1]
                in_file = mode(one.choices or (), one.default, bare)
            elif metavar is not None and metavar.endswith(",..."):
                in_file = joined(parse)
            flags.add(
                *one.flags,
                parse=parse,
                default=parse("") if one.default == [] else one.default,
                choices=one.choices,
                metavar=metavar,
                variables=one.variables,
                summary=summary,
                in_file=in_file,
                bare=bare,
            )


class Args:
    """Values of flags: an attribute for each setting of a service; see ``--help``."""

    service: ClassVar[str]

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, **settings: Any) -> None:
        """Set every field. A constructor with a hundred arguments would be slow to compile."""
        for one in fields(self):
            default = one.default if one.default_factory is MISSING else one.default_factory()
            object.__setattr__(self, one.name, settings.pop(one.name, default))
        if settings:
            raise TypeError(f"{type(self).__name__} has no setting {next(iter(settings))!r}")
        self.__post_init__()

    def __post_init__(self) -> None:
        """Check the fields; there is nothing to check here."""

    def core_settings(self) -> dict[str, Any]:
        """The values for the core, under its keys."""
        return {
            one.key: getattr(self, one.dest)
            for one in table(self.service)
            if one.flags and one.section not in _OUR_SECTIONS and one.key not in _OUR_KEYS
        }


def of_table(service: str) -> Callable[[type[_T]], type[_T]]:
    """Make a class a dataclass with a field for each setting of a service; its own come first."""

    def made(cls: type[_T]) -> type[_T]:
        cls.service = service  # type: ignore[attr-defined]
        for one in table(service):
            if one.flags and not hasattr(cls, one.dest):
                cls.__annotations__[one.dest] = Any
                is_list = isinstance(one.default, list)
                setattr(cls, one.dest, field(default_factory=list) if is_list else one.default)
        return dataclass(init=False, frozen=True, kw_only=True)(cls)

    return made


@functools.cache
def known_variables() -> frozenset[str]:
    """Every environment variable that is read: ours, Dynamo's and AIBrix's."""
    tables = _tables()
    settings = (one for service in tables["services"] for one in table(service))
    of_policies = (f"AIBRIX_{name}" for name in tables["policies"])
    names = (*tables["policies"], *_OTHERS.split(), *_OF_TESTS.split())
    of_settings = (name for one in settings for name in one.all_variables())
    ours = (f"KVFLASH_{name}" for name in names)
    return frozenset((*of_settings, *_OF_DYNAMO, *of_policies, *ours))


def misspelt(environment: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    """Variables that kvflash does not read, each with the closest known name.

    Of variables of Dynamo and AIBrix only near misses count.
    """
    known = known_variables()
    for name, value in sorted(environment.items()):
        is_of_service = _OF_SERVICES.search(name) or re.match(r"(tcp|udp|sctp)://", value)
        prefix = next(filter(name.startswith, _SIMILARITY), None)
        if name in known or is_of_service or prefix is None:
            continue
        family = [one for one in known if one.startswith(prefix) and one not in _NOT_SUGGESTED]
        meant = nearest(name, family, cutoff=_SIMILARITY[prefix])
        if prefix == "KVFLASH_" or meant is not None:
            yield name, meant


def warn_of_misspelt() -> None:
    """Log one line for each of them."""
    for name, meant in misspelt(os.environ):
        hint = f"; did you mean {meant}?" if meant else ""
        logger.warning("environment variable %s is not read by kvflash%s", name, hint)
