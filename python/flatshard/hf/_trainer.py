"""The Trainer, with flatshard in the place of DDP, FSDP and DeepSpeed."""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from .. import torch as ft
from ..config import Settings
from ..errors import ConfigError
from . import _commit, _launch, _pieces
from ._accelerator import Accelerator, state_dict
from ._arguments import TrainingArguments, settings_of, take
from ._probe import loss_is_summed
from ._schedule import RateSchedule

__all__ = ["Seq2SeqTrainer", "Trainer", "TrainerMixin"]

_log = logging.getLogger("flatshard")

#: ``optim=`` to the class here; the arguments are those that transformers passes.
_OPTIMIZERS = {
    "adamw_torch": "AdamW",
    "adamw_torch_fused": "AdamW",
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "lion_32bit": "Lion",
}


if TYPE_CHECKING:
    _Host = Any  # the Trainer beside it
else:
    _Host = object


class TrainerMixin(_Host):  # type: ignore[misc]
    """What makes any Trainer shard with flatshard: ``class Mine(TrainerMixin, SFTTrainer)``.

    Put it first. The arguments may be of ``flatshard.hf.TrainingArguments`` or of transformers'
    own, whose ``fsdp`` and ``fsdp_config`` are taken over.

    Parameters
    ----------
    *args, **kwargs
        As for the Trainer beside it.

    Raises
    ------
    ConfigError
        A configuration key that is unknown or refused, ranks that do not see each other, or an
        optimizer that is not there.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _launch.check_thread()
        given = list(args)
        at = next(
            (i for i, a in enumerate(given) if isinstance(a, transformers.TrainingArguments)), None
        )
        arguments = kwargs.get("args") if at is None else given[at]
        if arguments is None:
            arguments = TrainingArguments(output_dir="tmp_trainer")
        emptied = copy.copy(arguments)
        self._flatshard_spec = take(emptied)
        if arguments.fsdp or arguments.fsdp_config or arguments.deepspeed:
            arguments = emptied  # transformers' own: the caller's object stays as it was
        if at is None:
            kwargs["args"] = arguments
        else:
            given[at] = arguments
        _launch.check_world_size(arguments.world_size, type(arguments).__name__)
        if arguments.auto_find_batch_size and arguments.world_size > 1:
            raise ConfigError(
                "auto_find_batch_size with several ranks: one rank can run out of memory while the "
                "others go on; set per_device_train_batch_size"
            )
        self._flatshard_probed = False
        super().__init__(*given, **kwargs)

    # Of the Trainer beside it.
    accelerator: Any
    lr_scheduler: Any
    model_accepts_loss_kwargs: bool
    optimizer_cls_and_kwargs: Any

    # -- construction -----------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """The stock accelerator, then ours in its place."""
        with _launch.without_backends():
            super().create_accelerator_and_postprocess()
        settings = settings_of(self.args, self._flatshard_spec)
        accelerator: Any = self.accelerator
        accelerator.__class__ = Accelerator
        accelerator.of_trainer = True
        accelerator.attach(settings)
        if settings.keys and self.is_world_process_zero():
            _log.info("%s", settings.table())

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Not of a sharded model: it has its place, and "cpu:0" would copy it away."""
        if not ft.is_sharded(model):
            super()._move_model_to_device(model, device)

    @property
    def _flatshard(self) -> Settings:
        settings: Settings = self.accelerator.flatshard
        return settings

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """The optimizers of ``flatshard.torch`` for the names of torch's; others are refused.

        Parameters
        ----------
        args : TrainingArguments
            ``optim`` is the name.
        model : Module, optional
            For optimizers that need it.
        """
        name = str(getattr(args.optim, "value", args.optim))
        if name not in _OPTIMIZERS:
            raise ConfigError(
                f"optim={name!r} has no sharded form here: use one of {', '.join(_OPTIMIZERS)}, "
                "or pass optimizers=(optimizer, scheduler) with one of flatshard.torch"
            )
        found = getattr(ft, _OPTIMIZERS[name])
        if name == "lion_32bit":
            options = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2)}
            return found, options
        _, options = transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)
        return found, {key: value for key, value in options.items() if key != "fused"}

    def create_optimizer(self, model: Any = None) -> Any:
        """As in transformers; the optimizer of a DeepSpeed file where there is one."""
        asked = self._flatshard.optimizer
        if asked is not None and self.optimizer is None and self.optimizer_cls_and_kwargs is None:
            options = {k: v for k, v in asked.options.items() if k != "weight_decay"}
            self.optimizer_cls_and_kwargs = (getattr(ft, asked.name), options)
            try:
                return super().create_optimizer(model)
            finally:
                self.optimizer_cls_and_kwargs = None
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As in transformers; the schedule of a DeepSpeed file where there is one."""
        if self._flatshard.schedule is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        settings = settings_of(self.args, self._flatshard_spec, steps=num_training_steps)
        assert settings.schedule is not None
        optimizer = self.optimizer if optimizer is None else optimizer
        self.lr_scheduler = RateSchedule(optimizer, settings.schedule)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def call_model_init(self, trial: Any = None) -> Any:
        """A new model; the memory of the one before goes back. Collective."""
        before = getattr(self, "model", None)
        if isinstance(before, torch.nn.Module) and ft.is_sharded(before):
            ft.unshard(before)
        return super().call_model_init(trial)

    # -- loss -------------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """As in transformers, for losses that are sums over items and for those that are means."""
        if num_items_in_batch is not None and not self._flatshard_probed:
            self._probe(model, inputs, num_items_in_batch)
        return super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )

    def _probe(self, model: Any, inputs: Mapping[str, Any], items: Any) -> None:
        """Asks the model once, and believes it. Collective."""
        decides = self.compute_loss_func is None and self.label_smoother is None
        if not (self.model_accepts_loss_kwargs and decides and "labels" in inputs):
            self._flatshard_probed = True
            return
        answer = loss_is_summed(model, self._prepare_inputs(dict(inputs)), items)
        mine = torch.tensor([answer is True, answer is False], dtype=torch.int64)
        summed, mean = self.accelerator.reduce(mine.to(self.args.device)).tolist()
        if not summed and not mean:
            return  # no rank could tell: ask again at the next batch
        self._flatshard_probed = True
        if mean and not summed:
            self.model_accepts_loss_kwargs = False
            if self.is_world_process_zero():
                _log.warning(
                    "the loss of %s does not use num_items_in_batch although forward() takes it: "
                    "it is treated as the mean of a micro-batch, so that neither the number of "
                    "ranks nor of accumulation steps multiplies it",
                    type(self.accelerator.unwrap_model(model)).__name__,
                )

    # -- checkpoints ------------------------------------------------------------------------------

    def _checkpoint_folder(self, trial: Any) -> str:
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        return os.path.join(self._get_output_dir(trial=trial), name)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As in transformers, then a marker that the folder is whole; only then are older ones
        removed. Collective."""
        folder = self._checkpoint_folder(trial)
        world = self.accelerator.world
        _commit.begin(folder, world)
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        _commit.finish(folder, world)
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=os.path.dirname(folder),
                save_total_limit=limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        world.barrier()

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Whole weights, in fp32 where there are masters. Every rank calls it."""
        if state_dict is None:
            state_dict = self._whole_weights()
        super()._save(output_dir, state_dict=state_dict)

    def _whole_weights(self) -> dict[str, Any] | None:
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        if not ft.is_sharded(model) or model is not self.model:
            return None
        policy = ft.shards(model).policy
        if policy.precision.master is None and policy.sharding.gather == "view":
            return None  # the module's own tensors are whole, and ties are ties
        return state_dict(model)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As in transformers. ``True`` resumes from the newest checkpoint that is whole.

        Parameters
        ----------
        resume_from_checkpoint : str or bool, optional
            A folder, or True.
        *args, **kwargs
            As in transformers.

        Raises
        ------
        CheckpointError
            No complete checkpoint, or the one that was named is damaged.
        """
        if resume_from_checkpoint is True:
            self.accelerator.world.barrier()
            resume_from_checkpoint = _commit.newest(
                self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-"
            )
        elif resume_from_checkpoint:
            _commit.check(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in transformers: whole weights. Within checkpoints of SHARDED_STATE_DICT each rank
        writes its pieces instead. Collective.

        Parameters
        ----------
        output_dir : str, optional
            By default that of the arguments.
        """
        if not (_internal_call and self._in_pieces):
            super().save_model(output_dir, _internal_call)
            return
        folder = output_dir or self.args.output_dir
        os.makedirs(folder, exist_ok=True)
        if self.args.should_save and hasattr(self.model, "config"):
            self.model.config.save_pretrained(folder)
        optimizer = None if self.args.save_only_model else self.optimizer.optimizer
        _pieces.write(folder, self.model, optimizer, step=self.state.global_step)

    @property
    def _in_pieces(self) -> bool:
        return self._flatshard.save == "sharded" and ft.is_sharded(self.model)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """As in transformers; what is in pieces was written with the weights."""
        if not self._in_pieces:
            super()._save_optimizer_and_scheduler(output_dir)
        elif self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """As in transformers; pieces are read when the model is sharded, with the state."""
        if not _pieces.are_in(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As in transformers, with masters from the file where the module has a narrower dtype."""
        if checkpoint is not None and _pieces.are_in(checkpoint):
            _pieces.read(checkpoint, self.model, self.optimizer.optimizer)
            path = os.path.join(checkpoint, SCHEDULER_NAME)
            self.lr_scheduler.load_state_dict(torch.load(path, weights_only=True))
            return
        if checkpoint is not None and ft.is_sharded(self.model):
            policy = ft.shards(self.model).policy
            if policy.precision.master is not None:
                self._load_from_checkpoint(checkpoint)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_best_model(self) -> None:
        """As in transformers, from pieces too."""
        best = self.state.best_model_checkpoint
        if _pieces.are_in(best):
            _pieces.read(best, self.model, None)
        else:
            super()._load_best_model()


class Trainer(TrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """The Trainer of transformers, over flatshard: train, evaluate, predict, resume as there."""


class Seq2SeqTrainer(TrainerMixin, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """The Seq2SeqTrainer of transformers, over flatshard."""

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, but rows that fill up the last batch are not counted twice."""
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )
        return super().evaluation_loop(*args, **kwargs)
