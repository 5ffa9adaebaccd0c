"""A runner with the shape of Llama-3.1-8B on a device without memory, and steps for it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from graftwork.engine.attention.triton_attention import TritonAttention
from graftwork.engine.core.prefix_keys import TokenHistory
from graftwork.engine.core.requests import AdapterUse
from graftwork.engine.core.sampling import RollingWindow, SamplingParams
from graftwork.engine.core.step import RequestSlice, SampleSpec, StepPlan
from graftwork.engine.core.tiers import PageId
from graftwork.engine.experts.triton.backend import TritonExperts
from graftwork.engine.experts.triton.variants import mxfp4
from graftwork.engine.grammar.matching.masks import MaskFiller
from graftwork.engine.kv.transfer.device_memory import DeviceMemory, KvCache, bytes_per_page
from graftwork.engine.kv.transfer.kv_format import kv_format
from graftwork.engine.lora.packs import PackCache
from graftwork.engine.lora.resident_adapter import GroupDelta, ResidentAdapter, SliceDelta
from graftwork.engine.lora.torch_backend import TorchLora
from graftwork.engine.lora.triton.backend import build_triton_lora
from graftwork.engine.model.batch_invariance import BatchInvariance
from graftwork.engine.model.block import NormKind, StreamsSpec
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.experts import ExpertsConfig
from graftwork.engine.model.layers import Linear
from graftwork.engine.model.mlp_weights import AnyLinear, DenseWeights, RoutedWeights
from graftwork.engine.model.part_weights import LayerStreamWeights, StreamWeights
from graftwork.engine.model.projections import GroupShape, group_shapes, stored_inputs, stored_width
from graftwork.engine.model.rope_config import RopeConfig
from graftwork.engine.model.rotary import RotaryTables
from graftwork.engine.model.weights import DecoderWeights, LayerWeights
from graftwork.engine.quantization.linear import QuantizedLinear, StepKinds
from graftwork.engine.quantization.triton.products import products_of
from graftwork.engine.quantization.triton.variants import CodesForm
from graftwork.engine.quantization.weight import QuantizedWeight
from graftwork.engine.runner.decoder import Decoder
from graftwork.engine.runner.forward import SegmentFinder
from graftwork.engine.runner.graph_keys import GraphKeys
from graftwork.engine.runner.input_batch import BatchBuilder
from graftwork.engine.runner.model_runner import ModelRunner
from graftwork.engine.runner.packed_forward import PackedForward, PackedParts
from graftwork.engine.runner.prompt_pooler import PromptPooler
from graftwork.engine.runner.prompt_scorer import PromptScorer
from graftwork.engine.runner.step_graphs import GraphLimits, StepGraphs
from graftwork.engine.runner.triton_row_ops import TritonRowOps
from graftwork.engine.sampling.device.device_sampler import DeviceSampler
from graftwork.platform.ids import RequestId
from tests.engine.runner.device_gate import DEVICE, PinnedWords

DTYPE = torch.bfloat16
LLAMA = ModelConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    ropes=(RopeConfig(500_000.0, None, 1.0),) * 32,
    biased_targets=(),
    has_qk_norm=False,
    windows=(None,) * 32,
    tie_word_embeddings=False,
    context_tokens=4096,
    eos_token_ids=(0,),
    dtype="bfloat16",
)
PAGE_TOKENS, NUM_FRAMES, MAX_REQUESTS = 16, 4096, 64


def linear(model: ModelConfig, dtype: torch.dtype, *shape: int, rounds_rows: bool = False) -> AnyLinear:
    """A layer of (out_features, in_features): plain, or with codes that kernels read if the model is quantised."""
    scheme = None if model.quantization is None else model.quantization.scheme
    return linear_of(
        None if scheme is None else CodesForm.of(scheme, shape[1], dtype), dtype, shape, rounds_rows=rounds_rows
    )


def linear_of(
    form: CodesForm | None,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    *,
    has_bias: bool = False,
    rounds_rows: bool = False,
) -> AnyLinear:
    """A layer of (out_features, in_features), plain or with codes of one form."""
    bias = torch.empty(shape[0], dtype=dtype, device=DEVICE) if has_bias else None
    if form is None:
        return Linear(torch.empty(shape, dtype=dtype, device=DEVICE), bias)
    table = form.table(shape[0], shape[1])
    zeros = torch.empty(shape[0], len(table.scales), dtype=torch.int16, device=DEVICE) if form.has_zeros else None
    packed = table.packed.view(torch.uint8)
    weight = QuantizedWeight(form.kind, packed, table.scales.t(), zeros, form.group_size, shape[1], dtype)
    made = QuantizedLinear([weight], bias, dtype, StepKinds())
    made.take_kernels(products_of(rounds_rows=rounds_rows))
    return made


def routed_weights(
    model: ModelConfig, experts: ExpertsConfig, dtype: torch.dtype, *, rounds_rows: bool = False
) -> RoutedWeights:
    """A routed layer without a shared expert. Its experts are plain, or codes as the model says."""
    shapes, scheme = experts.shapes, None if model.quantization is None else model.quantization.scheme

    def projection(shape: tuple[int, int]) -> AnyLinear:
        form = mxfp4(dtype) if experts.is_mxfp4 else None
        form = form if scheme is None else CodesForm.of(scheme, shape[1], dtype)
        return linear_of(form, dtype, shape, has_bias=experts.has_biases, rounds_rows=rounds_rows)

    router = (max(shapes.num_experts, 16), shapes.hidden_size)
    return RoutedWeights(
        router=linear_of(None, dtype, router, has_bias=experts.has_biases),  # type: ignore[arg-type]
        correction=None,
        experts=tuple(
            DenseWeights(projection(shapes.gate_up), projection(shapes.down)) for _ in range(shapes.num_experts)
        ),
        shared=None,
    )


def weights(model: ModelConfig, dtype: torch.dtype, *, rounds_rows: bool = False) -> DecoderWeights:
    hidden, vocab = model.hidden_size, model.vocab_size
    empty = partial(torch.empty, dtype=dtype, device=DEVICE)
    multiplied = partial(linear, model, dtype, rounds_rows=rounds_rows)
    return DecoderWeights(
        embedding=empty(vocab, hidden),
        layers=tuple(
            layer_weights(model, layer, dtype, multiplied, rounds_rows=rounds_rows) for layer in range(model.num_layers)
        ),
        layer_shapes=tuple(map(model.layer_shapes, range(model.num_layers))),
        norm=norm_weights(model, dtype),
        head=Linear(empty(vocab, hidden)),
        streams=None if model.streams is None else stream_weights(model, model.streams, dtype),
        model_shapes=model.model_shapes,
    )


def norm_weights(model: ModelConfig, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """The weights of a norm, fp32 if it rounds once: [hidden], if no shape is given."""
    kept = dtype if model.block.norm is NormKind.RMS else torch.float32
    return torch.empty(shape or (model.hidden_size,), dtype=kept, device=DEVICE)


def layer_weights(
    model: ModelConfig, layer: int, dtype: torch.dtype, multiplied: Callable[..., AnyLinear], *, rounds_rows: bool
) -> LayerWeights:
    hidden, inner, query = model.hidden_size, model.intermediate_size, model.num_heads * model.head_dim
    norm = partial(norm_weights, model, dtype)
    kv_heads = model.num_kv_heads if model.kv_source(layer) == layer else 0
    num_normed = model.num_heads + kv_heads * (2 if model.block.has_value_norm else 1)
    return LayerWeights(
        attention_norm=norm(),
        qkv=multiplied(query + 2 * kv_heads * model.head_dim, hidden),
        qk_norm=norm(num_normed, model.head_dim) if model.has_qk_norm else None,
        output=multiplied(hidden, query),
        mlp_norm=norm(),
        mlp=DenseWeights(multiplied(2 * inner, hidden), multiplied(hidden, inner))
        if model.experts is None
        else routed_weights(model, model.experts, dtype, rounds_rows=rounds_rows),
        attention_post_norm=None if model.block.norms.after_attention is None else norm(),
        mlp_post_norm=None if model.block.norms.after_mlp is None else norm(),
        streams=None if model.streams is None else layer_stream_weights(model, model.streams, dtype),
    )


def layer_stream_weights(model: ModelConfig, spec: StreamsSpec, dtype: torch.dtype) -> LayerStreamWeights:
    hidden, norm = model.hidden_size, partial(norm_weights, model, dtype)
    empty = partial(torch.empty, dtype=dtype, device=DEVICE)
    linears = {
        target: Linear(empty(stored_width(target, outputs), stored_inputs(target, inputs)))
        for target, (outputs, inputs) in spec.target_shapes(hidden).items()
    }
    return LayerStreamWeights(
        router_norm=norm(),
        router=linears["modality_router"],
        prediction=linears["prediction_coefs"],
        correction=linears["correction_coefs"],
        gate_scale=empty(hidden),
        laurel_left=linears["linear_left"],
        laurel_right=linears["linear_right"],
        laurel_norm=norm(),
        input_gate=linears["per_layer_input_gate"],
        input_projection=linears["per_layer_projection"],
        input_norm=norm(),
    )


def stream_weights(model: ModelConfig, spec: StreamsSpec, dtype: torch.dtype) -> StreamWeights:
    hidden, of_layers = model.hidden_size, model.num_layers * spec.input_width
    empty = partial(torch.empty, dtype=dtype, device=DEVICE)
    squares = tuple(Linear(empty(hidden, hidden)) for _ in range(spec.count - 1))
    return StreamWeights(
        projections=squares,
        unembed_projections=squares,
        input_embedding=empty(spec.input_vocab_size, of_layers),
        input_projection=Linear(empty(of_layers, hidden)),
        input_norm=norm_weights(model, dtype, spec.input_width),
    )


def adapter(
    digest: str, rank: int, model: ModelConfig, dtype: torch.dtype, *, has_columns: bool = False
) -> ResidentAdapter:
    """An adapter of all linear layers. With `has_columns` it also scales output columns; rank 0 does only that."""
    empty = partial(torch.empty, dtype=dtype, device=DEVICE)

    def delta(shape: GroupShape) -> GroupDelta:
        starts = [sum(shape.widths[:index]) for index in range(len(shape.widths))]
        slices = [
            SliceDelta(empty(rank, width), index * rank, (index + 1) * rank, start, start + width)
            for index, (start, width) in enumerate(zip(starts, shape.widths, strict=True))
        ]
        return GroupDelta(
            A=empty(rank * len(starts), shape.in_features),
            slices=tuple(slices if rank else ()),
            scales=None,
            column_scale=torch.empty(sum(shape.widths), device=DEVICE) if has_columns else None,
            column_shift=None,
        )

    shapes = group_shapes(model)
    made = {shape: delta(shape) for shape in set(shapes.values())}
    deltas = {key: made[shape] for key, shape in shapes.items()}
    return ResidentAdapter(digest, empty(0), deltas, None, None, None, rank, is_low_rank=not has_columns)


class Adapters:
    """Adapters on the device, by digest."""

    def __init__(self, adapters: Sequence[ResidentAdapter]) -> None:
        self._by_digest = {one.digest: one for one in adapters}

    def get(self, digest: str) -> ResidentAdapter:
        return self._by_digest[digest]

    def __iter__(self) -> Any:
        return iter(self._by_digest.values())


class UncapturedGraphs:
    """A recorder that captures nothing. It knows the work of the graph that was replayed last."""

    def __init__(self) -> None:
        self.num_replays = 0
        self.work: Callable[[], None] | None = None

    def capture(self, work: Callable[[], None]) -> "UncapturedGraph":
        return UncapturedGraph(self, work)


class UncapturedGraph:
    def __init__(self, recorder: UncapturedGraphs, work: Callable[[], None]) -> None:
        self._recorder, self._work = recorder, work

    def replay(self) -> None:
        self._recorder.num_replays += 1
        self._recorder.work = self._work


class LlamaRunner:
    """A runner, and what it is made of."""

    def __init__(
        self,
        adapters: Sequence[ResidentAdapter],
        model: ModelConfig = LLAMA,
        dtype: torch.dtype = DTYPE,
        *,
        rounds_rows: bool = False,
        kv_dtype: str = "auto",
    ) -> None:
        self.pinned = PinnedWords()
        form = kv_format(kv_dtype, dtype)
        memory = DeviceMemory(NUM_FRAMES, bytes_per_page(model, PAGE_TOKENS, dtype, form), DEVICE)
        cache = KvCache(model, memory, PAGE_TOKENS, dtype, form)
        rotary = RotaryTables.of(model, DEVICE)
        own = weights(model, dtype, rounds_rows=rounds_rows)
        decoder = Decoder(model, own, TritonRowOps(model, rotary, cache), lambda: None, experts=TritonExperts)
        rules = BatchInvariance.of(dtype)
        lora = build_triton_lora(model, 128, dtype, DEVICE, TorchLora(PackCache(0, rules.min_columns), rules))
        pool: Any = Adapters(adapters)
        for one in pool:
            lora.place(one)
        finder = SegmentFinder(pool)
        builder = BatchBuilder(PAGE_TOKENS, memory.null_frame, DEVICE, rules)
        parts = PackedParts(decoder, TritonAttention(model, cache, dtype), builder, lora)
        self.gates = cache.gates
        self.forward = PackedForward(parts, finder, self.pinned)
        self.keys = GraphKeys(MAX_REQUESTS, lora.max_rank, rules.min_rows, max_mixed_rows=256, serves_rolling=True)
        limits = GraphLimits(self.keys, model.context_tokens, PAGE_TOKENS)
        self.graphs = StepGraphs(parts, cache.gates, self.pinned, limits)
        self.recorder = UncapturedGraphs()
        self.graphs.capture(self.recorder)
        self.masks = MaskFiller(model.vocab_size)
        sampler = DeviceSampler(self.masks, model.vocab_size, MAX_REQUESTS, DEVICE, host=self.pinned)
        scorer = PromptScorer(decoder, lora, rules, finder.mix)
        self.runner = ModelRunner(self.forward, sampler, scorer, PromptPooler(decoder), DEVICE)


@cache
def llama(num_adapters: int = 16, rank: int = 16) -> LlamaRunner:
    """A runner with some adapters of one rank, called 0, 1, …"""
    return LlamaRunner([adapter(str(number), rank, LLAMA, DTYPE) for number in range(num_adapters)])


def decode_plan(
    specs: Sequence[SampleSpec], num_keys: int = 1024, *, num_adapters: int = 16, awaits: bool = False
) -> StepPlan:
    """One decoding row for each spec, which take the adapters in turn."""
    num_pages = -(-num_keys // PAGE_TOKENS)
    pieces = []
    for row, spec in enumerate(specs):
        pages = tuple(PageId((row * num_pages + index) % NUM_FRAMES) for index in range(num_pages))
        uses = (AdapterUse(str(row % num_adapters)),) if num_adapters else ()
        tokens = () if awaits else (7,)
        pieces.append(
            RequestSlice(RequestId(f"req_{row}"), tokens, num_keys - 1, pages, uses, (spec,), awaits_token=awaits)
        )
    return StepPlan(tuple(pieces))


def rolling(plan: StepPlan, *, every: int = 1, sinks: int = 4, window: int = 500, num_given_up: int = 0) -> StepPlan:
    """A plan whose requests have a rolling window, each one or every second, third, …; they have given up so many pages."""
    shift = num_given_up * PAGE_TOKENS
    return StepPlan(
        tuple(
            replace(
                piece, rolling_window=RollingWindow(sinks, window), start=piece.start + shift, num_given_up=num_given_up
            )
            if number % every == 0
            else piece
            for number, piece in enumerate(plan.slices)
        )
    )


def mixed_plan(specs: Sequence[SampleSpec], num_prompt_tokens: int) -> StepPlan:
    """Decoding rows, and the last tokens of a prompt, whose request takes the first adapter and the last spec."""
    decoding = decode_plan(specs[:-1]).slices
    pages = tuple(PageId(NUM_FRAMES - 1 - page) for page in range(-(-num_prompt_tokens // PAGE_TOKENS)))
    uses = (AdapterUse("0"),)
    prompt = RequestSlice(RequestId("req_prompt"), (7,) * num_prompt_tokens, 0, pages, uses, (specs[-1],))
    return StepPlan((*decoding, prompt))


def plain_specs(num_rows: int) -> list[SampleSpec]:
    params = SamplingParams(max_tokens=64, temperature=0.8, top_p=0.9, logprobs=2)
    return [SampleSpec(params, seed=row, position=1024) for row in range(num_rows)]


def penalty_specs(num_rows: int) -> list[SampleSpec]:
    params = SamplingParams(max_tokens=64, frequency_penalty=0.5, logit_bias=((3, 1.0),))
    return [SampleSpec(params, row, 1024, history=TokenHistory([1, 2, row])) for row in range(num_rows)]
