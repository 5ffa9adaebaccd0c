"""Tests of a gateway that serves HTTPS itself."""

import ssl
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from graftwork.api.server.tls import TlsFiles, engine_tls
from graftwork.engine.rpc.engine_tls import EngineTls
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.settings.settings import Settings
from tests.api.gateway_on_port import running_server
from tests.api.in_process_gateway import Gateway, TestTenant, chat, chunks


@dataclass(frozen=True)
class Pem:
    """A certificate of 127.0.0.1 that signs itself, and its key."""

    certificate: Path
    key: Path

    def client(self, url: str) -> httpx.AsyncClient:
        """A client that trusts this certificate alone, on a connection of its own."""
        return httpx.AsyncClient(base_url=url, verify=ssl.create_default_context(cafile=self.certificate))


def openssl(folder: Path, name: str, *options: str) -> Pem:
    """Makes a key and a certificate with the program `openssl`."""
    pem = Pem(folder / f"{name}.pem", folder / f"{name}.key")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(pem.key), "-out", str(pem.certificate), *(options or ("-nodes",))]
    subprocess.run(command, check=True, capture_output=True)
    return pem


async def test_the_gateway_speaks_https(gateway: Gateway, tenant: TestTenant, tmp_path: Path) -> None:
    """With a certificate, a client that verifies it gets answers and streams over TLS, and plain HTTP gets nothing."""
    pem = openssl(tmp_path, "first")
    headers = {"authorization": f"Bearer {tenant.key}"}
    async with running_server(gateway, tls=TlsFiles(pem.certificate, pem.key)) as (_, url), pem.client(url) as client:
        health = await client.get("/healthz")
        stream = await client.post("/v1/chat/completions", json=chat(stream=True), headers=headers)
        async with httpx.AsyncClient(base_url=url.replace("https", "http")) as plain:
            with pytest.raises(httpx.RemoteProtocolError):
                await plain.get("/healthz")

    assert url.startswith("https://127.0.0.1:")
    assert health.json() == {"status": "ok"}
    text = "".join(choice["delta"].get("content", "") for chunk in chunks(stream.text) for choice in chunk["choices"])
    assert text == gateway.engine.text


async def test_a_new_certificate_is_used_without_a_restart(gateway: Gateway, tmp_path: Path) -> None:
    """After both files were replaced, new connections get the new certificate. A key that does not fit changes nothing."""
    served, old, new = (openssl(tmp_path, name) for name in ("served", "old", "new"))
    tls = TlsFiles(served.certificate, served.key)
    async with running_server(gateway, tls=tls) as (_, url):
        first = Pem(old.certificate.with_name("first.pem"), old.key)
        first.certificate.write_bytes(served.certificate.read_bytes())

        served.certificate.write_bytes(new.certificate.read_bytes())
        await tls.refresh()
        async with first.client(url) as client:
            half = await client.get("/healthz")
        served.key.write_bytes(new.key.read_bytes())
        await tls.refresh()
        async with new.client(url) as client:
            whole = await client.get("/healthz")
        async with first.client(url) as client:
            with pytest.raises(httpx.ConnectError, match="verify"):
                await client.get("/healthz")

    assert (half.status_code, whole.status_code) == (200, 200)


async def test_a_key_that_gets_a_password_during_a_refresh_is_never_asked_for_it(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the key's file is encrypted right after it was read, the refresh succeeds, and new connections get what it read."""
    served, new = openssl(tmp_path, "served"), openssl(tmp_path, "new")
    locked = openssl(tmp_path, "locked", "-passout", "pass:a-password")
    tls = TlsFiles(served.certificate, served.key)
    load = ssl.SSLContext.load_cert_chain

    def load_once(context: ssl.SSLContext, certificate: Path, key: Path, **options: Any) -> None:
        load(context, certificate, key, **options)
        key.write_bytes(locked.key.read_bytes())

    async with running_server(gateway, tls=tls) as (_, url):
        served.certificate.write_bytes(new.certificate.read_bytes())
        served.key.write_bytes(new.key.read_bytes())
        monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", load_once)
        await tls.refresh()
        async with new.client(url) as client:
            answer = await client.get("/healthz")

    assert answer.status_code == 200


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    """A missing file, half a pair, a foreign key, a key with a password and a text are refused with the setting's name."""
    pem, other = openssl(tmp_path, "one"), openssl(tmp_path, "two")
    locked = openssl(tmp_path, "locked", "-passout", "pass:a-password")
    text = tmp_path / "text"
    text.write_text("no certificate")
    wrong = {
        "tls_cert": [
            Settings(tls_key=pem.key),
            Settings(tls_cert=tmp_path / "nothing", tls_key=pem.key),
            Settings(tls_cert=pem.certificate, tls_key=other.key),
            Settings(tls_cert=locked.certificate, tls_key=locked.key),
            Settings(tls_cert=text, tls_key=pem.key),
        ],
        "tls_key": [
            Settings(tls_cert=pem.certificate),
            Settings(tls_cert=pem.certificate, tls_key=tmp_path / "nothing"),
        ],
    }

    for param, cases in wrong.items():
        for settings in cases:
            with pytest.raises(InvalidRequest) as refused:
                TlsFiles.of(settings)
            assert refused.value.param == param
    assert TlsFiles.of(Settings()) is None


def test_settings_name_all_files_of_the_engines_or_none(tmp_path: Path) -> None:
    """A part of the files between gateways and engines is refused by the name of the missing flag; all give the files."""
    ca, cert, key = tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "key.pem"
    whole = Settings(engine_tls_ca=ca, engine_tls_cert=cert, engine_tls_key=key, engine_tls_name="engines.internal")

    assert engine_tls(Settings()) is None
    assert engine_tls(whole) == EngineTls(ca, cert, key, "engines.internal")
    for partial, flag in (
        (replace(whole, engine_tls_ca=None), "--engine-tls-ca"),
        (replace(whole, engine_tls_cert=None), "--engine-tls-cert"),
        (replace(whole, engine_tls_key=None), "--engine-tls-key"),
        (Settings(engine_tls_name="engines.internal"), "--engine-tls-ca"),
    ):
        with pytest.raises(InvalidRequest, match=flag):
            engine_tls(partial)
