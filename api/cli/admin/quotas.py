"""Defines `graftwork quotas`, which shows and changes the limits of a tenant."""

from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from graftwork.api.cli.admin.tenants import TenantArgument
from graftwork.api.cli.console.connect import connect, tenant_id_of
from graftwork.api.cli.console.output import JsonFlag, show_facts, show_json, size
from graftwork.platform.settings.values import parse_bytes

if TYPE_CHECKING:
    from graftwork.platform.answers.admin import Quota, QuotaLimits

app = typer.Typer(no_args_is_help=True, help="How much a tenant may use. Needs GRAFTWORK_ADMIN_KEY.")

NO_LIMIT = "none"


def _limit(text: str | None) -> str | None:
    """Checks the form of a limit, and returns the text.

    The text is not converted yet, because `none` differs from a missing limit. Raises typer.BadParameter for a wrong
    form.
    """
    if text is None:
        return None
    try:
        _parsed(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no limit; {error}, or `none` to lift it") from error
    return text


def _parsed(text: str) -> int | None:
    return None if text == NO_LIMIT else parse_bytes(text)


def _option(help: str, metavar: str = "N") -> Any:
    return typer.Option(help=help, metavar=metavar, callback=_limit)


@app.command()
def show(tenant: TenantArgument, as_json: JsonFlag = False) -> None:
    """Show a tenant's limits.

    Example: graftwork quotas show acme
    """
    with connect() as client:
        _show(client.admin.quotas.get(tenant_id_of(client, tenant)), as_json)


@app.command(name="set")
def set_limits(
    tenant: TenantArgument,
    requests_per_minute: Annotated[str | None, _option("Inference requests per minute.")] = None,
    tokens_per_minute: Annotated[str | None, _option("Prompt and completion tokens per minute.")] = None,
    max_concurrent_requests: Annotated[str | None, _option("Answers that are generated at the same time.")] = None,
    max_adapters: Annotated[str | None, _option("Adapters it may keep.")] = None,
    max_adapter_bytes: Annotated[str | None, _option("All its adapters together.", "SIZE")] = None,
    max_adapter_rank: Annotated[str | None, _option("The largest rank of an adapter.")] = None,
    max_sessions: Annotated[str | None, _option("Open sessions.")] = None,
    max_device_kv_bytes: Annotated[str | None, _option("Its cache on the device; more moves out.", "SIZE")] = None,
    max_host_kv_bytes: Annotated[str | None, _option("Its cache on the host; more moves out.", "SIZE")] = None,
    max_file_bytes: Annotated[str | None, _option("All its files together.", "SIZE")] = None,
    monthly_tokens: Annotated[str | None, _option("Prompt and completion tokens per month.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Change the named limits, and keep the others. `none` removes a limit. Sizes may be written as 512MiB.

    Example: graftwork quotas set acme --requests-per-minute 60 --max-adapter-bytes 512MiB
    """
    options = {name: text for name, text in locals().items() if name not in ("tenant", "as_json")}
    given = {name: _parsed(text) for name, text in options.items() if text is not None}
    if not given:
        raise typer.BadParameter("name at least one limit, such as --requests-per-minute 60")
    with connect() as client:
        tenant_id = tenant_id_of(client, tenant)
        limits = _limits(client.admin.quotas.get(tenant_id)) | given
        _show(client.admin.quotas.set(tenant_id, **cast("QuotaLimits", limits)), as_json)


def _show(quota: "Quota", as_json: bool) -> None:
    if as_json:
        return show_json(quota.raw)
    return show_facts([(name.replace("_", " "), _shown(name, limit)) for name, limit in _limits(quota).items()])


def _limits(quota: "Quota") -> dict[str, int | None]:
    """Return every limit that this client knows by its name."""
    return {name: getattr(quota, name) for name in type(quota).model_fields}


def _shown(name: str, limit: int | None) -> str:
    if limit is None:
        return "no limit"
    return size(limit) if name.endswith("_bytes") else str(limit)
