"""Configurations of FSDP, DeepSpeed and Accelerate: not there yet. Importing this says so."""

from ._later import sentence

__all__: list[str] = []

raise ImportError(sentence("config"))
