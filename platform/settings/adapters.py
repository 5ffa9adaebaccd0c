"""The settings of one subject: how adapters reach the server, and where they are stored."""

import re
from dataclasses import dataclass

from graftwork.platform.settings.setting import setting
from graftwork.platform.settings.values import parse_bytes, parse_networks, parse_text, seconds, whole

_RULE = re.compile(
    r"hf:([\w.-]+(/[\w.-]+)?/?)?|https:(//[a-z0-9.:\[\]-]+(/[\w./{}-]*)?)?|s3://[a-z0-9.-]+(/[\w./{}=+-]*)?"
)


def parse_sources(value: object) -> tuple[str, ...]:
    """Parses beginnings of sources: a list, or text with commas between them. `none` is the empty list."""
    found = [str(one).strip() for one in (value if isinstance(value, list | tuple) else str(value).split(","))]
    if [one.lower() for one in found] == ["none"]:
        return ()
    if not all(_RULE.fullmatch(one) for one in found):
        raise ValueError(
            "give none, or beginnings of sources such as hf:, hf:acme/, https:, https://models.example.com/ or "
            "s3://models/{tenant}/"
        )
    return tuple(found)


@dataclass(frozen=True)
class AdapterSettings:
    """How adapters reach the server, and where they are stored."""

    max_upload_bytes: int = setting(4 * 2**30, parse_bytes)
    """Bytes of the weights of an upload in parts, or of an adapter that the server fetches."""
    max_open_uploads: int = setting(8, whole(1, 10_000))
    """Uploads in parts and fetches of one tenant that have not ended, at least 1."""
    staged_upload_bytes: int = setting(64 * 2**30, parse_bytes)
    """Bytes that the open uploads and fetches of all tenants may take in the data folder."""
    upload_expires_s: float = setting(86_400.0, seconds(60, 2_592_000))
    """Seconds, 60 to 2592000, after which an upload in parts or a fetch is removed."""
    adapter_sources: tuple[str, ...] = setting(("hf:", "https:"), parse_sources)
    """From where the server fetches adapters for tenants: beginnings of sources, such as `hf:acme/`; `none` switches it off.

    The variable has them with commas between. `{tenant}` stands for the tenant's id. Buckets must be named one by one.
    """
    adapter_source_networks: tuple[str, ...] = setting((), parse_networks)
    """Networks, such as `10.1.0.0/16`, that `https:` sources may be in although they are not public."""
    adapter_hub_token: str | None = setting(None, parse_text, is_secret=True)
    """A token of the Hugging Face Hub, for repositories of organisations that `adapter_sources` names, such as `hf:acme/`.

    All tenants can then fetch from the private repositories of these organisations that the token may read.
    """
    artifact_url: str | None = setting(None, parse_text)
    """A bucket that stores adapters, such as `s3://bucket/prefix`. None stores them in `data_dir`."""
    artifact_cache_bytes: int = setting(32 * 2**30, parse_bytes)
    """Bytes of copies that each server keeps of the adapters in the bucket."""
