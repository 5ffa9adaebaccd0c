"""A gateway in a process of its own, over a fake engine: it can be killed, or stopped for a while.

    python -m tests.api.gateway_process '{"data_dir": …, "holds_after": 2, …}'

Prints its URL when it serves. The argument has the settings, after how many tokens each answer waits for ever, and how many
answers a tenant may have in flight.
"""

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graftwork.api.server.app import create_app
from graftwork.api.server.uvicorn_server import HttpServer, bind, url_of
from graftwork.api.server.wiring import open_resources
from graftwork.platform.settings.settings import Settings
from tests.api.fake_engine import MAX_ANSWERS, FakeEngine


async def serve(options: Mapping[str, Any]) -> None:
    values = dict(options)
    engine = FakeEngine(holds_after=values.pop("holds_after", None), max_answers=values.pop("max_answers", MAX_ANSWERS))
    values |= {name: Path(values[name]) for name in ("data_dir", "model")}
    settings = Settings(**values)
    with bind("127.0.0.1", 0) as listening:
        async with open_resources(settings, engine=engine) as resources:
            app = create_app(settings, resources=resources)

            def tell() -> None:
                sys.stdout.write(f"{url_of(listening)}\n")
                sys.stdout.flush()

            server = HttpServer(app, tell)
            await server.serve(sockets=[listening])


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
