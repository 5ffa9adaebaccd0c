"""Tests of the client commands against a listening gateway."""

import csv
import json
import signal
import threading
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from graftwork import Graftwork as Client
from graftwork.platform.errors import CapacityContended
from tests.api.cli.conftest import Graftwork
from tests.api.cli.live_gateway import LiveGateway
from tests.sessions.tokenizer_and_templates import text_tokenizer

LOOK_UP = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"id": "Q-1"}}\n</tool_call>'


@pytest.fixture
def graftwork(graftwork: Graftwork, live: LiveGateway, monkeypatch: pytest.MonkeyPatch) -> Graftwork:
    """With the gateway's address and keys in the environment."""
    for name, value in (("URL", live.url), ("API_KEY", live.key), ("ADMIN_KEY", live.admin_key)):
        monkeypatch.setenv(f"GRAFTWORK_{name}", value)
    return graftwork


def answer(graftwork: Graftwork, *arguments: str) -> Any:
    """What a command answers with `--json`."""
    result = graftwork(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_tenants_from_birth_to_end(graftwork: Graftwork) -> None:
    """A tenant is created, found by name or id, suspended, resumed and deleted."""
    made = answer(graftwork, "tenants", "create", "lifelong", "--weight", "2")
    listed = answer(graftwork, "tenants", "list")["data"]
    suspended = answer(graftwork, "tenants", "suspend", "lifelong", "--yes")
    resumed = answer(graftwork, "tenants", "resume", made["id"])
    deleted = answer(graftwork, "tenants", "delete", "lifelong", "--yes")
    erasure = answer(graftwork, "tenants", "erasure", made["id"])

    assert made["weight"] == 2.0
    assert made["id"] in [tenant["id"] for tenant in listed]
    assert (suspended["status"], resumed["status"], deleted["deleted"]) == ("suspended", "active", True)
    assert (erasure["tenant_id"], erasure["status"]) == (made["id"], "running")
    assert made["id"] in graftwork("tenants", "erasure", made["id"]).stdout
    assert graftwork("tenants", "show", "lifelong").exit_code == 1


def test_a_name_of_two_tenants_is_asked_for_by_id(graftwork: Graftwork) -> None:
    """The second one is made with a note; commands by that name list both ids, and take either."""
    first = answer(graftwork, "tenants", "create", "twins")
    made = graftwork("tenants", "create", "twins")
    refused = graftwork("keys", "create", "twins", "--name", "laptop")

    assert "another tenant is called twins" in made.stderr
    assert "keys create ten_" in made.stdout
    assert refused.exit_code == 1
    assert "2 tenants are called 'twins'" in refused.stderr
    assert first["id"] in refused.stderr
    assert answer(graftwork, "tenants", "show", first["id"])["id"] == first["id"]


def test_keys_show_their_secret_once(graftwork: Graftwork) -> None:
    """Creating or rotating a key prints only the secret; the list of keys has no secret."""
    allowed = ("--scope", "inference", "--adapter", "pirate", "--allow-ip", "192.0.2.7", "--allow-ip", "2001:db8::/32")
    made = answer(graftwork, "keys", "create", "acme", "--name", "laptop", *allowed)
    rotated = graftwork("keys", "rotate", "acme", made["id"], "--overlap", "24h", "--yes")
    wrong = graftwork("keys", "rotate", "acme", made["id"], "--overlap", "tomorrow", "--yes")
    listed = graftwork("keys", "list", "acme")
    revoked = answer(graftwork, "keys", "revoke", "acme", made["id"], "--yes")

    assert made["key"].startswith("gw_")
    assert made["scopes"] == ["inference"]
    assert (made["adapters"], made["allowed_ips"]) == (["pirate"], ["192.0.2.7/32", "2001:db8::/32"])
    assert wrong.exit_code == 2
    assert "write 90s, 30m, 24h or 7d" in wrong.output
    assert rotated.stdout.startswith("gw_")
    assert rotated.stdout.count("\n") == 1
    assert made["id"] in listed.stdout
    assert "gw_" not in listed.stdout
    assert revoked["revoked_at"]


def test_quotas_change_what_is_named(graftwork: Graftwork) -> None:
    """Setting a limit keeps the others; `none` removes a limit; sizes may have units."""
    answer(graftwork, "tenants", "create", "limited")
    answer(graftwork, "quotas", "set", "limited", "--requests-per-minute", "60")
    both = answer(graftwork, "quotas", "set", "limited", "--max-adapter-bytes", "1.5MiB")
    lifted = answer(graftwork, "quotas", "set", "limited", "--requests-per-minute", "none")

    assert (both["requests_per_minute"], both["max_adapter_bytes"]) == (60, 1_572_864)
    assert (lifted["requests_per_minute"], lifted["max_adapter_bytes"]) == (None, 1_572_864)
    assert "1.5 MiB" in graftwork("quotas", "show", "limited").stdout


def test_organisations_share_limits(graftwork: Graftwork) -> None:
    """An organisation gets tenants and limits; keys and end users of a tenant get theirs by options."""
    organisation = answer(graftwork, "organisations", "create", "group")["id"]
    tenant = answer(graftwork, "tenants", "create", "member")["id"]
    key = answer(graftwork, "keys", "create", "member", "--name", "ci")["id"]
    added = answer(graftwork, "organisations", "add", organisation, "member")
    budget = ("--monthly-budget", "100.00", "--soft-budget", "80", "--currency", "USD")
    shared = answer(graftwork, "quotas", "set", organisation, *budget)
    answer(graftwork, "quotas", "set", "member", "--key", key, "--requests-per-minute", "60")
    answer(graftwork, "quotas", "set", "member", "--user", "alice", "--requests-per-minute", "6")
    answer(graftwork, "quotas", "set", "member", "--each-user", "--requests-per-minute", "3")
    webhook = answer(graftwork, "webhooks", "set", organisation, "https://hooks.example.com/")

    assert added["organisation_id"] == organisation
    assert (shared["monthly_budget"], shared["soft_budget"], shared["currency"]) == ("100", "80", "USD")
    options = {("--key", key): 60, ("--user", "alice"): 6, ("--each-user",): 3, (): None}
    found = {chosen: answer(graftwork, "quotas", "show", "member", *chosen) for chosen in options}
    assert {chosen: quota["requests_per_minute"] for chosen, quota in found.items()} == options
    assert answer(graftwork, "organisations", "tenants", organisation)["data"][0]["id"] == tenant
    assert organisation in graftwork("organisations", "list").stdout
    assert webhook["secret"].startswith("whsec_")
    assert "secret" not in answer(graftwork, "webhooks", "show", organisation)
    assert answer(graftwork, "webhooks", "delete", organisation, "--yes")["deleted"]
    assert graftwork("quotas", "show", organisation, "--user", "alice").exit_code == 2
    assert graftwork("quotas", "show", "member", "--user", "a", "--each-user").exit_code == 2
    assert graftwork("quotas", "set", "member", "--monthly-budget", "lots").exit_code == 2
    assert answer(graftwork, "organisations", "rename", organisation, "holding")["name"] == "holding"
    assert graftwork("organisations", "delete", organisation, "--yes").exit_code == 1
    assert answer(graftwork, "organisations", "remove", organisation, "member")["organisation_id"] is None
    assert answer(graftwork, "organisations", "delete", organisation, "--yes")["deleted"]


def test_modes_change_what_is_named(graftwork: Graftwork) -> None:
    """`modes set` keeps the modes it does not name, and `modes clear` switches all off."""
    assert "served" in graftwork("modes", "show").stdout
    answer(graftwork, "modes", "set", "--max-output-tokens", "256")
    both = answer(graftwork, "modes", "set", "--suspend-drafts")
    lifted = answer(graftwork, "modes", "set", "--max-output-tokens", "0")
    shown = graftwork("modes", "show").stdout
    cleared = answer(graftwork, "modes", "clear")

    assert (both["max_output_tokens"], both["suspend_drafts"], both["refuse_flex"]) == (256, True, False)
    assert (lifted["max_output_tokens"], lifted["suspend_drafts"]) == (None, True)
    assert "suspended" in shown
    assert cleared["suspend_drafts"] is False


def test_a_chat_with_tools_and_branches(graftwork: Graftwork, live: LiveGateway, tmp_path: Path) -> None:
    """A chat streams answers, asks for a call's output, and forks into another session."""
    (tmp_path / "tools.json").write_text(json.dumps([LOOK_UP]))
    live.engine.lines.extend([f"Let me look.\n{CALL}", "It is here.", "Anything else?"])
    typed = ["Where is it?", "found it", "/cache", "/fork", "Thanks", "/dance", "/quit"]

    result = graftwork("sessions", "chat", "--tools", str(tmp_path / "tools.json"), input="\n".join(typed) + "\n")

    assert result.exit_code == 0, result.output
    assert 'Let me look.\n  → look_up({"id": "Q-1"})\n' in result.output
    assert "It is here." in result.output
    assert '"session.cache"' in result.output
    forked = result.output.split("Now in ")[1].split(",")[0]
    items = answer(graftwork, "sessions", "show", forked)["items"]
    assert [item.get("output") for item in items if item["type"] == "function_call_output"] == ["found it"]
    assert items[-1]["content"][0]["text"] == "Anything else?"


def test_an_open_call_is_answered_later(graftwork: Graftwork, live: LiveGateway, tmp_path: Path) -> None:
    """A chat that ends at an open call asks for the output when the session is continued."""
    (tmp_path / "tools.json").write_text(json.dumps([LOOK_UP]))
    live.engine.lines.extend([CALL, "It is here."])

    left = graftwork("sessions", "chat", "--tools", str(tmp_path / "tools.json"), input="Where is it?\n")
    resumed = graftwork("sessions", "chat", left.output.rsplit(" ", 1)[1].strip(), input="found it\n/quit\n")

    assert (left.exit_code, resumed.exit_code) == (0, 0), left.output + resumed.output
    assert '→ look_up({"id": "Q-1"})' in resumed.output
    assert "It is here." in resumed.output


def test_an_answer_that_no_turn_took_is_not_asked_for_again(
    graftwork: Graftwork, live: LiveGateway, tmp_path: Path
) -> None:
    """A stored output whose turn was refused starts the turn when the session is continued."""
    (tmp_path / "tools.json").write_text(json.dumps([LOOK_UP]))
    live.engine.lines.extend([CALL, "It is here."])
    live.engine.refusals.extend([None, CapacityContended("The queue is full.")])
    typed = "Where is it?\nfound it\n"

    left = graftwork("sessions", "chat", "--tools", str(tmp_path / "tools.json"), input=typed)
    resumed = graftwork("sessions", "chat", left.output.rsplit(" ", 1)[1].strip(), input="/quit\n")

    assert "The queue is full." in left.output
    assert resumed.exit_code == 0, resumed.output
    assert "output of look_up" not in resumed.output
    assert "It is here." in resumed.output


def test_a_long_transcript_is_shown_whole(graftwork: Graftwork, live: LiveGateway) -> None:
    """A transcript of many pages is shown whole."""
    live.engine.text = "Hello."
    said = [{"role": "user", "content": str(number)} for number in range(120)]
    with Client(live.url, api_key=live.key) as client:
        session = client.sessions.create(model="tiny")
        session.turn(said)

    shown = answer(graftwork, "sessions", "show", session.id)["items"]

    assert [item["content"][0]["text"] for item in shown] == [*(line["content"] for line in said), "Hello."]


def test_a_chat_goes_on(graftwork: Graftwork, live: LiveGateway) -> None:
    """A session is continued by its id, rewound, listed, shown and closed."""
    live.engine.text = "The weather in Paris is sunny."

    first = graftwork("sessions", "chat", input="Hi\nAgain\n/rewind\n/rewind\n/quit\n")
    session_id = first.output.rsplit(" ", 1)[1].strip()
    second = graftwork("sessions", "chat", session_id, input="Once more\n")
    shown = answer(graftwork, "sessions", "show", session_id)
    closed = answer(graftwork, "sessions", "close", session_id, "--yes")

    assert first.output.count("The weather in Paris is sunny.") == 2
    assert "Took back your last message." in first.output
    assert "nothing to go back to" in first.output
    assert second.exit_code == 0
    said = [item["role"] for item in shown["items"]]
    assert said == ["user", "assistant", "user", "assistant"]
    assert closed["status"] == "closed"
    assert session_id in graftwork("sessions", "list").stdout
    assert "assistant: The weather in Paris is sunny." in graftwork("sessions", "show", session_id).stdout


def press_ctrl_c() -> None:
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)


