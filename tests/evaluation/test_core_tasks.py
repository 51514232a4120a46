"""What is read from a bundle, what a prompt looks like, which of its tokens are scored, and what is refused."""

import json
import random

import pytest

from nagnet.errors import UserError
from nagnet.evaluation.core_tasks import Task, read_bundle, rows_of


def task(kind, examples, shots=0, delimiter=" "):
    return Task("t", kind, shots, delimiter, 0.0, examples)


def spans(rows, tokenizer):
    """Text of each row and of its scored part."""
    assert all(row.ids[0] == tokenizer.get_bos_token_id() for row in rows)
    assert all(row.ids.count(tokenizer.get_bos_token_id()) == 1 for row in rows)
    return [(tokenizer.text(row.ids), tokenizer.text(row.ids[row.start :])) for row in rows]


def test_multiple_choice_scores_what_follows_the_common_prefix(byte_tokenizer):
    asked = task("multiple_choice", [{"query": " Q ", "choices": ["tea", "tofu"], "gold": 1}], delimiter="\nAnswer: ")
    assert spans(rows_of(asked, 0, byte_tokenizer), byte_tokenizer) == [
        (" Q \nAnswer: tea", "ea"),
        (" Q \nAnswer: tofu", "ofu"),
    ]


def test_schema_scores_the_common_suffix(byte_tokenizer):
    asked = task("schema", [{"context_options": ["the cat", "the dogs"], "continuation": "sat", "gold": 0}])
    assert spans(rows_of(asked, 0, byte_tokenizer), byte_tokenizer) == [
        ("the cat sat", " sat"),
        ("the dogs sat", " sat"),
    ]


def test_language_modelling_trims_the_context_and_scores_the_continuation(byte_tokenizer):
    asked = task("language_modeling", [{"context": " 1 + 1 =\n", "continuation": "2 "}])
    # The prompt without a continuation is stripped, so the delimiter before it is predicted too.
    assert spans(rows_of(asked, 0, byte_tokenizer), byte_tokenizer) == [("1 + 1 = 2 ", " 2 ")]


@pytest.mark.parametrize("kind", ["multiple_choice", "schema", "language_modeling"])
def test_shots_are_drawn_from_the_others_and_joined_by_blank_lines(kind, byte_tokenizer):
    examples = [
        {"query": f"Q{i}", "choices": [f"a{i}", f"b{i}"], "gold": i % 2}
        | {"context_options": [f"C{i}", f"D{i}"], "continuation": f"c{i}", "context": f" X{i} "}
        for i in range(6)
    ]
    index = 4
    others = [i for i in range(6) if i != index]
    drawn = random.Random(1234 + index).sample(others, 3)
    solved = {
        "multiple_choice": lambda i: f"Q{i}->{'ab'[i % 2]}{i}",
        "schema": lambda i: f"{'CD'[i % 2]}{i}->c{i}",
        "language_modeling": lambda i: f"X{i}->c{i}",
    }[kind]
    last = {"multiple_choice": "Q4->a4", "schema": "C4->c4", "language_modeling": "X4->c4"}[kind]
    rows = rows_of(task(kind, examples, shots=3, delimiter="->"), index, byte_tokenizer)
    assert byte_tokenizer.text(rows[0].ids) == "\n\n".join([*map(solved, drawn), last])


def test_a_token_across_the_join_belongs_to_the_continuation():
    class Merging:
        """Knows "= 2" as one token, which the prompt without the continuation cannot have."""

        def get_bos_token_id(self):
            return 0

        def encode(self, text):
            return [1000 if part == "= 2" else ord(part) for part in text.replace("= 2", "\0").replace("\0", "|")]

    class Joined(Merging):
        def encode(self, text):
            ids, at = [], 0
            while at < len(text):
                size = 3 if text.startswith("= 2", at) else 1
                ids.append(1000 if size == 3 else ord(text[at]))
                at += size
            return ids

    (row,) = rows_of(task("language_modeling", [{"context": "1 =", "continuation": "2."}]), 0, Joined())
    assert row.ids == [0, ord("1"), ord(" "), 1000, ord(".")]
    assert row.ids[row.start :] == [1000, ord(".")]


def test_long_rows_keep_their_last_tokens(byte_tokenizer):
    asked = task("schema", [{"context_options": ["abcdefgh", "x"], "continuation": "yes", "gold": 0}])
    long, short = rows_of(asked, 0, byte_tokenizer, max_tokens=8)
    assert bytes(long.ids) == b"efgh yes" and bytes(long.ids[long.start :]) == b" yes"
    assert byte_tokenizer.text(short.ids) == "x yes"
    # A span longer than the context: what is left of it is scored, but never the first token.
    cut, _ = rows_of(asked, 0, byte_tokenizer, max_tokens=3)
    assert bytes(cut.ids) == b"yes" and cut.start == 1


def test_examples_are_shuffled_then_capped(bundle):
    whole, capped = read_bundle(bundle), read_bundle(bundle, 5)
    lines = (bundle / "eval_data/some/choose.jsonl").read_text().splitlines()
    order = [json.loads(line) for line in lines]
    random.Random(1337).shuffle(order)
    assert list(whole.tasks[0].examples) == order
    assert [list(task.examples) for task in capped.tasks] == [list(task.examples)[:5] for task in whole.tasks]
    assert [task.label for task in whole.tasks] == ["choose", "pronoun", "continue"]
    assert [task.delimiter for task in whole.tasks] == ["\nAnswer: ", " ", " "]


