"""Claude Code at its defaults against a gateway: two turns of one conversation, each with a tool that really runs."""

import asyncio
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from graftwork.api.server.app import create_app
from graftwork.api.server.wiring import open_resources
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.stats import EngineDescription
from graftwork.platform.clock import SystemClock
from tests.api.fake_engine import BASE, END, FakeEngine
from tests.api.gateway_on_port import gateway_on_port
from tests.api.in_process_gateway import Gateway, gateway_settings, write_model_folder
from tests.sessions.tokenizer_and_templates import text_tokenizer

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]  # the first run installs the program

VERSION = "2.1.330"
CONTEXT_TOKENS = 262_144
"""Claude Code's own prompt has some 50,000 characters, and the tokens of the scripted model are short."""
CACHE = Path(os.environ.get("GRAFTWORK_CLIENTS_CACHE", Path.home() / ".cache" / "graftwork-clients"))
WITHIN_S = 240

READ, ECHO = "Tell me what notes.txt says.", "Now print that it has flown away."
TEXT = "A green heron stands in the pond."
PRINTED = "the-heron-has-flown"
READ_ANSWER, ECHO_ANSWER = "It speaks of a green heron.", "I have printed it."


def tool_call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass
class ScriptedModel(FakeEngine):
    """Answers each prompt with the first reply whose text it contains."""

    replies: Sequence[tuple[str, str]] = ()
    """Pairs of a text of the prompt and the answer. The latest stage of the conversation comes first."""
    prompts: list[str] = field(default_factory=list)

    async def describe(self) -> EngineDescription:
        return replace(await super().describe(), context_tokens=CONTEXT_TOKENS)

    def generate(self, request: EngineRequest) -> Any:
        prompt = text_tokenizer().decode(request.prompt_token_ids, skip_special_tokens=False)
        self.prompts.append(prompt)
        self.text = next((answer for said, answer in self.replies if said in prompt), "Yes.")
        return super().generate(request)


@pytest.fixture(scope="session")
def claude() -> Path:
    """The program, from the npm registry."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.fail("npm is not on PATH. Claude Code needs Node.js 20 or later with npm.")
    folder = CACHE / f"claude-code-{VERSION}"
    program = folder / "node_modules" / ".bin" / "claude"
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        package = f"@anthropic-ai/claude-code@{VERSION}"
        install = [npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", package]
        done = subprocess.run(install, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode != 0 or not program.exists():
            pytest.fail(f"Could not install {package}. Is the npm registry reachable?\n{done.stderr[-2000:]}")
    return program


@pytest.fixture
async def model_and_gateway(tmp_path: Path) -> AsyncIterator[tuple[ScriptedModel, Gateway]]:
    """A gateway whose model has a long context and follows a script."""
    folder = write_model_folder(tmp_path / "gateway" / BASE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT_TOKENS}))
    settings, model, clock = gateway_settings(tmp_path / "gateway", folder), ScriptedModel(), SystemClock()
    async with AsyncExitStack() as stack:
        resources = await stack.enter_async_context(open_resources(settings, engine=model, clock=clock))
        app = create_app(settings, resources=resources)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway.test")
        anonymous = await stack.enter_async_context(client)
        yield model, Gateway(app, resources, model, clock, anonymous)  # type: ignore[arg-type]  # its clock is real


class ClaudeCode:
    """Runs the program in one project, with nothing of this machine's settings."""

    def __init__(self, program: Path, folder: Path, url: str, key: str) -> None:
        self.project = folder / "project"
        self.project.mkdir()
        home = folder / "home"
        home.mkdir()
        self._command = [str(program), "--output-format", "stream-json", "--verbose", "--allowedTools", "Read,Bash"]
        self._variables = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": key,
            "ANTHROPIC_MODEL": BASE,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }

    async def ask(self, question: str, *options: str) -> list[dict[str, Any]]:
        """Asks one question, and returns the events that the program prints."""
        process = await asyncio.create_subprocess_exec(
            *self._command,
            *options,
            "-p",
            question,
            cwd=self.project,
            env=self._variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            printed, complaints = await asyncio.wait_for(process.communicate(), WITHIN_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, (printed[-3000:], complaints[-3000:])
        return [json.loads(line) for line in printed.splitlines()]


def blocks(events: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The content blocks of one type, in all messages that the program printed."""
    contents = [event["message"]["content"] for event in events if event["type"] in ("assistant", "user")]
    return [block for content in contents if isinstance(content, list) for block in content if block["type"] == kind]


async def test_two_turns(claude: Path, model_and_gateway: tuple[ScriptedModel, Gateway], tmp_path: Path) -> None:
    """The agent reads a file, answers, and goes on with a shell command; each prompt continues the one before."""
    model, gateway = model_and_gateway
    tenant = await gateway.tenant()
    async with tenant.client, gateway_on_port(gateway) as url:
        agent = ClaudeCode(claude, tmp_path, url, tenant.key)
        notes = agent.project / "notes.txt"
        notes.write_text(TEXT)
        model.replies = (
            (f"<tool_response>\n{PRINTED}", ECHO_ANSWER),
            (ECHO, "I print it.\n" + tool_call("Bash", command=f"echo {PRINTED}", description="Print it")),
            (TEXT, READ_ANSWER),
            (READ, tool_call("Read", file_path=str(notes))),
        )

        first = await agent.ask(READ)
        second = await agent.ask(ECHO, "--continue")
        usage = await tenant.usage()

    for events, answer in ((first, READ_ANSWER), (second, ECHO_ANSWER)):
        end = events[-1]
        assert (end["type"], end["subtype"], end["is_error"], end["num_turns"]) == ("result", "success", False, 2)
        assert end["result"] == answer
        assert end["permission_denials"] == []
    assert [block["name"] for block in blocks([*first, *second], "tool_use")] == ["Read", "Bash"]
    results = blocks([*first, *second], "tool_result")
    assert TEXT in str(results[0]["content"])
    assert PRINTED in str(results[1]["content"])
    assert [bool(result.get("is_error")) for result in results] == [False, False]
    assert len(model.prompts) == 4
    assert_each_prompt_continues_the_one_before(model.prompts)
    assert usage[0]["requests"] == 4
    tokens = second[-1]["usage"]
    counted = sum(len(request.prompt_token_ids) for request in model.requests[2:])
    assert tokens["input_tokens"] + tokens["cache_read_input_tokens"] == counted


def assert_each_prompt_continues_the_one_before(prompts: Sequence[str]) -> None:
    """Checks that KV of each prompt serves the next one, and that nothing for Anthropic's servers is in a prompt."""
    said = (READ, '"name": "Read"', TEXT, READ_ANSWER, ECHO, "I print it.", PRINTED)
    end = text_tokenizer().token_text(END)
    for prompt, length in zip(prompts, (1, 3, 5, 7), strict=True):
        conversation = prompt[prompt.index(READ) :]
        places = [conversation.find(text) for text in said[:length]]
        assert -1 not in places
        assert places == sorted(places)
        assert prompt.endswith(f"{end}\n<|im_start|>assistant\n")
        assert "x-anthropic-billing-header" not in prompt
        assert '"name": "DeferredToolPlaceholder"' not in prompt
        assert '"name": "Bash"' in prompt
    for earlier, later in itertools.pairwise(prompts):
        assert later.startswith(earlier.removesuffix("<|im_start|>assistant\n"))
