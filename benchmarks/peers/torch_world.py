"""Collectives, training and checkpoints of PyTorch, one rank of each, on CPU over gloo."""

from __future__ import annotations

import importlib
import math
import os
import shutil
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["open_checkpoint", "open_collective", "open_training", "open_zero3"]


def memory() -> int:
    """This process's share of memory in bytes: a page of several processes counts in parts."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


def join() -> tuple[int, int]:
    """Joins the process group that the environment names; returns rank and size."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


class Collective:
    """One collective of `numel` fp32 elements in private memory."""

    def __init__(self, op: str, numel: int) -> None:
        self.rank, self.size = join()
        self.op = op
        self.whole = torch.arange(numel, dtype=torch.float32) % 7 + self.rank
        self.part = self.whole[: numel // self.size].clone()
        self.out_whole = torch.empty(numel)
        self.out_part = torch.empty(numel // self.size)

    def work(self) -> None:
        if self.op == "all_gather":
            dist.all_gather_into_tensor(self.out_whole, self.part)
        elif self.op == "reduce_scatter":
            dist.reduce_scatter_tensor(self.out_part, self.whole)
        elif self.op == "all_reduce":
            self.out_whole.copy_(self.whole)
            dist.all_reduce(self.out_whole)
        else:
            dist.barrier()

    def verify(self) -> None:
        self.work()
        n, size = len(self.whole), self.size
        base = torch.arange(n, dtype=torch.float32) % 7
        total = base * size + size * (size - 1) / 2
        share = n // size
        if self.op == "all_gather":
            expected = torch.cat([base[:share] + r for r in range(size)])
            assert torch.equal(self.out_whole, expected)
        elif self.op == "reduce_scatter":
            assert torch.equal(self.out_part, total[self.rank * share : (self.rank + 1) * share])
        elif self.op == "all_reduce":
            assert torch.equal(self.out_whole, total)

    def sample(self) -> float:
        dist.barrier()
        started = time.perf_counter()
        self.work()
        return time.perf_counter() - started

    def close(self) -> None:
        dist.destroy_process_group()


def open_collective(op: str, numel: int) -> Collective:
    return Collective(op, numel)


class Training:
    """One optimizer step of a Llama model, clipping and AdamW included.

    mode : "ddp" or "fsdp2".
    precision : "fp32" or "bf16": autocast under DDP; under FSDP2 parameters in bf16, gradients
        reduced in fp32.
    reshard : FSDP2's reshard_after_forward.
    """

    def __init__(
        self,
        mode: str,
        precision: str,
        config: dict[str, Any],
        batch: int,
        length: int,
        fused: bool,
        reshard: bool,
    ) -> None:
        self.rank, self.size = join()
        model = self.build(config)
        self.baseline = memory() - sum(p.nbytes for p in model.parameters())
        if mode == "fsdp2":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            mesh = init_device_mesh("cpu", (self.size,))
            policy = (
                MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
                if precision == "bf16"
                else MixedPrecisionPolicy()
            )
            options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": reshard}
            for layer in model.model.layers:
                fully_shard(layer, **options)
            fully_shard(model, **options)
        else:
            model = nn.parallel.DistributedDataParallel(model)
        self.model = model
        self.autocast = precision == "bf16" and mode == "ddp"
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        self.begin(batch, length)

    def build(self, config: dict[str, Any]) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        llama = LlamaConfig(**config, tie_word_embeddings=False, attn_implementation="sdpa")
        self.vocabulary = int(config["vocab_size"])
        return LlamaForCausalLM(llama)

    def begin(self, batch: int, length: int) -> None:
        self.generator = torch.Generator().manual_seed(self.rank)
        self.shape = (batch, length)

    def step(self, tokens: torch.Tensor) -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            loss = self.model(input_ids=tokens, labels=tokens).loss
        self.backward(loss)
        self.update()
        return float(loss)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def barrier(self) -> None:
        dist.barrier()

    def memory(self) -> int:
        """Most bytes (PSS) above the imports, in a step after a forward, a backward, the update."""
        self.barrier()
        loss = self.model(input_ids=(tokens := self.batch()), labels=tokens).loss
        self.barrier()
        most = memory()
        self.backward(loss)
        self.barrier()
        most = max(most, memory())
        self.update()
        self.barrier()
        most = max(most, memory())
        self.barrier()
        return int(most - self.baseline)

    def batch(self) -> torch.Tensor:
        return torch.randint(0, self.vocabulary, self.shape, generator=self.generator)

    def verify(self) -> None:
        tokens = self.batch()
        losses = [self.step(tokens) for _ in range(3)]
        start = math.log(self.vocabulary)
        assert abs(losses[0] - start) < 0.1 * start, f"first loss {losses[0]}, not near {start}"
        assert losses[2] < losses[0], f"the loss does not fall: {losses}"

    def sample(self) -> float:
        tokens = self.batch()
        self.barrier()
        started = time.perf_counter()
        self.step(tokens)
        return time.perf_counter() - started

    def close(self) -> None:
        dist.destroy_process_group()


class ZeroThree(Training):
    """The same step with DeepSpeed's ZeRO-3 in fp32, over gloo."""

    def __init__(self, config: dict[str, Any], batch: int, length: int) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        deepspeed = importlib.import_module("deepspeed")
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        deepspeed.init_distributed("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        model = self.build(config)
        self.baseline = memory() - sum(p.nbytes for p in model.parameters())
        said = {
            "train_micro_batch_size_per_gpu": batch,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        self.model = deepspeed.initialize(model=model, optimizer=optimizer, config=said)[0]
        self.autocast = False
        self.begin(batch, length)

    def backward(self, loss: torch.Tensor) -> None:
        self.model.backward(loss)

    def update(self) -> None:
        self.model.step()


def open_training(**arguments: Any) -> Training:
    return Training(**arguments)


def open_zero3(**arguments: Any) -> Training:
    return ZeroThree(**arguments)


class Checkpoint:
    """Save or load of a sharded state of `nbytes` in all, through torch.distributed.checkpoint."""

    def __init__(self, action: str, nbytes: int, folder: str) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        self.rank, self.size = join()
        self.dcp, self.action, self.folder = dcp, action, folder
        mesh = init_device_mesh("cpu", (self.size,))
        n = nbytes // 4 // 16 // 1024 * 1024
        self.state = {
            f"tensor.{k}": distribute_tensor(
                torch.arange(n, dtype=torch.float32).reshape(-1, 1024) + k, mesh, [Shard(0)]
            )
            for k in range(16)
        }
        self.save()

    def save(self) -> None:
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        dist.barrier()
        self.dcp.save(self.state, checkpoint_id=self.folder)

    def verify(self) -> None:
        first = self.state["tensor.3"].to_local().clone()
        self.state["tensor.3"].to_local().zero_()
        self.dcp.load(self.state, checkpoint_id=self.folder)
        assert torch.equal(self.state["tensor.3"].to_local(), first)

    def sample(self) -> float:
        dist.barrier()
        started = time.perf_counter()
        if self.action == "save":
            self.save()
        else:
            self.dcp.load(self.state, checkpoint_id=self.folder)
        dist.barrier()
        return time.perf_counter() - started

    def close(self) -> None:
        dist.destroy_process_group()


def open_checkpoint(action: str, nbytes: int, folder: str) -> Checkpoint:
    return Checkpoint(action, nbytes, folder)
