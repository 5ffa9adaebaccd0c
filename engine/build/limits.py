"""Says how large the steps and requests of an engine may be, and which requests it refuses, by its configuration, model and
device.
"""

import torch

from graftwork.engine.core.config import EngineConfig
from graftwork.engine.kv.index.kv_budget import OBSERVED_QUERIES
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.scheduler.validation import SchedulerLimits

_BATCH_LIMITS = {"cpu": (512, 64), "cuda": (2048, 256)}
"""By type of device: the most tokens of one step, and the most requests in it.

On a GPU a step of 2,048 tokens is long enough to be bound by arithmetic. It holds up 256 decoding requests for about
the time of three or four decoding steps.
"""


_TARGET_ITL_MS = {"cpu": 200.0, "cuda": 50.0}
"""By type of device: the longest step with decoding requests, in milliseconds.

MLPerf Inference asks of Llama 2 70B at most 200 ms a token as a server, and 40 ms as an interactive one. 200 ms are 5
tokens a second, about the pace of reading; a CPU's steps are too long for less. A larger target gives prompts more of
each step.
"""


_STEPS_OF_PAGES = 3
"""If steps overlap, a request holds the pages of three: those that the step before last has made useless, which are kept
until the last one lands, and those of two steps that come.
"""


def batch_limits(config: EngineConfig, device: torch.device) -> tuple[int, int]:
    """Returns the most tokens of one step, and the most requests in it. A request has at least one token in a step.

    If the configuration names none, the device decides.
    """
    tokens, running = _BATCH_LIMITS[device.type]
    max_batch_tokens = config.max_batch_tokens or tokens
    return max_batch_tokens, min(config.max_running or running, max_batch_tokens)


def step_tokens_of(config: EngineConfig, device: torch.device) -> int:
    """Returns the most tokens of one request that the steps in flight compute together."""
    overlaps = device.type == "cuda" if config.overlap_steps is None else config.overlap_steps
    return batch_limits(config, device)[0] * (_STEPS_OF_PAGES if overlaps else 1)


def scheduler_limits(config: EngineConfig, model: ModelConfig, device: torch.device) -> SchedulerLimits:
    """Returns the limits of requests and of steps."""
    max_batch_tokens, max_running = batch_limits(config, device)
    target_itl_ms = _TARGET_ITL_MS[device.type] if config.target_itl_ms is None else config.target_itl_ms
    return SchedulerLimits(
        page_tokens=page_tokens_of(config, model),
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        max_waiting=config.max_waiting,
        max_waiting_tokens=config.max_waiting_tokens,
        waiting_share=config.waiting_share,
        context_tokens=model.context_tokens,
        vocab_size=model.vocab_size,
        eos_token_ids=frozenset(model.eos_token_ids),
        target_itl_s=target_itl_ms / 1000 or None,
        drafts_fill_pages=model.recurrence is None,
        why_no_windows=_why_no_windows(model),
        most_rolling=_most_rolling(config, model, device),
        why_no_budgets=_why_no_budgets(config, model, device),
    )


def _why_no_budgets(config: EngineConfig, model: ModelConfig, device: torch.device) -> str | None:
    """Returns why requests with a budget of KV are not served; None if they are."""
    if model.recurrence is not None:
        return "the model has recurrent layers, whose state cannot forget"
    if any(window is not None for window in model.windows):
        return "the model has layers with a window, which would count kept tokens as its last ones"
    if model.query_layers:
        return "the model has layers that read the keys of others, and each layer keeps its own choice of a prompt"
    if config.tensor_parallel > 1:
        return "the engine divides the model with --tensor-parallel"
    max_batch_tokens, max_running = batch_limits(config, device)
    if max_batch_tokens < max_running + OBSERVED_QUERIES:
        return (
            f"a step of {max_batch_tokens} tokens (--max-batch-tokens) has no room for {OBSERVED_QUERIES} beside "
            f"{max_running} decoding requests (--max-running)"
        )
    return None


def _most_rolling(config: EngineConfig, model: ModelConfig, device: torch.device) -> int:
    """Returns the most tokens that a rolling window may see for which texts may be longer than the context; 0 for none.

    Such a request must have room in the pages of one context. What it sees may begin and end within pages, and two more are
    kept.
    """
    own = max((window for window in model.windows if window is not None), default=0)
    step_tokens, page_tokens = step_tokens_of(config, device), page_tokens_of(config, model)
    return max(model.context_tokens - own - step_tokens - 8 * page_tokens, 0)


def _why_no_windows(model: ModelConfig) -> str | None:
    """Returns why requests with a rolling window are not served; None if they are."""
    if model.recurrence is not None:
        return "the model has recurrent layers, whose state cannot forget"
    return None


def page_tokens_of(config: EngineConfig, model: ModelConfig) -> int:
    """Returns the number of tokens in a KV page: the configured one, or the model's own."""
    return config.page_tokens or model.page_tokens
