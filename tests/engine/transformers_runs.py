"""What tests run with Transformers in a process of its own: vLLM changes classes that it runs."""

# First: it sets Transformers offline.
from tiny_configs import HIDDEN, LAYERS, MAX_LEN, VOCAB
from transformers import AutoModel, AutoModelForCausalLM, Phi3Config, Phi3ForCausalLM

from wllm_ray.capture.transformers_capture import TransformersCapture
from wllm_ray.offered import offered_sites
from wllm_ray.records import CaptureTask, TokenRow


def capture_all(path, prompts, *, loaded=None, **options):
    """Description and chunk: every offered site at every token; ``loaded`` names an auto class."""
    classes = {"AutoModel": AutoModel, "AutoModelForCausalLM": AutoModelForCausalLM}
    model = classes[loaded].from_pretrained(path) if loaded else path
    with TransformersCapture(model, **options) as engine:
        rows = tuple(TokenRow(index, ids) for index, ids in enumerate(prompts))
        task = CaptureTask(offered_sites(engine.description), "all_prompt", rows)
        return engine.description, engine.capture(task)


def build_long_rope(path, original):
    """A tiny Phi-3 that turns to other rotary factors in passes longer than ``original``."""
    half = HIDDEN // 4 // 2
    config = Phi3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
        original_max_position_embeddings=original,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * half,
            "long_factor": [4.0] * half,
            "original_max_position_embeddings": original,
        },
    )
    Phi3ForCausalLM(config).save_pretrained(path)
