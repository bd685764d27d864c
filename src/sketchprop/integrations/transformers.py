"""A callback for transformers' ``Trainer``."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

from ..layers.depth import shares_of
from ._routine import SketchOptions

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import CallbackHandler
except ImportError as error:
    raise ImportError(
        "sketchprop.integrations.transformers needs transformers: pip install 'transformers[torch]'"
    ) from error

__all__ = ["SketchCallback"]

_TUNER, _SHARES = "sketchprop_tuner", "sketchprop_shares"


class SketchCallback(SketchOptions, TrainerCallback):
    """Sketches the model when training begins, follows a schedule, logs what is kept.

    The budget is a function of ``state.global_step``, and ``Trainer`` saves the random state of
    the draws. A run that is resumed with the same callback is bitwise the run without a stop.

    Values appear in ``state.log_history``, the progress bar and every reporter (TensorBoard, ...),
    whatever the order of the callbacks.

    A ``tuner`` is called after each step with the model's keyword arguments, a dict:
    ``loss_fn = lambda model, batch: model(**batch).loss``.

        Trainer(model, args, callbacks=[SketchCallback(Tokens(0.3))])
        SketchCallback(Tokens(0.3), schedule={0: 1.0, 500: 0.5, 2000: 0.3})
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _before_reporters(self)
        model = kwargs["model"]
        self.begin(model, state.global_step, state.stateful_callbacks.get(_SHARES))
        # Its entry in trainer_state.json.
        saved = state.stateful_callbacks.get(_TUNER)
        self.start_tuner(model, kwargs.get("optimizer"), state.max_steps, saved)
        self._inputs: dict[str, Any] = {}
        if self.tuner is not None:
            self._hook = model.register_forward_pre_hook(self._remember, with_kwargs=True)

    def _remember(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Callbacks are not given the batch: it is what the model was called with last."""
        if model.training and torch.is_grad_enabled():
            self._inputs = dict(kwargs)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.follow(kwargs["model"], state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if shares := shares_of(kwargs["model"]):
            state.stateful_callbacks[_SHARES] = shares
        if self.tuner is not None and self._inputs:
            self.tuner(self._inputs)
            self._inputs = {}
            state.stateful_callbacks[_TUNER] = self.tuner.state_dict()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs.get("logs")
        # Only logs of training steps: those of evaluation and the final summary have no "loss".
        if logs is not None and "loss" in logs:
            values = self.values(kwargs["model"])
            logs.update(values)
            state.log_history[-1].update(values)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.tuner is not None:
            self._hook.remove()


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
