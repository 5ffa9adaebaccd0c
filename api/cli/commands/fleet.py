"""Defines `graftwork fleet`, which runs engines on a Ray cluster."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.api.cli.console.flags import (
    ArtifactUrl,
    DatabaseUrl,
    DataDir,
    Demo,
    Device,
    DeviceBytes,
    DiskKvBytes,
    HostKvBytes,
    KvObjectUrl,
    MaxContextTokens,
    MaxReplicas,
    ModelPlace,
    ServedModelName,
    SharedKvDir,
    TensorParallel,
    given,
)
from graftwork.api.cli.console.output import JsonFlag, show_json, show_table
from graftwork.platform.settings.settings import Settings

if TYPE_CHECKING:
    from graftwork.api.ray.engine_spec import EngineSpec
    from graftwork.api.ray.supervisor import EngineStatus

app = typer.Typer(no_args_is_help=True, help="Engines on a Ray cluster. Gateways find them with --fleet leases.")

Name = Annotated[str, typer.Option(metavar="NAME", help="The fleet's name: its engines are NAME-0, NAME-1, …")]
RayAddress = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="The Ray cluster (default: this machine's).")]
NumReplicas = Annotated[int, typer.Option(min=0, max=1000, metavar="N", help="Engines.")]
Cpus = Annotated[float, typer.Option(min=0.0, help="CPUs that Ray keeps for each engine.")]
Gpus = Annotated[float | None, typer.Option(min=0.0, help="GPUs of each engine (default: one for each device).")]
Surge = Annotated[int, typer.Option(min=0, help="Engines more than --replicas during an upgrade.")]


@app.command()
def start(
    name: Name = "graftwork",
    replicas: NumReplicas = 1,
    max_replicas: MaxReplicas = None,
    surge: Surge = 1,
    ray_address: RayAddress = None,
    cpus: Cpus = 1.0,
    gpus: Gpus = None,
    demo: Demo = False,
    model: ModelPlace = None,
    served_model_name: ServedModelName = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    device: Device = None,
    tensor_parallel: TensorParallel = None,
    device_bytes: DeviceBytes = None,
    max_context_tokens: MaxContextTokens = None,
    host_kv_bytes: HostKvBytes = None,
    disk_kv_bytes: DiskKvBytes = None,
    shared_kv_dir: SharedKvDir = None,
    kv_object_url: KvObjectUrl = None,
    artifact_url: ArtifactUrl = None,
) -> None:
    """Start a fleet. Needs GRAFTWORK_ENGINE_TOKEN. The engines go on when this command, or Ray, ends.

    Example: graftwork fleet start --replicas 3 --model ./llama --database-url postgresql://…
    """
    spec = _spec(locals(), cpus, gpus)
    from graftwork.api.ray.actors import RayFleet
    from graftwork.api.ray.supervisor import Wanted

    RayFleet(name, ray_address).start(Wanted(spec, replicas, surge, max_replicas))


@app.command()
def status(name: Name = "graftwork", ray_address: RayAddress = None, as_json: JsonFlag = False) -> None:
    """List the engines of a fleet, also those that wait for a machine or do not start.

    Example: graftwork fleet status
    """
    from graftwork.api.ray.actors import RayFleet
    from graftwork.api.ray.supervisor import status_body

    found: Sequence[EngineStatus] = RayFleet(name, ray_address).status()
    if as_json:
        return show_json([status_body(one) for one in found])
    columns = ("id", "state", "generation", "address", "process", "starts", "problem")
    rows = [
        (one.replica_id, one.state, one.generation, one.address, one.process_id, one.starts, _last_line(one.problem))
        for one in found
    ]
    return show_table(columns, rows, "No engines.")


@app.command()
def scale(
    replicas: Annotated[int, typer.Argument(min=0, max=1000, metavar="N", help="Engines.")],
    max_replicas: MaxReplicas = None,
    name: Name = "graftwork",
    ray_address: RayAddress = None,
) -> None:
    """Change how many engines a fleet has. Engines that are too many drain before they end.

    Example: graftwork fleet scale 2 --max-replicas 8
    """
    from graftwork.api.ray.actors import RayFleet

    RayFleet(name, ray_address).scale(replicas, max_replicas)


@app.command()
def upgrade(
    name: Name = "graftwork",
    ray_address: RayAddress = None,
    cpus: Cpus = 1.0,
    gpus: Gpus = None,
    demo: Demo = False,
    model: ModelPlace = None,
    served_model_name: ServedModelName = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    device: Device = None,
    tensor_parallel: TensorParallel = None,
    device_bytes: DeviceBytes = None,
    max_context_tokens: MaxContextTokens = None,
    host_kv_bytes: HostKvBytes = None,
    disk_kv_bytes: DiskKvBytes = None,
    shared_kv_dir: SharedKvDir = None,
    kv_object_url: KvObjectUrl = None,
    artifact_url: ArtifactUrl = None,
) -> None:
    """Replace all engines, one after another, by those of the next generation. Give all flags of `start` again.

    Example: graftwork fleet upgrade --model ./llama-2 --served-model-name llama --database-url postgresql://…
    """
    spec = _spec(locals(), cpus, gpus)
    from graftwork.api.ray.actors import RayFleet

    typer.echo(f"Generation {RayFleet(name, ray_address).upgrade(spec)}")


@app.command()
def stop(name: Name = "graftwork", ray_address: RayAddress = None) -> None:
    """Let all engines of a fleet drain and end.

    Example: graftwork fleet stop
    """
    from graftwork.api.ray.actors import RayFleet

    RayFleet(name, ray_address).stop()


_OWN = ("name", "replicas", "max_replicas", "surge", "ray_address", "cpus", "gpus")


def _spec(flags: dict[str, object], cpus: float, gpus: float | None) -> "EngineSpec":
    """Returns what engines are started with, by a command's flags and the environment."""
    from graftwork.api.ray.engine_spec import EngineSpec
    from graftwork.api.server.served_model import model_folder

    settings = Settings.from_environment({name: given(value) for name, value in flags.items() if name not in _OWN})
    model_folder(settings)  # fails at once if the model is missing
    default = float(settings.tensor_parallel) if settings.device.startswith("cuda") else 0.0
    return EngineSpec.of(settings, num_cpus=cpus, num_gpus=default if gpus is None else gpus)


def _last_line(text: str) -> str | None:
    return text.strip().rpartition("\n")[2][:200] or None
