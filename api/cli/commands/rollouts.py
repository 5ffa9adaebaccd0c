"""Defines `graftwork adapters rollouts`, which starts, shows and cancels the roll-outs of adapter versions."""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.api.cli.console.connect import connect
from graftwork.api.cli.console.output import JsonFlag, moment, show_facts, show_json, show_table

if TYPE_CHECKING:
    from graftwork.platform.answers.adapters import Rollout

app = typer.Typer(no_args_is_help=True, help="Let a version take over an alias step by step, or roll it back.")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The adapter's name.")]
RolloutArgument = Annotated[str, typer.Argument(metavar="ROLLOUT", help="The roll-out's id, such as rol_01hzx.")]

_STEP = re.compile(r"(\d+(?:\.\d+)?)%?:(\d+(?:\.\d+)?)([smhd]?)", re.ASCII)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_NO_LIMIT = "none"


def read_step(text: str) -> tuple[float, float]:
    """Reads a step such as `10:5m`: a share in percent, and a time in seconds, or with s, m, h or d."""
    found = _STEP.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is no step: write PERCENT:TIME, such as 10:5m.")
    return float(found[1]), float(found[2]) * _SECONDS[found[3]]


def read_limit(text: str) -> float | None:
    """Reads a limit: a number, or `none`."""
    if text == _NO_LIMIT:
        return None
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no limit: write a number, or none.") from None


@app.command()
def start(
    name: NameArgument,
    version: Annotated[int, typer.Argument(metavar="VERSION", help="The version that shall take over.", min=1)],
    step: Annotated[list[str], typer.Option(metavar="PERCENT:TIME", help="A step, such as 10:5m; give several.")],
    alias: Annotated[str, typer.Option(help="The alias that the version takes over.")] = "prod",
    min_requests: Annotated[
        int | None, typer.Option(help="Requests in a step before the version is judged (default: 10).", min=1)
    ] = None,
    error_rate: Annotated[
        str | None,
        typer.Option(help="The most errors above the stable version's; a fraction, or none (default: 0.02)."),
    ] = None,
    refusal_rate: Annotated[
        str | None, typer.Option(help="The same for requests that the engine refuses (default: 0.05).")
    ] = None,
    first_token_ratio: Annotated[
        str | None, typer.Option(help="The most times the stable version's median first token, or none (default: 2).")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Start a roll-out. The server rolls the version back by itself if it is worse than the present one.

    Example: graftwork adapters rollouts start support 3 --step 10:5m --step 50:10m
    """
    limits: dict[str, float | None] = {} if min_requests is None else {"min_requests": min_requests}
    rates = {"error_rate": error_rate, "refusal_rate": refusal_rate, "first_token_ratio": first_token_ratio}
    limits |= {limit: read_limit(text) for limit, text in rates.items() if text is not None}
    steps = [read_step(each) for each in step]
    with connect() as client:
        rollout = client.adapters.roll_out(name, version, steps, alias=alias, limits=limits or None)
    _show(rollout, as_json)


@app.command(name="list")
def list_rollouts(name: NameArgument, as_json: JsonFlag = False) -> None:
    """List the roll-outs of an adapter, the newest first.

    Example: graftwork adapters rollouts list support
    """
    with connect() as client:
        found = client.adapters.rollouts(name, limit=100)
    if as_json:
        return show_json(found.raw)
    rows = [
        (each.id, each.alias, f"{each.stable} → {each.version}", each.state, _progress(each), moment(each.created_at))
        for each in found
    ]
    return show_table(("id", "alias", "versions", "state", "step", "started"), rows, "No roll-outs.")


@app.command()
def show(name: NameArgument, rollout: RolloutArgument, as_json: JsonFlag = False) -> None:
    """Show a roll-out, and how the two versions fare in its present step.

    Example: graftwork adapters rollouts show support rol_01hzx
    """
    with connect() as client:
        _show(client.adapters.rollout(name, rollout), as_json)


@app.command()
def cancel(name: NameArgument, rollout: RolloutArgument, as_json: JsonFlag = False) -> None:
    """Cancel a roll-out. The alias leads to the stable version again.

    Example: graftwork adapters rollouts cancel support rol_01hzx
    """
    with connect() as client:
        _show(client.adapters.cancel_rollout(name, rollout), as_json)


def _show(rollout: "Rollout", as_json: bool) -> None:
    if as_json:
        return show_json(rollout.raw)
    show_facts(
        [
            ("id", rollout.id),
            ("alias", f"{rollout.adapter}@{rollout.alias}"),
            ("versions", f"{rollout.stable} → {rollout.version}"),
            ("state", rollout.state),
            ("step", _progress(rollout)),
            ("reason", rollout.reason),
        ]
    )
    if not rollout.figures:
        return None
    typer.echo()
    rows = [
        (version, each["requests"], each["errors"], each["refusals"], each["first_token_s"])
        for version, each in rollout.figures.items()
    ]
    return show_table(("version", "requests", "errors", "refusals", "first token (s)"), rows, "")


def _progress(rollout: "Rollout") -> str:
    step = rollout.steps[rollout.step]
    return f"{rollout.step + 1} of {len(rollout.steps)} ({step['weight']:g} %)"
