"""Runs `oidc-provider`, a certified OpenID Connect provider, as a process, and a person's browser for its pages."""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx

from tests.clients.environments import node, node_packages

_PROGRAM = Path(__file__).parent / "programs" / "identity_provider.mjs"
_MOST_PAGES = 20


@dataclass
class ProviderProcess:
    """The running provider."""

    issuer: str
    process: asyncio.subprocess.Process

    async def rotate(self) -> None:
        """Replaces the signing keys of the provider, and forgets its sessions."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"rotate\n")
        await self.process.stdin.drain()
        assert "rotated" in await _line(self.process)


async def _line(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """Returns the next JSON object that the process prints. The package prints notices of its own between them."""
    assert process.stdout is not None
    text = b""
    async with asyncio.timeout(60):
        while not text.startswith(b"{"):
            text = await process.stdout.readline()
            assert text, "the provider has ended"
    line: dict[str, Any] = json.loads(text)
    return line


@asynccontextmanager
async def identity_provider(folder: Path, redirect_uri: str) -> AsyncGenerator[ProviderProcess]:
    """A provider on a free port, which sends browsers back to `redirect_uri`. `folder` gets the program."""
    built = await asyncio.to_thread(node_packages, "identity-provider")
    (folder / "node_modules").symlink_to(built / "node_modules")
    program = Path(shutil.copy(_PROGRAM, folder))
    process = await asyncio.create_subprocess_exec(
        node(),
        str(program),
        redirect_uri,
        cwd=folder,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield ProviderProcess((await _line(process))["issuer"], process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


def walk(browser: httpx.Client, address: str, person: str, until: str, *, refuse: bool = False) -> str:
    """Does what a person does on the provider's pages, from `address` on: signs in, agrees, and enters no code.

    Returns the first address that begins with `until`, or the last page's text when no form is left. With `refuse`, the
    person follows the link that ends the sign-in.
    """
    method, form, has_refused = "GET", None, False
    for _ in range(_MOST_PAGES):
        answer = browser.request(method, address, data=form)
        method, form = "GET", None
        if answer.is_redirect:
            address = urljoin(address, answer.headers["location"])
            if address.startswith(until):
                return address
            continue
        page = answer.text
        if has_refused:
            return page
        links = re.findall(r'href="([^"]*/abort)"', page)
        if refuse and links:
            address, has_refused = urljoin(address, unescape(links[0])), True
            continue
        found = re.search(r'<form[^>]*action="([^"]+)"[^>]*>(.*?)</form>', page, re.DOTALL)
        if found is None:
            return page
        fields = re.findall(r'<(?:input|button)[^>]*name="([^"]+)"(?:[^>]*value="([^"]*)")?', found[2])
        filled = {name: unescape(value) for name, value in fields}
        filled |= {name: person for name in ("login", "password") if name in filled}
        method, form, address = "POST", filled, urljoin(address, unescape(found[1]))
    raise AssertionError(f"the provider's pages have no end: {address}")
