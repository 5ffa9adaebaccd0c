"""Tests of `graftwork ask`, `models`, `completion` and `--version`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import graftwork as package
from graftwork.api.cli.commands import ask as command
from graftwork.api.cli.commands.ask import CUT
from tests.api.cli.conftest import Graftwork
from tests.api.cli.live_gateway import LiveGateway
from tests.api.in_process_gateway import adapter_upload
from tests.sessions.tokenizer_and_templates import text_tokenizer

ANSWER = "The weather in Paris is sunny."


@pytest.fixture
def graftwork(graftwork: Graftwork, live: LiveGateway, monkeypatch: pytest.MonkeyPatch) -> Graftwork:
    for name, value in (("URL", live.url), ("API_KEY", live.key)):
        monkeypatch.setenv(f"GRAFTWORK_{name}", value)
    live.engine.requests.clear()
    return graftwork


def prompt_of(live: LiveGateway) -> str:
    return text_tokenizer().decode(live.engine.requests[-1].prompt_token_ids)


def test_the_answer_alone_is_on_standard_output(graftwork: Graftwork, live: LiveGateway) -> None:
    """Standard output has the answer and a newline; the system message goes before the question."""
    result = graftwork("ask", "tiny", "What is the weather?", "--system", "Be brief.")

    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{ANSWER}\n", "")
    assert prompt_of(live).index("Be brief.") < prompt_of(live).index("What is the weather?")


def test_what_is_piped_in_follows_the_question(graftwork: Graftwork, live: LiveGateway) -> None:
    """A pipe alone is a question too; with both, the pipe comes after the text."""
    graftwork("ask", "tiny", "Sum it up:", input="a long text\n")
    both = prompt_of(live)
    graftwork("ask", "tiny", input="only the pipe\n")

    assert both.index("Sum it up:") < both.index("a long text")
    assert "only the pipe" in prompt_of(live)


def test_no_question_is_an_error(graftwork: Graftwork, live: LiveGateway) -> None:
    """Without text and pipe nothing is sent, and the exit status is 1."""
    result = graftwork("ask", "tiny", input="")

    assert result.exit_code == 1
    assert "There is no question" in result.output
    assert live.engine.requests == []


def test_a_cut_answer_has_a_status_of_its_own(graftwork: Graftwork) -> None:
    """An answer that ends at the most tokens is printed as far as it goes, with status 3 and a line on standard error."""
    result = graftwork("ask", "tiny", "Hello?", "--max-tokens", "2")

    assert result.exit_code == CUT
    assert ANSWER.startswith(result.stdout.strip())
    assert "--max-tokens" in result.stderr


def test_a_schema_reaches_the_engine(graftwork: Graftwork, live: LiveGateway, tmp_path: Path) -> None:
    """The file's schema is enforced strictly; a file that is no schema is refused before anything is sent."""
    schema, wrong = tmp_path / "schema.json", tmp_path / "wrong.json"
    schema.write_text('{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}')
    wrong.write_text("[1]")

    graftwork("ask", "tiny", "Where?", "--schema", str(schema))
    refused = graftwork("ask", "tiny", "Where?", "--schema", str(wrong))

    assert live.engine.requests[-1].grammar is not None
    assert len(live.engine.requests) == 1
    assert refused.exit_code == 1
    assert "must hold a JSON schema" in refused.output


def test_the_whole_answer_as_json(graftwork: Graftwork) -> None:
    """`--json` prints the server's answer, with its usage."""
    body = json.loads(graftwork("ask", "tiny", "Hello?", "--json").stdout)

    assert body["choices"][0]["message"]["content"] == ANSWER
    assert body["usage"]["completion_tokens"] > 0


def test_an_unknown_model(graftwork: Graftwork) -> None:
    """An unknown model is an error of one line."""
    result = graftwork("ask", "nobodys", "Hello?")

    assert result.exit_code == 1
    assert "does not exist" in result.output
    assert result.stdout == ""


def test_models_are_listed(graftwork: Graftwork, live: LiveGateway) -> None:
    """The base model and the tenant's adapters are in the list, as text with what they serve and as JSON."""
    headers = {"authorization": f"Bearer {live.key}"}
    pushed = httpx.post(f"{live.url}/v1/adapters", data={"name": "pirate"}, files=adapter_upload(), headers=headers)
    assert pushed.status_code == 201, pushed.text
    shown = [line.split() for line in graftwork("models").stdout.splitlines()]
    listed = json.loads(graftwork("models", "--json").stdout)["data"]
    httpx.delete(f"{live.url}/v1/adapters/pirate", headers=headers).raise_for_status()

    context = str(listed[0]["max_model_len"])
    assert [one["id"] for one in listed] == ["tiny", "pirate"]
    assert ["tiny", "tiny", "base", "model", context] in shown
    assert any(line[0] == "pirate" and line[2:] == ["adapter", context] for line in shown if line)


def test_the_models_text_is_no_command_to_the_terminal(
    graftwork: Graftwork, live: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a terminal may not get is taken out of each piece of the answer; a pipe gets it as it is."""
    live.engine.lines.extend(["a\x1b[2Jb", "a\x1b[2Jb"])
    piped = graftwork("ask", "tiny", "Hello?").stdout
    monkeypatch.setattr(command, "terminal_text", lambda text: text.replace("\x1b", "·"))
    shown = graftwork("ask", "tiny", "Hello?").stdout

    assert piped == "a\x1b[2Jb\n"
    assert shown == "a·[2Jb\n"


def test_the_temperature_reaches_the_engine(graftwork: Graftwork, live: LiveGateway) -> None:
    """What a flag says is sampled with; without it the server's default is."""
    graftwork("ask", "tiny", "Hello?", "--temperature", "0.25")
    graftwork("ask", "tiny", "Hello?")

    first, second = (request.sampling.temperature for request in live.engine.requests[-2:])
    assert first == 0.25
    assert second != 0.25


def test_the_version(graftwork: Graftwork) -> None:
    """`--version` prints the version and needs nothing else."""
    assert graftwork("--version").stdout == f"graftwork {package.__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands(shell: str, graftwork: Graftwork) -> None:
    """The script asks the program, and the program answers with the commands that fit."""
    script = graftwork("completion", shell).stdout
    asked = {"_GRAFTWORK_COMPLETE": f"complete_{shell}", "COMP_WORDS": "graftwork tena", "COMP_CWORD": "1"}
    asked |= {"_TYPER_COMPLETE_ARGS": "graftwork tena", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    program = [sys.executable, "-c", "from graftwork.api.cli.main import main; main()"]
    done = subprocess.run(program, env=os.environ | asked, capture_output=True, text=True, check=False)

    assert "_GRAFTWORK_COMPLETE" in script
    assert f"complete_{shell}" in script
    assert "tenants" in done.stdout
    assert "sessions" not in done.stdout
