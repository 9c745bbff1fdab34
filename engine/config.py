"""The server's configuration: one frozen struct that the command line, a file and the engine process share.

The field is the flag: `page_size` is `--page-size`, and `page_size` or `page-size` in a file. Type, limits, help and default
stand here once; the command line is made from them. Values keep the unit the user typed; properties give bytes.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import yaml
from msgspec import Meta

from engine.schedule_policy import SchedulePolicyName  # noqa: TC001 - msgspec reads the annotation
from hicache.config import EvictionPolicy, PrefetchConfig, PrefetchPolicy, StorageAdmission, WritePolicy
from hicache.errors import ConfigError
from hicache.keys import tenant_name
from hicache.transfer.io_backend import IoBackendName  # noqa: TC001 - msgspec reads the annotation

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GIB", "ServeConfig", "cache_home", "flag_of", "load_config", "parse_bytes"]

GIB = 1 << 30
_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": GIB, "t": 1 << 40}
_SECRETS = frozenset({"api_key", "admin_api_key"})

Positive = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(gt=0, lt=1)]


def _about(text: str) -> Meta:
    return Meta(description=text)


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything `hicache serve` can be told. Validated at construction; raises ConfigError. Crosses to the engine whole."""

    model_path: Annotated[str, _about("Hugging Face folder, GGUF file, or a known name (smollm2).")]
    served_model_name: Annotated[str | None, _about("Name clients see as `model`; the model path if not given.")] = None
    host: Annotated[str, _about("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535), _about("TCP port to listen on.")] = 30000
    context_length: Annotated[
        Positive | None, _about("Longest prompt plus answer, in tokens; the model's own if not given.")
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        _about("Type of weights and activations; auto: float32 on a CPU, the model's own on a GPU."),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"],
        _about("Type KV is stored as; auto: the same as --dtype; 8-bit halves its size, and rounds it."),
    ] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], _about("Where the model runs; auto: a GPU if there is one.")] = "auto"
    attention_backend: Annotated[
        Literal["auto", "torch", "flashinfer"],
        _about("Attention over pages; auto: flashinfer on a GPU if it can run the model, else torch."),
    ] = "auto"
    disable_cuda_graph: Annotated[bool, _about("On a GPU, launch the kernels of each decode step one by one.")] = False
    cuda_graph_max_bs: Annotated[
        Positive | None,
        _about("Most sequences of a decode step that is replayed as a CUDA graph; --max-running-requests if not given."),
    ] = None
    page_size: Annotated[Positive, _about("Tokens a page, the unit of reuse, transfer and eviction.")] = 16
    mem_fraction_static: Annotated[
        Share | None,
        _about("Share of the device's memory for weights and device pool; not given: 0.85 on a GPU, 0.25 on a CPU."),
    ] = None
    max_total_tokens: Annotated[Positive | None, _about("Tokens the device pool holds; overrides --mem-fraction-static.")] = (
        None
    )
    max_running_requests: Annotated[Positive, _about("Sequences that run at once.")] = 32
    max_queued_requests: Annotated[
        Positive, _about("Sequences in the server, running ones included, above which it answers 429.")
    ] = 4096
    chunked_prefill_size: Annotated[Positive, _about("Most prompt tokens computed in one step.")] = 2048
    schedule_policy: Annotated[SchedulePolicyName, _about("Who runs next; see docs/scheduling.md.")] = "fcfs"
    schedule_max_wait: Annotated[
        float,
        Meta(gt=0),
        _about("Seconds after which the oldest waiting request goes next, whatever the schedule policy says."),
    ] = 10.0
    radix_eviction_policy: Annotated[EvictionPolicy, _about("Which unused page leaves a tier first.")] = "lru"
    disable_radix_cache: Annotated[bool, _about("Reuse nothing; compute every prompt anew.")] = False
    enable_hierarchical_cache: Annotated[bool, _about("Keep pages in host memory, and on disk with a storage backend.")] = False
    hicache_ratio: Annotated[float, Meta(gt=0), _about("Size of the host pool as a multiple of the device pool.")] = 2.0
    hicache_size: Annotated[float, Meta(ge=0), _about("Size of the host pool in GB; above 0 it overrides --hicache-ratio.")] = (
        0.0
    )
    hicache_write_policy: Annotated[WritePolicy, _about("When pages are copied to the tier below.")] = "write_through"
    hicache_io_backend: Annotated[
        IoBackendName,
        _about(
            "How pages move between device and host; direct: copy engines, a run of neighbours at a time; kernel: the GPU's "
            "cores, for small scattered pages; auto: for each copy what is quicker, as measured at start."
        ),
    ] = "auto"
    hicache_storage_backend: Annotated[
        Literal["none", "lmdb", "memory"], _about("The tier below the host: lmdb (disk), memory (for trials) or none.")
    ] = "none"
    hicache_storage_backend_extra_config: Annotated[
        str,
        _about(
            "JSON or @file; keys prefetch_threshold (tokens, 256), prefetch_timeout_base (s, 1), "
            "prefetch_timeout_per_ki_token (s, 0.25), quotas (bytes by cache salt), free_floor_bytes, faults (for trials)."
        ),
    ] = ""
    hicache_storage_prefetch_policy: Annotated[
        PrefetchPolicy, _about("How long a request waits for its pages to come from disk.")
    ] = "timeout"
    hicache_storage_dir: Annotated[
        str | None, _about("Folder of the lmdb store; not given: hicache/store in the user's cache folder.")
    ] = None
    hicache_storage_size: Annotated[
        str, _about("Hard cap of the store on disk, overhead included: a number of GB, or with a unit (500MB, 2GiB).")
    ] = "10GB"
    hicache_storage_sync: Annotated[
        Literal["none", "batch", "always"],
        _about("When writes are made durable: at close (none), now and then (batch), each (always)."),
    ] = "batch"
    hicache_storage_admission: Annotated[
        StorageAdmission, _about("Which pages go to disk: all, or those asked for twice (second-sight), to spare the SSD.")
    ] = "all"
    hicache_hash_algo: Annotated[
        Literal["xxh3_128", "sha256"], _about("Hash of the page keys; sha256 resists deliberate collisions by itself.")
    ] = "xxh3_128"
    enable_cache_report: Annotated[bool, _about("Add the split of cached tokens by tier to every usage.")] = False
    api_key: Annotated[str | None, _about("Bearer token that every request must carry; not given: none.")] = None
    admin_api_key: Annotated[str | None, _about("Bearer token for admin endpoints, which are then closed to all others.")] = (
        None
    )
    request_timeout: Annotated[
        float,
        Meta(ge=0),
        _about("Seconds that one request may take, waiting included, before it is ended with 504; 0: no limit."),
    ] = 0.0
    body_timeout: Annotated[
        float, Meta(gt=0), _about("Seconds that a client may let pass between two parts of a request's body.")
    ] = 30.0
    tool_call_parser: Annotated[
        Literal["auto", "hermes", "llama3", "none"],
        _about("Format of tool calls in answers; auto: the one that the chat template teaches."),
    ] = "auto"
    drain_timeout: Annotated[
        float, Meta(ge=0), _about("Seconds that running requests get to finish after SIGTERM; then they are cut off.")
    ] = 5.0
    kv_events_config: Annotated[
        str,
        _about(
            "JSON; publish over ZeroMQ where pages are: keys publisher (zmq or null), endpoint (tcp://127.0.0.1:5557), topic. "
            "Not given: nothing is published."
        ),
    ] = ""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _about("Least severe log line that is shown.")] = "info"

    def __post_init__(self) -> None:
        if not self.model_path:
            raise ConfigError("--model-path is missing")
        if self.enable_hierarchical_cache and self.disable_radix_cache:
            raise ConfigError("--enable-hierarchical-cache needs the radix cache, which --disable-radix-cache turns off")
        if self.hicache_storage_backend != "none" and not self.enable_hierarchical_cache:
            raise ConfigError(f"--hicache-storage-backend {self.hicache_storage_backend} needs --enable-hierarchical-cache")
        if self.hicache_storage_dir is not None and self.hicache_storage_backend != "lmdb":
            raise ConfigError("--hicache-storage-dir needs --hicache-storage-backend lmdb")
        if self.cuda_graph_max_bs is not None and self.cuda_graph_max_bs > self.max_running_requests:
            raise ConfigError(
                f"--cuda-graph-max-bs {self.cuda_graph_max_bs}: no more sequences run at once than --max-running-requests "
                f"{self.max_running_requests}"
            )
        for name in sorted(_SECRETS):
            if getattr(self, name) == "":
                raise ConfigError(f"--{name.replace('_', '-')} must not be empty")
        if self.hicache_storage_size_bytes < 1 << 20:
            raise ConfigError(f"--hicache-storage-size {self.hicache_storage_size}: at least 1 MB is needed")
        _ = self.prefetch

    @property
    def store_extra(self) -> dict[str, object]:
        """What the store itself is told: quotas by tenant, its free-space floor, faults to inject."""
        extra = _Extra.parse(self.hicache_storage_backend_extra_config)
        out: dict[str, object] = {"quotas": {tenant_name(salt): size for salt, size in extra.quotas.items()}}
        if extra.free_floor_bytes is not None:
            out["free_floor_bytes"] = extra.free_floor_bytes
        if extra.faults is not None:
            out["faults"] = extra.faults
        return out

    @property
    def name(self) -> str:
        """The model's name as clients see it."""
        return self.served_model_name or self.model_path

    @property
    def hicache_size_bytes(self) -> int:
        """Bytes of the host pool, or 0 if its size follows the ratio."""
        return int(self.hicache_size * GIB)

    @property
    def hicache_storage_size_bytes(self) -> int:
        """The store's byte cap."""
        return parse_bytes(self.hicache_storage_size, flag="--hicache-storage-size")

    @property
    def storage_dir(self) -> Path:
        """The store's folder."""
        given = self.hicache_storage_dir
        return Path(given).expanduser() if given is not None else cache_home() / "store"

    @property
    def prefetch(self) -> PrefetchConfig:
        """When requests wait for the disk. Raises ConfigError for a bad extra config."""
        return _Extra.parse(self.hicache_storage_backend_extra_config).prefetch(self.hicache_storage_prefetch_policy)

    def memory_fraction(self, device: Literal["cpu", "cuda"]) -> float:
        """Share of the memory of `device` for weights and device pool."""
        return self.mem_fraction_static or {"cuda": 0.85, "cpu": 0.25}[device]

    def describe(self) -> dict[str, str]:
        """Every flag with its value, secrets hidden, for the start-up message and `/get_server_info`."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: "(set)" if name in _SECRETS and value else str(value) for name, value in values.items()}


class _Extra(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of `--hicache-storage-backend-extra-config`."""

    prefetch_threshold: Annotated[int, Meta(ge=0)] = 256
    prefetch_timeout_base: Annotated[float, Meta(ge=0)] = 1.0
    prefetch_timeout_per_ki_token: Annotated[float, Meta(ge=0)] = 0.25
    quotas: dict[str, Annotated[int, Meta(ge=0)]] = {}
    free_floor_bytes: Annotated[int, Meta(ge=0)] | None = None
    faults: dict[str, Any] | None = None

    @classmethod
    def parse(cls, text: str) -> _Extra:
        """Read JSON, or the file named after an @; "" is all defaults. Raises ConfigError."""
        flag = "--hicache-storage-backend-extra-config"
        try:
            raw = Path(text[1:]).expanduser().read_text() if text.startswith("@") else text
            return msgspec.convert(json.loads(raw or "{}"), cls)
        except (OSError, ValueError) as error:  # JSON and msgspec errors are ValueErrors
            raise ConfigError(f"{flag}: {error}") from None

    def prefetch(self, policy: PrefetchPolicy) -> PrefetchConfig:
        """The prefetch settings these keys stand for."""
        return PrefetchConfig(
            policy=policy,
            threshold_tokens=self.prefetch_threshold,
            timeout_base_s=self.prefetch_timeout_base,
            timeout_per_ki_token_s=self.prefetch_timeout_per_ki_token,
        )


