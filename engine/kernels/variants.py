"""Lists the variants of the row kernels that are compiled ahead (see compile_ahead.py).

A variant is made from the launch itself, with tensors of the device `meta`: they have shapes and dtypes but no memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from graftwork.engine.kernels.activation import activate_launch
from graftwork.engine.kernels.angles import Rotation, RowAngles, step_angles_launch
from graftwork.engine.kernels.compile_ahead import KernelVariant, variant_of
from graftwork.engine.kernels.launch import Launch
from graftwork.engine.kernels.norm import NormRules, add_norm_launch, norm_launch
from graftwork.engine.kernels.rotary import HeadNorm, KvPages, RotaryAngles, RowPlaces, rotate_and_store_launch
from graftwork.engine.kernels.take_tokens import take_tokens_launch

_NUM_TOKENS, _NUM_FRAMES, _CONTEXT = 32, 64, 4096
"""Sizes that no variant depends on."""


_LLAMA_NORMS = NormRules(1e-5)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that decide which variants are compiled."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    has_qk_norm: bool
    vocab: int
    dtype: torch.dtype
    page_tokens: int = 16
    norms: NormRules = _LLAMA_NORMS
    has_input_norms: bool = True
    """Whether the inputs of attention and the MLP are normalised."""
    has_post_norms: bool = False
    """Whether the outputs of attention and the MLP are normalised."""
    has_wide_qk_norm: bool = False
    activation: str = "silu"
    other_intermediates: tuple[int, ...] = ()
    """The widths of activations besides `intermediate`: those of experts, of shared experts, and of layers' own inputs."""
    other_norms: tuple[int, ...] = ()
    """The widths of norms besides `hidden`."""
    has_value_norm: bool = False
    has_query_layers: bool = False
    """Whether some layers have queries alone."""
    has_rolling: bool = True
    """Whether requests may have a rolling window, whose text may be longer than the context."""
    ropes: tuple[tuple[int, bool] | None, ...] = ((-1, False),)
    """For each kind of rotary embedding the number of rotated features, -1 for all, and whether pairs are neighbours."""
    kv_dtype: str = "auto"
    """How keys and values are stored, as in EngineConfig: `auto`, `int8` or `fp8`."""


SHAPES = (
    ModelShape("llama-8b bf16", 4096, 14336, 32, 8, 128, False, 128256, torch.bfloat16),
    ModelShape("qwen3-32b bf16", 5120, 25600, 64, 8, 128, True, 151936, torch.bfloat16),
    ModelShape("qwen2-0.5b fp16", 896, 4864, 14, 2, 64, False, 151936, torch.float16),
    ModelShape("llama-70b fp32", 8192, 28672, 64, 8, 128, False, 128256, torch.float32),
    ModelShape("phi-4-mini bf16", 3072, 8192, 24, 8, 96, False, 200064, torch.bfloat16, ropes=((72, False),)),
    ModelShape(
        "gemma-3-12b bf16",
        *(3840, 15360, 16, 8, 256, True, 262208, torch.bfloat16),
        norms=NormRules(1e-6, "rms_rounded_once"),
        has_post_norms=True,
        activation="gelu_tanh",
    ),
    ModelShape(
        "command-r7b bf16",
        *(4096, 14336, 32, 8, 128, False, 256000, torch.bfloat16),
        norms=NormRules(1e-5, "layer"),
        ropes=((-1, True), None),
    ),
    ModelShape(
        "glm-4-9b bf16",
        *(4096, 13696, 32, 2, 128, False, 151552, torch.bfloat16),
        has_post_norms=True,
        ropes=((64, True),),
    ),
    ModelShape(
        "olmo-2-7b fp32",
        *(4096, 11008, 32, 32, 128, False, 100352, torch.float32),
        norms=NormRules(1e-6, "rms_rounded_once"),
        has_input_norms=False,
        has_post_norms=True,
        has_wide_qk_norm=True,
    ),
    ModelShape(
        "granite-3-8b bf16",
        *(4096, 12800, 32, 8, 128, False, 49155, torch.bfloat16),
        norms=NormRules(1e-5, scale=0.22),
    ),
    ModelShape("qwen3-8b fp32", 4096, 12288, 32, 8, 128, True, 151936, torch.float32),
    ModelShape("widest bf16", 16384, 53248, 128, 8, 128, False, 128256, torch.bfloat16),
    ModelShape("llama-8b bf16 int8 KV", 4096, 14336, 32, 8, 128, False, 128256, torch.bfloat16, kv_dtype="int8"),
    ModelShape("qwen3-8b fp32 fp8 KV", 4096, 12288, 32, 8, 128, True, 151936, torch.float32, kv_dtype="fp8"),
    ModelShape(
        "phi-4-mini fp16 fp8 KV",
        3072,
        8192,
        24,
        8,
        96,
        False,
        200064,
        torch.float16,
        ropes=((72, False),),
        kv_dtype="fp8",
    ),
)
"""The models that are compiled. Together they cover every dtype, all kinds and places of norms, all forms of rotation,
head sizes that are no powers of two, the widest hidden states (Llama-3.1-405B), and all forms of KV.
"""


