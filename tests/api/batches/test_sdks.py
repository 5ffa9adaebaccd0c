"""Tests of the unmodified `openai` and `anthropic` packages on batches, against a gateway on a real port that runs them."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import anthropic
import openai
import pytest

from graftwork.adapters.inspection.inspector import AdapterInspector
from tests.api.batches.conftest import jsonl, line
from tests.api.gateway_on_port import gateway_on_port
from tests.api.in_process_gateway import Gateway, gateway_settings, open_gateway


@pytest.fixture
async def gateway(
    tmp_path: Path, tiny_model: Path, sqlite_template: Path, inspector: AdapterInspector
) -> AsyncIterator[Gateway]:
    """A gateway that runs its own batches."""
    shutil.copy(sqlite_template, tmp_path / "graftwork.db")
    async with open_gateway(gateway_settings(tmp_path, tiny_model), inspector) as gateway:
        yield gateway


async def test_openai(gateway: Gateway) -> None:
    """Upload, create, wait, download, list, cancel and delete, as OpenAI's guide does it."""
    tenant = await gateway.tenant()
    async with (
        gateway_on_port(gateway) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=tenant.key) as client,
    ):
        content = jsonl([line("a"), line("b", model="nobodys")])
        file = await client.files.create(file=("requests.jsonl", content), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"topic": "weather"},
        )
        with pytest.raises(openai.ConflictError):
            await client.with_options(max_retries=0).files.delete(file.id)
        while batch.status not in ("completed", "failed"):
            batch = await client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None
        assert batch.error_file_id is not None
        output = json.loads((await client.files.content(batch.output_file_id)).text)
        errors = json.loads((await client.files.content(batch.error_file_id)).text)
        listed = [one.id async for one in client.batches.list(limit=1)]
        files = [one.purpose async for one in client.files.list()]
        with pytest.raises(openai.ConflictError, match="completed"):
            await client.batches.cancel(batch.id)
        deleted = await client.files.delete(file.id)
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)

    assert (batch.model, batch.metadata, listed) == ("tiny", {"topic": "weather"}, [batch.id])
    assert output["response"]["body"]["choices"][0]["message"]["content"] == gateway.engine.text
    assert (errors["custom_id"], errors["response"]["status_code"]) == ("b", 404)
    assert sorted(files) == ["batch", "batch_output", "batch_output"]
    assert deleted.deleted


async def test_anthropic(gateway: Gateway) -> None:
    """Create, wait, read the results, list and delete, as Anthropic's guide does it."""
    tenant = await gateway.tenant()
    good = {"model": "tiny", "max_tokens": 64, "messages": [{"role": "user", "content": "Hi"}]}
    async with gateway_on_port(gateway) as url, anthropic.AsyncAnthropic(base_url=url, api_key=tenant.key) as client:
        batches = client.messages.batches
        batch = await batches.create(
            requests=[
                {"custom_id": "a", "params": good},  # type: ignore[typeddict-item]
                {"custom_id": "b", "params": good | {"top_k": -1}},  # type: ignore[typeddict-item]
            ]
        )
        assert (batch.processing_status, batch.request_counts.processing) == ("in_progress", 2)
        with pytest.raises(anthropic.ConflictError):
            await client.with_options(max_retries=0).messages.batches.delete(batch.id)
        while batch.processing_status != "ended":
            batch = await batches.retrieve(batch.id)
        results = {one.custom_id: one.result async for one in await batches.results(batch.id)}
        listed = [one.id async for one in batches.list(limit=1)]
        hidden = (await tenant.client.get("/v1/files")).json()["data"]
        deleted = await batches.delete(batch.id)
        with pytest.raises(anthropic.NotFoundError):
            await batches.retrieve(batch.id)

    counts = batch.request_counts
    assert (counts.succeeded, counts.errored, counts.processing) == (1, 1, 0)
    assert results["a"].type == "succeeded"
    assert results["a"].message.content[0].text == gateway.engine.text  # type: ignore[union-attr]
    assert results["a"].message.usage.service_tier == "batch"
    assert results["b"].type == "errored"
    assert results["b"].error.error.type == "invalid_request_error"
    assert (listed, hidden, deleted.id) == ([batch.id], [], batch.id)


async def test_a_batch_of_messages_is_cancelled(gateway: Gateway) -> None:
    """A cancelled batch of messages ends with a result for each request."""
    tenant = await gateway.tenant()
    gateway.engine.holds_after = 1
    good = {"model": "tiny", "max_tokens": 64, "messages": [{"role": "user", "content": "Hi"}]}
    async with gateway_on_port(gateway) as url, anthropic.AsyncAnthropic(base_url=url, api_key=tenant.key) as client:
        batches = client.messages.batches
        batch = await batches.create(
            requests=[{"custom_id": f"{number}", "params": good} for number in range(20)]  # type: ignore[typeddict-item]
        )
        await gateway.engine.held.wait()
        cancelled = await batches.cancel(batch.id)
        gateway.engine.release.set()
        batch = cancelled
        while batch.processing_status != "ended":
            batch = await batches.retrieve(batch.id)
        results = [one.result.type async for one in await batches.results(batch.id)]

    assert cancelled.processing_status == "canceling"
    assert len(results) == 20
    counts = batch.request_counts
    assert (results.count("succeeded"), results.count("canceled")) == (counts.succeeded, counts.canceled)
    assert counts.succeeded + counts.canceled == 20
