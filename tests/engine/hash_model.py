"""A model whose next token is a hash of all that it may depend on, and a device that runs it over a tagged KV cache.

The device knows a request's earlier tokens only from the tags of its pages. So a page that was freed, moved or rewritten
while a step still used it changes the tokens, or fails an assertion. The device computes a step at the earliest or at
the latest moment that is allowed.
"""

import hashlib
from collections.abc import Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from graftwork.engine.core.events import FinishReason, TokenLogprobs
from graftwork.engine.core.prefix_keys import PageKey, PrefixScope, TokenCounts, page_key
from graftwork.engine.core.requests import EngineRequest, GrammarSource
from graftwork.engine.core.step import RequestSlice, SampleSpec, StepPlan, StepResult
from graftwork.engine.core.tiers import Tier
from graftwork.engine.grammar.compile.compiler import GrammarCompiled
from graftwork.engine.grammar.compile.grammar_cache import GrammarKey
from graftwork.engine.grammar.matching.cursor import GrammarCursor
from graftwork.engine.grammar.matching.matcher import CompiledPair, Matcher, Words
from graftwork.engine.kv.index.cache_scope import CacheScopes
from graftwork.engine.kv.transfer.plan import LayerGates, LoadFailed
from graftwork.engine.lora.pool import LoraPool
from graftwork.engine.lora.resident_adapter import ResidentAdapter
from graftwork.engine.scheduler.validation import history_for
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import RequestId
from tests.engine.late_copies import NUM_LAYERS, LayeredCopyEngine
from tests.engine.tagged_kv_cache import TaggedKvCache, adapter_of

PAGE, CONTEXT, VOCABULARY, EOS = 2, 16, 12, 1
SCOPES = CacheScopes("sha256:model", "float32")
Tokens = tuple[int, ...]


# ---- the model --------------------------------------------------------------------------------------------------


def chosen(known: Sequence[int], adapters: Sequence[str], spec: SampleSpec, words: Words | None) -> int | None:
    """Returns the token after `known`; None if the grammar's mask allows none."""
    allowed = [
        token
        for token in range(1, VOCABULARY)
        if token not in spec.banned_token_ids and (words is None or int(words[0]) >> token & 1)
    ]
    if not allowed:
        return None
    counts = TokenCounts()
    if spec.history is not None:
        spec.history.copy_to(counts, spec.draft_token_ids)
    penalties = sorted(zip(counts.token_ids, counts.counts, strict=True))
    noise = repr((list(known), list(adapters), spec.seed, spec.position, penalties)).encode()
    return allowed[int.from_bytes(hashlib.sha256(noise).digest()[:4], "big") % len(allowed)]


class Answer(NamedTuple):
    """The answer that a request must get, and how it ends."""

    token_ids: Tokens
    end: FinishReason | str
    """The reason, or the code of the error."""


def answer_to(request: EngineRequest) -> Answer:
    """Returns the answer of the model alone, one token after the other, without an engine."""
    sampling, made = request.sampling, list[int]()
    stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else {EOS})
    cursor = None if request.grammar is None else cursor_of(request.grammar, stops)
    history, adapters = history_for(request), sorted(use.digest for use in request.adapters)
    while len(made) < sampling.max_tokens and len(request.prompt_token_ids) + len(made) < CONTEXT:
        banned = tuple(sorted(stops)) if len(made) < sampling.min_tokens else ()
        words, known = None, (*request.prompt_token_ids, *made)
        if cursor is not None:
            words = np.zeros(1, np.int32)
            error = cursor.row((), banned).fill(words)
            if error is not None:
                return Answer(tuple(made), error.code)
        spec = SampleSpec(sampling, sampling.seed or 0, len(known), banned, history)
        token = chosen(known, adapters, spec, words)
        if token is None:
            return Answer(tuple(made), FinishReason.STOP)
        made.append(token)
        if history is not None:
            history.extend([token])
        if cursor is not None:
            assert cursor.accept(token)
        if token in stops:
            return Answer(tuple(made), FinishReason.STOP)
    return Answer(tuple(made), FinishReason.LENGTH)


# ---- its grammars -----------------------------------------------------------------------------------------------


