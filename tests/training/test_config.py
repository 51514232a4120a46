"""Run configs: one budget, JSON and back, and changes by text."""

import dataclasses
import json

import pytest

from nagnet.errors import UserError
from nagnet.models.config import ModelConfig
from nagnet.nn.readout import ReadoutConfig
from nagnet.training.config import BUDGETS, RunConfig
from nagnet.training.optimizer import OptimizerConfig
from nagnet.training.overrides import coerce_fields, override
from nagnet.training.schedule import ScheduleConfig

MODEL = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=32, max_seq_len=16, n_directions=3)
RUN = RunConfig(model=MODEL, flops=1e9, batch_size=8, seq_len=16)


@pytest.mark.parametrize("budget", BUDGETS)
def test_any_one_budget_is_enough(budget):
    assert getattr(RunConfig(model=MODEL, **{budget: 20}), budget) == 20


@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        ({}, "no budget.*flops, tokens, steps, tokens_per_parameter"),
        ({"flops": 1e9, "steps": 10}, "2 budgets.*flops 1e.09, steps 10"),
        ({"tokens": 0}, "tokens is 0"),
        ({"flops": -1.0}, "flops is -1"),
        ({"flops": float("inf")}, "flops is inf"),
        ({"flops": float("nan")}, "flops is nan"),
    ],
)
def test_missing_contradictory_and_empty_budgets_are_refused(budgets, message):
    with pytest.raises(UserError, match=message):
        RunConfig(model=MODEL, **budgets)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 0}, "seq_len is 0"),
        ({"seq_len": 2.5}, "seq_len is 2.5; give a whole number"),
        ({"batch_size": "8"}, "batch_size is '8'"),
        ({"batch_size": True}, "batch_size is True"),
        ({"micro_batches": 3}, "micro_batches 3 does not divide batch_size 8"),
        ({"device_batch_size": 3}, "device_batch_size 3 does not divide batch_size 8"),
        ({"device_batch_size": 2, "micro_batches": 4}, "both"),
        ({"device_batch_size": 0}, "device_batch_size is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
        ({"log_interval": 0}, "log_interval is 0"),
        ({"eval_interval": -1}, "eval_interval is -1"),
        ({"keep_checkpoints": 0}, "keep_checkpoints is 0"),
        ({"dtype": "bf16"}, "dtype is 'bf16'; choose auto, float32, bfloat16, float16"),
        ({"strategy": "zero"}, "strategy is 'zero'; choose ddp, fsdp"),
        ({"convention": "half"}, "convention is 'half'"),
        ({"data": 3}, "data is 3; give text"),
        ({"compile": 1}, "compile is 1; give true or false"),
        ({"optimizer": 0.1}, "optimizer is 0.1"),
    ],
)
def test_bad_values_name_the_field(changes, message):
    with pytest.raises(UserError, match=message):
        RUN.replace(**changes)


def test_a_new_budget_takes_the_place_of_the_old():
    assert RUN.replace(steps=5).flops is None
    assert RUN.replace(seed=1).flops == 1e9
    with pytest.raises(UserError, match="2 budgets"):
        RUN.replace(steps=5, tokens=100)


@pytest.mark.parametrize(
    ("changes", "n_processes", "share", "passes"),
    [
        ({}, 1, 8, 1),
        ({"micro_batches": 4}, 2, 4, 4),
        ({"device_batch_size": 2}, 1, 8, 4),
        ({"device_batch_size": 2}, 4, 2, 1),
    ],
)
def test_accumulation_follows_from_processes(changes, n_processes, share, passes):
    run = RUN.replace(**changes)
    assert run.tokens_per_step == 128
    assert run.sequences_per_process(n_processes) == share
    assert run.accumulation_steps(n_processes) == passes


@pytest.mark.parametrize(
    ("changes", "n_processes", "message"),
    [
        ({}, 3, "batch_size 8 cannot be shared by 3"),
        ({"micro_batches": 8}, 2, "micro_batches 8 does not divide batch_size 8 / 2 processes"),
        ({"device_batch_size": 4}, 4, "device_batch_size 4 does not divide batch_size 8 / 4 processes"),
    ],
)
def test_batches_that_cannot_be_shared_are_refused(changes, n_processes, message):
    with pytest.raises(UserError, match=message):
        RUN.replace(**changes).accumulation_steps(n_processes)


def _changed_everywhere() -> RunConfig:
    """A config no field of which stands at its default."""
    return RunConfig(
        model=MODEL.replace(
            sliding_windows=(8, 0), readout=ReadoutConfig("free", "learned", 30.0), residual="pre_norm"
        ),
        tokens_per_parameter=20.0,
        convention="full",
        batch_size=6,
        seq_len=12,
        device_batch_size=3,
        optimizer=OptimizerConfig(matrix_lr=0.3, head_betas=(0.5, 0.6), lr_reference_width=768),
        schedule=ScheduleConfig(warmup_steps=7, momentum_start=0.8, weight_decay="cosine"),
        max_grad_norm=1.0,
        seed=2**62 + 1,
        dtype="float16",
        compile=False,
        activation_checkpointing=True,
        strategy="fsdp",
        data="hf:climbmix",
        eval_bytes=5,
        log_interval=2,
        health_interval=3,
        eval_interval=4,
        checkpoint_interval=5,
        keep_checkpoints=6,
    )


