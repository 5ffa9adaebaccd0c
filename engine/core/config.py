"""The engine's settings, each with its unit and what goes wrong outside its range."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one engine process runs one model on one device."""

    model: Path
    """A Hugging Face folder: config.json and safetensors."""
    model_name: str = ""
    """What clients call the base model; empty takes the folder's name."""
    device: str = "auto"
    """`auto` (CUDA where there is one), `cpu`, or `cuda:N`."""
    dtype: str = "auto"
    """Of weights and KV: `auto` (the checkpoint's; float32 on CPUs without bf16), `float32`, `bfloat16`, `float16`."""
    threads: int = 1
    """CPU threads of the forward pass. Above the number of idle cores a step can become a hundred times slower."""
    page_tokens: int = 16
    """Tokens of one KV page: small wastes less on tails, large gathers faster."""
    device_bytes: int = 768 * 2**20
    """Bytes of KV and adapters together on the device; at least one full context."""
    host_kv_bytes: int = 1024 * 2**20
    """Bytes of KV in host memory, where idle sessions wait; 0 keeps none there."""
    disk_kv_bytes: int = 0
    """Bytes of KV in `kv_folder`, which outlive the process; 0 keeps none there."""
    kv_folder: Path | None = None
    """Where KV files lie; needed where `disk_kv_bytes` is not 0."""
    overlap_loads: bool | None = None
    """Whether a step begins while its KV comes up from the host, and waits layer by layer; None: on CUDA."""
    kv_reserve_share: float = 0.5
    """Of each tier, from 0 to 1: parted among the tenants present, whom others cannot push below it."""
    lora_floor_share: float = 0.125
    """Of the device, from 0 to 1: KV pushes adapters no further. Adapters leave KV one context and its reserve."""
    lora_pool_bytes: int | None = None
    """Bytes of adapter weights on the device, at most; None is whatever is left to them."""
    lora_host_bytes: int = 1024 * 2**20
    """Bytes of adapter weights kept in host memory, ready to be copied to the device."""
    max_lora_rank: int = 128
    lora_kernels: str = "auto"
    """How adapters are applied: `auto` (the kernels of the device, if they work there), `native` (the CPU's),
    `triton` (CUDA's), or `torch`."""
    max_batch_tokens: int = 512
    """Tokens of one step over all requests: large prefills faster, small disturbs decodes less."""
    max_running: int = 64
    """Requests in one batch; at most `max_batch_tokens`."""
    max_waiting: int = 256
    """Requests in the queue; one more is refused with the seconds to wait."""
    max_draft_tokens: int = 16
    """Tokens guessed for one request in one step, at most; 0 makes one token a step. No answer depends on it."""
    draft_cache_bytes: int = 32 * 2**20
    """Bytes of earlier answers to guess from, over all tenants and adapters, none of which sees another's."""
