"""Defines `graftwork bench`, which measures a server under load.

Owns the commands and their options. Never computes a figure.
"""

import asyncio
import signal
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.api.cli.console.output import JsonFlag
from graftwork.api.cli.console.signals import run_and_clean_up

if TYPE_CHECKING:
    from graftwork.api.cli.bench.agents import Agents
    from graftwork.api.cli.bench.runs import Fairness, Phase
    from graftwork.api.cli.bench.soak import Interval

app = typer.Typer(no_args_is_help=True, help="Measure a server under load.")

Url = Annotated[
    str | None, typer.Option(metavar="URL", help="Any OpenAI-compatible server, without /v1 (default: a demo server).")
]
Key = Annotated[str, typer.Option(metavar="KEY", help="The API key for --url.")]
Model = Annotated[str, typer.Option(metavar="NAME", help="The model to ask for.")]
Seconds = Annotated[float, typer.Option(min=0.5, help="The length of each phase.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with tables and charts.")]
Png = Annotated[
    Path | None, typer.Option("--png", metavar="FILE", help="Also write the charts; needs graftwork[plot].")
]
Plot = Annotated[bool, typer.Option("--plot", help="Also draw the charts in this terminal.")]
Setting = Annotated[
    list[str] | None,
    typer.Option("--setting", metavar="NAME=VALUE", help="A setting of the demo server; may be repeated."),
]
_DEMO_MODEL = "graftwork-demo"
_OWN_SERVER = "a demo server of its own"


@app.command()
def throughput(
    url: Url = None,
    key: Key = "",
    model: Model = _DEMO_MODEL,
    seconds: Seconds = 10.0,
    most: Annotated[int, typer.Option(min=1, help="The most chats outstanding; 1, 2, 4, … up to this.")] = 32,
    setting: Setting = None,
    html: Html = None,
    png: Png = None,
    plot: Plot = False,
    as_json: JsonFlag = False,
) -> None:
    """Measure tokens a second and latencies with 1, 2, 4, … chats outstanding.

    Example: graftwork bench throughput --most 16 --html throughput.html
    """
    from graftwork.api.cli.bench.progress import LiveProgress
    from graftwork.api.cli.bench.report import phases_report
    from graftwork.api.cli.bench.runs import throughput as measure
    from graftwork.api.cli.bench.servers import measured_server, parse_settings
    from graftwork.platform.clock import SystemClock

    _check_png(png)
    levels = tuple(2**power for power in range(most.bit_length()))

    async def run() -> "list[Phase]":
        with LiveProgress() as progress:
            async with measured_server(url, key, model, {"tenant": 1.0}, parse_settings(setting or ())) as server:
                return await measure(server.targets["tenant"], levels, seconds, SystemClock(), progress.show_load)

    phases = run_and_clean_up(run())
    body = {"phases": [asdict(phase) for phase in phases]}
    phases_report("Throughput", url or _OWN_SERVER, phases, body).publish(html, png, plot=plot, as_json=as_json)


@app.command()
def fairness(
    url: Url = None,
    key: Key = "",
    model: Model = _DEMO_MODEL,
    seconds: Seconds = 60.0,
    outstanding: Annotated[int, typer.Option(min=1, help="Chats outstanding while the capacity is measured.")] = 32,
    setting: Setting = None,
    html: Html = None,
    png: Png = None,
    plot: Plot = False,
    as_json: JsonFlag = False,
) -> None:
    """Measure what a tenant at three times the capacity, and another with twice its weight, do to two light ones and agents.

    Exits with status 1 if a promise does not hold. Without --url, compares with first come first served.

    Example: graftwork bench fairness --html fairness.html
    """
    from graftwork.api.cli.bench.progress import LiveProgress
    from graftwork.api.cli.bench.report import phases_report
    from graftwork.api.cli.bench.runs import TENANTS, claims, flood_settings
    from graftwork.api.cli.bench.runs import fairness as measure
    from graftwork.api.cli.bench.servers import measured_server, parse_settings
    from graftwork.platform.clock import SystemClock

    _check_png(png)
    settings = flood_settings() | parse_settings(setting or ())

    async def run() -> "Fairness":
        with LiveProgress() as progress:
            show, clock = progress.show_load, SystemClock()
            async with measured_server(url, key, model, TENANTS, settings, keeps_off=False) as server:
                if url is not None:
                    return await measure(server.targets, None, seconds, outstanding, clock, show)
                first_come = settings | {"scheduling_policy": "fcfs"}
                async with measured_server(None, key, model, TENANTS, first_come) as other:
                    return await measure(server.targets, other.targets, seconds, outstanding, clock, show)

    found = run_and_clean_up(run())
    phases = [*found.solo.values(), found.flood, *([found.baseline] if found.baseline else [])]
    body = asdict(found) | {"settings": None if url else settings}
    report = phases_report("Fairness under a flood", url or f"{_OWN_SERVER}, {settings}", phases, body, claims(found))
    report.publish(html, png, plot=plot, as_json=as_json)


