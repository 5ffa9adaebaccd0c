"""Where the time of one decode step goes: a profile of Graftwork's engine on the CPU yardstick's model.

    python benchmarks/decode_step.py [--cells b32:0,b32:16] [--steps 20] [--lora-kernels auto] [--changing] [--json OUT]

The step is that of the whole engine: plan, forward pass, sampling, absorbing. Its duration is the median of steps that
nothing watches, in processor time of the loop's thread, which other programs on a busy machine disturb less. The shares
come from steps under torch.profiler, in wall time, and it slows the short operations most: shares are for finding what
to mend, not for claims. "python" is what is left of a step beside the operations.

A cell named several times is measured as often, in that order: on a busy machine, let those that are to be compared
take turns. `--changing` has one request leave and one of a random adapter join with every step.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from cells import PROMPT_TOKENS, Cell
from floors import Floor, decode_floor, measure_rates
from our_engine import YardstickArtifacts, greedy_request, open_engine
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function
from yardstick_model import YardstickModel, ensure_model

from graftwork.engine.attention.torch_attention import TorchStepAttention
from graftwork.engine.build.engine import Engine
from graftwork.engine.core.events import RequestOutput
from graftwork.engine.lora.torch_backend import LoraBatch
from graftwork.engine.messages import SubmitRequest
from graftwork.engine.runner.input_batch import BatchBuilder
from graftwork.engine.runner.row_ops import TorchStepRows

_STEP = "engine step"
PARTS: dict[str, tuple[type, str]] = {
    "attention": (TorchStepAttention, "attend"),
    "rotary and KV": (TorchStepRows, "rotate_and_store"),
    "LoRA deltas": (LoraBatch, "add_deltas"),
    "batch tensors": (BatchBuilder, "build"),
}
"""Methods that get a label in the profile; everything else counts as `rest`."""
_CONTEXT_STEPS = 32
"""Steps before anything is measured: the context is then 64 + 32 tokens."""


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Milliseconds of one step; the parts and operations add up to the step as the profiler saw it."""

    cell: str
    step_ms: float
    floor_bytes_ms: float
    floor_flops_ms: float
    profiled_step_ms: float
    part_ms: dict[str, float]
    operation_ms: dict[str, float]
    operation_calls: dict[str, float]

    @property
    def python_ms(self) -> float:
        return self.profiled_step_ms - sum(self.operation_ms.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="b32:0,b32:16", help="comma-separated b<rows>:<distinct adapters>")
    parser.add_argument("--steps", type=int, default=20, help="steps of each kind, watched and unwatched")
    parser.add_argument("--lora-kernels", default="auto", help="how adapters are applied: auto, native, torch")
    parser.add_argument("--changing", action="store_true", help="one request leaves and one joins with every step")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "graftwork-bench")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    model = ensure_model(options.cache)
    profiles = [
        profile_cell(Scene(model, Cell.parse(text), options.lora_kernels, options.changing), options.steps)
        for text in options.cells.split(",")
    ]
    for one in profiles:
        show(one)
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in profiles], indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class Scene:
    """What is measured: a cell, the way its adapters are applied, and whether its requests change."""

    model: YardstickModel
    cell: Cell
    lora_kernels: str
    is_changing: bool


