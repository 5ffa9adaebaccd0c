"""A web server on a port of this machine, with TLS or without, whose pages a test sets."""

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from graftwork.platform.outbound.public_addresses import Resolve
from tests.certificates import Authority

HOST = "files.test"


@dataclass
class Page:
    """What is answered for a path."""

    content: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    sent_bytes: int | None = None
    """So many bytes come, and then the connection ends; None sends all."""
    then: "Page | None" = None
    """What is answered the next time; None answers the same again."""
    gives_ranges: bool = False

    def answer(self, first: int | None = None) -> bytes:
        """The answer to a request for the bytes from `first` on, or for all."""
        if first is not None and self.gives_ranges:
            size = len(self.content)
            named = {"content-range": f"bytes {first}-{size - 1}/{size}"} | self.headers
            return Page(self.content[first:], 206, named, self.sent_bytes).answer()
        headers = {"content-length": str(len(self.content)), "connection": "close"} | self.headers
        lines = [f"HTTP/1.1 {self.status} X", *(f"{name}: {value}" for name, value in headers.items() if value)]
        return "\r\n".join([*lines, "", ""]).encode() + self.content[: self.sent_bytes]


@dataclass
class WebServer:
    pages: dict[str, Page] = field(default_factory=dict)
    heads: list[str] = field(default_factory=list)
    """The heads of all requests."""
    port: int = 0

    def put(self, path: str, content: bytes = b"", **more: object) -> None:
        self.pages[path] = Page(content, **more)  # type: ignore[arg-type]

    def url(self, path: str) -> str:
        return f"https://{HOST}:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        path = head.split(" ")[1]
        page = self.pages.get(path, Page(status=404))
        self.pages[path] = page.then or page
        asked = re.search(r"^range: bytes=(\d+)-\r$", head, re.MULTILINE | re.IGNORECASE)
        writer.write(page.answer(int(asked[1]) if asked else None))
        await writer.drain()
        writer.close()


@asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None) -> AsyncIterator[WebServer]:
    server = WebServer()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()


def tls_contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Returns the contexts of a server with a certificate for HOST, and of a client that trusts it."""
    authority = Authority(folder, "ca")
    certificate = authority.issue("files", HOST)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate.cert, certificate.key)
    trusted = ssl.create_default_context(cafile=str(authority.ca))
    trusted.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return server, trusted


def names(**addresses: str) -> Resolve:
    """A resolver: HOST is this machine, and addresses are themselves, and other names are what the test says, with `_` for the dots."""

    async def resolve(host: str, port: int) -> Sequence[str]:
        found = {HOST: "127.0.0.1"} | {name.replace("_", "."): address for name, address in addresses.items()}
        if host not in found and not set(host) <= set("0123456789abcdef.:"):
            raise OSError("no such name")
        return [found.get(host, host)]

    return resolve
