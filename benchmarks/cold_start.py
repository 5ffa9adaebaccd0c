"""How soon does an engine serve a model that is not in memory? Seconds from its process's start, beside what the disk allows.

    python benchmarks/cold_start.py [--checkout DIR ...] [--gigabytes 1.0] [--files 4] [--starts 3] [--model DIR] [--json OUT]

Makes a random Llama in bf16 of the given size, in several safetensors files, with the demo's tokenizer, or takes a model's
folder. Before each
start the files are dropped from the page cache. The disk's bandwidth is measured in the same round: all files, read once
by as many threads as there are files, also after a drop. A start is from the spawn of `graftwork engine` to its log line
`engine_start`, after which it listens.

    limit = bytes / bandwidth + 3 s

On a machine with other work, compare the processor time until then: that of all threads, and that of the main thread, which
imports and builds one after the other.

Checkouts take turns within each round, and each round begins with another. The first start of each is not counted: it
compiles, measures, and writes its caches.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from machine import describe_machine
from rich.console import Console
from rich.table import Table
from server_processes import OWN_ROOT, Checkout

_HIDDEN, _INTERMEDIATE, _HEADS, _KV_HEADS = 2048, 5632, 16, 4
_VOCAB = 32_000
_ALLOWED_S = 3.0
_READY_WITHIN_S = 300.0
_POLL_S = 0.01
_BLOCK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Start:
    """One start of an engine."""

    checkout: str
    round_number: int
    seconds: float
    cpu_s: float
    """Processor time of the process until it was ready."""
    main_thread_s: float
    """The part of it that its main thread took."""
    limit_s: float
    bytes_per_s: float
    """The disk's bandwidth in this round."""
    phases: dict[str, float]


