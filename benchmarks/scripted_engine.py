"""An engine that computes nothing: it answers every request with the tokens of one fixed text, a token a step.

    python benchmarks/scripted_engine.py --listen unix:/tmp/engine.sock --model demo/model --together 32 --step-ms 25

The number of steps so far, each of a token for all `--streams`, stands in the file given with --progress.
As the real engine does, it sends one message a step with the tokens of every stream in it: at a Unix-domain socket over
the output socket beside it, to a gateway that opens one (see engine/rpc/outputs.py), and else over gRPC. It takes
messages where the checkout's engine does. It runs in a process of its
own, so a gateway's CPU time can be measured without an engine's, and speaks the wire of whichever checkout is imported.
"""

import argparse
import asyncio
import importlib
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import grpc.aio
from tokenizers import Tokenizer

import graftwork


def wire_module(name: str) -> Any:
    """A generated module of the wire, in whichever room the imported checkout keeps it."""
    package = Path(graftwork.__path__[0])
    (path,) = (package / "engine").glob(f"*/{name}.py")
    return importlib.import_module(".".join(("graftwork", *path.relative_to(package).with_suffix("").parts)))


wire, wire_grpc = wire_module("engine_pb2"), wire_module("engine_pb2_grpc")

TEXT = (
    "The harbour master keeps a list of every boat that comes in before dawn, who owns it, and what it carries. "
    "On Tuesday she counted forty-one of them: nine with herring, six with salt, and the rest with nothing but rain. "
    "“That is more than last year,” she said, and wrote it down twice; a café nearby — the only one — had already lit "
    "its lamps. Nobody asks why she writes it twice, and she has never told.\n\n"
)


@dataclass(slots=True)
class _Stream:
    """One request under way."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    part: int = 0
    """Which of the messages of a step has its token."""
    num_sent: int = 0
    is_admitted: bool = False
    is_traced: bool = False
    num_in_spans: int = 0
    """The tokens whose steps are in spans of a traced request."""
    spans: list[int] = field(default_factory=list)
    """The steps of the spans that are not reported yet."""
    reported_at: int = 0
    """The tokens at the last report."""


@dataclass(slots=True)
class _Gateway:
    """One conversation."""

    waiting: list[_Stream] = field(default_factory=list)
    running: dict[str, _Stream] = field(default_factory=dict)
    load_sent_at: float = float("-inf")

    def load(self, now: float, steps: int) -> dict[str, str]:
        """The load that a message has ten times a second, where the checkout's wire has a field for it."""
        if "load_json" not in wire.StepOutput.DESCRIPTOR.fields_by_name or now - self.load_sent_at < 0.1:
            return {}
        self.load_sent_at = now
        return {"load_json": json.dumps({"running_requests": len(self.running), "free_pages": 4096, "steps": steps})}


_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _OutputSocket:
    """Gateways' connections to the output socket, by ticket. The sizes and names are those of engine/rpc/outputs.py."""

    def __init__(self) -> None:
        self._connections: defaultdict[str, asyncio.Future[_Connection]] = defaultdict(asyncio.Future)

    async def listen(self, address: str) -> None:
        """Listens beside the gRPC address `address`, if that is a Unix-domain socket."""
        if address.startswith("unix:"):
            await asyncio.start_unix_server(self._enter, f"{address.removeprefix('unix:')}.out")

    async def of_call(self, context: Any) -> _Connection | None:
        """The connection that belongs to a call of Converse; None if its outputs go over gRPC."""
        tickets = [value for key, value in context.invocation_metadata() or () if key == "output-ticket"]
        return await self._connections[tickets[0]] if tickets else None

    async def _enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections[(await reader.readexactly(32)).decode()].set_result((reader, writer))


def _framed(message: Any) -> bytes:
    content: bytes = message.SerializeToString()
    return len(content).to_bytes(4, "big") + content


async def _messages_beside(reader: asyncio.StreamReader) -> AsyncIterator[Any]:
    with suppress(asyncio.IncompleteReadError):
        while True:
            length = int.from_bytes(await reader.readexactly(4), "big")
            yield wire.GatewayMessage.FromString(await reader.readexactly(length))


