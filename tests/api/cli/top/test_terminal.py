"""A test of `graftwork top` in a real terminal of 80 by 24, as over ssh."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.cli.live_gateway import LiveGateway, listening_gateway
from tests.api.in_process_gateway import write_model_folder

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
PROGRAM = "from graftwork.api.cli.main import main; main()"
_TRIES = 3000


class Terminal:
    """A tmux session with one program in it."""

    def __init__(self, folder: Path, environment: dict[str, str], *arguments: str) -> None:
        self._tmux = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
        variables = [f"{name}={value}" for name, value in environment.items()]
        command = [*self._tmux, "new-session", "-d", "-x", "80", "-y", "24", "env", *variables]
        subprocess.run([*command, sys.executable, "-c", PROGRAM, *arguments], check=True)

    def press(self, *keys: str) -> None:
        subprocess.run([*self._tmux, "send-keys", *keys], check=True)

    def screen(self) -> list[str]:
        """The lines on the screen."""
        shown = subprocess.run([*self._tmux, "capture-pane", "-p"], capture_output=True, text=True, check=True)
        return shown.stdout.splitlines()

    def until(self, text: str) -> list[str]:
        """The screen as soon as it has a text. Each look at the screen takes some milliseconds."""
        for _ in range(_TRIES):
            screen = self.screen()
            if any(text in line for line in screen):
                return screen
            subprocess.run(["tmux", "-V"], capture_output=True, check=True)
        raise AssertionError(f"no {text!r} in:\n" + "\n".join(self.screen()))

    def until_ended(self) -> None:
        """Returns when the program has ended: its session goes with it."""
        for _ in range(_TRIES):
            if subprocess.run([*self._tmux, "has-session"], capture_output=True, check=False).returncode:
                return
        raise AssertionError("the program goes on:\n" + "\n".join(self.screen()))

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], capture_output=True, check=False)


@pytest.fixture
def live(tmp_path_factory: pytest.TempPathFactory, sqlite_template: Path) -> Iterator[LiveGateway]:
    model = write_model_folder(tmp_path_factory.mktemp("model") / "tiny")
    with listening_gateway(tmp_path_factory.mktemp("data"), model, sqlite_template) as gateway:
        yield gateway


@pytest.fixture
def terminal(tmp_path: Path, live: LiveGateway) -> Iterator[Terminal]:
    keys = {"GRAFTWORK_URL": live.url, "GRAFTWORK_ADMIN_KEY": live.admin_key, "PYTHONPATH": os.pathsep.join(sys.path)}
    terminal = Terminal(tmp_path, keys, "top")
    yield terminal
    terminal.close()


def test_top_fits_a_small_terminal(terminal: Terminal) -> None:
    """In 80 by 24 there are the totals, one table with its heading and rows, and the status; no line is wider, a row's
    details open and close, and `q` ends the program.
    """
    tenants = terminal.until("acme")
    terminal.press("1")
    engines = terminal.until("engine-0")
    terminal.press("2")
    terminal.until("acme")
    terminal.press("Enter")
    facts = terminal.until("service_tiers")
    terminal.press("Escape")
    back = terminal.until("TENANT ")  # the details hid it; a key right after Escape would be Alt with that key
    terminal.press("q")
    terminal.until_ended()

    assert any("TENANT" in line and "REFUSED" in line and "BURN" in line for line in tenants)
    assert any("ENGINE" in line and "STEP ms" in line and "LORA" in line for line in engines)
    for screen in (tenants, engines, facts):
        assert len(screen) <= 24
        assert max(map(len, screen)) <= 80
    for screen, pane, heading in (
        (tenants, "tenants", "TENANT"),
        (engines, "engines", "ENGINE"),
        (back, "tenants", "TENANT"),
    ):
        assert "req/s" in screen[0]
        assert screen[1].split()[0] == heading
        assert screen[23].startswith(f"[{pane}]")
        assert sum(one in line for line in screen for one in ("ENGINE ", "TENANT ", "ADAPTER ", "SESSION ")) == 1
