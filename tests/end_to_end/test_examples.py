"""Tests that run every program in examples/."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import DemoServer

EXAMPLES = Path(__file__).parents[2] / "examples"
SHOWN = {
    "chat_with_openai.py": r"Models: graftwork-demo, pirate\n.*assistant.*\n\d+ tokens\n",
    "fork_and_compare.py": r"(ses_\w+: '.+', \d\d+ of \d+ prompt tokens cached\n){2}"
    r"The session has 4 items again, a branch has 6\n",
    "many_agents.py": r"(graftwork-demo: .+\npirate: .+\n){2}",
    "push_adapter.py": r"my-adapter@1 is ready, rank 8\nmy-adapter@prod was None, is {'version': 1}\n"
    r"graftwork-demo: (.+)\nmy-adapter: (?!\1).+\nmy-adapter is deleted\n",
    "structured_output.py": r"\d+ nights in (Paris|Rome|Tokyo) at a (low|high) fare\n(Monday|Friday) at \d\d:\d\d\n",
    "tool_session.py": r"  get_weather\('Tokyo', 'tomorrow'\)\n2 turns: .*sunny.*\n.+\n\d\d% of the prompt came from the cache\n"
    r"Transcript: message, function_call, function_call_output, message, message, message\n",
}
"""What each prints, as a pattern."""


def test_every_example_is_run() -> None:
    """Every program in examples/ is in these tests and in the page that lists them."""
    programs = sorted(path.name for path in EXAMPLES.glob("*.py"))
    listed = re.findall(r"^\| \[(\w+\.py)\]\(\1\)", (EXAMPLES / "README.md").read_text("utf-8"), re.MULTILINE)

    assert programs == sorted(SHOWN)
    assert programs == sorted(listed)


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_an_example_shows_what_it_promises(server: DemoServer, name: str) -> None:
    """Each example ends well and prints what its pattern says, with only a demo tenant's key."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GRAFTWORK_")}
    environment |= {"GRAFTWORK_URL": server.url, "GRAFTWORK_API_KEY": server.key("Blackbeard")}

    done = subprocess.run(
        [sys.executable, EXAMPLES / name], check=False, env=environment, capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 0, done.stderr
    assert re.fullmatch(SHOWN[name], done.stdout), done.stdout
