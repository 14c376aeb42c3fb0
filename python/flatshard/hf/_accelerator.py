"""Accelerate's Accelerator, with flatshard where it would wrap DDP, FSDP or DeepSpeed."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator
from types import MethodType
from typing import Any

import accelerate
import torch
from accelerate.utils import convert_outputs_to_fp32

from .. import torch as ft
from ..config import Settings
from ..errors import ConfigError
from ..job import init
from . import _commit, _launch, _pieces
from ._optimizer import ShardedOptimizer
from ._settings import compute_policy, read_accelerator

__all__ = ["Accelerator"]

_log = logging.getLogger("flatshard")

_PLUGINS = ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin",
            "torch_tp_plugin")  # fmt: skip
_SHORT = {"bfloat16": "bf16", "float16": "fp16"}


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All by name."""
    signature = inspect.signature(accelerate.Accelerator.__init__)
    bound = dict(signature.bind_partial(None, *args, **kwargs).arguments)
    bound.pop("self")
    return bound


def refuse_precision(mixed_precision: str | None) -> None:
    """fp8 by name, before anything starts."""
    if mixed_precision is not None and str(mixed_precision) == "fp8":
        raise NotImplementedError(
            "mixed_precision='fp8' is not there: flatshard computes in fp32, bf16 and fp16; use "
            "'bf16'"
        )


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """The Accelerator of accelerate, over sharded modules.

    Parameters
    ----------
    *args, **kwargs
        As for ``accelerate.Accelerator``. Several processes without an accelerator use the CPU
        whether or not ``cpu=True`` is said. Plugins of other backends are refused.
    flatshard : int, str, dict, Sharding or Settings, optional
        A stage; a dict as ``{"stage": 2, "precision": "bf16"}``; or the path of an ``fsdp_config``,
        a DeepSpeed JSON or an Accelerate YAML. By default what ``accelerate launch`` asks for,
        else stage 3.

    Raises
    ------
    ConfigError
        A configuration key that is unknown or refused, or processes that do not see each other.
    NotImplementedError
        fp8, or a plugin of another backend.
    """

    #: A Trainer takes optimizer and schedule from the configuration itself.
    of_trainer = False
    _models: list[Any]
    _optimizers: list[Any]

    def __init__(self, *args: Any, flatshard: Any = None, **kwargs: Any) -> None:
        _launch.check_thread()
        given = _arguments(args, kwargs)
        for name in _PLUGINS:
            if given.get(name) is not None:
                raise NotImplementedError(
                    f"Accelerator({name}=...): flatshard takes the configuration itself; pass "
                    'flatshard="ds_config.json", flatshard={"fsdp": {...}} or a stage'
                )
        asked = _launch.asked_by_environment()
        ranks = _launch.launched_ranks()
        settings = read_accelerator(flatshard, asked, given, world_size=ranks)
        self._take_settings(given, settings)
        refuse_precision(given.get("mixed_precision"))
        if _launch.force_cpu():
            given["cpu"] = True
        with _launch.without_backends():
            super().__init__(**given)
        self.attach(settings)

    @staticmethod
    def _take_settings(given: dict[str, Any], settings: Settings) -> None:
        """What the configuration says that Accelerate wants to know."""
        if "precision" in settings.given:
            says = _SHORT.get(settings.precision.param, "no")
            asked = given.get("mixed_precision")
            if asked is not None and str(asked) != says:
                raise ConfigError(
                    f"{settings.source} computes in {settings.precision.param} "
                    f"(mixed_precision={says!r}) and Accelerator(mixed_precision={str(asked)!r}): "
                    "change one of them"
                )
            given["mixed_precision"] = says
        steps = settings.batch.accumulate
        if isinstance(steps, int) and "batch" in settings.given:
            asked_steps = given.get("gradient_accumulation_steps", steps)
            if given.get("gradient_accumulation_plugin") is None:
                if asked_steps not in (1, steps):
                    raise ConfigError(
                        f"{settings.source}: gradient_accumulation_steps is {steps} and "
                        f"Accelerator(gradient_accumulation_steps={asked_steps}): change one"
                    )
                given["gradient_accumulation_steps"] = steps

    def attach(self, settings: Settings) -> None:
        """Joins the world of ranks and takes the settings. Collective; the Trainer calls it for the
        accelerator that it makes.

        Parameters
        ----------
        settings : Settings
            What `prepare_model` shards with.
        """
        refuse_precision(self.mixed_precision)
        _launch.check_world_size(self.num_processes, "Accelerate")
        settings.check_world(self.num_processes)
        self.flatshard = settings
        self.world = init()
        if self.world.size != self.num_processes:
            raise ConfigError(
                f"flatshard sees {self.world.size} ranks and Accelerate {self.num_processes}"
            )

    # -- preparing --------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """As in accelerate: any order in, the same order out. Collective."""
        for place, item in enumerate(args):
            # Before the optimizers, whatever the order.
            if isinstance(item, torch.nn.Module):
                self.prepare_model(item, device_placement[place] if device_placement else None)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self,
        model: torch.nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> torch.nn.Module:
        """Autocast, compilation and device as in accelerate; then sharding instead of DDP, to train
        and to evaluate alike. Collective.

        Parameters
        ----------
        model : Module
            Stays the same object; sharded once.
        device_placement : bool, optional
            As in accelerate.
        evaluation_mode : bool
            Changes nothing: a model that was evaluated first trains like any other.

        Returns
        -------
        Module
            The model, or what ``torch.compile`` made of it.
        """
        inner = getattr(model, "_orig_mod", model)
        precision = compute_policy(self.flatshard, self.mixed_precision)
        # Prepared again, perhaps by another accelerator in another precision: anew.
        _unwrap_forward(inner)
        for one in (inner, model):
            vars(one).pop("_is_accelerate_prepared", None)
        self._models = [m for m in self._models if m is not model and m is not inner]
        if ft.is_sharded(inner):
            # It has its place; to("cpu:0"), as Accelerate says it, would copy it away.
            device_placement = False
        prepared = super().prepare_model(model, device_placement, evaluation_mode=True)
        if precision is not None and precision.param == "float16" and not self.native_amp:
            # Losses in fp16 would overflow under the loss scale.
            inner._original_forward = inner.forward
            inner.forward = convert_outputs_to_fp32(inner.forward)
        self._shard(inner, precision)
        return prepared

    def _shard(self, model: torch.nn.Module, precision: Any) -> None:
        if next(model.parameters(), None) is None:
            return
        settings = self.flatshard
        asked = (settings.units, settings.sharding, precision, settings.ignored_modules)
        if ft.is_sharded(model):
            before = getattr(model, "_flatshard_asked", asked)
            if before == asked:
                return
            ft.unshard(model)
        options = {**settings.module_options(model), "mp_policy": precision}
        if settings.activation_checkpointing:
            ft.activation_checkpointing(model, options["units"])
        ft.fully_shard(model, world=self.world, **options)
        if settings.keys:
            settings.attach(ft.shards(model))  # describe() then shows what became of each key
        model._flatshard_asked = asked

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        """Makes the script's own optimizer step on shards: the same object, its state sharded.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            SGD, Adam, AdamW, Adagrad of torch, or one of ``flatshard.torch``.
        device_placement : bool, optional
            Changes nothing: state lies where the shards are.
        """
        if getattr(optimizer, "_is_accelerate_prepared", False):
            if optimizer not in self._optimizers:
                self._optimizers.append(optimizer)
            return optimizer
        asked = self.flatshard.optimizer
        if asked is not None and not self.of_trainer:
            raise ConfigError(
                f"{self.flatshard.source} has an optimizer ({asked.name}) and the script prepares "
                f"its own ({type(optimizer).__name__}): take one of them out"
            )
        self._make_way(optimizer)
        wrapped = ShardedOptimizer(ft.adopt(optimizer), self.flatshard.max_norm)
        self._optimizers.append(wrapped)
        return wrapped

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As in accelerate."""
        asked = self.flatshard.schedule
        if asked is not None and not self.of_trainer:
            raise ConfigError(
                f"{self.flatshard.source} has a scheduler ({asked.name}) and the script prepares "
                f"its own ({type(scheduler).__name__}): take one of them out"
            )
        return super().prepare_scheduler(scheduler)

    def _make_way(self, optimizer: torch.optim.Optimizer) -> None:
        """What an earlier accelerator's optimizer moved begins anew under this one: the state of
        the old one goes. Two optimizers of one accelerator are left to the step, which refuses."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        ids = {id(p) for p in parameters}
        mine = {id(o.optimizer) for o in self._optimizers} | {id(optimizer)}
        for other in list(ft._registry.optimizers):
            theirs = (id(p) for group in other.param_groups for p in group["params"])
            if id(other) not in mine and not ids.isdisjoint(theirs):
                ft._registry.optimizers.discard(other)
        bindings = {id(getattr(o.optimizer, "_flatshard", None)) for o in self._optimizers}
        bindings.add(id(getattr(optimizer, "_flatshard", None)))
        for sharded in ft._registry.by_parameters(parameters):
            if sharded.optimizer is not None and id(sharded.optimizer) not in bindings:
                ft.unshard(sharded.module)
                self._shard(sharded.module, compute_policy(self.flatshard, self.mixed_precision))

    # -- a step -----------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """``loss.backward()``, divided by the accumulation steps, and scaled under fp16."""
        loss = loss / self.gradient_accumulation_steps
        precision = compute_policy(self.flatshard, self.mixed_precision)
        if precision is None or precision.loss_scale is None:
            loss.backward(**kwargs)
            return
        if len(self._optimizers) != 1:
            raise RuntimeError(
                f"fp16 with {len(self._optimizers)} optimizers: the loss is scaled for one; use "
                "bf16, or flatshard.torch.backward(loss, optimizer=...)"
            )
        ft.backward(loss, optimizer=self._optimizers[0].optimizer, **kwargs)

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        """The global norm of the averaged gradient; the step that follows clips by it. Collective.

        Raises
        ------
        RuntimeError
            Called while gradients are being accumulated: only the first call would count.
        """
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not any(ft.is_sharded(p) for p in given):
            norm: torch.Tensor = super().clip_grad_norm_(given, max_norm, norm_type)
            return norm
        if not self.sync_gradients:
            raise RuntimeError(
                "clip_grad_norm_ between two micro-batches of one step: the norm is that of the "
                "whole step's gradient; call it under 'if accelerator.sync_gradients:'"
            )
        for optimizer in self._optimizers:
            optimizer.clipped = True
        return ft.clip_grad_norm_(given, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Refused for sharded Parameters, as accelerate does under FSDP and DeepSpeed."""
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if any(ft.is_sharded(p) for p in given):
            raise NotImplementedError(
                "clip_grad_value_ on sharded Parameters: use accelerator.clip_grad_norm_"
            )
        super().clip_grad_value_(given, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Nothing to do: norm and step divide by the loss scale themselves."""

    @contextlib.contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """``flatshard.torch.no_sync``: the same sum, whichever way it is made."""
        inner = getattr(model, "_orig_mod", model)
        with ft.no_sync(inner) if ft.is_sharded(inner) else contextlib.nullcontext():
            yield

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: torch.nn.Module) -> Iterator[None]:
        """The backward inside ends the accumulation of `no_sync`."""
        inner = getattr(model, "_orig_mod", model)
        sharded = ft.is_sharded(inner)
        with ft.accumulate(inner, last=True) if sharded else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: Any, even_batches: bool | None = None
    ) -> Iterator[None]:
        """Refused with several processes: a rank without a batch must say so in every step."""
        if self.num_processes > 1:
            raise NotImplementedError(
                "join_uneven_inputs: flatshard has no stand-in for ranks that ran out of batches; "
                "leave even_batches=True (the default), or drop_last=True"
            )
        with super().join_uneven_inputs(joinables, even_batches):
            yield

    # -- across ranks -----------------------------------------------------------------------------
    # Tensors travel through torch.distributed. The ranks first meet in flatshard's world, which
    # says who is missing and at which line of Python, where gloo would only hang.

    def gather(self, tensor: Any) -> Any:
        """As in accelerate."""
        self.world.barrier()
        return super().gather(tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """As in accelerate."""
        self.world.barrier()
        return super().reduce(tensor, reduction, scale)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """As in accelerate."""
        self.world.barrier()
        return super().pad_across_processes(tensor, dim, pad_index, pad_first)

    def wait_for_everyone(self) -> None:
        """As in accelerate."""
        self.world.barrier()
        super().wait_for_everyone()

    # -- saving -----------------------------------------------------------------------------------

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Whole tensors, fp32 where there are masters, with the model's own names. Collective in
        copy mode alone.
        """
        inner = getattr(model, "_orig_mod", model)
        if not ft.is_sharded(inner):
            whole: dict[str, Any] = super().get_state_dict(model, unwrap)
            return whole
        return state_dict(inner)

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Any:
        """As in accelerate, then a marker that everything is there. Collective."""
        if output_dir is not None and not self.project_configuration.automatic_checkpoint_naming:
            _commit.begin(output_dir, self.world)
        with self._without(self.flatshard.save == "sharded") as left:
            made = super().save_state(output_dir, safe_serialization, **kwargs)
        for number, (model, optimizer) in enumerate(left):
            _pieces.write(made, model, optimizer, step=self.step, number=number)
        _commit.finish(made, self.world)
        return made

    @contextlib.contextmanager
    def _without(self, pieces: bool) -> Iterator[list[tuple[torch.nn.Module, Any]]]:
        """The sharded models and their optimizers, which accelerate does not see meanwhile."""
        left: list[tuple[torch.nn.Module, Any]] = []
        models, optimizers = self._models, self._optimizers
        if pieces:
            for model in models:
                inner = getattr(model, "_orig_mod", model)
                if ft.is_sharded(inner):
                    binding = ft._registry.sharded_of(inner, "save_state").optimizer
                    theirs = [o.optimizer for o in optimizers if o.optimizer._flatshard is binding]
                    left.append((inner, theirs[0] if theirs else None))
            ours = {id(optimizer) for _, optimizer in left}
            self._models = [m for m in models if not ft.is_sharded(getattr(m, "_orig_mod", m))]
            self._optimizers = [o for o in optimizers if id(o.optimizer) not in ours]
        try:
            yield left
        finally:
            self._models, self._optimizers = models, optimizers

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """As in accelerate; without a folder the newest that was saved to its end. Collective."""
        naming = self.project_configuration.automatic_checkpoint_naming
        if input_dir is None and naming:
            input_dir = _commit.newest(f"{self.project_dir}/checkpoints", "checkpoint_")
        elif input_dir is not None:
            _commit.check(input_dir)
        for optimizer in self._optimizers:
            optimizer.optimizer._flatshard.bind("load_state")
        with self._without(input_dir is not None and _pieces.are_in(input_dir)) as left:
            super().load_state(input_dir, load_kwargs, **kwargs)
        for number, (model, optimizer) in enumerate(left):
            _pieces.read(str(input_dir), model, optimizer, number=number)
        self.world.barrier()


def state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """Whole weights of a sharded module: its masters where it has them."""
    masters = ft.shards(model).policy.precision.master is not None
    found: dict[str, Any] = ft.state_dict(model, dtype="master" if masters else "compute")
    return found


def _unwrap_forward(model: torch.nn.Module) -> None:
    """Takes the autocast of an earlier `prepare_model` off."""
    original = vars(model).pop("_original_forward", None)
    if original is None:
        return
    vars(model).pop("forward", None)
    if not isinstance(original, MethodType) or original.__func__ is not type(model).forward:
        model.forward = original
