"""Reads the settings of a process. No other module of the server reads environment variables.

Owns the name, the default and the allowed values of every setting. Never opens a file or a connection.

Each value comes from the command line (`overrides`) if it is given there; if not, from the variable `GRAFTWORK_<NAME>`;
if that is not set, it is the default. The settings' repr does not show secrets, nor addresses that may contain one.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import FIRST_GENERATION
from graftwork.platform.objectives import Objective, parse_deadlines, parse_objectives
from graftwork.platform.setting_values import (
    one_of,
    parse_bytes,
    parse_device,
    parse_flag,
    parse_fleet,
    parse_fraction,
    parse_milliseconds,
    parse_origins,
    parse_path,
    parse_share,
    parse_text,
    parse_token,
    seconds,
    whole,
)


@dataclass(frozen=True)
class Settings:
    """All settings of the commands `graftwork serve`, `graftwork gateway` and `graftwork engine`."""

    host: str = "127.0.0.1"
    port: int = 8000
    """The port of the gateway, 0 to 65535; 0 takes a free port."""
    tls_cert: Path | None = None
    """A PEM file with the certificate chain of the gateway, which then serves HTTPS. It needs `tls_key`."""
    tls_key: Path | None = None
    """A PEM file with the private key of `tls_cert`, without a password."""
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    """A second port that serves `/metrics` without a key; 0 takes a free one. None opens no such port."""
    data_dir: Path = Path("./graftwork-data")
    """The folder of keys, the embedded database, adapters and sockets."""
    database_url: str | None = field(default=None, repr=False)
    """The address of the database: `postgresql://…` or `sqlite+aiosqlite:///…`. None uses a file in `data_dir`."""
    redis_url: str | None = field(default=None, repr=False)
    """The address of the Redis in which several gateways share their limits. None keeps limits in this process."""
    model: Path | None = None
    """The folder of the base model."""
    served_model_name: str | None = None
    """The name of the base model for clients. None is the name of its folder."""
    demo: bool = False
    engine_address: str | None = None
    """The gRPC address of the engine, or the addresses of several with commas between. None starts an engine as a child
    of this process.
    """
    replicas: int = 1
    """Engines that `serve` starts, 1 to 64, or 0 with `max_replicas`. They divide the memory and disk of the settings
    between them.
    """
    max_replicas: int | None = None
    """With a number, `serve` runs `replicas` to so many engines, by their load. Memory and disk are divided by it. With
    0 replicas, the last engine ends when nothing needs it, and the next request starts one.
    """
    scale_first_token_s: float = 2.0
    """Seconds, 0.01 to 3600: with `max_replicas`, engines start when new requests would wait longer for a first token."""
    scale_down_after_s: float = 300.0
    """Seconds, 1 to 86400: with `max_replicas`, an engine ends when nothing has needed it for so long."""
    fleet: str = "static"
    """Where a gateway finds its engines: `static` (`engine_address`, or the engines that it starts) or `leases` (all
    engines that have a lease in the database). An engine with `leases` takes a lease.
    """
    replica_id: str | None = None
    """The name of an engine in the list of replicas. None takes one from the machine's name and the address."""
    advertise: str | None = None
    """The address at which gateways reach an engine with a lease. None takes that at which it listens."""
    generation: int = FIRST_GENERATION
    """The generation of an engine, 1 to 2³¹ − 1. Engines of one model name and generation must have the same weights and
    version; those of the next generation may differ, for a rolling upgrade.
    """
    drain_grace_s: float = 30.0
    """Seconds, 0 to 86400, that the requests of a draining engine have to end there. The rest goes on elsewhere."""
    admin_key: str | None = field(default=None, repr=False)
    """The admin key. None makes one at first start, in `data_dir`."""
    pepper: str | None = field(default=None, repr=False)
    """The secret that key hashes depend on. If it is lost, no key works any more. None makes one at first start."""
    engine_token: str | None = field(default=None, repr=False)
    """The secret that an engine demands of its gateways. An engine that other machines can reach needs one. `serve`
    makes one for its own engine at each start.
    """
    engine_tls_ca: Path | None = None
    """The PEM file of the authority that signs the certificates of engines and gateways."""
    engine_tls_cert: Path | None = None
    """The PEM file of the certificate with which an engine or a gateway proves to the other who it is."""
    engine_tls_key: Path | None = None
    """The PEM file of the private key of `engine_tls_cert`."""
    engine_tls_name: str | None = None
    """The name in the certificates of all engines. None means the host in each engine's address."""
    engine_silence_s: float = 5.0
    """Seconds, 0.1 to 3600: if the engine's process answers no ping for so long, its requests end with a 503. The
    engine that `serve` started is killed and started again after four times as long."""
    step_timeout_s: float = 120.0
    """Seconds, 0.1 to 86400: if the engine works for so long without finishing one layer of the model, its requests end
    with a 503. The engine that `serve` started is killed and started again."""
    request_timeout_s: float = 3600.0
    """The most seconds of one request or turn, with its time in the queue; then it ends with a 504."""
    device: str = "auto"
    dtype: str = "auto"
    tensor_parallel: int = 1
    """Devices of this machine that compute one model together, 1 to 8. Each holds a part of each layer."""
    threads: int = 1
    """CPU threads of one engine, 1 to 1024."""
    device_bytes: int | None = None
    """Bytes of device memory for KV and adapters together. None is the engine's default."""
    memory_share: float = 0.9
    """The part of a GPU's memory, above 0 and up to 1, that the engine takes of what is free beside the weights."""
    max_context_tokens: int | None = None
    """The longest context that is served. None is the model's own."""
    lora_pool_bytes: int | None = None
    """The most bytes of `device_bytes` for adapters. None sets no limit besides the reserve of the KV."""
    lora_host_bytes: int | None = None
    """Bytes of host memory for adapters, from which they are copied to the device."""
    kernels: str = "auto"
    """What computes attention, row operations, adapters and sampling: `auto`, `triton` (CUDA), `torch`, or `native` (a
    CPU's kernel for adapters). `auto` takes those of the device that work there."""
    lora_kernels: str | None = None
    """The former setting for adapters alone: `auto`, `native`, `triton` or `torch`. None means `kernels`."""
    row_kernels: str | None = None
    """The former setting for row operations alone: `auto`, `triton` or `torch`. None means `kernels`."""
    attention_backend: str | None = None
    """The former setting for attention alone: `auto`, `triton` or `torch`. None means `kernels`."""
    decode_graphs: str = "auto"
    """Whether decoding steps are CUDA graphs: `auto` (on CUDA, if all kernels work) or `off`."""
    host_kv_bytes: int | None = None
    """Bytes of host memory for the KV of idle sessions. None is the engine's default; 0 turns this tier off."""
    disk_kv_bytes: int | None = None
    """Bytes of KV in files under the data folder, which outlive the engine. None is 2 GiB; 0 turns this tier off."""
    public_prompts: Path | None = None
    """A text file, or a folder of text files: system prompts whose KV all tenants may share."""
    public_grammars: Path | None = None
    """A folder of JSON schemas (`.json`) whose compiled grammars all tenants share."""
    kv_dir: Path | None = None
    """The folder of the KV files. Engines must not share one. None is `kv` in `data_dir`."""
    shared_kv_dir: Path | None = None
    """A folder of KV files that engines share, in place of `kv_dir`. Each engine reads what the others have written."""
    kv_object_url: str | None = None
    """A bucket in which engines share KV files, such as `s3://bucket/prefix`; each keeps its own on disk, too."""
    kv_object_bytes: int = 64 * 2**30
    """Bytes of KV that all engines together keep in the bucket."""
    max_batch_tokens: int | None = None
    """Tokens of one engine step, at least 1. More tokens give more throughput and longer steps. None is the engine's
    default for the device."""
    max_running: int | None = None
    """The most requests in one step, at least 1. None is the engine's default for the device."""
    target_itl_ms: float | None = None
    """The inter-token latency that prompts may cost running streams, in milliseconds: how long a step with both may be. 0
    sets no limit. None is the engine's default for the device."""
    max_waiting: int = 256
    """The most requests in the queue, at least 1. When it is full, the tenant with the most requests in it gets a status
    429: for its new request, or for its last one in the queue if a tenant with fewer requests sends one."""
    max_waiting_tokens: int = 2**20
    """The most prompt tokens in the queue, at least 1."""
    waiting_share: float = 0.75
    """The part of the queue, from 0 to 1, that one tenant may fill. One request of each tenant may always wait."""
    scheduling_policy: str = "dlpm"
    """How waiting requests are ordered: `dlpm` is fair between tenants and serves cached prefixes first within a bound,
    `vtc` takes strict turns between tenants, `fcfs` serves first who comes first, which is unfair and for comparison.
    """
    fairness_quantum: int | None = None
    """The most by which `dlpm` lets two tenants of weight 1 differ for cached prefixes, in prompt tokens; 0 means strict
    turns, and None is four steps of prompt tokens."""
    kv_price: float = 0.25
    """What holding all KV pages of the device for a second costs a tenant, as a part, from 0 to 1, of the prompt tokens
    that the device computes in a second.
    """
    cors_origin: tuple[str, ...] = ()
    """The origins, such as `https://chat.example.com`, whose web pages may call the gateway; `*` allows all.

    The variable has them with commas between. Without any, browsers refuse the answers to pages of other origins.
    """
    max_connections_per_address: int = 512
    """HTTP connections that one address may hold; 0 sets no limit. Addresses of this machine have no limit."""
    max_wrong_keys: int = 20
    """Wrong API keys that one address may send at once. It may send one more each second."""
    deadlines: Mapping[str, float] = field(default_factory=dict)
    """By service tier, seconds to the first token that a request without `x-deadline-ms` gets as its deadline."""
    objectives: Mapping[str, Objective] = field(default_factory=dict)
    """By service tier, what its requests are promised; `/metrics` shows burn rates and error budgets."""
    lease_s: float = 30.0
    """Seconds, 1 to 3600, after which others may have what a dead gateway held, such as places in limits."""
    max_uploads: int = 8
    max_tenant_uploads: int = 4
    """Uploads that the gateway, or one tenant, has in flight at most, at least 1. Each needs up to 512 MiB of disk."""
    upload_timeout_s: float = 1800.0
    """Seconds, 1 to 86400, in which the body of an upload must arrive; then it ends with a 408."""
    adapter_grace_s: float = 86_400.0
    """Seconds, 0 to 31536000, for which an adapter that was deleted can be restored; 0 erases it at once."""
    max_draft_tokens: int = 16
    """The most tokens drafted for one request in one step; 0 switches drafting off. Answers stay the same."""
    renew_calibration: bool = False
    """Whether engines measure this machine again at their start, in place of what `data_dir` has from an earlier one."""
    tool_call_form: str = "auto"
    """How the model writes tool calls: `auto`, `hermes`, `qwen`, `llama3_json`, `mistral` or `pythonic`.

    `auto` takes the form that the model's chat template shows.
    """
    log_level: str = "info"
    """`debug`, `info`, `warning` or `error`."""
    log_format: str = "auto"
    """`json`, `text` for people, or `auto`: text at a terminal, JSON elsewhere."""
    trace_share: float = 0.0
    """The part of the requests, from 0 to 1, that is traced without being asked for."""
    otlp_endpoint: str | None = None
    """The address to which traces are sent, such as `http://collector:4318`. It needs the extra `otel`."""
    otel_gen_ai: bool = False
    """Whether exported spans have the `gen_ai` attributes of OpenTelemetry's conventions for generative AI."""

    @classmethod
    def from_environment(cls, overrides: Mapping[str, object] | None = None) -> "Settings":
        """Reads each setting from `overrides`, or else from the variable `GRAFTWORK_<NAME>`. An override of None counts
        as missing.

        Raises InvalidRequest for a value that cannot be read, with the name of its variable or override, and for an
        override that is no setting.
        """
        given = {name: value for name, value in (overrides or {}).items() if value is not None}
        values: dict[str, Any] = {}
        for setting in fields(cls):
            variable = f"GRAFTWORK_{setting.name.upper()}"
            if setting.name in given:
                values[setting.name] = parse_setting(setting.name, setting.name, given.pop(setting.name))
            elif text := os.environ.get(variable, ""):
                values[setting.name] = parse_setting(setting.name, variable, text)
            elif text := os.environ.get(former := _FORMER_VARIABLES.get(setting.name, ""), ""):
                values[setting.name] = parse_setting(setting.name, former, text)
        if given:
            raise InvalidRequest(f"There is no setting named {min(given)!r}.", param=min(given))
        return cls(**values)

    @property
    def most_replicas(self) -> int:
        """The most engines that `serve` runs at one time."""
        return self.replicas if self.max_replicas is None else max(self.replicas, self.max_replicas)

    @property
    def resolved_database_url(self) -> str:
        """The address of the database with an async driver: `database_url`, or a SQLite file in `data_dir`."""
        if self.database_url is None:
            return f"sqlite+aiosqlite:///{self.data_dir / 'graftwork.db'}"
        return async_database_url(self.database_url)

    @property
    def engine_addresses(self) -> tuple[str, ...]:
        """The gRPC addresses of all engines: at least one."""
        return tuple(part.strip() for part in self.resolved_engine_address.split(",") if part.strip())

    @property
    def resolved_engine_address(self) -> str:
        """The gRPC address of the engine: `engine_address`, or the socket of the engine that this server starts itself."""
        return self.engine_address or f"unix:{self.data_dir.absolute() / 'engine.sock'}"


