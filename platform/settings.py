"""Reads the settings of a process. No other module of the server reads environment variables.

Owns the name, the default and the allowed values of every setting. Never opens a file or a connection.

Each value comes from the command line (`overrides`) if it is given there; if not, from the variable `GRAFTWORK_<NAME>`;
if that is not set, it is the default. The settings' repr does not show secrets, nor addresses that may contain one.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from graftwork.platform.errors import InvalidRequest

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB|kB|MB|GB|TB)?")
_ORIGIN = re.compile(r"https?://[a-z0-9.\-]+(:\d+)?|https?://\[[0-9a-f:.]+\](:\d+)?|[a-z][a-z0-9+.\-]*://[a-z0-9.\-]+")
_BYTES_BY_UNIT = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


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
    demo: bool = False
    engine_address: str | None = None
    """The gRPC address of the engine. None starts an engine as a child of this process."""
    admin_key: str | None = field(default=None, repr=False)
    """The admin key. None makes one at first start, in `data_dir`."""
    pepper: str | None = field(default=None, repr=False)
    """The secret that key hashes depend on. If it is lost, no key works any more. None makes one at first start."""
    engine_token: str | None = field(default=None, repr=False)
    """The secret that an engine demands of its gateways. An engine that other machines can reach needs one. `serve`
    makes one for its own engine at each start.
    """
    engine_silence_s: float = 5.0
    """Seconds, 0.1 to 3600: if the engine's process answers no ping for so long, its requests end with a 503. The
    engine that `serve` started is killed and started again after four times as long.
    """
    step_timeout_s: float = 120.0
    """Seconds, 0.1 to 86400: if the engine works for so long without finishing one layer of the model, its requests end
    with a 503. The engine that `serve` started is killed and started again.
    """
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
    lora_kernels: str = "auto"
    """How adapters are applied: `auto`, `native` (CPU), `triton` (CUDA) or `torch`.

    `auto` takes `triton` on CUDA and `native` on a CPU, if they work there, else `torch`.
    """
    row_kernels: str = "auto"
    """How norms, the rotary embedding, the write of KV and activations are computed: `auto`, `triton` (CUDA) or `torch`.

    `auto` takes `triton` on CUDA if it works there, else `torch`.
    """
    attention_backend: str = "auto"
    """How attention is computed: `auto`, `triton` (CUDA) or `torch`.

    `auto` takes `triton` on CUDA, if it works there, else `torch`.
    """
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
    max_batch_tokens: int | None = None
    """Tokens of one engine step, at least 1. More tokens give more throughput and longer steps. None is the engine's
    default for the device.
    """
    max_running: int | None = None
    """The most requests in one step, at least 1. None is the engine's default for the device."""
    target_itl_ms: float | None = None
    """The inter-token latency that prompts may cost running streams, in milliseconds: how long a step with both may be. 0
    sets no limit. None is the engine's default for the device.
    """
    max_waiting: int = 256
    """The most requests in the queue, at least 1. When it is full, the tenant with the most requests in it gets a status
    429: for its new request, or for its last one in the queue if a tenant with fewer requests sends one.
    """
    max_waiting_tokens: int = 2**20
    """The most prompt tokens in the queue, at least 1."""
    waiting_share: float = 0.75
    """The part of the queue, from 0 to 1, that one tenant may fill. One request of each tenant may always wait."""
    cors_origin: tuple[str, ...] = ()
    """The origins, such as `https://chat.example.com`, whose web pages may call the gateway; `*` allows all.

    The variable has them with commas between. Without any, browsers refuse the answers to pages of other origins.
    """
    max_connections_per_address: int = 512
    """HTTP connections that one address may hold; 0 sets no limit. Addresses of this machine have no limit."""
    max_wrong_keys: int = 20
    """Wrong API keys that one address may send at once. It may send one more each second."""
    lease_s: float = 30.0
    """Seconds, 1 to 3600, after which others may have what a dead gateway held, such as places in limits."""
    max_uploads: int = 8
    """Uploads of adapters that the gateway receives at the same time, at least 1. Each needs up to 512 MiB of disk."""
    max_tenant_uploads: int = 4
    """Uploads of one tenant at the same time, at least 1."""
    upload_timeout_s: float = 1800.0
    """Seconds, 1 to 86400, in which the body of an upload must arrive; then it ends with a 408."""
    max_draft_tokens: int = 16
    """The most tokens drafted for one request in one step; 0 switches drafting off. Drafting does not change answers.
    """
    tool_call_form: str = "auto"
    """How the model writes tool calls: `auto`, `hermes`, `qwen`, `llama3_json`, `mistral` or `pythonic`.

    `auto` takes the form that the model's chat template shows.
    """
    log_level: str = "info"
    """`debug`, `info`, `warning` or `error`."""

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
                values[setting.name] = _parse(setting.name, setting.name, given.pop(setting.name))
            elif text := os.environ.get(variable, ""):
                values[setting.name] = _parse(setting.name, variable, text)
            elif text := os.environ.get(former := _FORMER_VARIABLES.get(setting.name, ""), ""):
                values[setting.name] = _parse(setting.name, former, text)
        if given:
            raise InvalidRequest(f"There is no setting named {min(given)!r}.", param=min(given))
        return cls(**values)

    @property
    def resolved_database_url(self) -> str:
        """The address of the database with an async driver: `database_url`, or a SQLite file in `data_dir`."""
        if self.database_url is None:
            return f"sqlite+aiosqlite:///{self.data_dir / 'graftwork.db'}"
        return async_database_url(self.database_url)

    @property
    def resolved_engine_address(self) -> str:
        """The gRPC address of the engine: `engine_address`, or the socket of the engine that this server starts itself."""
        return self.engine_address or f"unix:{self.data_dir.absolute() / 'engine.sock'}"


