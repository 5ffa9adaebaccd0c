"""Runs the engine's process, either for `graftwork engine` or as the child of a gateway (see `engine_supervisor`).

A child gets its settings as the first line of its standard input, so that the process list does not show them. The
child watches that pipe: when the parent ends, for any reason, the pipe closes and the child ends too.
Never loads torch when the module is imported. Running an engine loads torch.
"""

import json
import logging
import os
import sys
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from graftwork.api.server.served_model import (
    draft_head_folder,
    draft_model_folder,
    model_dtype,
    model_folder,
    model_name,
)
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.model.fingerprint import FingerprintReading, KeptDigests
from graftwork.engine.rpc.codec import error_from_wire, error_to_wire
from graftwork.engine.rpc.engine_pb2 import Failed
from graftwork.platform.clock import SystemClock
from graftwork.platform.cores import run_on_engine_cores
from graftwork.platform.errors import DEVICE_LOST, GraftworkError
from graftwork.platform.memory import without_collections
from graftwork.platform.settings.settings import Settings
from graftwork.platform.tracing.logs import configure_logging
from graftwork.platform.worker_slots import watch_parent

if TYPE_CHECKING:
    from graftwork.adapters.registry.artifact_store import ArtifactStore
    from graftwork.engine.rpc.server import Membership

logger = logging.getLogger(__name__)

ARTIFACTS_FOLDER = "artifacts"
"""The folder inside the data folder to which the gateway writes adapters, and from which the engine reads them."""

KV_FOLDER = "kv"
"""The default folder for files of KV pages, inside the data folder. Only one engine may use this folder."""

CALIBRATION_FOLDER = "calibration"
"""The folder inside the data folder with what engines have measured at their start."""

_SIZES = (
    "device_bytes",
    "host_kv_bytes",
    "lora_pool_bytes",
    "lora_host_bytes",
    "draft_kv_bytes",
    "max_context_tokens",
    "max_batch_tokens",
    "max_running",
    "target_itl_ms",
)
"""The settings that the engine chooses itself if they are None."""
DISK_KV_BYTES = 2 * 2**30
"""Bytes of KV files of one engine, if the settings name none."""
_FORMER_KERNEL_SETTINGS = ("lora_kernels", "row_kernels", "attention_backend")
_UNTOLD = frozenset({"admin_key", "pepper", "database_url", "redis_url", "deadlines", "objectives"})
"""The settings that are not sent to the engine: secrets, and what only the gateway uses."""


def run_engine(settings: Settings, listen: str, *, has_supervisor: bool = False, epoch: int | None = None) -> None:
    """Serves the model at the gRPC address `listen` until SIGTERM or SIGINT. Blocks the caller until then.

    Without a supervisor, ends the process with a status of its own (STUCK_STATUS) if the loop is stuck for longer than
    `step_timeout_s`. `epoch` is the epoch that the supervisor has given this engine.
    Raises InvalidRequest for wrong settings and for a model that cannot be served.
    """
    configure_logging(settings.log_level, form=settings.log_format)
    if settings.engine_cores is not None:
        run_on_engine_cores(settings.engine_cores)
    folder, kept = model_folder(settings), settings.data_dir / CALIBRATION_FOLDER
    # the disk reads while this process imports torch
    files = FingerprintReading(folder, KeptDigests(kept, folder, SystemClock(), renew=settings.renew_calibration))
    with without_collections():
        from graftwork.engine.build.devices import ModelReading

        warn_of_former_settings(settings)
        config = _engine_config(settings)
        reading = ModelReading(config, files)  # and weights are copied while it imports the rest
        from graftwork.adapters.registry.weights import ArtifactAdapterSource
        from graftwork.api.server.tls import engine_tls
        from graftwork.engine.rpc.server import serve_engine

    serve_engine(
        config,
        partial(ArtifactAdapterSource, artifact_store(settings)),
        listen,
        settings.engine_token,
        step_limit_s=None if has_supervisor else settings.step_timeout_s,
        membership=_membership(settings, listen, epoch, has_supervisor=has_supervisor),
        tls=engine_tls(settings),
        reading=reading,
    )


