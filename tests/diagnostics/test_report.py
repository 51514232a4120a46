import base64
import math
import re
from html.parser import HTMLParser

import pytest

from nagnet.diagnostics import report
from nagnet.diagnostics.report import ONE_SEED, ReportTable, write_report
from nagnet.errors import UserError

SVG = b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'/>"
PNG = b"\x89PNG\r\n\x1a\nrest"
SCRIPT = "<script>alert('x')</script> & \"more\""


def make_difference(**changes):
    return {
        "arm_a": "norm_agnostic",
        "arm_b": "pre_norm",
        "bits_per_byte": -0.0123,
        "low": -0.0161,
        "high": -0.0085,
        "confidence": 0.95,
        "n_documents": 81,
    } | changes


def make_summary(**changes):
    def arm(residual, **numbers):
        return {
            "config": {"residual": residual, "d_model": 64, "readout": {"scale": "none"}},
            "parameters": 851_969,
            "tokens": 2_293_760,
            "flops": 1.17e13,
            "steps": 560,
            "bits_per_byte": 1.9123,
            "median_step_seconds": 0.2,
            "peak_memory_bytes": 512_000_000,
            "seconds": 200.0,
            "sample": SCRIPT,
        } | numbers

    return {
        "recipe": "stdlib-tiny",
        "corpus": {"source": "standard library", "hash": "sha256:abc", "documents": 812, "tokens": 4_200_311},
        "budget": {"flops": 1.17e13, "convention": "causal"},
        "arms": {
            "norm_agnostic": arm("norm_agnostic", median_step_seconds=0.25),
            "pre_norm": arm("pre_norm", bits_per_byte=1.9246),
        },
        "run": {"model": {"residual": "norm_agnostic"}, "batch_size": 16},
        "differences": [make_difference()],
        "versions": {"torch": "2.13.0", "python": "3.11.2"},
        "git_commit": "7ac6120",
        "device": "cpu",
        "seed": 0,
    } | changes


class Page(HTMLParser):
    """Text of the page, its tags, and a check that what opens is closed."""

    VOID = {"meta", "link", "img", "br", "hr"}

    def __init__(self, html: str):
        super().__init__()
        self.tags, self.words, self.open = [], [], []
        self.feed(html)
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)


def render(tmp_path, summary, figures=(), **options) -> tuple[str, Page]:
    path = tmp_path / "report.html"
    write_report(path, "A comparison", summary, figures, **options)
    html = path.read_text(encoding="utf-8")
    return html, Page(html)


def test_report_holds_the_results(tmp_path):
    table = ReportTable("Gates", ("quarter", "gain"), [("1", "0.5")], "Ours.")
    html, page = render(tmp_path, make_summary(), [("Loss", "Nats.", SVG), ("Norm", "RMS.", PNG)], tables=[table])
    for text in (
        "norm-agnostic 1.9123 2,293,760 1.170 × 10¹³ 851,969 250 ms 1.25× 512 MB",
        "pre-norm 1.9246 2,293,760 1.170 × 10¹³ 851,969 200 ms 1.00× 512 MB",
        "Norm-agnostic needs fewer bits per byte than pre-norm.",
        "norm-agnostic minus pre-norm: −0.0123 bits per byte, 95% interval −0.0161 to −0.0085",
        "81 documents",
        "one seed: interval over held-out documents, not over seeds",
        "sha256:abc",
        "torch 2.13.0, python 3.11.2",
        "7ac6120",
        "Gates quarter gain 1 0.5 Ours.",
        "Loss Nats. Norm RMS.",
        "model.residual norm_agnostic pre_norm",
        "model.readout.scale none none",
        "run.batch_size 16 16",
    ):
        assert text in page.text, text
    images = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    assert [base64.b64decode(image.split(",")[1]) for image in images] == [SVG, PNG]
    assert [image.split(";")[0] for image in images] == ["data:image/svg+xml", "data:image/png"]
    assert ("details", {}) in page.tags
    differing = re.findall(r'<tr class="differs"><th scope="row">([\w.]+)', html)
    assert differing == ["model.residual"]
    assert "interrupted" not in page.text
    assert "run.model" not in page.text


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (-0.02, -0.01, "Norm-agnostic needs fewer bits per byte than pre-norm."),
        (-0.02, 0.01, "No difference between norm-agnostic and pre-norm seen at 3 seeds."),
        (None, None, "an arm diverged"),
    ],
)
def test_differences_over_seeds_say_so(tmp_path, low, high, words):
    row = make_difference(low=low, high=high, basis="seeds", n_seeds=3, by_seed=[-0.01, None, 0.02])
    summary = make_summary(differences=[row], seeds=[0, 1, 2])
    summary["arms"]["pre_norm"]["run"] = {"batch_size": 8}
    html, page = render(tmp_path, summary)
    assert words in page.text and "Student's t over 3 seeds: −0.0100, –, +0.0200" in page.text
    assert ONE_SEED not in page.text and "Seeds 0, 1, 2" in page.text
    assert "run.batch_size 16 8" in page.text


