"""Runs the demo (`graftwork demo`) on the demo model, and checks the statements that the README makes about Graftwork.

1. Three tenants and the base model talk at once, and each session calls tools.
2. One session is forked, and the two forks ask different questions.
3. The server is stopped and started, and a session continues from its stored history.

Owns the steps and the checked statements. Never prints anything except through `report.py`.
"""

import asyncio
import json
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from graftwork.api.cli.console.signals import run_and_clean_up
from graftwork.api.cli.demo.conversation import Exchange, Talk
from graftwork.api.cli.demo.report import Claim, Report, share_of, show_exchanges, show_report, show_step
from graftwork.api.cli.demo.script import ask_for, asks_for, schemas_for
from graftwork.api.cli.demo.server import DemoServer, ServerFailed
from graftwork.api.sdk.client import AsyncGraftwork
from graftwork.api.sdk.transport.errors import ConfigurationError
from graftwork.platform.answers.sessions import Item
from graftwork.platform.clock import Clock, SystemClock

SAME_QUESTION = ask_for("get_weather", "a question that is asked twice")
GREEDY = {"temperature": 0, "max_tokens": 160}
REQUIRED_SHARE = 0.75
"""The share of tool calls that must be right, from 0 to 1.

The model is small and has never seen the words, so it makes mistakes even if the server works correctly.
"""


def tell_story(as_json: bool) -> bool:
    """Runs the demo and prints its report. Returns whether every checked statement was true.

    Raises ConfigurationError if the server cannot start.
    """
    report = run_and_clean_up(_tell(quiet=as_json))
    show_report(report, as_json)
    return report.holds


async def _tell(quiet: bool) -> Report:
    clock = SystemClock()
    started_at = clock.monotonic()
    with tempfile.TemporaryDirectory(prefix="graftwork-demo-") as folder:
        async with _running(DemoServer(Path(folder))) as server:
            story = Story(server, clock, quiet)
            await story.talk_at_once()
            await story.fork()
            await story.restart()
            return Report(tuple(story.talks), tuple(story.claims), story.max_adapters, clock.monotonic() - started_at)


@asynccontextmanager
async def _running(server: DemoServer) -> AsyncGenerator[DemoServer, None]:
    try:
        await server.start()
        yield server
    except ServerFailed as failure:
        raise ConfigurationError(str(failure)) from failure
    finally:
        await server.stop()


