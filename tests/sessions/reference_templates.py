"""The test templates as transformers renders them, for comparison."""

from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.sessions.tokenizer_and_templates import SPECIAL_NAMES, TEMPLATES, THINKING, tokenizer_json


def reference(source: str) -> Any:
    """A tokenizer of transformers with this template. It is untyped, because its annotations are too narrow."""
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=Tokenizer.from_str(tokenizer_json()), chat_template=source, **SPECIAL_NAMES)


REFERENCES: dict[str, Any] = {name: reference(source) for name, source in TEMPLATES.items()}
THINKING_REFERENCE: Any = reference(THINKING)
