"""Tests of what is read from web servers and from the Hub, over real connections, and of what is not."""

import ssl
from collections.abc import AsyncIterator

import pytest

from graftwork.adapters.sources.source import SourceRules, parse_source
from graftwork.adapters.sources.web_reader import WebReader
from graftwork.platform.errors import Unavailable, ValidationFailed
from tests.adapters.sources.web_server import Page, WebServer, names, serving, tls_contexts

HERE = ("127.0.0.1/32",)
COMMIT = "c" * 40
Contexts = tuple[ssl.SSLContext, ssl.SSLContext]


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    return tls_contexts(tmp_path_factory.mktemp("tls"))


@pytest.fixture
async def server(contexts: Contexts) -> AsyncIterator[WebServer]:
    async with serving(contexts[0]) as server:
        yield server


@pytest.fixture
def reader(contexts: Contexts) -> WebReader:
    return WebReader(HERE, resolve=names(), trusted=contexts[1])


async def read(reader: WebReader, text: str) -> bytes:
    source = parse_source(text)
    async with reader.open(source, source.files[-1]) as remote:
        return b"".join([chunk async for chunk in remote.chunks])


async def test_a_file_is_read(server: WebServer, reader: WebReader) -> None:
    """A file comes whole, with its query sent, no key, and no wish for compression."""
    server.put("/a/x.gguf?sig=1", b"weights")

    content = await read(reader, server.url("/a/x.gguf?sig=1"))

    assert content == b"weights"
    head = server.heads[0].lower()
    assert "accept-encoding: identity" in head
    assert "authorization" not in head
    assert f"host: files.test:{server.port}" in head


async def test_a_redirect_is_followed_a_few_times(server: WebServer, reader: WebReader) -> None:
    """Redirects lead to the file, and a circle of them ends in a refusal."""
    server.put("/a.gguf", status=302, headers={"location": "/b.gguf"})
    server.put("/b.gguf", b"weights")
    server.put("/circle.gguf", status=302, headers={"location": "/circle.gguf"})

    assert await read(reader, server.url("/a.gguf")) == b"weights"
    with pytest.raises(ValidationFailed, match="redirects more than 5 times"):
        await read(reader, server.url("/circle.gguf"))
    assert len(server.heads) == 2 + 6


@pytest.mark.parametrize(
    "location",
    [
        "https://inner.test/",
        "https://10.0.0.1/",
        "https://[::1]/",
        "https://169.254.169.254/latest/meta-data",
        "https://[::ffff:10.0.0.1]/",
        "http://files.test/x.gguf",
        "file:///etc/passwd",
        "https://user@files.test/",
    ],
)
async def test_no_redirect_leads_inward(server: WebServer, contexts: Contexts, location: str) -> None:
    """A redirect to an inner address, or away from TLS, is refused before anything connects there."""
    reader = WebReader(HERE, resolve=names(inner_test="10.0.0.7"), trusted=contexts[1])
    server.put("/x.gguf", status=302, headers={"location": location})

    with pytest.raises(ValidationFailed) as caught:
        await read(reader, server.url("/x.gguf"))

    assert caught.value.code == "source_refused"
    assert len(server.heads) == 1


async def test_an_inner_address_is_refused(server: WebServer, contexts: Contexts) -> None:
    """Without a network that the operator allows, this machine is not reached by its name nor by its address."""
    outside = WebReader((), resolve=names(), trusted=contexts[1])

    for text in (server.url("/x.gguf"), f"https://127.0.0.1:{server.port}/x.gguf"):
        with pytest.raises(ValidationFailed, match="not public"):
            await read(outside, text)
    assert server.heads == []


async def test_a_redirect_keeps_to_the_rules(server: WebServer, contexts: Contexts) -> None:
    """A server that the operator allows cannot send the request on to one that it does not."""
    rules = SourceRules((server.url("/allowed/"),))
    bound = WebReader(HERE, rules=rules, resolve=names(), trusted=contexts[1])
    server.put("/allowed/a.gguf", status=302, headers={"location": "/allowed/b.gguf"})
    server.put("/allowed/b.gguf", b"weights")
    server.put("/allowed/c.gguf", status=302, headers={"location": "/other/b.gguf"})

    assert await read(bound, server.url("/allowed/a.gguf")) == b"weights"
    with pytest.raises(ValidationFailed, match="from which this server does not fetch"):
        await read(bound, server.url("/allowed/c.gguf"))


