"""Tests of `graftwork keys` and `graftwork members` without a tenant's name: those of the tenant of one's sign-in."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from graftwork import Graftwork as Client
from tests.api.cli.conftest import Graftwork, Place
from tests.api.in_process_gateway import ADMIN_KEY

EXAMPLE_URL = "https://graftwork.example.com"


def sign_in(place: Place, own: Graftwork, operate: Graftwork, subject: str, role: str = "tenant-admin") -> None:
    """Adds a person with a role in acme, who signs in."""
    operate("people", "add", subject)
    operate("people", "grant", subject, f"{role}:acme")
    place.provider.subject = subject
    result = own("login")
    assert result.exit_code == 0, result.output


def answer(graftwork: Graftwork, *arguments: str) -> Any:
    """What a command answers with `--json`."""
    result = graftwork(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_key_from_birth_to_end(place: Place, own: Graftwork, operate: Graftwork) -> None:
    """A tenant-admin makes a key that works, rotates it, and revokes it; only its secret is on standard output, once."""
    sign_in(place, own, operate, "kim")

    made = own("keys", "create", "--name", "laptop", "--scope", "usage", "--expires-at", "2100-01-01")
    with Client(api_key=made.stdout.strip()) as program:
        shown = program.auth.whoami()
    key_id = shown.key_id or ""
    rotated = answer(own, "keys", "rotate", key_id, "--overlap", "1h", "--yes")
    revoked = own("keys", "revoke", rotated["id"], "--yes")
    listed = answer(own, "keys", "list")["data"]
    for_operator = answer(operate, "keys", "list", "acme")["data"]
    audit = answer(operate, "audit")["data"]

    assert made.stdout.startswith("gw_")
    assert made.stdout.count("\n") == 1
    assert (shown.tenant_name, shown.scopes) == ("acme", ("usage",))
    assert (rotated["scopes"], rotated["expires_at"]) == (["usage"], 4102444800)
    assert revoked.stdout == f"Revoked {rotated['id']}.\n"
    by_id = {key["id"]: key for key in listed}
    assert by_id[key_id]["replaced_by"] == rotated["id"]
    assert int(by_id[key_id]["expires_at"]) - rotated["created_at"] == 3600
    assert by_id[rotated["id"]]["revoked_at"] is not None
    assert list(by_id) == [key["id"] for key in for_operator]
    assert all("key" not in key for key in listed)
    ours = [entry for entry in audit if entry["target"] in (key_id, rotated["id"])]
    assert {entry["actor_name"] for entry in ours} == {"kim@example.com"}


TIMES = ("2030-01-31", "20300131", "1896048000", "1896048000.0", "2030-01-31T01:00+01:00")


def test_times_are_text_or_seconds(place: Place, own: Graftwork, operate: Graftwork) -> None:
    """A flag with a time takes ISO 8601 and Unix seconds, in all commands that send one in a body."""
    sign_in(place, own, operate, "tia")

    ends = []
    for time in TIMES:
        made = answer(own, "keys", "create", "--name", "laptop", "--expires-at", time)
        rotated = answer(own, "keys", "rotate", made["id"], "--expires-at", time, "--yes")
        priced = answer(operate, "prices", "set", "input=1", "output=1", "--from", time)
        ends += [made["expires_at"], rotated["expires_at"], priced["valid_from"]]
    wrong = own("keys", "create", "--name", "laptop", "--expires-at", "soon")

    assert ends == [1896048000] * 3 * len(TIMES)
    assert wrong.exit_code == 1
    assert "expires_at: give unix seconds, or a time such as 2026-01-31T12:00:00Z" in wrong.stderr


def test_the_tables_are_aligned(place: Place, own: Graftwork, operate: Graftwork) -> None:
    """Keys and members come as columns that begin at the same place in each line."""
    sign_in(place, own, operate, "lee")
    own("keys", "create", "--name", "a key with a long name", "--adapter", "pirate")

    keys, members = own("keys", "list").stdout.splitlines(), own("members").stdout.splitlines()

    (line,) = [line for line in keys if "a key with a long name" in line]
    assert keys[0].index("NAME") == line.index("a key with a long name")
    assert keys[0].index("MODELS") == line.index("pirate")
    (line,) = [line for line in members if "lee@example.com" in line]
    columns = ("WHO", "ROLE", "STATUS")
    assert [members[0].index(name) for name in columns] == [
        line.index(text) for text in ("lee@example.com", "tenant-admin", "active")
    ]


def test_a_no_changes_nothing(place: Place, own: Graftwork, operate: Graftwork) -> None:
    """Rotation and revocation ask first, and after a no the key is as it was."""
    sign_in(place, own, operate, "max")
    key_id = answer(own, "keys", "create", "--name", "kept")["id"]

    refused = [own("keys", "rotate", key_id, input="n\n"), own("keys", "revoke", key_id, input="n\n")]

    assert [result.exit_code for result in refused] == [1, 1]
    assert f"Make a new key for {key_id}, which ends at once" in refused[0].stderr
    assert f"Revoke {key_id} for good?" in refused[1].stderr
    kept = next(key for key in answer(own, "keys", "list")["data"] if key["id"] == key_id)
    assert [kept[name] for name in ("revoked_at", "replaced_by", "expires_at")] == [None, None, None]


def test_who_may_not_learns_why(
    place: Place, own: Graftwork, operate: Graftwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger is told to sign in, a member whom to ask, and a tenant-admin with a key in the environment to take it out."""
    nobody = own("keys", "list")
    monkeypatch.setenv("GRAFTWORK_ADMIN_KEY", ADMIN_KEY)
    operator = [own("keys", "create", "--name", "whose"), own("members")]
    monkeypatch.delenv("GRAFTWORK_ADMIN_KEY")
    sign_in(place, own, operate, "nia", "tenant-member")
    member = own("members")
    monkeypatch.setenv("GRAFTWORK_API_KEY", place.live.key)
    with_key = own("keys", "list")

    assert {result.exit_code for result in (nobody, *operator, member, with_key)} == {1}
    assert f"Nobody has signed in at {place.live.url}: run `graftwork login`" in nobody.stderr
    assert "An operator names the tenant, as in `graftwork keys list acme`." in operator[0].stderr
    assert "graftwork people list" in operator[1].stderr
    assert "role tenant-admin: sign in as one, or ask the operator." in member.stderr
    assert "GRAFTWORK_API_KEY" not in member.stderr
    assert "GRAFTWORK_API_KEY, or api_key in graftwork.toml, goes before a sign-in" in with_key.stderr


