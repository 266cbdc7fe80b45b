"""Names of advantage estimators, as published programs write them in maps of roles."""

from enum import StrEnum


class PublishedEstimator(StrEnum):
    """`rLLMAdvantageEstimator`; each value is a name of `algorithm.estimator`."""

    GRPO = "grpo"
    PRPO = "prpo"
    REINFORCE = "reinforce"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    RLOO = "rloo"
