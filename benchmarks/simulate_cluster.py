"""Steps of a run on 1 to 1,024 devices, simulated: where they wait, and how to share devices out.

    --measure   real runs of this machine ──► results/cluster.json
    results ──► half of the runs ──► seconds of each kind of work, fitted ──► the other half, predicted
    public figures of GPUs ──► the same simulation ──► the table of docs/scale.md

    python benchmarks/simulate_cluster.py [--measure] [--quick] [--json]

The simulation is `cluster_events.py`; tests hold it against closed forms of queueing theory. What it says of
GPUs is extrapolated: nobody has run it on any.
"""

import argparse
import itertools
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cluster_events import Report, Run, Service, Work
from numpy.typing import NDArray

from rllm.files.atomic import write_atomic

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cluster.json"
PAGE = ROOT / "docs" / "scale.md"
MARK = re.compile(r"(<!-- cluster:begin -->).*?(<!-- cluster:end -->)", re.DOTALL)
WITHIN = 0.15

SHAPES = [
    Work(num_tasks=tasks, group_size=group, prompt_tokens=prompt, turn_tokens=sampled)
    for tasks, group, prompt, sampled in (
        (4, 4, 32, 8),
        (8, 8, 32, 8),
        (16, 8, 32, 16),
        (4, 8, 128, 32),
        (8, 4, 128, 8),
        (16, 4, 64, 32),
        (4, 16, 64, 16),
        (8, 16, 32, 32),
        (16, 8, 128, 8),
        (8, 8, 64, 64),
        (4, 8, 32, 64),
        (16, 16, 32, 8),
    )
]
"""Every second one is fitted on, and the others are predicted."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Source:
    """A figure that the extrapolated rows begin with."""

    what: str
    value: str
    where: str


PARAMETERS, WEIGHT_BYTES = 8.03e9, 16.06e9
KEY_BYTES = 2 * 32 * 8 * 128 * 2
BANDWIDTH, BANDWIDTH_SHARE = 3.35e12, 0.77
TRAINED_PER_S, TRAINED_PER_S_AT_128 = 6_667.0, 6_514.0
PEAK_FLOPS, FLOPS_SHARE = 989e12, 0.39
BROADCAST_FIXED_S, BROADCAST_BYTES_PER_S, BROADCAST_GROWTH = 1.21, 94e9, 1.11
SLOTS = 256
TASKS_PER_DEVICE = 4
SOURCES = (
    Source(
        what="update of Llama 3.1 8B, bfloat16, FSDP and torch.compile",
        value="6,667 tokens/s for each of 8 H100, 6,514 for each of 128; beyond 128 as at 128",
        where="https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md",
    ),
    Source(
        what="memory bandwidth of an H100 SXM",
        value="3.35 TB/s, peak",
        where="https://www.nvidia.com/en-us/data-center/h100/",
    ),
    Source(
        what="share of the bandwidth that decoding reaches",
        value="77 %, of Llama 3.1 8B in vLLM at one request, measured on an A100 40 GB",
        where="https://johnmusgrave.com/p/vllm-throughput-latency-sweep-on",
    ),
    Source(
        what="share of 989 Tflop/s that reading prompts reaches",
        value="39 %, what the update of the first row comes to at best",
        where="https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md",
    ),
    Source(
        what="broadcast of weights to samplers",
        value="3.47 s for 212 GB and 6.22 s for 470 GB on 8 H800: 1.2 s, and 94 GB/s; 11 % more for 16 times "
        "as many devices",
        where="https://github.com/MoonshotAI/checkpoint-engine",
    ),
)
ASSUMPTIONS = (
    "A sampler is one device with a whole copy of Llama 3.1 8B in bfloat16; a step of B rows reads the "
    f"weights once and the keys of every row, {KEY_BYTES // 1024} KiB a token of context, at the share of "
    "the bandwidth below. Kernels' launches, the choice of tokens and HTTP are not counted.",
    f"A sampler decodes at most {SLOTS} conversations at the same time; further ones wait.",
    "An episode has 6 turns of 400 sampled tokens on the average (log-normal, spread 0.8) and 400 read "
    "ones, behind a prompt of 1,000 that the 8 attempts of a group read once; a turn in the environment "
    "takes 2 s (log-normal, spread 1.0), on as many machines as it needs.",
    f"A step has {TASKS_PER_DEVICE * 8} episodes for each device of the whole cluster, whatever the split: "
    "more devices, larger steps.",
    "`together`: all devices sample, then all update. `apart`: some sample and the others update, with "
    "weights that are one step old; the best split is the one with the most tokens a second among eighths of "
    "the devices: all seven for 8, of 64 the three around the best of 8, of 1,024 the best of 64.",
    "Two steps are simulated with one seed: times are those of the second, idle shares those of both, so "
    "that of trainers apart has the wait for the first samples in it.",
    "Sampling of a step begins once the last episode of the one before has ended: a long episode keeps its "
    "sampler's neighbours waiting, which is most of what stands idle.",
    "Devices do not fail, and nothing else uses the network.",
)


def counts_of(work: Work) -> dict[str, list[float]]:
    """What each thread has to do in a step, in the order of the coefficients that are fitted."""
    prompts = work.num_tasks * work.prompt_tokens + work.num_episodes
    return {
        "sampler": [
            work.turn_tokens,
            work.sampled_tokens,
            work.sampled_tokens * work.mean_context,
            prompts,
        ],
        "learner": [work.trained_tokens, 1.0],
        "other": [work.num_episodes, 1.0],
    }


def fitted(runs: Sequence[dict[str, Any]]) -> Service:
    """Least squares of relative errors; nothing takes less than no time."""
    found: dict[str, Any] = {}
    for thread in ("sampler", "learner", "other"):
        counts = np.array([counts_of(Work(**run["work"]))[thread] for run in runs])
        seconds = np.array([run["seconds"][thread] for run in runs])
        found[thread] = non_negative(counts / seconds[:, None], np.ones(len(runs)))
    step, row, looked_back, token = found["sampler"]
    return Service(
        decode_fixed_s=float(step),
        decode_row_s=float(row),
        decode_context_s=float(looked_back),
        prefill_token_s=float(token),
        turn_s=float(found["other"][0]),
        update_token_s=float(found["learner"][0]),
        update_fixed_s=float(found["learner"][1] + found["other"][1]),
    )


def non_negative(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """The x ≥ 0 with the least |matrix · x - target|: of all choices of columns the best that is one."""
    num_columns, best, least = matrix.shape[1], np.zeros(matrix.shape[1]), float(target @ target)
    for size in range(1, num_columns + 1):
        for columns in itertools.combinations(range(num_columns), size):
            part = np.linalg.lstsq(matrix[:, columns], target, rcond=None)[0]
            error = float(((matrix[:, columns] @ part - target) ** 2).sum())
            if (part >= 0.0).all() and error < least:
                best, least = np.zeros(num_columns), error
                best[list(columns)] = part
    return best


def simulated(service: Service, work: Work) -> float:
    """Seconds of a step on one core, which does everything."""
    run = Run(service, work, num_samplers=1, num_trainers=1, num_slots=work.num_episodes)
    return run.report(2).step_s


def comparison(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Measured beside simulated, of the runs that were fitted on and of those that were not."""
    service = fitted(runs[::2])
    rows: list[dict[str, Any]] = []
    for index, run in enumerate(runs):
        measured, predicted = sum(run["seconds"].values()), simulated(service, Work(**run["work"]))
        rows.append(
            {
                "work": run["work"],
                "fitted": index % 2 == 0,
                "measured_s": measured,
                "simulated_s": predicted,
                "error": predicted / measured - 1.0,
            }
        )
    others = [abs(row["error"]) for row in rows if not row["fitted"]]
    return {
        "service": asdict(service),
        "rows": rows,
        "mean_error": float(np.mean(others)),
        "worst_error": max(others),
    }


