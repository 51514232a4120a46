"""Answers of a CORE evaluation in a file, so that what was interrupted can go on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nagnet.errors import UserError
from nagnet.files import write_atomically


class AnswerFile:
    """One JSON object a line: first what is evaluated, then answers as they come; a line cut short is left out.

    Args:
        path: the file. An existing one is gone on with.
        identity: plain values that decide every answer, such as hashes of weights, tokenizer and bundle.

    Raises:
        UserError: if the file holds the answers of something else, naming what differs, or is damaged.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]):
        self.path = path
        self._known: dict[str, dict[int, bool]] = {}
        lines = [json.dumps(identity), *self._read(identity)]
        write_atomically(path, "".join(line + "\n" for line in lines).encode())

    def _read(self, identity: Mapping[str, Any]) -> list[str]:
        """Lines of answers that are complete; fills what is known."""
        if not self.path.exists():
            return []
        first, *lines = self.path.read_text(encoding="utf-8").split("\n")[:-1] or [""]
        try:
            before = json.loads(first)
            changed = [name for name in identity if before.get(name) != identity[name]]
            for line in lines:
                answers = json.loads(line)
                known = self._known.setdefault(answers["task"], {})
                known.update({int(index): bool(correct) for index, correct in answers["correct"].items()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{self.path} is damaged ({error}); evaluate anew with --force") from error
        if changed:
            raise UserError(f"{self.path} is of another evaluation: {', '.join(changed)} differ; use another folder")
        return lines

    def __len__(self) -> int:
        """Answers known."""
        return sum(map(len, self._known.values()))

    def known(self, label: str) -> dict[int, bool]:
        """Correctness of the examples of a task that are answered, by index."""
        return self._known.get(label, {})

    def add(self, label: str, correct: dict[int, bool]) -> None:
        """Appends answers; they outlive the process."""
        line = json.dumps({"task": label, "correct": {index: int(right) for index, right in correct.items()}})
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line + "\n")
        self._known.setdefault(label, {}).update(correct)