def flag_of(field: str) -> str:
    """The flag of a field: `page_size` is `--page-size`."""
    return "--" + field.replace("_", "-")


def parse_bytes(text: str, *, flag: str) -> int:
    """Bytes of a size such as 2, 2GB, 500MB, 1.5TiB. A bare number is in GB; units are powers of 1,024. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *(?:([kmgt])i?b?|(b))?", text.strip().lower())
    if match is None:
        raise ConfigError(f"{flag} {text}: a size is a number of GB, or a number with a unit such as 500MB or 2GiB")
    number, scaled, plain = match.groups()
    return int(float(number) * _UNITS[scaled or plain or "g"])


def cache_home() -> Path:
    """The folder for what hicache keeps between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "hicache"


def load_config(overrides: Mapping[str, object], file: Path | None = None) -> ServeConfig:
    """Make the configuration from a YAML file and what the command line says, which wins. Raises ConfigError.

    overrides: by field name; strings are converted to the field's type.
    """
    values = {**(_read_file(file) if file is not None else {}), **overrides}
    values.setdefault("model_path", "")
    try:
        return msgspec.convert(values, ServeConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(_one_line(str(error), values)) from None


def _read_file(file: Path) -> dict[str, object]:
    try:
        loaded = yaml.safe_load(file.read_text()) or {}
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {file}: expected flags with values, such as `page-size: 16`")
    values: dict[str, object] = {}
    for key, value in loaded.items():
        field = str(key).replace("-", "_")
        if field not in ServeConfig.__struct_fields__:
            raise ConfigError(f"--config {file}: unknown flag {key}{_suggest(field)}")
        if field in values:
            raise ConfigError(f"--config {file}: {key} is given twice")
        values[field] = _as_written(value)
    return values


def _as_written(value: object) -> object:
    """What a flag's value would be on the command line: mappings as JSON."""
    return json.dumps(value) if isinstance(value, dict) else value


def _suggest(field: str) -> str:
    near = difflib.get_close_matches(field, ServeConfig.__struct_fields__, n=1)
    return f" (did you mean {near[0].replace('_', '-')}?)" if near else ""


def _one_line(problem: str, values: Mapping[str, object]) -> str:
    """Turn a validation message such as "Expected `int` >= 1 - at `$.page_size`" into a line about the flag."""
    match = re.fullmatch(r"(.*) - at `\$\.(\w+)`", problem)
    if match is None:
        return problem
    reason, field = match.groups()
    choices = _choices(field)
    expected = f"must be one of {', '.join(choices)}" if choices else reason[0].lower() + reason[1:].replace("`", "")
    return f"{flag_of(field)} {values.get(field)}: {expected}"


def _choices(field: str) -> tuple[str, ...]:
    """The values a field may have, if they are few and fixed."""
    kind = get_type_hints(ServeConfig)[field]
    return get_args(kind) if get_origin(kind) is Literal else ()
