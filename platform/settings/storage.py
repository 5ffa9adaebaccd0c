"""The settings of one subject: where data is kept, and the secrets that protect it."""

from dataclasses import dataclass
from pathlib import Path

from graftwork.platform.settings.setting import setting
from graftwork.platform.settings.values import parse_bytes, parse_flag, parse_path, parse_text, seconds, whole


@dataclass(frozen=True)
class StorageSettings:
    """Where data is kept, and the secrets that protect it."""

    data_dir: Path = setting(Path("./graftwork-data"), parse_path)
    """The folder of keys, the embedded database, adapters and sockets."""
    database_url: str | None = setting(None, parse_text, is_secret=True)
    """The address of the database: `postgresql://…` or `sqlite+aiosqlite:///…`. None uses a file in `data_dir`."""
    redis_url: str | None = setting(None, parse_text, is_secret=True)
    """The address of the Redis in which several gateways share their limits. None keeps limits in this process."""
    admin_key: str | None = setting(None, parse_text, is_secret=True)
    """The admin key. None makes one at first start, in `data_dir`."""
    pepper: str | None = setting(None, parse_text, is_secret=True)
    """The secret that key hashes depend on. If it is lost, no key works any more. None makes one at first start."""
    master_key_file: Path | None = setting(None, parse_path)
    """The file of master keys (`graftwork db master-key create`). With it, transcripts and files are encrypted."""
    encrypt_kv_files: bool = setting(False, parse_flag)
    """Whether engines encrypt the KV files of each tenant with a key of its own. It needs `master_key_file`, and
    certificates (`engine_tls_ca`) if engines are on other machines or have leases.
    """
    kv_dir: Path | None = setting(None, parse_path)
    """The folder of the KV files. Engines must not share one. None is `kv` in `data_dir`."""
    shared_kv_dir: Path | None = setting(None, parse_path)
    """A folder of KV files that engines share, in place of `kv_dir`. Each engine reads what the others have written."""
    host_kv_bytes: int | None = setting(None, parse_bytes)
    """Bytes of host memory for the KV of idle sessions. None is the engine's default; 0 turns this tier off."""
    disk_kv_bytes: int | None = setting(None, parse_bytes)
    """Bytes of KV in files under the data folder, which outlive the engine. None is 2 GiB; 0 turns this tier off."""
    kv_object_url: str | None = setting(None, parse_text)
    """A bucket in which engines share KV files, such as `s3://bucket/prefix`; each keeps its own on disk, too."""
    kv_object_bytes: int = setting(64 * 2**30, parse_bytes)
    """Bytes of KV that all engines together keep in the bucket."""
    public_prompts: Path | None = setting(None, parse_path)
    """A text file, or a folder of text files: system prompts whose KV all tenants may share."""
    public_grammars: Path | None = setting(None, parse_path)
    """A folder of JSON schemas (`.json`) whose compiled grammars all tenants share."""
    event_retention_s: float = setting(30 * 86_400.0, seconds(172_800, 315_360_000))
    """Seconds, 172800 to 315360000, for which the events of a turn can be replayed after its end. Its items stay."""
    usage_retention_days: int | None = setting(None, whole(62, 36_500))
    """Days, at least 62, after which the usage of single requests is deleted; their sums stay. None keeps it for ever."""
    usage_archive_dir: Path | None = setting(None, parse_path)
    """A folder to which the usage of single requests is written before it is deleted. None writes it nowhere."""
