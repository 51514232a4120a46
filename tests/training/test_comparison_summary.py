"""Means, paired differences and verdicts from results small enough to do by hand."""

import pytest

from nagnet.training.comparison_summary import describe_difference, describe_verdict, summarize


def result(plan, arm, seed, bits, **changes):
    """Two documents of 100 and 300 bytes; ``bits`` per byte on both."""
    documents = {"names": ["a", "b"], "nats": [bits * 100 * 0.6931471805599453, bits * 300 * 0.6931471805599453]}
    gates = {"updates": 4, "dead_updates": [3], "alarms_ever": ["x"], "mean_gain": [1.0] * 4, "initial_gain": [1.0] * 4}
    quality = {"auroc": 0.5 + seed / 10}
    return {
        "arm": arm,
        "seed": seed,
        "config": plan.arms[arm].to_dict(),
        "finished": True,
        "diverged": None,
        "bits_per_byte": bits,
        "final_loss": bits + 1,
        "evaluated": {"documents": 2, "bytes": 400},
        "documents": documents | {"n_bytes": [100, 300], "n_tokens": [50, 150]},
        "health": gates if arm == "norm_agnostic" else None,
        "confidence": {
            "scale": quality,
            "negative_entropy": quality,
            "spearman_scale_entropy": None,
            "scale_in_logits": arm == "norm_agnostic",
            "n_tokens": 9,
        },
        "sample": f"seed {seed}",
        "optimizers": [],
        "parameters": 10,
        "steps": 3,
        "tokens": 384,
        "flops": 100 + seed,
        "compiled": False,
        "seconds": 1.0 + seed,
        "median_step_seconds": 0.1 * (seed + 1),
        "step_seconds_quartiles": [0.1, 0.1, 0.1],
        "peak_memory_bytes": 1000 * (seed + 1),
    } | changes


@pytest.fixture
def summary_of(tiny_plan):
    def build(norm_agnostic, pre_norm, changes=None, **options):
        plan = tiny_plan(n_seeds=len(pre_norm))
        values = {"norm_agnostic": norm_agnostic, "pre_norm": pre_norm}
        results = {
            (arm, seed): result(plan, arm, seed, bits, **(changes or {}).get((arm, seed), {}))
            for arm, of_arm in values.items()
            for seed, bits in enumerate(of_arm)
        }
        return summarize(plan, results, {"source": "x"}, {"device": "cpu"}, **options)

    return build


def test_three_seeds_by_hand(summary_of):
    """Differences -0.1, -0.2, -0.3: mean -0.2, standard error 0.1 / sqrt(3), t 4.3027."""
    summary = summary_of([1.9, 1.9, 1.7], [2.0, 2.1, 2.0])
    (row,) = summary["differences"]
    assert (row["arm_a"], row["arm_b"], row["basis"], row["n_seeds"]) == ("norm_agnostic", "pre_norm", "seeds", 3)
    assert row["by_seed"] == pytest.approx([-0.1, -0.2, -0.3])
    assert row["bits_per_byte"] == pytest.approx(-0.2)
    assert row["standard_error"] == pytest.approx(0.1 / 3**0.5)
    assert row["low"] == pytest.approx(-0.2 - 4.302653 * 0.1 / 3**0.5)
    assert row["high"] == pytest.approx(-0.2 + 4.302653 * 0.1 / 3**0.5)
    assert row["verdict"] == "no difference seen", "the interval reaches 0"
    arm = summary["arms"]["norm_agnostic"]
    assert arm["bits_per_byte"] == pytest.approx(5.5 / 3) and arm["bits_per_byte_by_seed"] == [1.9, 1.9, 1.7]
    assert (arm["median_step_seconds"], arm["peak_memory_bytes"]) == (pytest.approx(0.2), 3000)
    assert (arm["flops"], arm["sample"]) == (100, "seed 0"), "of the first seed"
    assert arm["health"]["dead_updates_by_seed"] == [[3]] * 3
    assert arm["confidence"]["auroc_scale"] == pytest.approx(0.6)
    assert arm["confidence"]["spearman_scale_entropy"] is None and arm["confidence"]["scale_in_logits"]
    assert ["model.residual", "norm_agnostic", "pre_norm"] in arm["differs"]


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [([1.8, 1.81, 1.79], "better"), ([2.2, 2.21, 2.19], "worse"), ([2.0, 2.1, 1.9], "no difference seen")],
)
def test_verdicts_follow_from_the_interval(summary_of, ours, verdict):
    (row,) = summary_of(ours, [2.0, 2.0, 2.0])["differences"]
    assert row["verdict"] == verdict
    assert describe_verdict(row) == f"{verdict} at 3 seeds"
    assert f"{verdict} at 3 seeds" in describe_difference(row) and "t over 3 seeds" in describe_difference(row)


def test_one_seed_has_an_interval_over_documents_and_says_so(summary_of):
    summary = summary_of([1.5], [2.0])
    (row,) = summary["differences"]
    assert (row["basis"], row["n_documents"], row["standard_error"]) == ("documents", 2, None)
    assert row["low"] == pytest.approx(-0.5) == pytest.approx(row["high"])
    assert "one seed; paired bootstrap over 2 held-out documents, not over seeds" in describe_difference(row)
    assert describe_verdict(row) == "better on these documents, 1 seed"


def test_a_seed_that_diverged_leaves_no_mean(summary_of):
    lost = {"bits_per_byte": None, "diverged": "the loss is nan"}
    summary = summary_of([1.5, 1.5, 1.5], [2.0, 2.0, 2.0], {("norm_agnostic", 1): lost})
    (row,) = summary["differences"]
    assert row["verdict"] == "diverged" and row["bits_per_byte"] is None and row["by_seed"] == [-0.5, None, -0.5]
    assert summary["arms"]["norm_agnostic"]["diverged"] == [1]
    assert summary["arms"]["norm_agnostic"]["bits_per_byte"] is None
    assert "diverged on 1 of 3 seeds" in describe_difference(row)


def test_an_interrupted_comparison_has_what_there_is(summary_of):
    changes = {("pre_norm", 1): {"finished": False, "steps": 1}}
    summary = summary_of([1.5, 1.5], [2.0, 2.0], changes, interrupted=True)
    assert summary["interrupted"] and summary["differences"] == []
    assert "bits_per_byte" in summary["arms"]["norm_agnostic"] and "bits_per_byte" not in summary["arms"]["pre_norm"]