@pytest.fixture
def python_sigint_handler() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where this process was started with SIGINT ignored.

    A shell starts its background jobs so, and Python then installs no handler of its own.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def interrupted(live: LiveGateway, python_sigint_handler: None) -> Iterator[LiveGateway]:
    """Ctrl-C is pressed after the second token of an answer, once."""

    def press_once() -> None:
        live.engine.holds_after = None
        press_ctrl_c()

    live.engine.on_hold, live.engine.holds_after = press_once, 2
    yield live
    live.engine.on_hold, live.engine.holds_after = None, None


def test_ctrl_c_stops_the_answer(graftwork: Graftwork, interrupted: LiveGateway) -> None:
    """Ctrl-C cancels the turn without a trace, and the chat continues."""
    interrupted.engine.text = "The weather in Paris is sunny."

    result = graftwork("sessions", "chat", input="/again\nHi\n/rewind\n/again\n/again\n/quit\n")
    session_id = result.output.rsplit(" ", 1)[1].strip()

    assert result.exit_code == 0, result.output
    assert "stopped; /again tries once more" in result.output
    assert result.output.count("nothing to go back to") == 1
    assert result.output.count("There is nothing to try again") == 2
    items = answer(graftwork, "sessions", "show", session_id)["items"]
    assert [item["content"][0]["text"] for item in items] == ["Hi", "The weather in Paris is sunny."]