def profile_cell(scene: Scene, num_steps: int) -> StepProfile:
    artifacts = YardstickArtifacts(scene.model.adapters, scene.model.folder / "artifacts")
    engine = open_engine(scene.model.base, artifacts, lora_kernels=scene.lora_kernels)
    num_steps_in_all = _CONTEXT_STEPS + 2 * num_steps + 2
    if scene.is_changing:
        step = start_changing(engine, scene.cell, artifacts.digests)
    else:
        start_decoding(engine, scene.cell, artifacts.digests, num_steps_in_all)
        step = engine.loop.step
    for _ in range(_CONTEXT_STEPS):
        step()
    durations = [timed(step) for _ in range(num_steps)]
    with labelled(), profile(activities=[ProfilerActivity.CPU]) as watched:
        for _ in range(num_steps):
            with record_function(_STEP):
                step()
    step()
    floor = decode_floor(scene.cell, 2 * (_CONTEXT_STEPS + num_steps // 2), measure_rates())
    return read_profile(str(scene.cell), watched, statistics.median(durations) * 1e3, floor, num_steps)


def start_changing(engine: Engine, cell: Cell, digests: list[str]) -> Callable[[], None]:
    """Fill a cell with requests that end one after another; returns a step with which the next one joins.

    All have one prompt whose pages are cached, but for its last token: who joins decodes at once.
    """
    prompt = list(range(1, PROMPT_TOKENS + 2))
    random = Random(str(cell))
    choices: list[str | None] = [*digests[: cell.adapters]] or [None]

    def submit(adapter: str | None, output_tokens: int) -> None:
        engine.loop.take(SubmitRequest(greedy_request(prompt, adapter, output_tokens, b"shared"), lambda outputs: None))

    def step() -> None:
        submit(random.choice(choices), cell.batch)
        engine.loop.step()

    for digest in digests[: cell.adapters]:
        await_adapter(engine, digest)
    for row, adapter in enumerate(cell.adapter_of_row):
        submit(None if adapter is None else digests[adapter], row + 2)
    while engine.loop.stats().waiting_requests:
        engine.loop.step()
    for _ in range(cell.batch):
        step()
    return step


def start_decoding(engine: Engine, cell: Cell, digests: list[str], output_tokens: int) -> None:
    """Submit a cell's requests and step until every one has its first token."""
    for digest in digests[: cell.adapters]:
        await_adapter(engine, digest)
    begun: set[str] = set()
    for prompt, adapter in zip(cell.prompts(0), cell.adapter_of_row, strict=True):
        own = None if adapter is None else digests[adapter]
        request = greedy_request(prompt, own, output_tokens, b"profile")
        engine.loop.take(SubmitRequest(request, lambda outputs: begun.update(one.request_id for one in outputs)))
    while len(begun) < cell.batch or engine.loop.stats().waiting_requests:
        if not engine.loop.step():
            engine.loop.take(engine.loop.inbox.get(timeout=60))


def await_adapter(engine: Engine, digest: str) -> None:
    """Run one token with an adapter, so that it is resident when the cell begins."""
    ended: list[RequestOutput] = []
    request = greedy_request([1], digest, 1, b"warm")
    engine.loop.take(SubmitRequest(request, lambda outputs: ended.extend(one for one in outputs if one.is_last)))
    while not ended:
        if not engine.loop.step():
            engine.loop.take(engine.loop.inbox.get(timeout=60))


def timed(call: Callable[[], object]) -> float:
    """Processor seconds of this thread."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


@contextmanager
def labelled() -> Iterator[None]:
    """Give the methods of PARTS their labels for as long as this lasts."""
    originals = {label: getattr(owner, name) for label, (owner, name) in PARTS.items()}
    for label, (owner, name) in PARTS.items():
        setattr(owner, name, _with_label(label, originals[label]))
    try:
        yield
    finally:
        for label, (owner, name) in PARTS.items():
            setattr(owner, name, originals[label])


def _with_label(label: str, method: Callable[..., object]) -> Callable[..., object]:
    def call(*arguments: object, **options: object) -> object:
        with record_function(label):
            return method(*arguments, **options)

    return call


def read_profile(cell: str, watched: profile, step_ms: float, floor: Floor, num_steps: int) -> StepProfile:
    """Self time of each operation, and the whole time of each label."""
    events = watched.key_averages()
    per_step = 1e-3 / num_steps  # from microseconds over all steps
    labels = {event.key: event.cpu_time_total * per_step for event in events if event.key in {_STEP, *PARTS}}
    operations = [event for event in events if event.key not in labels]
    return StepProfile(
        cell=cell,
        step_ms=step_ms,
        floor_bytes_ms=floor.bytes_s * 1e3,
        floor_flops_ms=floor.flops_s * 1e3,
        profiled_step_ms=labels.pop(_STEP),
        part_ms=labels,
        operation_ms={event.key: event.self_cpu_time_total * per_step for event in operations},
        operation_calls={event.key: event.count / num_steps for event in operations},
    )


FAMILIES: dict[str, tuple[str, ...]] = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn"),
    "attention kernel": ("aten::_scaled_dot_product", "aten::_softmax", "aten::scaled_dot_product"),
    "gathers and KV writes": ("aten::index", "aten::_index", "aten::gather", "aten::scatter"),
    "copies and casts": ("aten::copy_", "aten::_to_copy", "aten::cat", "aten::clone", "aten::contiguous"),
}


def family_ms(one: StepProfile) -> dict[str, float]:
    """Self time by family of operations, what is in none, and Python."""
    total: defaultdict[str, float] = defaultdict(float)
    for name, milliseconds in one.operation_ms.items():
        family = next((label for label, starts in FAMILIES.items() if name.startswith(starts)), "other operations")
        total[family] += milliseconds
    total["python"] += one.python_ms
    return total


def show(one: StepProfile) -> None:
    console = Console(width=max(Console().width, 110))
    console.print(
        f"\n[bold]{one.cell}[/bold]: {one.step_ms:.2f} ms a step, {one.profiled_step_ms:.2f} ms when watched; floors: "
        f"{one.floor_bytes_ms:.2f} ms to read, {one.floor_flops_ms:.2f} ms to multiply",
        highlight=False,
    )
    table = Table("share of a watched step", "ms", "%", "calls", box=None)
    whole = one.profiled_step_ms

    def add(name: str, milliseconds: float, calls: str = "") -> None:
        table.add_row(name, f"{milliseconds:.2f}", f"{milliseconds / whole:.1%}", calls)

    for label, milliseconds in one.part_ms.items():
        add(f"[bold]{label}[/bold]", milliseconds)
    add("[bold]rest[/bold]", whole - sum(one.part_ms.values()))
    table.add_section()
    for family, milliseconds in sorted(family_ms(one).items(), key=lambda item: -item[1]):
        add(f"[bold]{family}[/bold]", milliseconds)
    table.add_section()
    for name, milliseconds in sorted(one.operation_ms.items(), key=lambda item: -item[1])[:16]:
        add(name, milliseconds, f"{one.operation_calls[name]:.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
