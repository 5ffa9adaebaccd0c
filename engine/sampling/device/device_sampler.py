"""Samples on a CUDA device. The host never waits for the device before it asks for the result.

The step's parameters travel to the device with the numbers of its forward pass; if they were not known by then, by a copy
of their own. Grammar masks, as bits, are filled while the device computes, so if a row has one, a further copy carries
them, with the parameters if these have not travelled before. Four kernels choose the tokens (see launches.py), and one copy brings them back. The tokens also stay on the device, where the next step can read them.

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
from graftwork.engine.kernels.step_inputs import HostMemory, PinnedMemory, StepInputs, Words
from graftwork.engine.sampling.device.columns import pack
from graftwork.engine.sampling.device.count_table import CountTable
from graftwork.engine.sampling.device.launches import OUTPUT_ROWS, SamplerMemory, SamplerSizes
from graftwork.engine.sampling.sampler import SampledRows
from graftwork.platform.errors import GraftworkError

_FEWEST_ROWS = 16
_FIRST_WORDS = 4096


class DeviceSampler:
    """The sampler of a CUDA device."""

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
        self._mask_words = StepInputs(0, device, self._host)
        self._turn = 0
        self._allocate(_FEWEST_ROWS)

    def begin(self, specs: Sequence[SampleSpec]) -> "DeviceSampling":
        """Prepares the parameters, and starts to fill the grammar masks."""
        memory = self._memory_for(len(specs))
        parameters = pack(specs, self._counts.follow(specs), memory.vocab_size)
        words = np.empty(parameters.num_words(memory.columns), np.int32)
        parameters.write_to(words, memory.columns)
        wanted = tuple(_num_tops(spec, memory.vocab_size) for spec in specs)
        masks = None
        if num_masks := sum(spec.mask is not None for spec in specs):
            self._mask_words.reserve(_aligned(num_masks * memory.mask_words) + len(words))
            masks = self._fill_masks(specs, num_masks, memory.mask_words)
        return DeviceSampling(self, memory, words, wanted, masks)

    def send(self, words: Words) -> torch.Tensor:
        """Sends parameters that did not travel with a forward pass. Returns them on the device."""
        self._parameters.reserve(len(words))
        self._parameters.next_words(len(words))[:] = words
        return self._parameters.send_next(len(words))

    def send_masks(self, num_masks: int, parameters: Words | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sends the masks that were filled and, behind them, parameters that did not travel with a forward pass.

        Returns both on the device. The masks are [num_masks, mask words] int32.
        """
        mask_words = self._memory.mask_words
        end = num_masks * mask_words
        start = _aligned(end)
        if parameters is None:
            return self._mask_words.send_next(end).view(num_masks, mask_words), None
        self._mask_words.next_words(start + len(parameters))[start:] = parameters
        sent = self._mask_words.send_next(start + len(parameters))
        return sent[:end].view(num_masks, mask_words), sent[start:]

    def launch(self, logits: torch.Tensor, parameters: torch.Tensor, masks: torch.Tensor | None) -> None:
        """Launches the kernels that choose the tokens."""
        memory = self._memory
        for launch in memory.launches(logits, self._counts.entries, parameters, masks):
            launch.run()

    def receive(self, num_rows: int) -> "Received":
        """Starts to copy the first rows of the output to the host. The host memory is used again two steps later."""
        memory = self._memory
        self._turn = 1 - self._turn
        on_host = self._outputs[self._turn][: num_rows * memory.columns.capacity].view(num_rows, -1)
        on_host.copy_(memory.output[:num_rows], non_blocking=True)
        return Received(on_host, self._host.mark())

    def _fill_masks(self, specs: Sequence[SampleSpec], num_masks: int, mask_words: int) -> "_StepMasks":
        words = self._mask_words.next_words(num_masks * mask_words).reshape(num_masks, mask_words)
        return _StepMasks(num_masks, self._masks.begin_words(specs, words))

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
class _StepMasks:
    """The grammar masks of one step, which another thread fills."""

    num_masks: int
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
    masks: _StepMasks | None
    parameters: torch.Tensor | None = None
    """The parameters on the device; None until they are sent."""

    @property
    def passenger(self) -> "DeviceSampling":
        return self

    def board(self, on_device: torch.Tensor) -> None:
        self.parameters = on_device

    def sample(self, logits: torch.Tensor) -> "DeviceSampled":
        """Launches the kernels. Raises ValueError if the logits do not fit the step or the vocabulary."""
        self._check_fits(logits)
        sampler = self.sampler
        ends: Mapping[int, GraftworkError | None] = {}
        masks: torch.Tensor | None = None
        parameters = self.parameters
        if self.masks is not None:
            ends = self.masks.filling.result()
            masks, sent = sampler.send_masks(self.masks.num_masks, self.words if parameters is None else None)
            parameters = parameters if sent is None else sent
        elif parameters is None:
            parameters = sampler.send(self.words)
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
            if len(logits):
                assert parameters is not None
                sampler.launch(logits, parameters, masks)
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


def _aligned(num_words: int) -> int:
    """Returns the next number of words that is a multiple of 16 bytes."""
    return -(-num_words // 4) * 4


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
