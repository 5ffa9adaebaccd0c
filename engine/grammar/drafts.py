"""What a grammar tells a drafter: the tokens that must come next, and how far a guess may go.

Spells forced text by the longest tokens that fit. A model may spell the same text otherwise; then the guess fails and
nothing is lost but a row.
"""

from graftwork.engine.grammar.cursor import GrammarCursor
from graftwork.engine.grammar.vocabulary import Vocabulary


class Speller:
    """Text as the longest tokens of a vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens) if token}
        self._longest = max(map(len, self._ids), default=0)

    def spell(self, text: bytes) -> list[int]:
        """The tokens of a text, as far as the vocabulary has them."""
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
    """One running request's constraint, as drafts see it. Asking changes nothing."""

    def __init__(self, cursor: GrammarCursor, speller: Speller) -> None:
        self._cursor = cursor
        self._speller = speller

    def forced_token_ids(self, max_tokens: int) -> tuple[int, ...]:
        """What must come next, as far as it is settled.

        The last token is left out: what follows may be spelled together with it.
        """
        return self._cursor.forced_tokens(self._speller.spell)[:-1][:max_tokens]

    def allowed_length(self, token_ids: tuple[int, ...]) -> int:
        """How many of these tokens may stand next, in this order."""
        return self._cursor.num_allowed(token_ids)
