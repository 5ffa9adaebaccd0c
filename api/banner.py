"""What `graftwork serve` says to the person who started it."""

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from graftwork.api.demo_seed import DemoTenant
from graftwork.platform.settings import Settings


def show_ready(console: Console, url: str, model: str, settings: Settings) -> None:
    console.print(f"Graftwork serves [bold]{model}[/bold] at [bold]{url}[/bold]", soft_wrap=True)
    if settings.admin_key is None:
        console.print(f"Admin key: {settings.data_dir / 'admin.key'}", soft_wrap=True)


def show_demo(console: Console, url: str, base: str, tenants: Sequence[DemoTenant]) -> None:
    """The tenants with their keys, and a request to paste."""
    table = Table(title="Demo tenants")
    for heading in ("Tenant", "Adapter", "Key"):
        table.add_column(heading, no_wrap=True, overflow="ignore")
    for tenant in tenants:
        table.add_row(tenant.name, tenant.adapter or f"(base) {base}", tenant.key)
    console.print(table, soft_wrap=True)
    first = tenants[0]
    body = {
        "model": first.adapter or base,
        "messages": [{"role": "user", "content": "Where is my parcel?"}],
        "max_tokens": 64,
    }
    console.print("Try it:", soft_wrap=True)
    console.out(f"curl {url}/v1/chat/completions \\")
    console.out(f"  -H 'Authorization: Bearer {first.key}' -H 'Content-Type: application/json' \\")
    console.out(f"  -d '{json.dumps(body)}'", highlight=False)
