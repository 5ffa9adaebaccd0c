"""Defines `graftwork plan`, which says what a demand needs: replicas, memory, and dollars for a million tokens."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graftwork.api.cli.console.output import JsonFlag, show_facts, show_json, show_table, size
from graftwork.api.cli.console.signals import run_and_clean_up

if TYPE_CHECKING:
    from graftwork.api.cli.plan.energy import Energy
    from graftwork.api.cli.plan.planner import Demand, Plan
    from graftwork.api.cli.plan.sizes import ModelSizes
    from graftwork.api.cli.plan.speeds import MeasuredSpeed, Speed

_CPU = "cpu"
_MEASURED_LEVELS = (1, 4, 16)


def plan(
    model: Annotated[Path, typer.Option(metavar="DIR", help="A Hugging Face folder; config.json is enough.")],
    gpu: Annotated[str, typer.Option(help="H100, H200, A100, L40S or cpu.")] = "H100",
    tenants: Annotated[int, typer.Option(min=1, help="Tenants.")] = 1,
    adapters: Annotated[int, typer.Option(min=0, help="Adapters of all tenants.")] = 0,
    rank: Annotated[int, typer.Option(min=1, help="The rank of each adapter.")] = 16,
    sessions: Annotated[int, typer.Option(min=0, help="Sessions that are open at a time.")] = 100,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens of a session (default: the model's most).")] = None,
    rate: Annotated[float, typer.Option(min=0.0, help="Requests in a second, of all tenants.")] = 1.0,
    prompt: Annotated[int, typer.Option(min=0, help="Prompt tokens of a request that no cache has.")] = 200,
    output: Annotated[int, typer.Option(min=1, help="Generated tokens of a request.")] = 200,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16 (default: the model's).")] = None,
    dollars: Annotated[
        float | None, typer.Option("--dollars-per-hour", min=0.0, help="What one replica costs in an hour.")
    ] = None,
    measured: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Speeds from `graftwork bench throughput --json`.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the demo model on this machine first, in some 15 seconds.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Plan replicas, memory, speed and costs for a demand. Nothing is sent anywhere.

    Without --measured or --measure, speeds are a roofline of the device's data sheet, which nobody has measured.

    Example: graftwork plan --model ./my-llama --gpu H100 --tenants 200 --adapters 300 --sessions 2000 --rate 20
    """
    from graftwork.api.cli.plan.planner import Demand, make_plan
    from graftwork.api.cli.plan.sizes import ModelSizes
    from graftwork.api.cli.plan.speeds import DEVICES, MeasuredSpeed, RooflineSpeed

    if gpu != _CPU and gpu not in DEVICES:
        raise typer.BadParameter(f"{gpu!r} is not known: choose one of {', '.join([*DEVICES, _CPU])}.")
    if measured is not None and measure:
        raise typer.BadParameter("give --measured or --measure, not both")
    if gpu == _CPU and measured is None and not measure:
        raise typer.BadParameter("a CPU has no data sheet to plan from: add --measure, or --measured FILE")
    sizes, device = ModelSizes.read(model, dtype), DEVICES.get(gpu)
    tokens = min(context or sizes.model.context_tokens, sizes.model.context_tokens)
    demand = Demand(tenants, adapters, rank, sessions, tokens, rate, prompt, output)
    energy: Energy | None = None
    speed: Speed
    if measure:
        speed, energy = _measure()
    elif measured is not None:
        speed = MeasuredSpeed.read(measured)
    elif device is not None:
        speed = RooflineSpeed(device, sizes, tokens, adapters, rank)
    found = make_plan(demand, sizes, speed, device, dollars)
    if as_json:
        return show_json(_body(demand, found, speed, energy))
    return _show(demand, sizes, found, speed, energy)


def _measure() -> "tuple[MeasuredSpeed, Energy]":
    """Measures a demo server, and the energy per token meanwhile if it can be read."""
    from graftwork.api.cli.bench.progress import LiveProgress
    from graftwork.api.cli.bench.runs import throughput
    from graftwork.api.cli.bench.servers import measured_server
    from graftwork.api.cli.plan.energy import Energy, energy_between, read_energy
    from graftwork.api.cli.plan.speeds import MeasuredSpeed, levels_of
    from graftwork.platform.clock import SystemClock

    async def run() -> "tuple[MeasuredSpeed, Energy]":
        with LiveProgress() as progress:
            async with measured_server(None, "", "graftwork-demo", {"tenant": 1.0}, {}) as server:
                before = read_energy()
                target = server.targets["tenant"]
                phases = await throughput(target, _MEASURED_LEVELS, 4.0, SystemClock(), progress.show_load)
                used = energy_between(before, read_energy())
        tokens = sum(phase.tokens_per_s * phase.seconds for phase in phases)
        each = None if used.joules is None or not tokens else used.joules / tokens
        return MeasuredSpeed.fit(levels_of({"phases": [asdict(one) for one in phases]})), Energy(each, used.source)

    return run_and_clean_up(run())


def _body(demand: "Demand", found: "Plan", speed: "Speed", energy: "Energy | None") -> dict[str, Any]:
    return {
        "demand": asdict(demand),
        "plan": asdict(found),
        "assumptions": list(speed.assumptions),
        "levels": [
            {
                "outstanding": one.outstanding,
                "measured_tokens_per_s": one.tokens_per_s,
                "planned_tokens_per_s": one.outstanding / speed.step_s(one.outstanding),
                "little": one.little,
            }
            for one in getattr(speed, "levels", ())
        ],
        "joules_per_token": None if energy is None else energy.joules,
        "energy_source": "not measured" if energy is None else energy.source,
    }


def _show(demand: "Demand", sizes: "ModelSizes", found: "Plan", speed: "Speed", energy: "Energy | None") -> None:
    price = found.dollars_per_million
    on_device = found.sessions_on_device
    joules = None if energy is None else energy.joules
    unread = "measure with --measure" if energy is None else energy.source
    show_facts(
        [
            ("replicas", f"{found.replicas} (each {found.busy:.0%} busy)"),
            ("running at a time", f"{found.running_per_replica:.1f} a replica, of at most {found.max_running}"),
            ("tokens a second", f"{found.tokens_per_s:,.0f} a replica at most"),
            ("between two tokens", f"{1000 * found.step_s:.1f} ms"),
            ("first token", f"{1000 * found.first_token_s:.1f} ms after the start of its prompt"),
            ("weights", f"{size(found.weights_bytes)} ({sizes.parameters / 1e9:.3g} B parameters, {sizes.dtype})"),
            ("adapters", f"{size(found.adapters_bytes)} on the host ({demand.adapters} of rank {demand.rank})"),
            ("KV of running requests", size(found.running_kv_bytes)),
            ("KV of all sessions", f"{size(found.session_kv_bytes)} a replica, on device, host and disk"),
            (
                "sessions on the device",
                "not known for a CPU" if on_device is None else f"{on_device} of {demand.sessions}",
            ),
            ("a million tokens", "give --dollars-per-hour" if price is None else f"${price:,.4g}"),
            ("energy", unread if joules is None else f"{joules:.3g} J a token ({unread})"),
        ]
    )
    for text in speed.assumptions:
        typer.echo(f"assumes: {text}")
    rows = [
        (
            one["outstanding"],
            round(one["measured_tokens_per_s"], 1),
            round(one["planned_tokens_per_s"], 1),
            one["little"],
        )
        for one in _body(demand, found, speed, energy)["levels"]
    ]
    if rows:
        show_table(("outstanding", "measured tokens/s", "planned tokens/s", "Little: 1 if it holds"), rows, "")
