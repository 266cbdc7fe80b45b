"""Architectures of transformers, by their `model_type`, and how the built-in engine computes each.

Every row was held to transformers' own modules with tiny random weights: log-probabilities that were sampled
in several turns among neighbours, one training step, and what is exported
(tests/models/test_architecture_table.py; docs/model_architectures.md shows the table). An architecture that
is not here is measured on a short row when it is loaded, as those that are here are too.
"""

BUILT_IN, HANDED_IN, BY_ROW = "built-in decoder", "attention handed in", "row by row"

SERVED: dict[str, str] = {
    name: how
    for how, names in {
        BUILT_IN: "llama mistral qwen2 qwen3",
        HANDED_IN: (
            "afmoe apertus arcee aria_text bitnet cohere cohere2 ernie4_5 exaone4 gemma gemma2 "
            "gemma3_text glm glm4 gpt2 gpt_neox gpt_oss granite helium llama4_text ministral3 mixtral "
            " olmo olmo2 olmo3 olmoe opt persimmon phi phi3 qwen2_moe qwen3_moe seed_oss "
            "smollm3 starcoder2 "
        ),
        BY_ROW: (
            "nemotron bamba bart biogpt bloom codegen deepseek_v2 deepseek_v3 diffllama falcon falcon_h1 "
            "falcon_mamba gpt_neo gptj granitemoehybrid jamba lfm2 lfm2_moe mamba mamba2 minimax mpt "
            "nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma rwkv "
            "stablelm xglm "
        ),
    }.items()
    for name in names.split()
}

REFUSED: dict[str, str] = {"bert": "looks at later tokens"}
"""The architectures that are not served, each with the reason."""


def architecture_row(model_type: str) -> str:
    """A sentence on an architecture that was loaded."""
    if model_type in SERVED:
        return f"yes: {model_type} is in the table of those that are held to transformers"
    return f"yes: its logits are those of transformers on a short row; {model_type} has no test of its own"
