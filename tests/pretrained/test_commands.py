"""Every command on a real pretrained model, as a user types it: a few steps each, minutes in all.

    smollm2 ─┬─► train ──► eval, runs show, serve, transformers, GGUF
             └─► sft, dpo, distill ──► transformers

`make test-pretrained` runs these. They say that the commands fit together, nothing of how much is learned.
"""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.slow

SMALL = ("batch_size=2", "epochs=1", "optimizer.learning_rate=1e-5", "data.max_length=64")
ANSWERS = ("The sum is 12.", "It is 12.", "12", "The answer is 12.")


def run_rllm(folder: Path, *words: str | Path) -> dict[str, Any]:
    """The object that `rllm WORD… --json` prints."""
    command = [sys.executable, "-m", "rllm", *map(str, words), "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-1_000:]}\n{done.stderr[-3_000:]}"
    return json.loads(done.stdout)


def finished_steps(folder: Path, run: Path) -> int:
    """Steps of a run, as `rllm runs show` has them."""
    record = run_rllm(folder, "runs", "show", run)
    assert record["state"] == "finished"
    return record["steps"]


def settings(*keys: str) -> list[str]:
    return [word for key in keys for word in ("--set", key)]


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answer_of_transformers(directory: Path, tokens: int = 8) -> str:
    """The greedy answer of an exported model, read by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    messages = [{"role": "user", "content": "What is 7 + 5? Answer with a number."}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**prompt, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Removed at the end: checkpoints take gigabytes."""
    path = tmp_path_factory.mktemp("pretrained")
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def trained(smollm2: Path, folder: Path) -> Path:
    """A run of two steps of GRPO on sums."""
    keys = ("steps=2", "rollout.tasks_per_step=2", "rollout.group_size=4", "rollout.max_tokens_per_turn=12")
    more = ("evaluation.num_tasks=4", "task.environment_args.max_number=9")
    words = ("train", "arithmetic", "--model", smollm2, "--output", "run")
    run_rllm(folder, *words, *settings(*keys, *more))
    return folder / "run"


def test_a_trained_run_is_measured_and_shown(trained: Path, folder: Path) -> None:
    words = (
        "eval",
        "arithmetic",
        "--model",
        trained,
        "--num-tasks",
        "4",
        "--max-tokens",
        "12",
        "--output",
        "e",
    )
    report = run_rllm(folder, *words)
    assert report["sampled"]["attempted"] == report["sampled"]["scored"] == 4
    assert finished_steps(folder, trained) == 2


def test_a_trained_run_is_served_to_openais_client(trained: Path, folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "rllm",
        "serve",
        "model",
        str(trained),
        "--port",
        "0",
        "--no-auth",
        "--json",
    ]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["base_url"]
        with openai.OpenAI(base_url=address, api_key="any") as client:
            reply = client.chat.completions.create(
                model="any",
                messages=[{"role": "user", "content": "What is 7 + 5? Answer with a number."}],
                max_tokens=8,
                temperature=0,
            )
        assert "12" in (reply.choices[0].message.content or "")
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        process.stdout.close()  # pyright: ignore[reportOptionalMemberAccess]


def test_a_trained_run_is_read_by_transformers(trained: Path) -> None:
    assert "12" in answer_of_transformers(trained / "model")


def test_a_trained_run_is_exported_as_a_gguf_file_and_read_again(trained: Path, folder: Path) -> None:
    run_rllm(folder, "model", "export", trained, "--gguf", "run.gguf")
    run_rllm(folder, "model", "import", "run.gguf", "again")
    assert answer_of_transformers(folder / "again") == answer_of_transformers(trained / "model")


def test_it_learns_from_conversations(smollm2: Path, folder: Path) -> None:
    rows = [{"prompt": f"What is {n} + {12 - n}?", "completion": ANSWERS[n % 4]} for n in range(8)]
    data = write_rows(folder / "chats.jsonl", rows)
    run_rllm(folder, "sft", data, "--model", smollm2, "--output", "sft", *settings(*SMALL))
    assert finished_steps(folder, folder / "sft") >= 3
    assert "12" in answer_of_transformers(folder / "sft" / "model")


def test_it_learns_from_preferences_with_an_adapter(smollm2: Path, folder: Path) -> None:
    rows = [
        {"prompt": f"What is {n} + {12 - n}?", "chosen": ANSWERS[n % 4], "rejected": "I do not know."}
        for n in range(8)
    ]
    data = write_rows(folder / "pairs.jsonl", rows)
    keys = settings(*SMALL, "lora.rank=4")
    run_rllm(folder, "dpo", data, "--model", smollm2, "--output", "dpo", *keys)
    assert finished_steps(folder, folder / "dpo") >= 3


def test_it_is_distilled_from_itself(smollm2: Path, folder: Path) -> None:
    data = write_rows(folder / "prompts.jsonl", [{"prompt": f"What is {n} + 5?"} for n in range(4)])
    keys = settings(
        "steps=1", "rollout.tasks_per_step=2", "rollout.group_size=2", "rollout.max_tokens_per_turn=8"
    )
    words = ("distill", data, "--teacher", smollm2, "--model", smollm2, "--output", "student")
    run_rllm(folder, *words, *keys)
    assert finished_steps(folder, folder / "student") == 1
