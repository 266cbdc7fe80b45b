"""The bytes of a pass, part by part: layers and masks counted by hand, and whole passes and plans as they
were when they were last compared with what torch takes.

A measurement has a tolerance, in which a small part could go unnoticed; here every number is exact. Whoever
means to change a formula measures it (benchmarks/memory.py, test_memory_plan.py) and then runs

    python tests/trainer/test_memory_formulas.py
"""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from rllm.config.loader import load_config
from rllm.config.lora import LoraConfig
from rllm.models.decoder import Decoder, DecoderShape
from rllm.trainer import memory_plan as plan_module
from rllm.trainer.memory import (
    MicroBatch,
    Pass,
    PassMemory,
    cache_bytes,
    fullest,
    layer_matrices,
    layer_parameters,
    layer_sizes,
    matrix_parameters,
    num_parameters,
    vocabulary_parameters,
)
from rllm.trainer.memory_plan import _most_beyond_shards, _passes, memory_plan

RECORDED = Path(__file__).parent / "memory_formulas.json"
WIDTH, INNER, QUERIES, KEYS = 31, 53, 6 * 7, 2 * 7
SHAPE = DecoderShape(
    vocab_size=1009,
    hidden_size=WIDTH,
    intermediate_size=INNER,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=7,
    norm_eps=1e-6,
    rope_theta=1e4,
    max_positions=128,
    tied=False,
    qkv_bias=True,
    out_bias=True,
    qk_norm=True,
)
ALL = frozenset({"qkv", "out", "gate_up", "down"})


@pytest.mark.parametrize(
    ("kept", "widening", "of_norm", "of_out", "of_mlp"),
    [
        (ALL, 1, WIDTH, 0, INNER + WIDTH),  # attention's own output is what `out` reads
        (ALL, 2, 2 * WIDTH, 2 * QUERIES, 2 * (INNER + WIDTH)),
        ({"qkv"}, 2, 2 * WIDTH, 0, 0),
        ({"out"}, 2, 0, 2 * QUERIES, 0),
        ({"gate_up"}, 1, 0, 0, WIDTH),
        ({"down"}, 2, 0, 0, 2 * INNER),
        ((), 1, 0, 0, 0),
    ],
)
def test_a_layer_keeps_what_its_trained_matrices_read_and_what_its_kernels_read(
    kept: Any, widening: int, of_norm: int, of_out: int, of_mlp: int
) -> None:
    sizes = layer_sizes(SHAPE, kept_inputs=frozenset(kept), widening=widening)
    gate, up, activated = INNER, INNER, INNER
    assert sizes.every_token == WIDTH + of_norm
    assert sizes.projections == (QUERIES + KEYS + KEYS) + (QUERIES + KEYS), "rotated, without values"
    assert sizes.behind_attention == QUERIES + of_out + WIDTH + gate + up + activated + of_mlp
    assert sizes.mlp == gate + up + activated + of_mlp + WIDTH
    assert sizes.keys == KEYS + KEYS


@pytest.mark.parametrize(
    "changes",
    [{}, {"tied": True, "qkv_bias": False}, {"out_bias": False, "qk_norm": False}, {"num_layers": 1}],
    ids=str,
)
def test_parameters_are_those_of_the_decoder(changes: dict[str, Any]) -> None:
    shape = replace(SHAPE, **changes)
    decoder = Decoder(shape)
    parameters = dict(decoder.named_parameters())
    assert num_parameters(shape) == sum(each.numel() for each in parameters.values())
    of_layer = {name: each for name, each in parameters.items() if ".0." in name}
    assert layer_parameters(shape) == sum(each.numel() for each in of_layer.values())
    matrices = [each.numel() for each in of_layer.values() if each.dim() == 2]
    assert sorted(layer_matrices(shape)) == sorted(matrices)
    assert matrix_parameters(shape) == sum(matrices)
    assert vocabulary_parameters(shape) == 1009 * WIDTH * (1 if shape.tied else 2)
    assert cache_bytes(shape, 3, 33, 2, cache_tokens=0) == 2 * 3 * 64 * (2 * shape.num_layers * KEYS + 2)


