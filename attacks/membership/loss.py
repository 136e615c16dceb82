"""The loss attack: a row is called a member where the model's loss on the row's own target is low.

Yeom, Giacomelli, Fredrikson, Jha: Privacy Risk in Machine Learning. CSF 2018.
"""

from __future__ import annotations

from typing_extensions import override

from fedveil.attacks.base import Answer, ModelAttack


class Loss(ModelAttack):
    """The score "loss": minus the loss of the row's own target."""

    @override
    def score(self, answer: Answer) -> dict[str, float]:
        return {"loss": -answer.loss}
