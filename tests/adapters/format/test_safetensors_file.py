"""Tests of the safetensors container: which files are read and which are refused."""

import gzip
import io
import json
import pickle
import zipfile
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from graftwork.adapters.format.safetensors_file import MAX_HEADER_BYTES, read_entries
from graftwork.platform.errors import ValidationFailed
from tests.adapters.adapter_files import Q0_A, Q0_B, Tensors, container, entries, tensors, weights_bytes


def refusal(weights: bytes) -> ValidationFailed:
    with pytest.raises(ValidationFailed) as caught:
        read_entries(weights)
    return caught.value


def changed(name: str, **changes: Any) -> bytes:
    """Returns a valid file with one changed entry of its header."""
    header, data = entries(tensors())
    header[name] |= changes
    return container(header, data)


def test_reads_what_the_reference_library_writes() -> None:
    """Every tensor that safetensors saved is found with its dtype, shape and bits."""
    saved: Tensors = {"b": np.arange(6, dtype=np.float16).reshape(2, 3), "a": np.ones((1, 2), np.float32)}
    weights = save(saved, metadata={"format": "pt"})

    found = {entry.name: entry for entry in read_entries(weights)}

    assert {name: (entry.dtype, entry.shape) for name, entry in found.items()} == {
        "a": ("F32", (1, 2)),
        "b": ("F16", (2, 3)),
    }
    assert found["b"].bits(weights).tobytes() == saved["b"].tobytes()


def test_entries_come_by_offset_whatever_the_order_of_the_header() -> None:
    """Entries are sorted by offset, in whatever order the header lists them."""
    header, data = entries(tensors())
    backwards = dict(reversed(header.items()))

    assert read_entries(container(backwards, data)) == read_entries(weights_bytes())


@pytest.mark.parametrize("length", range(8 + 2))
def test_a_file_shorter_than_any_header_is_refused(length: int) -> None:
    """A file that is shorter than the shortest header is refused."""
    assert refusal(weights_bytes()[:length]).param == "weights"


def test_truncation_at_every_byte_of_the_header_and_each_tensor_border_is_refused() -> None:
    """A file cut at any byte of its header or at any tensor's border is refused."""
    weights = weights_bytes()
    borders = {
        position for entry in read_entries(weights) for position in (entry.start, entry.start + 1, entry.end - 1)
    }
    header_end = min(entry.start for entry in read_entries(weights))

    for length in [*range(0, header_end, 7), *sorted(borders)]:
        assert refusal(weights[:length]).param.startswith("weights")  # type: ignore[union-attr]


def test_a_truncated_tensor_is_named() -> None:
    """The error for a file with too little data names the truncated tensor."""
    last = max(read_entries(weights_bytes()), key=lambda entry: entry.end)

    assert refusal(weights_bytes()[:-1]).param == f"weights.{last.name}"


def test_bytes_behind_the_last_tensor_are_refused() -> None:
    """A file with bytes behind the last tensor is refused."""
    assert "belong to none" in refusal(weights_bytes() + b"\0").message


def test_a_header_of_more_than_a_mebibyte_is_refused() -> None:
    """A header of more than one MiB is refused, even if it is mostly padding."""
    header, data = entries(tensors())
    padded = json.dumps(header).encode() + b" " * MAX_HEADER_BYTES

    assert "header claims" in refusal(container(padded, data)).message


def test_padding_of_the_header_is_read() -> None:
    """A header padded with spaces, as safetensors writes it, is read."""
    header, data = entries(tensors())

    assert len(read_entries(container(json.dumps(header).encode() + b"   ", data))) == len(header)


def test_five_thousand_tensors_are_refused() -> None:
    """A file of 5,000 tensors is refused, even if all are empty."""
    header = {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(5000)}

    assert "5000 tensors" in refusal(container(header, b"")).message


def test_a_repeated_name_is_refused() -> None:
    """A header with two entries of one name is refused."""
    entry = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'

    assert "occurs twice" in refusal(container(f'{{"a":{entry},"a":{entry}}}'.encode(), b"\0" * 4)).message


def test_a_repeated_field_within_an_entry_is_refused() -> None:
    """An entry with a repeated field is refused."""
    header = b'{"a":{"dtype":"F32","dtype":"F16","shape":[1],"data_offsets":[0,4]}}'

    assert "occurs twice" in refusal(container(header, b"\0" * 4)).message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "I32"}, "dtype I32"),
        ({"dtype": "F64"}, "dtype F64"),
        ({"dtype": "F8_E4M3"}, "dtype F8_E4M3"),
        ({"dtype": ["F32"]}, "dtype"),
        ({"dtype": "F16"}, "do not hold"),
        ({"shape": [4, 33]}, "do not hold"),
        ({"shape": [-4, -32]}, "shape"),
        ({"shape": [True, 128]}, "shape"),
        ({"shape": [4.0, 32]}, "shape"),
        ({"shape": "4x32"}, "shape"),
        ({"shape": [1] * 9}, "shape"),
        ({"shape": [2**40, 2**40]}, "shape"),
        ({"data_offsets": [0]}, "data_offsets"),
        ({"data_offsets": [512, 0]}, "do not hold"),
        ({"data_offsets": [-512, 0]}, "data_offsets"),
        ({"data_offsets": [2**62, 2**62 + 512]}, "truncated"),
        ({"extra": 1}, "nothing else"),
    ],
)
def test_a_wrong_entry_is_refused_by_its_name(changes: dict[str, Any], said: str) -> None:
    """A wrong field of an entry is refused with the tensor's name."""
    error = refusal(changed(Q0_A, **changes))

    assert said in error.message
    assert error.param == f"weights.{Q0_A}"


