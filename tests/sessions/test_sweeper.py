"""Tests of the sweep, which deletes every row of a session past its time to live and no other."""

from random import Random

import pytest
from sqlalchemy import text

from graftwork.engine.core.requests import SessionKey
from graftwork.engine.core.session_commands import SessionVerb
from graftwork.platform.errors import LimitExceeded, NotFound
from graftwork.platform.ids import SessionId
from graftwork.platform.pagination import Order, PageRequest
from graftwork.platform.tenancy.principals import Principal
from graftwork.sessions.core.session import AgentSession, TurnStatus
from graftwork.sessions.service import NewSession
from graftwork.sessions.store import deletion_rows
from tests.sessions.session_process import WEATHER, Answer, SessionProcess, call, crash, new_principal

TABLES = ("sessions", "turns", "checkpoints", "items", "tool_calls", "events")
DAY = 86_400.0
ALL_ITEMS = PageRequest(limit=1000, after=None, order=Order.ASCENDING)


@pytest.fixture
async def process(process_on_either: SessionProcess) -> SessionProcess:
    """A process on SQLite, then one on PostgreSQL: every test of the sweep runs on both."""
    return process_on_either


async def rows(process: SessionProcess, tenant: Principal | None = None) -> dict[str, int]:
    """Count the rows of each table, of one tenant or of all."""
    where = "" if tenant is None else f" WHERE tenant_id = '{tenant.tenant_id}'"
    async with process.database.read() as database:
        return {table: await database.scalar(text(f"SELECT count(*) FROM {table}{where}")) or 0 for table in TABLES}


async def opened(process: SessionProcess, me: Principal, ttl_s: float | None = 60.0) -> AgentSession:
    return await process.service.create(me, NewSession("tiny", retention_s=ttl_s))


async def say(process: SessionProcess, me: Principal, session: AgentSession, words: str = "Hi") -> str:
    """Run one turn, and return its checkpoint."""
    turn = await (await process.service.start_turn(me, session.session_id, words)).result()
    assert turn.checkpoint_id is not None
    return turn.checkpoint_id


async def history(process: SessionProcess, me: Principal, session_id: str) -> list[str]:
    page = await process.service.items(me, session_id, ALL_ITEMS)
    return [item.body["content"][0]["text"] for item in page.items]


async def test_a_closed_session_is_deleted_with_all_its_rows(process: SessionProcess) -> None:
    """A session keeps all rows until its time to live ends, and none after it; other sessions keep theirs."""
    me, other = new_principal(), new_principal()
    session = await process.session(me, tools=(WEATHER,))
    process.will_say(call("get_weather", city="Paris"), "Sunny.", "Hello.")
    turn = await (await process.service.start_turn(me, session.session_id, "Weather?")).result()
    outputs = [{"call_id": turn.output[-1].call_id, "output": "20 degrees"}]
    answer = await process.service.tool_outputs.send(me, session.session_id, outputs)
    assert answer.turn is not None
    await answer.turn.result()
    await say(process, other, await opened(process, other, ttl_s=None))
    await process.service.close_session(me, session.session_id)
    full, others = await rows(process, me), await rows(process, other)

    process.clock.advance(30 * DAY - 1)
    early = await process.service.sweep()
    before = await rows(process, me)
    process.clock.advance(1)
    late = await process.service.sweep()

    assert all(full.values())
    assert (early, before) == (0, full)
    assert (late, set((await rows(process, me)).values())) == (1, {0})
    assert await rows(process, other) == others


async def test_an_unused_open_session_is_deleted(process: SessionProcess) -> None:
    """A time to live counts from the last change; without one, or with 0, an open session stays for ever."""
    me = new_principal()
    limited, lasting, at_once = [await opened(process, me, ttl_s) for ttl_s in (60.0, None, 0.0)]
    process.clock.advance(59)
    await say(process, me, limited)
    process.clock.advance(59)

    swept = [await process.service.sweep()]
    still_there = await process.load(me, limited.session_id)
    process.clock.advance(1)
    with pytest.raises(NotFound):
        await process.load(me, limited.session_id)
    swept.append(await process.service.sweep())
    process.clock.advance(400 * DAY)
    swept.append(await process.service.sweep())

    assert still_there.head_id is not None
    assert swept == [0, 1, 0]
    left = await process.service.list_sessions(me, ALL_ITEMS)
    assert [session.session_id for session in left.items] == [lasting.session_id, at_once.session_id]
    await process.service.close_session(me, at_once.session_id)
    assert await process.service.sweep() == 1


async def test_the_engine_frees_the_kv_of_a_deleted_session(process: SessionProcess) -> None:
    """The engine is told once to free the KV of the session's tokens, in its tenant's domain."""
    me = new_principal()
    session = await opened(process, me)
    await say(process, me, session)
    (request,) = process.engine.requests
    history = [*request.prompt_token_ids, *process.engine.said[request.request_id]]

    process.clock.advance(60)
    process.engine.session_commands.clear()
    assert await process.service.sweep() == 1
    await process.service.sweep()

    (command,) = process.engine.session_commands
    assert (command.verb, command.session) == (SessionVerb.CLOSE, SessionKey(session.session_id))
    assert (command.domain, list(command.token_ids)) == (request.domain, history)