class ModuloMatcher:
    """Allows the tokens that differ from the sum of the earlier ones modulo `modulus`; complete from `fewest` tokens on.

    After `most` tokens it allows none.
    """

    def __init__(self, modulus: int, fewest: int, most: int) -> None:
        self._limits = modulus, fewest, most
        self._made: list[int] = []

    def _allows(self, token_id: int) -> bool:
        modulus, _, most = self._limits
        return len(self._made) < most and (token_id - sum(self._made)) % modulus != 0

    def accept(self, token_id: int) -> bool:
        if not self._allows(token_id):
            return False
        self._made.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        del self._made[len(self._made) - num_tokens :]

    def fill(self, words: Words) -> bool:
        words[0] = sum(1 << token for token in range(2, VOCABULARY) if self._allows(token))
        return True

    def is_complete(self) -> bool:
        return len(self._made) >= self._limits[1]

    def forced_bytes(self) -> bytes:
        return b""


class ModuloGrammar:
    """A compiled grammar: three numbers, such as `2:1:5`."""

    num_bytes = 1

    def __init__(self, text: str) -> None:
        self._numbers = [int(number) for number in text.split(":")]

    def matcher(self) -> Matcher:
        return ModuloMatcher(*self._numbers)


def cursor_of(grammar: GrammarSource, stops: frozenset[int]) -> GrammarCursor:
    return GrammarCursor(ModuloGrammar(grammar.text).matcher(), stops, (EOS,), max_fill_s=1.0, clock=ManualClock())


class InstantCompiler:
    """Stands for the GrammarCompiler, which compiles in other processes: every grammar is compiled when it is asked for."""

    speller = None
    num_bytes = 0

    def __init__(self) -> None:
        self._ready: dict[GrammarKey, CompiledPair] = {}

    def key(self, source: GrammarSource, domain: str) -> GrammarKey:
        return GrammarKey(domain, source.text)

    def want(self, key: GrammarKey, source: GrammarSource, domain: str) -> GraftworkError | None:
        self._ready[key] = CompiledPair(ModuloGrammar(source.text), None)
        return None

    def get(self, key: GrammarKey) -> CompiledPair | None:
        return self._ready.get(key)

    def forget_domain(self, domain: str) -> None:
        """Drops what the domain has compiled."""
        self._ready = {key: pair for key, pair in self._ready.items() if key.domain != domain}

    def forget_failures(self) -> None:
        """No compile fails."""

    def absorb(self, compiled: GrammarCompiled) -> None:
        raise AssertionError("nothing is compiled elsewhere")

    def close(self) -> None:
        """Nothing runs."""

    def check_integrity(self) -> None:
        """Nothing can be wrong."""


# ---- its device -------------------------------------------------------------------------------------------------


class Moment(StrEnum):
    """When the device computes: as soon as it may, between, or only when the host waits for the result."""

    EARLY = "early"
    BETWEEN = "between"
    LATE = "late"


