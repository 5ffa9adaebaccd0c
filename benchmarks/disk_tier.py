"""How fast KV pages go to disk and come back, plainly and encrypted, by the size of a page.

    python -m benchmarks.disk_tier [--folder DIR] [--megabytes 256] [--json OUT]

For pages of 64 KiB, 256 KiB and 1 MiB: runs of 16 MiB written and brought to the disk, then read back and verified, one
page at a time and a run at a time; then the same with a key, so that the files are encrypted. The floors are the
checksum alone, and plain writing and reading of the same bytes, in turns. Reads come from the page cache where it is
large enough. The median of the rounds is printed, with the spread.
"""

import argparse
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.machine import describe_machine

from graftwork.engine.core.prefix_keys import PageKey, child_key, root_key
from graftwork.engine.core.requests import KvFileKey
from graftwork.engine.kv.disk.file_format import page_checksum
from graftwork.engine.kv.disk.store import DiskStore

PAGE_SIZES = (64 * 2**10, 256 * 2**10, 2**20)
RUN_BYTES = 16 * 2**20
ROUNDS = 5
DOMAIN = hashlib.sha256(b"domain").digest()

Runs = list[tuple[list[PageKey], list[memoryview]]]


def make_runs(page_bytes: int, num_bytes: int) -> Runs:
    """Runs of random pages, each with a chain of its own."""
    content = memoryview(os.urandom(num_bytes))
    runs = []
    for start in range(0, num_bytes, RUN_BYTES):
        pages = [content[at : at + page_bytes] for at in range(start, start + RUN_BYTES, page_bytes)]
        keys = [root_key(start.to_bytes(8, "big"))]
        for number in range(len(pages)):
            keys.append(child_key(keys[-1], [number]))
        runs.append((keys[1:], pages))
    return runs


def measure_round(folder: Path, runs: Runs, page_bytes: int) -> dict[str, float]:
    """Seconds of everything that is compared, once."""
    tier = opened(folder / "kv")
    sealed = opened(folder / "sealed")
    sealed.unlock(DOMAIN, KvFileKey(os.urandom(32)))
    space = memoryview(bytearray(RUN_BYTES))
    plain = folder / "plain"
    seconds = {
        "checksum": timed(lambda: [page_checksum(page) for _, pages in runs for page in pages]),
        "plain write": timed(lambda: write_plainly(plain, runs)),
        "write": timed(lambda: [tier.write(DOMAIN, keys, pages) for keys, pages in runs]),
        "plain read": timed(lambda: read_plainly(plain, space)),
        "read runs": timed(lambda: [tier.read_pages(keys, space) for keys, _ in runs]),
        "read pages": timed(lambda: [tier.read(key, space[:page_bytes]) for keys, _ in runs for key in keys]),
        "encrypted write": timed(lambda: [sealed.write(DOMAIN, keys, pages) for keys, pages in runs]),
        "encrypted read runs": timed(lambda: [sealed.read_pages(keys, space) for keys, _ in runs]),
        "encrypted read pages": timed(
            lambda: [sealed.read(key, space[:page_bytes]) for keys, _ in runs for key in keys]
        ),
    }
    for store in (tier, sealed):
        check(store, runs, space)
        store.close()
    return seconds


def opened(folder: Path) -> DiskStore:
    store = DiskStore(folder, 2**50, bytes(32))
    store.open()
    return store


def check(tier: DiskStore, runs: Runs, space: memoryview) -> None:
    """What was timed was right."""
    for keys, pages in runs:
        assert tier.read_pages(keys, space) == len(keys)
        assert space == b"".join(pages)


def timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def write_plainly(path: Path, runs: Runs) -> None:
    """The same bytes into one file, brought to the disk once a run."""
    with path.open("wb", buffering=0) as file:
        for _, pages in runs:
            for page in pages:
                file.write(page)
            os.fsync(file.fileno())


def read_plainly(path: Path, space: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        while file.readinto(space):
            pass


def report(page_bytes: int, num_bytes: int, rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Prints one line for each thing measured; returns the figures."""
    print(f"pages of {page_bytes // 2**10} KiB")
    figures = {}
    for name in rounds[0]:
        rates = sorted(num_bytes / round_[name] / 1e9 for round_ in rounds)
        median = statistics.median(rates)
        page_us = page_bytes / median / 1e3
        print(f"  {name:<20} {median:>6.2f} GB/s ({rates[0]:.2f} to {rates[-1]:.2f}) {page_us:>8.0f} us a page")
        figures[name] = {"gb_per_s": rates, "us_per_page": page_us}
    return {"page_bytes": page_bytes, "figures": figures}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; else where temporary files go")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    num_bytes = max(options.megabytes * 2**20 // RUN_BYTES, 1) * RUN_BYTES
    results = []
    for page_bytes in PAGE_SIZES:
        runs = make_runs(page_bytes, num_bytes)
        rounds = []
        for _ in range(ROUNDS):
            with TemporaryDirectory(dir=options.folder) as folder:
                rounds.append(measure_round(Path(folder), runs, page_bytes))
        results.append(report(page_bytes, num_bytes, rounds))
    if options.json:
        options.json.write_text(json.dumps({"machine": describe_machine(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
