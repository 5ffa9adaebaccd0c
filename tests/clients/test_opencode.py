"""Tests of the coding agent opencode: two turns in one project, each with a tool of its own that really runs."""

import asyncio
import json
import os
from pathlib import Path

from tests.clients.environments import node_packages
from tests.clients.programs_of_clients import output_of
from tests.clients.scripted_gateway import Reply, ScriptedGateway, tool_call

READ, WRITE = "Tell me what notes.txt says.", "Now write that into copy.txt."
READ_ANSWER, WRITE_ANSWER = "It speaks of a green heron.", "The copy is written."
TEXT = "A green heron stands in the pond."
WITHIN_S = 300


def write_project(folder: Path, gateway: ScriptedGateway) -> None:
    """Writes a project with one file, whose settings name the gateway."""
    folder.mkdir()
    (folder / "notes.txt").write_text(TEXT)
    options = {"baseURL": f"{gateway.url}/v1", "apiKey": gateway.tenant.key}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"tiny": {}}}
    (folder / "opencode.json").write_text(json.dumps({"provider": {"graftwork": provider}}))


async def test_two_turns(gateway: ScriptedGateway, variables: dict[str, str], tmp_path: Path) -> None:
    """The agent reads a file that the model asks for, goes on with the same conversation, and writes another."""
    project = tmp_path / "project"
    write_project(project, gateway)
    copy = project / "copy.txt"
    has_tools = ('"name": "write"', '"name": "read"')
    gateway.model.replies = (
        Reply("Wrote file successfully", WRITE_ANSWER, has_tools),
        Reply(WRITE, tool_call("write", json.dumps({"filePath": str(copy), "content": TEXT})), has_tools),
        Reply(TEXT, READ_ANSWER, has_tools),
        Reply(READ, tool_call("read", json.dumps({"filePath": str(project / "notes.txt")})), has_tools),
    )
    packages = await asyncio.to_thread(node_packages, "opencode")
    program = [
        str(packages / "node_modules" / "opencode-linux-x64" / "bin" / "opencode"),
        "run",
        "--model",
        "graftwork/tiny",
    ]
    shell = {"SHELL": os.environ.get("SHELL", "/bin/sh"), **variables}

    first = await output_of([*program, READ], variables=shell, folder=project, within_s=WITHIN_S)
    second = await output_of([*program, "--continue", WRITE], variables=shell, folder=project, within_s=WITHIN_S)

    assert READ_ANSWER in first
    assert WRITE_ANSWER in second
    assert copy.read_text() == TEXT
    with_tools = [exchange for exchange in gateway.model.exchanges if has_tools[0] in exchange.prompt]
    said = (READ, TEXT, READ_ANSWER, WRITE, "Wrote file successfully")
    assert [sum(text in exchange.prompt for text in said) for exchange in with_tools] == [1, 2, 4, 5]
