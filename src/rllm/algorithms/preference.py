"""Which of two answers is better, as losses on the tokens of both.

    chosen rows    (+1 on their tokens) ──┐ one group: one micro-batch,
    rejected rows  (-1 on their tokens) ──┘ the prompt computed once ──► sums of both sides ──► pair's loss

A term is the loss of the whole pair, on each of its tokens. With `group_mean` weights (`token_weights`) each
pair weighs 1 / pairs, so the sum over micro-batches, in any split and order, is the mean over the pairs of
the update. An answer in several rows (an agent that rewrote its history) is summed like one. Everything here
is float64: sums over long answers keep their last digits, and so does a log-odds near certainty.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rllm.algorithms.tokens import TokenInputs
from rllm.config.preference import USUAL_BETA, PreferenceConfig

CERTAIN = -1e-12
"""Mean log-probability above which an answer counts as certain: its odds would be infinite."""


def dpo(margin_P: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - ε) log σ(β h) - ε log σ(-β h), with h = log π/π_ref (chosen) - log π/π_ref (rejected).

    Rafailov et al. 2023 (arXiv:2305.18290), equation 7, at ε = `label_smoothing` = 0. With ε above 0 it is
    conservative DPO (Mitchell 2023, "A note on DPO with noisy preferences"): labels are wrong with
    probability ε, and the margin has an optimum at log((1 - ε) / ε) / β instead of growing for ever.
    """
    logits_P = beta * margin_P
    return -(1.0 - label_smoothing) * F.logsigmoid(logits_P) - label_smoothing * F.logsigmoid(-logits_P)