def test_json_and_back():
    run = _changed_everywhere()
    still_default = {field.name for field in dataclasses.fields(run) if getattr(run, field.name) == field.default}
    assert still_default == {"flops", "tokens", "steps", "micro_batches", "init_from"}
    assert RunConfig.from_dict(json.loads(json.dumps(run.to_dict()))) == run


def test_missing_keys_take_their_default():
    assert RunConfig.from_dict({"model": {"d_model": 64, "n_heads": 2}, "steps": 3}) == RunConfig(
        model=ModelConfig(d_model=64, n_heads=2), steps=3
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seqlen": 3}, "unknown key 'seqlen' in run config; did you mean 'seq_len'"),
        ({"optimizer": {"matrix_rate": 1.0}}, "unknown key 'matrix_rate' in optimizer; did you mean 'matrix_lr'"),
        ({"schedule": {"warmdwn": 1.0}}, "unknown key 'warmdwn' in schedule; did you mean 'warmdown'"),
        ({"model": {"width": 3}}, "width"),
        ({"optimizer": {"head_betas": [0.9]}}, "head_betas has 1 values; give 2"),
        ({"optimizer": {"gate_lr": "fast"}}, "gate_lr is 'fast'"),
        ({"schedule": []}, r"schedule is \[\]"),
    ],
)
def test_plain_values_that_do_not_fit_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        RunConfig.from_dict({"model": MODEL.to_dict(), "flops": 1e9} | change)


def test_a_config_without_a_model_is_refused():
    with pytest.raises(UserError, match="run config has no 'model'"):
        RunConfig.from_dict({"flops": 1e9})


def test_override_changes_what_it_names_and_nothing_else():
    changed = override(
        RUN,
        [
            "optimizer.matrix_lr=0.01",
            "optimizer.head_betas=0.7,0.9",
            "seq_len = 512",
            "compile=False",
            "data=texts/a=b.txt",
            "dtype=bfloat16",
            "model.n_layers=8",
            "model.sliding_windows=256,0",
            "schedule.warmup_steps=1e2",
        ],
    )
    assert changed == dataclasses.replace(
        RUN,
        optimizer=OptimizerConfig(matrix_lr=0.01, head_betas=(0.7, 0.9)),
        seq_len=512,
        compile=False,
        data="texts/a=b.txt",
        dtype="bfloat16",
        model=MODEL.replace(n_layers=8, sliding_windows=(256, 0)),
        schedule=ScheduleConfig(warmup_steps=100),
    )
    assert override(RUN, []) == RUN


def test_override_lets_derived_fields_follow():
    changed = override(RUN, ["model.readout.softcap=30", "model.residual=pre_norm", "model.d_model=32"])
    assert changed.model == MODEL.replace(
        residual="pre_norm", d_model=32, readout=ReadoutConfig(rows="free", scale="none", softcap=30.0)
    )
    assert changed.model.d_ff == 128


def test_override_of_the_budget_takes_its_place():
    assert override(RUN, ["steps=7"]) == RUN.replace(steps=7)
    with pytest.raises(UserError, match="2 budgets"):
        override(RUN, ["steps=7", "tokens=100"])
    assert override(RUN, ["steps=7", "steps=9"]).steps == 9


@pytest.mark.parametrize("text", ["123", "1e3", "true", "a,b"])
def test_text_stays_text(text):
    assert override(RUN, [f"data={text}"]).data == text


@pytest.mark.parametrize("text", ["none", "None", "null"])
def test_override_empties_a_field(text):
    full = RUN.replace(data="a.txt", device_batch_size=4)
    assert override(full, [f"data={text}", f"device_batch_size={text}"]) == RUN


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("seq_len", "KEY=VALUE"),
        ("seqlen=3", "unknown key 'seqlen'; did you mean 'seq_len'"),
        ("matrix_lr=3", "did you mean 'optimizer.matrix_lr'"),
        ("optimiser.matrix_lr=3", "did you mean 'optimizer.matrix_lr'"),
        ("model=tiny", "model is a group of keys; set one of them, such as model.residual"),
        ("model.readout=free", "such as model.readout.rows"),
        ("seq_len=many", "seq_len is 'many'; give a whole number"),
        ("seq_len=1.5", "seq_len is 1.5"),
        ("seq_len=", "seq_len is ''"),
        ("compile=7", "compile is 7; give true or false"),
        ("seq_len=none", "seq_len is None"),
        ("optimizer.head_betas=0.9", "optimizer.head_betas has 1 values; give 2"),
        ("optimizer.head_betas=a,b", "optimizer.head_betas is 'a'"),
        ("optimizer.gate_lr=-1", "gate_lr is -1"),
        ("model.d_model=7", "d_model 7"),
        ("model.readout.rows=long", "model.readout.rows is 'long'; choose free, unit"),
        ("flops=1" + "0" * 400, "flops is 10"),
        ("flops=none", "no budget"),
    ],
)
def test_override_says_in_one_line_what_is_wrong(assignment, message):
    with pytest.raises(UserError, match=message) as raised:
        override(RUN, [assignment])
    assert "\n" not in str(raised.value)


def test_fields_are_brought_to_their_type():
    @dataclasses.dataclass(frozen=True)
    class Config:
        count: int = 1
        rate: float = 1.0
        pair: tuple[float, float] = (1.0, 1.0)

    config = Config(count=3.0, rate=2, pair=[1, 2])  # pyright: ignore
    coerce_fields(config)
    assert config == Config(3, 2.0, (1.0, 2.0))
    assert [type(value) for value in dataclasses.astuple(config)] == [int, float, tuple]
