"""What people look for and this version does not have: refused by name, in one place."""

from __future__ import annotations

__all__ = ["LATER", "sentence"]

_OPTIMIZERS = "this version has SGD, Adam, AdamW, Lion and Adagrad"

#: Public names to what serves meanwhile.
LATER = {
    "LAMB": _OPTIMIZERS,
    "Muon": _OPTIMIZERS,
}


def sentence(name: str) -> str:
    """Says that flatshard.NAME is not there yet, and what is."""
    return f"flatshard.{name} is not there yet: {LATER[name]}"