class Progress:
    """Tells in a file how many tokens each stream has got, over all engines of this process."""

    def __init__(self, path: Path | None, streams: int) -> None:
        self._path = path
        self._streams = streams
        self._num_tokens = 0

    def note(self, num_tokens: int) -> None:
        """Adds the tokens of a message."""
        before = self._num_tokens // self._streams
        self._num_tokens += num_tokens
        if self._path is not None and (steps := self._num_tokens // self._streams) > before:
            self._path.write_text(str(steps))


class ScriptedEngine(wire_grpc.EngineServicer):  # type: ignore[misc]
    """Answers as an engine of the model in `folder` would, whatever is asked."""

    def __init__(self, folder: Path, together: int, step_s: float, progress: Progress, parts: int = 1) -> None:
        """Nothing is answered until `together` requests wait; then their streams run in step. 1 answers at once.

        A step has `parts` messages, at equal distances.
        """
        self._parts = parts
        self.output_socket = _OutputSocket()
        self._progress = progress
        self._num_steps = 0
        self._config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        text_ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
        self._token_ids = list(islice(cycle(text_ids), self._config["max_position_embeddings"]))
        self._together = together
        self._step_s = step_s

    async def Converse(self, messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        gateway, connection = _Gateway(), await self.output_socket.of_call(context)
        beside = None if connection is None else connection[1]
        reading = asyncio.create_task(self._read(messages, gateway))
        reading_beside: asyncio.Task[None] | None = None
        if connection is not None and "takes_messages" in wire.StepOutput.DESCRIPTOR.fields_by_name:
            connection[1].write(_framed(wire.StepOutput(takes_messages=True)))
            reading_beside = asyncio.create_task(self._read(_messages_beside(connection[0]), gateway))
        clock = asyncio.get_running_loop().time
        next_at, turn = clock(), 0
        try:
            while not reading.done():
                next_at, turn = max(next_at + self._step_s / self._parts, clock()), (turn + 1) % self._parts
                await asyncio.sleep(next_at - clock())
                if len(gateway.waiting) >= self._together:
                    gateway.running |= {stream.request_id: stream for stream in gateway.waiting}
                    gateway.waiting.clear()
                streams = [stream for stream in gateway.running.values() if stream.part == turn]
                if outputs := [output for stream in streams for output in self._step(stream)]:
                    message = wire.StepOutput(outputs=outputs, **gateway.load(clock(), self._num_steps))
                    if beside is None:
                        yield message
                    else:
                        beside.write(_framed(message))
                    self._num_steps += 1
                    self._progress.note(sum(output.HasField("tokens") for output in outputs))
                for stream in [*gateway.running.values()]:
                    if stream.num_sent == stream.max_tokens:
                        del gateway.running[stream.request_id]
        finally:
            reading.cancel()
            if reading_beside is not None:
                reading_beside.cancel()
            if beside is not None:
                beside.close()

    async def _read(self, messages: AsyncIterator[Any], gateway: _Gateway) -> None:
        async for message in messages:
            if message.WhichOneof("message") == "submit":
                submit = message.submit
                max_tokens = min(_max_tokens(submit), len(self._token_ids))
                part = len(gateway.waiting) % self._parts
                stream = _Stream(submit.request_id, len(submit.prompt_token_ids), max_tokens, part)
                stream.is_traced = getattr(submit, "traced", False)
                gateway.waiting.append(stream)
            else:
                gateway.running.pop(message.cancel.request_id, None)

    def _step(self, stream: _Stream) -> list[Any]:
        """What one step brings to one stream."""
        request_id = stream.request_id
        if not stream.is_admitted:
            stream.is_admitted = True
            admitted = wire.Admitted(recomputed_tokens=stream.num_prompt_tokens, miss_reason="never_cached")
            return [wire.RequestOutput(request_id=request_id, admitted=admitted)]
        token_id = self._token_ids[stream.num_sent]
        stream.num_sent += 1
        outputs = [wire.RequestOutput(request_id=request_id, tokens=wire.Tokens(token_ids=[token_id]))]
        if stream.is_traced and (report := _report(stream, self._step_s)) is not None:
            outputs.append(report)
        if stream.num_sent == stream.max_tokens:
            finished = wire.Finished(reason="length", completion_tokens=stream.num_sent)
            outputs.append(wire.RequestOutput(request_id=request_id, finished=finished))
        return outputs

    async def Describe(self, request: Any, context: Any) -> Any:  # noqa: N802
        return wire.Description(
            model_name="scripted",
            fingerprint="sha256:" + "0" * 64,
            vocab_size=self._config["vocab_size"],
            context_tokens=self._config["max_position_embeddings"],
            eos_token_ids=[self._config["eos_token_id"]],
            num_layers=self._config["num_hidden_layers"],
            hidden_size=self._config["hidden_size"],
            max_lora_rank=64,
            page_tokens=16,
            device_pages=4096,
        )

    async def ReadStats(self, request: Any, context: Any) -> Any:  # noqa: N802
        return wire.Stats(fields_json="{}")

    async def ReadProgress(self, request: Any, context: Any) -> Any:  # noqa: N802
        return wire.Progress()

    async def RunSessionCommand(self, request: Any, context: Any) -> Any:  # noqa: N802
        return wire.SessionMemory(device_tokens=len(request.token_ids))


def _report(stream: _Stream, step_s: float) -> Any | None:
    """The spans of the steps so far, as large and as often as the real engine reports them (engine/step_recorder.py)."""
    if stream.num_sent - stream.num_in_spans >= max(16, stream.num_sent // 4):
        stream.spans.append(stream.num_sent - stream.num_in_spans)
        stream.num_in_spans = stream.num_sent
    if not stream.spans or (stream.num_sent - stream.reported_at) * step_s < 1.0:
        return None
    figures = {"name": "decode", "start_s": 1.0, "duration_s": 0.2, "busy_s": 0.1}
    figures |= {"batch_requests": 32.0, "batch_tokens": 32.0}
    spans = [wire.Span(steps=steps, tokens=steps, **figures) for steps in stream.spans]
    stream.spans, stream.reported_at = [], stream.num_sent
    return wire.RequestOutput(request_id=stream.request_id, traced=wire.Traced(run=1, sent_s=2.0, spans=spans))


def _max_tokens(submit: Any) -> int:
    """Checkouts of before November 2026 send a message in place of the JSON object."""
    if hasattr(submit, "sampling_json"):
        return int(json.loads(submit.sampling_json)["max_tokens"])
    return int(submit.sampling.max_tokens)


async def serve(arguments: argparse.Namespace) -> None:
    """Until the process is ended. Each address has an engine of its own."""
    progress, servers = Progress(arguments.progress, arguments.streams), []
    for listen in arguments.listen:
        server = grpc.aio.server(options=[("grpc.http2.max_ping_strikes", 0)])  # as the real engine
        step_s = arguments.step_ms / 1000
        engine = ScriptedEngine(arguments.model, arguments.together, step_s, progress, arguments.parts)
        wire_grpc.add_EngineServicer_to_server(engine, server)
        server.add_insecure_port(listen)
        await engine.output_socket.listen(listen)
        await server.start()
        servers.append(server)  # one that nobody holds ends
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--listen", required=True, action="append", help="a gRPC address: unix:PATH or HOST:PORT; may be repeated"
    )
    parser.add_argument("--model", type=Path, required=True, help="the folder of the model that the gateway serves")
    parser.add_argument("--together", type=int, default=1, help="requests that must wait before any is answered")
    parser.add_argument("--step-ms", type=float, default=25.0, help="milliseconds between two steps")
    parser.add_argument("--parts", type=int, default=1, help="messages of a step, each with a part of the streams")
    parser.add_argument("--streams", type=int, default=1, help="the streams of all engines, for --progress")
    parser.add_argument("--progress", type=Path, help="a file that tells the number of steps")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
