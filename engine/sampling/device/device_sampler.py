"""Samples on a CUDA device. The host never waits for the device before it asks for the result.

The step's parameters travel to the device with the numbers of its forward pass. Four kernels choose the tokens (see
launches.py), and one copy brings them back. The tokens also stay on the device, where the next step can read them.

Two things may be known only after the launch. A token that the step before samples counts for penalties: the parameters
say where it will be on the device, and the kernel reads it there, as if it were a draft. Grammar masks, as bits, are
filled while the device computes: the kernel reads them from pinned host memory, each word once, so nothing is copied.

The tokens are those of engine/sampling/torch_sampler.py: the same order of operations, the same order of equal logits,
the same noise. The two may differ only where the noise falls within about 1e-6 of the border between two tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from graftwork.engine.core.events import TokenLogprobs
from graftwork.engine.core.sampling import MAX_TOP_LOGPROBS
from graftwork.engine.core.step import SampleSpec
from graftwork.engine.grammar.matching.masks import MaskFiller
from graftwork.engine.kernels.step_inputs import HostMemory, PinnedMemory, SharedWords, StepInputs, Words
from graftwork.engine.sampling.device.columns import pack
from graftwork.engine.sampling.device.count_table import CountTable
from graftwork.engine.sampling.device.launches import OUTPUT_ROWS, SamplerMemory, SamplerSizes
from graftwork.engine.sampling.sampler import AwaitedTokens, SampledRows
from graftwork.platform.errors import GraftworkError

_FEWEST_ROWS = 16
_FIRST_WORDS = 4096


class DeviceSampler:
    """The sampler of a CUDA device."""

    takes_awaited_tokens = True

    def __init__(
        self,
        masks: MaskFiller,
        vocab_size: int,
        max_requests: int,
        device: torch.device,
        sizes: SamplerSizes = SamplerSizes(),  # noqa: B008 - frozen
        host: HostMemory | None = None,
    ) -> None:
        """`max_requests` is the most requests that one step may sample. One request may have several rows.

        `host` gives the host memory of all copies; by default, memory that is pinned for the device.
        """
        self._masks = masks
        self._vocab_size = vocab_size
        self._device = device
        self._sizes = sizes
        self._host = host or PinnedMemory(device)
        self._counts = CountTable(max_requests, vocab_size, device)
        self._parameters = StepInputs(_FIRST_WORDS, device, self._host)
        self._mask_words = SharedWords(self._host)
        self._turn = 0
        self._allocate(_FEWEST_ROWS)

    def begin(self, specs: Sequence[SampleSpec], awaited: AwaitedTokens | None = None) -> "DeviceSampling":
        """Prepares the parameters. Starts to fill the grammar masks, if all tokens before them are known."""
        memory = self._memory_for(len(specs))
        sources = None if awaited is None else awaited.sources
        parameters = pack(specs, self._counts.follow(specs), memory.vocab_size, sources)
        words = np.empty(parameters.num_words(memory.columns), np.int32)
        parameters.write_to(words, memory.columns)
        wanted = tuple(_num_tops(spec, memory.vocab_size) for spec in specs)
        constrained = specs if any(spec.mask is not None for spec in specs) else ()
        sampling = DeviceSampling(
            self, memory, words, wanted, constrained, None if awaited is None else awaited.token_ids
        )
        if awaited is None:
            sampling.fill_masks()
        return sampling

    def send(self, words: Words) -> torch.Tensor:
        """Sends parameters that did not travel with a forward pass. Returns them on the device."""
        self._parameters.reserve(len(words))
        self._parameters.next_words(len(words))[:] = words
        return self._parameters.send_next(len(words))

    def fill_masks(self, specs: Sequence[SampleSpec]) -> "StepMasks":
        """Starts to fill the grammar masks of a step, where the kernels will read them."""
        num_masks = sum(spec.mask is not None for spec in specs)
        words = self._mask_words.next_words(num_masks * self._memory.mask_words).view(num_masks, -1)
        return StepMasks(words, self._masks.begin_words(specs, words.numpy()))

    def launch(
        self,
        logits: torch.Tensor,
        parameters: torch.Tensor,
        masks: torch.Tensor | None,
        awaited: torch.Tensor | None = None,
    ) -> None:
        """Launches the kernels that choose the tokens."""
        for launch in self._memory.launches(logits, self._counts.entries, parameters, masks, awaited):
            launch.run()
        if masks is not None:
            self._mask_words.lent(self._host.mark())

    def receive(self, num_rows: int) -> "Received":
        """Starts to copy the first rows of the output to the host. The host memory is used again two steps later."""
        memory = self._memory
        self._turn = 1 - self._turn
        on_host = self._outputs[self._turn][: num_rows * memory.columns.capacity].view(num_rows, -1)
        on_host.copy_(memory.output[:num_rows], non_blocking=True)
        return Received(on_host, self._host.mark())

    def check_integrity(self) -> None:
        self._counts.check_integrity()

    def _memory_for(self, num_rows: int) -> SamplerMemory:
        """Returns memory for the rows of a step. It grows to the next power of two if the step has more rows."""
        capacity = self._memory.columns.capacity
        if num_rows > capacity:
            while num_rows > capacity:
                capacity *= 2
            self._allocate(capacity)
        return self._memory

    def _allocate(self, capacity: int) -> None:
        self._memory = SamplerMemory(capacity, self._vocab_size, self._device, self._sizes)
        self._outputs = [self._host.words(OUTPUT_ROWS * capacity) for _ in range(2)]


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The grammar masks of one step, which another thread fills."""

    words: torch.Tensor  # [num_masks, mask words] int32, in pinned host memory
    filling: "Future[dict[int, GraftworkError | None]]"