def test_long_lists_say_so(place: Place, own: Graftwork, operate: Graftwork) -> None:
    """With more keys than a list shows, standard error says so, and the JSON stays whole."""
    sign_in(place, own, operate, "oda")
    with Client() as client:
        names = [client.keys.create(name=f"key {number}").name for number in range(100)]

    listed = own("keys", "list", "--json")

    assert listed.stderr == "Only the newest 100 are shown.\n"
    assert [key["name"] for key in json.loads(listed.stdout)["data"]] == names[::-1]


def test_the_page_about_keys_is_true(place: Place, own: Graftwork, operate: Graftwork) -> None:
    """The commands and the program at the head of docs/keys.md work as they stand there."""
    page = (Path(__file__).parents[3] / "docs" / "keys.md").read_text("utf-8").replace(EXAMPLE_URL, place.live.url)
    commands, by_operator = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)[:2]
    sign_in(place, own, operate, "pia")
    key_id = answer(own, "keys", "create", "--name", "of the page")["id"]
    for_operator = answer(operate, "keys", "create", "acme", "--name", "of the operator")["id"]

    for lines, run, known in ((commands, own, key_id), (by_operator, operate, for_operator)):
        for line in re.findall(r"^graftwork (.*)$", lines, re.MULTILINE):
            result = run(*shlex.split(line.replace("key_01h…", known), comments=True), input="y\n")
            assert result.exit_code == 0, (line, result.output)
    (program,) = re.findall(r"```python\n(from graftwork.*?)```", page, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    assert key_id in done.stdout


def test_two_names_before_a_key_are_wrong_usage(own: Graftwork) -> None:
    """A rotation takes one tenant at most before the key, and sends nothing otherwise."""
    result = own("keys", "revoke", "acme", "key_1", "key_2", "--yes")

    assert result.exit_code == 2
    assert "one tenant and one key, not 3 names" in result.stderr
