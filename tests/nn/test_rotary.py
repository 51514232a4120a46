"""Rotary tables and their convention."""

import copy
import math

import pytest
import torch

from nagnet.errors import UserError
from nagnet.nn.rotary import RotaryTable, apply_rotary


@pytest.mark.parametrize(("start", "length"), [(9, 4), (8, 4), (0, 11), (10, 1), (30, 2)])
def test_growth_equals_a_longer_table(start, length):
    short, long = RotaryTable(8, 1e5, 10), RotaryTable(8, 1e5, 100)
    for grown, built in zip(short(length, start), long(length, start), strict=True):
        assert grown.shape == (length, 4)
        assert torch.equal(grown, built)


def test_growth_keeps_the_first_positions():
    table = RotaryTable(8, 1e5, 10)
    before = [tensor.clone() for tensor in table(10)]
    table(25)
    for a, b in zip(before, table(10), strict=True):
        assert torch.equal(a, b)


def test_growth_in_inference_mode_still_serves_training():
    table = RotaryTable(4, 1e4, 2)
    with torch.inference_mode():
        table(7)
    x = torch.randn(1, 7, 1, 4, requires_grad=True)
    apply_rotary(x, *table(7)).sum().backward()
    assert x.grad.isfinite().all()


def test_growth_after_a_cast_stays_exact():
    table = RotaryTable(8, 1e5, 10).to(torch.bfloat16)
    for grown, built in zip(table(40), RotaryTable(8, 1e5, 40)(40), strict=True):
        assert grown.dtype == torch.float32 and torch.equal(grown, built)


def test_angles_by_hand():
    cos, sin = RotaryTable(4, 100.0, 3)(3)
    angles = torch.tensor([[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]])  # position x 100^(-2i/4)
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())


def test_pairs_are_half_split_and_turn_clockwise():
    """The convention of nanochat: (x1 cos + x2 sin, -x1 sin + x2 cos)."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    angle = torch.tensor([[0.3, 0.7]])
    (turned,) = apply_rotary(x, angle.cos(), angle.sin()).view(1, 4)
    c, s = [math.cos(0.3), math.cos(0.7)], [math.sin(0.3), math.sin(0.7)]
    expected = [c[0] + 3 * s[0], 2 * c[1] + 4 * s[1], -s[0] + 3 * c[0], -2 * s[1] + 4 * c[1]]
    assert turned.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("shift", [1, 5, 50])
def test_scores_depend_on_the_distance_alone(generator, shift):
    q, k = (torch.randn(1, 1, 1, 8, generator=generator).expand(1, 6, 1, 8) for _ in range(2))
    table = RotaryTable(8, 1e4, 60)

    def scores(start):
        tables = table(6, start)
        return apply_rotary(q, *tables)[0, :, 0] @ apply_rotary(k, *tables)[0, :, 0].T

    torch.testing.assert_close(scores(shift), scores(0), rtol=1e-4, atol=1e-4)


def test_turning_keeps_the_norm(generator):
    x = torch.randn(2, 6, 3, 8, generator=generator)
    torch.testing.assert_close(apply_rotary(x, *RotaryTable(8, 1e4, 6)(6)).norm(dim=-1), x.norm(dim=-1))


def test_odd_head_dim_is_refused():
    with pytest.raises(UserError, match="head_dim is 5.*even"):
        RotaryTable(5, 1e4, 4)


def test_tables_are_not_saved_but_copied():
    table = RotaryTable(4, 1e4, 3)
    assert not table.state_dict()
    assert torch.equal(copy.deepcopy(table)(3)[0], table(3)[0])


def test_positions_of_each_sequence():
    """Start 9 of a table of 10, in one row; the table grows and each row is as by itself."""
    table, long = RotaryTable(8, 1e5, 10), RotaryTable(8, 1e5, 100)
    positions = torch.tensor([[9, 10, 11, 12], [0, 1, 1, 1]])
    table.reserve(13)
    for found, whole in zip(table.at(positions), long(100), strict=True):
        assert found.shape == (2, 4, 4)
        assert torch.equal(found, whole[positions])


def test_turning_sequences_at_different_positions(generator):
    x = torch.randn(2, 3, 2, 8, generator=generator)
    table = RotaryTable(8, 1e4, 20)
    together = apply_rotary(x, *table.at(torch.tensor([[4, 5, 6], [0, 1, 2]])))
    for row, start in enumerate((4, 0)):
        assert torch.equal(together[row], apply_rotary(x[row : row + 1], *table(3, start))[0])
