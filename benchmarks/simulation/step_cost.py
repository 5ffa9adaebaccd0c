"""The seconds of one step, and the machine in which a simulated scheduler runs: GPUs by arithmetic, one CPU as measured.

A step reads all weights once, computes its prompt tokens at the rate of the matrix units, and reads the KV of all its
contexts. Source of the form: Sarathi-Serve (Agrawal et al. 2024, arXiv 2403.02310, §3) and the roofline of the device.
The figures of GPUs are arithmetic over published rates, not measurements: H100 SXM 3.35 TB/s of which 85 % are reached, and
400 TFLOP/s in bf16 prefill, as `hardware.py` has them.
"""

from dataclasses import dataclass, replace

from benchmarks.simulation.hardware import Hardware

from graftwork.engine.core.step import StepPlan


@dataclass(frozen=True, slots=True)
class StepCost:
    """The parts of a step's time, all in seconds."""

    floor_s: float
    """Of any step: the weights are read, kernels start, and the host plans."""
    row_s: float
    """Of one decoding row: its part of products, sampling and output."""
    prefill_token_s: float
    """Of one prompt token."""
    attended_s: float
    """Of one prompt token and one token before it."""
    context_token_s: float
    """Of one token of the context of a decoding row: its KV is read."""
    prompt_s: float = 0.0
    """Of each prompt, besides its tokens."""

    def seconds(self, plan: StepPlan) -> float:
        """Returns the seconds of the step `plan`."""
        seconds = self.floor_s
        for piece in plan.slices:
            if piece.num_tokens == 1:
                seconds += self.row_s + self.context_token_s * piece.start
            else:
                attended = piece.num_tokens * (piece.start + piece.num_tokens / 2)
                seconds += self.prompt_s + self.prefill_token_s * piece.num_tokens + self.attended_s * attended
        return seconds


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on a device: the cost of its steps, its memory, and the limits of its scheduler."""

    name: str
    cost: StepCost
    hardware: Hardware
    page_tokens: int = 64
    max_running: int = 64
    max_batch_tokens: int = 2048
    max_waiting: int = 256
    """As the default of the setting of this name."""
    target_itl_s: float | None = None
    """The target of inter-token time, in seconds; None sets no target."""

    @property
    def kv_tokens(self) -> int:
        """The tokens whose KV the device can hold."""
        return int(self.hardware.device_kv_bytes / self.hardware.kv_token_bytes)


_BYTES_PER_S = 0.85 * 3.35e12
_FLOPS_PER_S = 400e12


def machine_of(name: str, parameters: float, layers: int, width: int, kv_heads: int, **limits: int) -> Machine:
    """Returns a bf16 model with heads of 128 numbers on one H100 of 80 GB.

    `width` is the width of all query heads together. `limits` are fields of Machine.
    """
    kv_token_bytes = 2 * layers * kv_heads * 128 * 2
    weights = 2 * parameters
    token_s, attended_s = weights / _FLOPS_PER_S, 4 * layers * width / _FLOPS_PER_S
    hardware = Hardware(
        kv_token_bytes=kv_token_bytes,
        device_kv_bytes=72e9 - weights,
        prefill_token_s=token_s,
        prefill_attended_s=attended_s,
        context_tokens=1_000_000,
    )
    cost = StepCost(weights / _BYTES_PER_S + 2e-3, 20e-6, token_s, attended_s, kv_token_bytes / _BYTES_PER_S)
    return Machine(name, cost, hardware, **limits)


LLAMA_8B = machine_of("Llama 3.1 8B on one H100", 8.0e9, 32, 4096, 8)
"""A floor of 7.6 ms, 40 us a prompt token, 46 ns a token of context, and KV for 427,000 tokens."""
DEVICE_ONLY_8B = replace(
    LLAMA_8B,
    name="Llama 3.1 8B on one H100, without host and disk tiers",
    hardware=replace(LLAMA_8B.hardware, host_kv_bytes=0.0, disk_kv_bytes=0.0),
)
STEADY_8B = replace(LLAMA_8B, target_itl_s=0.05)
"""With the default of the setting `target_itl_ms` on a GPU."""
QWEN_7B = machine_of("Qwen2.5 7B 1M on one H100", 7.6e9, 28, 3584, 4, page_tokens=256)
"""For contexts of agents: KV for 990,000 tokens."""
DEMO_ON_CPU = Machine(
    name="the demo's model on one core of an EPYC",
    cost=StepCost(2.1e-3, 0.31e-3, 42e-6, 1e-9, 0.0, prompt_s=2.2e-3),
    hardware=Hardware(
        kv_token_bytes=4096,
        device_kv_bytes=4096 * 12_000,
        host_kv_bytes=4096 * 60_000,
        prefill_token_s=42e-6,
        prefill_attended_s=1e-9,
        prefill_fixed_s=4.3e-3,
        context_tokens=2048,
    ),
    page_tokens=16,
    max_running=16,
    max_batch_tokens=512,
    target_itl_s=0.012,
)
"""With the settings of `graftwork bench fairness`. Fitted to the medians of its steps on 2026-11-29: 6.8 ms with 15 rows, 11.5
with a prompt of 60 tokens beside them, 14.7 with one of 137, and 6.8 with one of 60 alone.
"""