def row_variants(shapes: Sequence[ModelShape] = SHAPES) -> Iterator[KernelVariant]:
    """Yields the variants of all row kernels for each model shape."""
    for shape in shapes:
        for name, launch in row_launches(shape):
            yield variant_of(f"{shape.name} {name}".rstrip(), launch)


def row_launches(shape: ModelShape) -> Iterator[tuple[str, Launch]]:
    """Yields the launches of all row kernels, each with a word that distinguishes it from others of its kernel."""
    yield from served_launches(shape)
    gate_up, inner = _gates_of(shape)
    yield "gelu", activate_launch(gate_up, inner, "gelu")
    yield "gelu_tanh", activate_launch(gate_up, inner, "gelu_tanh")


def served_launches(shape: ModelShape) -> Iterator[tuple[str, Launch]]:
    """Yields the launches that an engine makes for a model, each with a word that distinguishes it.

    They do not depend on the number of tokens of a step. A step's numbers are int32 if they travel together, and int64
    if another part of the engine does not use Triton.
    """
    yield from _norm_launches(shape)
    for rope in dict.fromkeys(shape.ropes):
        word = _rope_word(rope)
        for numbers, suffix in ((torch.int32, ""), (torch.int64, " int64")):
            yield f"{word}{suffix}".lstrip(), _rotate_launch(shape, rope, numbers)
            if rope is not None and shape.has_rolling:
                yield f"{word}{suffix}".lstrip(), _angles_launch(_rotated(shape, rope), rope[1], numbers)
            if shape.has_query_layers:
                yield f"{word} queries{suffix}".lstrip(), _rotate_launch(shape, rope, numbers, has_keys=False)
    yield shape.activation, activate_launch(*_gates_of(shape), shape.activation)
    for width in shape.other_intermediates:
        gate_up, inner = (_meta(_NUM_TOKENS, parts * width, dtype=shape.dtype) for parts in (2, 1))
        yield f"{shape.activation} of {width}", activate_launch(gate_up, inner, shape.activation)
    token_ids, sources, sampled = (_meta(_NUM_TOKENS, dtype=torch.int32) for _ in range(3))
    yield "", take_tokens_launch(token_ids, sources, sampled)


