"""A saved model as a folder that the transformers library loads where nagnet is not installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nagnet.data.tokenizer import BOS_NAME, Tokenizer
from nagnet.evaluation.saved_model import SavedModel
from nagnet.interop.model_card import CARD_FILE, model_card
from nagnet.interop.modelling_code import modelling_code
from nagnet.models.checkpoint import CONFIG_FILE, WEIGHTS_FILE, load_model

ENTRY, ENTRY_NAME = "nagnet.interop.hf_model", "modeling_nagnet"
CONFIG_CLASS, MODEL_CLASS = "NagnetConfig", "NagnetForCausalLM"
PREFIX = "decoder."  # of the parameters, by the attribute of the model class


def hugging_face_files(saved: SavedModel, tokenizer_file: Path | None = None) -> dict[str, bytes]:
    """Everything such a folder holds, so that nothing is written unless all of it can be made.

    Args:
        saved: where the model is. A model without a tokenizer is exported without one.
        tokenizer_file: another tokenizer to take.

    Returns:
        Content by file name, ``config.json`` last: its presence says that the rest is there.

    Raises:
        UserError: if the model is damaged, or the tokenizer is not that of the model.
    """
    import safetensors.torch

    model = load_model(saved.folder)
    tokenizer = None
    if tokenizer_file is not None or saved.tokenizer_file is not None:
        tokenizer = saved.tokenizer(model.config.vocab_size, tokenizer_file)
    tensors = {PREFIX + name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_embeddings:
        del tensors[PREFIX + "readout.weight"]  # the same storage as the embedding, by the model's class
    files = {WEIGHTS_FILE: safetensors.torch.save(tensors, metadata={"format": "pt"})}
    files |= {name: source.encode() for name, source in modelling_code(ENTRY, ENTRY_NAME).items()}
    if tokenizer is not None:
        files |= _tokenizer_files(tokenizer, model.config.max_seq_len)
    special = {} if tokenizer is None else {f"{role}_token_id": tokenizer.bos_id for role in ("bos", "eos", "pad")}
    files["generation_config.json"] = _json(special)
    files[CARD_FILE] = model_card(model.config, saved, tokenizer is not None).encode()
    files[CONFIG_FILE] = _json(
        {
            "architectures": [MODEL_CLASS],
            "auto_map": {
                "AutoConfig": f"{ENTRY_NAME}.{CONFIG_CLASS}",
                "AutoModelForCausalLM": f"{ENTRY_NAME}.{MODEL_CLASS}",
            },
            "model_type": "nagnet",
            "dtype": "float32",
            **special,
            "nagnet": model.config.to_dict(),
        }
    )
    return files


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def _tokenizer_files(tokenizer: Tokenizer, max_seq_len: int) -> dict[str, bytes]:
    """The tokenizer for transformers: it puts BOS in front, and text that spells the name of BOS stays text."""
    description = json.loads(tokenizer.to_bytes())
    bos = {"SpecialToken": {"id": BOS_NAME, "type_id": 0}}
    text, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    description["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, text],
        "pair": [bos, text, bos, second],
        "special_tokens": {BOS_NAME: {"id": BOS_NAME, "ids": [tokenizer.bos_id], "tokens": [BOS_NAME]}},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{role}_token": BOS_NAME for role in ("bos", "eos", "pad")},
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_seq_len,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    return {"tokenizer.json": _json(description), "tokenizer_config.json": _json(config)}
