"""A whole fetch, from the Hub to a served version, through a gateway and its background work."""

from pathlib import Path

import httpx
import pytest

from graftwork.adapters.inspection.inspector import AdapterInspector
from graftwork.api.sdk.client import AsyncGraftwork
from graftwork.api.sdk.transport.errors import ValidationError
from tests.adapters.adapter_files import config_bytes, tensors, weights_bytes
from tests.adapters.sources.web_server import serving
from tests.api.in_process_gateway import chat, gateway_settings, open_gateway

COMMIT = "c" * 40


async def test_an_adapter_of_the_hub_is_fetched_and_served(
    tmp_path: Path, tiny_model: Path, inspector: AdapterInspector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetch by tag becomes a version of the tag's commit, which answers; a repository without weights is a refusal."""
    async with serving() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{hub.port}")
        for revision in ("v1", COMMIT):
            path = f"/acme/lora/resolve/{revision}"
            hub.put(f"{path}/adapter_config.json", config_bytes(), headers={"x-repo-commit": COMMIT})
            hub.put(f"{path}/adapter_model.safetensors", weights_bytes(tensors(3)), headers={"x-repo-commit": COMMIT})
        hub.put("/acme/empty/resolve/v1/adapter_config.json", config_bytes())
        async with open_gateway(gateway_settings(tmp_path, tiny_model), inspector) as gateway:
            tenant, transport = await gateway.tenant(), httpx.ASGITransport(app=gateway.app)
            async with AsyncGraftwork("http://gateway.test", tenant.key, transport=transport) as client:
                upload = await client.adapters.fetch("pirate", "hf:acme/lora@v1")
                with pytest.raises(ValidationError, match=r"has no adapter_model\.safetensors"):
                    await client.adapters.fetch("other", "hf:acme/empty@v1")
                adapter = await client.adapters.get("pirate")
            answer = await tenant.client.post("/v1/chat/completions", json=chat(model="pirate"))

    assert (upload.status, upload.version) == ("ready", 1)
    assert adapter.versions[0].provenance["source"] == f"hf:acme/lora@{COMMIT}"
    assert answer.status_code == 200, answer.text
