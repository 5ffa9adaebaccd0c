"""Tests of the codec between gateway and engine."""

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.core.events import PromptEmbedded, PromptScored, StepsTraced, TokenLogprobs, TokensGenerated
from graftwork.engine.core.pooling import Pooling
from graftwork.engine.core.requests import (
    AdapterUse,
    EngineRequest,
    KvFileKey,
    KvGroupKey,
    KvLimits,
    ServiceTier,
    SessionKey,
)
from graftwork.engine.core.sampling import RollingWindow, SamplingParams
from graftwork.engine.core.session_commands import SessionCommand, SessionVerb
from graftwork.engine.core.stats import EngineStats
from graftwork.engine.core.step_spans import EngineSpan, SpanName
from graftwork.engine.rpc import codec
from graftwork.platform.ids import IsolationDomain, RequestId

token_ids = st.integers(0, 2**31 - 1)
numbers = st.floats(allow_nan=False, allow_infinity=False)
samplings = st.builds(
    SamplingParams,
    max_tokens=token_ids,
    temperature=numbers,
    top_k=st.none() | token_ids,
    top_p=numbers,
    min_p=numbers,
    seed=st.none() | st.integers(0, 2**64 - 1),
    min_tokens=token_ids,
    stop_token_ids=st.lists(token_ids, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    presence_penalty=numbers,
    frequency_penalty=numbers,
    repetition_penalty=numbers,
    logit_bias=st.lists(st.tuples(token_ids, numbers), max_size=3).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
    choice=token_ids,
)


def request(sampling: SamplingParams, **options: Any) -> EngineRequest:
    return EngineRequest(RequestId("req_1"), (1, 2), sampling, IsolationDomain(b"tenant"), **options)


@given(sampling=samplings)
def test_a_request_arrives_as_it_was_sent(sampling: SamplingParams) -> None:
    """Every sampling field arrives unchanged, and None stays None."""
    sent = request(sampling, adapters=(AdapterUse("sha256:a", 0.5),), tier=ServiceTier.FLEX)

    assert codec.request_from_wire(codec.request_to_wire(sent)) == sent


@pytest.mark.parametrize("field", [field.name for field in fields(SamplingParams)])
def test_no_sampling_field_is_left_behind(field: str) -> None:
    """A change of any one field arrives."""
    changed: dict[str, Any] = {"stop_token_ids": (4,), "ignore_eos": True, "logit_bias": ((1, 2.0),)}
    sampling = SamplingParams(**{"max_tokens": 1, field: changed.get(field, 7)})

    arrived = codec.request_from_wire(codec.request_to_wire(request(sampling))).sampling

    assert getattr(arrived, field) == changed.get(field, 7)


@pytest.mark.parametrize("ttl_s", [None, 0.0, 300.0])
def test_the_time_to_keep_a_prompt_arrives(ttl_s: float | None) -> None:
    """The seconds for which a prompt is kept arrive unchanged, and none is not zero."""
    sent = request(SamplingParams(max_tokens=1), cache_ttl_s=ttl_s)

    assert codec.request_from_wire(codec.request_to_wire(sent)).cache_ttl_s == ttl_s


@pytest.mark.parametrize("deadline_s", [None, 0.25])
@pytest.mark.parametrize("uses_lookups", [True, False])
def test_the_deadline_and_the_use_of_lookups_arrive(deadline_s: float | None, uses_lookups: bool) -> None:
    """No deadline is not a deadline of zero, and suspended lookups stay suspended."""
    sent = request(SamplingParams(max_tokens=1), deadline_s=deadline_s, uses_lookups=uses_lookups)

    assert codec.request_from_wire(codec.request_to_wire(sent)) == sent


@given(emitted=st.lists(token_ids).map(tuple))
def test_the_tokens_of_an_earlier_run_arrive(emitted: tuple[int, ...]) -> None:
    """Emitted tokens arrive in order, apart from the prompt and from the prediction."""
    sent = request(SamplingParams(max_tokens=1), emitted_token_ids=emitted, prediction_token_ids=(8, 9))

    assert codec.request_from_wire(codec.request_to_wire(sent)) == sent


@pytest.mark.parametrize("key", [None, KvFileKey(b"k" * 32)])
def test_the_key_of_kv_files_arrives(key: KvFileKey | None) -> None:
    """A request and a session command bring the key, and none is none."""
    sent = request(SamplingParams(max_tokens=1), kv_key=key)
    command = SessionCommand(SessionVerb.HOLD, SessionKey("s"), sent.domain, (), (1, 2), kv_key=key)

    assert codec.request_from_wire(codec.request_to_wire(sent)) == sent
    assert codec.command_from_wire(codec.command_to_wire(command)) == command


@pytest.mark.parametrize(
    "limits",
    [
        KvLimits(),
        KvLimits(0, None),
        KvLimits(None, 5, KvGroupKey(b"g" * 32), 0, 2**60),
        KvLimits(group=KvGroupKey(b"g")),
    ],
)
def test_the_limits_of_kv_arrive(limits: KvLimits) -> None:
    """A request brings its domain's limits and its group's, and no limit is not zero."""
    sent = request(SamplingParams(max_tokens=1), kv_limits=limits)

    assert codec.request_from_wire(codec.request_to_wire(sent)) == sent


@pytest.mark.parametrize("window", [None, RollingWindow(0, 1), RollingWindow(4, 2**30)])
def test_the_window_of_a_session_arrives(window: RollingWindow | None) -> None:
    """A request and a session command bring the rolling window, and none is none."""
    bounds: dict[str, Any] = (
        {} if window is None else {"attention_window": window.window, "attention_sinks": window.sinks}
    )
    sent = request(SamplingParams(max_tokens=1, **bounds))
    command = SessionCommand(SessionVerb.READ, SessionKey("s"), sent.domain, (), (1, 2), window=window)

    assert codec.request_from_wire(codec.request_to_wire(sent)).sampling.rolling_window == window
    assert codec.command_from_wire(codec.command_to_wire(command)) == command


def test_a_key_shows_itself_nowhere() -> None:
    """Neither the text of a request and a command nor the error of a wrong key has the key in it."""
    key = KvFileKey(b"canarykey" + bytes(23))
    shown = [repr(request(SamplingParams(max_tokens=1), kv_key=key)), repr(key), str(key)]
    with pytest.raises(ValueError, match="9 bytes") as refused:
        KvFileKey(b"canarykey")

    assert not any("canary" in text for text in [*shown, str(refused.value)])


def test_a_sampling_field_of_another_version_is_refused() -> None:
    """A sampling field that the engine does not know is refused, because it could change the answer."""
    submit = codec.request_to_wire(request(SamplingParams(max_tokens=1)))
    submit.sampling_json = '{"max_tokens": 1, "typical_p": 0.9}'

    with pytest.raises(ValueError, match="typical_p"):
        codec.request_from_wire(submit)


@pytest.mark.parametrize("field", [field.name for field in fields(EngineStats)])
def test_no_figure_is_left_behind(field: str) -> None:
    """Any figure changed alone changes what arrives."""
    changed: Any = ("sha256:a",) if field.endswith("adapters") else 7
    sent = EngineStats(**{field: changed})

    assert codec.stats_from_wire(codec.stats_to_wire(sent)) == sent != EngineStats()


def test_a_figure_of_another_version_is_ignored() -> None:
    """A figure that the gateway does not know is dropped, and the others arrive."""
    message = codec.stats_to_wire(EngineStats(steps=3))
    message.fields_json = message.fields_json.replace('"steps"', '"unknown": 1, "steps"')

    assert codec.stats_from_wire(message) == EngineStats(steps=3)


@given(
    st.lists(
        st.tuples(token_ids, st.builds(TokenLogprobs, numbers, st.lists(st.tuples(token_ids, numbers)).map(tuple)))
    )
)
def test_tokens_arrive_with_their_logprobs(scored: list[tuple[int, TokenLogprobs]]) -> None:
    """Each token arrives with its own log probability and alternatives."""
    sent = TokensGenerated(tuple(token for token, _ in scored), tuple(score for _, score in scored))

    assert codec.event_from_wire(codec.output_to_wire(RequestId("req_1"), sent)) == sent


@given(st.lists(st.builds(TokenLogprobs, numbers, st.just(((3, -1.5),)), st.integers(1, 2**31 - 1))))
def test_the_figures_of_a_prompt_arrive_with_their_ranks(scored: list[TokenLogprobs]) -> None:
    """Each prompt token arrives with its log probability, its alternatives and its rank."""
    sent = PromptScored(tuple(scored))

    assert codec.event_from_wire(codec.output_to_wire(RequestId("req_1"), sent)) == sent


@given(st.binary())
def test_an_embedding_arrives_as_it_was_sent(values: bytes) -> None:
    """All bytes of an embedding arrive."""
    sent = PromptEmbedded(values)

    assert codec.event_from_wire(codec.output_to_wire(RequestId("req_1"), sent)) == sent


@pytest.mark.parametrize("pooling", [None, *Pooling])
def test_a_request_says_how_it_is_pooled(pooling: Pooling | None) -> None:
    """The pooling of a request arrives, and a request without one arrives without."""
    sent = request(SamplingParams(max_tokens=0), pooling=pooling)

    assert codec.request_from_wire(codec.request_to_wire(sent)) == sent


@given(
    spans=st.lists(
        st.builds(
            EngineSpan,
            name=st.sampled_from(list(SpanName)),
            start_s=numbers,
            duration_s=numbers,
            steps=token_ids,
            busy_s=numbers,
            tokens=token_ids,
            batch_requests=numbers,
            batch_tokens=numbers,
            drafted=token_ids,
            accepted=token_ids,
            masks=token_ids,
        ),
        max_size=3,
    ).map(tuple)
)
def test_the_spans_of_a_traced_request_arrive(spans: tuple[EngineSpan, ...]) -> None:
    """Every field of a span arrives unchanged, and so does the wish for a trace."""
    sent = StepsTraced(7, 1.5, spans)

    output = codec.output_to_wire(RequestId("req_1"), sent)

    assert codec.event_from_wire(type(output).FromString(output.SerializeToString())) == sent
    assert codec.request_from_wire(codec.request_to_wire(request(SamplingParams(max_tokens=1), traced=True))).traced


def test_a_span_of_an_unknown_kind_is_dropped() -> None:
    """A newer engine may report what this gateway does not know; the rest arrives."""
    output = codec.output_to_wire(RequestId("req_1"), StepsTraced(7, 1.5, (EngineSpan(SpanName.QUEUE, 0.0, 1.0),) * 2))
    output.traced.spans[0].name = "dream"

    event = codec.event_from_wire(output)

    assert isinstance(event, StepsTraced)
    assert [span.name for span in event.spans] == [SpanName.QUEUE]
