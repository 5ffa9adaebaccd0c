"""Echoes of words made of any tokens at all: every token of the vocabulary becomes one that the model can say.

Without them a token that the base never says keeps the embedding it began with, and an adapter, which leaves the
embeddings alone, cannot say it either.
"""

from random import Random

from graftwork.demo.chat_tokenizer import END, START
from graftwork.demo.phrases import ECHOES
from graftwork.demo.training_data import Row, RowMaker


class VocabularyDrill:
    """Draws rows of one to three echoes."""

    def __init__(self, maker: RowMaker) -> None:
        tokenizer = maker.tokenizer
        self.openings = [maker.encode(f"{START}user\n{echo.format(text='')}") for echo in ECHOES]
        self.turn_end, self.space, self.prompt = maker.encode(f"{END}\n"), maker.encode(" "), maker.prompt
        self.letter_ids = [
            token_id for token_id in range(len(tokenizer)) if is_letters(str(tokenizer.decode([token_id])))
        ]

    def row(self, random: Random, max_tokens: int) -> Row:
        token_ids: list[int] = []
        spoken: list[bool] = []
        for _ in range(random.randint(1, 3)):
            words = self.words(random)
            heard = [*random.choice(self.openings), *words, *self.turn_end, *self.prompt]
            said, newline = [*words, self.turn_end[0]], self.turn_end[1:]
            token_ids += heard + said + newline
            spoken += [False] * len(heard) + [True] * len(said) + [False] * len(newline)
        return Row(token_ids[:max_tokens], spoken[:max_tokens])

    def words(self, random: Random) -> list[int]:
        words = [
            random.choices(self.letter_ids, k=random.choice((1, 1, 2, 2, 3))) for _ in range(random.randint(1, 14))
        ]
        return [token_id for word in words for token_id in [*self.space, *word]][len(self.space) :]


def is_letters(text: str) -> bool:
    return text.isascii() and text.isalpha()
