"""Tests that all ranks have the keys of KV files with which rank 0 reads and writes, in bounded memory."""

import io
from pathlib import Path
from random import Random

import pytest

from graftwork.engine.core.requests import KvFileKey
from graftwork.engine.kv.disk.keyring import Keyring
from graftwork.engine.parallel import mirrors
from graftwork.engine.parallel.commands import receive
from graftwork.engine.parallel.mirrors import MirroredDisk
from graftwork.engine.parallel.workers import WorkerLink, Workers
from tests.engine.faulty_disk import domain_named, opened

MOST = 8


@pytest.mark.parametrize("seed", range(5))
def test_a_worker_has_the_key_of_each_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Whatever domains have requests, of which few often, a worker that keeps few keys has the right one at each, and
    is not sent one with every request.
    """
    monkeypatch.setattr(mirrors, "MAX_KEYS", MOST)
    pipe = io.BytesIO()
    disk = MirroredDisk(opened(tmp_path), Workers([WorkerLink(pipe, io.BytesIO(), str)]))
    random, worker, read, num_commands, num_requests = Random(seed), Keyring(MOST), 0, 0, 400
    keys = {domain_named(f"tenant-{number}"): KvFileKey(bytes([number]) * 32) for number in range(40)}
    domains = [*keys]

    for _ in range(num_requests):
        often = random.random() < 0.8
        domain = random.choice(domains[:4] if often else domains)
        disk.unlock(domain, keys[domain])
        pipe.seek(read)
        while (command := receive(pipe)) is not None:
            worker.add(bytes.fromhex(command.values["domain"]), KvFileKey(bytes.fromhex(command.values["key"])))
            num_commands += 1
        read = pipe.tell()

        assert worker.seals(domain)
    assert num_commands < num_requests * 0.75
