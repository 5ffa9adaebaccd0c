"""Defines `graftwork trace`, which shows what the server did when for one request, and switches traces on and off."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.api.cli.console.connect import connect, tenant_id_of
from graftwork.api.cli.console.output import JsonFlag, moment, show_json, show_table
from graftwork.api.sdk.transport.errors import NotFoundError

if TYPE_CHECKING:
    from graftwork.api.sdk.client import Graftwork
    from graftwork.platform.answers.timelines import Timeline

_SWITCHES = ("on", "off", "list")


def trace(
    request: Annotated[
        str, typer.Argument(metavar="REQUEST|on|off|list", help="A request's or turn's id, or a switch.")
    ],
    chrome: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace for Perfetto and chrome://tracing.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="With on and off: all requests of this tenant.")] = None,
    session: Annotated[str | None, typer.Option(help="With on and off: all turns of this session.")] = None,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="With on: log the token ids as well.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Draw the life of one request, or switch the tracing of a tenant or a session on or off.

    REQUEST is the x-request-id of an answer. Send it with the header `x-graftwork-trace: 1` to see the engine's steps.
    The switches need GRAFTWORK_ADMIN_KEY.

    Example: graftwork trace req_01hzx --chrome trace.json
    """
    with connect() as client:
        if request in _SWITCHES:
            if chrome is not None:
                raise typer.BadParameter("--chrome needs a request")
            return _switch(client, request, _target(client, request, tenant, session), token_ids, as_json)
        if tenant is not None or session is not None or token_ids:
            raise typer.BadParameter("--tenant, --session and --token-ids are for `trace on` and `trace off`")
        timeline = _timeline(client, request)
    if chrome is not None:
        from graftwork.api.cli.console.chrome_trace import chrome_trace

        chrome.write_text(json.dumps(chrome_trace(timeline), indent=1), encoding="utf-8")
    if as_json:
        return show_json(timeline.raw)
    from graftwork.api.cli.console.timeline_chart import show_timeline

    return show_timeline(timeline)


def _timeline(client: "Graftwork", request: str) -> "Timeline":
    """Reads a timeline with the tenant's key if there is one, and else, or of another tenant's request, as the operator."""
    if not os.environ.get("GRAFTWORK_ADMIN_KEY"):
        return client.timelines.get(request)
    if not os.environ.get("GRAFTWORK_API_KEY"):
        return client.admin.timeline(request)
    try:
        return client.timelines.get(request)
    except NotFoundError:
        return client.admin.timeline(request)


def _target(client: "Graftwork", act: str, tenant: str | None, session: str | None) -> str | None:
    if act == "list":
        return None
    if (tenant is None) == (session is None):
        raise typer.BadParameter(f"`trace {act}` needs either --tenant or --session")
    return session if tenant is None else tenant_id_of(client, tenant)


def _switch(client: "Graftwork", act: str, target: str | None, token_ids: bool, as_json: bool) -> None:
    if target is not None:
        if act == "on":
            client.admin.traces.on(target, token_ids=token_ids)
        else:
            client.admin.traces.off(target)
    switches = client.admin.traces.list()
    if as_json:
        return show_json(switches.raw)
    rows = [(one.id, "logged" if one.token_ids else "not logged", moment(one.changed_at)) for one in switches]
    return show_table(("traced", "token ids", "since"), rows, "Nothing is switched on.")
