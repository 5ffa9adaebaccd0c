"""How much memory a gateway takes for adapters that are uploaded at the same time.

    python benchmarks/upload_memory.py [--checkout DIR ...] [--uploads 3] [--mb 248] [--json OUT]

Starts a real `graftwork gateway` against a scripted engine in another process (`scripted_engine.py`). One tenant sends
some large uploads at once, each with an Idempotency-Key as the SDK does, from a file on disk. The weights are a valid
safetensors file that does not fit the model, so the gateway receives and inspects all of it, and then refuses it.
Memory is the resident memory of the gateway's own process, before the uploads, at its peak, and three seconds after.

    holds if: the growth at the peak is below 64 MB, and after the uploads below 10 %
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

import httpx
import psutil  # type: ignore[import-untyped]
from machine import describe_machine
from rich.console import Console
from rich.table import Table
from server_processes import OWN_ROOT, Checkout, Script, gateway_over_script, make_tenant

_CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "base_model_name_or_path": "x"}
_PIECE = bytes(1 << 20)
_MOST_GROWTH_MB = 64
_REST_S = 3.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of one checkout."""

    checkout: str
    uploads: int
    mb_each: float
    seconds: float
    memory_before_mb: float
    memory_peak_mb: float
    memory_after_mb: float
    statuses: list[int]

    @property
    def holds(self) -> bool:
        flat = self.memory_peak_mb - self.memory_before_mb < _MOST_GROWTH_MB
        return flat and self.memory_after_mb <= 1.1 * self.memory_before_mb


def write_weights(path: Path, num_bytes: int) -> None:
    """Writes a safetensors file with one matrix of zeros."""
    rows = num_bytes // 4096
    header = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": {"dtype": "F32", "shape": [rows, 1024]}}
    next(iter(header.values()))["data_offsets"] = [0, rows * 4096]
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for piece in _zeros(rows * 4096):
            file.write(piece)


def _zeros(num_bytes: int) -> Iterator[bytes]:
    for start in range(0, num_bytes, len(_PIECE)):
        yield _PIECE[: num_bytes - start]


def upload(url: str, key: str, number: int, weights: Path) -> int:
    """Sends one upload and returns the status of its answer."""
    headers = {"authorization": f"Bearer {key}", "idempotency-key": uuid4().hex}
    with weights.open("rb") as file, httpx.Client(trust_env=False, timeout=600, headers=headers) as client:
        files = {"config": ("adapter_config.json", json.dumps(_CONFIG).encode()), "weights": ("w.safetensors", file)}
        return client.post(f"{url}/v1/adapters", data={"name": f"bench-{number}"}, files=files).status_code


def measure(checkout: Checkout, url: str, process_id: int, key: str, weights: Path, num_uploads: int) -> Row:
    process, seen, ends = psutil.Process(process_id), list[float](), threading.Event()

    def memory_mb() -> float:
        return float(process.memory_info().rss) / 1e6

    def watch() -> None:
        while not ends.wait(_POLL_S):
            seen.append(memory_mb())

    upload(url, key, num_uploads, weights.with_name("small"))  # imports and the first inspection worker
    before, started_at = memory_mb(), time.monotonic()
    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(num_uploads) as threads:
        sent = [threads.submit(upload, url, key, number, weights) for number in range(num_uploads)]
        statuses = [one.result() for one in sent]
    seconds = time.monotonic() - started_at
    ends.set()
    watcher.join()
    time.sleep(_REST_S)
    return Row(
        checkout=checkout.name,
        uploads=num_uploads,
        mb_each=weights.stat().st_size / 1e6,
        seconds=seconds,
        memory_before_mb=before,
        memory_peak_mb=max(seen),
        memory_after_mb=memory_mb(),
        statuses=statuses,
    )


def show(rows: list[Row]) -> None:
    table = Table("checkout", "uploads", "MB each", "seconds", "MB before", "MB peak", "MB after", "answers", "holds")
    for row in rows:
        memory = (f"{one:.0f}" for one in (row.memory_before_mb, row.memory_peak_mb, row.memory_after_mb))
        answers = " ".join(map(str, row.statuses))
        cells = (row.checkout, str(row.uploads), f"{row.mb_each:.0f}", f"{row.seconds:.1f}", *memory, answers)
        table.add_row(*cells, "yes" if row.holds else "NO")
    Console(width=120).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, action="append", help="a tree to measure; may be repeated")
    parser.add_argument("--uploads", type=int, default=3, help="at the same time")
    parser.add_argument("--mb", type=int, default=248, help="millions of bytes of each weights file")
    parser.add_argument("--json", type=Path, help="write every row here")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for root in arguments.checkout or [OWN_ROOT]:
        checkout = Checkout(root.absolute())
        with gateway_over_script(checkout, Script(1, 5.0)) as gateway:
            large = gateway.folder / "large"
            write_weights(large, arguments.mb * 1_000_000)
            write_weights(gateway.folder / "small", 1_000_000)
            key = make_tenant(gateway.url, gateway.admin_key)
            rows.append(measure(checkout, gateway.url, gateway.process_id, key, large, arguments.uploads))
    show(rows)
    if arguments.json:
        record = {"machine": describe_machine(), "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(record, indent=1))
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
