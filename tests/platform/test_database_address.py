"""Tests of the addresses of databases."""

import asyncio

import pytest
from sqlalchemy import make_url, text

from graftwork.platform.database import Database
from graftwork.platform.errors import InvalidRequest, Unavailable

SSL_REQUEST = (8).to_bytes(4) + (80877103).to_bytes(4)
"""The first message of a client that wants TLS. Source: PostgreSQL's documentation, "Message Formats"."""


async def first_message(parameters: str) -> bytes:
    """The first eight bytes that a server gets from a client with these parameters, which it then sends away."""
    received: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        message = await reader.readexactly(8)
        if not received.done():
            received.set_result(message)
        writer.write(b"N")  # no TLS here
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    database = Database(f"postgresql+asyncpg://u@127.0.0.1:{port}/d{parameters}")
    with pytest.raises(Unavailable):
        await database.upgrade_to_head()
    await database.close()
    server.close()
    return await received


async def test_sslmode_is_obeyed() -> None:
    """`sslmode=require` and `verify-full` ask for TLS, and go no further without it; `disable` does not ask."""
    assert await first_message("?sslmode=require") == SSL_REQUEST
    assert await first_message("?sslmode=disable") != SSL_REQUEST
    assert await first_message("?ssl=require") == SSL_REQUEST


@pytest.mark.postgres
async def test_parameters_of_libpq_reach_the_server(postgres_url: str) -> None:
    """An address as other programs take it connects, and its application_name is the connection's."""
    url = make_url(postgres_url).update_query_string("sslmode=prefer&application_name=graft&connect_timeout=20")
    database = Database(url.render_as_string(hide_password=False))

    async with database.read() as session:
        name = await session.scalar(text("SHOW application_name"))
    await database.close()

    assert name == "graft"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("foo", "it is no address"),
        ("mysql://u@h/d", "mysql is not served"),
        ("postgresql+asyncpg://u@h/d?channel_binding=require", "'channel_binding' cannot be honoured"),
        ("postgresql+asyncpg://u@h/d?connect_timeout=soon", "connect_timeout"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused(url: str, told: str) -> None:
    """The error names the setting and the part of the address that is wrong, and shows the right form."""
    with pytest.raises(InvalidRequest, match=r"postgresql://USER:PASSWORD@HOST/NAME") as caught:
        Database(url)

    assert told in caught.value.message
