"""What an engine says of itself: its description, fixed at start, and its counters."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """What a gateway must know of the model an engine serves."""

    model_name: str
    fingerprint: str
    """`sha256:…` over the checkpoint; part of every adapter's identity."""
    vocab_size: int
    context_tokens: int
    """Prompt and completion together."""
    eos_token_ids: tuple[int, ...]
    num_layers: int
    hidden_size: int
    biased_targets: tuple[str, ...]
    """LoRA targets that have a bias of their own in the base."""
    target_shapes: dict[str, tuple[int, int]]
    """(out_features, in_features) by LoRA target: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj."""
    max_lora_rank: int
    page_tokens: int
    device_pages: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A reading of the engine's counters and gauges."""

    running_requests: int
    waiting_requests: int
    free_pages: int
    """Never written, or written and given back; holds nothing that anyone can match."""
    cached_pages: int
    """Owned by the prefix tree alone: reclaimed on demand."""
    active_pages: int
    """Owned by at least one running sequence."""
    in_flight_pages: int
    """Read or written by a copy."""
    host_free_pages: int
    host_cached_pages: int
    host_in_flight_pages: int
    disk_pages: int
    disk_bytes: int
    disk_corrupt_files: int
    """Dropped, because a checksum or a length was wrong."""
    disk_foreign_files: int
    """Passed over at start: another model's or layout's, or not ours."""
    disk_failures: int
    """Operations that the file system refused."""
    resident_adapters: tuple[str, ...]
    lora_pool_bytes: int
    running_adapters: tuple[str, ...]
    waiting_adapters: tuple[str, ...]
    steps: int
    prompt_tokens: int
    cached_tokens: int
    host_tokens: int
    """Of the cached tokens, those that came from the host."""
    disk_tokens: int
    preemptions: int
    """Running requests that were offloaded to make room."""
    generated_tokens: int
    adapter_loads: int
    drafted_tokens: int
    """Guessed and verified; `accepted_tokens` of them came true, and `forced_tokens` of these were spelled out."""
    accepted_tokens: int
    forced_tokens: int
    max_adapters_in_a_step: int
    """The most distinct adapters that one forward pass has served."""
