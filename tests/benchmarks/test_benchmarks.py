"""Benchmarks measure what they say; the numbers themselves are for records/."""

import json
import time
from collections import Counter

import pytest
import torch
from torch import nn

from nagnet import ops
from nagnet.benchmarks import decoding, residual_update, scoring, skipping, training_loop, training_step
from nagnet.benchmarks.timing import interleave, kept_bytes, machine
from nagnet.cli.application import run
from nagnet.errors import UserError
from nagnet.generation import graph
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.nn.norm_agnostic import NormAgnosticResidual
from nagnet.ops import fused

CPU = torch.device("cpu")


@pytest.fixture
def uncompiled(monkeypatch):
    """Compiling takes most of the time of these benchmarks and nothing here depends on it."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(fused, "_call", lambda body, *arguments: body(*arguments))
    monkeypatch.setattr(
        graph, "_compiled", lambda function, given, sizes: (lambda tensors: function(*tensors), [True] * len(given))
    )
    graph._graph_of.cache_clear()
    yield
    graph._graph_of.cache_clear()


def test_alternatives_take_turns():
    calls = []
    timings = interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=3, warm_up=1)
    assert calls == ["a", "b"] * 4
    assert timings["a"].fastest <= timings["a"].low <= timings["a"].median <= timings["a"].high


def test_several_of_a_kind_are_taken_together(monkeypatch):
    clock = iter([0.0, 1.0, 10.0, 13.0, 20.0, 21.0, 30.0, 33.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    timing = interleave({"a": [lambda: None, lambda: None]}, repeats=2, warm_up=0)["a"]
    assert (timing.fastest, timing.median, timing.high) == (1.0, 2.0, 3.0)


def test_one_repeat_has_no_median():
    with pytest.raises(UserError, match="repeats is 1"):
        interleave({"a": lambda: None}, repeats=1)


def test_kept_bytes_counts_each_storage_once_and_no_parameters():
    layer = nn.Linear(8, 8, bias=False)
    x = torch.randn(5, 8, requires_grad=True)
    assert kept_bytes(lambda: layer(x), layer) == 5 * 8 * 4
    assert kept_bytes(lambda: layer(x) + layer(x), layer) == 5 * 8 * 4


def test_update_counts_the_bytes_that_must_move(uncompiled):
    rows = residual_update.bench_residual_update(16, 8, 2, torch.float32, CPU, repeats=2)
    by_name = {row["name"]: row for row in rows}
    size = 16 * 8 * 4
    assert by_name["clone"]["bytes"] == 2 * size and by_name["clone"]["share_of_clone"] == pytest.approx(1.0)
    assert by_name["norm-agnostic, fused"]["bytes"] == 8 * size
    assert by_name["gain"]["flops"] == 6 * 16 * 8 * 2


def test_step_compares_both_arms(monkeypatch):
    tiny = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=32, n_directions=2)
    monkeypatch.setitem(training_step.SHAPES, "tiny", (tiny, 2, 8))
    result = training_step.bench_training_step("tiny", torch.float32, CPU, repeats=2, compiled=False)
    arms = result["arms"]
    assert set(arms) == {"norm_agnostic", "pre_norm"}
    assert result["ratios"]["kept_bytes"] == arms["norm_agnostic"]["kept_bytes"] / arms["pre_norm"]["kept_bytes"]
    assert result["ratios"]["kept_bytes"] > 1  # uncompiled, the reference keeps more than the twin


def test_command_prints_and_writes_json(uncompiled, tmp_path, capsys):
    out = tmp_path / "result.json"
    arguments = ["bench", "residual_update", "--rows", "16", "--d-model", "8", "--repeats", "2", "--json"]
    assert run([*arguments, "--out", str(out)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(out.read_text())
    assert printed["machine"]["torch"] == machine()["torch"]
    assert run(arguments[:-1]) == 0
    assert "of clone" in capsys.readouterr().out


def test_kept_bytes_alone_are_those_of_the_step(monkeypatch):
    monkeypatch.setattr(Decoder, "compile_blocks", lambda model: None)
    tiny = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=32, n_directions=2)
    monkeypatch.setitem(training_step.SHAPES, "tiny", (tiny, 2, 8))
    step = training_step.bench_training_step("tiny", torch.float32, CPU, repeats=2, compiled=False)
    alone = training_step.bench_kept_bytes("tiny", torch.float32, CPU)
    assert alone["bytes"] == {arm: row["kept_bytes"] for arm, row in step["arms"].items()}
    smaller = training_step.bench_kept_bytes("tiny", torch.float32, CPU, batch_size=1)
    assert smaller["batch_size"] == 1 and smaller["bytes"]["pre_norm"] < alone["bytes"]["pre_norm"]


def test_loop_is_timed_beside_a_minimal_one(monkeypatch):
    monkeypatch.setattr(Decoder, "compile_blocks", lambda model: None)
    model = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=32, max_seq_len=8, n_directions=2)
    result = training_loop.bench_training_loop(model, 2, CPU, repeats=2)
    seconds = result["seconds"]
    assert result["throughput"] == seconds["minimal"]["median"] / seconds["trainer"]["median"]
    assert 0 < result["beside_computing"] < 1 and result["per_interval"]["health"] > 0
    assert result["loader"]["tokens_per_second"] > 0


def test_decoding_counts_what_a_step_reads(monkeypatch):
    monkeypatch.setattr(decoding, "COPIED_BYTES", 4096)
    tiny = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=32, n_directions=2)
    result = decoding.bench_decoding(tiny, torch.float32, 3, 5, CPU, repeats=2, compiled=False)
    ours, twin = (result["arms"][arm] for arm in ("norm_agnostic", "pre_norm"))
    matrices, readout, cache = 2 * 12 * 16 * 16, 32 * 16, 3 * 6 * 2 * 2 * 16
    assert twin["bytes"] == 4 * (matrices + readout + cache)
    assert ours["bytes"] - twin["bytes"] == 4 * (4 * (2 * 16 + 2 + 2 + 1 + 1) + 1)  # modulators, alpha, G_encode
    assert ours["share_of_bound"] == ours["bound"] / ours["uncompiled_seconds"]["median"]
    assert result["ratio"] == ours["uncompiled_seconds"]["median"] / twin["uncompiled_seconds"]["median"]
    assert ours["bound"] == ours["bytes"] / result["copy_bytes_per_second"]
    half = decoding.bench_decoding(tiny, torch.bfloat16, 3, 5, CPU, repeats=2, compiled=False)
    assert half["arms"]["pre_norm"]["bytes"] == 2 * (matrices + cache) + 4 * readout


def test_products_count_the_bytes_of_their_matrices(monkeypatch):
    monkeypatch.setattr(decoding, "COPIED_BYTES", 4096)
    monkeypatch.setattr(decoding, "PRODUCT_BYTES", 2 * 4 * 16 * 16)
    tiny = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=1024, n_directions=2)
    rows = decoding.bench_products(tiny, torch.float32, CPU, repeats=2, compiled=False)
    assert [row["name"] for row in rows][:2] == ["16 x 16, library", "16 x 16, matvec"]
    by_name = {row["name"]: row for row in rows}
    assert by_name["16 x 16, matvec"]["bytes"] == 2 * 4 * 16 * 16
    assert by_name["1024 x 16, library"]["bytes"] == 4 * 1024 * 16
    for row in rows:
        assert row["bytes_per_second"] == row["bytes"] / row["seconds"]["median"]


def test_decoding_prints_steps_and_products(uncompiled, monkeypatch, capsys):
    monkeypatch.setattr(decoding, "COPIED_BYTES", 4096)
    monkeypatch.setattr(decoding, "PRODUCT_BYTES", 4096)
    tiny = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=32, n_directions=2)
    monkeypatch.setattr(decoding, "MODEL", tiny)
    assert run(["bench", "decoding", "--repeats", "2", "--seq-len", "4"]) == 0
    out = capsys.readouterr().out
    assert "batch 1 at 4 tokens" in out and "batch 8 at 4 tokens" in out
    assert out.count("of the bound") == 4 and out.count("of copy") == 8


@pytest.fixture
def tiny_skipping(uncompiled, monkeypatch):
    """The benchmark of skipping on models of four blocks."""
    tiny = ModelConfig(d_model=16, n_layers=4, n_heads=2, vocab_size=32, n_directions=2)
    monkeypatch.setattr(torch, "cond", lambda pred, yes, no, operands: yes(*operands) if pred else no(*operands))
    for name, value in (("DECODED", tiny), ("TRAINED", tiny), ("SEQ_LEN", 16), ("COPIED_BYTES", 4096)):
        monkeypatch.setattr(skipping, name, value)


def test_skipping_counts_what_it_saves(tiny_skipping):
    rows = skipping.bench_skipping_decode(5, CPU, repeats=2)["alternatives"]
    whole = rows["full depth"]["bytes"]
    assert rows["nothing skipped"]["bytes"] == whole
    attention, mlp, keys = 2 * 16 * 16, 8 * 16 * 16, 2 * 6 * 16  # numbers of one block
    assert whole - rows["25% skipped"]["bytes"] == 4 * (attention + mlp + keys)
    assert whole - rows["50% skipped"]["bytes"] == 4 * 2 * (attention + mlp + keys)
    assert whole - rows["all skipped"]["bytes"] == 4 * 4 * (attention + mlp + keys)
    for row in rows.values():
        assert row["ceiling"] == whole / row["bytes"]
        assert row["speedup"] == rows["full depth"]["seconds"]["median"] / row["seconds"]["median"]
    rows = skipping.bench_skipping_training(CPU, repeats=2, compiled=False)["alternatives"]
    assert rows["nothing skipped"]["ceiling"] == 1.0
    assert rows["25% skipped"]["skip_rates"]["sublayer_tokens"] == pytest.approx(0.25, abs=0.03)
    assert 1.0 < rows["25% skipped"]["ceiling"] < 1.33


def test_the_floor_is_what_no_token_skips(tiny_skipping, monkeypatch):
    gain, gains = NormAgnosticResidual.gain, []
    monkeypatch.setattr(NormAgnosticResidual, "gain", lambda update, state: gains.append(update) or gain(update, state))
    model = Decoder(skipping.DECODED, seed=0)
    floor = skipping._floor(model, 5)
    called = Counter()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda module, inputs, output, name=name: called.update([name.split(".")[-1]]))
    gains.clear()
    floor()
    assert called == {"k_proj": 4, "v_proj": 4, "readout": 1} and len(gains) == 8


def test_skipping_prints(tiny_skipping, capsys):
    assert run(["bench", "skipping", "--repeats", "2", "--seq-len", "4"]) == 0
    out = capsys.readouterr().out
    assert out.count("of the ceiling") == 7 and out.count("x its floor") == 1


def test_scoring_is_timed_on_the_same_answers(monkeypatch):
    """One example at a time and in batches: each alternative scores every token that is to be scored, once a round."""
    config = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=32, n_directions=2, max_seq_len=64)
    tasks = {"three options": scoring.Prompts(3, 8, 4), "one": scoring.Prompts(1, 12, 2)}
    monkeypatch.setattr(scoring, "TASKS", tasks)
    monkeypatch.setattr(ops, "compiler_works", lambda: True)
    monkeypatch.setattr(Decoder, "compile_blocks", lambda model, dynamic: None)
    scored, calls = [], []
    run = scoring._run

    def noted(scorer, groups):
        calls.append((scorer.model, len(groups)))
        found = [(place, score) for part in scorer.scores(groups) for place, score in part.items()]
        scored.append(sum(len(score.losses) for _, scores in found for score in scores))
        run(scorer, groups)

    monkeypatch.setattr(scoring, "_run", noted)
    results = scoring.bench_core(CPU, repeats=2, config=config, n_examples=5)
    *results, together = results
    assert [row["name"] for row in results] == ["three options", "one"]
    for name, seconds in together["seconds"].items():
        assert seconds["median"] == sum(row["seconds"][name]["median"] for row in results)
    for row, prompts, first in zip(results, tasks.values(), (0, 36), strict=True):
        alone, batches = {scoring.ALL_LOGITS, scoring.SCORED_LOGITS}, {scoring.BATCHES, scoring.COMPILED}
        assert set(row["seconds"]) == alone | batches and set(row["speedup"]) == batches
        assert all(set(faster) == alone for faster in row["speedup"].values())
        one_round = scored[first : first + 12]  # five examples by two models, then all of them by two
        assert sum(one_round[:5]) == sum(one_round[5:10]) == one_round[10] == one_round[11] > 0
        assert [n for _, n in calls[first : first + 12]] == [prompts.options] * 10 + [5, 5]