def async_database_url(url: str) -> str:
    """Returns the database address `url` with the async driver for its database, such as `postgresql+asyncpg://…`."""
    scheme, separator, rest = url.partition("://")
    drivers = {"postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg", "sqlite": "sqlite+aiosqlite"}
    return f"{drivers.get(scheme, scheme)}{separator}{rest}"


def parse_setting(name: str, source: str, value: object) -> object:
    """Returns a value in the type of its setting. `source` is where the value came from, such as a variable.

    Raises InvalidRequest for a value that cannot be used.
    """
    try:
        return _PARSERS[name](value)
    except (ValueError, TypeError) as error:
        shown = "The value" if name in _SECRET_NAMES else repr(value)
        raise InvalidRequest(f"{source}: {shown} cannot be used; {error}.", param=source) from error


_FORMER_VARIABLES: Mapping[str, str] = {"device_bytes": "GRAFTWORK_DEVICE_KV_BYTES"}
"""By setting, the former name of its variable. The former name is still read."""

_SECRET_NAMES = frozenset(setting.name for setting in fields(Settings) if not setting.repr)

_PARSERS: Mapping[str, Callable[[object], object]] = {
    "host": parse_text,
    "port": whole(0, 65535),
    "tls_cert": parse_path,
    "tls_key": parse_path,
    "metrics_host": parse_text,
    "metrics_port": whole(0, 65535),
    "data_dir": parse_path,
    "database_url": parse_text,
    "redis_url": parse_text,
    "model": parse_path,
    "served_model_name": parse_text,
    "demo": parse_flag,
    "engine_address": parse_text,
    "replicas": whole(0, 64),
    "max_replicas": whole(1, 64),
    "scale_first_token_s": seconds(0.01, 3600),
    "scale_down_after_s": seconds(1, 86400),
    "fleet": parse_fleet,
    "replica_id": parse_text,
    "advertise": parse_text,
    "generation": whole(1, 2**31 - 1),
    "drain_grace_s": seconds(0, 86400),
    "admin_key": parse_text,
    "pepper": parse_text,
    "engine_token": parse_token,
    "engine_tls_ca": parse_path,
    "engine_tls_cert": parse_path,
    "engine_tls_key": parse_path,
    "engine_tls_name": parse_text,
    "engine_silence_s": seconds(0.1, 3600),
    "step_timeout_s": seconds(0.1, 86400),
    "request_timeout_s": seconds(0.1, 604800),
    "device": parse_device,
    "dtype": one_of("auto", "float32", "bfloat16", "float16"),
    "tensor_parallel": whole(1, 8),
    "threads": whole(1, 1024),
    "device_bytes": parse_bytes,
    "memory_share": parse_share,
    "max_context_tokens": whole(1),
    "lora_pool_bytes": parse_bytes,
    "lora_host_bytes": parse_bytes,
    "kernels": one_of("auto", "native", "triton", "torch"),
    "lora_kernels": one_of("auto", "native", "triton", "torch"),
    "row_kernels": one_of("auto", "triton", "torch"),
    "attention_backend": one_of("auto", "triton", "torch"),
    "decode_graphs": one_of("auto", "off"),
    "host_kv_bytes": parse_bytes,
    "disk_kv_bytes": parse_bytes,
    "public_prompts": parse_path,
    "public_grammars": parse_path,
    "kv_dir": parse_path,
    "shared_kv_dir": parse_path,
    "kv_object_url": parse_text,
    "kv_object_bytes": parse_bytes,
    "max_batch_tokens": whole(1),
    "max_running": whole(1),
    "target_itl_ms": parse_milliseconds,
    "max_waiting": whole(1),
    "max_waiting_tokens": whole(1),
    "waiting_share": parse_fraction,
    "scheduling_policy": one_of("dlpm", "vtc", "fcfs"),
    "fairness_quantum": whole(0),
    "kv_price": parse_fraction,
    "cors_origin": parse_origins,
    "max_connections_per_address": whole(0),
    "max_wrong_keys": whole(1),
    "deadlines": parse_deadlines,
    "objectives": parse_objectives,
    "lease_s": seconds(1, 3600),
    "max_uploads": whole(1),
    "max_tenant_uploads": whole(1),
    "upload_timeout_s": seconds(1, 86400),
    "adapter_grace_s": seconds(0, 31_536_000),
    "max_draft_tokens": whole(0, 256),
    "renew_calibration": parse_flag,
    "tool_call_form": one_of("auto", "hermes", "qwen", "llama3_json", "mistral", "pythonic"),
    "log_level": one_of("debug", "info", "warning", "error"),
    "log_format": one_of("auto", "json", "text"),
    "trace_share": parse_fraction,
    "otlp_endpoint": parse_text,
    "otel_gen_ai": parse_flag,
}


SETTING_NAMES = tuple(setting.name for setting in fields(Settings))
PATH_NAMES = frozenset(name for name, parse in _PARSERS.items() if parse is parse_path)
"""The settings that are paths of files or folders."""


def child_environment(defaults: Mapping[str, str], overrides: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment variables for a child process: all variables of this process, and those that are given.

    If a variable is in several, that of `overrides` is used, or else that of this process.
    """
    return {**defaults, **os.environ, **(overrides or {})}


def time_zone() -> dict[str, str]:
    """Returns the environment variable of the time zone, for a child process. Returns {} if it is not set."""
    return {"TZ": os.environ["TZ"]} if "TZ" in os.environ else {}


def wants_colours() -> bool:
    """Returns whether the user allows colours at a terminal: https://no-color.org."""
    return not os.environ.get("NO_COLOR")
