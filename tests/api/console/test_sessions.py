"""Tests of sessions in the browser: turns, tools, forks, cache, and transcripts that are hostile."""

from typing import Any

from graftwork.engine.core.events import MissReason
from graftwork.platform.ids import CallId
from graftwork.sessions.core.items import Item, function_call, function_call_output, message
from graftwork.sessions.service import NewSession
from tests.api.console.browser import Browser
from tests.api.console.console_server import ConsoleServer, ConsoleTenant
from tests.api.console.ledger import set_prices
from tests.clients.scripted_gateway import Reply, tool_call

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
RTL = "\u202e\u202dتم \u2067الحذف"


async def store_session(
    server: ConsoleServer, tenant: ConsoleTenant, items: tuple[Item, ...], metadata: dict[str, str]
) -> str:
    """Creates a session with a history that no model has written."""
    principal = await server.resources.account.tenancy.authenticate(tenant.key)
    new = NewSession("tiny", metadata=metadata, items=items)
    return (await server.resources.sessions.sessions.create(principal, new)).session_id


def new_session(tenant: ConsoleTenant, **fields: Any) -> str:
    answer = tenant.client.post("/v1/sessions", json={"model": "tiny", **fields})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def turn(tenant: ConsoleTenant, session: str, text: str) -> dict[str, Any]:
    answer = tenant.client.post(f"/v1/sessions/{session}/turns", json={"input": text})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_session_is_started_and_goes_on(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """A new session takes a message, shows the answer, and the tokens of the turn."""
    browser.sign_in(server.url, tenant.key, "sessions")
    browser.press("New session")
    browser.press("Start session")
    browser.heading("Session")
    browser.fill("Message", "How is the weather?")
    browser.press("Send")
    browser.with_text(".item.assistant", "nothing to say")

    assert " in, " in browser.find(".turn-foot").text
    assert browser.find(".turn-foot .bar").get_attribute("aria-label")
    assert len(tenant.client.get("/v1/sessions").json()["data"]) == 1


def test_a_tool_gets_its_output_by_hand(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """A call of a tool is shown with its arguments, and its output goes on with the session."""
    server.model.replies = (
        Reply("18 degrees", "It is 18 degrees in Paris."),
        Reply("weather in Paris", tool_call("weather", '{"city": "Paris"}')),
    )
    session = new_session(tenant, tools=[TOOL])
    browser.sign_in(server.url, tenant.key, f"sessions/{session}")
    browser.fill("Message", "How is the weather in Paris?")
    browser.press("Send")
    browser.with_text(".item.call", "Paris")
    browser.fill("Output of weather", "18 degrees")
    browser.press("Send outputs")

    assert browser.with_text(".item.assistant", "It is 18 degrees")
    assert browser.with_text(".item.output", "18 degrees")


def test_forks_are_a_tree(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """Forking after a turn leads to the fork, and both pages show the tree of all three sessions."""
    session = new_session(tenant)
    turn(tenant, session, "first")
    turn(tenant, session, "second")
    browser.sign_in(server.url, tenant.key, f"sessions/{session}")
    browser.find(".turn-foot button").click()
    browser.wait(lambda: browser.driver.current_url.partition("sessions/")[2] not in ("", session))
    fork = browser.driver.current_url.partition("sessions/")[2]
    browser.with_text(".tree", "2 sessions")
    tenant.client.post(f"/v1/sessions/{fork}/fork", json={}).raise_for_status()
    browser.go(f"sessions/{session}", session[-8:])
    browser.with_text(".tree", "3 sessions")

    assert len(browser.all(".tree li li li")) == 1
    assert len(tenant.client.get(f"/v1/sessions/{fork}/items").json()["data"]) == 2


def test_a_turn_shows_its_tiers_its_miss_and_its_cost(
    browser: Browser, server: ConsoleServer, tenant: ConsoleTenant
) -> None:
    """Below each turn stand the tiers that its prompt came from, why the cache missed the rest, and its exact cost."""
    set_prices(server, tenant)
    server.model.cached_shares, server.model.miss_reason = (0.5, 0.2, 0.1), MissReason.EVICTED_PRESSURE
    session = new_session(tenant)
    shown = turn(tenant, session, "What does this cost?")
    usage = tenant.client.get(f"/v1/sessions/{session}/turns").json()["data"][0]["usage"]
    details = usage["prompt_tokens_details"]
    browser.sign_in(server.url, tenant.key, f"sessions/{session}")
    foot = browser.with_text(".turn-foot", "missed: evicted pressure").text
    tiers = browser.find(".turn-foot .bar").get_attribute("aria-label")

    assert shown["status"] == "completed"
    assert f"{usage['cost']['amount']} USD" in foot
    assert tiers == (
        f"On the device: {details['device_tokens']}, On the host: {details['host_tokens']}, "
        f"On disk: {details['disk_tokens']}, Computed: {details['recomputed_tokens']}"
    )
    assert usage["cost"]["amount"] in browser.with_text(".facts", "Cost").text


def test_a_running_turn_is_cancelled(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """A turn that runs shows what it has written so far, and the button ends it."""
    session = new_session(tenant)
    browser.sign_in(server.url, tenant.key, f"sessions/{session}")
    server.model.holds_after = 4
    try:
        browser.fill("Message", "Write without end")
        browser.press("Send")
        browser.with_text(".item.live", "I")
        browser.press("Cancel turn")
        browser.with_text(".turn-foot", "cancelled")
    finally:
        server.model.holds_after = None

    assert tenant.client.get(f"/v1/sessions/{session}").json()["status"] == "idle"


def test_earlier_entries_are_loaded_when_wanted(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """A long transcript shows its end, and its beginning after a press."""
    items = tuple(message("user" if number % 2 else "assistant", f"Entry {number}") for number in range(120))
    session = server.run(store_session(server, tenant, items, {}))
    browser.sign_in(server.url, tenant.key, f"sessions/{session}")
    browser.with_text(".item", "Entry 119")
    assert len(browser.all(".item")) == 50
    browser.press("Show earlier entries")
    browser.wait(lambda: len(browser.all(".item")) == 100 or None)
    browser.press("Show earlier entries")
    browser.wait(lambda: len(browser.all(".item")) == 120 or None)

    assert [one.text for one in browser.find_all_shown("main button") if "earlier" in one.text] == []


def test_a_session_is_suspended_and_closed(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """The buttons suspend and close the session, and the page follows."""
    session = new_session(tenant)
    turn(tenant, session, "first")
    browser.sign_in(server.url, tenant.key, f"sessions/{session}")
    browser.press("Suspend")
    browser.with_text(".page-head .chip", "suspended")
    browser.press("Close")
    browser.press("Close session")
    browser.with_text(".page-head .chip", "closed")


def test_turns_of_others_appear_by_themselves(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """A turn that another client runs appears on the open page."""
    session = new_session(tenant)
    browser.sign_in(server.url, tenant.key, f"sessions/{session}")
    turn(tenant, session, "sent by another client")

    assert browser.with_text(".item", "sent by another client")


def test_a_hostile_transcript_is_text(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """Markup, marks that turn the writing direction, control characters and a line of two megabytes are only text.

    Nothing of it runs, the page stays quick, and its own words keep their direction.
    """
    markup = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
    long_line = markup + RTL + "x" * 2_000_000
    call = CallId("call_<b>1")
    items = (
        message("user", markup + RTL + "\u0007"),
        message("assistant", f"[click](javascript:alert(1)) {markup}"),
        function_call(call, "<b>tool</b>", f'{{"a": "{RTL}"}}'),
        function_call_output(call, long_line),
    )
    session = server.run(store_session(server, tenant, items, {"<i>about": markup}))
    browser.sign_in(server.url, tenant.key, f"sessions/{session}")
    browser.with_text(".item", "<script>")
    browser.with_text(".item.output button", "characters left")
    isolated = browser.run(
        "return [...document.querySelectorAll('.item .text')].map((one) => getComputedStyle(one).unicodeBidi)"
    )

    assert set(isolated) == {"isolate"}
    assert browser.run("return window.hacked ?? null") is None
    assert browser.all("#main script, #main img, #main i, #main b") == []
    assert len(browser.text()) < 100_000
    browser.with_text(".item.output button", "characters left").click()
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    browser.resize(360, 780)
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
