"""Tests that run the code in README and in the pages behind it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import DemoServer

ROOT = Path(__file__).parents[2]
BLOCKS = [
    pytest.param(block, id=f"{page}-{number}")
    for page in ("README.md", "docs/responses.md", "docs/messages.md", "docs/structured.md", "docs/batches.md")
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_every_python_block_runs(server: DemoServer, block: str) -> None:
    """Each Python block is a whole program that prints an answer."""
    program = block.replace("http://127.0.0.1:8000", server.url)
    environment = os.environ | {"GRAFTWORK_URL": server.url, "GRAFTWORK_API_KEY": server.key("Blackbeard")}

    done = subprocess.run(
        [sys.executable, "-c", program], check=False, env=environment, capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