async def test_a_running_turn_is_never_swept(process: SessionProcess) -> None:
    """A session with a running turn stays, and its time to live starts again at the turn's end."""
    me = new_principal()
    session = await opened(process, me)
    process.will_say(Answer(waits=True))
    running = await process.service.start_turn(me, session.session_id, "Hi")
    await process.engine.half_way.wait()
    process.clock.advance(DAY)

    swept = await process.service.sweep()
    process.engine.go_on()
    ended = await running.result()
    process.clock.advance(59)

    assert (swept, ended.status) == (0, TurnStatus.COMPLETED)
    assert await process.service.sweep() == 0
    assert await history(process, me, session.session_id) == ["Hi", "ok"]


async def test_an_interrupted_session_is_deleted(process: SessionProcess) -> None:
    """A session with an interrupted turn is deleted once its lease and its time to live have passed."""
    me = new_principal()
    session = await opened(process, me)
    process.will_say(Answer(waits=True))
    await process.service.start_turn(me, session.session_id, "Hi")
    await process.engine.half_way.wait()
    await crash()
    after = process.restarted(owner="second")
    process.clock.advance(DAY)

    swept = [await after.service.sweep()]
    process.clock.advance(60)
    swept.append(await after.service.sweep())

    assert swept == [0, 1]
    assert set((await rows(process, me)).values()) == {0}


async def test_a_fork_keeps_the_rows_that_it_shares(process: SessionProcess) -> None:
    """A deleted session keeps the rows that its forks share; they go with the last fork."""
    me = new_principal()
    parent = await opened(process, me)
    first = await say(process, me, parent, "One")
    await say(process, me, parent, "Two")
    (fork,) = await process.service.fork(me, parent.session_id, first)
    await process.service.change(me, fork.session_id, metadata={"is": "the fork"})
    await say(process, me, fork, "Three")
    process.clock.advance(30)
    await say(process, me, fork, "Four")
    process.clock.advance(30)

    num_deleted = await process.service.sweep()
    with pytest.raises(NotFound):
        await process.load(me, parent.session_id)
    kept = await rows(process, me)
    await say(process, me, fork, "Five")

    assert num_deleted == 0  # the parent's row stays, as it owns the rows that its fork shares
    assert (kept["checkpoints"], kept["turns"], kept["items"]) == (3, 3, 6)
    assert await history(process, me, fork.session_id) == ["One", "ok", "Three", "ok", "Four", "ok", "Five", "ok"]
    prompt = process.engine.requests[-1].prompt_token_ids
    assert prompt[: len(process.engine.requests[0].prompt_token_ids)] == process.engine.requests[0].prompt_token_ids
    assert await process.service.sweep() == 0
    process.clock.advance(60)
    assert await process.service.sweep() == 2
    assert set((await rows(process, me)).values()) == {0}


async def test_a_grandchild_keeps_the_ground_of_its_parents(process: SessionProcess) -> None:
    """Several deleted sessions may each keep their part of a fork's history."""
    me = new_principal()
    sessions = [await opened(process, me, ttl_s=0.0)]
    for generation in range(3):
        checkpoint = await say(process, me, sessions[-1], f"Generation {generation}")
        await say(process, me, sessions[-1], "An aside")
        sessions += await process.service.fork(me, sessions[-1].session_id, checkpoint)
    for session in sessions[:-1]:
        await process.service.close_session(me, session.session_id)

    num_deleted = await process.service.sweep()

    assert (num_deleted, (await rows(process, me))["checkpoints"]) == (0, 3)
    told = [words for words in await history(process, me, sessions[-1].session_id) if words != "ok"]
    assert told == ["Generation 0", "Generation 1", "Generation 2"]
    await process.service.close_session(me, sessions[-1].session_id)
    assert await process.service.sweep() == 4


async def test_an_interrupted_sweep_is_finished_by_the_next(process: SessionProcess) -> None:
    """The next sweep completes a deletion that a crash has stopped after any transaction."""
    me = new_principal()
    for steps in range(4):
        session = await opened(process, me)
        await say(process, me, session)
        await half_removed(process, me, session.session_id, steps)

    num_deleted = await process.service.sweep()

    assert num_deleted == 4
    assert set((await rows(process, me)).values()) == {0}


async def test_events_left_by_a_crash_go_though_a_fork_keeps_the_rest(process: SessionProcess) -> None:
    """The next sweep deletes the events of a stopped deletion even if forks need all checkpoints."""
    me = new_principal()
    parent = await opened(process, me)
    await say(process, me, parent)
    await process.service.fork(me, parent.session_id)
    await half_removed(process, me, parent.session_id, 1)

    await process.service.sweep()

    left = await rows(process, me)
    assert (left["events"], left["checkpoints"], left["sessions"]) == (0, 1, 2)


