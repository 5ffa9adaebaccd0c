"""Defines `graftwork quotas`, which shows and changes the limits of organisations, tenants, keys and end users."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from graftwork.api.cli.console.connect import connect, tenant_id_of
from graftwork.api.cli.console.output import JsonFlag, show_facts, show_json, size
from graftwork.platform.settings.values import parse_bytes

if TYPE_CHECKING:
    from graftwork.api.sdk.client import Graftwork
    from graftwork.platform.answers.admin import Quota, QuotaLimits, QuotaUse

app = typer.Typer(
    no_args_is_help=True, help="How much an organisation, tenant, key or end user may use. Needs GRAFTWORK_ADMIN_KEY."
)

NO_LIMIT = "none"
_TEXTS = {
    "monthly_budget": r"[0-9]{1,10}(\.[0-9]{1,6})?",
    "soft_budget": r"[0-9]{1,10}(\.[0-9]{1,6})?",
    "currency": "[A-Z]{3}",
}
"""The limits that are text, and their form."""
_USES = {
    "max_sessions": "sessions",
    "max_adapters": "adapters",
    "max_adapter_bytes": "adapter_bytes",
    "monthly_tokens": "monthly_tokens",
    "monthly_budget": "monthly_costs",
}
"""The limits whose use the server tells, and its name there."""

OwnerArgument = Annotated[
    str, typer.Argument(metavar="OWNER", help="The tenant's id or name, or an organisation's id.")
]
KeyOption = Annotated[str | None, typer.Option(help="The limits of this key of the tenant, by its id.")]
UserOption = Annotated[str | None, typer.Option(help="The limits of this end user of the tenant.")]
EachUserFlag = Annotated[bool, typer.Option("--each-user", help="The limits of each other end user of the tenant.")]


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


def _parsed(text: str, name: str = "") -> int | str | None:
    if text == NO_LIMIT:
        return None
    return text if name in _TEXTS else parse_bytes(text)


def _option(help: str, metavar: str = "N") -> Any:
    return typer.Option(help=help, metavar=metavar, callback=_limit)


def _text(name: str, help: str, metavar: str) -> Any:
    def checked(text: str | None) -> str | None:
        if text is not None and text != NO_LIMIT and not re.fullmatch(_TEXTS[name], text):
            raise typer.BadParameter(f"{text!r}: write {metavar} such as {'USD' if name == 'currency' else '100.00'}")
        return text

    return typer.Option(help=help, metavar=metavar, callback=checked)


@app.command()
def show(
    owner: OwnerArgument,
    key: KeyOption = None,
    user: UserOption = None,
    each_user: EachUserFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Show the limits of a tenant, of one of its keys or end users, or of an organisation, and what is used of them.

    Example: graftwork quotas show acme
    """
    chosen = _Chosen(owner, key, user, each_user)
    with connect() as client:
        _show(chosen.calls(client)[0](), as_json)


@app.command(name="set")
def set_limits(
    owner: OwnerArgument,
    key: KeyOption = None,
    user: UserOption = None,
    each_user: EachUserFlag = False,
    requests_per_minute: Annotated[str | None, _option("Inference requests per minute.")] = None,
    tokens_per_minute: Annotated[str | None, _option("Prompt and completion tokens per minute.")] = None,
    max_concurrent_requests: Annotated[str | None, _option("Answers that are generated at the same time.")] = None,
    max_adapters: Annotated[str | None, _option("Adapters it may keep, or may have pushed first.")] = None,
    max_adapter_bytes: Annotated[str | None, _option("All its adapters together.", "SIZE")] = None,
    max_adapter_rank: Annotated[str | None, _option("The largest rank of an adapter.")] = None,
    max_sessions: Annotated[str | None, _option("Open sessions, or those it may have begun.")] = None,
    max_device_kv_bytes: Annotated[str | None, _option("Its cache on the device; more moves out.", "SIZE")] = None,
    max_host_kv_bytes: Annotated[str | None, _option("Its cache on the host; more moves out.", "SIZE")] = None,
    max_file_bytes: Annotated[str | None, _option("All its files together.", "SIZE")] = None,
    monthly_tokens: Annotated[str | None, _option("Prompt and completion tokens per month.")] = None,
    monthly_budget: Annotated[str | None, _text("monthly_budget", "What a month may cost.", "AMOUNT")] = None,
    soft_budget: Annotated[
        str | None, _text("soft_budget", "The cost of a month that sends an alert.", "AMOUNT")
    ] = None,
    currency: Annotated[str | None, _text("currency", "The currency of the budgets.", "CODE")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Change the named limits, and keep the others. `none` removes a limit. Sizes may be written as 512MiB.

    Example: graftwork quotas set acme --requests-per-minute 60 --monthly-budget 100.00 --currency USD
    """
    others = ("owner", "key", "user", "each_user", "as_json", "others")
    options = {name: text for name, text in locals().items() if name not in others}
    given = {name: _parsed(text, name) for name, text in options.items() if text is not None}
    if not given:
        raise typer.BadParameter("name at least one limit, such as --requests-per-minute 60")
    chosen = _Chosen(owner, key, user, each_user)
    with connect() as client:
        get, put = chosen.calls(client)
        limits = _limits(get()) | given
        _show(put(**cast("QuotaLimits", limits)), as_json)


@dataclass(frozen=True)
class _Chosen:
    """Whose limits the user means."""

    owner: str
    key: str | None
    user: str | None
    each_user: bool

    def calls(self, client: "Graftwork") -> "tuple[Callable[[], Quota], Callable[..., Quota]]":
        """Returns the functions that read and replace the limits. Raises typer.BadParameter for a wrong choice."""
        quotas = client.admin.quotas
        narrower = [self.key is not None, self.user is not None, self.each_user]
        if sum(narrower) > 1:
            raise typer.BadParameter("choose one of --key, --user and --each-user")
        if self.owner.startswith("org_"):
            if any(narrower):
                raise typer.BadParameter("keys and end users belong to a tenant: name it instead of the organisation")
            return partial(quotas.get_organisation, self.owner), partial(quotas.set_organisation, self.owner)
        tenant_id = tenant_id_of(client, self.owner)
        if self.key is not None:
            return partial(quotas.get_key, tenant_id, self.key), partial(quotas.set_key, tenant_id, self.key)
        if self.user is not None or self.each_user:
            return partial(quotas.get_user, tenant_id, self.user), partial(quotas.set_user, tenant_id, self.user)
        return partial(quotas.get, tenant_id), partial(quotas.set, tenant_id)


def _show(quota: "Quota", as_json: bool) -> None:
    if as_json:
        return show_json(quota.raw)
    used = getattr(quota, "used", None)
    uses = {} if used is None else {limit: _used(name, used) for limit, name in _USES.items()}
    return show_facts(
        [
            (name.replace("_", " "), _shown(name, limit) + (f" ({uses[name]} used)" if name in uses else ""))
            for name, limit in _limits(quota).items()
        ]
    )


def _used(name: str, used: "QuotaUse") -> str:
    found = getattr(used, name)
    if name == "monthly_costs":
        return ", ".join(f"{cost.amount} {cost.currency}" for cost in found) or "0"
    return _shown(name, found)


def _limits(quota: "Quota") -> dict[str, int | str | None]:
    """Return every limit that this client knows by its name."""
    return {name: getattr(quota, name) for name in type(quota).model_fields if name != "used"}


def _shown(name: str, limit: int | str | None) -> str:
    if limit is None:
        return "no limit" if name != "currency" else "none"
    return size(limit) if name.endswith("_bytes") and isinstance(limit, int) else str(limit)
