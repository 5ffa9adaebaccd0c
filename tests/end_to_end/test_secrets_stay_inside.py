"""That no key, pepper, prompt, answer or adapter byte leaves the server by a log, an error, an audit row or a trace.

A server at the log level debug, with every request traced, is given marked secrets in many acts, good and bad. Then all
that it has told anybody but the sender is searched for them.
"""

import base64
import io
import json
import sqlite3
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.conftest import DEMO, DemoServer, free_port

PEPPER = "canaryPepper7Q2xv9"
ADMIN_KEY = "gwa_canaryadmin0_canaryAdminSecret4Tn8Kd0zLw31hYp"
PROMPT, TOOL_OUTPUT, TOOL, WRONG_KEY = "canaryprompt81", "canarytool52", "canarydescription93", "canarywrongkey64"
WEIGHTS, BROKEN_JSON = "canaryweights27", "canaryjson35"
TEXT = f"Please remember {PROMPT} and say it twice."


class Collector:
    """An HTTP server that keeps what is sent to it, as an OpenTelemetry collector would get it."""

    def __init__(self) -> None:
        self.received = b""
        kept = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                kept.received += self.rfile.read(int(self.headers["content-length"]))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[DemoServer]:
    settings = {
        "GRAFTWORK_LOG_LEVEL": "debug",
        "GRAFTWORK_PEPPER": PEPPER,
        "GRAFTWORK_ADMIN_KEY": ADMIN_KEY,
        "GRAFTWORK_TRACE_SHARE": "1",
        "GRAFTWORK_OTLP_ENDPOINT": collector.url,
        "GRAFTWORK_OTEL_GEN_AI": "true",
        "GRAFTWORK_MAX_WRONG_KEYS": "4",
    }
    server = DemoServer(tmp_path_factory.mktemp("marked"), free_port(), settings)
    server.start()
    yield server
    if server.process is not None and server.process.poll() is None:
        server.kill()


