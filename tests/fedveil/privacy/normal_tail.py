"""The tail of the normal distribution to 60 digits, computed with the standard library's decimals."""

from __future__ import annotations

import decimal
from decimal import Decimal
from functools import cache

DIGITS = 120  # of each step: a tail of 1e-60 is what is left of 1 minus another number


def normal_tail(x: Decimal) -> Decimal:
    """Return the chance of more than `x`, for 0 <= `x` <= 16, as 1 / 2 minus a series whose terms are all positive."""
    assert 0 <= x <= 16
    with decimal.localcontext(prec=DIGITS):
        term, total, odd = x, Decimal(0), 1
        while term > Decimal(10) ** -DIGITS:
            total += term
            odd += 2
            term = term * x * x / odd
        return Decimal(1) / 2 - total * (-x * x / 2).exp() / (2 * pi()).sqrt()


@cache
def pi() -> Decimal:
    """Return pi by Machin's formula."""
    with decimal.localcontext(prec=DIGITS):
        return 16 * _arctan_of_inverse(5) - 4 * _arctan_of_inverse(239)


def _arctan_of_inverse(n: int) -> Decimal:
    power, total, odd = Decimal(1) / n, Decimal(0), 1
    while power > Decimal(10) ** -DIGITS:
        total += power / odd if odd % 4 == 1 else -power / odd
        odd += 2
        power /= n * n
    return total
