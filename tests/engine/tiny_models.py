"""Tiny random models with wide weights: quick to build in a test, odd enough to catch faults.

Norm weights and biases are random too, so that a forgotten or doubled one shows. Each is saved
with a tokenizer that is trained here.
"""

import json
from pathlib import Path

import torch

# Before transformers: it takes the hub away.
from tiny_configs import FAMILIES, HIDDEN, LAYERS, MAX_LEN, OTHERS, QUICK, SPELLED, VOCAB
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

__all__ = [
    "FAMILIES",
    "HIDDEN",
    "LAYERS",
    "MAX_LEN",
    "OTHERS",
    "QUICK",
    "VOCAB",
    "build_tiny_model",
]

# Buffers that a trained model fills and a new one leaves at zero or one.
_LEARNT_BUFFERS = ("layer_scalar", "e_score_correction_bias")


def _train_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = ("layer", "stream", "probe", "prompt", "token", "norm", "block", "head", "row", "shard")
    corpus = [f"the {a} of a {b} reads every {c}" for a in words for b in words for c in words]
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def _randomise(model: torch.nn.Module) -> None:
    """Add noise to vectors, to the biases of stacked experts and to what only training fills."""
    vectors = [p for name, p in model.named_parameters() if p.ndim == 1 or name.endswith("_bias")]
    learnt = [b for name, b in model.named_buffers() if name.endswith(_LEARNT_BUFFERS)]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in vectors + learnt:
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.3)


def build_tiny_model(family: str, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Save a tiny random model of a family of ``FAMILIES`` or ``OTHERS``, and its tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config((FAMILIES | OTHERS)[family]())
    _randomise(model)
    model.to(dtype).save_pretrained(path)
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | SPELLED.get(family, {})))
    _train_tokenizer().save_pretrained(path)
    return path
