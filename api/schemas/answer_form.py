"""The fields by which chat.completions and completions ask for answers of a form; `sessions/answer_form.py` reads them."""

from typing import Any

from graftwork.api.schemas.bodies import OpenAiBody
from graftwork.sessions.answer_form import FormFields


class AnswerFormFields(OpenAiBody):
    """At most one of them asks for anything. Null and what is empty asks for nothing."""

    response_format: dict[str, Any] | None = None
    regex: str | None = None
    """The whole answer matches it."""
    grammar: str | None = None
    """In EBNF; its rule is `root`."""
    structural_tag: str | dict[str, Any] | None = None
    """Calls in text; see engine/grammar/structural_tags.py."""

    def form_fields(self) -> FormFields:
        return FormFields(self.response_format, self.regex, self.grammar, self.structural_tag)
