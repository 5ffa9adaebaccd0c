"""What config.json or a setting says of a model's quantisation: which linear layers, in which form.

Never imports torch, because the gateway reads configurations too. Never guesses: what is not known is refused.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from graftwork.platform.errors import InvalidRequest


class Method(Enum):
    """The form in which a checkpoint holds quantised weights, or how they are made at load."""

    GPTQ = "gptq"
    AWQ = "awq"
    COMPRESSED_INTEGERS = "compressed-tensors, packed"
    INTEGERS = "compressed-tensors, integers"
    FLOAT8 = "fp8"
    ROUND_INT8 = "int8"
    ROUND_INT4 = "int4"


ROUND_METHODS = (Method.ROUND_INT8, Method.ROUND_INT4)
"""What rounds weights of a checkpoint that is not quantised."""
ROUND_GROUP = 128
"""Input features that share a scale in ROUND_INT4, or fewer where the size of a layer asks for it."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """The form of one quantised weight."""

    method: Method
    bits: int
    group_size: int | None
    """Input features that share a scale. None: all."""
    is_symmetric: bool = True
    """Whether there are no zero points."""
    has_order: bool = False
    """Whether a tensor `g_idx` says which group each input feature belongs to."""
    zero_offset: int = 0
    """What is added to the zero points of the file."""
    block: tuple[int, int] | None = None
    """Outputs and input features that share a scale, in a checkpoint of FLOAT8."""
    scale_name: str = "weight_scale"


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantisation of a model."""

    scheme: Scheme
    excluded: tuple[str, ...] = ()
    """Layers that are not quantised: names, parts of names between dots, or `re:` and a pattern."""
    unused_tensors: tuple[str, ...] = ()
    """The last parts of the names of tensors that weight-only products do not need, such as scales of activations."""
    prefix: str | None = None
    """What `excluded` has in place of "model.", for a model within another one."""

    @property
    def is_rounded(self) -> bool:
        """Whether the weights are quantised when they are loaded."""
        return self.scheme.method in ROUND_METHODS

    def excludes(self, module: str) -> bool:
        """Returns whether a linear layer, such as "model.layers.0.mlp.down_proj" or "lm_head", is not quantised."""
        inner = self.prefix is not None and module.startswith("model.") and not module.startswith(self.prefix)
        name = f"{self.prefix}{module.removeprefix('model.')}" if inner else module
        return any(_matches(entry, name) for entry in self.excluded)

    @property
    def bits_per_weight(self) -> float:
        """The bits of a weight with its share of scales, as the engine stores them."""
        scheme = self.scheme
        if scheme.group_size is None:
            return float(scheme.bits)
        per_group = 32 if scheme.is_symmetric else 48
        return scheme.bits + per_group / scheme.group_size


def _matches(entry: str, module: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    return f".{entry}." in f".{module}."


def round_to_nearest(name: str, present: Quantization | None) -> Quantization:
    """Returns the quantisation of the setting `--quantization`: int8 for each output, or int4 in groups.

    `present` is that of the checkpoint. Raises InvalidRequest if there is one, or if the name is unknown.
    """
    if present is not None:
        raise InvalidRequest(
            f"--quantization {name} rounds plain weights, and this checkpoint is quantised already "
            f"({present.scheme.method.value}): leave --quantization out.",
            param="quantization",
        )
    if name not in [method.value for method in ROUND_METHODS]:
        raise InvalidRequest(f"quantization {name!r} is not served: give int8 or int4.", param="quantization")
    if name == Method.ROUND_INT8.value:
        return Quantization(Scheme(Method.ROUND_INT8, 8, None), ("lm_head",))
    return Quantization(Scheme(Method.ROUND_INT4, 4, ROUND_GROUP), ("lm_head",))


def joined_names(entries: object) -> Sequence[str]:
    """Returns a list of names. Raises ValueError if it is none."""
    if entries is None:
        return ()
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise ValueError(f"{entries!r} is no list of names")
    return entries
