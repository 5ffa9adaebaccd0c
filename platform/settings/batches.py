"""The settings of one subject: tenants' files, batches of requests, and exports."""

from dataclasses import dataclass

from graftwork.platform.settings.setting import setting
from graftwork.platform.settings.values import parse_bytes, seconds, whole


@dataclass(frozen=True)
class BatchSettings:
    """Tenants' files, batches of requests, and exports."""

    max_batch_file_bytes: int = setting(200 * 2**20, parse_bytes)
    """Bytes of one uploaded file, at most 256 MiB."""
    tenant_file_bytes: int = setting(10 * 2**30, parse_bytes)
    """Bytes of all files of a tenant whose quota has no `max_file_bytes`."""
    file_retention_s: float = setting(30 * 86_400.0, seconds(3600, 31_536_000))
    """Seconds, 3600 to 31536000, after which files and ended batches are deleted."""
    export_retention_s: float = setting(7 * 86_400.0, seconds(3600, 31_536_000))
    """Seconds, 3600 to 31536000, for which the archive of a tenant's export is kept after its end."""
    max_batch_requests: int = setting(50_000, whole(1, 1_000_000))
    """Requests of one batch, at least 1."""
    max_open_batches: int = setting(100, whole(1))
    """Batches of one tenant that have not ended, at least 1."""
    batch_concurrency: int = setting(16, whole(0, 4096))
    """Requests of batches that one gateway runs at the same time, 0 to 4096; 0 leaves batches to other gateways."""
    tenant_batch_concurrency: int = setting(8, whole(1, 1024))
    """The same for the batches of one tenant, 1 to 1024. A tenant also has at most half of its concurrent requests."""
