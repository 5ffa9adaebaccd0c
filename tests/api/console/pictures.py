"""Makes the pictures of docs/console.md from a gateway whose model follows a script.

python -m tests.api.console.pictures [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

from tests.api.console.browser import Browser, chromium
from tests.api.console.console_server import ConsoleServer, ConsoleTenant, console_server
from tests.api.in_process_gateway import adapter_upload
from tests.clients.scripted_gateway import Reply, tool_call

PICTURES = Path(__file__).parents[3] / "docs" / "images"
NAMES = ("Northwind Logistics", "Blackbeard Charters", "Corner Helpdesk", "Plain Labs", "Ada & Sons", "Mirror Health")
PARAMETERS = {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]}
TOOL = {"type": "function", "function": {"name": "find_order", "parameters": PARAMETERS}}
REPLIES = (
    Reply("refund", "Yes: within 30 days, if the box is still closed. Shall I start one?"),
    Reply("left Rotterdam", "It left Rotterdam this morning and should reach you on Thursday."),
    Reply("order 4711", tool_call("find_order", '{"order": "4711"}')),
    Reply("Hello", "Hello! What can I do for you today?"),
)


def make_traffic(server: ConsoleServer) -> tuple[ConsoleTenant, str]:
    """Sends requests of several tenants. Returns the tenant that the pictures show, and its session."""
    server.model.replies = REPLIES
    tenants = [server.tenant(name) for name in NAMES]
    first = tenants[0]
    for name, seed in (("support", 1), ("triage", 2)):
        first.client.post("/v1/adapters", data={"name": name}, files=adapter_upload(seed)).raise_for_status()
    first.client.put("/v1/adapters/support/aliases/prod", json={"version": 1}).raise_for_status()
    admin = server.client(server.admin_key)
    admin.put(f"/v1/admin/tenants/{tenants[2].id}/quota", json={"requests_per_minute": 4}).raise_for_status()
    for number, tenant in enumerate(tenants):
        for _ in range(12 - 2 * number):
            body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
            tenant.client.post("/v1/chat/completions", json=body)
    new = {"model": "support", "tools": [TOOL], "metadata": {"ticket": "4711"}, "instructions": "You help customers."}
    session = str(first.client.post("/v1/sessions", json=new).json()["id"])
    path = f"/v1/sessions/{session}"
    call = first.client.post(f"{path}/turns", json={"input": "Where is my order 4711?"}).json()["tool_calls"][0]
    server.model.cached_tokens = 210
    given = {"outputs": [{"call_id": call["call_id"], "output": '{"state": "left Rotterdam", "eta": "Thursday"}'}]}
    first.client.post(f"{path}/tool_outputs", json=given).raise_for_status()
    fork = first.client.post(f"{path}/fork", json={}).json()["data"][0]["id"]
    first.client.post(f"{path}/turns", json={"input": "Could I still get a refund?"}).raise_for_status()
    first.client.post(f"/v1/sessions/{fork}/turns", json={"input": "Hello again"}).raise_for_status()
    return first, session


def take(browser: Browser, server: ConsoleServer, folder: Path) -> None:
    """Takes each picture in light colours, the overview also in dark ones, and a session as on a phone."""
    tenant, session = make_traffic(server)
    browser.resize(1280, 900)
    browser.sign_in(server.url, server.admin_key)
    browser.with_text(".worst li", "refused")
    browser.run("await new Promise((resolve) => setTimeout(resolve, 5000))")
    browser.shoot(folder / "console-overview.png")
    browser.resize(1280, 900, dark=True)
    browser.shoot(folder / "console-overview-dark.png")
    browser.resize(1280, 900)
    browser.go("tenants", "Tenants")
    browser.shoot(folder / "console-tenants.png")
    browser.sign_in(server.url, tenant.key, f"sessions/{session}")
    browser.with_text(".tree", "2 sessions")
    browser.shoot(folder / "console-session.png")
    browser.resize(390, 844)
    browser.shoot(folder / "console-phone.png")
    browser.resize(1280, 760)
    browser.go("playground", "Playground")
    browser.find(".composer textarea").send_keys("Could I still get a refund?")
    browser.press("Send")
    browser.wait(lambda: len(browser.all(".figures")) >= 2 or None)
    browser.all(".lane:first-child .token")[3].click()
    browser.shoot(folder / "console-playground.png")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as data, console_server(Path(data) / "gateway") as server, chromium() as browser:
        take(browser, server, Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES)
