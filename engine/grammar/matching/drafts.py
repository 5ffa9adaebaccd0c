"""Drafts from a grammar: the tokens that are likely to come next, and how many draft tokens it allows.

Often a grammar fixes the next text but for its whitespace: a schema names the next key, but `,"b"`, `, "b"` and `,
"b"` are all allowed. So drafts come from a second, compact grammar that allows one spelling of each answer. It is
followed for as long as the model writes in that spelling. Drafts use the longest tokens that fit the text. If the model
writes otherwise, the draft is rejected and costs one row.
"""

from graftwork.engine.grammar.matching.cursor import GrammarCursor
from graftwork.engine.grammar.matching.matcher import Matcher
from graftwork.engine.grammar.matching.vocabulary import Vocabulary


class Speller:
    """Splits text into the longest tokens of a vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens) if token}
        self._longest = max(map(len, self._ids), default=0)

    def spell(self, text: bytes) -> list[int]:
        """The tokens of a text. Stops where no token fits."""
        token_ids: list[int] = []
        start = 0
        while start < len(text):
            ends = range(min(start + self._longest, len(text)), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), None)
            if end is None:
                break
            token_ids.append(self._ids[text[start:end]])
            start = end
        return token_ids


class GrammarDrafts:
    """The grammar's constraint on the drafts of one running request."""

    def __init__(self, cursor: GrammarCursor, compact: Matcher | None, speller: Speller) -> None:
        """`compact` is the answer's matcher in the compact grammar, or None."""
        self._cursor = cursor
        self._compact = compact
        self._speller = speller

    def follow(self, token_id: int) -> None:
        """Follow a token of the answer.

        After a token that the compact grammar does not allow, there are no more drafts.
        """
        if self._compact is not None and not self._compact.accept(token_id):
            self._compact = None

    def forced_token_ids(self, max_tokens: int) -> tuple[int, ...]:
        """The next tokens in the compact spelling, as far as the grammar fixes them.

        The last token is left out, because the text after it may be part of a longer token.
        """
        if self._compact is None or self._cursor.is_over:
            return ()
        token_ids = self._speller.spell(self._compact.forced_bytes())[:-1][:max_tokens]
        return tuple(token_ids[: self.allowed_length(tuple(token_ids))])

    def allowed_length(self, token_ids: tuple[int, ...]) -> int:
        """How many of these tokens the grammar allows next, from the first on."""
        return self._cursor.num_allowed(token_ids)
