"""How many files and functions of ours a request passes through, and how long a chain of pure forwards it meets.

    python benchmarks/journeys.py [--checkout DIR] [--list] [--json OUT]

Starts `graftwork engine` and `graftwork gateway --demo`, each under `traced_process.py`, and makes three journeys over
HTTP, each once to warm up and once recorded, in both processes, from the request to 0.3 s after its answer's end:

    chat     a streamed chat completion with an adapter, its prompt cached and its adapter resident
    turn     in a new session, a streamed turn that calls one tool, and the streamed turn that its output starts
    upload   a new adapter's files, inspected, stored and tried by the engine

A file counts if one of its functions was entered or resumed; imports happen in the warm-up. `forwards.py` says what a
pure forward is; a chain counts forwards that called one another in this very journey.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from forwards import first_line, forwards_of, longest_chain
from rich.console import Console
from rich.table import Table
from server_processes import OWN_ROOT, Checkout
from traced_process import Function, Recording
from traced_server import traced_demo

LIMITS = {"chat": 90, "turn": 115}
"""Files that a journey may enter at most."""
_TENANT = "Blackbeard Charters"
_ADAPTER = "pirate"
_QUESTION = "What is the weather in Lisbon?"
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_OUTPUT = {"city": "Lisbon", "temperature_c": 21, "conditions": "sunny"}


@dataclass(frozen=True, slots=True)
class Journey:
    """What was entered, in both processes together."""

    name: str
    functions: tuple[Function, ...]
    chain: tuple[Function, ...]
    """The longest of pure forwards."""

    @property
    def files(self) -> list[str]:
        return sorted({function.file for function in self.functions})


def make_journeys(checkout: Checkout) -> list[Journey]:
    with traced_demo(checkout) as server, server.client(server.demo_key(_TENANT)) as client:
        weights = WeightsFile(checkout.root / "demo" / "adapters" / _ADAPTER)
        sessions = [new_session(client) for _ in range(2)]
        works: dict[str, Callable[[], None]] = {
            "chat": lambda: chat(client),
            "turn": lambda: turn_with_tool(client, sessions.pop()),
            "upload": lambda: weights.upload(client),
        }
        journeys = []
        for name, work in works.items():
            work()
            journeys.append(_journey(name, checkout, server.record(work)))
    return journeys


def chat(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": _QUESTION}]
    body = {"model": _ADAPTER, "messages": messages, "stream": True, "temperature": 0, "max_tokens": 40}
    text = client.post("/v1/chat/completions", json=body).raise_for_status().text
    assert text.endswith("data: [DONE]\n\n"), text


def new_session(client: httpx.Client) -> str:
    """The path of a session that may call the tool."""
    settings = {"tools": [_TOOL], "sampling": {"temperature": 0, "max_tokens": 80}}
    session = client.post("/v1/sessions", json={"model": _ADAPTER, **settings}).raise_for_status().json()
    return f"/v1/sessions/{session['id']}"


def turn_with_tool(client: httpx.Client, path: str) -> None:
    """Both turns of a session at `path`."""
    events = _events(client.post(f"{path}/turns", json={"input": _QUESTION, "stream": True}))
    assert events[-1]["type"] == "turn.awaiting_tool", events
    outputs = [{"call_id": call_id, "output": json.dumps(_OUTPUT)} for call_id in events[-1]["call_ids"]]
    assert len(outputs) == 1, events
    events = _events(client.post(f"{path}/tool_outputs", json={"outputs": outputs, "stream": True}))
    assert events[-1]["type"] == "turn.completed", events


class WeightsFile:
    """A demo adapter's files, of which each upload differs from the last in one bit."""

    def __init__(self, folder: Path) -> None:
        self._config = (folder / "adapter_config.json").read_bytes()
        self._weights = bytearray((folder / "adapter_model.safetensors").read_bytes())
        self._num_uploads = 0

    def upload(self, client: httpx.Client) -> None:
        self._num_uploads += 1
        self._weights[-4 * self._num_uploads] ^= 1  # the lowest bit of a weight's mantissa
        files = {"config": ("c", self._config), "weights": ("w", bytes(self._weights))}
        client.post("/v1/adapters", data={"name": f"new-{self._num_uploads}"}, files=files).raise_for_status()


def show(journeys: list[Journey]) -> None:
    table = Table("journey", "files", "limit", "functions", "longest chain of forwards")
    for journey in journeys:
        limit = str(LIMITS.get(journey.name, ""))
        table.add_row(
            journey.name, str(len(journey.files)), limit, str(len(journey.functions)), str(len(journey.chain))
        )
    console = Console(width=120)
    console.print(table)
    for journey in journeys:
        console.print(f"{journey.name}: " + " → ".join(f"{one.file}:{one.line} {one.name}" for one in journey.chain))


def _journey(name: str, checkout: Checkout, recordings: Mapping[str, Recording]) -> Journey:
    functions: list[Function] = []
    chains: list[list[Function]] = []
    for recording in recordings.values():
        functions += recording.functions
        chains.append(_longest_chain(checkout, recording))
    return Journey(name, tuple(dict.fromkeys(functions)), tuple(max(chains, key=len)))


def _longest_chain(checkout: Checkout, recording: Recording) -> list[Function]:
    files = {function.file for function in recording.functions}
    lines = {(file, first_line(node)) for file in files for node in forwards_of(checkout.package / file)}
    found = {place for place, one in enumerate(recording.functions) if (one.file, one.line) in lines}
    calls: dict[int, set[int]] = defaultdict(set)
    for caller, callee in recording.calls:
        calls[caller].add(callee)
    return [recording.functions[place] for place in longest_chain(found, calls)]


def _events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = response.raise_for_status().text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=OWN_ROOT)
    parser.add_argument("--list", action="store_true", help="name the files of each journey")
    parser.add_argument("--json", type=Path, help="write every function here")
    arguments = parser.parse_args()
    journeys = make_journeys(Checkout(arguments.checkout.absolute()))
    show(journeys)
    for journey in journeys if arguments.list else ():
        print("\n".join([f"\n{journey.name}:", *journey.files]))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(journey) for journey in journeys], indent=1))


if __name__ == "__main__":
    main()
