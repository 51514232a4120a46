"""Small trained runs, for the commands that read one."""

import pytest

from nagnet.cli.application import run

SMALL = [
    *("model.d_model=16", "model.n_layers=2", "model.n_heads=2", "model.vocab_size=270", "model.max_seq_len=64"),
    *("model.n_directions=3", "steps=4", "batch_size=4", "seq_len=16", "compile=false", "dtype=float32"),
    *("eval_bytes=4000", "health_interval=2", "eval_interval=2", "checkpoint_interval=0"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs by name: with skipping, without, and the twin."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text").mkdir()
    for number in range(60):
        words = " ".join(f"a stream of words {number * i % 97}" for i in range(16 + number % 9))
        (folder / "text" / f"{number}.txt").write_text(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NAGNET_CACHE", str(folder / "cache"))
        for name, change in (
            ("full", []),
            ("mod", ["model.skip.target_rate=0.25", "model.skip.start_step=1"]),
            ("twin", ["model.residual=pre_norm"]),
        ):
            arguments = ["--data", str(folder / "text"), "--out", str(folder / name), "--trackers", "none"]
            assert run(["train", "stdlib-tiny", *SMALL, *change, *arguments]) == 0
        yield folder
