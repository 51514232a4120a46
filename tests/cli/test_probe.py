"""nagnet probe on small trained runs: what it writes, what it refuses."""

import csv
import json
import shutil

import pytest
import torch

from nagnet import load_model, save_model
from nagnet.cli.application import run
from nagnet.diagnostics import gallery
from nagnet.training.probing import open_probe

EVERY_FIGURE = {
    *("norm_by_depth", "rotation", "relative_update", "gain", "modulation", "temperature", "alignment"),
    *("preferred_directions", "sinks", "attention_maps", "confidence", "reliability", "block_removal", "outliers"),
    *("skips", "loss", "loss_by_scale", "bits_per_byte", "stream_in_training", "gates_in_training"),
}


def test_every_figure_its_numbers_and_one_page(trained, tmp_path, capsys):
    out = tmp_path / "probe"
    arguments = ["probe", *(str(trained / name) for name in ("full", "twin", "mod")), "--out", str(out)]
    assert run(arguments) == 0
    assert str(out / "report.html") in capsys.readouterr().out
    assert {path.stem for path in (out / "figures").glob("*.png")} == EVERY_FIGURE
    assert {path.stem for path in (out / "figures").glob("*.svg")} == EVERY_FIGURE
    page = (out / "report.html").read_text()
    assert page.count("<figure>") == len(EVERY_FIGURE)
    assert "http" not in page.replace("http://www.w3.org", "")  # needs no network
    assert (out / "report.html").stat().st_size < 8_000_000
    norms = json.loads((out / "numbers" / "norm_by_depth.json").read_text())
    assert list(norms) == ["full", "twin", "mod"]  # two models of one rule: the folders tell them apart
    rows = list(csv.DictReader((out / "numbers" / "norm_by_depth.csv").read_text().splitlines()))
    means = [float(row["value"]) for row in rows if (row["model"], row["quantity"]) == ("twin", "mean")]
    assert means == norms["twin"]["mean"]
    quantities = {
        row["quantity"] for row in csv.DictReader((out / "numbers" / "confidence.csv").read_text().splitlines())
    }
    assert {"area.scale.area", "reliability.accuracy", "summary.scale.deciles.entropy"} <= quantities
    assert "Token view" in page and "as trained" in page
    gains = json.loads((out / "numbers" / "gain.json").read_text())
    assert gains["twin"] is None and len(gains["full"]["alpha"]) == 4
    skips = json.loads((out / "numbers" / "skips.json").read_text())
    assert skips["full"] is None and len(skips["mod"]["skip_rate"]) == 4
    assert run(arguments) == 2  # never over an earlier result
    assert "holds another run" in capsys.readouterr().err


def names(*checkpoints):
    return list(open_probe([str(word) for word in checkpoints], torch.device("cpu"))[0])


def test_models_are_named_by_what_tells_them_apart(trained):
    full, twin, mod = (trained / name for name in ("full", "twin", "mod"))
    assert names(full, twin) == ["norm_agnostic", "pre_norm"]
    assert names(full, mod, twin) == ["full", "mod", "twin"]
    assert names(full / "model", mod / "model") == ["full", "mod"]
    assert names(f"mine={full}", twin, f"norm_agnostic={mod}") == ["mine", "pre_norm", "norm_agnostic"]
    assert names(f"pre_norm={full}", twin) == ["pre_norm", "twin"]


def test_json_alone_on_standard_output(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gallery, "EXHIBITS", ())
    assert run(["probe", str(trained / "full"), "--json", "--out", str(tmp_path / "probe")]) == 0
    assert json.loads(capsys.readouterr().out) == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name one model or more"),
        (["nowhere"], "nowhere is no folder"),
        (["=x"], "NAME=CHECKPOINT"),
        (["a={full}", "a={twin}"], "a is named twice"),
        (["{full}", "--skip-threshold", "2"], "threshold is 2"),
        (["{full}", "--max-bytes", "0"], "max_bytes is 0"),
        (["{full}", "--text", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(trained, tmp_path, capsys, words, message):
    out = tmp_path / "probe"
    words = [word.format(full=trained / "full", twin=trained / "twin") for word in words]
    assert run(["probe", *words, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("option", ["run", "text", "data"])
def test_force_never_deletes_what_is_read(trained, tmp_path, capsys, option):
    out = tmp_path / "out"
    shutil.copytree(trained / "full", out)
    (out / ".nagnet-run").touch()
    (out / "notes.txt").write_text("a stream")
    model = out if option == "run" else trained / "full"
    words = ["probe", f"a={model}", "--out", str(out), "--force"]
    words += [] if option == "run" else [f"--{option}", str(out / "notes.txt")]
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert run(words) == 2
    assert "which is to be read" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_file_in_place_of_the_folder_is_seen_first(trained, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert run(["probe", str(trained / "full"), "--out", str(tmp_path / "file")]) == 2
    assert "file is a file" in capsys.readouterr().err


def test_a_diverged_model_is_named_before_anything_is_written(trained, tmp_path, capsys):
    model = load_model(trained / "full" / "model")
    torch.nn.init.constant_(model.readout.weight, float("nan"))
    shutil.copytree(trained / "full", tmp_path / "broken")
    save_model(model, tmp_path / "broken" / "model")
    out = tmp_path / "probe"
    assert run(["probe", str(tmp_path / "broken"), "--out", str(out)]) == 2
    assert "not finite" in capsys.readouterr().err
    assert not out.exists()


def test_one_short_document_is_enough(trained, tmp_path):
    (tmp_path / "text.txt").write_text("ab")
    models, page = open_probe([str(trained / "full")], torch.device("cpu"), data=str(tmp_path / "text.txt"), whole=True)
    numbers = {exhibit.name: found["norm_agnostic"] for exhibit, found in gallery.measure(models)}
    assert len(numbers["norm_by_depth"].mean) == 5
    assert "1 documents" in dict(page.facts)["Text"]
