"""Tests of the session service: turns, from their start to their end."""

import asyncio
import hashlib

import pytest

from graftwork.engine.core.session_commands import SessionMemory
from graftwork.platform.database import Database
from graftwork.platform.errors import (
    CapacityContended,
    Conflict,
    ContextLengthExceeded,
    ValidationFailed,
)
from graftwork.platform.ledger.usage import UsageGroup
from graftwork.platform.pagination import Order, PageRequest
from graftwork.sessions.core.session import SessionSettings, SessionStatus, TurnStatus
from graftwork.sessions.core.views import session_cache_answer, turn_answer
from graftwork.sessions.service import NewSession
from graftwork.sessions.text.messages import Message
from graftwork.sessions.turns.settings import TurnOverrides
from tests.sessions.scripted_engine import description
from tests.sessions.session_process import (
    MAX_ANSWERS,
    WEATHER,
    Answer,
    SessionProcess,
    call,
    new_principal,
    principal,
    types,
)
from tests.sessions.tokenizer_and_templates import prompt_encoder, text_tokenizer


async def test_turn_answers_and_moves_the_head(process: SessionProcess) -> None:
    """A turn ends with the model's message, a checkpoint as the new head, and correct figures."""
    me = principal()
    session = await process.session(me, instructions="Be brief.")
    process.will_say("Hello there")

    turn = await (await process.service.start_turn(me, session.session_id, "Hi")).result()

    body = turn_answer(turn).body()
    after = await process.load(me, session.session_id)
    assert body["status"] == "completed"
    assert body["output"][0]["content"] == [{"type": "output_text", "text": "Hello there", "annotations": []}]
    assert after.head_id == turn.checkpoint_id
    assert after.status is SessionStatus.IDLE
    details = body["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] + details["recomputed_tokens"] == body["usage"]["prompt_tokens"]
    assert body["usage"]["prompt_tokens"] == len(process.engine.requests[0].prompt_token_ids)
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
    assert body["cache"]["miss_reason"] is None
    absent = session_cache_answer(after, None, 0.0).body()
    assert absent["tiers"]["device"] == {"tokens": 4, "bytes": None}
    there = session_cache_answer(after, SessionMemory(host_tokens=16, host_bytes=100, lease_s=2.0), 1000.0).body()
    assert there["tiers"]["host"] == {"tokens": 16, "bytes": 100}
    assert there["lease"] == {"tier": "device", "seconds": 2.0, "until": 1002.0}


async def test_second_prompt_continues_the_first_bit_for_bit(process: SessionProcess) -> None:
    """The second turn's prompt is the first prompt, the model's own tokens, and then the new items."""
    me = principal()
    session = await process.session(me)
    process.will_say("Hello  there")  # two spaces: another tokenizer's choice would show

    await (await process.service.start_turn(me, session.session_id, "Hi")).result()
    await (await process.service.start_turn(me, session.session_id, "Again")).result()

    first, second = (request.prompt_token_ids for request in process.engine.requests)
    generated = (*text_tokenizer().encode("Hello  there", allow_special=True), *_end())
    delta = prompt_encoder().encode_delta(Message("assistant", "Hello  there"), [Message("user", "Again")], closed=True)
    assert second == (*first, *generated, *delta)


async def test_answer_that_was_cut_off_is_closed_by_the_next_prompt(process: SessionProcess) -> None:
    """After an answer cut at its token limit, the next prompt closes it, and its item is `incomplete`."""
    me = principal()
    session = await process.session(me)
    process.will_say(Answer("Once upon", ends=False))

    turn = await (await process.service.start_turn(me, session.session_id, "Tell")).result()
    await (await process.service.start_turn(me, session.session_id, "Go on")).result()

    assert turn.finish_reason == "length"
    assert turn.output[0].body["status"] == "incomplete"
    first, second = (request.prompt_token_ids for request in process.engine.requests)
    written = text_tokenizer().decode(second[len(first) :], skip_special_tokens=False)
    assert written.startswith("Once upon<|im_end|>\n<|im_start|>user\nGo on<|im_end|>")


async def test_events_of_a_turn(process: SessionProcess) -> None:
    """The events start with turn.created, contain the answer, end with one terminal event and count from 1."""
    me = principal()
    session = await process.session(me)
    process.will_say("Hello there")

    running = await process.service.start_turn(me, session.session_id, "Hi")
    live = [event async for event in running.events()]

    assert [event.seq for event in live] == list(range(1, len(live) + 1))
    assert types(live)[0] == "turn.created"
    assert types(live)[-1] == "turn.completed"
    assert "".join(event.fields.get("delta", "") for event in live) == "Hello there"
    assert live == await process.events(me, session.session_id)
    assert live[0].data().keys() == {"type", "seq", "session_id", "turn_id", "cache"}
    assert live[-1].data()["checkpoint_id"] == (await running.result()).checkpoint_id


async def test_second_turn_while_one_runs(process: SessionProcess) -> None:
    """A session runs one turn at a time."""
    me = principal()
    session = await process.session(me)
    process.will_say(Answer(waits=True))

    running = await process.service.start_turn(me, session.session_id, "Hi")
    await process.engine.half_way.wait()
    with pytest.raises(Conflict) as caught:
        await process.service.start_turn(me, session.session_id, "Hi again")
    process.engine.go_on()

    assert caught.value.details == {"turn_id": running.turn_id}
    assert (await running.result()).status is TurnStatus.COMPLETED


async def test_turns_that_start_at_once(process_on_either: SessionProcess) -> None:
    """Of several turns that start at once exactly one runs, and the others get a refund."""
    process = process_on_either
    me = principal()
    session = await process.session(me)
    process.will_say(Answer(waits=True))

    started = await asyncio.gather(
        *(process.service.start_turn(me, session.session_id, "Hi") for _ in range(4)), return_exceptions=True
    )
    await process.engine.half_way.wait()
    process.engine.go_on()

    running = [turn for turn in started if not isinstance(turn, BaseException)]
    assert len(running) == 1
    assert all(isinstance(turn, Conflict) for turn in started if turn is not running[0])
    await running[0].result()
    assert [reservation.settled is None for reservation in process.quotas.reservations].count(False) == 1
    assert all(
        reservation.settled is not None or reservation.is_refunded for reservation in process.quotas.reservations
    )


async def test_if_head(process: SessionProcess) -> None:
    """A turn with an old `if_head` is refused, and the error tells the present head."""
    me = principal()
    session = await process.session(me)
    turn = await (await process.service.start_turn(me, session.session_id, "Hi")).result()

    with pytest.raises(Conflict) as caught:
        await process.service.start_turn(me, session.session_id, "Hi", if_head="ckp_other")
    await (await process.service.start_turn(me, session.session_id, "Hi", if_head=turn.checkpoint_id)).result()

    assert caught.value.details == {"head": turn.checkpoint_id}


async def test_cancel(process: SessionProcess) -> None:
    """A cancel ends the turn and the engine's request, and the head stays."""
    me = principal()
    session = await process.session(me)
    await (await process.service.start_turn(me, session.session_id, "Hi")).result()
    head = (await process.load(me, session.session_id)).head_id
    process.will_say(Answer("A long story", waits=True))

    running = await process.service.start_turn(me, session.session_id, "Tell")
    await process.engine.half_way.wait()
    after = await process.service.cancel(me, session.session_id)

    assert (await running.result()).status is TurnStatus.CANCELLED
    assert (after.status, after.head_id) == (SessionStatus.IDLE, head)
    assert process.engine.cancelled == [running.turn_id]
    assert types(await process.events(me, session.session_id))[-1] == "turn.cancelled"
    assert (await process.service.cancel(me, session.session_id)).status is SessionStatus.IDLE


async def test_cancelled_turn_is_charged_for_generated_tokens(process: SessionProcess) -> None:
    """A cancelled turn is charged for its prompt and the tokens generated before the cancel."""
    me = new_principal()
    session = await process.session(me)
    process.will_say(Answer("A long story", waits=True))

    await process.service.start_turn(me, session.session_id, "Tell")
    await process.engine.half_way.wait()
    await process.service.cancel(me, session.session_id)

    made = (len(text_tokenizer().encode("A long story", allow_special=True)) + 1) // 2
    rows = await process.meter.summarise(me.tenant_id, 0.0, 1e12, UsageGroup.SESSION)
    assert [(row.group, row.requests, row.completion_tokens) for row in rows] == [(session.session_id, 1, made)]
    assert process.quotas.reservations[0].settled == len(process.engine.requests[0].prompt_token_ids) + made


async def test_turn_continues_without_its_reader(process: SessionProcess) -> None:
    """A turn continues when its reader leaves, and a reader that comes back misses nothing."""
    me = principal()
    session = await process.session(me)
    process.will_say(Answer("A long story", waits=True))

    running = await process.service.start_turn(me, session.session_id, "Tell")
    reader = running.events()
    first = await anext(reader)
    await reader.aclose()
    await process.engine.half_way.wait()
    process.engine.go_on()

    assert (await running.result()).status is TurnStatus.COMPLETED
    rest = await process.events(me, session.session_id, after=first.seq)
    assert [first, *rest] == await process.events(me, session.session_id)


async def test_readers_follow_a_running_turn(process: SessionProcess) -> None:
    """Readers that start at different times see the same events to the end."""
    me = principal()
    session = await process.session(me)
    process.will_say(Answer("A long story", waits=True))

    await process.service.start_turn(me, session.session_id, "Tell")
    early = asyncio.create_task(process.events(me, session.session_id))
    await process.engine.half_way.wait()
    late = asyncio.create_task(process.events(me, session.session_id))
    await asyncio.sleep(0)
    process.engine.go_on()

    assert await early == await late == await process.events(me, session.session_id)


async def test_refusal_before_admission(process: SessionProcess) -> None:
    """A refusal by the engine is raised by `admitted`, and is the turn's terminal event."""
    me = principal()
    session = await process.session(me)
    process.will_say(Answer(refusal=CapacityContended("The queue is full.", retry_after_s=2.0)))

    running = await process.service.start_turn(me, session.session_id, "Hi")
    with pytest.raises(CapacityContended):
        await running.admitted()

    assert types([event async for event in running.events()]) == ["turn.created", "turn.failed"]
    assert (await running.result()).error == {
        "message": "The queue is full.",
        "type": "overloaded_error",
        "param": None,
        "code": "queue_full",
    }
    assert process.quotas.reservations[0].is_refunded


async def test_a_turn_that_the_engine_has_no_room_for_is_refused_at_once(process: SessionProcess) -> None:
    """With as many answers in flight as the tenant may have, a turn is refused and nothing is stored; its place comes
    back when a turn ends.
    """
    me = principal()
    session = await process.session(me)
    with process.accounting.take_places(me, MAX_ANSWERS), pytest.raises(CapacityContended):
        await process.service.start_turn(me, session.session_id, "Hi")

    running = await process.service.start_turn(me, session.session_id, "Hi")
    assert (await running.result()).status is TurnStatus.COMPLETED
    await process.service.close()

    process.accounting.take_places(me, MAX_ANSWERS)
    page = await process.service.items(me, session.session_id, PageRequest(limit=100, order=Order.ASCENDING))
    assert len(page.items) == 2


async def test_bug_fails_the_turn(process: SessionProcess) -> None:
    """An unexpected error fails the turn, and its text is not shown."""
    me = principal()
    session = await process.session(me)
    process.will_say(Answer(bug=ZeroDivisionError("secret")))

    running = await process.service.start_turn(me, session.session_id, "Hi")
    await running.admitted()
    turn = await running.result()

    assert turn.status is TurnStatus.FAILED
    assert turn.error is not None
    assert turn.error["code"] == "internal_error"
    assert "secret" not in turn.error["message"]
    assert (await process.load(me, session.session_id)).status is SessionStatus.IDLE


async def test_full_context(process: SessionProcess) -> None:
    """A prompt that fills the context is refused with both numbers, and nothing is stored."""
    me = principal()
    session = await process.session(me)

    with pytest.raises(ContextLengthExceeded) as caught:
        await process.service.start_turn(me, session.session_id, "x " * 2048)

    assert caught.value.details["context_tokens"] == 2048
    assert caught.value.details["prompt_tokens"] > 2048
    assert "2048" in caught.value.message
    assert (await process.load(me, session.session_id)).status is SessionStatus.IDLE
    assert process.quotas.reservations == []


async def test_overrides_hold_for_one_turn(process: SessionProcess) -> None:
    """A turn's sampling and tool_choice override the session's for that turn only."""
    me = principal()
    session = await process.session(me, tools=(WEATHER,), sampling={"temperature": 0.5, "max_tokens": 7})
    process.will_say(call("get_weather"))
    only_text = TurnOverrides(tool_choice="none", sampling={"temperature": 0})

    text = await (await process.service.start_turn(me, session.session_id, "Hi", overrides=only_text)).result()
    await (await process.service.start_turn(me, session.session_id, "Hi")).result()

    first, second = (request.sampling for request in process.engine.requests)
    assert (first.temperature, first.max_tokens) == (0, 7)
    assert (second.temperature, second.max_tokens) == (0.5, 7)
    assert text.status is TurnStatus.COMPLETED
    assert "<tool_call>" in text.output[0].text


async def test_turn_keeps_its_provenance(process: SessionProcess) -> None:
    """A turn keeps the digests of weights, template and tokenizer, and the sampling as the engine got it."""
    me = principal()
    session = await process.service.create(
        me, NewSession("graft@1", SessionSettings(sampling={"seed": -1, "stop": "."}))
    )

    turn = await (await process.service.start_turn(me, session.session_id, "Hi")).result()

    noted, encoder = turn.made_with, prompt_encoder()
    assert noted is not None
    assert (noted["base"], noted["adapter"]) == (description().fingerprint, "sha256:1")
    assert noted["template"] == "sha256:" + hashlib.sha256(encoder.template.source.encode()).hexdigest()
    assert noted["tokenizer"] == text_tokenizer().digest
    sent = process.engine.requests[0].sampling
    assert noted["sampling"]["seed"] == sent.seed == (1 << 64) - 1
    assert (noted["sampling"]["max_tokens"], noted["sampling"]["stop"]) == (sent.max_tokens, ["."])


async def test_a_turn_keeps_the_seed_that_was_drawn(process: SessionProcess) -> None:
    """The seed of a turn whose settings name none is the one that the engine got, and each turn has another one."""
    me = principal()
    session = await process.service.create(me, NewSession("graft@1"))

    turns = [await (await process.service.start_turn(me, session.session_id, "Hi")).result() for _ in range(2)]

    noted = [turn.made_with["sampling"]["seed"] for turn in turns if turn.made_with is not None]
    assert noted == [sent.sampling.seed for sent in process.engine.requests]
    assert len(set(noted)) == 2


async def test_tokens_that_the_model_has_not_are_refused(sqlite_database: Database) -> None:
    """A bias for an id outside the vocabulary is refused with the field's name, and the session stays idle."""
    process, me = SessionProcess(sqlite_database), principal()
    session = await process.session(me)
    overrides = TurnOverrides(sampling={"logit_bias": {"1000000": 1}})

    with pytest.raises(ValidationFailed) as caught:
        await process.service.start_turn(me, session.session_id, "hi", overrides=overrides)

    assert caught.value.param == "sampling.logit_bias"
    assert (await process.load(me, session.session_id)).status == session.status


def _end() -> tuple[int, ...]:
    return text_tokenizer().encode("<|im_end|>", allow_special=True)
