import math

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from nagnet.diagnostics import figures
from nagnet.diagnostics.confidence import collect_confidence
from nagnet.diagnostics.geometry import gain_by_update, norm_by_depth, rotation_by_depth
from nagnet.diagnostics.style import arm_styles
from nagnet.errors import UserError

ARMS = ("norm_agnostic", "pre_norm")


def metric_rows(n: int, last: float) -> list[dict[str, float]]:
    losses = np.linspace(7.0, last, n)
    return [
        {"step": i + 1, "tokens": 4096 * (i + 1), "flops": 2e10 * (i + 1), "loss": loss, "seconds": 0.1 * i}
        for i, loss in enumerate(losses)
    ]


@pytest.fixture
def measured(build_model, tokens):
    models = {arm: build_model(arm, n_layers=3) for arm in ARMS}
    return {
        "metrics": {arm: metric_rows(50, 3.0 + i) for i, arm in enumerate(ARMS)},
        "norms": {arm: norm_by_depth(model, tokens) for arm, model in models.items()},
        "rotations": {arm: rotation_by_depth(model, tokens) for arm, model in models.items()},
        "gains": {arm: gain_by_update(model, tokens) for arm, model in models.items()},
        "confidences": {arm: collect_confidence(model, [(tokens, tokens)]) for arm, model in models.items()},
    }


def visible(axes, color: str) -> list[np.ndarray]:
    return [line.get_xydata() for line in axes.get_lines() if line.get_color() == color]


def differences() -> list[dict]:
    row = {"arm_a": "norm_agnostic", "arm_b": "pre_norm", "bits_per_byte": -0.1, "low": -0.15, "high": -0.05}
    lost = {"arm_a": "lost", "arm_b": "pre_norm", "bits_per_byte": None, "low": None, "high": None}
    return [row | {"by_seed": [-0.08, -0.1, -0.12]}, lost | {"by_seed": [0.1, None]}]


def test_differences_show_seeds_means_and_intervals():
    fig = figures.difference_figure(differences())
    (axes,) = fig.axes
    color = arm_styles(ARMS)["norm_agnostic"]["color"]
    drawn = sorted(len(line) for line in visible(axes, color))
    assert drawn == [1, 2, 3], "the mean, the ends of the interval, the seeds"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["norm-agnostic", "lost (diverged)"]
    assert "minus pre-norm" in axes.get_xlabel() and len(figures.DIFFERENCE_CAPTION) > 80
    with pytest.raises(UserError, match="no differences"):
        figures.difference_figure([])


def draw_all(measured) -> dict[str, Figure]:
    return {
        "loss": figures.loss_figure(measured["metrics"]),
        "norm": figures.norm_figure(measured["norms"]),
        "rotation": figures.rotation_figure(measured["rotations"]),
        "gain": figures.gain_figure(measured["gains"]),
        "confidence": figures.confidence_figure(measured["confidences"]),
    }


def test_figures_have_units_and_the_colours_of_the_arms(measured):
    colors = {arm: look["color"] for arm, look in arm_styles(ARMS).items()}
    for name, fig in draw_all(measured).items():
        assert len(getattr(figures, f"{name.upper()}_CAPTION")) > 80
        assert fig.get_size_inches()[0] * fig.dpi == pytest.approx(1000)
        for axes in fig.axes:
            assert axes.get_xlabel() and (axes.get_ylabel() or axes.get_title("left").endswith(")"))
            for arm in ARMS:
                assert bool(visible(axes, colors[arm])) == (name != "gain" or arm == "norm_agnostic")


def test_curves_hold_the_data(measured):
    blue = arm_styles(ARMS)["norm_agnostic"]["color"]
    norm = figures.norm_figure(measured["norms"]).axes
    np.testing.assert_allclose(visible(norm[0], blue)[0][:, 1], measured["norms"]["norm_agnostic"].mean)
    np.testing.assert_allclose(visible(norm[1], blue)[0][:, 1], measured["norms"]["norm_agnostic"].first)
    rotation = figures.rotation_figure(measured["rotations"]).axes
    assert visible(rotation[0], blue)[0][0].tolist() == [0, 0]
    np.testing.assert_allclose(visible(rotation[0], blue)[0][1:, 1], measured["rotations"]["norm_agnostic"].cumulative)
    gain = figures.gain_figure(measured["gains"]).axes
    assert [visible(axes, blue)[1][:, 0].tolist() for axes in gain] == [[1, 3, 5], [2, 4, 6]]
    np.testing.assert_allclose(visible(gain[1], blue)[1][:, 1], measured["gains"]["norm_agnostic"].mean_gain[1::2])
    loss = figures.loss_figure(measured["metrics"]).axes
    assert visible(loss[0], blue)[0][-1, 0] == pytest.approx(4096 * 50 / 1e3) and "thousands" in loss[0].get_xlabel()
    assert visible(loss[1], blue)[0][-1, 0] == pytest.approx(1.0) and "10¹²" in loss[1].get_xlabel()


def test_figures_without_data():
    with pytest.raises(UserError, match="norm-agnostic"):
        figures.gain_figure({"pre_norm": None})
    with pytest.raises(UserError, match="pre_norm"):
        figures.loss_figure({"pre_norm": []})


@pytest.mark.parametrize("losses", [[7.0], [math.nan], [7.0, math.nan, math.inf], [3.0] * 5])
def test_short_flat_and_diverged_runs_are_drawn(losses):
    rows = [{"tokens": 10 * i, "flops": 10 * i, "loss": loss} for i, loss in enumerate(losses, start=1)]
    figures.loss_figure({"norm_agnostic": rows}).draw_without_rendering()


def test_measurements_of_one_token_are_drawn(build_model):
    model, token = build_model(), torch.tensor([[3]])
    measured = {
        "metrics": metric_rows(1, 3.0),
        "norms": norm_by_depth(model, token),
        "rotations": rotation_by_depth(model, token),
        "gains": gain_by_update(model, token),
        "confidences": collect_confidence(model, [(token, token)]),
    }
    for fig in draw_all({kind: {"norm_agnostic": data} for kind, data in measured.items()}).values():
        fig.draw_without_rendering()


def test_long_runs_stay_small():
    rows = {"norm_agnostic": metric_rows(20_000, 3.0)}
    axes = figures.loss_figure(rows).axes[0]
    assert all(len(line.get_xdata()) <= figures.MAX_RAW_POINTS for line in axes.get_lines())


def test_running_mean():
    np.testing.assert_allclose(figures.running_mean(np.array([1.0, 2, 4, 8]), 1), [1, 2, 4, 8])
    np.testing.assert_allclose(figures.running_mean(np.array([1.0, 2, 4, 8]), 3), [1.5, 7 / 3, 14 / 3, 6])
