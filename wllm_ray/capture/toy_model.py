"""A decoder in plain PyTorch, small enough to read, whose three blocks are of three kinds."""

# mypy: disable-error-code="misc"
# Torch is not typed here, so its modules are nothing that a class can be checked against.

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = ["HIDDEN", "VOCAB", "ToyModel"]

HIDDEN = 64
VOCAB = 128
_HEADS = 4
_HEAD_DIM = 24
_STATE = 8
_EXPERTS = 4
_CHOSEN = 2


class ToyMamba(nn.Module):
    """A selective scan: a state whose decay and input each token chooses for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.choose = nn.Linear(HIDDEN, HIDDEN + 2 * _STATE)
        self.decay = nn.Parameter(torch.rand(HIDDEN, _STATE))
        self.out_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, T, hidden] from [B, T, hidden], token after token."""
        value, gate = self.in_proj(hidden).chunk(2, dim=-1)
        step, write, read = self.choose(value).split([HIDDEN, _STATE, _STATE], dim=-1)
        step = functional.softplus(step)[..., None]
        kept = torch.exp(-step * self.decay)
        added = step * value[..., None] * write[..., None, :]
        state, outputs = torch.zeros_like(added[:, 0]), []
        for token in range(hidden.shape[1]):
            state = kept[:, token] * state + added[:, token]
            outputs.append((state * read[:, token, None]).sum(dim=-1))
        return self.out_proj(torch.stack(outputs, dim=1) * functional.silu(gate))


class ToyAttention(nn.Module):
    """Causal attention whose heads are together wider than the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(HIDDEN, 3 * _HEADS * _HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(_HEADS * _HEAD_DIM, HIDDEN, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, T, hidden] from [B, T, hidden]."""
        rows, tokens, _ = hidden.shape
        heads = self.qkv_proj(hidden).view(rows, tokens, 3, _HEADS, _HEAD_DIM)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, tokens, -1))


class ToyMlp(nn.Module):
    """Two matrices with a GELU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down_proj = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden] from [..., hidden]."""
        return self.down_proj(functional.gelu(self.up_proj(hidden)))


class ToyMoe(nn.Module):
    """Each token goes through the experts that its router chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, _EXPERTS, bias=False)
        self.experts = nn.ModuleList(ToyMlp() for _ in range(_EXPERTS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, T, hidden] from [B, T, hidden]."""
        best, chosen = self.router(hidden).topk(_CHOSEN, dim=-1)
        weights = torch.zeros_like(hidden[..., :_EXPERTS]).scatter(-1, chosen, best.softmax(dim=-1))
        outputs = torch.stack([expert(hidden) for expert in self.experts], dim=-1)
        return (outputs * weights[..., None, :]).sum(dim=-1)


class ToyBlock(nn.Module):
    """A mixer, a feed-forward, or both in sequence, each behind a norm and added to the stream."""

    def __init__(self, *, mixer: nn.Module | None = None, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.mixer_norm: Any = nn.RMSNorm(HIDDEN) if mixer else None
        self.mixer = mixer
        self.mlp_norm: Any = nn.RMSNorm(HIDDEN) if mlp else None
        self.mlp = mlp

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, T, hidden] from [B, T, hidden]."""
        if self.mixer is not None:
            hidden = hidden + self.mixer(self.mixer_norm(hidden))
        if self.mlp is not None:
            hidden = hidden + self.mlp(self.mlp_norm(hidden))
        return hidden


class ToyModel(nn.Module):
    """Token ids [B, T] in, logits [B, T, vocab] out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(
            [
                ToyBlock(mixer=ToyMamba()),
                ToyBlock(mlp=ToyMoe()),
                ToyBlock(mixer=ToyAttention(), mlp=ToyMlp()),
            ]
        )
        self.norm = nn.RMSNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[B, T, vocab] from [B, T] ids."""
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.lm_head(self.norm(hidden))
