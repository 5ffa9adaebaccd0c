"""Turns a StepPlan into a StepResult: the one place where plans meet weights."""

from collections.abc import Mapping, Sequence

import torch

from graftwork.engine.attention import KvCache
from graftwork.engine.batch import StepPlan, StepResult
from graftwork.engine.batch_tensors import AdapterRun, BatchBuilder, BatchTensors
from graftwork.engine.checkpoint import Checkpoint
from graftwork.engine.config import EngineConfig
from graftwork.engine.decoder import Decoder
from graftwork.engine.decoder_weights import load_decoder_weights
from graftwork.engine.grammar.masks import MaskFiller
from graftwork.engine.lora import Segment
from graftwork.engine.lora_backend import LoraBackend
from graftwork.engine.lora_packs import Graft
from graftwork.engine.lora_pool import LoraPool
from graftwork.engine.model_config import ModelConfig
from graftwork.engine.request import TokenLogprobs
from graftwork.engine.rotary import RotaryTable
from graftwork.engine.sampler import choose_tokens
from graftwork.engine.token_scores import RawScores
from graftwork.platform.errors import GraftworkError, InvalidRequest
from graftwork.platform.ids import RequestId

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelRunner:
    """Owns the decoder and the KV memory; reads the LoRA pool."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KvCache,
        builder: BatchBuilder,
        pool: LoraPool,
        lora: LoraBackend,
        masks: MaskFiller,
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._builder = builder
        self._pool = pool
        self._lora = lora
        self._masks = masks

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """One forward pass, and a token for every row that is sampled."""
        batch = self.batch(plan)
        specs = [spec for piece in batch.slices for spec in piece.samples]
        filling = self._masks.begin(specs)
        logits = self.logits(batch)
        scores = RawScores(logits, specs)
        ends = self._masks.apply(filling, logits)
        tokens = choose_tokens(logits, specs)
        return _by_request(batch, tokens, scores.of(tokens), ends)

    def batch(self, plan: StepPlan) -> BatchTensors:
        """A step as tensors on the device."""
        return self._builder.build(plan)

    def logits(self, batch: BatchTensors) -> torch.Tensor:
        """Logits of the sampled rows.  # [num_sampled, vocab] in fp32"""
        segments = [self._segment(run) for run in batch.adapter_runs]
        lora = self._lora.step(segments, len(batch.token_ids))
        return self._decoder.logits(batch, self._cache, lora)

    def _segment(self, run: AdapterRun) -> Segment:
        graft = Graft(tuple((self._pool.get(use.digest), use.weight) for use in run.adapters))
        return Segment(run.start_row, run.end_row, graft, run.first_sample, run.last_sample, run.decoding)


def _by_request(
    batch: BatchTensors,
    tokens: list[int],
    scores: Sequence[TokenLogprobs | None],
    ends: Mapping[int, GraftworkError | None],
) -> StepResult:
    """What was chosen, row by row, as each request's own."""
    chosen: dict[RequestId, tuple[int, ...]] = {}
    scored: dict[RequestId, tuple[TokenLogprobs, ...]] = {}
    ended: dict[RequestId, dict[int, GraftworkError | None]] = {}
    start = 0
    for piece in batch.slices:
        end = start + len(piece.samples)
        if piece.samples:
            chosen[piece.request_id] = tuple(tokens[start:end])
        if own := tuple(score for score in scores[start:end] if score is not None):
            scored[piece.request_id] = own
        if rows := {row - start: ends[row] for row in range(start, end) if row in ends}:
            ended[piece.request_id] = rows
        start = end
    return StepResult(chosen, scored, ended)


def load_decoder(config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Read the checkpoint onto the device."""
    weights = load_decoder_weights(Checkpoint(config.model), model, device, dtype)
    return Decoder(model, weights, RotaryTable(model.head_dim, model.rope, model.context_tokens, device))


def _cpu_multiplies_bfloat16() -> bool:
    """Where it does not, torch's bf16 GEMM was measured at a tenth of the fp32 one."""
    cpu = torch.cpu
    return bool(cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported())


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def choose_dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's own, but float32 on a CPU that has no instructions for anything shorter."""
    wanted = model.dtype if name == "auto" else name
    if name == "auto" and device.type == "cpu" and not _cpu_multiplies_bfloat16():
        wanted = "float32"
    if wanted not in _DTYPES:
        raise InvalidRequest(f"dtype {wanted!r} is not served: choose one of {', '.join(_DTYPES)}.", param="dtype")
    return _DTYPES[wanted]
