"""The tasks of a CORE bundle: reading them, and the token rows by which an example is scored.

A bundle is a folder with ``core.yaml`` (tasks), ``eval_meta_data.csv`` (their random baselines in percent) and
``eval_data/`` (examples, one JSON object a line). Forms of prompts, shuffling and sampling are those of DCLM's metric
(arXiv 2406.11794) as the public walkthrough computes it.
"""

from __future__ import annotations

import csv
import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeGuard, get_args

from nagnet.errors import UserError
from nagnet.evaluation.rows import Row, common_length

CONFIG_FILE = "core.yaml"
BASELINES_FILE = "eval_meta_data.csv"
DATA_FOLDER = "eval_data"
SHUFFLE_SEED = 1337
SHOTS_SEED = 1234  # plus the index of the example
SEPARATOR = "\n\n"  # between the examples of a prompt
DEFAULT_DELIMITER = " "  # between question and answer

Kind = Literal["multiple_choice", "schema", "language_modeling"]
# What an example has: text fields, and the field with its options of which `gold` is the right one.
_TEXTS = {"multiple_choice": ("query",), "schema": ("continuation",), "language_modeling": ("context", "continuation")}
_OPTIONS = {"multiple_choice": "choices", "schema": "context_options"}


class TokenizerLike(Protocol):
    """What an evaluation needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special ones."""
        ...

    def get_bos_token_id(self) -> int:
        """The id that begins every text."""
        ...


@dataclass(frozen=True)
class Task:
    """One task, ready to be asked.

    Attributes:
        label: its name. kind: how it is scored. n_shots: solved examples before each question.
        delimiter: between question and answer. baseline: accuracy of guessing, in percent.
        examples: as in the file, shuffled and capped.
    """

    label: str
    kind: Kind
    n_shots: int
    delimiter: str
    baseline: float
    examples: Sequence[dict[str, Any]]

    def shots(self, index: int) -> list[dict[str, Any]]:
        """The solved examples before example ``index``, drawn from all others."""
        others = random.Random(SHOTS_SEED + index).sample(range(len(self.examples) - 1), self.n_shots)
        return [self.examples[other + (other >= index)] for other in others]

    def n_characters(self) -> int:
        """About how many all prompts have together: the texts of each example, and as many for each of its shots."""
        values = [value for example in self.examples for value in example.values()]
        texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
        return (1 + self.n_shots) * sum(len(text) for text in texts if isinstance(text, str))

    def centred(self, accuracy: float) -> float:
        """Accuracy (share) with guessing at 0 and all right at 1."""
        guessing = self.baseline / 100
        return (accuracy - guessing) / (1 - guessing)


@dataclass(frozen=True)
class Bundle:
    """Tasks in the order of core.yaml, and the SHA-256 (hex) of all files that were read."""

    tasks: tuple[Task, ...]
    content_hash: str


def read_bundle(folder: str | Path, max_per_task: int | None = None) -> Bundle:
    """Reads all tasks of a bundle and checks every example, so that nothing is wrong later.

    Args:
        folder: the bundle.
        max_per_task: most examples of each task, the first after shuffling; None for all.

    Raises:
        UserError: if a file is missing or malformed (naming file, line and field), or a task has no example left
            beside its shots.
    """
    folder, digest = Path(folder), hashlib.sha256()
    if max_per_task is not None and max_per_task < 1:
        raise UserError(f"max_per_task is {max_per_task}; give 1 or more")
    described = _read_config(folder / CONFIG_FILE, digest)
    baselines = _read_baselines(folder / BASELINES_FILE, digest)
    tasks = []
    for label, entry in described.items():
        if label not in baselines:
            raise UserError(f"{folder / BASELINES_FILE} has no random baseline of task {label!r}; add its row")
        examples = _read_examples(folder / DATA_FOLDER / entry["dataset_uri"], entry["icl_task_type"], label, digest)
        random.Random(SHUFFLE_SEED).shuffle(examples)
        shots = entry["num_fewshot"][0]
        examples = examples[:max_per_task]
        if len(examples) <= shots:
            what = f"a cap of {max_per_task}" if len(examples) == max_per_task else f"{len(examples)} examples"
            raise UserError(f"task {label}: {what} leaves no example beside its {shots} shots; {shots + 1} are needed")
        delimiter = entry.get("continuation_delimiter", DEFAULT_DELIMITER)
        tasks.append(Task(label, entry["icl_task_type"], shots, delimiter, baselines[label], examples))
    return Bundle(tuple(tasks), digest.hexdigest())


def _read(path: Path, digest: Any) -> str:
    try:
        content = path.read_bytes()
        digest.update(len(content).to_bytes(8, "big") + content)
        return content.decode()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise UserError(f"{path} is missing; a bundle has {CONFIG_FILE}, {BASELINES_FILE}, {DATA_FOLDER}/") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _read_config(path: Path, digest: Any) -> dict[str, dict[str, Any]]:
    """Entries of core.yaml by label."""
    import yaml

    try:
        content = yaml.safe_load(_read(path, digest))
    except yaml.YAMLError as error:
        raise UserError(f"{path} is no YAML ({' '.join(str(error).split())})") from error
    entries = content.get("icl_tasks") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path} has no list icl_tasks")
    tasks: dict[str, dict[str, Any]] = {}
    for number, entry in enumerate(entries, 1):
        label = entry.get("label") if isinstance(entry, dict) else None
        if not isinstance(label, str) or label in tasks:
            raise UserError(f"{path}: task {number} needs a label of its own, not {label!r}")
        _check_entry(path, label, entry)
        tasks[label] = entry
    return tasks


