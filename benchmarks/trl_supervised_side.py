"""TRL's SFTTrainer or DPOTrainer, in a process and a virtual environment of its own.

    stdin:  one line of JSON with the settings and all rows as token ids, then lines `run N`, then `stop`
    stdout: {"ready": []} once, then {"wall": …, "cpu": …, "tokens": …} for every `run`

It is started by `trainer.py`. Rows come tokenized, in order, so both sides train on the very same batches;
the log-probabilities of DPO's reference are computed before the first `run`.
"""

import json
import sys
import time
from typing import Any

from trl_side import cpu_seconds, settings_and_answers


def main() -> None:
    settings, answers = settings_and_answers("trl_supervised_side.py", "trainer.py")

    import torch
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    torch.set_num_threads(settings["threads"])

    class Baton(TrainerCallback):
        """Runs when it is told to, for as many steps as it is told."""

        def __init__(self) -> None:
            self.steps_left = 0
            self.wall = self.cpu = 0.0
            self.first_loss = 0.0

        def wait(self, control: Any) -> None:
            command = sys.stdin.readline().split()
            if command[:1] != ["run"]:
                control.should_training_stop = True
                return
            self.steps_left = int(command[1])
            self.wall, self.cpu = time.perf_counter(), cpu_seconds()

        def on_train_begin(self, args: Any, state: Any, control: Any, **extra: Any) -> None:
            answers.write(json.dumps({"ready": []}) + "\n")
            self.wait(control)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **extra: Any) -> None:
            self.first_loss = logs.get("loss", self.first_loss)

        def on_step_end(self, args: Any, state: Any, control: Any, **extra: Any) -> None:
            self.steps_left -= 1
            if self.steps_left == 0:
                wall, cpu = time.perf_counter() - self.wall, cpu_seconds() - self.cpu
                answers.write(json.dumps({"wall": wall, "cpu": cpu, "tokens": self.first_loss}) + "\n")
                self.wait(control)

    class InOrder:
        """Rows as they are, in the order that they have."""

        train_dataset: Any

        def _prepare_dataset(self, dataset: Any, *args: Any, **options: Any) -> Any:
            return dataset

        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(dataset if dataset is not None else self.train_dataset)

    class OrderedSFT(InOrder, SFTTrainer): ...

    class OrderedDPO(InOrder, DPOTrainer): ...

    common: dict[str, Any] = {
        "output_dir": settings["scratch"],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": settings["batch"],
        "gradient_accumulation_steps": 1,
        "learning_rate": settings["learning_rate"],
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "max_steps": 1_000_000,
        "max_length": None,
        "dataloader_pin_memory": False,
        "logging_strategy": "steps",
        "logging_first_step": True,
        "logging_steps": 1_000_000,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    parts = {
        "model": model,
        "train_dataset": Dataset.from_list(settings["rows"]),
        "processing_class": AutoTokenizer.from_pretrained(settings["model"]),
        "callbacks": [Baton()],
    }
    if settings["kind"] == "sft":
        trainer: Any = OrderedSFT(args=SFTConfig(**common), **parts)
    else:
        arguments = DPOConfig(**common, beta=settings["beta"], precompute_ref_log_probs=True)
        trainer = OrderedDPO(args=arguments, **parts)
    trainer.train()


if __name__ == "__main__":
    main()
