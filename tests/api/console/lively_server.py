"""Fills a gateway as if it had been busy for months, and keeps it busy: what the pictures of the docs show."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from graftwork.engine.core.events import MissReason
from graftwork.platform.ids import TenantId
from graftwork.platform.ledger.price_keeper import NewPrices
from graftwork.platform.prices.price_list import PriceList
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.tenancy.limit_book import LimitOwner
from tests.api.console.console_server import ConsoleServer, ConsoleTenant
from tests.api.console.ledger import month_back, record, record_days
from tests.api.in_process_gateway import adapter_upload
from tests.clients.scripted_gateway import Reply, tool_call

OBJECTIVES = "default.ttft_ms=250,default.target=0.9"
TENANTS = {
    "Northwind Logistics": 3.0,
    "Blackbeard Charters": 2.0,
    "Corner Helpdesk": 1.0,
    "Plain Labs": 1.0,
    "Ada & Sons": 1.0,
    "Mirror Health": 2.0,
}
"""The tenants and their weights."""
RATES = {
    "input": "0.50",
    "input_device": "0.05",
    "input_host": "0.10",
    "input_disk": "0.20",
    "output": "1.50",
    "kv_gb_hour": "0.02",
    "adapter_gb": "0.001",
}
PARAMETERS = {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]}
TOOL = {"type": "function", "function": {"name": "find_order", "parameters": PARAMETERS}}
REPLIES = (
    Reply("refund", "Yes: within 30 days, if the box is still closed. Shall I start one?"),
    Reply("left Rotterdam", "It left Rotterdam this morning and should reach you on Thursday."),
    Reply("order 4711", tool_call("find_order", '{"order": "4711"}')),
    Reply("Hello", "Hello! What can I do for you today?"),
)
FIGURES = {
    "free_pages": 2310,
    "cached_pages": 1120,
    "active_pages": 640,
    "host_cached_pages": 9400,
    "host_free_pages": 3600,
    "disk_pages": 31_000,
    "waiting_requests": 1,
    "kv_usage_ratio": 0.16,
    "max_adapters_in_a_step": 8,
}


@dataclass(frozen=True)
class Lively:
    """The tenants by their names, and what the pictures show of the first one."""

    tenants: dict[str, ConsoleTenant]
    session: str
    request: str

    @property
    def shown(self) -> ConsoleTenant:
        return self.tenants["Northwind Logistics"]


def fill(server: ConsoleServer) -> Lively:
    """Makes tenants, adapters, prices, a ledger of months, and a session with a tool and a fork."""
    tenants = {name: server.tenant(name, weight) for name, weight in TENANTS.items()}
    for model in server.models:
        model.replies, model.has_doubts = REPLIES, True
        model.queue_s, model.first_token_s, model.token_s, model.prompt_token_s = 0.02, 0.06, 0.012, 0.0006
        model.cached_shares, model.figures, model.most_resident = (0.55, 0.15, 0.1), FIGURES, 5
    meet_a_limit(server, tenants["Corner Helpdesk"])
    prices = server.run(server.resources.admin.prices.set(NewPrices(RATES, "USD")))
    server.run(
        server.resources.admin.prices.set(NewPrices({**RATES, "input": "0.25", "output": "0.80"}, "USD", None, "flex"))
    )
    own = tenants["Northwind Logistics"]
    special = NewPrices({**RATES, "input": "0.42", "output": "1.20"}, "USD", TenantId(own.id))
    server.run(server.resources.admin.prices.set(special))
    for tenant in tenants.values():
        fill_ledger(server, tenant, prices)
    publish(tenants)
    session, request = talk(server, own)
    return Lively(tenants, session, request)


def meet_a_limit(server: ConsoleServer, tenant: ConsoleTenant) -> None:
    """Limits a tenant, and sends as many of its requests that some are refused."""
    server.run(
        server.resources.account.tenancy.limits.set(
            LimitOwner.tenant(TenantId(tenant.id)), Quota(requests_per_minute=12)
        )
    )
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    codes = [tenant.client.post("/v1/chat/completions", json=body).status_code for _ in range(15)]
    assert {200, 429} == set(codes)


def fill_ledger(server: ConsoleServer, tenant: ConsoleTenant, prices: PriceList) -> None:
    """Adds requests of the last weeks and months, whose sizes follow from the tenant's name."""
    size = 9173 * len(tenant.name)
    record_days(server, tenant, prices, 26, size)
    for months in range(1, 5):
        record(server, tenant, prices, month_back(months), size * (29 - 4 * months))


