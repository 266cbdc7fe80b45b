"""llama.cpp reads the files that are written here, and its greedy tokens are ours.

Both sides hold the same f16 weights: ours are read back from the file. llama.cpp rounds activations to f16 as
well, so two tokens that are nearly as likely may change places: near ties are counted, all else is a failure.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gguf_files import CONFIGS, PROMPT, random_model, write_gguf
from transformers import AutoModelForCausalLM

from rllm.inference.local.client import LocalClient
from rllm.models.directory import load_model
from rllm.models.gguf.reading import import_gguf
from rllm.models.gguf.writing import Precision, export_gguf
from rllm.types.messages import SamplingParams

llama_cpp = pytest.importorskip("llama_cpp")

NEAR_TIE = 0.05
"""Difference of log-probabilities below which two tokens are nearly as likely, in nats."""
QUESTIONS = (
    "What is 7 + 5? Answer with a number.",
    "Name three colours.",
    "Write a haiku about the sea.",
    "What is the capital of France?",
    "Reverse the word 'stone'.",
    "Give me a JSON object with the keys name and age.",
    "Translate 'good morning' into Spanish.",
    "Which number is larger, 128 or 1,024?",
    "Write a Python function that adds two numbers.",
    "Why is the sky blue? One sentence.",
    "List the days of the week.",
    "What is 12 * 11?",
    "Finish the sentence: The cat sat on the",
    "How many legs has a spider?",
    "Who wrote 'Hamlet'?",
    "Give a synonym of 'quick'.",
    "What comes after A, B, C?",
    "Is ice colder than steam? Answer yes or no.",
    "Write one line of HTML with a link.",
    "Say 'héllo wörld 😀' twice.",
)
TEXTS = (
    *QUESTIONS,
    PROMPT,
    "def f(x):\n    return x  **  2\n\t\tprint('héllo wörld 中文 😀')\n",
    "It's   a test: 1234567890, 3.14,  -42\n\n\n\nend  ",
    "a\tb\r\nc  d   e    f",
)


def opened(path: Path, **settings: Any) -> Any:
    """A model of llama.cpp without its AMX kernels, which end the process on some virtual machines."""
    module = llama_cpp.llama_cpp
    defaults = module.llama_model_default_params()
    defaults.use_extra_bufts = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "llama_model_default_params", lambda: defaults)
        return llama_cpp.Llama(str(path), n_ctx=128, n_threads=1, verbose=False, **settings)


def greedy(model: Any, ids: list[int], num_tokens: int, ends: tuple[int, ...]) -> list[int]:
    """llama.cpp's most likely tokens, up to an end token."""
    answer: list[int] = []
    model.reset()
    for token in model.generate(ids, temp=0.0, repeat_penalty=1.0):
        answer.append(token)
        if len(answer) == num_tokens or token in ends:
            break
    return answer


