"""One greedy stream without drafts, from our engine in this process or from a served one, for `one_stream.py`.

If the variable ONE_STREAM_ADDRESS is set, the engine is the one that listens at that gRPC address.
"""

import asyncio
import os
from importlib.metadata import version
from queue import SimpleQueue
from secrets import token_bytes
from threading import Thread

from our_engine import YardstickArtifacts, greedy_request
from peers.protocol import Opening, PeerEngine, Task, serve

from graftwork.engine.build.devices import keep_freed_memory
from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.events import RequestOutput, TokensGenerated
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.messages import SubmitRequest
from graftwork.engine.rpc.client import GrpcEngineClient
from graftwork.platform.errors import GraftworkError
from graftwork.platform.memory import make_full_collections_rare

VERSION = f"graftwork {version('graftwork')}"


class LoopAlone:
    """The engine's loop on a thread of this process; its sink is a queue."""

    version = VERSION

    def __init__(self, opening: Opening) -> None:
        config = EngineConfig(model=opening.base, device="cpu", dtype=opening.dtype, max_draft_tokens=0)
        keep_freed_memory()  # as every engine process does
        engine = build_engine(config, YardstickArtifacts([], opening.model / "artifacts").source)
        self._inbox = engine.loop.inbox
        Thread(target=engine.loop.run, daemon=True).start()
        make_full_collections_rare()  # as a served engine does

    def generate(self, task: Task) -> list[list[int]]:
        """Raises the error of a request that has one."""
        return [self._answer(request) for request in _requests(task)]

    def _answer(self, request: EngineRequest) -> list[int]:
        steps: SimpleQueue[list[RequestOutput]] = SimpleQueue()
        self._inbox.put(SubmitRequest(request, steps.put))
        tokens: list[int] = []
        while True:
            for output in steps.get():
                match output.event:
                    case TokensGenerated(token_ids):
                        tokens.extend(token_ids)
                    case GraftworkError() as error:
                        raise error
                if output.is_last:
                    return tokens


class OverGrpc:
    """The engine at an address, through the gateway's own client."""

    version = VERSION

    def __init__(self, address: str) -> None:
        self._runner = asyncio.Runner()
        self._client = self._runner.run(self._connect(address))

    def generate(self, task: Task) -> list[list[int]]:
        """Raises the error of a request that has one."""
        return [self._runner.run(self._answer(request)) for request in _requests(task)]

    async def _connect(self, address: str) -> GrpcEngineClient:
        return GrpcEngineClient(address)

    async def _answer(self, request: EngineRequest) -> list[int]:
        tokens: list[int] = []
        async for event in self._client.generate(request):
            if isinstance(event, TokensGenerated):
                tokens.extend(event.token_ids)
        return tokens


def _requests(task: Task) -> list[EngineRequest]:
    """The task's requests, in a domain of their own, so that no prompt is cached."""
    domain = token_bytes(8)
    return [greedy_request(prompt, None, task.output_tokens, domain) for prompt in task.prompts]


def open_engine(opening: Opening) -> PeerEngine:
    address = os.environ.get("ONE_STREAM_ADDRESS")
    return LoopAlone(opening) if address is None else OverGrpc(address)


if __name__ == "__main__":
    serve(open_engine)
