"""The calibrated loss attack: a row is called a member where training has lowered its loss.

Watson, Guo, Cormode, Sablayrolles: On the Importance of Difficulty Calibration in Membership Inference Attacks.
ICLR 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import override

from fedveil.attacks.base import OTHER_ROWS, Answer, ModelAttack


class Calibrated(ModelAttack):
    """The score "calibrated": the loss under the public base less the loss under the model, of the row's own target.

    It has no control in round 0: there every score is 0, whatever the rows.
    """

    must_lose: ClassVar[Sequence[str]] = (OTHER_ROWS,)

    @override
    def score(self, answer: Answer) -> dict[str, float]:
        return {"calibrated": answer.base_loss - answer.loss}
