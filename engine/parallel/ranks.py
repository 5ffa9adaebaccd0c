"""Defines how tensor parallelism divides a model between the ranks of an engine.

A rank is one process with one device. Each layer is divided as in Megatron-LM: the projections qkv and gate_up by their
outputs (column parallel), o and down by their inputs (row parallel). So a rank has whole attention heads with their part
of the KV cache, and a sum over all ranks is needed only after o and after down. Embeddings and norms are whole on each
rank, and the output head is on rank 0 alone, which samples.

If there are more ranks than KV heads, several ranks have the same KV head.

Source: Shoeybi et al., "Megatron-LM" (2019), section 3, arXiv 1909.08053.
"""

from dataclasses import dataclass, replace

from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.weight_reader import Part
from graftwork.platform.errors import InvalidRequest

MAX_RANKS = 8
ROW_PARALLEL = ("o_proj", "down_proj")
"""The projections that are divided by their inputs. The others are divided by their outputs."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of a tensor-parallel engine: `number` counts from 0 to `size` - 1."""

    number: int
    size: int

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which schedules and samples."""
        return self.number == 0


def check_divisible(model: ModelConfig, num_ranks: int) -> None:
    """Raises InvalidRequest if a model cannot be divided between `num_ranks` ranks."""
    if not 1 <= num_ranks <= MAX_RANKS:
        raise _refused(f"{num_ranks} is not served: give 1 to {MAX_RANKS}.")
    if num_ranks > 1 and model.experts is not None:
        raise _refused("models with experts are served by one device: give 1, or start several engines.")
    if num_ranks > 1 and model.recurrence is not None:
        raise _refused("models with recurrent layers are served by one device: give 1, or start several engines.")
    if num_ranks > 1 and model.streams is not None:
        raise _refused(
            "models with several residual streams are served by one device: give 1, or start several engines."
        )
    few, many = sorted((model.num_kv_heads, num_ranks))
    counts = {
        f"{model.num_heads} attention heads": model.num_heads % num_ranks == 0,
        f"{model.num_kv_heads} KV heads": many % few == 0,
        f"{model.intermediate_size} features of the MLP": model.intermediate_size % num_ranks == 0,
    }
    failing = [count for count, fits in counts.items() if not fits]
    if failing:
        fitting = [str(size) for size in range(1, MAX_RANKS + 1) if _fits(model, size)]
        raise _refused(
            f"the model's {' and '.join(failing)} cannot be divided between {num_ranks} devices. "
            f"Give one of {', '.join(fitting)}."
        )


def _fits(model: ModelConfig, num_ranks: int) -> bool:
    few, many = sorted((model.num_kv_heads, num_ranks))
    return not (model.num_heads % num_ranks or many % few or model.intermediate_size % num_ranks)


def _refused(problem: str) -> InvalidRequest:
    return InvalidRequest(f"--tensor-parallel: {problem}", param="tensor_parallel")


def model_of_rank(model: ModelConfig, num_ranks: int) -> ModelConfig:
    """Returns the sizes of the part of a model that one rank computes. They are the same on all ranks."""
    return replace(
        model,
        num_heads=model.num_heads // num_ranks,
        num_kv_heads=max(model.num_kv_heads // num_ranks, 1),
        intermediate_size=model.intermediate_size // num_ranks,
    )


def part_of(target: str, model: ModelConfig, rank: Rank) -> Part:
    """Returns which part of a projection's weight [out_features, in_features] a rank has.

    `model` is the whole model. Column-parallel projections are divided along dimension 0, row-parallel ones along 1.
    """
    own = model_of_rank(model, rank.size)
    match target:
        case "k_proj" | "v_proj":
            first_head, heads, width = rank.number * model.num_kv_heads // rank.size, own.num_kv_heads, model.head_dim
        case "q_proj" | "o_proj":
            first_head, heads, width = rank.number * own.num_heads, own.num_heads, model.head_dim
        case _:
            first_head, heads, width = rank.number, 1, own.intermediate_size
    return Part(1 if target in ROW_PARALLEL else 0, first_head * width, (first_head + heads) * width)
