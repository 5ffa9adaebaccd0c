"""What a grammar tells a drafter: the tokens that are likely to come next, and how far a guess may go.

Much of a constrained answer is settled but for its whitespace: a schema names the next key, yet any of `,"b"`, `, "b"`
and `,  "b"` may stand there. So guesses come from a second, compact grammar, with one spelling for each answer, that
follows along for as long as the model writes that way. Text is spelled by the longest tokens that fit. Where a model
writes or spells otherwise the guess fails, and nothing is lost but a row.
"""

from graftwork.engine.grammar.matching.cursor import GrammarCursor
from graftwork.engine.grammar.matching.matcher import Matcher
from graftwork.engine.grammar.matching.vocabulary import Vocabulary


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
    """One running request's constraint, as drafts see it."""

    def __init__(self, cursor: GrammarCursor, compact: Matcher | None, speller: Speller) -> None:
        """`compact` is where the answer stands in its compact grammar; None where there is none."""
        self._cursor = cursor
        self._compact = compact
        self._speller = speller

    def follow(self, token_id: int) -> None:
        """The answer has gone on by a token; one that is not compact ends the guessing."""
        if self._compact is not None and not self._compact.accept(token_id):
            self._compact = None

    def forced_token_ids(self, max_tokens: int) -> tuple[int, ...]:
        """What comes next in the compact spelling, as far as it is settled.

        The last token is left out: what follows may be spelled together with it.
        """
        if self._compact is None or self._cursor.is_over:
            return ()
        token_ids = self._speller.spell(self._compact.forced_bytes())[:-1][:max_tokens]
        return tuple(token_ids[: self.allowed_length(tuple(token_ids))])

    def allowed_length(self, token_ids: tuple[int, ...]) -> int:
        """How many of these tokens may stand next, in this order."""
        return self._cursor.num_allowed(token_ids)