def test_nothing_outside_the_file_is_asked_for(tmp_path):
    html, page = render(tmp_path, make_summary(), [("Loss", "Nats.", SVG)])
    assert not re.search(r"https?://|//\w|@import|url\(", html)
    for _, attributes in page.tags:
        for name in ("src", "href"):
            assert attributes.get(name, "data:").startswith("data:")


def test_every_text_is_escaped(tmp_path):
    summary = make_summary(recipe=SCRIPT, device=SCRIPT, versions={SCRIPT: SCRIPT})
    summary["arms"]["norm_agnostic"]["config"] = {"residual": SCRIPT, SCRIPT: SCRIPT}
    table = ReportTable(SCRIPT, (SCRIPT,), [(SCRIPT,)], SCRIPT)
    html, page = render(tmp_path, summary, [(SCRIPT, SCRIPT, SVG)], tables=[table])
    assert "<script" not in html and not any(tag == "script" for tag, _ in page.tags)
    assert page.text.count("alert('x')") == 15  # none of them got lost either


def test_samples_can_be_given(tmp_path):
    _, page = render(tmp_path, make_summary(), samples={"pre_norm": "def f():"})
    assert "Text from each arm pre-norm def f(): How" in page.text and "alert" not in page.text


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((0.01, 0.005, 0.02), "Norm-agnostic needs more bits per byte than pre-norm."),
        ((-0.01, -0.02, 0.001), "do not tell norm-agnostic and pre-norm apart"),
        ((math.nan, math.nan, math.nan), "not a finite number"),
    ],
)
def test_verdict_follows_the_interval(tmp_path, numbers, words):
    difference = make_difference(**dict(zip(("bits_per_byte", "low", "high"), numbers, strict=True)))
    assert words in render(tmp_path, make_summary(differences=[difference]))[1].text


def test_more_than_two_arms_are_compared_one_by_one(tmp_path):
    summary = make_summary(differences=[make_difference(), make_difference(arm_b="none")])
    summary["arms"]["none"] = summary["arms"]["pre_norm"]
    _, page = render(tmp_path, summary)
    assert page.text.count("paired bootstrap") == 2
    assert "norm-agnostic minus no residual" in page.text and "Configuration of all arms" in page.text


def test_an_interrupted_run_says_so_and_may_lack_what_it_did_not_measure(tmp_path):
    summary = make_summary(interrupted=True, differences=[], git_commit=None)
    for arm in summary["arms"].values():
        del arm["bits_per_byte"], arm["sample"]
    summary["arms"]["norm_agnostic"] |= {
        "median_step_seconds": None,
        "peak_memory_bytes": None,
        "steps": 0,
        "tokens": 0,
        "flops": 0,
    }
    _, page = render(tmp_path, summary)
    assert "This run was interrupted." in page.text and ONE_SEED not in page.text
    assert "norm-agnostic – 0 0 851,969 – – –" in page.text


def test_step_time_is_relative_to_the_first_arm_without_a_twin(tmp_path):
    summary = make_summary()
    summary["arms"]["pre_norm"]["config"] = {"residual": "post_norm"}
    assert "250 ms 1.00×" in render(tmp_path, summary)[1].text


def test_a_missing_key_is_named_and_leaves_no_file(tmp_path):
    summary = make_summary()
    del summary["arms"]["pre_norm"]["flops"]
    with pytest.raises(UserError, match="'flops'"):
        render(tmp_path, summary)
    with pytest.raises(UserError, match="SVG nor PNG"):
        render(tmp_path, make_summary(), [("Loss", "Nats.", b"GIF89a")])
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write_report(tmp_path / "file" / "report.html", "t", make_summary(), [])


@pytest.mark.parametrize(
    ("count", "text"), [(1, "1 B"), (1000, "1 kB"), (14_200_311, "14.2 MB"), (2.5e12, "2.5e+03 GB"), (0, "–")]
)
def test_bytes(count, text):
    assert report._bytes(count) == text
