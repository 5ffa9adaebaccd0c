"""Tests of the playground: models side by side, token by token, tools, schemas and forks."""

from selenium.webdriver.common.keys import Keys

from tests.api.console.browser import Browser
from tests.api.console.console_server import ConsoleServer, ConsoleTenant
from tests.api.in_process_gateway import adapter_upload
from tests.clients.scripted_gateway import Reply, tool_call


def open_playground(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant, query: str = "") -> None:
    browser.sign_in(server.url, tenant.key, f"playground{query}")
    browser.heading("Playground")


def say(browser: Browser, text: str, answers: int) -> None:
    """Sends a message to all lanes, and waits until there are so many answers."""
    browser.find(".composer textarea").send_keys(text)
    browser.press("Send")
    browser.wait(lambda: len(browser.all(".figures")) >= answers or None)


def test_an_adapter_stands_beside_the_base(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """Both lanes get the message and answer, and each token shows its probability and its rivals."""
    tenant.client.post("/v1/adapters", data={"name": "pirate"}, files=adapter_upload(1)).raise_for_status()
    open_playground(browser, server, tenant)
    lanes = [one.get_attribute("value") for one in browser.all(".lane select")]
    say(browser, "Hello", 2)
    tokens = browser.all(".lane:first-child .token")
    tokens[0].click()
    rivals = browser.find(".alternatives").text

    assert lanes == ["pirate", "tiny"]
    assert "".join(token.text for token in tokens).replace(" ", "") == "Ihavenothingtosaytothis."
    assert "%" in rivals


def test_an_answer_comes_token_by_token(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """The tokens that the model has written so far are shown while it still writes, and the arrow keys go through them."""
    open_playground(browser, server, tenant)
    server.model.holds_after = 3
    try:
        browser.find(".composer textarea").send_keys("Hello")
        browser.press("Send")
        browser.wait(lambda: len(browser.all(".said[aria-busy] .token")) == 3 or None)
    finally:
        server.model.holds_after = None
        server.loop.call_soon_threadsafe(server.model.release.set)
    browser.find(".figures")
    browser.find(".tokens").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)

    assert len(browser.all(".token")) > 3
    assert browser.find(".token.chosen").get_attribute("data-token") == "1"
    assert browser.find(".alternatives .own").text.endswith("%")
    server.loop.call_soon_threadsafe(server.model.release.clear)


def test_lanes_are_forked(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """A fork has the conversation so far, and goes on apart."""
    open_playground(browser, server, tenant)
    say(browser, "Hello", 1)
    browser.press("Fork the lane of tiny")
    browser.wait(lambda: len(browser.all(".lane")) == 2 or None)
    say(browser, "And now?", 4)

    assert [len(lane.find_elements("css selector", ".said")) for lane in browser.all(".lane")] == [4, 4]


def test_tools_and_schemas(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """A wrong JSON is named before anything is sent. A call of a tool takes an output and goes on."""
    server.model.replies = (
        Reply("18 degrees", "It is 18 degrees."),
        Reply("weather in Paris", tool_call("weather", '{"city": "Paris"}')),
    )
    open_playground(browser, server, tenant)
    browser.find("summary").click()
    browser.fill("JSON Schema of the answer", "{not json")
    browser.find(".composer textarea").send_keys("The weather in Paris?")
    browser.press("Send")
    browser.with_text(".error", "this is not JSON")
    browser.field("JSON Schema of the answer").clear()
    browser.fill(
        "Tools, as JSON", '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'
    )
    browser.press("Send")
    browser.with_text(".call", "Paris")
    browser.fill("Output of weather", "18 degrees")
    browser.press("Send outputs")

    browser.with_text(".said.assistant", "It is 18 degrees.")


def test_a_refused_schema_names_its_place(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """The server's refusal of a schema is shown in the lane, and the message can be sent again."""
    open_playground(browser, server, tenant)
    browser.find("summary").click()
    browser.fill("JSON Schema of the answer", '{"type": "nonsense"}')
    browser.find(".composer textarea").send_keys("Hello")
    browser.press("Send")
    browser.with_text(".lane .error", "nonsense")
    browser.field("JSON Schema of the answer").clear()
    browser.press("Try again")

    browser.with_text(".said.assistant", "nothing to say")


def test_a_session_goes_on_in_the_playground(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """The history of a session opens in two lanes, to compare how each model goes on."""
    session = tenant.client.post("/v1/sessions", json={"model": "tiny"}).json()["id"]
    tenant.client.post(f"/v1/sessions/{session}/turns", json={"input": "Once"}).raise_for_status()
    open_playground(browser, server, tenant, f"?session={session}")
    browser.wait(lambda: len(browser.all(".said")) == 4 or None)
    say(browser, "And then?", 2)


def test_the_life_of_an_answer(browser: Browser, server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """An answer leads to its timeline, which shows each stage; the operator finds it by the request's id."""
    open_playground(browser, server, tenant)
    say(browser, "Hello", 1)
    browser.press("Timeline")
    browser.heading("Request req_")
    stages = [one.text for one in browser.all(".timeline bdi")]
    request = browser.driver.current_url.partition("requests/")[2]
    browser.sign_in(server.url, server.admin_key, "requests")
    browser.fill("Id of a request or a turn", request)
    browser.press("Show its timeline")
    browser.heading(request)

    assert {"authenticate", "queue", "decode"} <= set(stages)
    assert tenant.id in browser.text()


def test_reasoning_stands_before_the_answer(browser: Browser, thinker: ConsoleServer) -> None:
    """What the model reasoned is folded above its answer, as text and counted; it is sent back with the next message, so
    that the chat template may decide.
    """
    tenant = thinker.tenant()
    open_playground(browser, thinker, tenant)
    say(browser, "How is the weather?", 1)
    box = browser.with_text(".said details summary", "reasoning")
    assert "closer" not in browser.text()
    box.click()
    thought = browser.find(".said details .text").text
    answer = "".join(token.text for token in browser.all(".token"))
    figures = browser.find(".figures").text
    sent = browser.run(
        """
        const start = document.querySelector("script[type=module]").src;
        const { toSend } = await import(new URL("playground/messages.js", start).href);
        return toSend("", [{ role: "assistant", content: "It is sunny.", reasoning: "Let me look.", took: 1 }]);
        """
    )

    assert thought.strip() == "Let me look <b>closer</b>."
    assert answer.replace(" ", "") == "Itissunny."
    assert "of them reasoning" in figures
    assert sent == [{"role": "assistant", "content": "It is sunny.", "reasoning_content": "Let me look."}]


def test_a_turn_counts_its_reasoning(browser: Browser, thinker: ConsoleServer) -> None:
    """The line below a turn says how many of its tokens were reasoning."""
    tenant = thinker.tenant()
    session = tenant.client.post("/v1/sessions", json={"model": "tiny"}).json()["id"]
    turn = tenant.client.post(f"/v1/sessions/{session}/turns", json={"input": "x"}).raise_for_status().json()
    number = turn["usage"]["completion_tokens_details"]["reasoning_tokens"]
    browser.sign_in(thinker.url, tenant.key, f"sessions/{session}")

    browser.with_text(".turn-foot", f"{number} of them reasoning")
