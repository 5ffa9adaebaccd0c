"""Renders the page at `/`, which tells a browser where to go.

Like the page at `/docs`, it has no script and loads nothing.
"""

from collections.abc import Mapping
from html import escape

import graftwork
from graftwork.api.openapi.docs_page import CONTENT_SECURITY_POLICY, STYLE

_MEANINGS = {
    "console": "The console: tenants, adapters, sessions, a playground. Sign in with a key.",
    "docs": "Every route, with examples.",
    "openapi": "The same for programs.",
    "health": "Whether the process is up.",
    "readiness": "Whether the engine and the database work.",
    "metrics": "Prometheus metrics; needs the admin key.",
    "models": "The models that a key can use; needs a tenant's key.",
}


def render(places: Mapping[str, str]) -> tuple[str, str]:
    """Returns the HTML page, and its content security policy. `places` maps names to paths."""
    rows = "".join(
        f'<tr><td><a href="{escape(path)}">{escape(path)}</a></td><td>{escape(_MEANINGS.get(name, name))}</td></tr>'
        for name, path in places.items()
    )
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Graftwork</title><style>{STYLE}</style></head><body>"
        f"<h1>Graftwork {escape(graftwork.__version__)}</h1>"
        "<p>One base model, many tenants' LoRA adapters, agent sessions that last.</p>"
        f"<table>{rows}</table>"
        "<p>From a terminal: <code>graftwork ask MODEL &quot;…&quot;</code>, <code>graftwork top</code>.</p></body></html>"
    )
    return page, CONTENT_SECURITY_POLICY
