"""Defines the settings of the engine.

Owns each setting's default, unit and range. Never reads an environment variable or a file: api/cli does.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

KernelPart = Literal["lora", "rows", "attention", "experts", "sampler", "weights"]
"""A part of the engine that kernels may compute."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of one engine process, which runs one model on one device."""

    model: Path
    """A Hugging Face folder: config.json and safetensors."""
    model_name: str = ""
    """The name of the base model for clients; empty takes the folder's name."""
    device: str = "auto"
    """The device that runs the model: `auto` (CUDA if available), `cpu`, or `cuda:N`."""
    tensor_parallel: int = 1
    """The number of devices of this machine that compute one model together, 1 to 8: `cuda:0`, `cuda:1`, …, or that many
    processes on the CPU. `device_bytes` is for each device; `host_kv_bytes` and `disk_kv_bytes` are for all together.
    """
    dtype: str = "auto"
    """The dtype of weights and, without `kv_dtype`, of KV: `float32`, `bfloat16`, `float16` or `auto`.

    `auto` is the model's dtype, or float32 on CPUs without bf16.
    """
    kv_dtype: str = "auto"
    """How keys and values are stored on all tiers: `int8` or `fp8` (a byte for each, and a scale for each head of a
    token), or `auto`: the dtype of the weights.
    """
    window_groups: bool = True
    """Whether layers with a sliding window keep only the pages that queries can still see. False is for measurements: all
    layers keep the whole context. With `tensor_parallel` above 1, all layers do.
    """
    quantization: str | None = None
    """To what the weights of linear layers are rounded when they are loaded: `int8` (a scale for each output), `int4` (a
    scale for each output and 128 input features), or None to serve them as the checkpoint holds them.
    """
    activation_dtype: str = "auto"
    """In what layers with weights of float8_e4m3fn multiply: `fp8` rounds each row of their input to float8_e4m3fn too, with
    a scale of its own (W8A8), on GPUs of compute capability 8.9 and later; `auto` is the model's dtype. Answers differ.
    """
    threads: int = 1
    """CPU threads of the forward pass. With more threads than idle cores, a step can be a hundred times slower."""
    page_tokens: int | None = None
    """The number of tokens in a KV page. Small pages waste less memory. Large pages are read faster.

    None means 16. For a model with recurrent layers, whose pages hold a state each, it means a number for which the state is
    no larger than keys and values, but at most 512.
    """
    device_bytes: int | None = None
    """Bytes of KV and adapters together on the device; at least one full context and the smallest adapter.

    None means 768 MiB on a CPU. On CUDA it means what `memory_share` leaves beside the weights.
    """
    memory_share: float = 0.9
    """The fraction of the memory, above 0 and at most 1, that the engine takes of what is free on a CUDA device beside
    the weights. Steps, KV and adapters share it. The rest is for CUDA graphs and for fragments.
    """
    max_context_tokens: int | None = None
    """The longest context that is served, in tokens; None means the longest that the model allows."""
    host_kv_bytes: int = 1024 * 2**20
    """Bytes of KV in host memory, for idle sessions; 0 turns this tier off."""
    disk_kv_bytes: int = 0
    """Bytes of KV in `kv_folder`, which survive a restart; 0 turns this tier off."""
    kv_folder: Path | None = None
    """The folder of KV files, of this engine alone; required if `disk_kv_bytes` is not 0 and `shared_kv_folder` is None."""
    shared_kv_folder: Path | None = None
    """A folder of KV files that engines share, in place of `kv_folder`: each keeps `disk_kv_bytes` there and reads what
    the others of the same model, dtype and page size have written. None shares nothing.
    """
    kv_object_url: str | None = None
    """A bucket to which the files of `kv_folder` are copied, and in which engines of the same model, dtype and page size
    read what the others have written. None shares nothing.
    """
    kv_object_bytes: int = 0
    """What all engines together keep in the bucket."""
    overlap_loads: bool | None = None
    """Whether a step starts while its KV is still loaded from the host, layer by layer. Steps by CUDA graphs cannot: all
    rows of such a step would wait for the whole load. None means on CUDA without graphs.
    """
    overlap_steps: bool | None = None
    """Whether the host plans the next step while the device computes this one. None means on CUDA only. Answers do not
    change. On a CPU the host is the device, so there is nothing to gain.
    """
    kv_reserve_share: float = 0.5
    """The fraction of each tier, 0 to 1, that is reserved for isolation domains. The domains that have pages on the
    tier share it equally.
    """
    lora_floor_share: float = 0.125
    """The fraction of the device memory, 0 to 1, that is reserved for adapters.

    KV always keeps room for one full context. If the device is too small for both reservations, `kv_reserve_share` is
    reduced.
    """
    lora_pool_bytes: int | None = None
    """The most bytes of adapter weights on the device; None sets no limit besides the device."""
    lora_host_bytes: int = 1024 * 2**20
    """Bytes of host memory for adapter weights. Adapters are copied to the device from there."""
    max_lora_rank: int = 128
    kernels: str = "auto"
    """What computes attention, row operations, adapters, sampling and, on CUDA, quantised weights: `auto`, `triton` (CUDA),
    `torch`, or `native`, the CPU's own kernel for adapters.

    `auto` takes the kernels of the device, for each part if they work there, else `torch`. The others insist.
    """
    lora_kernels: str | None = None
    """`kernels` for adapters alone; None means the same as for the rest."""
    row_kernels: str | None = None
    """`kernels` for norms, the rotary embedding, the write of KV and activations alone: `auto`, `triton` or `torch`."""
    attention_backend: str | None = None
    """`kernels` for attention alone: `auto`, `triton` or `torch`."""
    expert_kernels: str | None = None
    """`kernels` for the experts of routed layers alone: `auto`, `triton` or `torch`."""
    weight_kernels: str | None = None
    """`kernels` for quantised weights on a GPU alone: `auto`, `triton` or `torch`."""
    cuda_graphs: str = "auto"
    """Whether steps are CUDA graphs, each launched at once: `auto` (on CUDA, if all kernels work), `windows` (those with
    rolling windows too), or `off`.

    Answers do not depend on it. Capturing the graphs takes some time at the start, and memory.
    """
    max_batch_tokens: int | None = None
    """The most tokens of one step, over all requests. Large steps prefill faster; small ones delay decoding less.

    None means 512 on a CPU and 2048 on CUDA.
    """
    max_running: int | None = None
    """The most requests in one batch; at most `max_batch_tokens`. Isolation domains that wait get their fair number of
    these places. None means 64 on a CPU and 256 on CUDA.
    """
    target_itl_ms: float | None = None
    """The longest step with decoding requests, in milliseconds: their inter-token latency. Beside them, a step computes
    only as many prompt tokens as it allows by measured step times. 0 sets no limit. None means 200 on a CPU and 50 on
    CUDA.
    """
    max_waiting: int = 256
    """The most requests in the queue. A further request displaces a request of the isolation domain with the most
    waiting requests, or is refused itself.
    """
    max_waiting_tokens: int = 2**20
    """The most prompt tokens in the queue."""
    waiting_share: float = 0.75
    """The fraction of the queue, 0 to 1, in requests and in tokens, that one isolation domain may fill."""
    scheduling_policy: str = "dlpm"
    """How waiting requests are ordered: `dlpm` (fair between tenants, with cached prefixes first within a bound), `vtc`
    (strict turns between tenants) or `fcfs` (first come, first served: unfair, for comparison).
    """
    fairness_quantum: int | None = None
    """The most by which `dlpm` lets two tenants of weight 1 differ for the sake of cached prefixes, in prompt tokens.

    None means the prompt tokens of four steps. 0 means strict turns.
    """
    kv_price: float = 0.25
    """What holding all KV pages of the device for a second costs a tenant, as a fraction of the prompt tokens that the
    device computes in a second; 0 charges no memory.
    """
    public_grammars: Path | None = None
    """A folder of JSON schemas (`.json`) whose compiled grammars all isolation domains share; None if there are none.
    """
    max_draft_tokens: int = 16
    """The most draft tokens of one request in one step; 0 turns drafting off. Drafting does not change answers."""
    calibration_folder: Path | None = None
    """The folder of what engines have measured at their start. None means that each start measures."""
    renew_calibration: bool = False
    """Whether to measure again, and to replace what is in `calibration_folder`."""
    draft_cache_bytes: int = 32 * 2**20
    """Bytes of earlier answers from which drafts are taken, over all isolation domains. A domain never drafts from
    another domain's answers.
    """

    draft_from_texts: bool = True
    """Whether drafts come from prompts, earlier answers and predictions too. False is for measurements."""
    draft_model: Path | None = None
    """The folder of a small model with the vocabulary of `model`, which drafts where that is measured to pay; None for
    drafts from text alone. It runs on the same device.
    """
    draft_head: Path | None = None
    """The folder of an EAGLE-3 head of `model`, which drafts from its hidden states in the place of a draft model."""
    draft_kv_bytes: int = 256 * 2**20
    """Bytes of the draft model's KV on the device, for running requests, beside `device_bytes`. With a draft head: of its KV
    and of the features that it keeps.
    """

    def kernels_for(self, part: KernelPart) -> str:
        """Returns what computes one part of the engine. Only adapters have a native kernel; torch computes the rest."""
        named = {"lora": self.lora_kernels, "rows": self.row_kernels, "attention": self.attention_backend}
        own = {**named, "experts": self.expert_kernels, "weights": self.weight_kernels}.get(part)
        if own is not None:
            return own
        return "torch" if self.kernels == "native" and part != "lora" else self.kernels
