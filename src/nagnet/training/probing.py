"""Opens models for a probe: names them, reads one text for all, finds what their runs wrote."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nagnet.data.corpus import Document, hash_documents
from nagnet.data.loader import encode_documents
from nagnet.diagnostics.probe_report import ProbePage
from nagnet.diagnostics.probed import ProbedModel, cut_text
from nagnet.diagnostics.report import ReportTable
from nagnet.diagnostics.token_page import render_token_views
from nagnet.diagnostics.token_view import TokenView, token_view_of_text
from nagnet.errors import UserError
from nagnet.files import MODEL_FOLDER
from nagnet.ops.loss import IGNORED_TARGET
from nagnet.training.environment import describe_environment
from nagnet.training.evaluated import EvaluatedModel, open_model
from nagnet.training.metrics import read_metrics

SAMPLE_TOKENS = 400  # of a held-out document, shown where the user names no text
HISTORY_ROWS = 2000  # of a run's metrics, evenly thinned


def open_probe(
    checkpoints: Sequence[str],
    device: torch.device,
    data: str | None = None,
    max_bytes: int | None = None,
    whole: bool = False,
    text_file: Path | None = None,
    tokenizer_file: Path | None = None,
    seq_len: int | None = None,
    skip_threshold: float | None = None,
) -> tuple[dict[str, ProbedModel], ProbePage]:
    """Opens models and cuts one text for all of them.

    Args:
        checkpoints: each as for `find_model`, or NAME=CHECKPOINT.
        data, max_bytes, whole: the text, as for `EvaluatedModel.text`; by default that of the first model's run.
        text_file: shown token by token.
        tokenizer_file, seq_len, skip_threshold: as for `open_model`.

    Returns:
        The models by name, and what the report says beside its figures.

    Raises:
        UserError: if there is no checkpoint, one is named twice or cannot be opened, or there is no text.
    """
    opened = {
        name: open_model(path, device, tokenizer_file=tokenizer_file, seq_len=seq_len, skip_threshold=skip_threshold)
        for name, path in _named(checkpoints).items()
    }
    opened = _labelled(opened)
    first = next(iter(opened.values()))
    text = None if text_file is None else _read(text_file)
    documents, source = first.text(data, max_bytes, whole)
    models = {
        name: ProbedModel(
            model.model,
            cut_text(encode_documents(documents, model.tokenizer), model.seq_len, device),
            _history(model),
        )
        for name, model in opened.items()
    }
    environment = describe_environment(device, torch.float32)
    facts = [
        ("Text", f"{source}: {len(documents):,} documents, hash {hash_documents(documents)[:12]}"),
        ("Evaluation rows", _rows_in_words(models)),
        ("Token view", f"{text_file or documents[0].name}; the figures are of the text above"),
        ("Skipping", _skipping_in_words(opened, skip_threshold)),
        *((f"Folder of {name}", str(model.saved.folder)) for name, model in opened.items()),
        ("Device", f"{device}, {environment['machine']['processor']}, {environment['dtype']}"),
        ("Git commit", environment["git_commit"] or "not in a repository"),
    ]
    views = {name: _token_view(model, documents, text) for name, model in opened.items()}
    title = f"Inside {' and '.join(opened)}" if len(opened) < 4 else f"Inside {len(opened)} models"
    table = _models_table(opened)
    return models, ProbePage(title, table, facts, environment["versions"], render_token_views(views))


def _token_view(opened: EvaluatedModel, documents: Sequence[Document], text: str | None) -> TokenView:
    """The user's text token by token, or the beginning of the first held-out document."""
    view = functools.partial(token_view_of_text, opened.model, opened.tokenizer, seq_len=opened.seq_len)
    return view(documents[0].text, max_tokens=SAMPLE_TOKENS) if text is None else view(text)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start}); convert it first") from error


