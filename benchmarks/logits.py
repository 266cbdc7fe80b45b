"""Memory of a loss over 152,000 words, beyond the states that enter it and the weights of the output layer.

    a process for each case: states, weights, baseline ─► loss ─► backward ─► ru_maxrss − baseline

    python benchmarks/logits.py [--width 64] [--tokens 4096 32768] [--losses NAME …] [--keep] [--json]

`selected` is the loss of rewards, of rows and of preferences; with `entropy` that has a gradient too;
`distilled` compares with a teacher's whole distribution. Gradients of states and weights are part of what is
measured, and so is what the kernels take for themselves. The width is smaller than a model's, because time
grows with it: at 896, Qwen2.5-0.5B's, the gradients take 519 MiB of weights and 3.5 KiB a token, and all else
is the same. It fails above 1 GiB.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench_results import keep
from memory import MALLOC, peak_bytes, resident_bytes
from report import logits_table

VOCABULARY = 151_936
LOGITS_MB = 512.0
"""`optimizer.logits_mb` by default."""
LIMIT = 1 << 30
LOSSES = ("selected", "selected, entropy", "distilled, jsd", "distilled, reverse_kl, entropy")


def measure(loss: str, num: int, width: int) -> dict[str, Any]:
    """In a process of its own."""
    import torch

    from rllm.models.decoder import Decoder, DecoderShape
    from rllm.models.devices import use_threads
    from rllm.trainer.backends.logprobs import (
        Entropy,
        TeacherComparison,
        compared_logprobs,
        selected_logprobs,
        tokens_at_once,
    )

    use_threads(1)
    generator = torch.Generator().manual_seed(0)
    shape = DecoderShape(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        norm_eps=1e-6,
        rope_theta=1e4,
        max_positions=8,
        tied=True,
        qkv_bias=False,
        out_bias=False,
        qk_norm=False,
    )
    kind, *others = loss.split(", ")
    models = [Decoder(shape) for _ in range(1 + (kind == "distilled"))]
    for each in models:
        each.initialize(generator)
    hidden_M_D, teacher_M_D = (torch.randn(num, width, generator=generator) for _ in range(2))
    hidden_M_D.requires_grad_()
    targets_M = torch.randint(VOCABULARY, (num,), generator=generator)
    temperature_M = torch.full((num,), 0.7)
    entropy = Entropy.WITH_GRADIENT if "entropy" in others else Entropy.NONE
    chunk = tokens_at_once(models[0], LOGITS_MB / len(models))
    # What torch makes on first use, such as its thread pools, is part of the baseline.
    selected_logprobs(models[0], hidden_M_D[:2], targets_M[:2], None, chunk=1)[0].sum().backward()
    for each in (hidden_M_D, *models[0].parameters()):
        each.grad = None
    before, started_s = resident_bytes(), time.process_time()
    if kind == "distilled":
        comparison = TeacherComparison(teacher=models[1], states_M_D=teacher_M_D, kind=others[0], beta=0.5)
        columns = compared_logprobs(
            models[0], hidden_M_D, targets_M, temperature_M, comparison, chunk=chunk, entropy=entropy
        )
    else:
        columns = selected_logprobs(
            models[0], hidden_M_D, targets_M, temperature_M, chunk=chunk, entropy=entropy
        )
    torch.stack([each.sum() for each in columns if each is not None]).sum().backward()
    gradients = [each.grad for each in (hidden_M_D, *models[0].parameters()) if each.grad is not None]
    return {
        "loss": loss,
        "tokens": num,
        "bytes": peak_bytes() - before,
        "gradient_bytes": sum(each.numel() * each.element_size() for each in gradients),
        "cpu_s": time.process_time() - started_s,
    }


def compare(loss: str, num: int, width: int) -> dict[str, Any]:
    words = [sys.executable, __file__, "--measure", loss, str(num), str(width)]
    done = subprocess.run(words, env={**os.environ, **MALLOC}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=64, help="of the states")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4_096, 32_768])
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--keep", action="store_true", help="write it into results/, for report.py")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        loss, num, width = options.measure
        print(json.dumps(measure(loss, int(num), int(width))))
        return
    rows = {
        f"{loss}, {num}": compare(loss, num, options.width)
        for num in options.tokens
        for loss in options.losses
    }
    if options.keep:
        keep(Path(__file__).stem, rows)
    print(json.dumps(rows, indent=2) if options.json else logits_table(rows))
    wrong = [name for name, row in rows.items() if row["bytes"] > LIMIT]
    if wrong:
        sys.exit(f"{', '.join(wrong)}: more than {LIMIT >> 20:,} MiB.")


if __name__ == "__main__":
    main()
