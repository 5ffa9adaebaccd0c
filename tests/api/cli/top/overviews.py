"""Overviews as a server could answer them."""

from typing import Any

from graftwork.api.openapi.example_objects import SERVER_OVERVIEW
from graftwork.platform.answers.overview import Overview


def tenant(number: int, **changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = SERVER_OVERVIEW["tenants"][0]
    return row | {"id": f"ten_{number:02}", "name": f"Tenant {number:02}"} | changes


def overview(tenants: list[dict[str, Any]] | None = None, **changes: Any) -> Overview:
    """The example of the OpenAPI document, with other tenants."""
    rows = SERVER_OVERVIEW["tenants"] if tenants is None else tenants
    return Overview.read({**SERVER_OVERVIEW, "tenants": rows, **changes})