def _engine_config(settings: Settings) -> EngineConfig:
    """Returns what the settings mean for the engine."""
    sizes = {name: value for name in _SIZES if (value := getattr(settings, name)) is not None}
    return EngineConfig(
        model=model_folder(settings),
        model_name=model_name(settings),
        device=settings.device,
        tensor_parallel=settings.tensor_parallel,
        dtype=model_dtype(settings),
        kv_dtype=settings.kv_dtype,
        activation_dtype=settings.activation_dtype,
        quantization=settings.quantization,
        threads=settings.threads,
        kernels=settings.kernels,
        lora_kernels=settings.lora_kernels,
        row_kernels=settings.row_kernels,
        attention_backend=settings.attention_backend,
        cuda_graphs=settings.cuda_graphs,
        memory_share=settings.memory_share,
        max_waiting=settings.max_waiting,
        max_waiting_tokens=settings.max_waiting_tokens,
        waiting_share=settings.waiting_share,
        scheduling_policy=settings.scheduling_policy,
        fairness_quantum=settings.fairness_quantum,
        kv_price=settings.kv_price,
        public_grammars=settings.public_grammars,
        max_draft_tokens=settings.max_draft_tokens,
        **_draft_folders(settings),
        disk_kv_bytes=DISK_KV_BYTES if settings.disk_kv_bytes is None else settings.disk_kv_bytes,
        kv_folder=settings.kv_dir or settings.data_dir / KV_FOLDER,
        shared_kv_folder=settings.shared_kv_dir,
        kv_object_url=settings.kv_object_url,
        kv_object_bytes=settings.kv_object_bytes,
        calibration_folder=settings.data_dir / CALIBRATION_FOLDER,
        renew_calibration=settings.renew_calibration,
        **sizes,
    )


def artifact_store(settings: Settings) -> "ArtifactStore":
    """Returns the store of adapters of a gateway or an engine. Raises InvalidRequest if its URL names no bucket."""
    from graftwork.adapters.registry.bucket_artifacts import open_artifacts

    folder = settings.data_dir / ARTIFACTS_FOLDER
    return open_artifacts(folder, settings.artifact_url, settings.artifact_cache_bytes)


def _draft_folders(settings: Settings) -> dict[str, Any]:
    """Returns the folders of the draft model and the draft head, which are fetched first if they must be."""
    return {"draft_model": draft_model_folder(settings), "draft_head": draft_head_folder(settings)}


def _membership(settings: Settings, listen: str, epoch: int | None, *, has_supervisor: bool) -> "Membership":
    """Returns what makes the engine known to gateways: its supervisor's epoch and its generation, or a lease of its own.

    Only an engine with a lease imports SQLAlchemy, which takes a third of a second.
    """
    if epoch is None and settings.fleet == "leases" and not has_supervisor:
        from graftwork.api.server.engine_lease import leased

        return leased(settings, listen)
    from graftwork.engine.rpc.server import with_epoch

    return with_epoch(epoch, settings.generation)


def warn_of_former_settings(settings: Settings) -> None:
    """Logs a warning for each setting that is given by a former name, with the name to use instead."""
    for name in _FORMER_KERNEL_SETTINGS:
        if (value := getattr(settings, name)) is not None:
            logger.warning("former_setting", extra={"setting": name, "value": value, "use_instead": "kernels"})


def child_command() -> list[str]:
    return [sys.executable, "-m", "graftwork.api.server.engine_process"]


def child_orders(settings: Settings, listen: str, epoch: int | None = None) -> bytes:
    """Returns the line of JSON that the parent sends to its child.

    The line has the address at which the child listens, its epoch, and the child's settings without secrets.
    """
    values = {setting.name: getattr(settings, setting.name) for setting in fields(settings)}
    told = {name: value for name, value in values.items() if name not in _UNTOLD and value is not None}
    return json.dumps({"listen": listen, "epoch": epoch, "settings": told}, default=str).encode() + b"\n"


def main() -> None:
    """Runs the engine as a child process.

    Reads the settings from standard input, which is a pipe from the parent, and serves the model. When the parent ends,
    the pipe closes and the child ends too.
    The only argument of the program is the descriptor of another pipe. If a GraftworkError ends the engine, the child
    writes the error there, and ends with `GraftworkError.exit_status`.
    """
    lifeline, report = sys.stdin.fileno(), int(sys.argv[1])
    os.set_inheritable(report, False)
    orders = json.loads(_read_line(lifeline))
    watch_parent(lifeline)
    try:
        settings = Settings.from_environment(orders["settings"])
        run_engine(settings, orders["listen"], has_supervisor=True, epoch=orders["epoch"])
    except GraftworkError as error:
        logger.debug("engine_failed", exc_info=True)
        os.write(report, error_to_wire(error).SerializeToString())
        if error.code == DEVICE_LOST:
            logging.shutdown()
            os._exit(error.exit_status)  # the driver's own cleanup may wait for the lost device
        sys.exit(error.exit_status)


def read_report(report: int) -> GraftworkError | None:
    """Reads and closes the pipe of a child that has ended. Returns the error that the child wrote, if there is one."""
    with os.fdopen(report, "rb") as pipe:
        content = pipe.read()
    return error_from_wire(Failed.FromString(content)) if content else None


def _read_line(descriptor: int) -> bytes:
    """Reads a line from a file descriptor without a buffer.

    A thread that waits in a buffered reader holds the reader's lock, which would block the end of the interpreter.
    """
    line = b""
    while not line.endswith(b"\n") and (read := os.read(descriptor, 1)):
        line += read
    return line


if __name__ == "__main__":
    main()