def _check_entry(path: Path, label: str, entry: dict[str, Any]) -> None:
    shots, uri = entry.get("num_fewshot"), entry.get("dataset_uri")
    if entry.get("icl_task_type") not in get_args(Kind):
        kinds = ", ".join(get_args(Kind))
        raise UserError(f"{path}: icl_task_type of {label} is {entry.get('icl_task_type')!r}; choose among {kinds}")
    if not isinstance(shots, list) or len(shots) != 1 or not _is_count(shots[0]):
        raise UserError(f"{path}: num_fewshot of {label} is {shots!r}; give a list of one number, 0 or more")
    if not isinstance(uri, str) or not uri:
        raise UserError(f"{path}: dataset_uri of {label} is {uri!r}; give a path below {DATA_FOLDER}/")
    if not isinstance(entry.get("continuation_delimiter", DEFAULT_DELIMITER), str):
        raise UserError(f"{path}: continuation_delimiter of {label} must be text")


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _read_baselines(path: Path, digest: Any) -> dict[str, float]:
    """Accuracy of guessing in percent, by label."""
    rows = csv.DictReader(_read(path, digest).splitlines())
    columns = ("Eval Task", "Random baseline")
    if not set(columns) <= set(rows.fieldnames or ()):
        raise UserError(f"{path} needs the columns {' and '.join(map(repr, columns))}; it has {rows.fieldnames}")
    baselines = {}
    for row in rows:
        try:
            baseline = float(row[columns[1]])
        except (TypeError, ValueError):
            baseline = -1.0
        if not 0 <= baseline < 100:
            what = f"the random baseline of {row[columns[0]]!r} is {row[columns[1]]!r}"
            raise UserError(f"{path}, line {rows.line_num}: {what}; give percent, 0 or more, below 100")
        baselines[row[columns[0]]] = baseline
    return baselines


def _read_examples(path: Path, kind: Kind, label: str, digest: Any) -> list[dict[str, Any]]:
    if not path.is_file():
        raise UserError(f"{path} is missing, the examples of task {label}; complete the bundle")
    examples = []
    for number, line in enumerate(_read(path, digest).split("\n"), 1):
        if not line.strip():
            continue
        try:
            example = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number} is no JSON ({error})") from error
        problem = _problem_of(example, kind)
        if problem:
            raise UserError(f"{path}, line {number}: {problem}; {kind} needs {_needed(kind)}")
        examples.append(example)
    return examples


def _problem_of(example: Any, kind: Kind) -> str | None:
    """What is wrong with an example, or None."""
    if not isinstance(example, dict):
        return "it is no object"
    for name in _TEXTS[kind]:
        if not isinstance(example.get(name), str):
            return f"field {name!r} is missing" if name not in example else f"field {name!r} is no text"
    if kind not in _OPTIONS:
        return None
    name = _OPTIONS[kind]
    options, gold = example.get(name), example.get("gold")
    if not isinstance(options, list) or len(options) < 2 or not all(isinstance(option, str) for option in options):
        return (
            f"field {name!r} is missing" if name not in example else f"field {name!r} is no list of two texts or more"
        )
    if not _is_count(gold) or gold >= len(options):
        return f"field 'gold' is {gold!r}, not one of 0 to {len(options) - 1}"
    return None


def _needed(kind: Kind) -> str:
    return ", ".join((*_TEXTS[kind], *((_OPTIONS[kind], "gold") if kind in _OPTIONS else ())))


def rows_of(task: Task, index: int, tokenizer: TokenizerLike, max_tokens: int | None = None) -> list[Row]:
    """The token rows by which an example is scored: one for each option, or one for language modelling.

    Scored are, for multiple choice, the tokens behind what all rows begin with; for a schema, those that all rows end
    with; for language modelling, those behind what the row has in common with the prompt that lacks the continuation.

    Args:
        task: of the example. index: of the example.
        max_tokens: the longest row; of a longer one the last tokens are kept.
    """
    bos = tokenizer.get_bos_token_id()
    rows = [[bos, *tokenizer.encode(prompt)] for prompt in _prompts(task, index)]
    if task.kind == "schema":
        same = common_length([row[::-1] for row in rows])
        starts = [len(row) - same for row in rows]
    else:
        starts = [common_length(rows)] * len(rows)
    if task.kind == "language_modeling":
        rows, starts = rows[1:], starts[1:]
    return [_cropped(row, start, max_tokens) for row, start in zip(rows, starts, strict=True)]


def _prompts(task: Task, index: int) -> list[str]:
    """One for each option; for language modelling without and with the continuation."""
    example, solved = task.examples[index], [_solved(task, shot) for shot in task.shots(index)]
    if task.kind == "multiple_choice":
        asked = [example["query"] + task.delimiter + choice for choice in example["choices"]]
    elif task.kind == "schema":
        asked = [context + task.delimiter + example["continuation"] for context in example["context_options"]]
    else:
        asked = [example["context"].strip() + task.delimiter, _solved(task, example)]
    prompts = [SEPARATOR.join([*solved, last]) for last in asked]
    if task.kind == "language_modeling":
        prompts[0] = prompts[0].strip()  # a space before the continuation often belongs to its first token
    return prompts


def _solved(task: Task, example: dict[str, Any]) -> str:
    if task.kind == "multiple_choice":
        return example["query"] + task.delimiter + example["choices"][example["gold"]]
    if task.kind == "schema":
        return example["context_options"][example["gold"]] + task.delimiter + example["continuation"]
    return example["context"].strip() + task.delimiter + example["continuation"]


def _cropped(ids: list[int], start: int, max_tokens: int | None) -> Row:
    """The last ``max_tokens`` tokens; the first of a row is never scored, as nothing predicts it."""
    excess = 0 if max_tokens is None else max(0, len(ids) - max_tokens)
    return Row(ids[excess:], max(1, start - excess))
