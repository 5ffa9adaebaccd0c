"""Converts the spans of traced requests between engine/core/step_spans.py and the messages of engine.proto."""

from operator import attrgetter

from graftwork.engine.core.events import StepsTraced
from graftwork.engine.core.step_spans import EngineSpan, SpanName
from graftwork.engine.rpc import engine_pb2 as wire

_SPAN_NAMES = {name.value: name for name in SpanName}
_fields_of_span = attrgetter(*EngineSpan._fields)


def traced_to_wire(traced: StepsTraced) -> wire.Traced:
    return wire.Traced(run=traced.run, sent_s=traced.sent_s, spans=[wire.Span(**one._asdict()) for one in traced.spans])


def traced_from_wire(message: wire.Traced) -> StepsTraced:
    """Reads the spans of a request. Drops those of kinds that this version of the gateway does not know.

    Reads all fields of a span by one call, since a gateway does this for every few tokens.
    """
    read = map(_fields_of_span, message.spans)
    spans = tuple(EngineSpan(_SPAN_NAMES[name], *figures) for name, *figures in read if name in _SPAN_NAMES)
    return StepsTraced(message.run, message.sent_s, spans)
