"""A model whose weights can be read off its tokens: it writes one token, whatever it has read, and each
version another one. So the ids say what the versions should be."""

import asyncio
import dataclasses
from pathlib import Path

import torch

from rllm.inference.local.client import LocalClient
from rllm.models.builtin import TinyModel, create_model
from rllm.models.directory import LoadedModel, load_model

FIRST_TOKEN = 100
"""Version 0 writes this one, version 1 the next."""


def readable_model(folder: Path) -> LoadedModel:
    """One whose state is the same after every token."""
    size = TinyModel(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=32, max_positions=256)
    create_model(folder, size, seed=0)
    loaded = dataclasses.replace(load_model(folder), end_token_ids=())
    named = dict(loaded.model.named_parameters())
    with torch.no_grad():
        for name, parameter in named.items():
            if name.endswith(("out.weight", "down.weight")):
                parameter.zero_()  # what a layer adds
        named["norm"].fill_(10.0)
        named["embed.weight"].zero_()
        named["embed.weight"][:, 0] = 1.0
    write(loaded, 0)
    return loaded


def write(loaded: LoadedModel, version: int) -> None:
    """As an optimizer does, in place."""
    embedding = dict(loaded.model.named_parameters())["embed.weight"]
    with torch.no_grad():
        embedding[:, 0] = 1.0
        embedding[FIRST_TOKEN + version, 0] = 3.0


async def publish_between_steps(client: LocalClient, model: LoadedModel, version: int, after: int) -> int:
    """New weights, once so many tokens are sampled; the engine stands still while they are written.

    Gives the number of tokens that were sampled before them.
    """
    while client.engine.counts.sampled_tokens < after:
        await asyncio.sleep(0.001)
    silent = client.session(("silent", 0))  # a lockstep engine waits for it
    client.publish(client.policy_version)  # returns when no step is running
    write(model, version)
    client.publish(version)
    num_before = client.engine.counts.sampled_tokens
    silent.close()
    return num_before