@pytest.fixture(scope="module")
def written(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The file of SmolLM2-135M-Instruct in f16, and what is read back from it."""
    root = tmp_path_factory.mktemp("smollm2")
    export_gguf(smollm2, root / "model.gguf")
    import_gguf(root / "model.gguf", root / "back")
    return root / "model.gguf", root / "back"


def test_twenty_answers_of_a_pretrained_model_are_the_same(written: tuple[Path, Path]) -> None:
    path, directory = written
    loaded = load_model(directory)
    sampling = SamplingParams(temperature=0.0, max_tokens=48, top_logprobs=2)

    async def answers() -> list[Any]:
        client = LocalClient(loaded, num_slots=20, max_context=256)
        calls = [
            client.get_model_response([{"role": "user", "content": question}], sampling)
            for question in QUESTIONS
        ]
        outputs = await asyncio.gather(*calls)
        await client.close()
        return outputs

    model = opened(path)
    ties = 0
    for question, ours in zip(QUESTIONS, asyncio.run(answers()), strict=True):
        theirs = greedy(model, ours.prompt_ids, 48, loaded.end_token_ids)
        if theirs != ours.completion_ids:
            pairs = zip(theirs, ours.completion_ids, strict=False)
            place = next(place for place, (one, other) in enumerate(pairs) if one != other)
            first, second = ours.top_logprobs[place][:2]
            gap = abs(_logprob(first) - _logprob(second))
            assert gap < NEAR_TIE, f"{question}: at token {place} the two differ by {gap:.3f} nats"
            ties += 1
    print(f"\nllama.cpp and the built-in engine: {20 - ties} of 20 answers equal, {ties} part at a near tie.")
    assert ties <= 3


def _logprob(top: Any) -> float:
    return float(top[1] if isinstance(top, tuple) else top.logprob)


def test_texts_have_the_same_tokens(written: tuple[Path, Path]) -> None:
    path, directory = written
    model, tokenizer = opened(path, vocab_only=True), load_model(directory).tokenizer
    for text in TEXTS:
        assert model.tokenize(text.encode(), add_bos=False, special=True) == tokenizer.encode(text), text


def test_eight_bits_answer_nearly_alike(smollm2: Path, written: tuple[Path, Path], tmp_path: Path) -> None:
    export_gguf(smollm2, tmp_path / "model.gguf", Precision.Q8_0)
    tokenizer = load_model(written[1]).tokenizer
    models = [opened(path) for path in (written[0], tmp_path / "model.gguf")]
    equal = 0
    for question in QUESTIONS:
        text = tokenizer.apply_template([{"role": "user", "content": question}], add_generation_prompt=True)
        first, second = (greedy(model, tokenizer.encode(text), 8, ()) for model in models)
        equal += first == second
    print(f"\nq8_0 and f16: the first eight tokens of {equal} of 20 answers are equal.")
    assert equal >= 8


@pytest.mark.parametrize("family", CONFIGS)
def test_each_family_computes_what_transformers_does(family: str, tmp_path: Path) -> None:
    source = write_gguf(
        tmp_path / "source.gguf",
        random_model(family),
        family.removesuffix("3") if family == "llama3" else family,
    )
    import_gguf(source, tmp_path / "model")
    export_gguf(tmp_path / "model", tmp_path / "model.gguf")
    import_gguf(tmp_path / "model.gguf", tmp_path / "back")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    tokenizer = load_model(tmp_path / "back").tokenizer
    ids = tokenizer.encode(PROMPT)
    model = opened(tmp_path / "model.gguf")
    assert model.tokenize(PROMPT.encode(), add_bos=False, special=True) == ids
    answer = greedy(model, ids, 24, ())
    with torch.no_grad():
        logprobs_TV = reference(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    gaps = [float(row.max() - row[token]) for row, token in zip(logprobs_TV, answer, strict=True)]
    assert max(gaps) < NEAR_TIE, gaps


def test_gemma_continues_texts_alike(gemma3: Path, tmp_path: Path) -> None:
    export_gguf(gemma3, tmp_path / "model.gguf")
    import_gguf(tmp_path / "model.gguf", tmp_path / "back")
    from transformers import AutoTokenizer

    model, tokenizer = opened(tmp_path / "model.gguf"), AutoTokenizer.from_pretrained(tmp_path / "back")
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert model.tokenize(text.encode(), add_bos=False, special=True) == ids, text
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    ties = 0
    for question in QUESTIONS:
        ids = tokenizer.encode(question)
        answer = greedy(model, ids, 16, ())
        with torch.no_grad():
            logprobs_TV = reference(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        gaps = [float(row.max() - row[token]) for row, token in zip(logprobs_TV, answer, strict=True)]
        assert max(gaps) < NEAR_TIE, (question, gaps)
        ties += max(gaps) > 0
    print(f"\nGemma 3: {20 - ties} of 20 continuations equal, {ties} have a near tie.")
