"""Encodes text to token ids, and decodes token ids to text, all at once or one token at a time.

Added tokens are tokens that a model adds to its vocabulary, such as control tokens. Owns two ways to encode a text: one
recognises added tokens in the text; the other treats the text as plain, so that it never becomes a control token. Also
owns the bytes of a character that is still incomplete. Never decodes a token twice, and never renders messages:
`encoding.py` does.
Invariant: the joined results of `Detokenizer.push` and `flush` equal the decoding of all tokens at once.
"""

import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from graftwork.platform.errors import ContextLengthExceeded, ValidationFailed
from graftwork.sessions.text.token_bytes import token_bytes
from graftwork.sessions.text.token_density import TokenDensity


class TextTokenizer:
    """The tokenizer of one model: encodes text to token ids, and decodes them. It uses the library `tokenizers`."""

    def __init__(self, tokenizer_json: str, special_tokens: Iterable[str] = ()) -> None:
        """`tokenizer_json` is the content of tokenizer.json. Raises ValidationFailed if it is not a tokenizer.

        `special_tokens` are the special tokens that other files of the model name. Most of them are also in
        tokenizer.json.
        """
        self.backend = _read(tokenizer_json)
        self.backend.no_truncation()
        self.backend.no_padding()
        self._declare_special(special_tokens)
        spelled = self.backend.to_str()
        self.digest = "sha256:" + hashlib.sha256(spelled.encode()).hexdigest()
        """The hash of everything that determines the ids of a text."""
        content = json.loads(spelled)
        self._without_added = _read(json.dumps(content | {"added_tokens": [], "post_processor": None}))
        self.bytes = token_bytes(content["decoder"])
        added: dict[int, AddedToken] = self.backend.get_added_tokens_decoder()
        self.added_tokens: Mapping[int, str] = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._density = TokenDensity.of(content, self.backend.get_vocab(with_added_tokens=False))
        self._bytes_by_id: dict[int, bytes] = {}
        self._leads_with_space = self._encode_after_newline("a") != self._ids(self.backend, "a")

    @classmethod
    def from_file(cls, path: Path) -> "TextTokenizer":
        return cls(path.read_text(encoding="utf-8"))

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the vocabulary. All token ids are below it.

        The model's embedding table may be larger.
        """
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def check_may_fit(self, text: str, context_tokens: int, param: str) -> None:
        """Raises ContextLengthExceeded if the length of a text proves that it has more tokens than the context.

        Encodes nothing, so it takes little time for texts of any length. `param` is the field that has the text.
        """
        if len(text) <= context_tokens:
            return  # the proven number of tokens is never above the number of characters
        least = self._density.least_tokens(text)
        if least > context_tokens:
            raise ContextLengthExceeded.of_prompt(least, context_tokens, param, is_exact=False)

    def encode(
        self, text: str, *, allow_special: bool, add_special_tokens: bool = False, continues: bool = False
    ) -> tuple[int, ...]:
        """Returns the token ids of a text.

        If `allow_special`, recognises added tokens (such as control tokens) in the text. Otherwise does the same as
        `encode_user_text`.
        If `add_special_tokens`, adds the tokens that the tokenizer puts around a whole text, such as a leading `<s>`.
        If `continues`, the text follows other text of the same prompt, so it gets no leading space.
        """
        if not allow_special:
            return self.encode_user_text(text, continues=continues)
        if add_special_tokens:
            return self._ids(self.backend, well_formed(text), add_special_tokens=True)
        if continues and self._leads_with_space:
            return self._encode_after_newline(well_formed(text))
        return self._ids(self.backend, well_formed(text))

    def encode_user_text(self, text: str, *, continues: bool = False) -> tuple[int, ...]:
        """Returns the token ids of a text from a user or a tool.

        The ids never include added tokens (such as control tokens), even if the text spells one.
        If `continues`, the text follows other text of the same prompt, so it gets no leading space.
        """
        text = well_formed(text)
        token_ids = self._encode_plain(text, continues=continues)
        if self.added_tokens.keys().isdisjoint(token_ids):
            return token_ids
        return self._encode_by_character(text, continues=continues)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of all these tokens, decoded at once. Skips ids that have no token in the vocabulary.

        If `skip_special_tokens`, the text does not show special tokens such as `<|im_end|>`.
        """
        (text,) = self.backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    def token_id(self, token: str) -> int | None:
        found: int | None = self.backend.token_to_id(token)
        return found

    def token_text(self, token_id: int) -> str | None:
        """Returns the spelling of a token in the vocabulary. Returns None if no token has this id."""
        found: str | None = self.backend.id_to_token(token_id)
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token, which may be only a part of a character.

        Returns no bytes if no token has this id.
        """
        found = self._bytes_by_id.get(token_id)
        if found is None:
            spelling = self.token_text(token_id)
            found = self._bytes_by_id[token_id] = b"" if spelling is None else self.bytes.of(spelling)
        return found

    def _declare_special(self, special_tokens: Iterable[str]) -> None:
        known = {token.content for token in self.backend.get_added_tokens_decoder().values() if token.special}
        missing = [token for token in special_tokens if token not in known and self.token_id(token) is not None]
        self.backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in missing])

    def _encode_by_character(self, text: str, *, continues: bool) -> tuple[int, ...]:
        """Encodes each character alone, because the plain words of some vocabularies include a control token."""
        token_ids: list[int] = []
        for character in text:
            token_ids += self._encode_plain(character, continues=continues)
            continues = True
        return tuple(token_ids)

    def _encode_plain(self, text: str, *, continues: bool) -> tuple[int, ...]:
        if continues and self._leads_with_space:
            return self._encode_after_newline(text, plain=True)
        return self._ids(self._without_added, text)

    def _encode_after_newline(self, text: str, *, plain: bool = False) -> tuple[int, ...]:
        """Encodes the text after a newline, then drops the newline.

        Otherwise SentencePiece would add a space before the first word.
        """
        backend = self._without_added if plain else self.backend
        newline, token_ids = self._ids(backend, "\n"), self._ids(backend, "\n" + text)
        return token_ids[len(newline) :] if token_ids[: len(newline)] == newline else self._ids(backend, text)

    @staticmethod
    def _ids(backend: Tokenizer, text: str, *, add_special_tokens: bool = False) -> tuple[int, ...]:
        """Encodes a text as a batch of one, because the library lets other threads run only while it encodes a batch."""
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)


def well_formed(text: str) -> str:
    """Returns the text with U+FFFD in place of each lone surrogate.

    JSON can contain lone surrogates, but UTF-8 cannot.
    """
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _read(tokenizer_json: str) -> Tokenizer:
    try:
        content = json.loads(tokenizer_json)
    except ValueError as error:
        raise ValidationFailed(f"tokenizer.json is no JSON: {error}", param="tokenizer.json") from error
    if not isinstance(content, dict) or "model" not in content:
        message = "tokenizer.json holds no tokenizer: save it with the tokenizers library."
        raise ValidationFailed(message, param="tokenizer.json")
    try:
        return Tokenizer.from_str(tokenizer_json)
    except Exception as error:
        message = f"tokenizer.json holds no tokenizer ({error}): take the model's own file."
        raise ValidationFailed(message, param="tokenizer.json") from error


_SURROGATES = re.compile(rb"\xed[\xa0-\xbf]")
"""These two bytes begin no valid character, but Python's decoder waits for a third byte."""