def gpu_service(num_devices: int) -> Service:
    """Of an H100 among so many, from `SOURCES`."""
    bandwidth = BANDWIDTH * BANDWIDTH_SHARE
    trained = TRAINED_PER_S if num_devices <= 8 else TRAINED_PER_S_AT_128
    broadcast = BROADCAST_FIXED_S + WEIGHT_BYTES / BROADCAST_BYTES_PER_S
    return Service(
        decode_fixed_s=WEIGHT_BYTES / bandwidth,
        decode_row_s=0.0,
        decode_context_s=KEY_BYTES / bandwidth,
        prefill_token_s=2 * PARAMETERS / (PEAK_FLOPS * FLOPS_SHARE),
        update_token_s=1.0 / trained,
        broadcast_s=broadcast * (1.0 if num_devices <= 16 else BROADCAST_GROWTH),
    )


def paper_work(num_devices: int) -> Work:
    return Work(
        num_tasks=TASKS_PER_DEVICE * num_devices,
        group_size=8,
        prompt_tokens=1_000,
        turn_tokens=400,
        observation_tokens=400,
        num_turns=6,
        environment_s=2.0,
        environment_spread=1.0,
        token_spread=0.8,
    )


def extrapolated(num_devices: int, num_steps: int, eighths: Sequence[int]) -> list[dict[str, Any]]:
    """All devices together, and the best split among those with so many eighths of them sampling."""
    work = paper_work(num_devices)
    service = gpu_service(num_devices)
    together = Run(service, work, num_samplers=num_devices, num_trainers=num_devices, num_slots=SLOTS).report(
        num_steps
    )
    splits = {
        samplers: Run(
            service,
            work,
            num_samplers=samplers,
            num_trainers=num_devices - samplers,
            num_slots=SLOTS,
            ahead=1,
        ).report(num_steps)
        for samplers in (num_devices * each // 8 for each in eighths)
    }
    best = max(splits, key=lambda samplers: splits[samplers].tokens_per_s)
    return [
        row_of(num_devices, "together", num_devices, num_devices, together, service, work),
        row_of(num_devices, "apart", best, num_devices - best, splits[best], service, work),
    ]


def row_of(
    num_devices: int,
    how: str,
    samplers: int,
    trainers: int,
    report: Report,
    service: Service,
    work: Work,
) -> dict[str, Any]:
    update_s = work.trained_tokens * service.update_token_s / trainers
    return {
        "devices": num_devices,
        "how": how,
        "samplers": samplers,
        "trainers": trainers,
        "step_s": report.step_s,
        "tokens_per_s": report.tokens_per_s,
        "sampler_idle": report.sampler_idle,
        "trainer_idle": report.trainer_idle,
        "bottlenecks": bottlenecks(report, update_s, service, how),
    }


def bottlenecks(report: Report, update_s: float, service: Service, how: str) -> list[str]:
    """What a step waits for most, and what next. Seconds of a sampler without a row are those of its longest
    episodes; apart from each other, the side that is not waited for does not count before the other."""
    learning = {"update": update_s, "broadcast": service.broadcast_s}
    learning_s, decoding_s = sum(learning.values()), (1.0 - report.sampler_idle) * report.step_s
    sampling_s = report.step_s - (learning_s if how == "together" else 0.0)
    sampling = {"decoding": decoding_s, "the longest episodes": max(0.0, sampling_s - decoding_s)}
    if how == "apart" and learning_s > 0.95 * report.step_s:
        sampling["the longest episodes"] = 0.0
    parts = learning | sampling
    return sorted(parts, key=lambda each: -parts[each])[:2]


def page_text(found: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """What stands between the marks."""
    held_out = [row for row in found["rows"] if not row["fitted"]]
    verdict = (
        "all"
        if found["worst_error"] <= WITHIN
        else (f"{sum(abs(row['error']) <= WITHIN for row in held_out)} of {len(held_out)}")
    )
    lines = [
        f"Of {len(found['rows'])} runs measured here (builtin:tiny, one core, processor's seconds of a "
        f"step), every second one gave the seconds of each kind of work; of the {len(held_out)} others "
        f"{verdict} are within {WITHIN:.0%} of what was simulated: {found['mean_error']:.1%} apart in the "
        f"mean, {found['worst_error']:.1%} at worst.",
        "",
        "| tasks × attempts | prompt + sampled tokens | measured s | simulated s | error | |",
        "|--:|--:|--:|--:|--:|---|",
    ]
    for row in found["rows"]:
        work = row["work"]
        lines.append(
            f"| {work['num_tasks']} × {work['group_size']} | {work['prompt_tokens']} + {work['turn_tokens']} "
            f"| {row['measured_s']:.3f} | {row['simulated_s']:.3f} | {row['error']:+.1%} "
            f"| {'fitted on' if row['fitted'] else 'predicted'} |"
        )
    lines += [
        "",
        "**Extrapolated**: nobody has run these. H100, Llama 3.1 8B, from public figures alone.",
        "",
        "| devices | | samplers | trainers | s a step | sampled tokens/s | samplers idle | trainers idle "
        "| waits most for | then for |",
        "|--:|---|--:|--:|--:|--:|--:|--:|---|---|",
    ]
    lines += [
        f"| {row['devices']:,} | extrapolated, {row['how']} | {row['samplers']:,} | {row['trainers']:,} "
        f"| {row['step_s']:,.0f} | {row['tokens_per_s']:,.0f} | {row['sampler_idle']:.0%} "
        f"| {row['trainer_idle']:.0%} | {' | '.join(row['bottlenecks'])} |"
        for row in rows
    ]
    lines += ["", "Assumptions:", "", *(f"- {each}" for each in ASSUMPTIONS), "", "Sources:", ""]
    lines += [f"- {each.what}: {each.value} ([source]({each.where}))" for each in SOURCES]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--measure", action="store_true", help="run the real steps again, which takes minutes"
    )
    parser.add_argument("--quick", action="store_true", help="8 devices, and no page")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.measure:
        from cluster_runs import measure

        runs = [{"work": asdict(work), "seconds": measure(work)} for work in SHAPES]
        write_atomic(RESULTS, (json.dumps({"runs": runs}, indent=1) + "\n").encode())
    found = comparison(json.loads(RESULTS.read_text())["runs"])
    rows, eighths = list[dict[str, Any]](), range(1, 8)
    for num_devices in (8,) if options.quick else (8, 64, 1_024):
        rows += extrapolated(num_devices, 2, eighths)
        best = 8 * rows[-1]["samplers"] // num_devices
        around = 1 if num_devices < 64 else 0
        eighths = range(max(1, best - around), min(7, best + around) + 1)
    text = page_text(found, rows)
    if not options.quick:
        page = MARK.sub(lambda mark: f"{mark[1]}\n{text}\n{mark[2]}", PAGE.read_text())
        write_atomic(PAGE, page.encode())
    print(json.dumps({**found, "extrapolated": rows}, indent=2) if options.json else text)
    if found["worst_error"] > WITHIN:
        print(f"Not within {WITHIN:.0%}: {found['worst_error']:.1%} at worst.", file=sys.stderr)


if __name__ == "__main__":
    main()
