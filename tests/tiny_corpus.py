"""A tiny target for the tests of trainings, the same weights in transformers, and text that the target wrote."""

from __future__ import annotations

import dataclasses

import torch

from tutorial_lib.drafters.corpus import Corpus, CorpusSettings, generate_corpus
from tutorial_lib.models import Checkpoint, resolve

TINY = "dummy:llama-3.1-8b?layers=4&hidden=64&head_dim=16&heads=4&kv_heads=2&vocab=320&seed=3"


def talkative_target() -> Checkpoint:
    """A random Llama in which a fifth of all tokens ends a turn."""
    found = resolve(TINY)
    return dataclasses.replace(found, config={**found.config, "eos_token_id": list(range(257, 320))})


def in_transformers(target: Checkpoint):
    """The same weights in transformers, which nobody here wrote."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**target.config)).eval()
    model.load_state_dict(dict(target.tensors("cpu", torch.float32)), strict=False)
    model.tie_weights()
    return model


def small_corpus(target: Checkpoint) -> Corpus:
    settings = CorpusSettings(rows=16, length=80, follow_up_share=0.6, max_answer=30)
    return generate_corpus(target, settings, documents=80, seed=1, say=lambda line: None)
