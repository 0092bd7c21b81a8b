"""Tokenizers beside a model's own: one that the caller has loaded already, or none."""

import shutil

import pytest
from transformers import AutoTokenizer

from wllm_ray.capture.model_files import resolve_model
from wllm_ray.capture.tokenizer import TransformersTokenizer
from wllm_ray.engines.tokenizers import LoadedTokenizer, NoTokenizer
from wllm_ray.errors import InvalidInputError
from wllm_ray.tokens import Tokenizer


@pytest.fixture
def path(tiny_model):
    return tiny_model("qwen3")


@pytest.mark.requirement("P-3", "D-2")
def test_a_loaded_tokenizer_makes_the_same_ids_and_is_known_by_its_rules(path):
    loaded = LoadedTokenizer(AutoTokenizer.from_pretrained(path))
    by_path = TransformersTokenizer(str(path), resolve_model(str(path)))
    texts = ["The sea is wide.", "é 漢"]
    assert loaded.encode_prompts(texts) == by_path.encode_prompts(texts)
    assert loaded.identity.name == path.name
    assert loaded.identity.revision.startswith("sha256:")
    assert loaded.identity == LoadedTokenizer(AutoTokenizer.from_pretrained(path)).identity
    more = AutoTokenizer.from_pretrained(path)
    more.add_tokens(["<more>"])
    assert LoadedTokenizer(more).identity.revision != loaded.identity.revision
    more.chat_template = "{{ messages }}"
    assert LoadedTokenizer(more).identity.chat_template_sha256 is not None


@pytest.mark.requirement("P-3")
def test_without_a_tokenizer_prompts_are_refused_with_what_to_do():
    tokenizer: Tokenizer = NoTokenizer()
    assert tokenizer.identity.chat_template_sha256 is None
    with pytest.raises(InvalidInputError, match="tokenizer="):
        tokenizer.encode_prompts(["a"])


@pytest.mark.requirement("P-3", "U-4")
def test_a_model_without_a_tokenizer_says_what_is_missing(path, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(path, bare, ignore=shutil.ignore_patterns("*token*"))
    with pytest.raises(InvalidInputError, match=r"'bare' has no tokenizer .* beside the weights"):
        TransformersTokenizer(str(bare), resolve_model(str(bare)))
