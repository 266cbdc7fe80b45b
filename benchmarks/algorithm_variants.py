"""What `algorithm_curves.py` compares: one change at a time from the configuration that a block ships with.

The estimators come first, then the losses, then what papers claim for single choices. `seeds` is how many of
`SEEDS` a variant is run with: five for the default and the estimators that most people choose between. Beside
TRL, whose runs draw other answers than ours and so differ more, each study says how many.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from learning_blocks import has_changed, settings_of_task

SEEDS = tuple(range(200, 230))
"""Nothing else is run with them."""
MAIN, MORE = 5, 3
"""With how many of them."""
DEFAULT = "default (GRPO)"
TRL, OURS = "TRL, GRPO with AdamW", "AdamW"
"""Both sides of that comparison."""
IMITATION = "imitation"
OWN_BOUNDS = "algorithm.clip_high=-1"
"""Those of the loss's own paper, in place of the block's."""


LARGER_GROUPS = "larger groups estimate the baseline better (Shao et al. 2024)"


@dataclass(kw_only=True, slots=True, frozen=True)
class Study:
    """A task that can tell algorithms apart."""

    task: str
    steps: int
    seeds_beside_trl: int = 0
    """With how many of `SEEDS` TRL's trainer and ours are compared."""
    beside_trl: tuple[str, ...] = ()
    """What both sides of that have on top of `OURS`."""
    assignments: tuple[str, ...] = ()
    """On top of the block, of every run."""


