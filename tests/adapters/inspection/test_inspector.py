"""Tests of the inspector: a hostile file can end a worker, but not harm the process that asked."""

import asyncio
import gc
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from graftwork.adapters.format.identity import identify_adapter
from graftwork.adapters.inspection.inspector import AdapterInspector, IdentifiedAdapter, InspectionLimits
from graftwork.adapters.inspection.process import InspectionProcess
from graftwork.engine.core.stats import EngineDescription
from graftwork.platform.errors import Unavailable, ValidationFailed
from tests.adapters.adapter_files import (
    DESCRIPTION,
    Q0_A,
    Q0_B,
    config_bytes,
    container,
    entries,
    open_files,
    tensors,
    weights_bytes,
)
from tests.adapters.format.gguf_files import converted, gguf_bytes

GOOD = weights_bytes()
LARGE = replace(DESCRIPTION, vocab_size=512 * 1024)


async def identify(
    inspector: AdapterInspector, config: bytes, weights: bytes, description: EngineDescription, owner: str = "ten_a"
) -> IdentifiedAdapter:
    with open_files(config, weights) as files:
        return await inspector.identify(owner, files, description)


async def refusal(
    inspector: AdapterInspector, weights: bytes, config: bytes | None = None, description: EngineDescription = LARGE
) -> ValidationFailed:
    with pytest.raises(ValidationFailed) as caught:
        await identify(inspector, config or config_bytes(), weights, description)
    return caught.value


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def read_proc(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
async def small() -> AsyncIterator[AdapterInspector]:
    """An inspector with one worker, which the test may kill."""
    inspector = AdapterInspector(num_workers=1)
    yield inspector
    await inspector.close()


def empty_tensors(number: int) -> bytes:
    rows = (f'"t{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(number))
    return container(f"{{{','.join(rows)}}}".encode(), b"")


def large() -> bytes:
    """Returns 64 MB that fit `LARGE` and take a tenth of a second."""
    return weights_bytes(tensors() | {"model.embed_tokens.weight": np.zeros((LARGE.vocab_size, 32), np.float32)})


def hostile_names() -> bytes:
    names = ["../../etc/passwd", "/absolute", "a\0b", "\ud800", "x" * 5000, "", "\u202e"]
    return container({name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}, b"")


def twice() -> bytes:
    header, data = entries(tensors())
    return container(json.dumps(header)[:-1].encode() + b"," + json.dumps({Q0_A: header[Q0_A]})[1:].encode(), data)


HOSTILE: dict[str, Callable[[], bytes]] = {
    "99 MB header": lambda: container(b'{"' + b" " * 99_000_000 + b'":{}}', b""),
    "99 MB header claimed": lambda: (99_000_000).to_bytes(8, "little") + b'{"',
    "million empty tensors": lambda: empty_tensors(1_000_000),
    "empty tensors within the header": lambda: empty_tensors(14_000),
    "duplicate keys": twice,
    "truncated header": lambda: GOOD[:100],
    "truncated data": lambda: GOOD[:-1],
    "nothing": lambda: b"",
    "hostile names": hostile_names,
    "deep nesting": lambda: container(b'{"a":' + b"[" * 500_000, b""),
    "pickle": lambda: b"\x80\x04cos\nsystem\n(S'true'\ntR.",
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_file_is_refused_and_its_worker_goes_on(name: str, inspector: AdapterInspector) -> None:
    """A hostile file that the reader refuses does not end its worker."""
    await identify(inspector, config_bytes(), GOOD, DESCRIPTION)
    before = inspector.worker_pids

    error = await refusal(inspector, HOSTILE[name]())

    assert (error.param or "").startswith("weights")
    assert error.message.isprintable()
    json.dumps(error.body()).encode()
    assert inspector.worker_pids == before


async def test_a_worker_finds_what_this_process_would(inspector: AdapterInspector) -> None:
    """A worker gives the same digest, rank, targets and error messages as this process."""
    spec, digest = identify_adapter(config_bytes(), GOOD, DESCRIPTION)

    found = await identify(inspector, config_bytes(), GOOD, DESCRIPTION)

    assert (found.digest, found.r, found.rank, found.target_modules) == (digest, spec.r, spec.rank, spec.target_modules)
    wrong = weights_bytes(tensors() | {Q0_B: np.full((32, 4), np.nan, np.float32)})
    with pytest.raises(ValidationFailed) as here:
        identify_adapter(config_bytes(), wrong, DESCRIPTION)
    there = await refusal(inspector, wrong)
    assert there.body() == here.value.body()


async def test_a_worker_killed_in_the_middle_of_a_file_is_replaced(small: AdapterInspector) -> None:
    """If a worker is killed during an upload, another worker finishes that upload."""
    await identify(small, config_bytes(), GOOD, DESCRIPTION)
    (first,) = small.worker_pids
    os.kill(first, signal.SIGSTOP)
    asked = asyncio.create_task(identify(small, config_bytes(), GOOD, DESCRIPTION))
    await asyncio.sleep(0)

    os.kill(first, signal.SIGKILL)

    assert (await asked).rank == 4
    assert small.worker_pids != (first,)


async def test_tenants_have_the_workers_in_turn(small: AdapterInspector) -> None:
    """An upload waits only for the one that is inspected, and not for all that another tenant has sent before."""
    await identify(small, config_bytes(), GOOD, DESCRIPTION)
    (worker,) = small.worker_pids
    ended: list[str] = []

    async def upload(owner: str) -> None:
        await identify(small, config_bytes(), GOOD, DESCRIPTION, owner)
        ended.append(owner)

    os.kill(worker, signal.SIGSTOP)
    uploads = []
    for owner in ("flood", "flood", "flood", "cancelled", "other", "flood"):
        uploads.append(asyncio.create_task(upload(owner)))
        await asyncio.sleep(0)
    uploads[3].cancel()
    await asyncio.gather(uploads[3], return_exceptions=True)
    os.kill(worker, signal.SIGCONT)
    await asyncio.gather(*uploads, return_exceptions=True)

    assert ended == ["flood", "other", "flood", "flood", "flood"]


async def test_a_file_that_ends_every_worker_is_refused(small: AdapterInspector) -> None:
    """A file that ends two workers is refused, and no third worker is tried."""
    await identify(small, config_bytes(), GOOD, DESCRIPTION)
    stop = threading.Event()

    def kill_all() -> None:
        while not stop.is_set():
            for pid in small.worker_pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_all)
    killer.start()
    error = await refusal(small, large())
    stop.set()
    killer.join()

    assert error.code == "inspection_limit_exceeded"
    assert "SIGKILL" in error.message
    assert (await identify(small, config_bytes(), GOOD, DESCRIPTION)).rank == 4


async def test_a_file_that_takes_too_long_is_refused() -> None:
    """A file that takes longer than the deadline is refused; its worker is killed and replaced."""
    inspector = AdapterInspector(InspectionLimits(deadline_s=1.0), num_workers=1)
    await identify(inspector, config_bytes(), GOOD, DESCRIPTION)
    (first,) = inspector.worker_pids
    os.kill(first, signal.SIGSTOP)

    error = await refusal(inspector, GOOD)

    assert (error.code, error.param) == ("inspection_limit_exceeded", "weights")
    assert "1 s" in error.message
    assert not is_alive(first)
    assert (await identify(inspector, config_bytes(), GOOD, DESCRIPTION)).rank == 4
    await inspector.close()


async def test_a_large_file_under_a_tiny_deadline_is_refused() -> None:
    """A large file under a very short deadline is refused."""
    inspector = AdapterInspector(InspectionLimits(deadline_s=0.005), num_workers=1)

    error = await refusal(inspector, large())

    assert error.code == "inspection_limit_exceeded"
    await inspector.close()


async def test_a_file_that_takes_too_much_work_is_refused() -> None:
    """A worker that uses up its processor time is ended before the deadline, and the file is refused."""
    inspector = AdapterInspector(InspectionLimits(cpu_s=0.1), num_workers=1)
    slow = {f"(.?){{60}}(a|b|{i})": 8 for i in range(250)}

    error = await refusal(inspector, GOOD, config_bytes(alpha_pattern=slow))

    assert error.code == "inspection_limit_exceeded"
    assert "0.1 s of work" in error.message
    await inspector.close()


async def test_a_file_that_takes_too_much_memory_is_refused() -> None:
    """A header that needs too much memory once it is read is refused."""
    inspector = AdapterInspector(InspectionLimits(memory_bytes=125_000_000), num_workers=1)
    assert (await identify(inspector, config_bytes(), GOOD, DESCRIPTION)).rank == 4
    (first,) = inspector.worker_pids
    bloated = container(b'{"a":[' + b"[]," * 340_000 + b"0]}", b"")

    error = await refusal(inspector, bloated)

    assert error.code == "inspection_limit_exceeded"
    assert "125000000 bytes of memory" in error.message
    assert first not in inspector.worker_pids
    assert (await identify(inspector, config_bytes(), GOOD, DESCRIPTION)).rank == 4
    await inspector.close()


async def test_an_upload_that_holds_its_worker_harms_no_other() -> None:
    """While one of two workers is blocked, the other worker inspects all uploads and the event loop runs."""
    inspector = AdapterInspector(InspectionLimits(deadline_s=1000.0), num_workers=2)
    files = [weights_bytes(tensors(seed)) for seed in range(19)]
    expected = [identify_adapter(config_bytes(), file, DESCRIPTION)[1] for file in files]
    await asyncio.gather(*(identify(inspector, config_bytes(), GOOD, DESCRIPTION) for _ in range(2)))
    stopped = inspector.worker_pids[0]
    os.kill(stopped, signal.SIGSTOP)

    uploads = [
        asyncio.create_task(identify(inspector, config_bytes(), file, DESCRIPTION))
        for file in [HOSTILE["truncated data"](), *files]
    ]
    while sum(upload.done() for upload in uploads) < 19:
        await asyncio.wait([upload for upload in uploads if not upload.done()], return_when=asyncio.FIRST_COMPLETED)
    held = [upload for upload in uploads if not upload.done()]
    os.kill(stopped, signal.SIGCONT)
    results = await asyncio.gather(*uploads, return_exceptions=True)

    assert len(held) == 1
    assert isinstance(results[0], ValidationFailed)
    assert [one.digest if isinstance(one, IdentifiedAdapter) else one for one in results[1:]] == expected
    await inspector.close()


async def test_this_process_holds_no_copy_of_what_it_sends(inspector: AdapterInspector) -> None:
    """After a hundred uploads this process has no more descriptors and threads than before."""
    await identify(inspector, config_bytes(), GOOD, DESCRIPTION)
    gc.collect()
    before = num_descriptors(), threading.active_count()

    await asyncio.gather(*(identify(inspector, config_bytes(), GOOD, DESCRIPTION) for _ in range(100)))

    assert (num_descriptors(), threading.active_count()) == before


async def test_a_worker_knows_nothing_and_loads_no_torch(inspector: AdapterInspector) -> None:
    """A worker's environment has no secret, and it does not load torch."""
    await identify(inspector, config_bytes(), GOOD, DESCRIPTION)
    (pid,) = inspector.worker_pids

    environment = read_proc(pid, "environ").split(b"\0")

    assert {line.partition(b"=")[0] for line in environment} <= {b"", b"PYTHONPATH", b"OPENBLAS_NUM_THREADS"}
    assert b"torch" not in read_proc(pid, "maps")


async def test_a_worker_ends_with_its_parent(small: AdapterInspector) -> None:
    """Closing the inspector ends its processes, and later uploads are refused."""
    await identify(small, config_bytes(), GOOD, DESCRIPTION)
    pids = small.worker_pids

    await small.close()
    await small.close()

    assert not any(is_alive(pid) for pid in pids)
    with pytest.raises(Unavailable):
        await identify(small, config_bytes(), GOOD, DESCRIPTION)


def start(command: tuple[str, ...]) -> None:
    worker = InspectionProcess(command)
    try:
        worker.prepare()
    finally:
        worker.kill()


@pytest.mark.parametrize("command", [("/nonexistent",), ("false",), ("echo",)])
def test_a_worker_that_cannot_start_is_absent_capacity(command: tuple[str, ...]) -> None:
    """A worker program that is missing, fails or is not a worker gives the error for absent capacity."""
    with pytest.raises(Unavailable) as caught:
        start(command)

    assert caught.value.code == "inspection_unavailable"


async def test_a_gguf_file_is_converted_in_the_worker(inspector: AdapterInspector) -> None:
    """A GGUF file without a configuration becomes PEFT's two files; with one, and anything else, it stays as it is."""
    description, content = replace(DESCRIPTION, head_dim=8), gguf_bytes(converted(tensors()))
    with open_files(b"", content) as files:
        async with inspector.peft_files("ten_a", files, description) as found:
            made = await inspector.identify("ten_a", found, description)
    with open_files(config_bytes(), content) as files:
        async with inspector.peft_files("ten_a", files, description) as unchanged:
            assert unchanged is files

    assert made == await identify(inspector, config_bytes(), GOOD, description)


async def test_a_wrong_gguf_file_is_refused_by_the_worker(inspector: AdapterInspector) -> None:
    """A GGUF file that is cut off is refused, and the worker goes on."""
    with (
        open_files(b"", gguf_bytes(converted(tensors()))[:200]) as files,
        pytest.raises(ValidationFailed, match="truncated"),
    ):
        async with inspector.peft_files("ten_a", files, DESCRIPTION):
            pass

    assert (await identify(inspector, config_bytes(), GOOD, DESCRIPTION)).rank == 4