@dataclass(frozen=True, slots=True)
class Received:
    """Part of the output of one step, which the device copies to the host."""

    output: torch.Tensor  # [output rows, row capacity] int32, in pinned memory
    wait: Callable[[], None]


@dataclass(slots=True)
class DeviceSampling:
    """Samples the tokens of one step."""

    sampler: DeviceSampler
    memory: SamplerMemory
    words: Words
    """The parameters of the step, on the host."""
    wanted: tuple[int | None, ...]
    """How many likely tokens each row reports; None for no log probabilities."""
    constrained: Sequence[SampleSpec]
    """The specs of the step; empty if none has a grammar."""
    awaited: torch.Tensor | None
    """The tokens of the step before, on the device, if the step awaits some."""
    masks: StepMasks | None = None
    """The grammar masks, once their filling has begun."""
    parameters: torch.Tensor | None = None
    """The parameters on the device; None until they are sent."""

    @property
    def passenger(self) -> "DeviceSampling":
        return self

    def board(self, on_device: torch.Tensor) -> None:
        self.parameters = on_device

    def fill_masks(self) -> None:
        """Starts to fill the grammar masks. All tokens before the sampled ones must be known to the grammars."""
        if self.constrained:
            self.masks = self.sampler.fill_masks(self.constrained)

    def sample(self, logits: torch.Tensor) -> "DeviceSampled":
        """Launches the kernels. Raises ValueError if the logits do not fit the step or the vocabulary."""
        self._check_fits(logits)
        sampler = self.sampler
        if self.masks is None:
            self.fill_masks()
        ends: Mapping[int, GraftworkError | None] = {}
        masks: torch.Tensor | None = None
        if self.masks is not None:
            masks, ends = self.masks.words, self.masks.filling.result()
        parameters = self.parameters
        if parameters is None:
            parameters = sampler.send(self.words)
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
            if len(logits):
                sampler.launch(logits, parameters, masks, self.awaited)
            received = sampler.receive(_output_rows(self.wanted))
        return DeviceSampled(self.memory.output[0, : len(logits)], received, self.wanted, ends)

    def _check_fits(self, logits: torch.Tensor) -> None:
        if logits.shape != (len(self.wanted), self.memory.vocab_size):
            raise ValueError(
                f"logits {tuple(logits.shape)} do not fit {len(self.wanted)} rows of a vocabulary of "
                f"{self.memory.vocab_size} tokens"
            )
        if logits.shape[0] and logits.stride(1) != 1:
            raise ValueError("the logits of a row must be adjacent in memory: pass contiguous logits")


@dataclass(frozen=True, slots=True)
class DeviceSampled:
    """The tokens of one step, which are on the host once the copy has ended."""

    token_ids: torch.Tensor  # [rows] int32, until the next step samples
    received: Received
    wanted: tuple[int | None, ...]
    ends: Mapping[int, GraftworkError | None]

    def result(self) -> SampledRows:
        self.received.wait()
        output: NDArray[np.int32] = self.received.output.numpy()
        token_ids: list[int] = output[0, : len(self.wanted)].tolist()
        return SampledRows(token_ids, [_logprobs(output, row, top) for row, top in enumerate(self.wanted)], self.ends)


def _num_tops(spec: SampleSpec, vocab_size: int) -> int | None:
    """Returns how many likely tokens a row reports; None for no log probabilities."""
    return None if spec.params.logprobs is None else min(spec.params.logprobs, vocab_size)


def _output_rows(wanted: Sequence[int | None]) -> int:
    """Returns how many rows of the output the host needs: the tokens, their log probabilities, or all."""
    if any(wanted):
        return 2 + 2 * MAX_TOP_LOGPROBS
    return 1 if all(top is None for top in wanted) else 2


def _logprobs(output: NDArray[np.int32], row: int, num_top: int | None) -> TokenLogprobs | None:
    """Returns what a row reports. The columns of the output are its rows in the step."""
    if num_top is None:
        return None
    numbers = output.view(np.float32)
    top_ids = output[2 : 2 + num_top, row].tolist()
    tops = numbers[2 + MAX_TOP_LOGPROBS : 2 + MAX_TOP_LOGPROBS + num_top, row].tolist()
    return TokenLogprobs(numbers[1, row].item(), tuple(zip(top_ids, tops, strict=True)))
