"""Models from the Hugging Face Hub and from buckets, fetched over HTTP from servers of this test."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from graftwork.api.server.model_sources import fetched_model
from graftwork.api.server.served_model import model_name
from graftwork.platform.settings.settings import Settings, parse_setting
from graftwork.platform.settings.values import ModelReference

COMMITS = ("a" * 40, "b" * 40)
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model-00001-of-00002.safetensors": b"first" * 1000,
    "model-00002-of-00002.safetensors": b"second" * 1000,
}
OTHERS = {"pytorch_model.bin": b"pickle", "original/model.safetensors": b"again", "consolidated.safetensors": b"again"}
WITHOUT_WEIGHTS = sorted(name for name in FILES if not name.endswith(".safetensors"))

_FETCH = """
import sys, logging
from pathlib import Path
from graftwork.api.server.served_model import model_folder
from graftwork.platform.errors import GraftworkError
from graftwork.platform.settings.settings import Settings

logging.basicConfig(level=logging.WARNING)
settings = Settings.from_environment({"model": sys.argv[1], "data_dir": sys.argv[2]})
try:
    print(model_folder(settings, with_weights=sys.argv[3] == "whole"))
except GraftworkError as error:
    print(type(error).__name__, error.message)
    sys.exit(1)
"""


class FakeHub:
    """A Hub with one model. Its branch `main` is at a commit that a test may change."""

    def __init__(self) -> None:
        self.head = COMMITS[0]
        self.paths: list[str] = []
        """What was asked for, in order."""
        self.status: int | None = None
        """The status of every answer, for a Hub with a fault."""
        self.is_away = False
        """Whether connections end without an answer."""
        self.breaks_at: str | None = None
        """A file of which the Hub sends half, once."""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        self.paths.append(path)
        if self.is_away:
            request.close_connection = True  # without an answer
        elif self.status is not None:
            request.send_error(self.status)
        elif path.startswith("/api/models/acme/tiny/revision/"):
            revision = path.rpartition("/")[2]
            known = revision in (*COMMITS, "main")
            self._json(
                request, 200 if known else 404, {"id": "acme/tiny", "sha": self.head, "siblings": []}, "Revision"
            )
        elif path.startswith("/api/models/acme/tiny/tree/"):
            files = [
                {"type": "file", "path": name, "size": len(data), "oid": sha1(data).hexdigest()}
                for name, data in (FILES | OTHERS).items()
            ]
            self._json(request, 200, files)
        elif path.startswith("/acme/tiny/resolve/"):
            self._file(request, *path.removeprefix("/acme/tiny/resolve/").split("/", 1))
        else:
            self._json(request, 404, {"error": "Repository not found"}, "Repo")

    def _json(self, request: BaseHTTPRequestHandler, status: int, body: Any, missing: str = "") -> None:
        data = json.dumps(body).encode()
        request.send_response(status)
        if status == 404:
            request.send_header("X-Error-Code", f"{missing}NotFound")
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def _file(self, request: BaseHTTPRequestHandler, commit: str, name: str) -> None:
        data = (FILES | OTHERS)[name]
        request.send_response(200)
        request.send_header("ETag", f'"{sha1(data).hexdigest()}"')
        request.send_header("X-Repo-Commit", commit)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        if request.command == "HEAD":
            return
        if name == self.breaks_at:
            self.breaks_at = None
            data = data[: len(data) // 2]
            request.close_connection = True
        request.wfile.write(data)


@pytest.fixture
def hub() -> Iterator[tuple[FakeHub, str]]:
    """A Hub, and its address."""
    fake = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            fake.answer(self)

        do_HEAD = do_GET  # noqa: N815 (the name that http.server calls)

        def log_message(self, format: str, *values: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield fake, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


class Machine:
    """One machine that serves models: its caches, and the process that fetches."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder = folder
        self.variables = {"HF_HOME": str(folder / "hub"), "HF_HUB_DISABLE_XET": "1", **variables}

    def fetch(self, model: str, part: str = "whole") -> tuple[int, str, str]:
        """Returns the exit status, the last line that was printed, and the log."""
        done = subprocess.run(
            [sys.executable, "-c", _FETCH, model, str(self.folder / "data"), part],
            env=os.environ | self.variables,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.stdout, done.stderr
        return done.returncode, done.stdout.strip(), done.stderr


def contents(folder: str) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_a_commit_of_the_hub_is_fetched_once(hub: tuple[FakeHub, str], tmp_path: Path) -> None:
    """The files that serving needs are fetched, and nothing else; a second start asks the Hub for nothing."""
    fake, url = hub
    machine = Machine(tmp_path, HF_ENDPOINT=url)

    status, folder, _ = machine.fetch(f"hf:acme/tiny@{COMMITS[0]}")
    asked = len(fake.paths)
    again = machine.fetch(f"hf:acme/tiny@{COMMITS[0]}")

    assert (status, contents(folder)) == (0, FILES)
    assert again[:2] == (0, folder)
    assert len(fake.paths) == asked


def test_a_branch_is_followed_and_its_commit_named(hub: tuple[FakeHub, str], tmp_path: Path) -> None:
    """A branch is looked up at each start, its commit is in the log, and the last one serves while the Hub is away."""
    fake, url = hub
    machine = Machine(tmp_path, HF_ENDPOINT=url)

    first = machine.fetch("hf:acme/tiny")
    fake.head = COMMITS[1]
    second = machine.fetch("hf:acme/tiny@main")
    fake.is_away = True
    third = machine.fetch("hf:acme/tiny")

    assert [Path(found[1]).name for found in (first, second, third)] == [COMMITS[0], COMMITS[1], COMMITS[1]]
    assert f"hf:acme/tiny@{COMMITS[0]}" in first[2]


def test_a_gateway_fetches_no_weights(hub: tuple[FakeHub, str], tmp_path: Path) -> None:
    """Without weights the tokenizer, the template and the configuration are fetched alone; an engine gets the rest."""
    _, url = hub
    machine = Machine(tmp_path, HF_ENDPOINT=url)
    model = f"hf:acme/tiny@{COMMITS[0]}"

    _, text, _ = machine.fetch(model, "text")
    found = sorted(contents(text))
    _, whole, _ = machine.fetch(model)

    assert found == WITHOUT_WEIGHTS
    assert contents(whole) == FILES


def test_a_fetch_that_broke_off_is_not_served(hub: tuple[FakeHub, str], tmp_path: Path) -> None:
    """If a file comes in part, the model is either fetched whole after all or refused; it is whole after the next start."""
    fake, url = hub
    fake.breaks_at = "model-00002-of-00002.safetensors"
    machine = Machine(tmp_path, HF_ENDPOINT=url)

    status, folder, _ = machine.fetch(f"hf:acme/tiny@{COMMITS[0]}")
    _, later, _ = machine.fetch(f"hf:acme/tiny@{COMMITS[0]}")

    assert status or contents(folder) == FILES
    assert contents(later) == FILES


@pytest.mark.parametrize(
    ("model", "status", "said"),
    [
        ("hf:acme/nobody@main", None, "InvalidRequest The model acme/nobody is not on the Hub"),
        ("hf:acme/tiny@v9", None, "InvalidRequest The model acme/tiny has no revision v9"),
        (f"hf:acme/tiny@{COMMITS[0]}", 403, "Unavailable The model acme/tiny is not whole on this machine"),
    ],
)
def test_what_cannot_be_fetched_is_said_in_one_sentence(
    hub: tuple[FakeHub, str], tmp_path: Path, model: str, status: int | None, said: str
) -> None:
    """A model that does not exist, a revision that does not, and a Hub with a fault are told apart."""
    fake, url = hub
    fake.status = status

    found = Machine(tmp_path, HF_ENDPOINT=url).fetch(model)

    assert found[0] == 1
    assert found[1].startswith(said)


@pytest.mark.parametrize(
    ("text", "name", "revision"),
    [
        ("hf:Qwen/Qwen3-0.6B", "Qwen3-0.6B", ""),
        ("hf:Qwen/Qwen3-0.6B@refs/pr/1", "Qwen3-0.6B", "refs/pr/1"),
        ("s3://models/teams/my-llama/", "my-llama", ""),
        ("gs://bucket/llama", "llama", ""),
    ],
)
def test_a_reference_names_the_model(text: str, name: str, revision: str) -> None:
    """The last part of its place is the model's name for clients, unless the operator sets another."""
    parsed = parse_setting("model", "--model", text)

    assert isinstance(parsed, ModelReference)
    assert (parsed.revision, model_name(Settings(model=parsed))) == (revision, name)
    assert model_name(Settings(model=parsed, served_model_name="other")) == "other"


def test_a_folder_stays_a_folder(tmp_path: Path) -> None:
    """A path is read as a path, also one with a colon, and a reference that is misspelled is refused."""
    assert parse_setting("model", "--model", "./my:llama") == Path("./my:llama")
    for wrong in ("hf:llama", "hf:a/b/c", "s3://", "s3://bucket?x"):
        with pytest.raises(Exception, match="write "):
            parse_setting("model", "--model", wrong)


def test_a_bucket_serves_while_it_is_away(tmp_path: Path) -> None:
    """What was fetched from a bucket is whole, follows what the bucket lists, and serves while the bucket is away."""
    pytest.importorskip("obstore", reason="the objects extra is not installed")
    bucket = tmp_path / "bucket"
    for name, data in (FILES | OTHERS).items():
        (bucket / name).parent.mkdir(parents=True, exist_ok=True)
        (bucket / name).write_bytes(data)
    reference = ModelReference(f"file://{bucket}")

    first = fetched_model(reference, tmp_path)
    (bucket / "config.json").write_bytes(b'{"model_type": "qwen3"}')
    second = fetched_model(reference, tmp_path)
    shutil.rmtree(bucket)
    third = fetched_model(reference, tmp_path)

    assert contents(str(first)) == FILES
    assert contents(str(second)) == FILES | {"config.json": b'{"model_type": "qwen3"}'}
    assert third == second
