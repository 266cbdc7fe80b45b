"""The other side of `train_step.py`: TRL's GRPOTrainer, in a process and a virtual environment of its own.

    stdin:  one line of JSON with the settings, then lines `run N`, then `stop`
    stdout: {"ready": …} once, then {"wall": …, "cpu": …} for every `run`

It is started by `train_step.py`; started by hand without settings it says so and ends. Between two commands
it sleeps.
"""

import json
import os
import resource
import sys
import time
import zlib
from typing import Any, TextIO


def reward_of(text: str) -> float:
    """A number in [0, 1) that depends on every character: attempts never tie, so both sides train on every
    row."""
    return zlib.crc32(text.encode()) / 2**32


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def settings_and_answers(script: str, starter: str) -> tuple[dict[str, Any], TextIO]:
    """The settings that `starter` wrote, and where answers go; without settings it says so and ends."""
    line = "" if sys.stdin.isatty() else sys.stdin.readline()
    if not line.strip():
        print(f"{script} is a part of {starter}, which starts it.")
        sys.exit()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever libraries print is no answer
    return json.loads(line), answers


def main() -> None:
    settings, answers = settings_and_answers("trl_side.py", "train_step.py")

    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(settings["threads"])

    class Baton(TrainerCallback):
        """Runs when it is told to, for as many steps as it is told."""

        def __init__(self) -> None:
            self.steps_left = 0
            self.wall = self.cpu = 0.0

        def wait(self, control: Any) -> None:
            command = sys.stdin.readline().split()
            if command[:1] != ["run"]:
                control.should_training_stop = True
                return
            self.steps_left = int(command[1]) * settings["updates_per_step"]
            self.wall, self.cpu = time.perf_counter(), cpu_seconds()

        def on_train_begin(self, args: Any, state: Any, control: Any, **extra: Any) -> None:
            answers.write(json.dumps({"ready": num_prompt_tokens}) + "\n")
            self.wait(control)

        def on_step_end(self, args: Any, state: Any, control: Any, **extra: Any) -> None:
            self.steps_left -= 1
            if self.steps_left == 0:
                wall, cpu = time.perf_counter() - self.wall, cpu_seconds() - self.cpu
                answers.write(json.dumps({"wall": wall, "cpu": cpu, "tokens": self.tokens(extra)}) + "\n")
                self.wait(control)

        def tokens(self, extra: dict[str, Any]) -> float:
            lengths = trainer._metrics["train"]["completions/mean_length"]
            return sum(lengths) / max(1, len(lengths))

    def reward(completions: list[str], **columns: Any) -> list[float]:
        return [reward_of(text) for text in completions]

    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    num_prompt_tokens = sorted({len(tokenizer(prompt)["input_ids"]) for prompt in settings["prompts"]})
    rows = settings["tasks_per_step"] * settings["group_size"]
    arguments = GRPOConfig(
        output_dir=settings["scratch"],
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=rows // settings["updates_per_step"],
        steps_per_generation=settings["updates_per_step"],
        gradient_accumulation_steps=1,
        num_generations=settings["group_size"],
        num_iterations=1,
        max_completion_length=settings["completion"],
        beta=0.0,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        max_steps=1_000_000,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=settings["model"],
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": settings["prompts"]}),
        processing_class=tokenizer,
        callbacks=[Baton()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