def _norm_launches(shape: ModelShape) -> Iterator[tuple[str, Launch]]:
    hidden, delta, normed = (_meta(_NUM_TOKENS, shape.hidden, dtype=shape.dtype) for _ in range(3))
    kept = shape.dtype if shape.norms.kind == "rms" else torch.float32
    weight = _meta(shape.hidden, dtype=kept)
    post_weight = weight if shape.has_post_norms else None
    yield "norm", norm_launch(hidden, weight, normed, shape.norms)
    for width in shape.other_norms:
        x, own = _meta(_NUM_TOKENS, width, dtype=shape.dtype), _meta(width, dtype=kept)
        yield f"norm of {width}", norm_launch(x, own, x, shape.norms)
    if shape.has_input_norms:
        yield "add", add_norm_launch(hidden, delta, (post_weight, weight), normed, shape.norms)
    if shape.has_post_norms or shape.norms.scale != 1.0 or not shape.has_input_norms:
        yield "add alone", add_norm_launch(hidden, delta, (post_weight, None), None, shape.norms)
    if shape.has_wide_qk_norm:
        whole = _meta(_NUM_TOKENS, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, dtype=shape.dtype)
        for name, heads in (("queries", shape.heads), ("keys", shape.kv_heads)):
            part = whole[:, : heads * shape.head_dim]
            yield name, norm_launch(part, _meta(part.shape[1], dtype=kept), part, shape.norms)


def _rope_word(rope: tuple[int, bool] | None) -> str:
    if rope is None:
        return "no rope"
    share = "" if rope[0] < 0 else f"{rope[0]} rotated"
    return " ".join([share, *(["interleaved"] if rope[1] else [])]).strip()


def _gates_of(shape: ModelShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the input and the output of the activation."""
    gate_up, inner = (_meta(_NUM_TOKENS, parts * shape.intermediate, dtype=shape.dtype) for parts in (2, 1))
    return gate_up, inner


def _rotate_launch(
    shape: ModelShape, rope: tuple[int, bool] | None, numbers: torch.dtype, *, has_keys: bool = True
) -> Launch:
    kv_heads = shape.kv_heads if has_keys else 0
    num_heads = shape.heads + 2 * kv_heads
    kept = shape.dtype if shape.norms.kind == "rms" else torch.float32
    normed = num_heads if shape.has_value_norm else shape.heads + kv_heads
    norm = HeadNorm(_meta(normed, shape.head_dim, dtype=kept), 1e-6, shape.norms.kind)
    rows = RowPlaces(*(_meta(_NUM_TOKENS, dtype=numbers) for _ in range(3)))
    table = None
    if rope is not None:
        rotated = _rotated(shape, rope)
        cosines, sines = (_meta(_CONTEXT, rotated, dtype=torch.float32) for _ in range(2))
        table = RotaryAngles(cosines, sines, rope[1])
    return rotate_and_store_launch(
        _meta(_NUM_TOKENS, num_heads * shape.head_dim, dtype=shape.dtype),
        _meta(_NUM_TOKENS, shape.heads, shape.head_dim, dtype=shape.dtype),
        _pages_of(shape),
        table,
        rows,
        norm if shape.has_qk_norm else None,
    )


def _pages_of(shape: ModelShape) -> KvPages:
    """Returns the pages of one layer, as an engine has them."""
    sizes = (_NUM_FRAMES, 2, shape.page_tokens, shape.kv_heads, shape.head_dim)
    if shape.kv_dtype == "auto":
        pages = _meta(*sizes, dtype=shape.dtype)
        return KvPages(pages[:, 0], pages[:, 1])
    codes = _meta(*sizes, dtype=torch.uint8)
    scales = _meta(_NUM_FRAMES, 2, shape.kv_heads, shape.page_tokens, dtype=torch.bfloat16).transpose(2, 3)
    return KvPages(codes[:, 0], codes[:, 1], scales[:, 0], scales[:, 1], shape.kv_dtype)


def _rotated(shape: ModelShape, rope: tuple[int, bool]) -> int:
    return shape.head_dim if rope[0] < 0 else rope[0]


def _angles_launch(rotated: int, is_interleaved: bool, numbers: torch.dtype) -> Launch:
    rotation = Rotation(_meta(rotated // 2, dtype=torch.float32), is_interleaved)
    cosines, sines = (_meta(_CONTEXT, rotated, dtype=torch.float32) for _ in range(2))
    positions = _meta(_NUM_TOKENS, dtype=numbers)
    return step_angles_launch(RowAngles.empty(rotation, _NUM_TOKENS), rotation, positions, (cosines, sines))


def _meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
