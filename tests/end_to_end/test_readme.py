"""What README shows, executed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import DemoServer

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_python_block_of_the_readme_runs(server: DemoServer, number: int) -> None:
    """Each block is a whole program that prints an answer; only the port is another one here."""
    program = BLOCKS[number].replace("http://127.0.0.1:8000", server.url)
    environment = os.environ | {"GRAFTWORK_URL": server.url, "GRAFTWORK_API_KEY": server.key("Blackbeard")}

    done = subprocess.run(
        [sys.executable, "-c", program], check=False, env=environment, capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
