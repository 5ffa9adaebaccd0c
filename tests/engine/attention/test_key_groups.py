"""Tests of the groups and masks of attention in torch."""

import torch

from graftwork.engine.attention.key_groups import KeyGrouper, KeyGroups, padded_pages
from graftwork.engine.core.step import RequestSlice
from graftwork.engine.model.batch_invariance import BatchInvariance
from tests.engine.attention.batches import batch_of, piece

NULL_PAGE = 99
FREE = BatchInvariance(1, 1, attends_in_any_shape=True)


def groups_of(*pieces: RequestSlice, rules: BatchInvariance = FREE, num_padding: int = 0) -> KeyGroups:
    return KeyGrouper(page_tokens=4, null_page=NULL_PAGE, device=torch.device("cpu"), rules=rules).group(
        batch_of(pieces, num_padding)
    )


def test_a_decoding_row_sees_its_own_keys_and_no_padding() -> None:
    """Of two requests with 6 and 2 keys, the shorter one's page table is padded with the null page, and masked."""
    groups = groups_of(piece("a", 5, 1, [1, 2]), piece("b", 1, 1, [3]))

    (decode,) = groups.decodes
    assert decode.tables[0].view(2, 8).tolist() == [[1, 2, *[NULL_PAGE] * 6], [3, *[NULL_PAGE] * 7]]
    assert decode.visible.sum(dim=-1).flatten().tolist() == [6, 2]


def test_where_bits_depend_on_lengths_only_equal_lengths_decode_together() -> None:
    """Page tables are padded by their own length: those of 5 and 6 pages share a group, that of 2 pages does not."""
    lengths = {"a": 20, "b": 24, "c": 7}
    pieces = [piece(name, size - 1, 1, list(range(-(-size // 4)))) for name, size in lengths.items()]

    groups = groups_of(*pieces, rules=BatchInvariance(4, 16))

    assert sorted((len(decode), len(decode.tables[0]) // len(decode)) for decode in groups.decodes) == [(1, 2), (2, 6)]
    assert all(size <= padded_pages(size) <= max(1.5 * size, size) for size in range(1, 5000))


def test_a_chunk_is_causal_from_its_own_start() -> None:
    """The rows at positions 2 and 3 see three and four keys."""
    groups = groups_of(piece("a", 2, 2, [1]))

    (chunk,) = groups.chunks
    assert chunk.visible.sum(dim=-1).tolist() == [3, 4]
    assert chunk.num_keys == 4


def test_steps_of_one_kind_are_known_as_such() -> None:
    """Rows that all decode, or that are one prompt's, need no further arrangement; a second chunk, a draft behind a chunk,
    rows of both kinds, or padding do."""
    decoding, prompt, drafts = piece("a", 5, 1, [1, 2]), piece("b", 0, 3, [3]), piece("c", 0, 4, [4], num_drafts=1)
    mixed = [groups_of(*step) for step in ((prompt, prompt), (decoding, prompt), (drafts,))]
    padded = [groups_of(one, num_padding=2) for one in (decoding, prompt)]

    alone = [groups_of(decoding, decoding), groups_of(prompt)]

    assert [(groups.is_one_decode, groups.is_one_chunk) for groups in alone] == [(True, False), (False, True)]
    assert not any(groups.is_one_decode or groups.is_one_chunk for groups in (*mixed, *padded))
