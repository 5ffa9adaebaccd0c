"""Engines over the hash model, with or without overlap, that live through the same history of messages."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from random import Random

from graftwork.engine.core.events import (
    FinishReason,
)
from graftwork.engine.core.requests import (
    AdapterUse,
    EngineRequest,
    GrammarKind,
    GrammarSource,
    ServiceTier,
    SessionKey,
    SessionUse,
)
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.session_commands import SessionCommand, SessionVerb, ToolWait
from graftwork.engine.messages import (
    ForgetAdapter,
    ForgetDomain,
    Message,
    RunSessionCommand,
)
from graftwork.platform.ids import IsolationDomain, RequestId
from tests.engine.hash_engine import ADAPTERS, SMALL_ADAPTERS, HashEngine, Setting
from tests.engine.hash_model import (
    CONTEXT,
    PAGE,
    Answer,
    Tokens,
    answer_to,
)

OWNERS = (b"x", b"y")
TIERS = (ServiceTier.DEFAULT, ServiceTier.DEFAULT, ServiceTier.FLEX, ServiceTier.PRIORITY)
GRAMMARS = ("2:1:5", "3:0:4", "2:3:3", "5:2:9", "3:9:2")


class History:
    """One history of messages, for any number of engines."""

    def __init__(self, setting: Setting, overlaps: Sequence[bool] = (True, False)) -> None:
        self.engines = [HashEngine(setting, overlaps=one) for one in overlaps]
        self._setting = setting
        self.answers: dict[RequestId, Answer] = {}
        self._turns: dict[tuple[bytes, str], Tokens] = {}
        self._adapters: dict[tuple[bytes, str], tuple[AdapterUse, ...]] = {}
        """The adapters with which a session mostly goes on."""

    def _each(self, act: Callable[[HashEngine], object]) -> None:
        for engine in self.engines:
            act(engine)

    def submit(self, number: int) -> None:
        """Submits a request: the next turn of a session, or one without a session."""
        random = Random(number)
        owner = random.choice(OWNERS)
        self._submit(random, owner, f"s{random.randrange(3)}" if random.random() < 0.6 else None)

    def _submit(
        self, random: Random, owner: bytes, session: str | None, numbers: Collection[int] | None = None
    ) -> None:
        """`numbers` are those of the request's adapters; None leaves them to chance."""
        name = RequestId(f"r{len(self.answers)}")
        history = self._turns.get((owner, session or ""), ())
        prompt = (*history, *(random.randrange(3, 5) for _ in range(random.randint(1, 5))))
        prompt = prompt if len(prompt) < CONTEXT else prompt[: random.randint(1, 5)]
        chosen = {random.choice(self._setting.adapters) for _ in range(random.choice((0, 0, 1, 1)))}
        chosen |= {random.choice(SMALL_ADAPTERS) for _ in range(random.choice((0, 0, 1)))}
        adapters = tuple(map(AdapterUse, sorted(f"adapter-{one}" for one in (numbers or chosen))))
        if session is not None and random.random() < 0.7:
            adapters = self._adapters.setdefault((owner, session), adapters)
        request = EngineRequest(
            name,
            prompt,
            _sampling(random),
            IsolationDomain(owner),
            adapters,
            tier=random.choice(TIERS),
            session=None if session is None else SessionUse(SessionKey(session), len(history)),
            grammar=GrammarSource(GrammarKind.REGEX, random.choice(GRAMMARS)) if random.random() < 0.3 else None,
        )
        self.answers[name] = answer = answer_to(request)
        if random.random() < 0.3:
            expected = [token if random.random() < 0.9 else 7 for token in answer.token_ids]
            request = replace(request, prediction_token_ids=tuple(expected))
        if session is not None and answer.end in (FinishReason.STOP, FinishReason.LENGTH):
            self._turns[owner, session] = (*prompt, *answer.token_ids)
        if random.random() < 0.3:  # an earlier run has generated a part of the answer, or all of it
            request = replace(request, emitted_token_ids=answer.token_ids[: random.randint(0, len(answer.token_ids))])
        self._each(lambda engine: engine.submit(request))

    def crowd(self, number: int) -> None:
        """Lets requests with small adapters come one after another, and one whose adapter needs a long run of frames."""
        random = Random(number)
        for _ in range(4):
            self._submit(random, random.choice(OWNERS), None, random.sample(SMALL_ADAPTERS, 2))
            self.finish_load(number)
            self.finish_load(number)
            self.step(0)
        self._submit(random, random.choice(OWNERS), None, [self._setting.adapters[-1 - number % 5]])
        self.finish_load(number)

    def step(self, number: int) -> None:
        for _ in range(1 + number % 3):
            self._each(lambda engine: engine.step())

    def cancel(self, number: int) -> None:
        if number % 9 == 0:
            self._each(lambda engine: engine.cancel_all())
        elif self.answers:
            name = list(self.answers)[-1 - number % min(len(self.answers), 6)]
            self._each(lambda engine: engine.cancel(name))

    def finish_copy(self, number: int) -> None:
        self._each(lambda engine: engine.finish_copy(number // 4, number // 4 % 2 if number % 4 == 0 else None))

    def announce(self, number: int) -> None:
        self._each(lambda engine: engine.announce(number))

    def finish_load(self, number: int) -> None:
        self._each(lambda engine: engine.finish_load(number))

    def command(self, number: int) -> None:
        """Runs a command on a session's KV."""
        if self._turns:
            owner, session = sorted(self._turns)[number % len(self._turns)]
            self._command(owner, session, list(SessionVerb)[number // 7 % len(SessionVerb)])

    def _command(self, owner: bytes, session: str, verb: SessionVerb) -> None:
        waits = (ToolWait("search"),) if verb is SessionVerb.HOLD else ()
        tokens, adapters = self._turns[owner, session], self._adapters.get((owner, session), ())
        command = SessionCommand(verb, SessionKey(session), IsolationDomain(owner), adapters, tokens, waits=waits)
        self._each(lambda engine: engine.loop.take(RunSessionCommand(command, lambda memory: None)))

    def resume(self, number: int) -> None:
        """Moves a session's KV to the host, and submits the next turn, whose load is then read layer by layer."""
        long_enough = [key for key, tokens in self._turns.items() if 2 * PAGE < len(tokens) < CONTEXT - 1]
        if long_enough:
            owner, session = sorted(long_enough)[number % len(long_enough)]
            self._command(owner, session, SessionVerb.SUSPEND)
            for _ in range(4):
                self.step(0)
                self.finish_copy(1)
            self._submit(Random(number), owner, session)
            self.step(0)
            self.announce(number)
            self.step(number)

    def forget(self, number: int) -> None:
        """Forgets an adapter or a domain."""
        message: Message = ForgetAdapter(f"adapter-{ADAPTERS[number % len(ADAPTERS)]}")
        if number % 5 == 0:
            message = ForgetDomain(IsolationDomain(OWNERS[number // 5 % 2]))
        self._each(lambda engine: engine.loop.take(message))

    def wait(self, number: int) -> None:
        self._each(lambda engine: engine.cache.clock.advance(number % 80 / 10))

    def end(self) -> None:
        """Ends all requests. Asserts that each got the answer that the model gives it alone."""
        self._each(lambda engine: engine.drain())
        for engine in self.engines:
            wrong = engine.courses_differ_from(self.answers)
            assert not wrong, "\n".join(wrong)


def _sampling(random: Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=random.choice((0, 1, 2, 5, 9, 12)),
        seed=random.randrange(1000),
        min_tokens=random.choice((0, 0, 3)),
        stop_token_ids=random.choice(((), (), (2, 5))),
        ignore_eos=random.random() < 0.2,
        presence_penalty=random.choice((0.0, 0.0, 0.5)),
        repetition_penalty=random.choice((1.0, 1.0, 1.0, 1.5)),
        prompt_logprobs=random.choice((None,) * 6 + (0,)),
    )
