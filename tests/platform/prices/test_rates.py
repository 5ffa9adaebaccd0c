"""Tests of rates and of the rounding rule."""

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.platform.errors import ValidationFailed
from graftwork.platform.prices.rates import Quantities, Rates, amount_text, from_atoms

RATES = {
    "input": "0.5",
    "input_device": "0.05",
    "input_host": "0.1",
    "input_disk": "0.2",
    "output": "1.5",
    "kv_gb_hour": "0.02",
    "adapter_gb": "0.001",
}
rate_texts = st.integers(0, 10**12).map(lambda millionths: amount_text(Decimal(millionths).scaleb(-6)))
rates = st.fixed_dictionaries(dict.fromkeys(RATES, rate_texts)).map(Rates.read)
counts = st.integers(0, 10**6)
quantities = st.builds(
    Quantities, counts, counts, counts, counts, counts, st.integers(0, 10**12), st.integers(0, 10**9)
)


def exact_parts(price: Rates, used: Quantities) -> dict[str, Fraction]:
    """The parts of a cost as fractions, which are never rounded."""
    million, gb = 10**6, 10**9
    divisors = {
        "input": (used.uncached_tokens, million),
        "input_device": (used.device_tokens, million),
        "input_host": (used.host_tokens, million),
        "input_disk": (used.disk_tokens, million),
        "output": (used.output_tokens, million),
        "kv_gb_hour": (used.kv_byte_seconds, gb * 3600),
        "adapter_gb": (used.adapter_bytes, gb),
    }
    return {name: Fraction(getattr(price, name)) * count / divisor for name, (count, divisor) in divisors.items()}


@given(rates, quantities)
def test_each_part_is_rounded_once_and_half_to_even(price: Rates, used: Quantities) -> None:
    """Every part is the whole number of 10⁻¹² next to the exact fraction, and the cost is the sum of the parts."""
    expected = {name: round(part * 10**12) for name, part in exact_parts(price, used).items()}  # half to even

    cost = price.cost(used)

    assert {name: part * 10**12 for name, part in price.parts(used).items()} == expected
    assert cost.atoms == sum(expected.values())
    assert cost.kv_atoms == expected["kv_gb_hour"]


@given(rates, quantities)
def test_tokens_need_no_rounding(price: Rates, used: Quantities) -> None:
    """The parts for tokens are exact, because rates have at most six decimals."""
    exact, parts = exact_parts(price, used), price.parts(used)

    for name in ("input", "input_device", "input_host", "input_disk", "output"):
        assert Fraction(parts[name]) == exact[name]


def test_a_bill_by_hand() -> None:
    """A request of 1,000 prompt tokens, 100 answer tokens, 7.2 GB-seconds of KV and a 10 MB adapter."""
    used = Quantities(200, 500, 200, 100, 100, 7_200_000_000, 10_000_000)

    parts = Rates.read(RATES).parts(used)

    assert {name: amount_text(part) for name, part in parts.items()} == {
        "input": "0.0001",
        "input_device": "0.000025",
        "input_host": "0.00002",
        "input_disk": "0.00002",
        "output": "0.00015",
        "kv_gb_hour": "0.00004",
        "adapter_gb": "0.00001",
    }
    assert from_atoms(Rates.read(RATES).cost(used).atoms) == Decimal("0.000365")


def test_cached_input_costs_as_other_input_without_a_rate_of_its_own() -> None:
    """Rates that are left out: cached input as input, memory nothing."""
    price = Rates.read({"input": "0.50", "output": "1.50"})

    assert price.texts() == {
        "input": "0.5",
        "output": "1.5",
        "input_device": "0.5",
        "input_host": "0.5",
        "input_disk": "0.5",
        "kv_gb_hour": "0",
        "adapter_gb": "0",
    }


@given(rates)
def test_texts_say_the_same_rates(price: Rates) -> None:
    """Rates that are written as text and read again are the same."""
    assert Rates.read(price.texts()) == price


@pytest.mark.parametrize(
    ("rates", "says"),
    [
        ({"output": "1"}, "'input' is missing"),
        ({"input": "1"}, "'output' is missing"),
        ({"input": "1", "output": "1", "thinking": "2"}, "no rate 'thinking'"),
        ({"input": "-1", "output": "1"}, "from 0 to"),
        ({"input": "1000001", "output": "1"}, "from 0 to"),
        ({"input": "0.0000001", "output": "1"}, "at most 6 decimals"),
        ({"input": "1e-7", "output": "1"}, "at most 6 decimals"),
        ({"input": "free", "output": "1"}, "not a decimal number"),
        ({"input": "NaN", "output": "1"}, "not a decimal number"),
        ({"input": "Infinity", "output": "1"}, "not a decimal number"),
    ],
)
def test_wrong_rates_are_refused(rates: dict[str, str], says: str) -> None:
    """A rate that is missing, unknown, out of range, too exact or no number is refused with its reason."""
    with pytest.raises(ValidationFailed, match=says):
        Rates.read(rates)


@pytest.mark.parametrize(
    ("amount", "text"),
    [("0", "0"), ("0E-12", "0"), ("100", "100"), ("1E+2", "100"), ("0.500", "0.5"), ("1E-12", "0.000000000001")],
)
def test_amounts_as_text(amount: str, text: str) -> None:
    """An amount has no exponent and no zeros at its end."""
    assert amount_text(Decimal(amount)) == text
