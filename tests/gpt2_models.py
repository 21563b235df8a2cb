"""GPT-2 of Transformers, small enough for tests."""

from __future__ import annotations

from typing import Any


def small_gpt2(layers: int, words: int, length: int, **changes: Any) -> Any:
    """Return a GPT-2 of width 32 with two heads, which draws its weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=words,
        n_positions=length,
        n_embd=32,
        n_layer=layers,
        n_head=2,
        bos_token_id=1,
        eos_token_id=2,
        loss_type="ForCausalLM",
        **changes,
    )
    return GPT2LMHeadModel(config)
