"""The settings of one subject: logs and traces."""

from dataclasses import dataclass

from graftwork.platform.settings.setting import setting
from graftwork.platform.settings.values import one_of, parse_flag, parse_fraction, parse_text


@dataclass(frozen=True)
class ObservationSettings:
    """Logs and traces."""

    log_level: str = setting("info", one_of("debug", "info", "warning", "error"))
    """`debug`, `info`, `warning` or `error`."""
    log_format: str = setting("auto", one_of("auto", "json", "text"))
    """`json`, `text` for people, or `auto`: text at a terminal, JSON elsewhere."""
    trace_share: float = setting(0.0, parse_fraction)
    """The part of the requests, from 0 to 1, that is traced without being asked for."""
    otlp_endpoint: str | None = setting(None, parse_text)
    """The address to which traces are sent, such as `http://collector:4318`. It needs the extra `otel`."""
    otel_gen_ai: bool = setting(False, parse_flag)
    """Whether exported spans have the `gen_ai` attributes of OpenTelemetry's conventions for generative AI."""
