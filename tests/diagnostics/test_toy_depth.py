import math

import pytest
import torch

from nagnet.diagnostics.style import arm_styles, save_figure
from nagnet.diagnostics.toy_depth import _rotate, toy_depth, toy_depth_figure
from nagnet.errors import UserError


@pytest.mark.parametrize("d_model", [1, 2, 16])
@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_plain_stack_multiplies_the_norm_by_scale(d_model, scale):
    result = toy_depth(depth=60, d_model=d_model, seed=3, scale=scale)
    expected = scale ** torch.arange(61, dtype=torch.float64)
    torch.testing.assert_close(result.plain, expected, rtol=1e-12, atol=0)


def test_sixty_layers_fall_by_18_06_decades():
    result = toy_depth(depth=60, d_model=64, seed=0)
    assert result.plain_decades == pytest.approx(-60 * math.log10(2), abs=1e-10)
    assert f"{result.plain_decades:.2f}" == "-18.06"


def test_residual_stream_grows_as_expected():
    result = toy_depth(depth=60, d_model=128, seed=0)
    # Each layer adds log10 of 1.25 / 2 on average; 60 draws in 128 dimensions stray by about 0.3 decades.
    assert result.residual_decades == pytest.approx(60 * math.log10(1.25) / 2, abs=0.5)
    assert result.residual.dtype == torch.float64 and result.residual.shape == (61,)
    assert result.plain[0] == result.residual[0] == 1


def test_same_seed_same_numbers_and_the_global_generator_is_untouched():
    state = torch.get_rng_state()
    first, second = toy_depth(5, 8, seed=1), toy_depth(5, 8, seed=1)
    assert torch.equal(first.residual, second.residual)
    assert not torch.equal(first.residual, toy_depth(5, 8, seed=2).residual)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_rotations_are_orthogonal_and_drawn_evenly(generator, d):
    identity = torch.eye(d, dtype=torch.float64)
    draws = torch.stack([_rotate(identity, generator) for _ in range(1000)])
    torch.testing.assert_close(draws @ draws.mT, identity.expand_as(draws), rtol=0, atol=1e-12)
    # Entries have mean 0 and mean square 1 / d; the standard errors of 1,000 draws are at most 0.032.
    torch.testing.assert_close(draws.mean(0), torch.zeros_like(identity), rtol=0, atol=0.12)
    torch.testing.assert_close(draws.square().mean(0), torch.full_like(identity, 1 / d), rtol=0, atol=0.1)
    assert abs(torch.linalg.det(draws).mean()) < 0.12  # as many reflections as rotations


@pytest.mark.parametrize("numbers", [(0, 8, 0.5), (3, 0, 0.5), (3, 8, 0.0), (3, 8, math.nan)])
def test_numbers_out_of_range(numbers):
    depth, d_model, scale = numbers
    with pytest.raises(UserError):
        toy_depth(depth, d_model, seed=0, scale=scale)


def test_figure_is_as_wide_as_promised_and_the_same_each_time(tmp_path):
    result = toy_depth(4, 8, seed=0)
    contents = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        paths = save_figure(toy_depth_figure(result), folder, "toy")
        assert [path.name for path in paths] == ["toy.png", "toy.svg"] == sorted(p.name for p in folder.iterdir())
        contents.append([path.read_bytes() for path in paths])
    assert contents[0] == contents[1]
    width = int.from_bytes(contents[0][0][16:20], "big")  # the PNG header's first field
    assert width == 1000


def test_arms_look_the_same_in_every_figure():
    rules = ["norm_agnostic", "pre_norm", "post_norm", "none"]
    styles = arm_styles([*rules, "mine", "yours"])
    assert len({style["color"] for style in styles.values()}) == len(styles)
    assert arm_styles(["yours", "pre_norm"])["pre_norm"] == styles["pre_norm"]
    assert arm_styles(["mine"])["mine"] == styles["mine"]


def test_arms_without_a_colour_of_their_own_stay_apart():
    styles = arm_styles(f"arm{i}" for i in range(15))
    assert len({(style["color"], style["linestyle"]) for style in styles.values()}) == 15
