"""An exported folder, where nagnet is not to be had: logits, generation, training, evaluation."""

import json
import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from nagnet.cli.application import run
from nagnet.generation.engine import generate
from nagnet.nn.readout import ReadoutConfig
from nagnet.nn.skip import SkipPolicy

# Not imported here: the process of the tests has nothing to do with it, and it takes seconds.
pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed: pip install 'nagnet[hf]'"
)

VARIANTS = {
    "norm-agnostic": {"sliding_windows": (5, 0), "n_kv_heads": 2},
    "norm-agnostic, tied": {"tie_embeddings": True},
    "twin": {"residual": "pre_norm"},
    "twin, tied": {"residual": "pre_norm", "tie_embeddings": True, "mlp": "swiglu"},
    "norm-agnostic, skipping": {"skip": SkipPolicy(threshold=0.5), "sliding_windows": (5, 0)},
    "norm-agnostic, skipping, tied": {"skip": SkipPolicy(threshold=0.45), "tie_embeddings": True},
    "ngpt": {"residual": "ngpt"},
    "without parts": {"without": ("beta", "orthogonal"), "readout": ReadoutConfig("unit", "learned_log_norm", 15.0)},
}
# A stranger's process, to which nagnet does not exist. One runs all scripts, as importing transformers takes seconds.
STRANGER = """
import io, json, sys, traceback, warnings
from contextlib import redirect_stdout
warnings.simplefilter("error")
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "nagnet":
            raise ImportError(f"{name} is not installed here")
sys.meta_path.insert(0, Blocked())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
for line in sys.stdin:
    folder, data, script = json.loads(line)
    try:
        with redirect_stdout(io.StringIO()):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
            scope = globals() | {"folder": folder, "data": torch.load(data), "model": model}
            exec(script, scope)
        answer = scope["result"]
    except BaseException:
        answer = {"error": traceback.format_exc()}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture(scope="session")
def export(saved, tmp_path_factory):
    """Exports a model once, by the command; returns the model, the folder it was in, and the new one."""
    made = {}

    def make(name):
        if name not in made:
            model, source = saved(name, **VARIANTS[name])
            folder = tmp_path_factory.mktemp("exported") / name.replace(", ", "-").replace(" ", "-")
            assert run(["export", "hf", str(source), str(folder)]) == 0
            made[name] = model, source, folder
        return made[name]

    return make


@pytest.fixture(scope="session")
def stranger(tmp_path_factory):
    """Runs a script in a process that cannot import nagnet, with the exported model; returns its ``result``."""
    place = tmp_path_factory.mktemp("stranger")
    environment = os.environ | {"HF_HOME": str(place / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", STRANGER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, cwd=place, text=True, **pipes) as process:

        def call(folder, script, **data):
            torch.save(data, place / "data.pt")
            line = json.dumps([str(folder), str(place / "data.pt"), textwrap.dedent(script)])
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            assert "error" not in answer, answer["error"]
            return answer

        yield call
        process.stdin.close()


@pytest.mark.parametrize("name", list(VARIANTS))
def test_logits_and_generation_without_nagnet(name, export, stranger):
    model, _, folder = export(name)
    ids = torch.randint(model.config.vocab_size, (3, 20), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits, state = model(ids), model.trunk(ids).split()
    if model.skipping is not None:
        rates = model.skipping.run_rates()
        assert min(rates) < 0.9 and max(rates) > 0.1
    targets = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    found = stranger(
        folder,
        """
        assert not model.training
        with torch.no_grad():
            out = model(data["ids"], labels=data["ids"])
            plain = model(data["ids"], use_cache=False)
            last = model(data["ids"], logits_to_keep=2).logits
        drawn = model.generate(data["ids"], max_new_tokens=12, do_sample=False)
        slow = model.generate(data["ids"], max_new_tokens=12, do_sample=False, use_cache=False)
        beams = model.generate(data["ids"], max_new_tokens=5, num_beams=3, do_sample=False)
        result = {
            "logits": max((o.logits - data["logits"]).abs().max().item() for o in (out, plain)),
            "last": (last - data["logits"][:, -2:]).abs().max().item(),
            "confidence": (out.confidence.log() - data["log_norm"]).abs().max().item(),
            "loss": out.loss.item(),
            "drawn": drawn[:, 20:].tolist(),
            "slow": slow[:, 20:].tolist(),
            "beams": list(beams.shape),
            "tied": model.decoder.readout.weight is model.decoder.embedding.weight,
        }
        """,
        ids=ids,
        logits=logits,
        log_norm=state[1],
    )
    assert found["logits"] < 1e-5 and found["last"] < 1e-5 and found["confidence"] < 1e-5
    assert found["loss"] == pytest.approx(model.loss(ids, targets).item(), abs=1e-5)
    assert found["tied"] == model.config.tie_embeddings and found["beams"][0] == 3
    # Greedy, ended by the id that begins documents; after it a finished row holds the padding id, which is the same.
    end = model.config.vocab_size - 1
    ours = [row.ids for row in generate(model, ids, 12, temperature=0, end_token=end)]
    width = max(map(len, ours)) + (any(len(row) < 12 for row in ours) and max(map(len, ours)) < 12)
    assert found["drawn"] == found["slow"] == [row + [end] * (width - len(row)) for row in ours]


def test_padding_on_either_side_changes_nothing(export, stranger):
    model, _, folder = export("norm-agnostic")
    rows = [torch.randint(299, (n,), generator=torch.Generator().manual_seed(n)) for n in (4, 11)]
    expected = [[c.ids for c in generate(model, row[None], 6, temperature=0, end_token=299)][0] for row in rows]
    with torch.no_grad():
        logits = [model(row[None])[0, -1] for row in rows]
    found = stranger(
        folder,
        """
        rows, logits = data["rows"], data["logits"]
        width = max(map(len, rows))
        result = {"drawn": [], "difference": 0.0}
        for side in ("left", "right"):
            ids, mask = torch.full((2, width), 299), torch.zeros(2, width, dtype=torch.long)
            for row, target, seen in zip(rows, ids, mask):
                part = slice(width - len(row), None) if side == "left" else slice(len(row))
                target[part], seen[part] = row, 1
            for use_cache in (False, True):
                with torch.no_grad():
                    out = model(ids, attention_mask=mask, use_cache=use_cache).logits
                ends = [width - 1] * 2 if side == "left" else [len(row) - 1 for row in rows]
                for i, end in enumerate(ends):
                    result["difference"] = max(result["difference"], (out[i, end] - logits[i]).abs().max().item())
            if side == "left":
                drawn = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
                result["drawn"] = drawn[:, width:].tolist()
        jumping = torch.tensor([[*range(6), *range(width - 6)]])
        for wrong in ({"attention_mask": mask[:, :-1]}, {"position_ids": jumping}):
            try:
                model(ids, **wrong)
            except ValueError as error:
                result.setdefault("refused", []).append(str(error))
        try:
            model.generate(ids, max_new_tokens=2, do_sample=False, cache_implementation="static")
        except ValueError as error:
            result["refused"].append(str(error))
        """,
        rows=rows,
        logits=logits,
    )
    assert found["difference"] < 1e-5
    assert [row[: len(ours)] for row, ours in zip(found["drawn"], expected, strict=True)] == expected
    assert "attention_mask has shape" in found["refused"][0] and "position_ids jump" in found["refused"][1]
    assert "fixed length" in found["refused"][2]


def test_the_tokenizer_is_ours_with_bos_in_front(export, stranger, tokenizer):
    texts = ["def main():", "  the value\n\n 123 é漢", "", "<| bos |> the name <|endoftext|>"]
    found = stranger(
        export("twin")[2],
        """
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        texts = data["texts"]
        result = {
            "ids": [tokenizer(text)["input_ids"] for text in texts],
            "back": [tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) for text in texts],
            "plain": [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts],
            "padded": tokenizer(texts, padding=True)["attention_mask"][1],
            "special": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)],
        }
        """,
        texts=texts,
    )
    assert found["plain"] == tokenizer.encode_batch(texts)
    assert found["ids"] == [[tokenizer.bos_id, *ids] for ids in found["plain"]] and found["back"] == texts
    assert found["special"] == [tokenizer.bos_id] * 3 + [tokenizer.vocab_size] and 0 in found["padded"]


@pytest.mark.parametrize("name", ["norm-agnostic, tied", "twin"])
def test_trainer_runs_and_what_it_saves_loads(name, export, stranger):
    found = stranger(
        export(name)[2],
        """
        rows = [{"input_ids": row, "labels": row} for row in torch.randint(300, (40, 16))]
        ids = torch.stack([row["input_ids"] for row in rows])
        with torch.no_grad():
            before = model(ids, labels=ids)
        arguments = TrainingArguments(
            "out", max_steps=5, per_device_train_batch_size=8, learning_rate=0.01, report_to=[], save_strategy="no",
            logging_steps=1, use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        scored = trainer.predict(rows)
        trainer.save_model("again")
        again = AutoModelForCausalLM.from_pretrained("again", trust_remote_code=True)
        with torch.no_grad():
            x = torch.randint(300, (2, 9))
            same = (again(x).logits - model.eval()(x).logits).abs().max().item()
        weight, mean = model.decoder.embedding.weight, model.decoder.embedding.weight.mean(-1).abs().max().item()
        result = {
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "before": before.loss.item(), "after": scored.metrics["test_loss"], "shape": list(scored.predictions.shape),
            "same": same, "mean": mean, "gates": len([n for n, _ in model.named_parameters() if "alpha" in n]),
        }
        """,
    )
    assert len(found["losses"]) == 5 and found["after"] < found["before"] and found["shape"] == [40, 16, 300]
    assert found["same"] == 0.0
    if "norm-agnostic" in name:
        assert found["gates"] == 6 and found["mean"] < 1e-6  # embedding rows were centred after the last step


def test_in_16_bits_gates_and_norms_stay_in_32(export, stranger):
    found = stranger(
        export("norm-agnostic")[2],
        """
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16)
        x = torch.randint(300, (2, 9))
        with torch.no_grad():
            logits = model(x).logits
        kinds = {}
        for name, tensor in model.state_dict().items():
            kinds.setdefault(str(tensor.dtype), set()).add(name.split(".")[1])
        result = {kind: sorted(parts) for kind, parts in kinds.items()} | {"logits": str(logits.dtype)}
        """,
    )
    assert found == {
        "torch.bfloat16": ["blocks"],
        "torch.float32": ["embedding", "readout", "stream"],
        "logits": "torch.float32",
    }


def test_lm_eval_scores_it_as_it_scores_ours(export, stranger, harness_tasks):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'nagnet[harness]'")
    from nagnet.evaluation.harness import NagnetLM

    _, source, folder = export("norm-agnostic")
    pairs = [("the value", " of the name"), ("", "def main"), ("return the_value " * 20, "or 12")]
    texts = [("def main(", {"until": ["\n"], "max_gen_toks": 6}), ("the", {"max_gen_toks": 9})]
    found = stranger(
        folder,
        """
        warnings.simplefilter("ignore")
        from types import SimpleNamespace
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
        lm = HFLM(pretrained=folder, trust_remote_code=True, device="cpu", batch_size=2)
        pairs, texts = ([SimpleNamespace(args=args) for args in data[name]] for name in ("pairs", "texts"))
        tasks = TaskManager(include_path=data["tasks"], include_defaults=False)
        names = ["tiny_choice", "tiny_generate"]
        result = {
            "scores": lm.loglikelihood(pairs), "texts": lm.generate_until(texts),
            "tasks": simple_evaluate(model=lm, tasks=names, task_manager=tasks, bootstrap_iters=0)["results"],
        }
        warnings.simplefilter("error")
        """,
        pairs=pairs,
        texts=texts,
        tasks=str(harness_tasks),
    )
    lm = NagnetLM(source, device="cpu")
    scores = lm.loglikelihood([SimpleNamespace(args=pair) for pair in pairs])
    assert [value for value, _ in found["scores"]] == pytest.approx([value for value, _ in scores], abs=1e-4)
    assert [greedy for _, greedy in found["scores"]] == [greedy for _, greedy in scores]
    assert found["texts"] == lm.generate_until([SimpleNamespace(args=text) for text in texts])
    assert 0 <= found["tasks"]["tiny_choice"]["acc,none"] <= 1 and "exact_match,none" in found["tasks"]["tiny_generate"]


def test_the_folder_says_what_it_holds(export, stranger):
    model, _, folder = export("norm-agnostic")
    config = json.loads((folder / "config.json").read_text())
    assert config["nagnet"] == json.loads(json.dumps(model.config.to_dict()))
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n") and "inverse temperature" in card
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in card
    code = card.split("```python\n")[1].split("```")[0]
    shape = stranger(folder, f"import os\nos.chdir(folder)\nresult = []\n{code}result = list(confidence.shape)")
    assert shape[0] == 1