def test_ctrl_c_between_tools_keeps_their_outputs(
    graftwork: Graftwork, interrupted: LiveGateway, tmp_path: Path
) -> None:
    """A cancelled answer to tool outputs can be made again from the same outputs."""
    (tmp_path / "tools.json").write_text(json.dumps([LOOK_UP]))
    long_answer = "It is here. " * 20
    interrupted.engine.lines.extend([CALL, long_answer, long_answer])
    interrupted.engine.holds_after = len(text_tokenizer().encode(CALL, allow_special=True)) + 2

    typed = ["Where is it?", "found it", "/again", "/rewind", "/quit"]
    result = graftwork("sessions", "chat", "--tools", str(tmp_path / "tools.json"), input="\n".join(typed) + "\n")
    session_id = result.output.rsplit(" ", 1)[1].strip()

    assert result.exit_code == 0, result.output
    assert result.output.count("output of look_up") == 1
    assert "stopped; /again tries once more" in result.output
    types = [item["type"] for item in answer(graftwork, "sessions", "show", session_id)["items"]]
    assert types == ["message", "function_call", "function_call_output", "message"]


def test_a_refusal_does_not_end_the_chat(graftwork: Graftwork, live: LiveGateway) -> None:
    """A refusal or failure of the server is one line, and the next message is answered."""
    live.engine.text = "Hello."
    live.engine.refusals.extend([CapacityContended("The queue is full."), None])

    result = graftwork("sessions", "chat", input="Hi\n/again\n/help\n/quit\n")

    assert result.exit_code == 0, result.output
    assert "The queue is full." in result.output
    assert result.output.count("Hello.") == 1
    assert "Ctrl-C" in result.output