@pytest.mark.parametrize(
    ("page", "is_final"),
    [
        ({"status": 404}, True),
        ({"status": 403}, True),
        ({"status": 206, "content": b"part"}, True),
        ({"headers": {"content-encoding": "gzip"}}, True),
        ({"status": 503}, False),
        ({"status": 429}, False),
        ({"content": b"weights", "sent_bytes": 3}, False),
    ],
)
async def test_what_is_not_the_file(
    server: WebServer, reader: WebReader, page: dict[str, object], is_final: bool
) -> None:
    """A missing or compressed file is a refusal; an overloaded server and a broken connection may be tried again."""
    server.put("/x.gguf", **page)  # type: ignore[arg-type]

    with pytest.raises(ValidationFailed if is_final else Unavailable):
        await read(reader, server.url("/x.gguf"))


TAG = {"etag": '"v1"'}


@pytest.mark.parametrize("sizes", [[1, 2, 3], [30, 1, 1, 1, 1]])
async def test_a_broken_download_goes_on(server: WebServer, reader: WebReader, sizes: list[int]) -> None:
    """After a broken connection only the missing bytes are asked for, of the same version of the file."""
    content = bytes(range(100))
    page = Page(content, headers=TAG, gives_ranges=True)
    for size in reversed(sizes):
        page = Page(content, headers=TAG, sent_bytes=size, gives_ranges=True, then=page)
    server.pages["/x.gguf"] = page

    assert await read(reader, server.url("/x.gguf")) == content

    asked = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    assert len(server.heads) == 1 + len(sizes)
    for head, first in zip(server.heads[1:], asked, strict=True):
        assert f"range: bytes={first}-\r\n" in head.lower()
        assert 'if-range: "v1"' in head.lower()


OTHERS: dict[str, Page] = {
    "the whole of it again": Page(b"weights", headers=TAG),
    "another version": Page(b"WEIGHTS", headers={"etag": '"v2"'}, gives_ranges=True),
    "another size": Page(b"weights and more", headers=TAG, gives_ranges=True),
    "other bytes": Page(b"hts", 206, {**TAG, "content-range": "bytes 4-6/7"}),
    "compressed bytes": Page(b"weights", headers={**TAG, "content-encoding": "gzip"}, gives_ranges=True),
    "nothing": Page(status=503),
}


@pytest.mark.parametrize("other", OTHERS)
async def test_nothing_is_joined_that_is_not_one_file(server: WebServer, reader: WebReader, other: str) -> None:
    """Where the rest is not of the same bytes, the download has failed, and may be tried anew."""
    server.put("/x.gguf", b"weights", headers=TAG, sent_bytes=3, gives_ranges=True, then=OTHERS[other])

    with pytest.raises(Unavailable, match="its connection broke"):
        await read(reader, server.url("/x.gguf"))
    assert len(server.heads) == 2


@pytest.mark.parametrize("headers", [{}, {"etag": 'W/"v1"'}])
async def test_a_file_without_a_strong_tag_is_not_resumed(
    server: WebServer, reader: WebReader, headers: dict[str, str]
) -> None:
    """Without an entity tag that is of these very bytes, nobody can know that the rest fits."""
    server.put("/x.gguf", b"weights", headers=headers, sent_bytes=3, gives_ranges=True)

    with pytest.raises(Unavailable):
        await read(reader, server.url("/x.gguf"))
    assert len(server.heads) == 1


async def test_a_server_that_always_breaks_off_is_left(server: WebServer, reader: WebReader) -> None:
    """A file that comes byte by byte, each with a connection of its own, is given up."""
    server.put("/x.gguf", bytes(100), headers=TAG, sent_bytes=1, gives_ranges=True)

    with pytest.raises(Unavailable):
        await read(reader, server.url("/x.gguf"))
    assert len(server.heads) == 11


