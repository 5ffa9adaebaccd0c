"""Reads the console's page, scripts and styles from the package, and names the version of all of them together.

Owns the headers that bind what the page may load and who may embed it. The page is written by hand: it has no build
step, and loads nothing from another address. Never reads a file that a request names: a request finds only the files
that were read here.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

_MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_PAGE = "index.html"
_VERSION_MARK = "{version}"
_PRELOADS_MARK = "<!-- preloads -->"

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class ConsoleFile:
    """One file, as it is sent."""

    body: bytes
    media_type: str


@dataclass(frozen=True, slots=True)
class ConsoleFiles:
    """All files of the console."""

    page: ConsoleFile
    by_name: Mapping[str, ConsoleFile]
    """The scripts and styles by their paths, such as `pages/tenants.js`."""
    version: str
    """A digest of all files, which is part of their addresses."""


@cache
def console_files() -> ConsoleFiles:
    """Reads the files, once in a process."""
    found = dict(_read(files("graftwork") / "api" / "console" / "static"))
    page = found.pop(_PAGE)
    digest = hashlib.sha256(page.body)
    for name, file in sorted(found.items()):
        digest.update(name.encode() + b"\0" + file.body)
    version = digest.hexdigest()[:16]
    return ConsoleFiles(ConsoleFile(_page(page.body.decode(), found, version), page.media_type), found, version)


def _page(text: str, found: Mapping[str, ConsoleFile], version: str) -> bytes:
    """Returns the page with the version in its addresses. Scripts that import each other are fetched at the same time."""
    scripts = sorted(name for name in found if name.endswith(".js") and name != "theme.js")
    preloads = "\n".join(
        f'  <link rel="modulepreload" href="console/static/{_VERSION_MARK}/{name}">' for name in scripts
    )
    return text.replace(f"  {_PRELOADS_MARK}", preloads).replace(_VERSION_MARK, version).encode()


def _read(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, ConsoleFile]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _read(entry, f"{prefix}{entry.name}/")
        elif (kind := _MEDIA_TYPES.get(f".{entry.name.rpartition('.')[2]}")) is not None:
            yield f"{prefix}{entry.name}", ConsoleFile(entry.read_bytes(), kind)