class Detokenizer:
    """Decodes the tokens of one generation to text, one token at a time.

    Bytes that can never be UTF-8 become the character U+FFFD at once.
    """

    def __init__(
        self, tokenizer: TextTokenizer, *, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()
    ) -> None:
        """`shown` are the ids of special tokens that become text even if `skip_special_tokens` is True."""
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids - shown if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_mid_character = False
        self._spaces_to_strip = tokenizer.bytes.leading_spaces

    def push(self, token_id: int) -> str:
        """Reads the next token, and returns the characters that are complete with it. May return an empty text."""
        if token_id in self._hidden:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        text = data.decode() if data.isascii() and not self._is_mid_character else self._decode(data)
        return self._stripped(text) if self._spaces_to_strip else text

    def flush(self) -> str:
        """Returns the end of the text. Call this method after the last token.

        The end is U+FFFD if the last character is incomplete, and otherwise empty.
        """
        return self._stripped(self._decoder.decode(b"", final=True))

    def _decode(self, data: bytes) -> str:
        text = self._decoder.decode(data)
        begun, _ = self._decoder.getstate()
        if _SURROGATES.match(begun):
            text += self._decoder.decode(b"", final=True)
            begun = b""
        self._is_mid_character = bool(begun)
        return text

    def _stripped(self, text: str) -> str:
        """Removes the space that SentencePiece puts before the first word."""
        if not self._spaces_to_strip or not text:
            return text
        spaces = len(text) - len(text.lstrip(" "))
        taken = min(spaces, self._spaces_to_strip)
        self._spaces_to_strip = self._spaces_to_strip - taken if spaces == len(text) else 0
        return text[taken:]