class Story:
    """Runs the three steps of the demo (see the top of this file).

    Collects the conversations, and the statements that the demo checks, which are called claims.
    """

    def __init__(self, server: DemoServer, clock: Clock, quiet: bool) -> None:
        self.talks: list[Talk] = []
        self.claims: list[Claim] = []
        self.max_adapters: int | None = None
        self._server = server
        self._clock = clock
        self._quiet = quiet
        self._keys: dict[str, str] = {}

    async def talk_at_once(self) -> None:
        """Runs step 1 of the demo: three tenants and the base model talk at once, and their sessions call tools."""
        self._step(1, "Three tenants, each with an adapter of its own, and the base model: all at once.")
        async with AsyncExitStack() as stack:
            await self._open_talks(stack)
            await asyncio.gather(*[talk.say_all(asks_for(talk.job)) for talk in self.talks])
            self.max_adapters = await self._read_max_adapters()
        for talk in self.talks:
            self._show(talk.label, talk, since=0)
        self._check_talks()

    async def fork(self) -> None:
        """Runs step 2 of the demo: forks a session, and asks the two forks different questions."""
        trunk = self.talks[0]
        self._step(2, f"{trunk.label} is forked: two branches of one past ask different things.")
        async with self._client(self._keys[trunk.label]) as client:
            session = await client.sessions.get(trunk.session.id)
            sessions = await session.fork(count=2)
            names = ("left", "right")
            branches = [
                Talk(f"{trunk.label}, {name}", trunk.job, branch, self._clock)
                for name, branch in zip(names, sessions, strict=True)
            ]
            await asyncio.gather(
                branches[0].say_all([SAME_QUESTION]),
                branches[1].say_all([ask_for("get_time", "right")]),
            )
            past = [_said(item) for item in await session.items(limit=100)]
            futures = [[_said(item) for item in await branch.items(limit=100)] for branch in sessions]
        for branch in branches:
            self._show(branch.label, branch, since=0)
        self.talks += branches
        self._check_fork(branches)
        shared = all(future[: len(past)] == past for future in futures)
        self._claim("both branches begin with all that was said in their trunk", shared, f"{len(past)} items")

    async def restart(self) -> None:
        """Runs step 3 of the demo: restarts the server, and continues a session from its stored history."""
        talk, branch = self.talks[0], self.talks[-2]
        self._step(3, "The server is stopped and started; a session goes on from its stored transcript.")
        await self._server.stop()
        await self._server.start()
        seen = len(talk.exchanges)
        async with self._client(self._keys[talk.label]) as client:
            talk.session = await client.sessions.get(talk.session.id)
            await talk.say_all([SAME_QUESTION, ask_for("get_time", "after the restart")])
        self._show(talk.label, talk, since=seen)
        self._check_restart(talk, seen, branch)

    async def _open_talks(self, stack: AsyncExitStack) -> None:
        """Creates one session for each tenant on its adapter, and one session on the base model."""
        for tenant, key in self._server.keys().items():
            client = await stack.enter_async_context(self._client(key))
            adapters = [adapter.name for adapter in await client.adapters.list()]
            jobs = ["base", *adapters] if not self.talks else adapters
            for job in jobs:
                base = next(iter(await client.models.list())).id
                session = await client.sessions.create(
                    model=base if job == "base" else job, tools=schemas_for(job), sampling=GREEDY
                )
                label = f"{tenant} · {base if job == 'base' else job}"
                self._keys[label] = key
                self.talks.append(Talk(label, job, session, self._clock))

    async def _read_max_adapters(self) -> int | None:
        async with AsyncGraftwork(self._server.url, admin_key=self._server.admin_key()) as admin:
            counts = [replica.max_adapters_in_a_step for replica in await admin.admin.replicas()]
        return max((count for count in counts if count is not None), default=None)

    def _client(self, key: str) -> AsyncGraftwork:
        return AsyncGraftwork(self._server.url, key)

    def _check_talks(self) -> None:
        exchanges = [(talk, exchange) for talk in self.talks for exchange in talk.exchanges]
        answered = [bool(exchange.answer.strip()) for _, exchange in exchanges]
        called = [_is_well_called(exchange.results) for _, exchange in exchanges if exchange.ask.tool]
        in_voice = [talk.is_in_voice(exchange) for talk, exchange in exchanges if exchange.ask.tool]
        adapters = len({talk.job for talk in self.talks} - {"base"})
        self._claim("every request was answered", all(answered), share_of(answered))
        self._claim("tools were called with arguments that fit", _enough(called), share_of(called))
        self._claim("answers are, to the letter, in their adapter's own voice", _enough(in_voice), share_of(in_voice))
        shared = self.max_adapters is not None and self.max_adapters >= 2
        self._claim("one step of the model served several adapters", shared, f"{self.max_adapters} of {adapters}")

    def _check_fork(self, branches: Sequence[Talk]) -> None:
        first = [branch.turns[0] for branch in branches]
        shares = [turn.cached_tokens / turn.prompt_tokens if turn.prompt_tokens else 0.0 for turn in first]
        found = ", ".join(f"{share:.0%}" for share in shares)
        self._claim("both branches found their common past in the cache", min(shares) > 0.5, found)

    def _check_restart(self, talk: Talk, seen: int, branch: Talk) -> None:
        """Compares the answer with the answer of a fork, which had the same history and answered before the restart.

        Also checks that the cache contains the session's history again.
        """
        first, second, before = talk.exchanges[seen], talk.exchanges[seen + 1], branch.exchanges[0]
        same = _told(first) == _told(before)
        self._claim(
            "after the restart the session answers, to the letter, as its branch did before", same, first.answer
        )
        turn = second.turns[0]
        share = turn.cached_tokens / turn.prompt_tokens if turn.prompt_tokens else 0.0
        self._claim("its past was computed once and is cached again", share > 0.5, f"{share:.0%} of the next prompt")

    def _claim(self, text: str, holds: bool, found: str) -> None:
        self.claims.append(Claim(text, holds, found))

    def _step(self, number: int, text: str) -> None:
        if not self._quiet:
            show_step(number, text)

    def _show(self, label: str, talk: Talk, since: int) -> None:
        if not self._quiet:
            show_exchanges(label, talk.exchanges[since:])


def _enough(flags: Sequence[bool]) -> bool:
    return bool(flags) and sum(flags) >= REQUIRED_SHARE * len(flags)


def _is_well_called(results: Sequence[tuple[object, str]]) -> bool:
    """Returns whether there was at least one call, and the tools could run every call."""
    return bool(results) and not any("bad call" in str(json.loads(result).get("error", "")) for _, result in results)


def _said(item: Item) -> tuple[str | None, ...]:
    """Returns the content of an item without its ids, to compare it with other items."""
    return item.type, item.role, item.text, item.name, item.arguments, item.output


def _told(exchange: Exchange) -> tuple[object, ...]:
    """Returns the answer and the tool calls of an exchange without their ids, to compare it with other exchanges."""
    return exchange.answer, [(call.name, call.arguments, output) for call, output in exchange.results]