def _named(checkpoints: Sequence[str]) -> dict[str, str]:
    """Path by name; a path without a name is its own."""
    if not checkpoints:
        raise UserError("name one model or more: nagnet probe CHECKPOINT [CHECKPOINT ...]")
    named: dict[str, str] = {}
    for word in checkpoints:
        name, equals, path = word.partition("=")
        if not equals or Path(word).exists():
            name, path = word, word
        if not name or not path:
            raise UserError(f"{word!r}: give CHECKPOINT or NAME=CHECKPOINT")
        if name in named:
            raise UserError(f"{name} is named twice; give each model a name of its own: NAME=CHECKPOINT")
        named[name] = path
    return named


def _labelled(opened: Mapping[str, EvaluatedModel]) -> dict[str, EvaluatedModel]:
    """Models by a short name: the residual rule where that tells them apart, so that an arm has its colour, else the
    folder's."""
    unnamed = {name: model for name, model in opened.items() if Path(name).exists()}
    choices: list[dict[str, str]] = [
        {name: model.model.config.residual for name, model in unnamed.items()},
        {name: _folder_name(name) for name in unnamed},
        {name: name for name in unnamed},
    ]
    taken = set(opened) - set(unnamed)
    labels = next(
        choice for choice in choices if len(set(choice.values())) == len(choice) and not taken & set(choice.values())
    )
    return {labels.get(name, name): model for name, model in opened.items()}


def _folder_name(path: str) -> str:
    folder = Path(path).absolute()
    return folder.parent.name if folder.name == MODEL_FOLDER else folder.name


def _history(opened: EvaluatedModel) -> list[dict[str, Any]]:
    """Rows of the metrics of the model's run, thinned evenly but for those with health or a score."""
    if opened.saved.metrics_file is None:
        return []
    arm = opened.saved.arm
    rows = [row for row in read_metrics(opened.saved.metrics_file) if arm is None or row.get("arm") == arm]
    every = max(1, len(rows) // HISTORY_ROWS)
    return [
        row
        for place, row in enumerate(rows)
        if place % every == 0 or place == len(rows) - 1 or "health" in row or "bits_per_byte" in row
    ]


def _rows_in_words(models: Mapping[str, ProbedModel]) -> str:
    text = next(iter(models.values())).text
    shapes = (text.tokens.shape, text.sink_tokens.shape)
    (rows, length), (sink_rows, sink_length) = shapes
    scored = sum(int((targets != IGNORED_TARGET).sum()) for _, targets in text.scored)
    return (
        f"{rows} of {length} tokens, each the beginning of a document (where documents are too few, later parts "
        f"follow), BOS in front; for attention {sink_rows} of {sink_length}; predictions judged on {scored:,} tokens"
    )


def _skipping_in_words(opened: Mapping[str, EvaluatedModel], threshold: float | None) -> str:
    if threshold is not None:
        return f"every model skips sublayers whose rotation score is not above {threshold:g}"
    skipping = [name for name, model in opened.items() if model.model.skipping is not None]
    return f"{', '.join(skipping)}: as trained" if skipping else "none: every token runs every sublayer"


def _models_table(opened: Mapping[str, EvaluatedModel]) -> ReportTable:
    rows = []
    for name, model in opened.items():
        config, results = model.model.config, model.saved.results
        bits, tokens = results.get("bits_per_byte"), results.get("tokens")
        rows.append(
            [
                name,
                config.residual.replace("_", "-"),
                f"{config.n_layers} × {config.d_model}",
                f"{sum(parameter.numel() for parameter in model.model.parameters()):,}",
                "–" if tokens is None else f"{tokens:,}",
                "–" if bits is None else f"{bits:.4f}",
            ]
        )
    columns = ["model", "rule", "blocks × width", "parameters", "training tokens", "bits per byte"]
    note = "Bits per byte as the run itself measured them, on its own text and skipping as trained; lower is better."
    return ReportTable("Models", columns, rows, note)