@pytest.mark.parametrize("is_only", [True, False])
@pytest.mark.parametrize("element", [4, 2])
def test_beyond_shards_a_rank_has_the_vocabulary_and_layers_on_their_way(element: int, is_only: bool) -> None:
    """Each moment at a time is the largest by far."""
    layer, vocabulary, shards, gradients = layer_parameters(SHAPE), 2 * 1009 * WIDTH, 4, 400_000
    each = Pass(shape=SHAPE, batch=PLAIN, element=element, logit_tokens=1000)
    before = gradients // shards if is_only else 0
    none = PassMemory(
        at_loss=0,
        at_layer=0,
        of_layer=0,
        at_first_layer=0,
        at_embedding=0,
        at_only_embedding=0,
        in_chunks=False,
    )

    def beyond(of: Pass = each, **memory: Any) -> int:
        return _most_beyond_shards(replace(none, **memory), of, gradients, shards, is_only=is_only)

    gathered, of_output = element * vocabulary, 4 * 1009 * WIDTH
    assert beyond(at_loss=10**9) == gathered + 10**9 - before
    assert beyond(at_loss=10**9, in_chunks=True) == gathered + 10**9 + of_output - before
    assert beyond(at_embedding=10**9) == gathered + 10**9 + 2 * 4 * vocabulary
    whole_and_next = (2 * element + 4) * layer
    assert beyond(at_layer=10**9, of_layer=10**8) == gathered + 10**9 + of_output + whole_and_next - before
    on_their_way = (element + 4) * layer + 4 * layer // shards - 7
    assert (
        beyond(at_layer=10**9, of_layer=7)
        == gathered + 10**9 + of_output + whole_and_next + on_their_way - before
    )
    adapter = replace(each, trains_vocabulary=False)
    assert beyond(adapter, at_embedding=10**9) == 10**9 + gradients - before


LONG = MicroBatch(num_prefixes=300, prefix=2000, num_rows=700, suffix=1000, trained_tokens=1000)


@pytest.mark.parametrize(
    ("batch", "in_layers", "in_last"),
    [
        # two rows are one path with their prompt; three have it laid out before their own five tokens
        (MicroBatch(num_prefixes=2, prefix=10, num_rows=5, suffix=5, trained_tokens=4), [(3, 5, 15)],
         [(2, 4, 15), (3, 3, 15)]),
        # every token predicts a trained one: the last layer is as the others
        (MicroBatch(num_prefixes=0, prefix=0, num_rows=4, suffix=6, trained_tokens=6), [], []),
        (MicroBatch(num_prefixes=0, prefix=0, num_rows=4, suffix=6, trained_tokens=5), [], [(4, 5, 6)]),
        # one trained token each, which rows behind a prompt predict by no state of their own
        (MicroBatch(num_prefixes=1, prefix=8, num_rows=3, suffix=2, trained_tokens=1), [(2, 2, 10)],
         [(1, 1, 10)]),
    ],
)  # fmt: skip
def test_a_mask_has_an_element_for_each_query_and_key_of_rows_that_need_one(
    batch: MicroBatch, in_layers: list[tuple[int, int, int]], in_last: list[tuple[int, int, int]]
) -> None:
    assert batch.mask == sum(rows * queries * keys for rows, queries, keys in [*in_layers, *in_last])
    assert [batch.num_queries(is_last=each) for each in (False, True)] == [0, 0]


def test_what_would_take_too_large_a_mask_is_laid_out_at_its_places_in_the_paths() -> None:
    assert LONG.mask == 0
    assert LONG.num_queries(is_last=False) == 400 * 3000
    assert LONG.num_queries(is_last=True) == 300 * 3000 + 400 * 3000
    alone = MicroBatch(num_prefixes=0, prefix=0, num_rows=9000, suffix=100, trained_tokens=99)
    assert (alone.mask, alone.num_queries(is_last=False), alone.num_queries(is_last=True)) == (0, 0, 900_000)