def test_a_gap_in_the_data_is_refused() -> None:
    """Bytes that belong to no tensor are refused wherever they are."""
    header, data = entries(tensors())
    shifted = {
        name: entry | {"data_offsets": [offset + 4 for offset in entry["data_offsets"]]}
        for name, entry in header.items()
    }

    assert "gap" in refusal(container(shifted, b"\0" * 4 + data)).message


def test_two_tensors_over_the_same_bytes_are_refused() -> None:
    """Two tensors that share bytes are refused."""
    error = refusal(changed(Q0_B, data_offsets=[0, 512]))

    assert "overlaps" in error.message


@pytest.mark.parametrize(
    "header",
    [b"{" * 8, b"{}x", b"{\xff}", b'{"a":NaN}', b'{"a":' + b"[" * 200_000, b'{"a":' + b"9" * 10_000 + b"}", b'{"a":1}'],
)
def test_a_header_that_is_no_plain_json_is_refused(header: bytes) -> None:
    """Deep nesting, huge numbers and wrong encodings in a header are refused with ValidationFailed."""
    assert refusal(container(header, b"")).param.startswith("weights")  # type: ignore[union-attr]


@pytest.mark.parametrize("metadata", [["pt"], {"format": 1}, "pt"])
def test_metadata_that_is_no_map_of_strings_is_refused(metadata: object) -> None:
    """Metadata that is not a map of strings is refused, as in safetensors."""
    header, data = entries(tensors())

    assert "__metadata__" in refusal(container(header | {"__metadata__": metadata}, data)).message


def torch_archive(legacy: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(2)}, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def zip_archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("adapter_model.safetensors", weights_bytes())
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("weights", "what"),
    [
        (torch_archive(legacy=False), "zip"),
        (torch_archive(legacy=True), "pickle"),
        (zip_archive(), "zip"),
        (pickle.dumps({"a": 1}, protocol=2), "pickle"),
        (pickle.dumps({"a": 1}, protocol=5), "pickle"),
        (gzip.compress(weights_bytes()), "gzip"),
        (b"GGUF" + b"\0" * 40, "GGUF"),
    ],
    ids=["torch", "torch-legacy", "zip", "pickle-2", "pickle-5", "gzip", "gguf"],
)
def test_other_formats_are_recognised_and_never_opened(weights: bytes, what: str) -> None:
    """A file of another format is not opened; the error says to upload safetensors."""
    error = refusal(weights)

    assert (error.param, error.code) == ("weights", "unsupported_format")
    assert what in error.message
    assert "send safetensors" in error.message


def test_a_header_whose_length_looks_like_a_pickle_is_read() -> None:
    """A valid file whose first two bytes equal those of a pickle is read."""
    header, data = entries({"a": np.ones((1, 1), np.float32)})
    padded = json.dumps(header).encode().ljust(0x0280)

    assert container(padded, data)[:2] == b"\x80\x02"
    assert [entry.name for entry in read_entries(container(padded, data))] == ["a"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_element_that_is_not_finite_is_found_in_every_format(value: float, dtype: torch.dtype) -> None:
    """The check finds exactly the elements that torch calls not finite, in every format."""
    good = torch.tensor([[0.0, -1.0], [torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal]], dtype=dtype)
    bad = good.clone()
    bad[1, 0] = value
    integers = np.uint16 if good.element_size() == 2 else np.uint32
    name = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]

    verdicts = []
    for tensor in (good, bad):
        data = tensor.view(torch.uint8).numpy().tobytes()
        header = {"a": {"dtype": name, "shape": [2, 2], "data_offsets": [0, len(data)]}}
        weights = container(header, data)
        (entry,) = read_entries(weights)
        assert entry.bits(weights).dtype == integers
        verdicts.append(entry.is_finite(weights))

    assert verdicts == [True, False]


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_and_nothing_worse(weights: bytes) -> None:
    """Random bytes raise ValidationFailed and nothing else."""
    with pytest.raises(ValidationFailed):
        read_entries(b"\x40" + b"\0" * 7 + weights)
    with pytest.raises(ValidationFailed):
        read_entries(weights)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_any_json_as_a_header_is_refused_or_read(header: object) -> None:
    """Any JSON value as a header is read or raises ValidationFailed."""
    try:
        read_entries(container(header, b""))
    except ValidationFailed:
        return
    assert isinstance(header, dict)
    assert set(header) <= {"__metadata__"}