def publish(tenants: dict[str, ConsoleTenant]) -> None:
    """Uploads adapters. The first tenant's has three versions, and a canary."""
    for number, tenant in enumerate(tenants.values()):
        for name, seed in (("support", 10 + number), ("triage", 20 + number)):
            tenant.client.post("/v1/adapters", data={"name": name}, files=adapter_upload(seed)).raise_for_status()
    client = tenants["Northwind Logistics"].client
    for seed in (3, 4):
        client.post("/v1/adapters", data={"name": "support"}, files=adapter_upload(seed)).raise_for_status()
    client.put("/v1/adapters/support/aliases/prod", json={"version": 2}).raise_for_status()
    client.put("/v1/adapters/support/aliases/next", json={"weights": {"2": 9, "3": 1}}).raise_for_status()


def talk(server: ConsoleServer, tenant: ConsoleTenant) -> tuple[str, str]:
    """Leads a session with a call of a tool and two forks. Returns its id, and the id of one of its requests."""
    client = tenant.client
    new = {"model": "support", "tools": [TOOL], "metadata": {"ticket": "4711"}, "instructions": "You help customers."}
    session = str(client.post("/v1/sessions", json=new).json()["id"])
    path = f"/v1/sessions/{session}"
    call = client.post(f"{path}/turns", json={"input": "Where is my order 4711?"}).json()["tool_calls"][0]
    given = {"outputs": [{"call_id": call["call_id"], "output": '{"state": "left Rotterdam", "eta": "Thursday"}'}]}
    client.post(f"{path}/tool_outputs", json=given).raise_for_status()
    for _ in range(2):
        fork = client.post(f"{path}/fork", json={}).json()["data"][0]["id"]
        client.post(f"/v1/sessions/{fork}/turns", json={"input": "Hello again"}).raise_for_status()
    for model in server.models:
        model.cached_shares, model.miss_reason = (0.2, 0.3, 0.1), MissReason.EVICTED_PRESSURE
    answer = client.post(f"{path}/turns", json={"input": "Could I still get a refund?"}).raise_for_status()
    for model in server.models:
        model.cached_shares, model.miss_reason = (0.55, 0.15, 0.1), None
    return session, answer.headers["x-request-id"]


@contextmanager
def traffic(lively: Lively) -> Iterator[None]:
    """Sends requests of all tenants until the block ends."""
    stop = threading.Event()
    threads = []
    for place, (name, tenant) in enumerate(lively.tenants.items()):
        text = "Hello. " + ("Here is a long record of a patient. " * 30 if name == "Mirror Health" else "")
        pause_s = {"Northwind Logistics": 0.05, "Mirror Health": 0.3}.get(name, 0.2 + 0.1 * place)
        clients = 3 if name == "Northwind Logistics" else 1
        threads += [threading.Thread(target=keep_asking(tenant, text, pause_s, stop)) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def keep_asking(tenant: ConsoleTenant, text: str, pause_s: float, stop: threading.Event) -> Callable[[], None]:
    """Returns what sends a request after the other, each third one in a session."""

    def run() -> None:
        client = tenant.client
        session = client.post("/v1/sessions", json={"model": "triage"}).json()["id"]
        for number in count():
            if stop.wait(pause_s * (1 + number % 3) / 2):
                return
            if number % 3 == 2 and number < 12:
                client.post(f"/v1/sessions/{session}/turns", json={"input": text})
            else:
                body = {"model": ("support", "tiny")[number % 2], "messages": [{"role": "user", "content": text}]}
                client.post("/v1/chat/completions", json=body)

    return run
