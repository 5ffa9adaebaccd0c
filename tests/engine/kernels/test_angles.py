"""Tests of the angles of a step's rows, under the interpreter, against torch's."""

from types import ModuleType

import pytest
import torch

from graftwork.engine.model.rope_config import RopeConfig, YarnScaling
from graftwork.engine.model.rotary import RotaryTable, RotaryTurn

CONTEXT, FAR = 64, 1 << 20
POSITIONS = [0, 5, CONTEXT - 1, CONTEXT, 300, 70_001, FAR - 3, FAR - 1]
YARN = YarnScaling(4.0, 32.0, 1.0, truncate=True, original_context_tokens=CONTEXT)
ROPES = {
    "halves": RopeConfig(500_000.0),
    "neighbours, a part of a head": RopeConfig(10_000.0, share=0.75, is_interleaved=True),
    "yarn, with a factor": RopeConfig(10_000.0, YARN, attention_factor=1.2),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", ROPES)
def test_angles_have_the_bits_of_torch(interpreted: dict[str, ModuleType], name: str, dtype: torch.dtype) -> None:
    """Cosines and sines within the table are its own, and those behind it, up to positions of 2^20, are computed in fp64."""
    table, angles = RotaryTable(32, ROPES[name], CONTEXT, torch.device("cpu")), interpreted["angles"]
    rotation = angles.Rotation(table.frequencies, table.is_interleaved, table.factor)
    positions = torch.tensor(POSITIONS, dtype=dtype)
    rows = angles.RowAngles.empty(rotation, len(positions))
    cosines, sines = table.at(positions.long(), has_far=True)

    angles.step_angles_launch(rows, rotation, positions, (table.cosines, table.sines)).run()

    assert torch.equal(rows.cosines, cosines[:, 0])
    assert torch.equal(rows.sines, sines[:, 0])
    near = torch.outer(positions.float(), table.frequencies).cos() * table.factor  # as the table computes them
    firsts = rows.cosines[:, ::2] if table.is_interleaved else rows.cosines[:, : len(table.frequencies)]
    assert (near - firsts)[-2:].abs().max() > 1e-3


def test_distances_without_a_table_turn_queries_back(interpreted: dict[str, ModuleType]) -> None:
    """Without a table all angles are computed, with a factor of 1, and a distance below 0 is none."""
    angles, rope = interpreted["angles"], ROPES["halves"]
    sizes = 32, rope, CONTEXT, torch.device("cpu")
    table, turn = RotaryTable(*sizes), RotaryTurn(*sizes)
    rotation = angles.Rotation(table.frequencies)
    distances = torch.tensor([-1, 0, 7, FAR - 1], dtype=torch.int32)
    rows = angles.RowAngles.empty(rotation, len(distances))
    query = torch.randn(4, 2, 32, generator=torch.Generator().manual_seed(2))

    angles.step_angles_launch(rows, rotation, distances).run()

    turned = table.rotate(query, rows.cosines[:, None], -rows.sines[:, None])
    assert torch.equal(turned, turn.back(query, distances.clamp(min=0)))
    assert torch.equal(turned[:2], query[:2])
