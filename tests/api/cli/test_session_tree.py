"""Tests of a session drawn as a tree."""

import json

import pytest

from graftwork import Graftwork as Client
from graftwork.api.cli.console.session_tree import Branch, TurnLine, tree_lines
from graftwork.platform.answers.sessions import SessionState
from graftwork.platform.answers.usage import PromptTokensDetails
from tests.api.cli.conftest import Graftwork
from tests.api.cli.live_gateway import LiveGateway


@pytest.fixture
def graftwork(graftwork: Graftwork, live: LiveGateway, monkeypatch: pytest.MonkeyPatch) -> Graftwork:
    for name, value in (("URL", live.url), ("API_KEY", live.key)):
        monkeypatch.setenv(f"GRAFTWORK_{name}", value)
    return graftwork


def branch(name: str, *turns: TurnLine, forks: tuple[Branch, ...] = ()) -> Branch:
    state = SessionState.read({"id": name, "status": "idle", "model": {"name": "tiny"}})
    return Branch(state, turns, None, [*forks])


def test_the_lines_of_a_tree() -> None:
    """Turns come before forks, each level is indented, and the last of a level closes it."""
    prompt = PromptTokensDetails(cached_tokens=30, device_tokens=20, host_tokens=10, disk_tokens=0, recomputed_tokens=2)
    turn = TurnLine("completed", prompt, "evicted_pressure", 5)
    tree = branch("a", turn, TurnLine(), forks=(branch("b", turn, forks=(branch("c"),)), branch("d")))

    assert tree_lines(tree) == [
        "a  idle  tiny  2 turns",
        "├─ turn 1  completed  prompt 32 = device 20, host 10, recomputed 2  answer 5  (evicted_pressure)",
        "├─ turn 2  running",
        "├─ b  idle  tiny  1 turn",
        "│  ├─ turn 1  completed  prompt 32 = device 20, host 10, recomputed 2  answer 5  (evicted_pressure)",
        "│  └─ c  idle  tiny  0 turns",
        "└─ d  idle  tiny  0 turns",
    ]


def test_a_session_with_forks_of_forks(graftwork: Graftwork, live: LiveGateway) -> None:
    """The tree has the session's own turns with their tokens, its forks and their forks, and no other session."""
    with Client(live.url, live.key) as client:
        root = client.sessions.create(model="tiny")
        root.turn("One")
        root.turn("Two")
        (fork,) = root.fork()
        fork.turn("Three")
        (leaf,) = fork.fork()
        stranger = client.sessions.create(model="tiny")

    shown = graftwork("sessions", "show", root.id, "--tree")
    body = json.loads(graftwork("sessions", "show", root.id, "--tree", "--json").stdout)

    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert [line.split()[0].strip("│├└─ ") or line.split()[1] for line in lines[:1]] == [root.id]
    assert sum("turn " in line and "prompt" in line for line in lines) == 3
    assert [one for one in (fork.id, leaf.id, stranger.id) if one in shown.stdout] == [fork.id, leaf.id]
    assert [turn["status"] for turn in body["turns"]] == ["completed", "completed"]
    assert body["turns"][0]["prompt_tokens_by_tier"]["recomputed"] > 0
    assert body["forks"][0]["id"] == fork.id
    assert [one["id"] for one in body["forks"][0]["forks"]] == [leaf.id]


def test_the_tree_of_an_unknown_session(graftwork: Graftwork) -> None:
    """An unknown session is an error of one line."""
    result = graftwork("sessions", "show", "ses_00000000000000000000000000", "--tree")

    assert result.exit_code == 1
    assert result.output.count("\n") == 1
