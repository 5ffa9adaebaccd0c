"""Makes the Jinja environment in which a model's chat template runs.

Owns the filters, functions and tags that templates expect, as `transformers` 5 has them. Never lets a template reach
Python: the environment is a sandbox, and hides the classes behind its functions.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from graftwork.platform.clock import Clock


def template_environment(clock: Clock) -> ImmutableSandboxedEnvironment:
    """Returns a Jinja sandbox with the filters and functions that chat templates expect.

    `clock` gives the templates the time.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = time_formatter(clock)
    environment.globals["dict"] = TemplateDict()
    environment.globals["namespace"] = TemplateNamespace
    return environment


def to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Converts a value to JSON text, for the filter `tojson` of templates. Jinja's own filter would escape HTML.

    Templates pass the options by name, so the parameters must have these names.
    """
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    """Raises TemplateError. A template calls this function to refuse a conversation."""
    raise TemplateError(message)


def time_formatter(clock: Clock) -> Callable[[str], str]:
    """Makes the function `strftime_now` for templates. The function formats the local time, without a time zone."""

    def strftime_now(format: str) -> str:
        local = datetime.fromtimestamp(clock.now(), tz=UTC).astimezone()
        return local.replace(tzinfo=None).strftime(format)

    return strftime_now


class GenerationTag(Extension):
    """The Jinja extension for `{% generation %}…{% endgeneration %}`. It renders the text between the tags unchanged.

    Templates contain these tags for training.
    """

    tags = {"generation"}  # noqa: RUF012 - an instance variable by Jinja's declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


class TemplateDict:
    """The function `dict` for templates. It makes dictionaries, but hides Python's class `dict` from a template."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class TemplateNamespace(Namespace):
    """The function `namespace` for templates.

    It refuses names that begin with an underscore, because such names could give a template access to Python.
    """

    def __init__(*args: Any, **kwargs: Any) -> None:
        # Without a named `self`, so that a template can write `namespace(self=…)`.
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: names start with a letter")
