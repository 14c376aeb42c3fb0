"""What a parameter has: the numbers by which the core knows it, and the names users say."""

from __future__ import annotations

__all__ = ["GRAD", "KINDS", "MASTER", "MOMENT1", "MOMENT2", "MOMENT3", "WEIGHT"]

WEIGHT, MASTER, GRAD, MOMENT1, MOMENT2, MOMENT3 = range(6)
#: Names of what a parameter has, as users say them.
KINDS = {
    "weight": WEIGHT,
    "master": MASTER,
    "grad": GRAD,
    "momentum_buffer": MOMENT1,
    "exp_avg": MOMENT1,
    "exp_avg_sq": MOMENT2,
    "max_exp_avg_sq": MOMENT3,
    "sum": MOMENT1,
}