@app.command()
def sessions(
    url: Url = None,
    key: Key = "",
    model: Model = _DEMO_MODEL,
    agents: Annotated[int, typer.Option(min=1, help="Agents that run at once, of two tenants.")] = 8,
    turns: Annotated[int, typer.Option(min=2, help="Turns of each agent and each branch.")] = 10,
    branches: Annotated[int, typer.Option(min=1, help="Sessions in which an agent goes on after its middle.")] = 2,
    tool_seconds: Annotated[float, typer.Option(min=0.001, help="The median time of a tool.")] = 0.5,
    setting: Setting = None,
    html: Html = None,
    png: Png = None,
    plot: Plot = False,
    as_json: JsonFlag = False,
) -> None:
    """Measure agents in sessions: turn latency by turn number, and where the KV of their prompts was.

    Only Graftwork servers have sessions.

    Example: graftwork bench sessions --agents 16 --html sessions.html
    """
    from graftwork.api.cli.bench.agents import AgentPlan, Agents, agents_report, check_sessions
    from graftwork.api.cli.bench.progress import LiveProgress
    from graftwork.api.cli.bench.servers import measured_server, parse_settings
    from graftwork.platform.clock import SystemClock

    _check_png(png)

    async def run() -> "Agents":
        with LiveProgress() as progress:
            async with measured_server(
                url, key, model, {"one": 1.0, "two": 1.0}, parse_settings(setting or ())
            ) as server:
                targets = list(server.targets.values())
                await check_sessions(targets[0])
                plan = AgentPlan(agents, turns, branches, tool_seconds)
                found = Agents(plan, SystemClock(), lambda state: progress.update("agents", state))
                await found.run(targets)
                return found

    agents_report(url or _OWN_SERVER, run_and_clean_up(run())).publish(html, png, plot=plot, as_json=as_json)


@app.command()
def soak(
    url: Url = None,
    key: Key = "",
    model: Model = _DEMO_MODEL,
    hours: Annotated[float, typer.Option(min=0.0001, help="The length of the run. Ctrl-C ends it earlier.")] = 1.0,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two readings.")] = 10.0,
    outstanding: Annotated[int, typer.Option(min=1, help="Chats outstanding all the time.")] = 8,
    setting: Setting = None,
    html: Html = None,
    png: Png = None,
    plot: Plot = False,
    as_json: JsonFlag = False,
) -> None:
    """Keep a server under load for hours, and look for drift in memory, descriptors and latencies.

    Ends after its time or by Ctrl-C, and then reports what it has. Exits with status 1 if something drifts or fails.

    Example: graftwork bench soak --hours 8 --html soak.html
    """
    from graftwork.api.cli.bench.progress import LiveProgress
    from graftwork.api.cli.bench.servers import measured_server, parse_settings
    from graftwork.api.cli.bench.soak import soak as measure
    from graftwork.api.cli.bench.soak import soak_report
    from graftwork.platform.clock import SystemClock

    _check_png(png)

    async def run() -> "tuple[list[Interval], bool]":
        stopped, seconds = _stop_signal(), 3600 * hours
        with LiveProgress() as progress:
            async with measured_server(url, key, model, {"tenant": 1.0}, parse_settings(setting or ())) as server:
                where = server.targets["tenant"], server.process_id, outstanding
                found = await measure(*where, seconds, every, stopped, SystemClock(), progress.update)
        return found, stopped.is_set()

    intervals, was_stopped = run_and_clean_up(run())
    report = soak_report(url or _OWN_SERVER, intervals, was_stopped=was_stopped)
    report.publish(html, png, plot=plot, as_json=as_json)


@app.command()
def chaos(
    rounds: Annotated[int, typer.Option(min=1, help="How often each fault strikes.")] = 1,
    agents: Annotated[int, typer.Option(min=2, help="Agents that stream turns of sessions all the time.")] = 64,
    engines: Annotated[int, typer.Option(min=2, max=8, help="Engines of the fleet.")] = 3,
    gateways: Annotated[int, typer.Option(min=1, max=8, help="Gateways of the fleet.")] = 2,
    store: Annotated[
        str, typer.Option(metavar="auto|postgres|sqlite", help="Where the fleet keeps its rows.")
    ] = "auto",
    keep: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep the fleet's files and logs there.")] = None,
    html: Html = None,
    png: Png = None,
    plot: Plot = False,
    as_json: JsonFlag = False,
) -> None:
    """Kill, stop and cut off the parts of a demo fleet while agents talk to it, and check what they were told.

    Starts a fleet of its own, with a PostgreSQL and a Redis of its own where their programs are. Exits with status 1 if a
    client gets stuck, or something is lost, doubled or billed wrongly.

    Example: graftwork bench chaos --rounds 2
    """
    from graftwork.api.cli.bench.progress import LiveProgress
    from graftwork.api.cli.bench.servers import server_failures
    from graftwork.api.cli.chaos.chaos import Chaos, chaos_report, run_chaos
    from graftwork.api.cli.chaos.whole_fleet import STORES, FleetPlan
    from graftwork.api.cli.console.failures import require_modules

    _check_png(png)
    if store not in STORES:
        raise typer.BadParameter(f"{store!r} is none of {', '.join(STORES)}.", param_hint="--store")
    require_modules("fastapi", "torch")  # the fleet's processes need them
    if keep is not None:
        keep.mkdir(parents=True)
    plan = FleetPlan(engines, gateways, store)

    async def run() -> "Chaos":
        with LiveProgress() as progress, tempfile.TemporaryDirectory(prefix="graftwork-bench-") as folder:
            return await run_chaos(keep or Path(folder), plan, agents, rounds, progress.update)

    with server_failures():
        found = run_and_clean_up(run())
    chaos_report(found).publish(html, png, plot=plot, as_json=as_json)


def _stop_signal() -> asyncio.Event:
    """Returns an event that SIGINT and SIGTERM set, as long as the running event loop runs."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError, RuntimeError):  # Windows, or not the main thread
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    return stopped


def _check_png(png: Path | None) -> None:
    """Checks before a measurement that its charts can be drawn. Raises ConfigurationError."""
    from graftwork.api.cli.bench.plot import require_plots

    if png is not None:
        require_plots()
