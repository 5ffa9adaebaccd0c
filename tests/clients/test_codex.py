"""Tests of the coding agent Codex CLI at its defaults: two turns in one project, each with a tool that really runs."""

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.stats import EngineDescription
from tests.api.fake_engine import FakeEngine
from tests.api.gateway_on_port import gateway_on_port
from tests.api.in_process_gateway import gateway_settings, open_gateway, write_model_folder
from tests.sessions.tokenizer_and_templates import text_tokenizer

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]

VERSION = "0.169.0"
UNKNOWN_MODEL = "tiny"
"""A name that Codex does not know. It uses its defaults for such a model."""
KNOWN_MODEL = "gpt-5.5"
"""A name that Codex knows. It sends such a model a custom tool for patches, with a grammar."""
CACHE = Path(os.environ.get("GRAFTWORK_CLIENTS_CACHE", Path.home() / ".cache" / "graftwork-clients"))
CONTEXT_TOKENS = 262_144
"""Codex begins with thousands of words of instructions and tools, and the model's tokens are short."""
WITHIN_S = 300.0

READ, COUNT = "Tell me what notes.txt says.", "Now count its words."
NOTES = "A green heron stands in the pond."
READ_ANSWER, COUNT_ANSWER = "It speaks of a green heron.", "It has seven words."


def tool_call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass
class ScriptedEngine(FakeEngine):
    """Answers a prompt by the latest words in it that the script has."""

    replies: Mapping[str, str] = field(default_factory=dict)
    """Maps words of a prompt to the answer, the latest stage of the conversation first."""
    model_name: str = UNKNOWN_MODEL
    prompts: list[str] = field(default_factory=list)
    grammars: list[str] = field(default_factory=list)

    async def describe(self) -> EngineDescription:
        return replace(await super().describe(), context_tokens=CONTEXT_TOKENS, model_name=self.model_name)

    def answer_to(self, request: EngineRequest) -> str:
        prompt = text_tokenizer().decode(request.prompt_token_ids, skip_special_tokens=False)
        self.prompts.append(prompt)
        self.grammars.append("" if request.grammar is None else request.grammar.text)
        return next((answer for words, answer in self.replies.items() if words in prompt), self.text)


@dataclass
class Project:
    """A folder in which Codex works, and the model behind it."""

    folder: Path
    codex: str
    variables: dict[str, str]
    engine: ScriptedEngine

    async def run(self, *arguments: str) -> str:
        """Run `codex exec` with these arguments, and return what it printed as the answer."""
        command = [self.codex, "exec", *arguments]
        running = asyncio.to_thread(completed, command, f"run {' '.join(arguments)}", self.folder, self.variables)
        return await running


def completed(command: Sequence[str], purpose: str, folder: Path, variables: Mapping[str, str] | None = None) -> str:
    """Run a command to its end, and return its output. A command that fails is a failure of the test."""
    environment = None if variables is None else {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **variables}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"Could not {purpose} within {WITHIN_S} s. It printed:\n{error.stdout!r}\n{error.stderr!r}")
    if done.returncode != 0:
        pytest.fail(f"Could not {purpose}. It printed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout


@pytest.fixture(scope="module")
def codex() -> str:
    """The path of the pinned Codex CLI, installed from the npm registry once."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.fail("npm is not on PATH: Codex CLI needs Node.js 20 or later with npm.")
    folder = CACHE / f"codex-{VERSION}"
    program = folder / "node_modules" / ".bin" / "codex"
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        install = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), f"@openai/codex@{VERSION}"]
        completed(install, "install Codex CLI: is the npm registry reachable from here", folder)
    return str(program)


@pytest.fixture(params=[UNKNOWN_MODEL])
async def project(tmp_path: Path, codex: str, request: pytest.FixtureRequest) -> AsyncIterator[Project]:
    """A project with one file, and settings of Codex that name a gateway on a port."""
    folder, home = tmp_path / "project", tmp_path / "home"
    for each in (folder, home):
        each.mkdir()
    (folder / "notes.txt").write_text(f"{NOTES}\n")
    engine = ScriptedEngine(model_name=request.param)
    settings = gateway_settings(tmp_path / "data", write_model_folder(tmp_path / "model", CONTEXT_TOKENS))
    async with open_gateway(settings, engine=engine) as gateway, gateway_on_port(gateway) as url:
        tenant = await gateway.tenant()
        async with tenant.client:
            provider = (
                f'name = "graftwork"\nbase_url = "{url}/v1"\nenv_key = "GRAFTWORK_API_KEY"\nwire_api = "responses"\n'
            )
            config = f'model = "{request.param}"\nmodel_provider = "graftwork"\n[model_providers.graftwork]\n{provider}'
            (home / "config.toml").write_text(config)
            variables = {"HOME": str(home), "CODEX_HOME": str(home), "GRAFTWORK_API_KEY": tenant.key}
            yield Project(folder, codex, variables, engine)


async def test_two_turns(project: Project) -> None:
    """Codex runs the commands that the model asks for, and its second turn has the whole first one in its prompt."""
    project.engine.replies = {
        "7 notes.txt": COUNT_ANSWER,
        COUNT: tool_call("exec_command", cmd="wc -w notes.txt"),
        NOTES: READ_ANSWER,
        READ: tool_call("exec_command", cmd="cat notes.txt"),
    }

    first = await project.run("--skip-git-repo-check", READ)
    second = await project.run("--skip-git-repo-check", "resume", "--last", COUNT)

    assert (first.strip(), second.strip()) == (READ_ANSWER, COUNT_ANSWER)
    said = (READ, NOTES, READ_ANSWER, COUNT, "7 notes.txt")
    assert [sum(words in prompt for words in said) for prompt in project.engine.prompts] == [1, 2, 4, 5]
    assert all('"name": "exec_command"' in prompt for prompt in project.engine.prompts)
    assert all('"name": "multi_agent_v1.close_agent"' in prompt for prompt in project.engine.prompts)
    assert not any("web_search" in prompt for prompt in project.engine.prompts)


@pytest.mark.parametrize("project", [KNOWN_MODEL], indirect=True)
async def test_a_custom_tool(project: Project) -> None:
    """Codex applies a patch that is a call of its custom tool, whose grammar is enforced, and goes on after it."""
    patch = f"*** Begin Patch\n*** Add File: copy.txt\n+{NOTES}\n*** End Patch"
    project.engine.replies = {"Success. Updated": "It is copied.", "Copy it.": tool_call("apply_patch", input=patch)}

    said = await project.run("--skip-git-repo-check", "--sandbox", "workspace-write", "Copy it.")

    assert said.strip() == "It is copied."
    assert (project.folder / "copy.txt").read_text() == f"{NOTES}\n"
    assert json.dumps({"input": patch}) in project.engine.prompts[-1]
    assert all(
        "Begin Patch" in json.loads(grammar)["calls"][3]["schema"]["properties"]["input"]["pattern"]
        for grammar in project.engine.grammars
    )