class HashDevice:
    """A Runner of the hash model. `requests` has the requests by id."""

    def __init__(
        self,
        cache: TaggedKvCache,
        gates: LayerGates,
        adapters: LoraPool,
        requests: dict[RequestId, EngineRequest],
        moment: Moment,
    ) -> None:
        """`cache` copies by a LayeredCopyEngine. `gates` tell which loads a step waits for."""
        assert isinstance(cache.copies, LayeredCopyEngine)
        self.cache = cache
        self.copies = cache.copies
        self.gates = gates
        self.requests = requests
        self.moment = moment
        self._adapters = adapters
        self._latest: HashFlight | None = None
        self.prefixes: dict[PageKey, Tokens] = {}
        """By tag of a page, full or begun: all tokens up to the last one in it."""
        self.num_awaited = 0
        """How many tokens were computed before the host knew them."""
        self.num_gated = 0
        """How many steps have waited for a load, layer by layer."""
        self.failed: set[RequestId] = set()
        """The requests of steps that failed because a load did."""
        self._must_recover = False

    def launch(self, plan: StepPlan) -> "HashFlight":
        adapters = {use.digest: self._adapters.get(use.digest) for piece in plan.slices for use in piece.adapters}
        self.num_awaited += sum(piece.awaits_token for piece in plan.slices)
        self.num_gated += bool(self.gates.selected_loads)
        try:
            for layer in range(NUM_LAYERS):
                self.gates.wait(layer)
        except LoadFailed:
            self.failed.update(piece.request_id for piece in plan.slices)
            self._must_recover = True
            self.copies.take_waits()
            raise
        self._latest = HashFlight(self, plan, adapters, self._latest)
        return self._latest

    def recover(self) -> None:
        assert self._must_recover, "a step has failed; the log says why"
        self._must_recover = False

    def compute(self, piece: RequestSlice, token_ids: Tokens, scope: PrefixScope) -> Tokens:
        """Reads the KV before a slice, and writes that of its tokens. Returns all tokens up to the end of the slice."""
        pool, on_device = self.cache.kv_cache.page_store.device, self.cache.copies.tags[Tier.DEVICE]
        tag = None if piece.start == 0 else on_device[piece.pages[(piece.start - 1) // PAGE]]
        before = () if tag is None else self.prefixes[tag][: piece.start]  # leaves out drafts that were not accepted
        assert len(before) == piece.start, "the KV before a slice is missing"
        assert tag is None or tag == self._tags(scope, self.prefixes[tag])[-1], (
            "the KV before a slice has another scope"
        )
        found = [on_device[page] for page in piece.pages[: piece.start // PAGE]]
        assert found == self._tags(scope, before)[: len(found)], "the KV before a slice is not its own"
        whole = (*before, *token_ids)
        for index, tag in list(enumerate(self._tags(scope, whole)))[piece.start // PAGE :]:
            page = piece.pages[index]
            assert pool.holders(page) == 1, "a page that is shared, or free, is written"
            assert not pool.is_in_flight(page), "a page is written while it is copied"
            on_device[page] = tag
        return whole

    def _tags(self, scope: PrefixScope, tokens: Tokens) -> list[PageKey]:
        """Returns the tags of the pages with these tokens. That of a full page is its key in the prefix tree."""
        tags = list[PageKey]()
        for index in range(-(-len(tokens) // PAGE)):
            own = tokens[index * PAGE : (index + 1) * PAGE]
            tags.append(page_key(scope, index, tags[-1] if tags else None, own))
            self.prefixes[tags[-1]] = tokens[: (index + 1) * PAGE]
        return tags


class HashFlight:
    """A step of the hash model."""

    def __init__(
        self,
        device: HashDevice,
        plan: StepPlan,
        adapters: dict[str, ResidentAdapter],
        previous: "HashFlight | None",
    ) -> None:
        self._device = device
        self._plan = plan
        self._adapters = adapters
        self._previous = previous
        self._scopes = {
            piece.request_id: SCOPES.for_request(device.requests[piece.request_id], PAGE) for piece in plan.slices
        }
        self._awaited_layers = device.copies.take_waits()
        self._known: dict[RequestId, Tokens] = {}
        self._chosen: dict[RequestId, list[int | None]] | None = None
        self._ends: dict[RequestId, dict[int, GraftworkError | None]] = {}
        if device.moment is Moment.EARLY:
            self._forward()

    def sample(self) -> None:
        if self._device.moment is not Moment.LATE:
            self._choose()

    def result(self) -> StepResult:
        self._choose()
        assert self._chosen is not None
        self._previous = None
        return StepResult(
            {name: tuple(token or 0 for token in tokens) for name, tokens in self._chosen.items()},
            ends=MappingProxyType(self._ends),
            prompt_logprobs={
                piece.request_id: tuple(TokenLogprobs(-float(token)) for token in piece.scores.token_ids)
                for piece in self._plan.slices
                if piece.scores is not None
            },
        )

    def token_of(self, request_id: RequestId) -> int:
        assert self._chosen is not None, "a token is awaited that is not sampled yet"
        return self._chosen[request_id][0] or 0

    def _forward(self) -> None:
        for load, num_layers in self._awaited_layers:
            self._device.copies.arrive(load, num_layers)
        for digest, adapter in self._adapters.items():
            expected = adapter_of(int(digest.removeprefix("adapter-"))).deltas[0, "o"].A
            assert torch.equal(adapter.deltas[0, "o"].A, expected), "an adapter was moved or overwritten under a step"
        for piece in self._plan.slices:
            token_ids = piece.token_ids
            if piece.awaits_token:
                assert self._previous is not None
                token_ids = (self._previous.token_of(piece.request_id),)
            self._known[piece.request_id] = self._device.compute(piece, token_ids, self._scopes[piece.request_id])

    def _choose(self) -> None:
        if self._chosen is not None:
            return
        if not self._known:
            self._forward()
        self._chosen = {piece.request_id: self._choices(piece) for piece in self._plan.slices if piece.samples}

    def _choices(self, piece: RequestSlice) -> list[int | None]:
        known, digests = self._known[piece.request_id], sorted(use.digest for use in piece.adapters)
        tokens: list[int | None] = []
        for index, spec in enumerate(piece.samples):
            assert spec.position == piece.known_end + index
            words = None
            if spec.mask is not None:
                words = np.zeros(1, np.int32)
                error = spec.mask.fill(words)
                if error is not None or not words.any():
                    self._ends.setdefault(piece.request_id, {})[index] = error
            tokens.append(chosen(known[: spec.position], digests, spec, words))
        return tokens
