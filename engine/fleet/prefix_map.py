"""Remembers which engine has computed which prefix, from what this gateway has placed there.

    prompt ──► keys of its blocks ──► PrefixMap: how many tokens of it each engine has

A block has `BLOCK_TOKENS` tokens. Its key is a digest of the isolation domain, the adapters and all tokens up to its
end. Owns the keys, never tokens. The map is a guess: an engine may have evicted a prefix, and other gateways place
requests, too.
Invariant: the keys of one engine are at most as many as its KV cache has room for blocks.
"""

import hashlib
import struct
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NewType

from graftwork.engine.core.requests import AdapterUse
from graftwork.platform.ids import IsolationDomain

BLOCK_TOKENS = 64
BlockKey = NewType("BlockKey", bytes)
_KEY_BYTES = 16


class BlockKeys:
    """Computes the keys of the blocks of a growing list of tokens."""

    def __init__(self, domain: IsolationDomain, adapters: Sequence[AdapterUse]) -> None:
        parts = [domain, *(part for use in adapters for part in (use.digest.encode(), struct.pack(">d", use.weight)))]
        self._hash = hashlib.blake2b(digest_size=_KEY_BYTES)
        for part in parts:
            self._hash.update(len(part).to_bytes(8, "big") + part)
        self._rest = array("i")
        self.keys: list[BlockKey] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        """Adds tokens at the end. Tokens after the last whole block have no key yet."""
        self._rest.extend(token_ids)
        whole = len(self._rest) // BLOCK_TOKENS * BLOCK_TOKENS
        content, width = memoryview(self._rest.tobytes()), BLOCK_TOKENS * self._rest.itemsize
        for start in range(0, whole * self._rest.itemsize, width):
            self._hash.update(content[start : start + width])
            self.keys.append(BlockKey(self._hash.digest()))
        self._rest = self._rest[whole:]


class PrefixMap:
    """The blocks that each engine has computed. The least recently used ones of an engine are forgotten first."""

    def __init__(self) -> None:
        self._blocks: dict[str, OrderedDict[BlockKey, None]] = {}
        self._limits: dict[str, int] = {}

    def set_room(self, replica_id: str, num_tokens: int) -> None:
        """Says for how many tokens an engine can keep KV."""
        self._limits[replica_id] = max(num_tokens // BLOCK_TOKENS, 1)

    def forget(self, replica_id: str) -> None:
        """Forgets all of an engine, because it is gone or has started again."""
        self._blocks.pop(replica_id, None)
        self._limits.pop(replica_id, None)

    def note(self, replica_id: str, keys: Sequence[BlockKey]) -> None:
        """Notes that an engine has the blocks of a list of tokens now. The last blocks are forgotten first, as engines
        evict them.
        """
        limit = self._limits.get(replica_id)
        if limit is None:
            return
        blocks = self._blocks.setdefault(replica_id, OrderedDict())
        for key in reversed(keys):
            blocks[key] = None
            blocks.move_to_end(key)
        while len(blocks) > limit:
            blocks.popitem(last=False)

    def cached_tokens(self, replica_id: str, keys: Sequence[BlockKey]) -> int:
        """Returns how many tokens at the start of a list an engine has, as far as this map knows."""
        blocks = self._blocks.get(replica_id)
        if not blocks:
            return 0
        for place, key in enumerate(keys):
            if key not in blocks:
                return place * BLOCK_TOKENS
        return len(keys) * BLOCK_TOKENS

    def check_integrity(self) -> None:
        """Raises AssertionError if an engine has more blocks than it has room for."""
        for replica_id, blocks in self._blocks.items():
            assert len(blocks) <= self._limits[replica_id], f"{replica_id} has too many blocks"
