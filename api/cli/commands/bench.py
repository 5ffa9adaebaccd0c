"""Defines `graftwork bench`, which measures a server under load: its throughput, and what a flood does to others.

Owns the choice of the server: the one at `--url`, or one of its own with the demo model. Never computes a figure.
"""

import asyncio
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graftwork.api.cli.console.failures import require_modules
from graftwork.api.cli.console.output import JsonFlag, show_json, show_table
from graftwork.api.sdk.transport.errors import ConfigurationError

if TYPE_CHECKING:
    from graftwork.api.cli.bench.load import Load, Target
    from graftwork.api.cli.bench.page import Claim
    from graftwork.api.cli.bench.runs import Phase, Progress

app = typer.Typer(no_args_is_help=True, help="Measure a server under load.")

Url = Annotated[
    str | None, typer.Option(metavar="URL", help="Any OpenAI-compatible server, without /v1 (default: a demo server).")
]
Key = Annotated[str, typer.Option(metavar="KEY", help="The API key for --url.")]
Model = Annotated[str, typer.Option(metavar="NAME", help="The model to ask for.")]
Seconds = Annotated[float, typer.Option(min=0.5, help="The length of each phase.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with tables and charts.")]
_DEMO_MODEL = "graftwork-demo"
_COLUMNS = (
    "phase",
    "tenant",
    "sent",
    "answered",
    "refused",
    "failed",
    "TTFT p50 ms",
    "TTFT p99 ms",
    "ITL p99 ms",
    "tokens/s",
)


@app.command()
def throughput(
    url: Url = None,
    key: Key = "",
    model: Model = _DEMO_MODEL,
    seconds: Seconds = 10.0,
    most: Annotated[int, typer.Option(min=1, help="The most chats outstanding; 1, 2, 4, … up to this.")] = 32,
    html: Html = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure tokens a second and latencies with 1, 2, 4, … chats outstanding.

    Example: graftwork bench throughput --most 16 --html throughput.html
    """
    from graftwork.api.cli.bench.runs import throughput as measure
    from graftwork.platform.clock import SystemClock

    levels = tuple(2**power for power in range(most.bit_length()))

    async def run() -> "list[Phase]":
        async with _targets(url, key, model, ("tenant",)) as targets:
            return await measure(targets["tenant"], levels, seconds, SystemClock(), _progress())

    phases = asyncio.run(run())
    _show("Throughput", url, phases, [], html, {"phases": [asdict(phase) for phase in phases]}, as_json=as_json)


@app.command()
def fairness(
    url: Url = None,
    key: Key = "",
    model: Model = _DEMO_MODEL,
    seconds: Seconds = 20.0,
    outstanding: Annotated[int, typer.Option(min=1, help="Chats outstanding while the capacity is measured.")] = 32,
    html: Html = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure what one tenant at three times the capacity does to two light tenants and one of agents.

    Exits with status 1 if a promise does not hold. Without --url, compares with first come first served.

    Example: graftwork bench fairness --seconds 30 --html fairness.html
    """
    from graftwork.api.cli.bench.runs import TENANTS, claims
    from graftwork.api.cli.bench.runs import fairness as measure
    from graftwork.platform.clock import SystemClock

    async def run() -> Any:
        async with _targets(url, key, model, TENANTS) as targets:
            found = await measure(targets, seconds, outstanding, SystemClock(), _progress())
        if url is not None:
            return found
        async with _targets(None, key, model, TENANTS, scheduling_policy="fcfs") as targets:
            return await found.with_baseline(targets, SystemClock(), _progress())

    found = asyncio.run(run())
    checked, body = claims(found), asdict(found)
    body["claims"] = [asdict(claim) for claim in checked]
    phases = [*found.solo.values(), found.flood, *([found.baseline] if found.baseline else [])]
    _show("Fairness under a flood", url, phases, checked, html, body, as_json=as_json)
    if not all(claim.holds for claim in checked):
        raise typer.Exit(1)


# ---- the server ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _targets(
    url: str | None, key: str, model: str, names: tuple[str, ...], **settings: str
) -> "AsyncGenerator[Mapping[str, Target]]":
    """Yields where each tenant sends its chats. A server at `url` sees one tenant, the owner of `key`.

    Without `url`, starts a demo server with these settings and a tenant for each name; both end with the block.
    """
    from graftwork.api.cli.bench.load import Target

    if url is not None:
        yield {name: Target(url.rstrip("/").removesuffix("/v1"), key, model) for name in names}
        return
    require_modules("fastapi", "torch")  # the server's process needs them
    from graftwork.api.cli.demo.server import DemoServer, ServerFailed
    from graftwork.api.sdk.client import AsyncGraftwork

    with tempfile.TemporaryDirectory(prefix="graftwork-bench-") as folder:
        server = DemoServer(Path(folder), settings=settings)
        try:
            await server.start()
        except ServerFailed as error:
            raise ConfigurationError(str(error)) from error
        try:
            keys = {}
            async with AsyncGraftwork(server.url, admin_key=server.admin_key()) as client:
                for name in names:
                    tenant = await client.admin.tenants.create(name=name)
                    made = await client.admin.keys.create(tenant_id=tenant.id, name="bench")
                    keys[name] = made.key or ""
            yield {name: Target(server.url, keys[name], model) for name in names}
        finally:
            await server.stop()


# ---- what is shown ------------------------------------------------------------------------------------------------


def _progress() -> "Progress":
    """Returns what shows one line on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        return lambda name, load: None

    def show(name: str, load: "Load") -> None:
        ended = sum(one.ended_at is not None for one in load.sent)
        typer.echo(f"\r\x1b[K{name}: {len(load.sent)} sent, {ended} ended", nl=False, err=True)

    return show


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)


def _show(
    title: str,
    url: str | None,
    phases: "list[Phase]",
    checked: "list[Claim]",
    html: Path | None,
    body: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    rows = [
        (phase.name, *(one.tenant, one.sent, one.answered, one.refused, one.failed), *map(_ms, latencies), speed)
        for phase in phases
        for one in phase.tenants
        for latencies, speed in [((one.ttft_p50, one.ttft_p99, one.itl_p99), round(one.tokens_per_s, 1))]
    ]
    if html is not None:
        html.write_text(_page(title, url, phases, checked, rows), encoding="utf-8")
    if as_json:
        return show_json(body)
    show_table(_COLUMNS, rows, "Nothing was sent.")
    for claim in checked:
        typer.echo(f"{'holds' if claim.holds else 'FAILS'}  {claim.text} ({claim.found})")
    return None


def _page(title: str, url: str | None, phases: "list[Phase]", checked: "list[Claim]", rows: list[Any]) -> str:
    from graftwork.api.cli.bench.page import Bars, page

    def bars(name: str, unit: str, read: Callable[[Any], float | None]) -> Bars:
        return Bars(
            name, unit, [(f"{one.tenant}, {phase.name}", read(one)) for phase in phases for one in phase.tenants]
        )

    charts = [
        bars("Time to first token, p99", "ms", lambda one: _ms(one.ttft_p99)),
        bars("Throughput", "tokens/s", lambda one: one.tokens_per_s),
    ]
    seconds = phases[0].seconds if phases else 0
    note = f"Server: {url or 'a demo server of its own'}. Phases of {seconds:g} s."
    return page(title, note, _COLUMNS, rows, charts, checked)