@pytest.mark.parametrize(
    ("max_tokens", "num_prefixes", "num_rows", "num_tokens"),
    [
        (140, 4, 12, 100),  # all of it: 4 prompts of 10, and 3 rows of 5 behind each
        (100, 4, 12, 100),
        (99, 4, 11, 95),  # three whole groups and what fits of the fourth
        (90, 4, 10, 90),
        (89, 3, 9, 75),
        (25, 1, 3, 25),
        (24, 1, 2, 20),
        (19, 0, 1, 15),  # one row is no group: it shares nothing
        (1, 0, 1, 15),
    ],
)
def test_groups_fill_a_pass_as_far_as_it_goes(
    max_tokens: int, num_prefixes: int, num_rows: int, num_tokens: int
) -> None:
    batch = MicroBatch(num_prefixes=4, prefix=10, num_rows=12, suffix=5, trained_tokens=4)
    largest = fullest(batch, 3, max_tokens)
    assert (largest.num_prefixes, largest.num_rows, largest.num_tokens) == (
        num_prefixes,
        num_rows,
        num_tokens,
    )
    assert (largest.trained_tokens, largest.prefix + largest.suffix) == (4, 15)


def test_rows_without_a_prompt_of_their_group_and_short_ones_behind_a_long_one_fill_a_pass() -> None:
    alone = MicroBatch(num_prefixes=0, prefix=0, num_rows=12, suffix=15, trained_tokens=4)
    assert fullest(alone, 3, 180) is alone
    assert fullest(alone, 3, 179) == replace(alone, num_rows=11)
    assert fullest(alone, 1, 29) == replace(alone, num_rows=1)
    # Behind 1600 tokens each copy of the prompt's keys counts as 101 tokens, more than the row's own two.
    copied = MicroBatch(num_prefixes=2, prefix=1600, num_rows=200, suffix=2, trained_tokens=2)
    assert fullest(copied, 100, 2 * 99 * 101) is copied
    cut = fullest(copied, 100, 2 * 99 * 101 - 1)
    assert (cut.num_prefixes, cut.num_rows) == (2, 100 + (99 * 101 - 1 - 1600) // 101)


@pytest.mark.parametrize(("logits_mb", "num_tokens"), [(0.0001, 1), (0.05, 3), (0.0646, 4)])
def test_so_many_tokens_have_logits_at_once_as_the_megabytes_hold(logits_mb: float, num_tokens: int) -> None:
    """Four float32 numbers for each word of the vocabulary, 16,144 bytes a token; one token at least."""
    config = load_config([f"optimizer.logits_mb={logits_mb}"])
    ((each, _),) = _passes(config, "policy", SHAPE, LoraConfig(), 4, PLAIN)
    assert each.logit_tokens == num_tokens


PLAIN = MicroBatch(num_prefixes=0, prefix=0, num_rows=5, suffix=11, trained_tokens=4)
SHARED = MicroBatch(num_prefixes=2, prefix=9, num_rows=7, suffix=5, trained_tokens=3)
BEHIND_LONG = MicroBatch(num_prefixes=1, prefix=400, num_rows=40, suffix=7, trained_tokens=7)
FEW_STATES = replace(PLAIN, trained_tokens=1)
WHOLE = MicroBatch(num_prefixes=0, prefix=0, num_rows=5, suffix=11, trained_tokens=11)
SMALL_VOCABULARY = replace(SHAPE, vocab_size=11, intermediate_size=5, tied=True)
WIDE_GATE = replace(SHAPE, vocab_size=11, intermediate_size=900, qk_norm=False)
ONE_LAYER = replace(SHAPE, num_layers=1, intermediate_size=700)
IN_4: dict[str, Any] = {"element": 4, "logit_tokens": 1000}
ADAPTED: dict[str, Any] = {
    "element": 2,
    "logit_tokens": 6,
    "trains_vocabulary": False,
    "upcasts_norms": True,
}
PASSES = {
    "plain": Pass(shape=SHAPE, batch=PLAIN, **IN_4),
    "all tokens trained": Pass(shape=SHAPE, batch=WHOLE, **IN_4),
    "shared prompts, entropy": Pass(shape=SHAPE, batch=SHARED, **IN_4, with_entropy=True),
    "as many logits as trained tokens": Pass(shape=SHAPE, batch=PLAIN, element=4, logit_tokens=20),
    "in chunks": Pass(shape=SHAPE, batch=SHARED, element=4, logit_tokens=6),
    "in chunks, in 16 bits": Pass(shape=SHAPE, batch=SHARED, element=2, logit_tokens=6, upcasts_norms=True),
    "computed again": Pass(shape=SMALL_VOCABULARY, batch=SHARED, **IN_4, recomputes=True),
    "computed again, wide": Pass(shape=WIDE_GATE, batch=PLAIN, **IN_4, recomputes=True),
    "wide": Pass(shape=WIDE_GATE, batch=SHARED, **IN_4),
    "attention alone": Pass(shape=SMALL_VOCABULARY, batch=BEHIND_LONG, **IN_4),
    "many queries": Pass(shape=SMALL_VOCABULARY, batch=LONG, **IN_4),
    "one layer": Pass(shape=ONE_LAYER, batch=PLAIN, **IN_4),
    "one layer, computed again": Pass(shape=ONE_LAYER, batch=SHARED, **IN_4, recomputes=True),
    "adapter": Pass(shape=SHAPE, batch=SHARED, lora_columns=21, **ADAPTED),
    "adapter of two": Pass(
        shape=SHAPE, batch=PLAIN, lora_columns=6, kept_inputs=frozenset({"qkv", "down"}), **ADAPTED
    ),
    "adapter in float32": Pass(
        shape=SHAPE, batch=PLAIN, lora_columns=21, **{**ADAPTED, "element": 4, "upcasts_norms": False}
    ),
    "one token at a time": Pass(shape=SHAPE, batch=SHARED, element=4, logit_tokens=1),
    "in large chunks": Pass(shape=SHAPE, batch=WHOLE, element=4, logit_tokens=50),
    "tied": Pass(shape=replace(SHAPE, tied=True), batch=PLAIN, **IN_4),
    "few states": Pass(shape=WIDE_GATE, batch=FEW_STATES, **IN_4),
    "few states of one layer": Pass(shape=ONE_LAYER, batch=FEW_STATES, **IN_4),
    "few states of one layer, computed again": Pass(
        shape=ONE_LAYER, batch=FEW_STATES, **IN_4, recomputes=True
    ),
    "critic": Pass(shape=SHAPE, batch=SHARED, element=4, logit_tokens=0),
}

BASE = {
    "steps": 1,
    "inference": {"max_context": 65, "num_slots": 4},
    "rollout": {"max_turns": 1, "max_tokens_per_turn": 16, "tasks_per_step": 4, "group_size": 4},
    "algorithm": {"updates_per_step": 1},
    "warm_start": {"steps": 0},
}
LONG_PROMPTS = {"inference.max_context": 1000, "inference.num_slots": 64}
PLANS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "plain": ({}, {}),
    "warm start, several updates": (
        {"warm_start.steps": 1, "warm_start.episodes_per_step": 9, "algorithm.updates_per_step": 3},
        {},
    ),
    "warm start alone": ({"steps": 0, "warm_start.steps": 1, "warm_start.episodes_per_step": 9}, {}),
    "several turns": ({"rollout.max_turns": 3}, {}),
    "unlimited answers": ({"rollout.max_tokens_per_turn": 0}, {}),
    "divergence, entropy, in the background": (
        {"algorithm.kl_coef": 0.1, "algorithm.entropy_coef": 0.1, "checkpoint.background": True},
        {},
    ),
    "separate critic": (
        {"critic.trunk": "separate", "algorithm.estimator": "gae", "checkpoint.background": True},
        {},
    ),
    "separate critic in 16 bits": (
        {
            "critic.trunk": "separate",
            "algorithm.estimator": "gae",
            "checkpoint.background": True,
            "model.dtype": "bfloat16",
        },
        {},
    ),
    "adapter, separate critic": (
        {"lora.rank": 5, "critic.trunk": "separate", "algorithm.estimator": "gae"},
        {},
    ),
    "adapter, critic on its trunk": (
        {"lora.rank": 5, "critic.trunk": "shared", "algorithm.estimator": "gae"},
        {},
    ),
    "muon": ({"optimizer.name": "muon", "optimizer.muon_dtype": "float32"}, {}),
    "muon, adapter": (
        {"optimizer.name": "muon", "optimizer.muon_dtype": "float32", "lora.rank": 300},
        {},
    ),
    "adafactor in 16 bits": ({"optimizer.name": "adafactor", "model.dtype": "bfloat16"}, {}),
    "8 bits": ({"optimizer.name": "adamw8bit"}, {}),
    "8 bits, adapter": ({"optimizer.name": "adamw8bit", "lora.rank": 43}, {}),
    "4 bits": ({"lora.rank": 5, "lora.base_dtype": "nf4", "model.dtype": "bfloat16"}, {}),
    "adapter, ahead, warm start, divergence": (
        {
            "lora.rank": 5,
            "schedule.kind": "async",
            "inference.lockstep": False,
            "warm_start.steps": 1,
            "algorithm.kl_coef": 0.1,
            "checkpoint.background": True,
        },
        {},
    ),
    "ahead in 16 bits": (
        {"schedule.kind": "async", "inference.lockstep": False, "model.dtype": "bfloat16"},
        {},
    ),
    "long prompts": (LONG_PROMPTS, {}),
    "long prompts, small cache": ({**LONG_PROMPTS, "inference.cache_tokens": 2048}, {}),
    "little read at once": ({**LONG_PROMPTS, "inference.max_prefill_tokens": 100}, {}),
    "several passes": ({"optimizer.micro_batch_tokens": 100, "optimizer.logits_mb": 0.1}, {}),
    "2 ranks": ({}, {"num_ranks": 2, "num_local_ranks": 2}),
    "2 ranks, adapter": ({"lora.rank": 5}, {"num_ranks": 2, "num_local_ranks": 2}),
    "shards": ({"distributed.strategy": "shard"}, {"num_ranks": 4, "num_local_ranks": 2}),
    "shards, several passes": (
        {"distributed.strategy": "shard", "optimizer.micro_batch_tokens": 100},
        {"num_ranks": 2, "num_local_ranks": 2},
    ),
    "shards in 16 bits, in chunks": (
        {"distributed.strategy": "shard", "model.dtype": "bfloat16", "optimizer.logits_mb": 0.1},
        {"num_ranks": 2, "num_local_ranks": 1},
    ),
    "shards of an adapter": (
        {"distributed.strategy": "shard", "lora.rank": 5},
        {"num_ranks": 2, "num_local_ranks": 2},
    ),
    "shards of a separate critic": (
        {"distributed.strategy": "shard", "critic.trunk": "separate", "algorithm.estimator": "gae"},
        {"num_ranks": 2, "num_local_ranks": 2},
    ),
    "adapter, in chunks": ({"lora.rank": 5, "optimizer.logits_mb": 0.1}, {}),
    "adapter, in large chunks": ({"lora.rank": 5, "optimizer.logits_mb": 1.5}, {}),
    "adapter on long rows": ({"lora.rank": 1, "inference.max_context": 500, "optimizer.logits_mb": 0.1}, {}),
    "pairs of shards": (
        {"distributed.strategy": "shard", "distributed.shard_size": 2},
        {"num_ranks": 4, "num_local_ranks": 4},
    ),
    "shards beside the GPU": (
        {"distributed.strategy": "shard", "distributed.offload": True, "model.device": "cuda"},
        {"num_ranks": 4, "num_local_ranks": 2},
    ),
    "shards beside the GPU, in float32": (
        {
            "distributed.strategy": "shard",
            "distributed.offload": True,
            "model.device": "cuda",
            "model.dtype": "float32",
        },
        {"num_ranks": 2, "num_local_ranks": 2},
    ),
    "shards beside the GPU, in 16 bits, several passes": (
        {
            "distributed.strategy": "shard",
            "distributed.offload": True,
            "model.device": "cuda",
            "model.dtype": "bfloat16",
            "optimizer.micro_batch_tokens": 100,
        },
        {"num_ranks": 2, "num_local_ranks": 2},
    ),
    "4 bits on a GPU": (
        {"lora.rank": 5, "lora.base_dtype": "nf4", "model.dtype": "bfloat16", "model.device": "cuda"},
        {},
    ),
    "layers of two": ({"distributed.tensor_parallel": 2}, {"num_ranks": 2, "num_local_ranks": 2}),
    "layers of two, twice": ({"distributed.tensor_parallel": 2}, {"num_ranks": 4, "num_local_ranks": 4}),
    "layers of two, adapter": (
        {"distributed.tensor_parallel": 2, "lora.rank": 5},
        {"num_ranks": 2, "num_local_ranks": 2},
    ),
    "two policies": (
        {"policies.one.path": "builtin:small", "policies.two.path": "builtin:tiny"},
        {},
    ),
    "a frozen judge of the same base": (
        {
            "lora.rank": 5,
            "policies.one.path": "builtin:tiny",
            "policies.two.path": "builtin:tiny",
            "policies.two.trainable": False,
            "policies.three.path": "builtin:small",
            "policies.three.trainable": False,
        },
        {},
    ),
    "cluster": ({**LONG_PROMPTS, "cluster.kind": "ray"}, {}),
    "cluster, three adapters": (
        {
            "cluster.kind": "ray",
            "lora.rank": 5,
            "policies.one.path": "builtin:tiny",
            "policies.two.path": "builtin:tiny",
            "policies.three.path": "builtin:tiny",
        },
        {},
    ),
}


