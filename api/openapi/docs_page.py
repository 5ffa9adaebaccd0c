"""Renders the OpenAPI document as one HTML page for `/docs`.

The page has no script and loads nothing. So it works without the internet, and with a strict content security policy.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#1b1f24;background:#fff}
h1{font-size:1.6rem}h2{margin-top:2.5rem;border-bottom:1px solid #d0d7de;padding-bottom:.3rem}
details{border:1px solid #d0d7de;border-radius:6px;margin:.5rem 0;padding:.4rem .8rem}summary{cursor:pointer}
code,pre{font:13px/1.45 ui-monospace,monospace}pre{background:#f6f8fa;padding:.8rem;overflow:auto;border-radius:6px}
table{border-collapse:collapse;width:100%}td,th{border-top:1px solid #d0d7de;padding:.3rem .6rem;text-align:left}
.method{display:inline-block;min-width:4.5rem;font-weight:600}
"""
_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
CONTENT_SECURITY_POLICY = f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; frame-ancestors 'none'"
"""The content security policy of the page. It allows only the style that is inside the page."""

_Operation = tuple[str, str, Mapping[str, Any]]


def render(document: Mapping[str, Any]) -> str:
    """Returns the HTML page for a complete OpenAPI document."""
    operations = [
        (path, method, operation) for path, each in document["paths"].items() for method, operation in each.items()
    ]
    sections = [_section(tag, operations) for tag in document["tags"]]
    info = document["info"]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(info['title'])}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info['description'])}</p>"
        '<p>The same for programs: <a href="/openapi.json">/openapi.json</a></p>'
        f"{''.join(sections)}<h2>Schemas</h2>{''.join(_schemas(document))}</body></html>"
    )


def _section(tag: Mapping[str, str], operations: Iterable[_Operation]) -> str:
    found = [_operation(*each) for each in operations if tag["name"] in each[2]["tags"]]
    return f"<h2>{escape(tag['name'])}</h2><p>{escape(tag['description'])}</p>{''.join(found)}"


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> str:
    title = f'<span class="method">{method.upper()}</span> <code>{escape(path)}</code>'
    parts = [f"<p>{escape(operation['description'])}</p>", *_parameters(operation)]
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        parts.append(f"<h4>Body: {escape(media)}, {_schema_name(content['schema'])}</h4>{_examples(content)}")
    for status, response in operation["responses"].items():
        parts += _response(status, response)
    return f"<details><summary>{title}</summary>{''.join(parts)}</details>"


def _parameters(operation: Mapping[str, Any]) -> Iterator[str]:
    named = [each for each in operation.get("parameters", ()) if "name" in each]
    if named:
        rows = [
            f"<tr><td><code>{escape(each['name'])}</code></td><td>{escape(each['in'])}</td>"
            f"<td><code>{escape(json.dumps(each['schema'], ensure_ascii=False))}</code></td></tr>"
            for each in named
        ]
        yield f"<h4>Parameters</h4><table><tr><th>name</th><th>in</th><th>schema</th></tr>{''.join(rows)}</table>"


def _response(status: str, response: Mapping[str, Any]) -> Iterator[str]:
    if "$ref" in response:
        yield f"<p><b>{status}</b> {escape(_last(response['$ref']))}</p>"
        return
    yield f"<p><b>{status}</b> {escape(response['description'])}</p>"
    for media, content in response.get("content", {}).items():
        yield f"<p>{escape(media)}: {_schema_name(content.get('schema', {}))}</p>{_examples(content)}"


def _examples(content: Mapping[str, Any]) -> str:
    return "".join(f"<pre>{_json(each['value'])}</pre>" for each in content.get("examples", {}).values())


def _schemas(document: Mapping[str, Any]) -> Iterator[str]:
    for name, schema in sorted(document["components"]["schemas"].items()):
        yield (
            f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>'
            f"<p>{escape(schema.get('description', ''))}</p><pre>{_json(schema)}</pre></details>"
        )


def _schema_name(schema: Mapping[str, Any]) -> str:
    """Returns links to the schemas that a body can have."""
    alternatives = schema.get("oneOf") or schema.get("anyOf") or [schema]
    names = [_last(each["$ref"]) for each in alternatives if "$ref" in each]
    return " or ".join(f'<a href="#{escape(name)}">{escape(name)}</a>' for name in names) or "any"


def _last(reference: str) -> str:
    return reference.rpartition("/")[2]


def _json(value: Any) -> str:
    return escape(json.dumps(value, indent=2, ensure_ascii=False), quote=False)
