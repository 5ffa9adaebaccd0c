"""Claude Code at its defaults against a gateway: two turns of one conversation, each with a tool that really runs."""

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.api.fake_engine import BASE, END
from tests.clients.environments import node_program
from tests.clients.programs_of_clients import output_of
from tests.clients.scripted_gateway import Reply, ScriptedGateway, tool_call
from tests.sessions.tokenizer_and_templates import text_tokenizer

WITHIN_S = 240

READ, ECHO = "Tell me what notes.txt says.", "Now print that it has flown away."
TEXT = "A green heron stands in the pond."
PRINTED = "the-heron-has-flown"
READ_ANSWER, ECHO_ANSWER = "It speaks of a green heron.", "I have printed it."


async def ask(question: str, *options: str, variables: Mapping[str, str], project: Path) -> list[dict[str, Any]]:
    """Asks Claude Code one question, and returns the events that it prints."""
    program = await asyncio.to_thread(node_program, "claude-code", "claude")
    command = [program, "--output-format", "stream-json", "--verbose", "--allowedTools", "Read,Bash", *options]
    settings = {"ANTHROPIC_MODEL": BASE, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", **variables}
    printed = await output_of([*command, "-p", question], variables=settings, folder=project, within_s=WITHIN_S)
    return [json.loads(line) for line in printed.splitlines()]


def blocks(events: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The content blocks of one type, in all messages that the program printed."""
    contents = [event["message"]["content"] for event in events if event["type"] in ("assistant", "user")]
    return [block for content in contents if isinstance(content, list) for block in content if block["type"] == kind]


async def test_two_turns(gateway: ScriptedGateway, variables: dict[str, str], tmp_path: Path) -> None:
    """The agent reads a file, answers, and goes on with a shell command; each prompt continues the one before."""
    project = tmp_path / "project"
    project.mkdir()
    notes = project / "notes.txt"
    notes.write_text(TEXT)
    echo = json.dumps({"command": f"echo {PRINTED}", "description": "Print it"})
    gateway.model.replies = (
        Reply(f"<tool_response>\n{PRINTED}", ECHO_ANSWER),
        Reply(ECHO, "I print it.\n" + tool_call("Bash", echo)),
        Reply(TEXT, READ_ANSWER),
        Reply(READ, tool_call("Read", json.dumps({"file_path": str(notes)}))),
    )

    first = await ask(READ, variables=variables, project=project)
    second = await ask(ECHO, "--continue", variables=variables, project=project)
    usage = await gateway.tenant.usage()

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
    exchanges = gateway.model.exchanges
    assert len(exchanges) == 4
    assert_each_prompt_continues_the_one_before([exchange.prompt for exchange in exchanges])
    assert usage[0]["requests"] == 4
    tokens = second[-1]["usage"]
    counted = sum(exchange.prompt_tokens for exchange in exchanges[2:])
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
