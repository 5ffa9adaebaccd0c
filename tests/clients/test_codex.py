"""Tests of the coding agent Codex CLI at its defaults: two turns in one project, each with a tool that really runs."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clients.environments import node_program
from tests.clients.programs_of_clients import output_of
from tests.clients.scripted_gateway import Reply, ScriptedModel, scripted_gateway, tool_call

UNKNOWN_MODEL = "tiny"
"""A name that Codex does not know. It uses its defaults for such a model."""
KNOWN_MODEL = "gpt-5.5"
"""A name that Codex knows. It sends such a model a custom tool for patches, with a grammar."""
WITHIN_S = 300.0

READ, COUNT = "Tell me what notes.txt says.", "Now count its words."
NOTES = "A green heron stands in the pond."
READ_ANSWER, COUNT_ANSWER = "It speaks of a green heron.", "It has seven words."


@dataclass
class Project:
    """A folder in which Codex works, and the model behind it."""

    folder: Path
    variables: dict[str, str]
    model: ScriptedModel

    async def run(self, *arguments: str) -> str:
        """Runs `codex exec` with these arguments, and returns what it printed as the answer."""
        codex = await asyncio.to_thread(node_program, "codex", "codex")
        command = [codex, "exec", "--skip-git-repo-check", *arguments]
        return await output_of(command, variables=self.variables, folder=self.folder, within_s=WITHIN_S)


@pytest.fixture(params=[UNKNOWN_MODEL])
async def project(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Project]:
    """A project with one file, and settings of Codex that name a gateway on a port."""
    folder, home = tmp_path / "project", tmp_path / "home"
    for each in (folder, home):
        each.mkdir()
    (folder / "notes.txt").write_text(f"{NOTES}\n")
    async with scripted_gateway(tmp_path / "gateway", model_name=request.param) as gateway:
        provider = (
            f'name = "graftwork"\nbase_url = "{gateway.url}/v1"\nenv_key = "GRAFTWORK_API_KEY"\n'
            'wire_api = "responses"\n'
        )
        config = f'model = "{request.param}"\nmodel_provider = "graftwork"\n[model_providers.graftwork]\n{provider}'
        (home / "config.toml").write_text(config)
        variables = {"HOME": str(home), "CODEX_HOME": str(home), "GRAFTWORK_API_KEY": gateway.tenant.key}
        yield Project(folder, variables, gateway.model)


async def test_two_turns(project: Project) -> None:
    """Codex runs the commands that the model asks for, and its second turn has the whole first one in its prompt."""
    project.model.replies = (
        Reply("7 notes.txt", COUNT_ANSWER),
        Reply(COUNT, tool_call("exec_command", '{"cmd": "wc -w notes.txt"}')),
        Reply(NOTES, READ_ANSWER),
        Reply(READ, tool_call("exec_command", '{"cmd": "cat notes.txt"}')),
    )

    first = await project.run(READ)
    second = await project.run("resume", "--last", COUNT)

    assert (first.strip(), second.strip()) == (READ_ANSWER, COUNT_ANSWER)
    said = (READ, NOTES, READ_ANSWER, COUNT, "7 notes.txt")
    prompts = [exchange.prompt for exchange in project.model.exchanges]
    assert [sum(words in prompt for words in said) for prompt in prompts] == [1, 2, 4, 5]
    assert all('"name": "exec_command"' in prompt for prompt in prompts)
    assert all('"name": "multi_agent_v1.close_agent"' in prompt for prompt in prompts)
    assert not any("web_search" in prompt for prompt in prompts)


@pytest.mark.parametrize("project", [KNOWN_MODEL], indirect=True)
async def test_a_custom_tool(project: Project) -> None:
    """Codex applies a patch that is a call of its custom tool, whose grammar is enforced, and goes on after it."""
    patch = f"*** Begin Patch\n*** Add File: copy.txt\n+{NOTES}\n*** End Patch"
    call = tool_call("apply_patch", json.dumps({"input": patch}))
    project.model.replies = (Reply("Success. Updated", "It is copied."), Reply("Copy it.", call))

    said = await project.run("--sandbox", "workspace-write", "Copy it.")

    assert said.strip() == "It is copied."
    assert (project.folder / "copy.txt").read_text() == f"{NOTES}\n"
    assert json.dumps({"input": patch}) in project.model.exchanges[-1].prompt
    assert all(
        "Begin Patch" in json.loads(exchange.grammar)["calls"][3]["schema"]["properties"]["input"]["pattern"]
        for exchange in project.model.exchanges
    )
