"""Opens OpenTelemetry's SDK, which sends spans to a collector by OTLP over HTTP, from a thread of its own.

Imports the SDK only when it is called: it comes with the extra `otel`. Never samples: only traced requests get here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import graftwork
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.tracing import gen_ai
from graftwork.platform.tracing.spans import RequestSpans

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

_TRACES_PATH = "/v1/traces"


@dataclass(frozen=True, slots=True)
class OpenExport:
    """Spans on their way to a collector."""

    spans: RequestSpans
    close: Callable[[], None]
    """Sends what is left, and ends the thread. Blocks for some seconds if the collector does not answer."""


def open_otlp(endpoint: str, gateway_id: str, *, with_gen_ai: bool) -> OpenExport:
    """Opens the export to the collector at `endpoint`, such as `http://collector:4318`.

    Raises InvalidRequest if the address is none, or if the extra `otel` is not installed.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise InvalidRequest(
            f"otlp_endpoint is {endpoint!r}: give an address of OTLP over HTTP, such as http://collector:4318.",
            param="otlp_endpoint",
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InvalidRequest(
            "otlp_endpoint needs OpenTelemetry's SDK: install it with `pip install 'graftwork[otel]'`.",
            param="otlp_endpoint",
        ) from error
    address = endpoint.rstrip("/")
    exporter = OTLPSpanExporter(address if address.endswith(_TRACES_PATH) else address + _TRACES_PATH)
    return open_export(BatchSpanProcessor(exporter), gateway_id, with_gen_ai=with_gen_ai)


def open_export(processor: "SpanProcessor", gateway_id: str, *, with_gen_ai: bool) -> OpenExport:
    """Opens the export of spans to a processor of the SDK."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    class ChosenTraceIds(RandomIdGenerator):
        """Gives each trace the id that its request has had from its start."""

        next_trace_id = 0

        def choose(self, trace_id: int) -> None:
            self.next_trace_id = trace_id

        def generate_trace_id(self) -> int:
            return self.next_trace_id

    ids = ChosenTraceIds()
    resource = Resource.create(
        {
            "service.name": "graftwork",
            "service.version": graftwork.__version__,
            "service.instance.id": gateway_id,
        }
    )
    provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, id_generator=ids, shutdown_on_exit=False)
    provider.add_span_processor(processor)
    schema = gen_ai.SCHEMA_URL if with_gen_ai else None
    tracer = provider.get_tracer("graftwork", graftwork.__version__, schema_url=schema)
    return OpenExport(RequestSpans(tracer, ids.choose, with_gen_ai=with_gen_ai), provider.shutdown)