def test_centred_accuracy(bundle):
    choose, pronoun, continued = read_bundle(bundle).tasks
    assert choose.centred(0.25) == 0 and choose.centred(1) == 1 and choose.centred(0) == pytest.approx(-1 / 3)
    assert pronoun.centred(0.75) == 0.5 and continued.centred(0.3) == 0.3


def test_the_hash_follows_every_file(bundle):
    before = read_bundle(bundle).content_hash
    for name in ("core.yaml", "eval_meta_data.csv", "eval_data/some/pronoun.jsonl"):
        file = bundle / name
        content = file.read_text()
        file.write_text(content + "\n")
        assert read_bundle(bundle).content_hash != before
        file.write_text(content)
    assert read_bundle(bundle).content_hash == before


@pytest.mark.parametrize(("cap", "message"), [(3, "a cap of 3 leaves no example beside its 3 shots; 4"), (0, "is 0")])
def test_a_cap_that_leaves_no_example_is_refused(cap, message, bundle):
    with pytest.raises(UserError, match=message):
        read_bundle(bundle, cap)
    assert len(read_bundle(bundle, 4).tasks[2].examples) == 4


def test_a_task_smaller_than_its_shots_is_refused(make_bundle):
    with pytest.raises(UserError, match="task continue: 2 examples leaves no example beside its 3 shots"):
        read_bundle(make_bundle({"continue": [{"context": "a", "continuation": "b"}] * 2}))


@pytest.mark.parametrize("name", ["core.yaml", "eval_meta_data.csv", "eval_data/some/continue.jsonl"])
def test_a_missing_file_is_named(name, bundle):
    (bundle / name).unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        read_bundle(bundle)


@pytest.mark.parametrize(
    ("label", "line", "message"),
    [
        (
            "choose",
            {"choices": ["a", "b"], "gold": 0},
            "field 'query' is missing; multiple_choice needs query",
        ),
        ("choose", {"query": 3, "choices": ["a", "b"], "gold": 0}, "field 'query' is no text"),
        ("choose", {"query": "q", "options": ["a", "b"], "gold": 0}, "field 'choices' is missing"),
        ("choose", {"query": "q", "choices": ["a"], "gold": 0}, "no list of two texts"),
        ("choose", {"query": "q", "choices": ["a", 1], "gold": 0}, "no list of two texts"),
        ("choose", {"query": "q", "choices": ["a", "b"], "gold": 2}, "field 'gold' is 2, not one of 0 to 1"),
        ("choose", {"query": "q", "choices": ["a", "b"], "gold": "0"}, "field 'gold' is '0'"),
        ("choose", {"query": "q", "choices": ["a", "b"], "gold": True}, "field 'gold' is True"),
        ("pronoun", {"query": "q", "choices": ["a", "b"], "gold": 0}, "field 'continuation' is missing; schema needs"),
        (
            "continue",
            {"context": "a"},
            "'continuation' is missing; language_modeling needs context, continuation",
        ),
        ("continue", ["a"], "it is no object"),
        ("continue", None, "is no JSON"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(label, line, message, bundle):
    file = bundle / f"eval_data/some/{label}.jsonl"
    lines = file.read_text().splitlines()
    lines[1] = "{" if line is None else json.dumps(line)
    file.write_text("\n".join(lines))
    with pytest.raises(UserError, match=f"{label}.jsonl, line 2") as refused:
        read_bundle(bundle)
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("icl_task_type", "cloze", "icl_task_type of choose is 'cloze'; choose among multiple_choice"),
        ("num_fewshot", 3, "num_fewshot of choose is 3"),
        ("num_fewshot", [-1], "num_fewshot of choose is"),
        ("num_fewshot", [0, 5], "num_fewshot of choose is"),
        ("dataset_uri", None, "dataset_uri of choose is None"),
        ("dataset_uri", "some", "some is missing, the examples of task choose"),
        ("continuation_delimiter", 1, "continuation_delimiter of choose must be text"),
        ("label", "pronoun", "task 2 needs a label of its own, not 'pronoun'"),
        ("label", "unheard", "has no random baseline of task 'unheard'"),
    ],
)
def test_a_wrong_task_is_named(field, value, message, bundle):
    content = json.loads((bundle / "core.yaml").read_text())
    content["icl_tasks"][0][field] = value
    (bundle / "core.yaml").write_text(json.dumps(content))
    with pytest.raises(UserError) as refused:
        read_bundle(bundle)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("core.yaml", "a: [", "is no YAML"),
        ("core.yaml", "tasks: 1", "has no list icl_tasks"),
        ("core.yaml", b"\xff\xfe", "is not UTF-8 text"),
        ("eval_meta_data.csv", "Task,Baseline\na,1", "needs the columns 'Eval Task' and 'Random baseline'"),
        (
            "eval_meta_data.csv",
            "Eval Task,Random baseline\nchoose,many",
            "line 2: the random baseline of 'choose' is",
        ),
        (
            "eval_meta_data.csv",
            "Eval Task,Random baseline\nchoose,100",
            "line 2: the random baseline of 'choose' is",
        ),
    ],
)
def test_files_of_another_form_are_refused(file, content, message, bundle):
    (bundle / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as refused:
        read_bundle(bundle)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_columns_of_the_public_table_are_found_by_name(bundle):
    rows = "Eval Task,Task Category,#shots,Random baseline,Description\n"
    rows += 'choose,x,2,25,"a, b"\npronoun,y,0,50.0,\ncontinue,z,3,0,\nunused,z,3,62,\n'
    (bundle / "eval_meta_data.csv").write_text(rows)
    assert [task.baseline for task in read_bundle(bundle).tasks] == [25, 50, 0]
