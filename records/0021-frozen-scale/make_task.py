"""Writes a multiple-choice task in CORE's format: which of four lines of a held-out file comes next?

python make_task.py BUNDLE EXAMPLES
"""

import json
import random
import sys
from pathlib import Path

from nagnet.training.text import text_to_score

CONTEXT_LINES = 12
SHORTEST = 12  # characters of a choice, without indentation


def main(folder: Path, n_examples: int) -> None:
    generator = random.Random(0)
    documents, _ = text_to_score(None, None)
    examples = []
    for document in documents:
        lines = document.text.splitlines()
        long = sorted({line for line in lines if len(line.strip()) >= SHORTEST})
        places = [place for place in range(CONTEXT_LINES, len(lines)) if len(lines[place].strip()) >= SHORTEST]
        for place in generator.sample(places, min(len(places), 40)):
            context = lines[place - CONTEXT_LINES : place]
            others = [line for line in long if line != lines[place] and line not in context]
            if len(others) >= 3:
                choices = [lines[place], *generator.sample(others, 3)]
                generator.shuffle(choices)
                gold = choices.index(lines[place])
                examples.append({"query": "\n".join(context), "choices": choices, "gold": gold})
    generator.shuffle(examples)
    if len(examples) < n_examples:
        sys.exit(f"only {len(examples)} examples; ask for fewer than {n_examples}")
    (folder / "eval_data").mkdir(parents=True)
    rows = "".join(json.dumps(example) + "\n" for example in examples[:n_examples])
    (folder / "eval_data" / "next_line.jsonl").write_text(rows)
    (folder / "eval_meta_data.csv").write_text("Eval Task,Random baseline\nnext_line,25\n")
    (folder / "core.yaml").write_text(
        "icl_tasks:\n- label: next_line\n  dataset_uri: next_line.jsonl\n  num_fewshot: [0]\n"
        '  icl_task_type: multiple_choice\n  continuation_delimiter: "\\n"\n'
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