def async_database_url(url: str) -> str:
    """Returns the database address `url` with the async driver for its database, such as `postgresql+asyncpg://…`."""
    scheme, separator, rest = url.partition("://")
    drivers = {"postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg", "sqlite": "sqlite+aiosqlite"}
    return f"{drivers.get(scheme, scheme)}{separator}{rest}"


def parse_bytes(value: object) -> int:
    """Returns a size in bytes. `value` is an integer, or text such as `512MiB`, `2GiB` or `1.5GB`. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    matched = _SIZE.fullmatch(str(value).strip())
    if matched is None:
        raise ValueError("give a size such as 536870912, 512MiB or 2GiB")
    return int(float(matched[1]) * _BYTES_BY_UNIT[matched[2] or "B"])


def _parse(name: str, source: str, value: object) -> object:
    """Returns a value in the type of its setting. `source` is the variable or override that the value came from."""
    try:
        return _PARSERS[name](value)
    except (ValueError, TypeError) as error:
        shown = "The value" if name in _SECRET_NAMES else repr(value)
        raise InvalidRequest(f"{source}: {shown} cannot be used; {error}.", param=source) from error


def _text(value: object) -> str:
    return str(value)


def _path(value: object) -> Path:
    return Path(str(value)).expanduser()


def _token(value: object) -> str:
    """Parses a secret that travels in a header."""
    if not re.fullmatch(r"[!-~]{16,512}", str(value)):
        raise ValueError("give 16 to 512 letters, digits and signs of ASCII, without spaces")
    return str(value)


def _flag(value: object) -> bool:
    if str(value).lower() in ("1", "true", "yes", "on"):
        return True
    if str(value).lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("give true or false")


def _whole(minimum: int, maximum: int = 2**31) -> Callable[[object], int]:
    """Returns a parser of whole numbers from `minimum` to `maximum`."""

    def parse(value: object) -> int:
        if not re.fullmatch(r"-?\d+", str(value).strip()) or not minimum <= int(str(value)) <= maximum:
            raise ValueError(f"give a whole number from {minimum} to {maximum}")
        return int(str(value))

    return parse


def _fraction(value: object) -> float:
    """Parses a number from 0 to 1."""
    if not re.fullmatch(r"0|1|[01]?\.\d+", str(value).strip()) or float(str(value)) > 1:
        raise ValueError("give a number from 0 to 1")
    return float(str(value))


def _share(value: object) -> float:
    """Parses a number above 0, up to 1."""
    share = _fraction(value)
    if not share:
        raise ValueError("give a number above 0, up to 1")
    return share


def _seconds(minimum: float, maximum: float) -> Callable[[object], float]:
    """Returns a parser of times in seconds, from `minimum` to `maximum`."""

    def parse(value: object) -> float:
        if not re.fullmatch(r"\d+(\.\d+)?", str(value).strip()) or not minimum <= float(str(value)) <= maximum:
            raise ValueError(f"give a number of seconds from {minimum:g} to {maximum:g}")
        return float(str(value))

    return parse


def _milliseconds(value: object) -> float:
    """Parses a number of milliseconds, from 0 to one minute."""
    if not re.fullmatch(r"\d+(\.\d+)?", str(value).strip()) or float(str(value)) > 60_000:
        raise ValueError("give a number of milliseconds from 0 to 60000")
    return float(str(value))


def _origins(value: object) -> tuple[str, ...]:
    """Parses origins: a list, or text with commas between them."""
    origins = value if isinstance(value, list | tuple) else str(value).split(",")
    found = tuple(str(origin).strip() for origin in origins)
    if not all(origin == "*" or _ORIGIN.fullmatch(origin) for origin in found):
        raise ValueError("give origins such as https://chat.example.com or http://localhost:3000, without a path, or *")
    return found


def _one_of(*choices: str) -> Callable[[object], str]:
    """Returns a parser that accepts `choices`, in upper or lower case."""

    def parse(value: object) -> str:
        if str(value).lower() not in choices:
            raise ValueError(f"give one of {', '.join(choices)}")
        return str(value).lower()

    return parse


def _device(value: object) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(value).lower()):
        raise ValueError("give auto, cpu, cuda or cuda:N")
    return str(value).lower()


_FORMER_VARIABLES: Mapping[str, str] = {"device_bytes": "GRAFTWORK_DEVICE_KV_BYTES"}
"""By setting, the former name of its variable. The former name is still read."""

_SECRET_NAMES = frozenset(setting.name for setting in fields(Settings) if not setting.repr)

_PARSERS: Mapping[str, Callable[[object], object]] = {
    "host": _text,
    "port": _whole(0, 65535),
    "tls_cert": _path,
    "tls_key": _path,
    "metrics_host": _text,
    "metrics_port": _whole(0, 65535),
    "data_dir": _path,
    "database_url": _text,
    "redis_url": _text,
    "model": _path,
    "demo": _flag,
    "engine_address": _text,
    "admin_key": _text,
    "pepper": _text,
    "engine_token": _token,
    "engine_silence_s": _seconds(0.1, 3600),
    "step_timeout_s": _seconds(0.1, 86400),
    "request_timeout_s": _seconds(0.1, 604800),
    "device": _device,
    "dtype": _one_of("auto", "float32", "bfloat16", "float16"),
    "tensor_parallel": _whole(1, 8),
    "threads": _whole(1, 1024),
    "device_bytes": parse_bytes,
    "memory_share": _share,
    "max_context_tokens": _whole(1),
    "lora_pool_bytes": parse_bytes,
    "lora_host_bytes": parse_bytes,
    "lora_kernels": _one_of("auto", "native", "triton", "torch"),
    "row_kernels": _one_of("auto", "triton", "torch"),
    "attention_backend": _one_of("auto", "triton", "torch"),
    "decode_graphs": _one_of("auto", "off"),
    "host_kv_bytes": parse_bytes,
    "disk_kv_bytes": parse_bytes,
    "public_prompts": _path,
    "public_grammars": _path,
    "kv_dir": _path,
    "max_batch_tokens": _whole(1),
    "max_running": _whole(1),
    "target_itl_ms": _milliseconds,
    "max_waiting": _whole(1),
    "max_waiting_tokens": _whole(1),
    "waiting_share": _fraction,
    "cors_origin": _origins,
    "max_connections_per_address": _whole(0),
    "max_wrong_keys": _whole(1),
    "lease_s": _seconds(1, 3600),
    "max_uploads": _whole(1),
    "max_tenant_uploads": _whole(1),
    "upload_timeout_s": _seconds(1, 86400),
    "max_draft_tokens": _whole(0, 256),
    "tool_call_form": _one_of("auto", "hermes", "qwen", "llama3_json", "mistral", "pythonic"),
    "log_level": _one_of("debug", "info", "warning", "error"),
}


def child_environment(defaults: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables for a child process: all variables of this process, and `defaults`.

    If a variable is in both, the value of this process is used.
    """
    return {**defaults, **os.environ}


def time_zone() -> dict[str, str]:
    """Returns the environment variable of the time zone, for a child process. Returns {} if it is not set."""
    return {"TZ": os.environ["TZ"]} if "TZ" in os.environ else {}
