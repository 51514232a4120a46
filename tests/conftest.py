"""What every test shares: few threads and a fixed seed."""

import json
import random

import pytest
import torch

# More threads than cores make small tensors slower, and the suite often shares its machine.
torch.set_num_threads(min(2, torch.get_num_threads()))


@pytest.fixture(autouse=True)
def _fixed_seeds():
    """A test draws the same numbers whichever tests ran before it."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def generator() -> torch.Generator:
    """A random generator of the test's own, on the CPU."""
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def harness_tasks(tmp_path_factory):
    """A folder with three tasks for lm-eval, one for each kind of request, and their data."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": f"the question {i}", "options": [" the answer", " abc", " other"], "gold": i % 3} for i in range(6)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
    }
    tasks = {
        "tiny_choice": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{options}}",
            "doc_to_target": "{{gold}}",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "tiny_rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{question}}",
            "metric_list": [{"metric": "bits_per_byte"}],
        },
        "tiny_generate": {
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{options[0]}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name} | common | task))  # JSON is YAML
    return folder