def bytes_of_pass(name: str) -> dict[str, int]:
    each = PASSES[name]
    training, sizes = each.training(), {"of_layer": 1_000, "of_vocabulary": 30_000}
    return {
        **asdict(training),
        "most": training.most,
        "only_pass": training.with_gradients(500_000, **sizes, is_only=True),
        "only_pass_of_little": training.with_gradients(2_000, **sizes, is_only=True),
        "later_pass": training.with_gradients(500_000, **sizes, is_only=False),
        "scoring": each.scoring(),
    }


def bytes_of_plan(name: str) -> dict[str, Any]:
    changes, ranks = PLANS[name]
    config = load_config(BASE, [f"{key}={json.dumps(value)}" for key, value in changes.items()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "accelerator_bytes", lambda device: 80 * 10**9)
        plan = memory_plan(config, **{"num_ranks": 1, "num_local_ranks": 1, **ranks})
    assert plan is not None
    facts = plan.facts()
    return {key: value for key, value in facts.items() if key not in ("machine", "warning") and value}


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_takes_the_bytes_that_were_compared_with_measured_ones(name: str) -> None:
    assert bytes_of_pass(name) == json.loads(RECORDED.read_text())["passes"][name]


@pytest.mark.parametrize("name", PLANS)
def test_a_run_takes_the_bytes_that_were_compared_with_measured_ones(name: str) -> None:
    assert bytes_of_plan(name) == json.loads(RECORDED.read_text())["plans"][name]


def main() -> None:
    recorded = {
        "passes": {name: bytes_of_pass(name) for name in PASSES},
        "plans": {name: bytes_of_plan(name) for name in PLANS},
    }
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