def robust_dpo(margin_P: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """(-(1 - ε) log σ(β h) + ε log σ(-β h)) / (1 - 2 ε).

    Chowdhury et al. 2024 (arXiv:2403.00409): its mean over labels that are flipped with
    probability ε is the DPO loss of the labels without flips. It may be negative.
    """
    logits_P = beta * margin_P
    unflipped_P = -(1.0 - label_smoothing) * F.logsigmoid(logits_P)
    return (unflipped_P + label_smoothing * F.logsigmoid(-logits_P)) / (1.0 - 2.0 * label_smoothing)


def ipo(margin_P: Tensor, *, beta: float) -> Tensor:
    """(h - 1 / (2 β))².

    Azar et al. 2023 (arXiv:2310.12036), equation 17, whose τ is our β: the margin is drawn to a finite value.
    `h` is of whole answers, as there; TRL takes their token means, which `length_average` does.
    """
    return (margin_P - 1.0 / (2.0 * beta)) ** 2


def hinge(margin_P: Tensor, *, beta: float) -> Tensor:
    """max(0, 1 - β h).

    Zhao et al. 2023 (SLiC-HF, arXiv:2305.10425), with the margin measured against the reference as in Liu et
    al. 2024 (RSO, arXiv:2309.06657): pairs that are far enough apart teach nothing more.
    """
    return torch.relu(1.0 - beta * margin_P)


def simpo(margin_P: Tensor, *, beta: float, target_margin: float) -> Tensor:
    """-log σ(β h - γ), with h = token mean of log π (chosen) - token mean of log π (rejected).

    Meng et al. 2024 (arXiv:2405.14734), equation 6: no reference policy, and γ = `target_margin` is in units
    of the reward β h (TRL's `simpo_gamma` too).
    """
    return -F.logsigmoid(beta * margin_P - target_margin)


def orpo(chosen_P: Tensor, rejected_P: Tensor, *, beta: float) -> Tensor:
    """-β log σ(log odds(chosen) - log odds(rejected)), with odds = p / (1 - p) and log p the token mean.

    Hong et al. 2024 (arXiv:2403.07691), equation 7, whose λ is our β; the likelihood of the chosen answer
    (its equation 6) is added by `PairLoss` with a coefficient of 1.
    """
    return -beta * F.logsigmoid(_log_odds(chosen_P) - _log_odds(rejected_P))


def kto(log_ratio_R: Tensor, sign_R: Tensor, *, beta: float, kl: float) -> Tensor:
    """1 - σ(β (r - z)) of desirable answers (sign 1), 1 - σ(β (z - r)) of undesirable ones (sign -1).

    Ethayarajh et al. 2024 (arXiv:2402.01306), λ_y - v(x, y) at λ = 1: r = log π/π_ref of the answer
    and z = `kl`, how far the policy is from the reference on the whole, which is not differentiated.
    """
    return 1.0 - torch.sigmoid(beta * sign_R * (log_ratio_R - kl))


def _log_odds(logprob_P: Tensor) -> Tensor:
    logprob_P = logprob_P.clamp(max=CERTAIN)
    # `expm1`, because 1 - exp loses its digits where an answer is nearly certain.
    return logprob_P - torch.log(-torch.expm1(logprob_P))


@dataclass(kw_only=True, slots=True, frozen=True)
class Sides:
    """The P pairs of a micro-batch: log-probabilities of both answers, in nats."""

    chosen_P: Tensor
    """Sum over the tokens of the chosen answer under the policy; carries the gradient."""
    rejected_P: Tensor
    ref_chosen_P: Tensor
    """Under the reference policy; 0 where the loss needs none."""
    ref_rejected_P: Tensor
    num_chosen_P: Tensor
    """Tokens of the chosen answer."""
    num_rejected_P: Tensor

    def margin_P(self, *, average: bool) -> Tensor:
        """The policy's log-ratio of the chosen to the rejected answer, less the reference's; `average`: by
        token means."""
        chosen_P, rejected_P = self.chosen_P - self.ref_chosen_P, self.rejected_P - self.ref_rejected_P
        if average:
            return chosen_P / self.num_chosen_P - rejected_P / self.num_rejected_P
        return chosen_P - rejected_P

    @property
    def chosen_mean_P(self) -> Tensor:
        return self.chosen_P / self.num_chosen_P

    @property
    def rejected_mean_P(self) -> Tensor:
        return self.rejected_P / self.num_rejected_P


@dataclass(kw_only=True, slots=True, frozen=True)
class PairRule:
    """A loss of pairs by name."""

    of_pairs: Callable[["PairLoss", Sides], Tensor]
    needs_reference: bool = True
    averages: bool = False
    """Compares token means by definition, whatever `length_average` says."""


PAIR_RULES: dict[str, PairRule] = {
    "dpo": PairRule(
        of_pairs=lambda loss, sides: dpo(
            sides.margin_P(average=loss.length_average), beta=loss.beta, label_smoothing=loss.label_smoothing
        )
    ),
    "robust_dpo": PairRule(
        of_pairs=lambda loss, sides: robust_dpo(
            sides.margin_P(average=loss.length_average), beta=loss.beta, label_smoothing=loss.label_smoothing
        )
    ),
    "ipo": PairRule(
        of_pairs=lambda loss, sides: ipo(sides.margin_P(average=loss.length_average), beta=loss.beta)
    ),
    "hinge": PairRule(
        of_pairs=lambda loss, sides: hinge(sides.margin_P(average=loss.length_average), beta=loss.beta)
    ),
    "simpo": PairRule(
        of_pairs=lambda loss, sides: simpo(
            sides.margin_P(average=True), beta=loss.beta, target_margin=loss.target_margin
        ),
        needs_reference=False,
        averages=True,
    ),
    "orpo": PairRule(
        of_pairs=lambda loss, sides: orpo(sides.chosen_mean_P, sides.rejected_mean_P, beta=loss.beta),
        needs_reference=False,
        averages=True,
    ),
}
"""Name -> loss of pairs; `kto` learns from answers without a pair, see `KTOLoss`."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PairLoss:
    """The loss `name` of pairs, as the `Loss` of a micro-batch.

    `sft_coef` adds the negative log-likelihood of the chosen answer, as its token mean: 1 in ORPO (equation 6
    of its paper); above 0 with DPO it is RPO's (Pang et al. 2024, arXiv:2404.19733, equation 1) and keeps the
    chosen answer from becoming less likely together with the rejected one.
    """

    name: str = "dpo"
    beta: float
    label_smoothing: float = 0.0
    target_margin: float = 0.0
    sft_coef: float = 0.0
    length_average: bool = False
    """Margins of token means; DPO is then length-normalised (Lambert et al. 2024, arXiv:2411.15124)."""
    aggregation: str = "group_mean"

    needs_every_row = True
    needs_entropy = False
    needs_whole_groups = True

    @property
    def needs_reference(self) -> bool:
        return PAIR_RULES[self.name].needs_reference

    def terms(self, tokens: TokenInputs) -> Tensor:
        """[M] the loss of the pair that each token belongs to. Raises ValueError for a group that lacks a
        side."""
        sides, pair_M = self._sides(tokens)
        loss_P = PAIR_RULES[self.name].of_pairs(self, sides)
        if self.sft_coef:
            loss_P = loss_P - self.sft_coef * sides.chosen_mean_P
        return loss_P[pair_M]

    def measures(self, tokens: TokenInputs) -> dict[str, Tensor]:
        """Measures of each token's pair: `margin`, the difference of the rewards β log π/π_ref; `accuracy`,
        whether it is positive (0.5 for none); log-probabilities of both answers; and `ranking_accuracy`,
        whether the policy alone finds the chosen answer the likelier one. `kl` (of each token) estimates
        KL(π_ref ‖ π) where the reference wrote the answers (k3, Schulman 2020)."""
        sides, pair_M = self._sides(tokens)
        average = self.length_average or PAIR_RULES[self.name].averages
        margin_P = self.beta * sides.margin_P(average=average)
        of_pairs = {
            "margin": margin_P,
            "accuracy": _wins(margin_P),
            "ranking_accuracy": _wins(sides.chosen_P - sides.rejected_P),
            "chosen_logprob": sides.chosen_P,
            "rejected_logprob": sides.rejected_P,
        }
        measures = {name: values_P[pair_M] for name, values_P in of_pairs.items()}
        return measures if tokens.ref_M is None else measures | {"kl": _kl(tokens)}

    def _sides(self, tokens: TokenInputs) -> tuple[Sides, Tensor]:
        """The pairs, and which of them each token belongs to."""
        pair_M = tokens.group_R[tokens.row_M]
        chosen_M = tokens.advantages_M > 0
        place_M = 2 * pair_M + (~chosen_M).long()  # the chosen answer of a pair, then the rejected one
        num_places = 2 * int(tokens.group_R.max() + 1)
        new_S = _sums(tokens.new_M, place_M, num_places)
        num_S = _sums(torch.ones_like(tokens.new_M), place_M, num_places)
        if bool((num_S == 0).any()):
            raise ValueError("A group holds no chosen row (advantage 1) or no rejected one (advantage -1).")
        ref_S = torch.zeros_like(new_S)
        if self.needs_reference:
            ref_S = _sums(_reference(tokens), place_M, num_places)
        sides = Sides(
            chosen_P=new_S[::2],
            rejected_P=new_S[1::2],
            ref_chosen_P=ref_S[::2],
            ref_rejected_P=ref_S[1::2],
            num_chosen_P=num_S[::2],
            num_rejected_P=num_S[1::2],
        )
        return sides, pair_M


@dataclass(kw_only=True, slots=True, frozen=True)
class KTOLoss:
    """`kto` of answers without a pair, each a group of its own: advantage 1 desirable, -1 undesirable.

    `kl` has to be known before the update, so that it is the same in every micro-batch: the trainer measures
    it on answers to other prompts (the paper's y' of another pair), bounded below by 0.
    """

    beta: float
    desirable_weight: float
    undesirable_weight: float
    kl: float
    aggregation: str = "group_mean"

    needs_every_row = True
    needs_entropy = False
    needs_whole_groups = True
    needs_reference = True

    def terms(self, tokens: TokenInputs) -> Tensor:
        """[M] the loss of the answer that each token belongs to."""
        log_ratio_R, sign_R, answer_M = self._answers(tokens)
        weight_R = torch.full_like(log_ratio_R, self.undesirable_weight)
        weight_R[sign_R > 0] = self.desirable_weight
        return (weight_R * kto(log_ratio_R, sign_R, beta=self.beta, kl=self.kl))[answer_M]

    def measures(self, tokens: TokenInputs) -> dict[str, Tensor]:
        """Measures of the answer of each token: `margin`, how far its reward is on the right side of the
        reference point β `kl`; `accuracy`, whether it is (0.5 on the point itself). `kl` as in `PairLoss`."""
        log_ratio_R, sign_R, answer_M = self._answers(tokens)
        margin_R = self.beta * sign_R * (log_ratio_R - self.kl)
        return {"margin": margin_R[answer_M], "accuracy": _wins(margin_R)[answer_M], "kl": _kl(tokens)}

    def _answers(self, tokens: TokenInputs) -> tuple[Tensor, Tensor, Tensor]:
        answer_M = tokens.group_R[tokens.row_M]
        num_answers = int(tokens.group_R.max() + 1)
        log_ratio_R = _sums(tokens.new_M - _reference(tokens), answer_M, num_answers)
        return log_ratio_R, _sums(tokens.advantages_M, answer_M, num_answers).sign(), answer_M


def _sums(values_M: Tensor, place_M: Tensor, num_places: int) -> Tensor:
    zeros = torch.zeros(num_places, dtype=torch.float64, device=values_M.device)
    return zeros.index_add(0, place_M, values_M.double())


def _wins(margin_P: Tensor) -> Tensor:
    return (margin_P.sign() + 1.0) / 2.0


def _kl(tokens: TokenInputs) -> Tensor:
    log_ratio_M = tokens.new_M - _reference(tokens)
    return log_ratio_M.exp() - 1.0 - log_ratio_M


def _reference(tokens: TokenInputs) -> Tensor:
    if tokens.ref_M is None:
        raise ValueError("This loss compares with a reference policy; give every sample `ref_logprobs_T`.")
    return tokens.ref_M


def preference_loss(config: PreferenceConfig, *, kl: float = 0.0) -> PairLoss | KTOLoss:
    """The loss that `[preference]` names. `kl`: reference point of KTO at this update, in nats."""
    beta = config.beta or USUAL_BETA[config.loss]
    if config.loss == "kto":
        return KTOLoss(
            beta=beta,
            desirable_weight=config.desirable_weight,
            undesirable_weight=config.undesirable_weight,
            kl=kl,
        )
    return PairLoss(
        name=config.loss,
        beta=beta,
        label_smoothing=config.label_smoothing,
        target_margin=config.target_margin if config.loss == "simpo" else 0.0,
        sft_coef=1.0 if config.loss == "orpo" else config.sft_coef,
        length_average=config.length_average,
    )
