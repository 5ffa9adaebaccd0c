"""Graftwork's whole engine, its loop on a thread of its own: scheduler, runner, sampler, events to a sink."""

from importlib.metadata import version
from queue import SimpleQueue
from secrets import token_bytes
from threading import Thread

from our_engine import YardstickArtifacts, greedy_request, open_engine
from peers.protocol import Opening, Task, serve

from graftwork.engine.core.events import RequestOutput, TokensGenerated
from graftwork.engine.messages import SubmitRequest
from graftwork.platform.errors import GraftworkError


class GraftworkPeer:
    """A `PeerEngine`."""

    version = f"graftwork {version('graftwork')}"

    def __init__(self, opening: Opening) -> None:
        artifacts = YardstickArtifacts(opening.adapters, opening.model / "artifacts")
        engine = open_engine(opening.base, artifacts, opening.dtype)
        self._digests = artifacts.digests
        self._inbox = engine.loop.inbox
        Thread(target=engine.loop.run, daemon=True).start()

    def generate(self, task: Task) -> list[list[int]]:
        """In a domain of its own, so that no prompt is cached. Raises the error of a request that has one."""
        steps: SimpleQueue[list[RequestOutput]] = SimpleQueue()
        domain = token_bytes(8)
        digests = [None if adapter is None else self._digests[adapter] for adapter in task.adapters]
        requests = [
            greedy_request(prompt, digest, task.output_tokens, domain)
            for prompt, digest in zip(task.prompts, digests, strict=True)
        ]
        for request in requests:
            self._inbox.put(SubmitRequest(request, steps.put))
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        num_running = len(requests)
        while num_running:
            for output in steps.get():
                num_running -= output.is_last
                match output.event:
                    case TokensGenerated(token_ids):
                        tokens[output.request_id].extend(token_ids)
                    case GraftworkError() as error:
                        raise error
        return list(tokens.values())


if __name__ == "__main__":
    serve(GraftworkPeer)
