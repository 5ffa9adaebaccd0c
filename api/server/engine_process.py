"""The engine as a process of its own: what `graftwork engine` runs, and what the supervisor starts as its child.

A child gets its settings as the first line of its standard input, so that nothing shows in the process list, and
lives no longer than that pipe: when the parent goes, in whatever way, the pipe closes and the child ends.
Importing this module loads no torch; running an engine does.
"""

import json
import os
import signal
import sys
import threading
from dataclasses import fields
from functools import partial

from graftwork.api.server.served_model import model_dtype, model_folder, model_name
from graftwork.engine.core.config import EngineConfig
from graftwork.platform.logs import configure_logging
from graftwork.platform.settings import Settings

ARTIFACTS_FOLDER = "artifacts"
"""Under the data folder; the gateway writes adapters there and the engine reads them."""

KV_FOLDER = "kv"
"""Under the data folder, unless another is named; the engine's own."""

_BUDGETS = ("device_bytes", "host_kv_bytes", "lora_pool_bytes", "lora_host_bytes")
_DISK_KV_BYTES = 2 * 2**30
_GRACE_S = 10.0
"""How long an engine whose parent has gone may take to end by itself."""
_SECRETS = frozenset({"admin_key", "pepper", "database_url", "redis_url"})
"""The engine has no use for them, so it is not told."""


def run_engine(settings: Settings, listen: str) -> None:
    """Serve the model at `listen` (a gRPC address) until SIGTERM or SIGINT. Blocks. Raises InvalidRequest."""
    settings.check_served()
    from graftwork.adapters.registry.weights import ArtifactAdapterSource
    from graftwork.engine.rpc.server import serve_engine

    budgets = {name: getattr(settings, name) for name in _BUDGETS}
    sizes = {name: value for name, value in budgets.items() if value is not None}
    config = EngineConfig(
        model=model_folder(settings),
        model_name=model_name(settings),
        device=settings.device,
        dtype=model_dtype(settings),
        threads=settings.threads,
        lora_kernels=settings.lora_kernels,
        max_batch_tokens=settings.max_batch_tokens,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        max_draft_tokens=settings.max_draft_tokens,
        disk_kv_bytes=_DISK_KV_BYTES if settings.disk_kv_bytes is None else settings.disk_kv_bytes,
        kv_folder=settings.kv_dir or settings.data_dir / KV_FOLDER,
        **sizes,
    )
    serve_engine(config, partial(ArtifactAdapterSource, settings.data_dir / ARTIFACTS_FOLDER), listen)


def child_command() -> list[str]:
    return [sys.executable, "-m", "graftwork.api.server.engine_process"]


def child_orders(settings: Settings, listen: str) -> bytes:
    """The line that a child is sent: where to listen, and every setting it needs."""
    values = {setting.name: getattr(settings, setting.name) for setting in fields(settings)}
    told = {name: value for name, value in values.items() if name not in _SECRETS and value is not None}
    return json.dumps({"listen": listen, "settings": told}, default=str).encode() + b"\n"


def main() -> None:
    """A child's life: read the orders, watch the pipe they came through, serve."""
    lifeline = sys.stdin.fileno()
    orders = json.loads(_read_line(lifeline))
    watch_parent(lifeline)
    settings = Settings.from_environment(orders["settings"])
    configure_logging(settings.log_level)
    run_engine(settings, orders["listen"])


def watch_parent(lifeline: int) -> None:
    """End this process with SIGTERM, and if need be without asking, once the pipe's only writer is gone."""
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()


def _read_line(descriptor: int) -> bytes:
    """Unbuffered: a thread that waits in a buffered reader would hold its lock when the interpreter ends."""
    line = b""
    while not line.endswith(b"\n") and (read := os.read(descriptor, 1)):
        line += read
    return line


def _end_with_parent(lifeline: int) -> None:
    while os.read(lifeline, 1024):
        continue
    threading.Timer(_GRACE_S, os._exit, args=(1,)).start()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