def test_reports(graftwork: Graftwork, live: LiveGateway) -> None:
    """Usage by group and the audit log are shown to the tenant and to the operator."""
    live.engine.text = "Hello."
    graftwork("sessions", "chat", input="Hi\n")

    own = answer(graftwork, "usage", "--group-by", "adapter")["data"]
    operators = answer(graftwork, "usage", "--group-by", "key", "--tenant", "acme")["data"]
    table = graftwork("usage")
    audit = answer(graftwork, "audit", "--limit", "5")["data"]

    assert sum(row["requests"] for row in own) == sum(row["requests"] for row in operators) > 0
    assert "OF IT CACHED" in table.stdout
    assert {"at", "actor", "action", "target"} <= set(audit[0])


def test_usage_is_exported_with_all_that_the_ledger_sums(graftwork: Graftwork, tmp_path: Path) -> None:
    """CSV has every sum of the JSON rows, and the page has the groups and the time of the engine."""
    graftwork("sessions", "chat", input="Hi\n")
    rows = answer(graftwork, "usage", "--by", "adapter")["data"]
    page = tmp_path / "usage.html"

    lines = list(
        csv.DictReader(graftwork("usage", "--by", "adapter", "--csv", "--html", str(page)).stdout.splitlines())
    )

    assert {"drafted_tokens", "forced_tokens", "reasoning_tokens", "engine_ms"} <= set(lines[0])
    for line, row in zip(lines, rows, strict=True):
        assert line["adapter"] == row["group"]
        assert {name: float(line[name]) for name in row if name not in ("group", "costs")} == {
            name: value for name, value in row.items() if name not in ("group", "costs")
        }
    text = page.read_text(encoding="utf-8")
    assert all(str(row["group"]) in text for row in rows)
    assert "engine s" in text