class Acts:
    """What a tenant, an operator and a stranger do with marked texts, and what the server answers to it."""

    def __init__(self, server: DemoServer) -> None:
        self.server = server
        self.operator = httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {ADMIN_KEY}"}, timeout=60)
        tenant = self.operator.post("/v1/admin/tenants", json={"name": "marked"}).json()
        self.keys_path = f"/v1/admin/tenants/{tenant['id']}/keys"
        first = self.operator.post(self.keys_path, json={"name": "first"}).json()
        rotated = self.operator.post(f"{self.keys_path}/{first['id']}/rotate", json={"overlap_s": 60}).json()
        self.secrets = [one["key"].rsplit("_", 1)[1] for one in (first, rotated)]
        self.client = httpx.Client(
            base_url=server.url, headers={"authorization": f"Bearer {rotated['key']}"}, timeout=60
        )
        self.rotated = rotated
        self.model = self.client.get("/v1/models").json()["data"][0]["id"]
        self.errors: list[str] = []
        self.answers: list[str] = []
        self.request_ids: list[str] = []

    def post(self, path: str, body: object = None, is_wrong: bool = False, **sent: Any) -> Any:
        """Returns the answer. A wrong request is one that gets a 4xx."""
        answer = self.client.post(path, json=body, **sent) if body is not None else self.client.post(path, **sent)
        assert answer.status_code // 100 == (4 if is_wrong else 2), (path, answer.status_code, answer.text)
        self.request_ids.append(answer.headers["x-request-id"])
        if is_wrong:
            self.errors.append(answer.text)
            return None
        return answer.json() if "json" in answer.headers["content-type"] else answer.text

    def close(self) -> None:
        for client in (self.operator, self.client):
            client.close()

    def answer_prompts(self) -> None:
        message = [{"role": "user", "content": TEXT}]
        chat = {"model": self.model, "messages": message, "max_tokens": 24}
        self.answers.append(self.post("/v1/chat/completions", chat)["choices"][0]["message"]["content"] or "")
        self.post("/v1/chat/completions", chat | {"stream": True})
        self.post("/v1/chat/completions", chat | {"logprobs": True, "top_logprobs": 2, "n": 2})
        self.post("/v1/completions", {"model": self.model, "prompt": TEXT, "max_tokens": 4, "stop": [PROMPT]})
        self.post("/v1/messages", {"model": self.model, "max_tokens": 4, "system": TEXT, "messages": message})
        self.post("/v1/responses", {"model": self.model, "input": TEXT, "instructions": TEXT, "max_output_tokens": 8})
        self.token_ids = self.post("/v1/tokenize", {"model": self.model, "prompt": TEXT})["tokens"]
        self.post("/v1/detokenize", {"model": self.model, "tokens": self.token_ids})

    def talk(self) -> None:
        tools = [
            {"type": "function", "function": {"name": "look", "description": TOOL, "parameters": {"type": "object"}}}
        ]
        session = self.post("/v1/sessions", {"model": self.model, "tools": tools, "instructions": TEXT})["id"]
        self.post(f"/v1/sessions/{session}/turns", {"input": TEXT, "sampling": {"max_tokens": 8}})
        items = [
            {"role": "user", "content": TEXT},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": TOOL_OUTPUT},
        ]
        self.post("/v1/responses", {"model": self.model, "input": items, "max_output_tokens": 8})
        wrong = {"outputs": [{"call_id": "unknown", "output": TOOL_OUTPUT}]}
        self.post(f"/v1/sessions/{session}/tool_outputs", wrong, True)
        self.post(f"/v1/sessions/{session}/fork", {})
        self.post("/v1/conversations", {"items": [{"role": "user", "content": TEXT}], "metadata": {"about": PROMPT}})

    def be_wrong(self) -> None:
        message = {"role": "user", "content": TEXT}
        chat: dict[str, Any] = {"model": self.model, "messages": [message]}
        path = "/v1/chat/completions"
        self.post(path, chat | {"messages": [message | {"content": {"text": TEXT}}]}, True)
        self.post(path, chat | {"messages": [{"role": TEXT, "content": 3}]}, True)
        self.post(path, chat | {"messages": [message | {"content": TEXT * 4000}]}, True)
        self.post(path, chat | {"temperature": TEXT}, True)
        self.post(path, chat | {"tools": [{"type": "function", "function": {"name": "x", "parameters": TOOL}}]}, True)
        self.post("/v1/responses", {"model": self.model, "input": [{"role": "user", "content": 7, "x": TEXT}]}, True)
        broken = f'{{"model": "{self.model}", "messages": "{BROKEN_JSON}'.encode()
        self.post(path, content=broken, headers={"content-type": "application/json"}, is_wrong=True)
        self.post(path, content=TEXT.encode(), headers={"content-type": "text/plain"}, is_wrong=True)

    def work_in_batches(self) -> None:
        """Runs a batch whose lines, names and metadata are marked, and sends wrong files and batches."""
        message = [{"role": "user", "content": TEXT}]
        bodies = [{"model": self.model, "messages": message, "max_tokens": 4}, {"messages": TEXT}]
        endpoint = "/v1/chat/completions"
        lines = [
            json.dumps({"custom_id": str(number), "method": "POST", "url": endpoint, "body": body})
            for number, body in enumerate(bodies)
        ]
        ids = []
        for content in ("\n".join(lines), f"{{{BROKEN_JSON}"):
            upload = {"file": (f"{PROMPT}.jsonl", content.encode())}
            ids.append(self.post("/v1/files", data={"purpose": "batch"}, files=upload)["id"])
        batch = {"endpoint": endpoint, "completion_window": "24h", "metadata": {"about": PROMPT}}
        made = [self.post("/v1/batches", batch | {"input_file_id": one})["id"] for one in ids]
        params = {"model": self.model, "max_tokens": 4, "messages": message}
        self.post("/v1/messages/batches", {"requests": [{"custom_id": "a", "params": params}]})
        self.post("/v1/batches", batch | {"input_file_id": "unknown", "endpoint": TEXT}, is_wrong=True)
        self.post("/v1/files", data={"purpose": TEXT}, files=upload, is_wrong=True)
        while (done := self.client.get(f"/v1/batches/{made[0]}").json())["status"] != "completed":
            pass
        while (failed := self.client.get(f"/v1/batches/{made[1]}").json())["status"] != "failed":
            pass
        self.errors.append(json.dumps(failed["errors"]))
        self.errors.append(self.client.get(f"/v1/files/{done['error_file_id']}/content").text)

    def take_everything(self) -> None:
        """Exports all that the tenant has."""
        export = self.post("/v1/exports")["id"]
        while self.client.get(f"/v1/exports/{export}").json()["status"] != "completed":
            pass
        assert PROMPT.encode() in zipped(self.client.get(f"/v1/exports/{export}/content").content)

    def send_adapters(self) -> None:
        folder = next(path.parent for path in sorted(DEMO.glob("adapters/*/adapter_config.json")))
        config = (folder / "adapter_config.json").read_bytes()
        marked = with_note((folder / "adapter_model.safetensors").read_bytes(), WEIGHTS)
        good = {"config": ("c", io.BytesIO(config)), "weights": ("w", io.BytesIO(marked))}
        self.post("/v1/adapters", data={"name": "marked"}, files=good)
        for spoiled in (marked[:-9] + WEIGHTS.encode(), b"PK\3\4" + WEIGHTS.encode() * 9):
            bad = {"config": ("c", io.BytesIO(config)), "weights": (WEIGHTS, io.BytesIO(spoiled[: len(marked) - 2]))}
            self.post("/v1/adapters", data={"name": "bad"}, files=bad, is_wrong=True)
        listed = {"config": ("c", io.BytesIO(WEIGHTS.encode())), "weights": ("w", io.BytesIO(marked))}
        self.post("/v1/adapters", data={"name": "bad"}, files=listed, is_wrong=True)

    def knock(self) -> None:
        """Sends wrong keys until the address is refused, and a right key that must still be let in."""
        statuses = set()
        for number in range(7):
            for header in ({"authorization": f"Bearer gw_abcdefghijkl_{WRONG_KEY}{number}"}, {"x-api-key": WRONG_KEY}):
                answer = httpx.get(f"{self.server.url}/v1/models", headers=header, timeout=30)
                self.errors.append(answer.text)
                statuses.add(answer.status_code)
        assert statuses == {401, 429}
        assert self.client.get("/v1/models").status_code == 200
        self.operator.delete(f"{self.keys_path}/{self.rotated['id']}")
        self.errors.append(self.client.get("/v1/models").text)


