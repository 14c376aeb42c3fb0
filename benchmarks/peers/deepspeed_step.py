"""The tail of a mixed-precision step with DeepSpeed's CPU Adam, on one process.

DeepSpeed compiles its extension when it is first used; TORCH_EXTENSIONS_DIR says where to.
"""

from __future__ import annotations

import importlib
import os

import torch

from benchmarks.peers.torch_step import Step

__all__ = ["open_step"]


class DeepSpeedStep(Step):
    def make_optimizer(self) -> torch.optim.Optimizer:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        adam = importlib.import_module("deepspeed.ops.adam")
        optimizer: torch.optim.Optimizer = adam.DeepSpeedCPUAdam(
            [self.master], lr=1e-3, weight_decay=0.1, adamw_mode=True
        )
        return optimizer


def open_step(numel: int) -> DeepSpeedStep:
    return DeepSpeedStep(numel)