def test_the_wrong_kind_of_key(graftwork: Graftwork, live: LiveGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant's key is refused by admin commands, and the message names the variable of each key."""
    monkeypatch.setenv("GRAFTWORK_ADMIN_KEY", live.key)
    forbidden = graftwork("tenants", "list")
    monkeypatch.setenv("GRAFTWORK_API_KEY", "gw_nobody")
    unknown = graftwork("adapters", "list")

    assert (forbidden.exit_code, unknown.exit_code) == (1, 1)
    assert "GRAFTWORK_API_KEY" in unknown.stderr


def test_prices_are_set_and_shown(graftwork: Graftwork) -> None:
    """A price list is set for a tenant and tier, and shown; a rate that does not exist names those that do."""
    made = answer(graftwork, "tenants", "create", "priced")
    prices = answer(graftwork, "prices", "set", "input=0.5", "output=1.5", "--tenant", "priced", "--tier", "flex")
    replaced = answer(graftwork, "prices", "set", "input=0.25", "output=1", "--tenant", "priced", "--tier", "flex")
    listed = answer(graftwork, "prices", "show", "--tenant", "priced")["data"]
    table = graftwork("prices", "show", "--tenant", "priced").stdout
    wrong = graftwork("prices", "set", "thinking=1")

    assert (prices["tenant_id"], prices["service_tier"], prices["rates"]["input_disk"]) == (made["id"], "flex", "0.5")
    assert [(one["id"], one["in_force"]) for one in listed] == [(replaced["id"], True), (prices["id"], False)]
    assert replaced["id"] in table
    assert prices["id"] not in table
    assert prices["id"] in graftwork("prices", "show", "--tenant", "priced", "--all").stdout
    assert wrong.exit_code == 2
    assert "kv_gb_hour" in wrong.output


def test_an_invoice_as_csv_is_that_of_json(graftwork: Graftwork, live: LiveGateway) -> None:
    """The lines of both exports are the same, and their amounts add up to the totals and to the costs of the ledger."""
    answer(graftwork, "prices", "set", "input=0.5", "output=1.5")
    with Client(base_url=live.url, api_key=live.key) as client:
        client.sessions.create(model="tiny").turn("Hello")
    by_day = answer(graftwork, "usage", "--from", "0")["data"]
    month = by_day[-1]["group"][:7]

    invoice = json.loads(graftwork("usage", "export", "--month", month, "--format", "json").stdout)
    lines = list(csv.DictReader(graftwork("usage", "export", "--month", month).stdout.splitlines()))
    bars = graftwork("usage", "--plot", "--from", "0").stdout

    assert [(line["item"], line["amount"]) for line in lines] == [
        (line["item"], line["amount"]) for line in invoice["lines"]
    ]
    owed = sum(Decimal(line["amount"]) for line in lines)
    assert (
        owed
        == Decimal(invoice["totals"][0]["amount"])
        == sum(Decimal(cost["amount"]) for row in by_day for cost in row["costs"])
    )
    assert owed > 0
    assert "Tokens by day" in bars
    assert "█" in bars
