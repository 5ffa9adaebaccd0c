"""Parses the values of settings: text from the command line or from a variable, or a value that has its type already.

Each parser returns the value in the type of the setting, or raises ValueError with what to give instead.
Never knows which setting it parses.
"""

import re
from collections.abc import Callable
from ipaddress import ip_network
from pathlib import Path

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB|kB|MB|GB|TB)?")
_ORIGIN = re.compile(r"https?://[a-z0-9.\-]+(:\d+)?|https?://\[[0-9a-f:.]+\](:\d+)?|[a-z][a-z0-9+.\-]*://[a-z0-9.\-]+")
_HUB_NAME = re.compile(r"hf:[\w.-]+/[\w.-]+(@[\w./-]+)?")
_BUCKET_URL = re.compile(r"[a-z0-9]+://[\w.-]+(/[^?#\s]+)?")
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


def parse_bytes(value: object) -> int:
    """Returns a size in bytes. `value` is an integer, or text such as `512MiB`, `2GiB` or `1.5GB`. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    matched = _SIZE.fullmatch(str(value).strip())
    if matched is None:
        raise ValueError("give a size such as 536870912, 512MiB or 2GiB")
    return int(float(matched[1]) * _BYTES_BY_UNIT[matched[2] or "B"])


def parse_text(value: object) -> str:
    return str(value)


def parse_path(value: object) -> Path:
    return Path(str(value)).expanduser()


class ModelReference(str):
    """Where a model is that is no folder of this machine: `hf:ORGANISATION/NAME@REVISION`, or the URL of a bucket."""

    __slots__ = ()

    @property
    def is_on_hub(self) -> bool:
        return self.startswith("hf:")

    @property
    def repository(self) -> str:
        """The model's name on the Hub, without the revision."""
        return self.removeprefix("hf:").partition("@")[0]

    @property
    def revision(self) -> str:
        """The branch, tag or commit on the Hub; empty for the default branch."""
        return self.partition("@")[2] if self.is_on_hub else ""

    @property
    def name(self) -> str:
        """The last part of the name: what clients call the model, if the operator sets no other name."""
        return (self.repository if self.is_on_hub else self).rstrip("/").rpartition("/")[2]


def parse_model(value: object) -> Path | ModelReference:
    """Parses where a model is: a folder, a name on the Hub with a revision, or a bucket with a prefix."""
    text = str(value)
    if text.startswith("hf:"):
        if not _HUB_NAME.fullmatch(text):
            raise ValueError("write hf:ORGANISATION/NAME@REVISION")
        return ModelReference(text)
    if text.startswith(("s3://", "gs://", "az://")):
        if not _BUCKET_URL.fullmatch(text):
            raise ValueError("write s3://BUCKET/PREFIX")
        return ModelReference(text)
    return parse_path(value)


def parse_token(value: object) -> str:
    """Parses a secret that travels in a header."""
    if not re.fullmatch(r"[!-~]{16,512}", str(value)):
        raise ValueError("give 16 to 512 letters, digits and signs of ASCII, without spaces")
    return str(value)


def parse_flag(value: object) -> bool:
    if str(value).lower() in ("1", "true", "yes", "on"):
        return True
    if str(value).lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("give true or false")


def whole(minimum: int, maximum: int = 2**31) -> Callable[[object], int]:
    """Returns a parser of whole numbers from `minimum` to `maximum`."""

    def parse(value: object) -> int:
        if not re.fullmatch(r"-?\d+", str(value).strip()) or not minimum <= int(str(value)) <= maximum:
            raise ValueError(f"give a whole number from {minimum} to {maximum}")
        return int(str(value))

    return parse


def parse_cores(value: object) -> tuple[int, ...]:
    """Parses numbers of cores: a list, or text such as `1`, `0,2` or `2-7`."""
    parts = [str(part).strip() for part in (value if isinstance(value, list | tuple) else str(value).split(","))]
    matched = [re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part) for part in parts]
    ranges = [range(int(one[1]), int(one[2] or one[1]) + 1) for one in matched if one]
    if len(ranges) < len(parts) or not all(ranges):
        raise ValueError("give numbers of cores, from 0, such as 1, 0,2 or 2-7")
    return tuple(sorted({core for cores in ranges for core in cores}))


def parse_fraction(value: object) -> float:
    """Parses a number from 0 to 1."""
    if not re.fullmatch(r"0|1|[01]?\.\d+", str(value).strip()) or float(str(value)) > 1:
        raise ValueError("give a number from 0 to 1")
    return float(str(value))


def parse_share(value: object) -> float:
    """Parses a number above 0, up to 1."""
    share = parse_fraction(value)
    if not share:
        raise ValueError("give a number above 0, up to 1")
    return share


def seconds(minimum: float, maximum: float) -> Callable[[object], float]:
    """Returns a parser of times in seconds, from `minimum` to `maximum`."""

    def parse(value: object) -> float:
        if not re.fullmatch(r"\d+(\.\d+)?", str(value).strip()) or not minimum <= float(str(value)) <= maximum:
            raise ValueError(f"give a number of seconds from {minimum:g} to {maximum:g}")
        return float(str(value))

    return parse


def parse_milliseconds(value: object) -> float:
    """Parses a number of milliseconds, from 0 to one minute."""
    if not re.fullmatch(r"\d+(\.\d+)?", str(value).strip()) or float(str(value)) > 60_000:
        raise ValueError("give a number of milliseconds from 0 to 60000")
    return float(str(value))


def parse_origins(value: object) -> tuple[str, ...]:
    """Parses origins: a list, or text with commas between them."""
    origins = value if isinstance(value, list | tuple) else str(value).split(",")
    found = tuple(str(origin).strip() for origin in origins)
    if not all(origin == "*" or _ORIGIN.fullmatch(origin) for origin in found):
        raise ValueError("give origins such as https://chat.example.com or http://localhost:3000, without a path, or *")
    return found


def parse_networks(value: object) -> tuple[str, ...]:
    """Parses IP networks: a list, or text with commas between them."""
    networks = value if isinstance(value, list | tuple) else str(value).split(",")
    try:
        return tuple(str(ip_network(str(network).strip())) for network in networks)
    except ValueError:
        raise ValueError("give networks such as 10.1.0.0/16 or fd00::/8, with no bits behind the prefix") from None


def one_of(*choices: str) -> Callable[[object], str]:
    """Returns a parser that accepts `choices`, in upper or lower case."""

    def parse(value: object) -> str:
        if str(value).lower() not in choices:
            raise ValueError(f"give one of {', '.join(choices)}")
        return str(value).lower()

    return parse


def parse_fleet(value: object) -> str:
    if str(value).lower() == "ray":
        raise ValueError("start engines on Ray with `graftwork fleet start`, and give gateways and engines `leases`")
    return one_of("static", "leases")(value)


def parse_device(value: object) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(value).lower()):
        raise ValueError("give auto, cpu, cuda or cuda:N")
    return str(value).lower()
