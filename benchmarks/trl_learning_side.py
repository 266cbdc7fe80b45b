"""The other side of `algorithm_curves.py`: a whole run of TRL's GRPOTrainer, in an environment of its own.

    stdin:  one line of JSON with the settings; then, for every batch, the rewards of what was asked about
    stdout: {"prompt": token ids of the first prompt}, so that both sides read the same; then
            {"grade": [[row, text], …]} for every batch; {"wall": …, "cpu": …} at the end

What is paid is decided by the process that started this one, so that both sides are paid by the same code.
"""

import json
import sys
import time
from typing import Any

from trl_side import cpu_seconds, settings_and_answers


def main() -> None:
    settings, answers = settings_and_answers("trl_learning_side.py", "algorithm_curves.py")

    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(settings["threads"])
    rates = settings["learning_rates"]

    class Trainer(GRPOTrainer):
        """Has the learning rate that our run has at each update."""

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer, lambda update: rates[min(update, len(rates) - 1)] / max(rates)
            )
            return self.lr_scheduler

    def reward(completions: list[str], row: list[int], **columns: Any) -> list[float]:
        answers.write(json.dumps({"grade": list(zip(row, completions, strict=True))}) + "\n")
        return json.loads(sys.stdin.readline())

    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    first = tokenizer(settings["prompts"][0])["input_ids"]
    answers.write(json.dumps({"prompt": first}) + "\n")
    rows, updates = settings["tasks_per_step"] * settings["group_size"], settings["updates_per_step"]
    arguments = GRPOConfig(
        output_dir=settings["output"],
        seed=settings["seed"],
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=rows // updates,
        steps_per_generation=updates,
        gradient_accumulation_steps=1,
        num_generations=settings["group_size"],
        num_iterations=1,
        max_completion_length=settings["completion"],
        beta=0.0,
        epsilon=0.2,
        epsilon_high=settings["clip_high"],
        temperature=settings["temperature"],
        top_k=0,
        top_p=1.0,
        learning_rate=max(rates),
        adam_beta2=settings["beta2"],
        weight_decay=0.0,
        max_grad_norm=settings["max_grad_norm"],
        max_steps=settings["steps"] * updates,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    prompts = settings["prompts"]
    trainer = Trainer(
        model=settings["model"],
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": prompts, "row": list(range(len(prompts)))}),
        processing_class=tokenizer,
    )
    wall, cpu = time.perf_counter(), cpu_seconds()
    trainer.train()
    spent = {"wall": time.perf_counter() - wall, "cpu": cpu_seconds() - cpu}
    trainer.save_model(settings["output"])
    answers.write(json.dumps(spent) + "\n")


if __name__ == "__main__":
    main()