def zipped(archive: bytes) -> bytes:
    """Returns the content of all files of a ZIP archive."""
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        return b"".join(files.read(name) for name in files.namelist())


def with_note(weights: bytes, note: str) -> bytes:
    """Returns a safetensors file with a note among the metadata of its header."""
    length = int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8 : 8 + length])
    header["__metadata__"] = {"format": "pt", "note": note}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + weights[8 + length :]


def told(acts: Acts, collector: Collector) -> dict[str, str]:
    """All that the server has told, by where. Ends the server, so that all of it is written."""
    operator, server = acts.operator, acts.server
    timelines = [operator.get(f"/v1/admin/requests/{one}/timeline") for one in acts.request_ids]
    found = {
        "errors": "\n".join(acts.errors),
        "timelines": "\n".join(answer.text for answer in timelines if answer.status_code == 200),
        "audit": operator.get("/v1/admin/audit?limit=100").text,
        "overview": operator.get("/v1/admin/overview").text,
        "keys": operator.get(acts.keys_path).text,
        "metrics": operator.get("/metrics").text,
        "usage": operator.get("/v1/admin/usage?group_by=adapter").text,
    }
    assert server.stop() == 0
    found["spans"] = collector.received.decode("utf-8", "replace")
    found["log"] = server.log
    with sqlite3.connect(server.data_dir / "graftwork.db") as database:
        for table in ("audit_entries", "usage_events", "api_keys", "tenants", "exports", "tenant_retention"):
            found[table] = repr(database.execute(f"SELECT * FROM {table}").fetchall())
    return found


def stored_bytes(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.glob("graftwork.db*"))


def forms(secret: str) -> list[str]:
    """A secret as text, in hexadecimal and in base 64."""
    return [secret, secret.encode().hex(), base64.b64encode(secret.encode()).decode().rstrip("=")[:-1]]


def test_no_secret_is_told(marked: DemoServer, collector: Collector) -> None:
    """No marked text is in anything that the server has told, and no key and no pepper in its database."""
    acts = Acts(marked)
    acts.answer_prompts()
    acts.talk()
    acts.be_wrong()
    acts.work_in_batches()
    acts.send_adapters()
    acts.take_everything()
    acts.knock()
    found = told(acts, collector)
    acts.close()

    for place, sign in (("log", "POST"), ("spans", "graftwork"), ("audit", "key.rotated"), ("timelines", "stages")):
        assert sign in found[place], f"{place} was not captured"
    assert len(acts.errors) > 20
    ids = ", ".join(str(token_id) for token_id in acts.token_ids[2:9])
    secrets = [*acts.secrets, PEPPER, ADMIN_KEY.rsplit("_", 1)[1], WRONG_KEY]
    texts = [PROMPT, TOOL_OUTPUT, TOOL, WEIGHTS, BROKEN_JSON, ids, ids.replace(" ", "")]
    texts += [answer for answer in acts.answers if len(answer) > 12]
    leaks = [
        (place, secret)
        for secret in (*secrets, *texts)
        for place, content in found.items()
        for form in forms(secret)
        if form in content or json.dumps(form)[1:-1] in content
    ]
    assert leaks == []
    stored = stored_bytes(marked.data_dir)
    assert acts.rotated["key"].split("_")[1].encode() in stored
    assert [secret for secret in secrets for form in forms(secret) if form.encode() in stored] == []