# As long as the default still rises, by development seed 100: later all of them come to the same. That of
# several turns has the training lakes and the learning rate which the block had when it was measured.
STUDIES = {
    "single-turn": Study(task="small-programs", steps=10, seeds_beside_trl=30),
    "multi-turn": Study(
        task="frozenlake",
        steps=12,
        assignments=(
            "rollout.tasks_per_step=16",
            "task.train_args.p=[0.55,0.7,0.8,0.9]",
            "optimizer.learning_rate=1.2e-3",
        ),
    ),
    # As long as it takes until both trainers come near where they end, by development seeds 100 and 101:
    # while they still rise, one seed differs from another by more than may be lost. Both warm up as the block
    # does: without it AdamW's first updates now and then ruin an imitator for good (TRL's, of seed 100). Both
    # learn from answers that were cut off, as TRL does.
    "beside-trl": Study(
        task="small-programs",
        steps=40,
        seeds_beside_trl=10,
        beside_trl=("optimizer.warmup_steps=5", "rollout.truncation.response_length=keep"),
    ),
}
WITH_VARIANTS = ("single-turn", "multi-turn")
"""Where everything is compared with the default; the others hold ours beside TRL's alone."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Variant:
    """One change."""

    part: str
    assignments: tuple[str, ...] = ()
    seeds: int = MORE
    """0: as its study says (`seeds_of`)."""
    claim: str = ""
    """What a paper says, where it is one of the ablations."""
    expects: str = ""
    """What the claim means for it beside the default: `better`, `worse`, `no better`, `no worse`."""
    studies: tuple[str, ...] = WITH_VARIANTS


def _estimator(name: str, *more: str, seeds: int = MORE) -> Variant:
    return Variant(part="estimator", assignments=(f"algorithm.estimator={name}", *more), seeds=seeds)


def _loss(name: str, *more: str) -> Variant:
    return Variant(part="loss", assignments=(f"algorithm.loss={name}", OWN_BOUNDS, *more))


def _ablation(
    claim: str, expects: str, *assignments: str, studies: tuple[str, ...] = WITH_VARIANTS
) -> Variant:
    return Variant(part="ablation", assignments=assignments, claim=claim, expects=expects, studies=studies)


VARIANTS: dict[str, Variant] = {
    DEFAULT: Variant(part="default", seeds=MAIN),
    "PPO (critic)": _estimator("gae", "critic.trunk=separate", seeds=MAIN),
    "RLOO": _estimator("rloo", seeds=MAIN),
    "ReMax": _estimator("remax", seeds=MAIN),
    "REINFORCE++": _estimator("reinforce_plus_plus", seeds=MAIN),
    "Dr. GRPO": _estimator("dr_grpo", seeds=MAIN),
    "REINFORCE": _estimator("reinforce"),
    "REINFORCE, mean of the batch": _estimator("reinforce_baseline"),
    "REINFORCE++, baseline": _estimator("reinforce_plus_plus_baseline"),
    "PRPO": _estimator("prpo"),
    "OPO": _estimator("opo"),
    "GPG": _estimator("gpg"),
    "MaxRL": _estimator("maxrl"),
    "pass@k": _estimator("pass_at_k"),
    "GiGPO": _estimator("gigpo"),
    "policy gradient": _loss("policy_gradient"),
    "importance sampling": _loss("importance_sampling"),
    "GSPO": _loss("gspo", "algorithm.aggregation=sequence_mean"),
    "CISPO": _loss("cispo"),
    "GMPO": _loss("gmpo", "algorithm.aggregation=sequence_mean"),
    "SAPO": _loss("sapo", "algorithm.aggregation=sequence_mean"),
    "DPPO, total variation": _loss("dppo_tv"),
    "DPPO, KL": _loss("dppo_kl"),
    "TOPR": _loss("topr"),
    "Clip-Cov": _loss("clip_cov"),
    "KL-Cov": _loss("kl_cov"),
    "groups of 4": _ablation(LARGER_GROUPS, "worse", "rollout.group_size=4", "rollout.tasks_per_step=32"),
    "groups of 16": _ablation(LARGER_GROUPS, "better", "rollout.group_size=16", "rollout.tasks_per_step=8"),
    "KL 0.04": _ablation(
        "a KL term (Shao et al. 2024) can be left out (Yu et al. 2025)", "no better", "algorithm.kl_coef=0.04"
    ),
    "clip 0.2": _ablation(
        "a higher upper bound than 0.2 learns more (Yu et al. 2025, clip-higher)", "worse", OWN_BOUNDS
    ),
    "dynamic sampling": _ablation(
        "groups that tie are replaced: fewer steps to the same result (Yu et al. 2025)",
        "better",
        "filters.dynamic=true",
    ),
    "replay by pass rate": _ablation(
        "tasks of middling success teach most (Jiang et al. 2021)", "better", "curriculum.replay_fraction=0.5"
    ),
    "Dr. GRPO, no length mean": _ablation(
        "without the deviation and the mean by length nothing is lost (Liu et al. 2025)",
        "no worse",
        "algorithm.estimator=dr_grpo",
        "algorithm.aggregation=constant",
        "algorithm.aggregation_constant=32",
    ),
    "credit by turn": _ablation(
        "credit by turn learns faster over several turns (Zeng et al. 2025)",
        "better",
        "algorithm.credit=turn",
        studies=("multi-turn",),
    ),
    "credit discounted": _ablation(
        "later turns deserve more of the reward",
        "better",
        "algorithm.credit=discounted",
        "algorithm.gamma=0.9",
        studies=("multi-turn",),
    ),
    OURS: Variant(
        part="beside TRL",
        assignments=(
            "optimizer.name=adamw",
            "optimizer.weight_decay=0.0",
            "optimizer.warmup_steps=0",
            "optimizer.final_lr_fraction=0.0",
        ),
        seeds=0,
        studies=("single-turn", "beside-trl"),
    ),
}


def variants_of(study: str) -> dict[str, Variant]:
    """Name -> what a study makes of it."""
    variants = {name: each for name, each in VARIANTS.items() if study in each.studies}
    if OURS in variants:
        assignments = (*variants[OURS].assignments, *STUDIES[study].beside_trl)
        variants[OURS] = replace(variants[OURS], assignments=assignments)
    return variants


def reference_of(study: str) -> str:
    """The variant that the others of a study are compared with."""
    return DEFAULT if DEFAULT in variants_of(study) else TRL


def seeds_of(study: str) -> dict[str, int]:
    """With how many of `SEEDS` each runs, TRL's among them."""
    beside = STUDIES[study].seeds_beside_trl
    ours = {name: each.seeds or beside for name, each in variants_of(study).items()}
    return {**ours, TRL: beside} if beside else ours


def common(steps: int) -> tuple[str, ...]:
    """Of every run that learns; measured on validation tasks, because choices are made by it."""
    return (
        "evaluation.split=validation",
        "evaluation.every_steps=0",
        f"steps={steps}",
        "warm_start.steps=0",
        "warm_start.expert_args={}",
    )


def study_settings(label: str, steps: int, shorter: tuple[str, ...] = ()) -> dict[str, Any]:
    """What all runs of a study share: dotted key -> value."""
    study = STUDIES[label]
    return settings_of_task(study.task, (*study.assignments, *shorter, *common(steps)))


def kept_runs(label: str, study: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Runs on record that would be the same today: name -> seed -> figures."""
    if study is None or has_changed(study["settings"], settings):
        return {}
    changes = {name: list(each.assignments) for name, each in variants_of(label).items()}
    changes[TRL] = changes.get(OURS, [])
    kept = {
        name: {seed: run for seed, run in runs.items() if run["change"] == changes.get(name)}
        for name, runs in study["runs"].items()
        if name != IMITATION
    }
    kept = {name: runs for name, runs in kept.items() if runs}
    return {IMITATION: study["runs"][IMITATION], **kept} if kept else {}