async def half_removed(process: SessionProcess, me: Principal, session_id: SessionId, steps: int) -> None:
    """Stop a deletion after some of its transactions, at least the first."""
    scope = me.scope()
    async with process.database.write() as database:
        await deletion_rows.mark_expired(database, scope, session_id)
        if steps > 0:
            await deletion_rows.delete_events(database, scope, session_id, 1)
        if steps > 1:
            await deletion_rows.delete_events(database, scope, session_id, 1000)
        if steps > 2:
            await deletion_rows.delete_checkpoints(database, scope, session_id, 1000)


async def test_expired_sessions_are_not_open_ones(process: SessionProcess) -> None:
    """An expired session that its forks share is neither counted nor listed."""
    me = new_principal()
    parent = await opened(process, me)
    await say(process, me, parent)
    (fork,) = await process.service.fork(me, parent.session_id)
    await process.service.close_session(me, parent.session_id)
    process.clock.advance(30)
    await say(process, me, fork)
    process.clock.advance(30)
    await process.service.sweep()
    process.quotas.limit = 2

    await opened(process, me)

    listed = await process.service.list_sessions(me, ALL_ITEMS)
    assert [session.session_id for session in listed.items][:1] == [fork.session_id]
    assert len(listed.items) == 2


async def test_expired_sessions_do_not_count_before_the_sweep(process: SessionProcess) -> None:
    """A session past its time to live does not count against the limit; others do."""
    me = new_principal()
    process.quotas.limit = 1
    await opened(process, me)
    process.clock.advance(59)
    with pytest.raises(LimitExceeded):
        await opened(process, me)
    process.clock.advance(1)

    await opened(process, me)


async def test_lists_leave_out_expired_sessions(process: SessionProcess) -> None:
    """A page of sessions is full even if sessions in between are past their time to live."""
    me = new_principal()
    living = [await opened(process, me, ttl_s=None), await opened(process, me, ttl_s=0.0)]
    over = [await opened(process, me) for _ in range(3)]
    (fork,) = await process.service.fork(me, over[0].session_id)
    living += [await opened(process, me, ttl_s=90.0)]
    await process.service.close_session(me, over[1].session_id)
    process.clock.advance(30)
    await say(process, me, fork)
    process.clock.advance(30)

    async def pages() -> list[str]:
        found, page = list[AgentSession](), PageRequest(limit=1)
        while (listed := await process.service.list_sessions(me, page)).items:
            found += listed.items
            page = PageRequest(limit=1, after=found[-1].session_id)
        return [session.session_id for session in found]

    before = await pages()
    await process.service.sweep()

    assert before == await pages() == sorted((session.session_id for session in (*living, fork)), reverse=True)


@pytest.mark.parametrize("seed", range(3))
async def test_no_sweep_deletes_needed_rows(process: SessionProcess, seed: int) -> None:
    """Each session keeps its whole history after forks, rewinds, closes and sweeps in any order."""
    random, me = Random(seed), new_principal()
    said: dict[str, dict[str, list[str]]] = {}
    """The texts up to each checkpoint, by session and checkpoint."""
    heads: dict[str, str] = {}

    async def talk(session_id: str) -> None:
        words = f"word {len(process.engine.requests)}"
        before = said[session_id].get(heads.get(session_id, ""), [])
        turn = await (await process.service.start_turn(me, session_id, words)).result()
        assert turn.checkpoint_id is not None
        said[session_id][turn.checkpoint_id] = [*before, words, "ok"]
        heads[session_id] = turn.checkpoint_id

    for _ in range(50):
        alive = sorted(heads)
        step = random.choice(["open", "talk", "talk", "talk", "fork", "fork", "rewind", "close", "close", "sweep"])
        if step == "open" or not alive:
            session = await opened(process, me, ttl_s=0.0)
            said[session.session_id] = {}
            await talk(session.session_id)
            continue
        chosen = random.choice(alive)
        reachable = sorted(said[chosen])
        match step:
            case "fork":
                at = random.choice(reachable)
                (fork,) = await process.service.fork(me, chosen, at)
                words = said[chosen][at]
                said[fork.session_id] = {
                    checkpoint: upto for checkpoint, upto in said[chosen].items() if words[: len(upto)] == upto
                }
                heads[fork.session_id] = at
            case "talk":
                await talk(chosen)
            case "rewind":
                heads[chosen] = random.choice(reachable)
                await process.service.rewind(me, chosen, heads[chosen])
            case "close":
                await process.service.close_session(me, chosen)
                del heads[chosen]
            case "sweep":
                await process.service.sweep()
                for session_id, head in heads.items():
                    assert await history(process, me, session_id) == said[session_id][head]

    for session_id in heads:
        await process.service.close_session(me, session_id)
    await process.service.sweep()
    assert set((await rows(process, me)).values()) == {0}
