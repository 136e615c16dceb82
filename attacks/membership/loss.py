"""The plain and calibrated loss attacks. The plain attack calls an example a member if its target's loss is low.

Yeom, Giacomelli, Fredrikson, Jha: Privacy Risk in Machine Learning. CSF 2018.

The calibrated attack calls an example a member if training has lowered its loss:

Watson, Guo, Cormode, Sablayrolles: On the Importance of Difficulty Calibration in Membership Inference Attacks.
ICLR 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import override

from fedveil.attacks.base import OTHER_ROWS, ModelAttack, ModelOutput

__all__ = ["CalibratedLossAttack", "LossAttack"]


class LossAttack(ModelAttack):
    """The score "loss": the negative loss of the example's own target."""

    @property
    @override
    def name(self) -> str:
        return "Loss"

    @override
    def score(self, answer: ModelOutput) -> dict[str, float]:
        return {"loss": -answer.loss}


class CalibratedLossAttack(ModelAttack):
    """The score "calibrated": base-model loss minus model loss, on the example's own target.

    It has no control in round 0, because every score is 0 there.
    """

    must_lose: ClassVar[Sequence[str]] = (OTHER_ROWS,)

    @property
    @override
    def name(self) -> str:
        return "Calibrated"

    @override
    def score(self, answer: ModelOutput) -> dict[str, float]:
        return {"calibrated": answer.base_loss - answer.loss}