async def test_a_wrong_certificate_is_no_source(server: WebServer, contexts: Contexts) -> None:
    """A server whose certificate has another name, or whose name is unknown, is not read."""
    other = WebReader(HERE, resolve=names(other_test="127.0.0.1"), trusted=contexts[1])

    for host in ("other.test", "nobody.test"):
        with pytest.raises(Unavailable):
            await read(other, f"https://{host}:{server.port}/x.gguf")
    assert server.heads == []


async def test_the_hub_pins_a_revision(contexts: Contexts, server: WebServer) -> None:
    """The Hub, which may be a mirror of the operator's own, redirects to a file server and says which commit it meant."""
    async with serving() as hub:
        file = "/acme/lora/resolve/v1/adapter_model.safetensors"
        hub.put(file, status=302, headers={"location": server.url("/cdn"), "x-repo-commit": COMMIT})
        server.put("/cdn", b"weights", headers={"x-repo-commit": "d" * 40})
        reader = WebReader(HERE, hub=f"http://127.0.0.1:{hub.port}", resolve=names(), trusted=contexts[1])
        source = parse_source("hf:acme/lora@v1")

        async with reader.open(source, source.files[-1]) as remote:
            content = b"".join([chunk async for chunk in remote.chunks])

    assert content == b"weights"
    assert remote.source.shown == f"hf:acme/lora@{COMMIT}"


async def test_the_hub_does_not_lead_inward(contexts: Contexts, server: WebServer) -> None:
    """A redirect of the Hub is checked like any other."""
    async with serving() as hub:
        hub.put("/acme/lora/resolve/v1/adapter_model.safetensors", status=302, headers={"location": server.url("/cdn")})
        reader = WebReader((), hub=f"http://127.0.0.1:{hub.port}", resolve=names(), trusted=contexts[1])

        with pytest.raises(ValidationFailed, match="not public"):
            await read(reader, "hf:acme/lora@v1")
    assert server.heads == []


@pytest.mark.parametrize(
    ("allowed", "source", "is_sent"),
    [
        (("hf:acme/",), "hf:acme/lora@v1", True),
        (("hf:acme/lora",), "hf:acme/lora@v1", True),
        (("hf:", "hf:acme/"), "hf:acme/lora@v1", True),
        (("hf:", "https:"), "hf:acme/lora@v1", False),
        (("hf:", "hf:other/"), "hf:acme/lora@v1", False),
        (("hf:", "hf:acme/lo"), "hf:acme/lora@v1", False),
    ],
)
async def test_the_token_is_for_named_organisations(
    contexts: Contexts, server: WebServer, allowed: tuple[str, ...], source: str, is_sent: bool
) -> None:
    """The operator's token goes to the Hub for organisations that a rule names, and never to where the Hub redirects."""
    async with serving() as hub:
        file = "/acme/lora/resolve/v1/adapter_model.safetensors"
        hub.put(file, status=302, headers={"location": server.url("/cdn")})
        server.put("/cdn", b"weights")
        bound = WebReader(
            HERE,
            rules=SourceRules(allowed),
            hub=f"http://127.0.0.1:{hub.port}",
            hub_token="hf_secret",
            resolve=names(),
            trusted=contexts[1],
        )

        assert await read(bound, source) == b"weights"

    assert ("authorization: bearer hf_secret" in hub.heads[0].lower()) is is_sent
    assert "hf_secret" not in server.heads[0]


async def test_no_web_server_gets_the_token(contexts: Contexts, server: WebServer) -> None:
    """A source on the web gets no token, whatever it is called."""
    rules = SourceRules(("hf:acme/", "https:"))
    bound = WebReader(HERE, rules=rules, hub_token="hf_secret", resolve=names(), trusted=contexts[1])
    server.put("/acme/x.gguf", b"weights")

    assert await read(bound, server.url("/acme/x.gguf")) == b"weights"
    assert "authorization" not in server.heads[0].lower()
