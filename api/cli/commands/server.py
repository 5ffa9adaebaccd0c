"""Defines `graftwork serve`, which runs the whole server, `gateway` and `engine`, which run one part of it, and `probe`,
which asks an engine for a token.
"""

import asyncio
import os
from typing import Annotated

import typer

from graftwork.api.cli.console.flags import (
    Advertise,
    ArtifactUrl,
    CorsOrigin,
    DatabaseUrl,
    DataDir,
    Demo,
    Device,
    DeviceBytes,
    DiskKvBytes,
    DraftHeadPlace,
    DraftKvBytes,
    DraftModelPlace,
    EngineAddress,
    EngineCores,
    EngineTlsCa,
    EngineTlsCert,
    EngineTlsKey,
    EngineTlsName,
    Fleet,
    Generation,
    Host,
    HostKvBytes,
    Kernels,
    KvDir,
    KvObjectUrl,
    LogFormat,
    MaxContextTokens,
    MaxDraftTokens,
    MaxReplicas,
    MemoryShare,
    ModelPlace,
    OtlpEndpoint,
    Port,
    PublicPrompts,
    ReasoningForm,
    RedisUrl,
    RenewCalibration,
    ReplicaId,
    Replicas,
    ServedModelName,
    SharedKvDir,
    TensorParallel,
    TlsCert,
    TlsKey,
    ToolForm,
    given,
)
from graftwork.platform.settings.settings import Settings

# Each command imports its process inside. FastAPI, SQLAlchemy and torch take seconds to import, and `--help` needs none.


def serve(
    demo: Demo = False,
    model: ModelPlace = None,
    served_model_name: ServedModelName = None,
    host: Host = None,
    port: Port = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    redis_url: RedisUrl = None,
    cors_origin: CorsOrigin = None,
    tool_call_form: ToolForm = None,
    reasoning_form: ReasoningForm = None,
    device: Device = None,
    tensor_parallel: TensorParallel = None,
    engine_cores: EngineCores = None,
    device_bytes: DeviceBytes = None,
    memory_share: MemoryShare = None,
    kernels: Kernels = None,
    max_context_tokens: MaxContextTokens = None,
    host_kv_bytes: HostKvBytes = None,
    disk_kv_bytes: DiskKvBytes = None,
    public_prompts: PublicPrompts = None,
    max_draft_tokens: MaxDraftTokens = None,
    draft_model: DraftModelPlace = None,
    draft_head: DraftHeadPlace = None,
    draft_kv_bytes: DraftKvBytes = None,
    renew_calibration: RenewCalibration = False,
    kv_dir: KvDir = None,
    shared_kv_dir: SharedKvDir = None,
    kv_object_url: KvObjectUrl = None,
    artifact_url: ArtifactUrl = None,
    replicas: Replicas = None,
    max_replicas: MaxReplicas = None,
    log_format: LogFormat = None,
    otlp_endpoint: OtlpEndpoint = None,
) -> None:
    """Serve a model: a gateway and its engine in one command.

    Example: graftwork serve --demo
    """
    settings = _settings(locals())
    # uvloop starts the engine by a fork. gRPC would log that it skips its handlers for forks; it reads this when imported.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from graftwork.api.server.serve import serve as run

    run(settings)


def gateway(
    engine_address: EngineAddress = None,
    demo: Demo = False,
    model: ModelPlace = None,
    served_model_name: ServedModelName = None,
    host: Host = None,
    port: Port = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    redis_url: RedisUrl = None,
    artifact_url: ArtifactUrl = None,
    cors_origin: CorsOrigin = None,
    tool_call_form: ToolForm = None,
    reasoning_form: ReasoningForm = None,
    fleet: Fleet = None,
    engine_tls_ca: EngineTlsCa = None,
    engine_tls_cert: EngineTlsCert = None,
    engine_tls_key: EngineTlsKey = None,
    engine_tls_name: EngineTlsName = None,
    log_format: LogFormat = None,
    otlp_endpoint: OtlpEndpoint = None,
) -> None:
    """Run a gateway alone, for production. Any number of gateways may share PostgreSQL and Redis.

    Example: graftwork gateway --engine-address 10.0.0.5:9000 --model ./llama --database-url postgresql://…
    """
    settings = _settings(locals())
    from graftwork.api.server.gateway import run_gateway

    run_gateway(settings)


def engine(
    listen: Annotated[
        str | None,
        typer.Option(metavar="TARGET", help="Where to answer: unix:PATH or HOST:PORT (default: in the data dir)."),
    ] = None,
    demo: Demo = False,
    model: ModelPlace = None,
    served_model_name: ServedModelName = None,
    data_dir: DataDir = None,
    device: Device = None,
    tensor_parallel: TensorParallel = None,
    engine_cores: EngineCores = None,
    device_bytes: DeviceBytes = None,
    memory_share: MemoryShare = None,
    kernels: Kernels = None,
    max_context_tokens: MaxContextTokens = None,
    host_kv_bytes: HostKvBytes = None,
    disk_kv_bytes: DiskKvBytes = None,
    max_draft_tokens: MaxDraftTokens = None,
    draft_model: DraftModelPlace = None,
    draft_head: DraftHeadPlace = None,
    draft_kv_bytes: DraftKvBytes = None,
    renew_calibration: RenewCalibration = False,
    kv_dir: KvDir = None,
    shared_kv_dir: SharedKvDir = None,
    kv_object_url: KvObjectUrl = None,
    artifact_url: ArtifactUrl = None,
    fleet: Fleet = None,
    database_url: DatabaseUrl = None,
    replica_id: ReplicaId = None,
    generation: Generation = None,
    advertise: Advertise = None,
    engine_tls_ca: EngineTlsCa = None,
    engine_tls_cert: EngineTlsCert = None,
    engine_tls_key: EngineTlsKey = None,
) -> None:
    """Run an engine alone, for production. Run one for each device.

    Example: graftwork engine --model ./llama --listen 0.0.0.0:9000
    """
    flags = locals()
    flags.pop("listen")
    settings = _settings(flags)
    from graftwork.api.server.engine_process import run_engine

    run_engine(settings, listen or settings.resolved_engine_address)


def probe(
    address: Annotated[
        str | None,
        typer.Argument(metavar="TARGET", help="The engine: unix:PATH or HOST:PORT (default: in the data dir)."),
    ] = None,
    within: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="How long the token may take.")] = 10.0,
    data_dir: DataDir = None,
    engine_tls_ca: EngineTlsCa = None,
    engine_tls_cert: EngineTlsCert = None,
    engine_tls_key: EngineTlsKey = None,
    engine_tls_name: EngineTlsName = None,
) -> None:
    """Ask an engine for one token, to see that it computes: the readiness probe of a container.

    Example: graftwork probe 127.0.0.1:9000
    """
    flags = locals()
    settings = _settings({name: value for name, value in flags.items() if name not in ("address", "within")})
    from graftwork.api.server.engine_probe import probe_engine

    target = address or settings.resolved_engine_address
    found = asyncio.run(probe_engine(settings, target, within))
    seen = "is busy: its queue is full" if found.is_busy else f"gave a token in {found.seconds * 1000:.0f} ms"
    typer.echo(f"{found.model_name} at {target} {seen}.")


def _settings(flags: dict[str, object]) -> Settings:
    """Returns the settings for a command's flags. If a flag is missing, its environment variable decides."""
    return Settings.from_environment({name: given(value) for name, value in flags.items()})