def make_model(folder: Path, gigabytes: float, num_files: int) -> None:
    """Writes a random model whose files have about so many bytes together."""
    import torch
    from safetensors.torch import save_file

    kv = _HIDDEN * _KV_HEADS // _HEADS
    shapes = {
        "q_proj": (_HIDDEN, _HIDDEN),
        "k_proj": (kv, _HIDDEN),
        "v_proj": (kv, _HIDDEN),
        "o_proj": (_HIDDEN, _HIDDEN),
    }
    mlp = {
        "gate_proj": (_INTERMEDIATE, _HIDDEN),
        "up_proj": (_INTERMEDIATE, _HIDDEN),
        "down_proj": (_HIDDEN, _INTERMEDIATE),
    }
    layer_bytes = 2 * sum(rows * columns for rows, columns in (*shapes.values(), *mlp.values()))
    num_layers = max(round((gigabytes * 1e9 - 2 * _VOCAB * _HIDDEN) / layer_bytes), 1)
    every: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (_VOCAB, _HIDDEN),
        "model.norm.weight": (_HIDDEN,),
    }
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        every |= {f"{prefix}.self_attn.{name}.weight": shape for name, shape in shapes.items()}
        every |= {f"{prefix}.mlp.{name}.weight": shape for name, shape in mlp.items()}
        every |= {f"{prefix}.{name}.weight": (_HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
    folder.mkdir(parents=True)
    names, generator = [*every], torch.Generator().manual_seed(0)
    weight_map = {name: f"model-{number * num_files // len(names)}.safetensors" for number, name in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        own = [name for name in names if weight_map[name] == file]
        made = {name: torch.empty(every[name]).normal_(0.0, 0.02, generator=generator).bfloat16() for name in own}
        save_file(made, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    demo = OWN_ROOT / "demo" / "model"
    config = json.loads((demo / "config.json").read_text(encoding="utf-8"))
    sizes = {"hidden_size": _HIDDEN, "intermediate_size": _INTERMEDIATE, "num_hidden_layers": num_layers}
    sizes |= {"num_attention_heads": _HEADS, "num_key_value_heads": _KV_HEADS, "head_dim": _HIDDEN // _HEADS}
    config |= sizes | {
        "vocab_size": _VOCAB,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (demo / name).exists():
            shutil.copy(demo / name, folder / name)


def drop(files: Sequence[Path]) -> None:
    """Takes files out of the page cache."""
    os.sync()
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bandwidth(files: Sequence[Path]) -> float:
    """Bytes a second at which all files are read from the disk at once."""

    def read(path: Path) -> int:
        block, total = bytearray(_BLOCK_BYTES), 0
        with path.open("rb", buffering=0) as file:
            while found := file.readinto(block):
                total += found
        return total

    drop(files)
    with ThreadPoolExecutor(len(files)) as threads:
        started = time.perf_counter()
        total = sum(threads.map(read, files))
        return total / (time.perf_counter() - started)


def worked_s(stat: Path) -> float:
    """The processor time of a process or a thread, from its file in /proc."""
    fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start(checkout: Checkout, model: Path, data: Path) -> tuple[float, float, float, dict[str, float]]:
    """Starts an engine and ends it. Returns the seconds until it was ready, the processor time of the process and of its
    main thread until then, and the seconds of its phases.
    """
    log = data / "engine.log"
    log.unlink(missing_ok=True)
    options = ["--model", str(model), "--data-dir", str(data), "--listen", f"unix:{data / 'engine.sock'}"]
    options += ["--device", "cpu", "--device-bytes", str(64 << 20), "--host-kv-bytes", "0"]
    environment = checkout.environment() | {"GRAFTWORK_LOG_FORMAT": "json"}
    with log.open("wb") as file:
        began = time.perf_counter()
        process = subprocess.Popen(checkout.command("engine", *options), env=environment, stdout=file, stderr=file)
    try:
        while time.perf_counter() - began < _READY_WITHIN_S:
            text = log.read_text(errors="replace")
            for line in text.splitlines():
                if '"engine_start"' in line and line.endswith("}"):
                    found = json.loads(line)
                    seconds = time.perf_counter() - began
                    process_folder = Path(f"/proc/{process.pid}")
                    worked = worked_s(process_folder / "stat"), worked_s(process_folder / f"task/{process.pid}/stat")
                    return seconds, *worked, {name: value for name, value in found.items() if name.endswith("_s")}
            if process.poll() is not None:
                break
            time.sleep(_POLL_S)
        raise SystemExit(f"{checkout.name}: the engine did not start:\n{log.read_text(errors='replace')[-3000:]}")
    finally:
        process.terminate()
        process.wait(60)


def measure(checkouts: Sequence[Checkout], model: Path, folder: Path, starts: int) -> list[Start]:
    """Starts engines in turns, with data folders of their own in `folder`."""
    files = sorted(model.glob("*.safetensors"))
    num_bytes = sum(path.stat().st_size for path in files)
    data = {checkout.root: folder / f"data-{number}" for number, checkout in enumerate(checkouts)}
    for checkout in checkouts:
        data[checkout.root].mkdir()
        start(checkout, model, data[checkout.root])
    found = []
    for round_number in range(starts):
        first = round_number % len(checkouts)
        for checkout in [*checkouts[first:], *checkouts[:first]]:
            speed = bandwidth(files)
            drop(files)
            seconds, cpu_s, main_thread_s, phases = start(checkout, model, data[checkout.root])
            limit_s = num_bytes / speed + _ALLOWED_S
            found.append(Start(checkout.name, round_number, seconds, cpu_s, main_thread_s, limit_s, speed, phases))
            print(f"{checkout.name}: {seconds:.2f} s ({cpu_s:.2f} s CPU), limit {limit_s:.2f} s", file=sys.stderr)
    return found


def show(starts: Sequence[Start]) -> None:
    """Medians over the rounds, and the worst ratio to the limit."""
    phases = sorted({name for one in starts for name in one.phases})
    table = Table(
        "checkout",
        "ready",
        "CPU",
        "main thread",
        "limit",
        "worst of limit",
        "disk",
        *(name.removesuffix("_s") for name in phases),
    )
    for name in dict.fromkeys(one.checkout for one in starts):
        own = [one for one in starts if one.checkout == name]
        cells = [f"{statistics.median(one.seconds for one in own):.2f} s"]
        cells += [f"{statistics.median(one.cpu_s for one in own):.2f} s"]
        cells += [f"{statistics.median(one.main_thread_s for one in own):.2f} s"]
        cells += [f"{statistics.median(one.limit_s for one in own):.2f} s"]
        cells += [f"{max(one.seconds / one.limit_s for one in own):.2f}"]
        cells += [f"{statistics.median(one.bytes_per_s for one in own) / 1e9:.2f} GB/s"]
        table.add_row(name, *cells, *(f"{statistics.median(one.phases[phase] for one in own):.2f}" for phase in phases))
    Console(width=180).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, action="append", help="a tree to measure; may be repeated")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of all weights together")
    parser.add_argument("--files", type=int, default=4, help="in which the weights are")
    parser.add_argument("--model", type=Path, help="the folder of a model, in place of a random one")
    parser.add_argument("--starts", type=int, default=3, help="counted starts of each checkout")
    parser.add_argument("--json", type=Path, help="write every start here")
    arguments = parser.parse_args()
    checkouts = [Checkout(root.absolute()) for root in arguments.checkout or [OWN_ROOT]]
    with tempfile.TemporaryDirectory(prefix="graftwork-cold-") as name:
        model = arguments.model or Path(name) / "model"
        if arguments.model is None:
            make_model(model, arguments.gigabytes, arguments.files)
        found = measure(checkouts, model, Path(name), arguments.starts)
    show(found)
    if arguments.json:
        record = {"machine": describe_machine(), "starts_of_each": arguments.starts}
        arguments.json.write_text(json.dumps(record | {"starts": [asdict(one) for one in found]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
