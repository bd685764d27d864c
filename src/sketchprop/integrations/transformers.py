"""A callback for transformers' ``Trainer``, and a ``Trainer`` for ``sampled_loss``."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..sampled.loss import kept_samples, sampled_loss
from ._routine import SketchOptions, added_variance

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import CallbackHandler
except ImportError as error:
    raise ImportError(
        "sketchprop.integrations.transformers needs transformers: pip install 'transformers[torch]'"
    ) from error

__all__ = ["SampledTrainer", "SketchCallback", "added_variance"]

_TUNER = "sketchprop_tuner"


class SketchCallback(SketchOptions, TrainerCallback):
    """Sketches the model when training begins, follows a schedule, logs what is kept.

    The budget is a function of ``state.global_step`` and draws come from the random state that
    ``Trainer`` saves: a resumed run needs the same callback, nothing else, and is bitwise the
    run that was not stopped.

    Values join the log they belong to: in ``state.log_history``, the progress bar and every
    reporter (TensorBoard, ...), in whatever order the callbacks were given to ``Trainer``.

    A ``tuner`` is called after each step with what the model was called with, a dict:
    ``loss_fn = lambda model, batch: model(**batch).loss``.

        Trainer(model, args, callbacks=[SketchCallback(Tokens(0.3))])
        SketchCallback(Tokens(0.3), schedule=Ladder({0: 1.0, 500: 0.5, 2000: 0.3}))
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _before_reporters(self)
        model = kwargs["model"]
        self.routine.begin(model, state.global_step)
        # Its entry in trainer_state.json.
        found = state.stateful_callbacks.get(_TUNER)
        self.start_tuner(model, kwargs.get("optimizer"), state.max_steps, found)
        self._inputs: dict[str, Any] = {}
        if self.tuner is not None:
            self._hook = model.register_forward_pre_hook(self._remember, with_kwargs=True)

    def _remember(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Callbacks are not given the batch: it is what the model was called with last."""
        if model.training and torch.is_grad_enabled():
            self._inputs = dict(kwargs)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.routine.follow(kwargs["model"], state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.tuner is not None and self._inputs:
            self.tuner(self._inputs)
            self._inputs = {}
            state.stateful_callbacks[_TUNER] = self.tuner.state_dict()
        if self.log_every is not None and state.global_step % self.log_every == 0:
            control.should_log = True

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs.get("logs")
        # Only logs of training steps: those of evaluation and the final summary have no "loss".
        if logs is None or "loss" not in logs:
            return
        if self.log_every is None or state.global_step % self.log_every == 0:
            values = self.values(kwargs["model"])
            logs.update(values)
            state.log_history[-1].update(values)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.tuner is not None:
            self._hook.remove()
        self.routine.end(kwargs["model"])


def _before_reporters(callback: SketchCallback) -> None:
    """Moves a callback to the front of its trainer's list: reporters get what it adds to a log.

    ``Trainer`` calls reporters before the callbacks of its users and tells a callback nothing of
    itself, so that the one that holds this callback is looked up among all live objects.
    """
    handlers = [item for item in gc.get_objects() if issubclass(type(item), CallbackHandler)]
    for handler in handlers:
        others = [other for other in handler.callbacks if other is not callback]
        if len(others) < len(handler.callbacks):
            # A new list: the old one is being walked through just now.
            handler.callbacks = [callback, *others]


class SampledTrainer(Trainer):
    """A ``Trainer`` whose training steps use ``sampled_loss``; all else is exact.

    ``budget`` of the samples of a batch (a share, or a number) are drawn, p ∝ ‖G_s‖, or equally
    with ``by="uniform"``; the other arguments are those of ``Trainer``. The loss is the one
    that ``Trainer`` would take: ``compute_loss_func``, label smoothing, or the model's own. The
    latter has to be a function of the outputs here, ``model.loss_function``; in the first step it
    is compared with what the model returns, and refused if they differ. Evaluation, prediction and
    calls with ``return_outputs=True`` are exact. Cost (1 + 3p)/3 of a step.

        SampledTrainer(model, args, train_dataset=..., eval_dataset=..., budget=0.1)
    """

    def __init__(
        self, *args: Any, budget: float | int, by: str = "gradient", **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.budget, self.by = budget, by
        self._counts_items: bool | None = None

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        samples, kept = kept_samples(inputs, self.budget)
        training = model.training and torch.is_grad_enabled()
        if return_outputs or not training or kept >= samples:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        base = _base(self.accelerator.unwrap_model(model))
        own = self.compute_loss_func is None and self.label_smoother is None
        if own and self._counts_items is None:
            self._counts_items = self._compare_losses(model, base, inputs, num_items_in_batch)

        def loss_fn(outputs: Any, labels: dict[str, Any]) -> Any:
            if own:
                items = num_items_in_batch if self._counts_items else None
                outputs = {**outputs, "loss": _head_loss(base, outputs, labels, items)}
            answer = _Answer(base._get_name(), outputs)
            return super(SampledTrainer, self).compute_loss(
                answer, dict(labels), num_items_in_batch=num_items_in_batch
            )

        labels = {name: inputs[name] for name in self.label_names if name in inputs}
        # A decoder makes its inputs from the labels.
        keep = own and getattr(base.config, "is_encoder_decoder", False)
        given = {name: x for name, x in inputs.items() if keep or name not in labels}
        return sampled_loss(model, loss_fn, given, labels, self.budget, by=self.by)

    def _compare_losses(
        self, model: nn.Module, base: Any, inputs: dict[str, Any], items: Tensor | int | None
    ) -> bool:
        """Whether the model's loss is divided by the number of items; an error if it is neither."""
        labels = {name: inputs[name] for name in self.label_names if name in inputs}
        counted = {"num_items_in_batch": items} if self.model_accepts_loss_kwargs else {}
        devices = [self.args.device] if self.args.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices):
            outputs = model(**inputs, **counted)
            theirs: Any = outputs.get("loss") if isinstance(outputs, Mapping) else None
            for value in (items if counted else None, None) if theirs is not None else ():
                try:
                    ours = _head_loss(base, outputs, labels, value)
                except (RuntimeError, ValueError):  # the default, for a head of another shape
                    break
                if ours is not None and torch.allclose(ours.float(), theirs.float(), rtol=1e-3):
                    return value is not None
        raise ValueError(
            f"{type(base).__name__} returns a loss that its outputs and labels do not give by "
            f"{getattr(getattr(base, 'loss_function', None), '__name__', 'any loss_function')}; "
            "say how it is computed: SampledTrainer(..., compute_loss_func=lambda outputs, labels, "
            "num_items_in_batch=None: F.cross_entropy(outputs.logits, labels))"
        )


class _Answer(nn.Module):
    """Stands in for a model whose outputs are there already."""

    def __init__(self, name: str, outputs: Any) -> None:
        super().__init__()
        self.name, self.outputs = name, outputs

    def forward(self, **inputs: Any) -> Any:
        return self.outputs

    def _get_name(self) -> str:
        return self.name


def _base(model: Any) -> Any:
    """The model of transformers inside an adapter of peft."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _head_loss(
    base: Any, outputs: Any, labels: Mapping[str, Any], items: Tensor | int | None
) -> Tensor | None:
    """The loss by ``loss_function``, which each kind of head calls with arguments of its own."""
    loss_function = getattr(base, "loss_function", None)
    if loss_function is None:
        return None
    known = {
        **outputs,
        **labels,
        "pooled_logits": outputs.get("logits"),
        "config": base.config,
        "vocab_size": getattr(base.config, "vocab_size", None),
        "num_items_in_batch": items,
    }
    wanted = inspect.signature(loss_function).parameters.values()
    if any(
        p.name not in known and p.default is p.empty and p.kind != p.VAR_KEYWORD for p in wanted
    ):
        return None
    loss: Tensor | None = loss_function(
        **{p.name: known[p.name] for p in wanted if p.name in known}
    )
    return loss
