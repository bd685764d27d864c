"""A callback for Lightning's ``Trainer``."""

from __future__ import annotations

import math
import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from ..core.random import CPU, random_state, set_random_state
from ..layers.depth import shares_of
from ._routine import SketchOptions

__all__ = ["SketchCallback"]


def _bases() -> tuple[type, ...]:
    """``Callback`` of every Lightning that is installed: each trainer accepts only its own."""
    packages = ("lightning.pytorch", "pytorch_lightning")
    names = [name for name in packages if find_spec(name.partition(".")[0]) is not None]
    if not names:
        raise ImportError(
            "sketchprop.integrations.lightning needs Lightning: pip install lightning"
        )
    return tuple(import_module(name).Callback for name in names)


class SketchCallback(SketchOptions, *_bases()):  # type: ignore[misc]
    """Sketches the model when training begins, follows a schedule, logs what is kept.

    The budget is a function of ``trainer.global_step``. Lightning does not save the random state
    that draws (and dropout) come from, so this callback does: on one process a run resumed from
    the end of an epoch is bitwise the run that was not stopped. With several processes each
    starts from its own seed, as without the callback.

    Values are logged at the step at which Lightning logs the loss. A ``tuner`` gets each batch as
    ``training_step`` does.

        Trainer(callbacks=[SketchCallback(Tokens(0.3), schedule={0: 1.0, 500: 0.3})])
    """

    _steps = 0
    _resumed: dict[str, Any] | None = None
    _tuner_state: dict[str, Any] | None = None
    _shares: dict[str, list[float]] | None = None
    _model: nn.Module | None = None

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        # Steps are restored after this hook; each batch sets its own budget.
        self.begin(pl_module, trainer.global_step, self._shares)
        self._model = pl_module
        # Before the loaders draw their order. A checkpoint holds the first process's state only.
        if self._resumed and trainer.world_size == 1:
            for device in _devices():
                if str(device) in self._resumed:
                    set_random_state(device, self._resumed[str(device)])
        self._resumed = None

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        self._steps = trainer.global_step
        optimizer = trainer.optimizers[0] if trainer.optimizers else None
        self.start_tuner(pl_module, optimizer, _batches(trainer), self._tuner_state)
        self._tuner_state = None

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, *args: Any) -> None:
        self.follow(pl_module, trainer.global_step)
        if self.tuner is not None:
            self.tuner(args[0])

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, *args: Any) -> None:
        # Accumulating trainers end several batches at one step.
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        # The number that Lightning logs the loss of this batch under; its own monitors read it too.
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        every = trainer.log_every_n_steps
        if not every or (step + 1) % every:
            return
        values = self.values(pl_module)
        trainer.callback_metrics.update({k: torch.tensor(v) for k, v in values.items()})
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)

    def _routine(self) -> str:
        return f"sketch={self.sketch!r}, schedule={self.schedule!r}"

    def state_dict(self) -> dict[str, Any]:
        return {
            "routine": self._routine(),
            "random": {str(device): random_state(device) for device in _devices()},
            "shares": {} if self._model is None else shares_of(self._model),
            "tuner": None if self.tuner is None else self.tuner.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        before, now = state_dict["routine"], self._routine()
        if before != now:
            warnings.warn(
                f"the checkpoint was trained with {before}; it goes on with {now}", stacklevel=2
            )
        self._resumed = state_dict["random"]
        self._tuner_state, self._shares = state_dict["tuner"], state_dict["shares"]


def _devices() -> list[torch.device]:
    return [CPU, *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def _batches(trainer: Any) -> float:
    """How many there will be, by epochs or by steps; infinite: not known.

    Lightning's own estimate raises where ``accumulate_grad_batches`` changes from epoch to epoch.
    """
    epochs, steps = trainer.max_epochs or 0, trainer.max_steps
    by_epochs = trainer.num_training_batches * epochs if epochs > 0 else math.inf
    by_steps = steps * trainer.accumulate_grad_batches if steps > 0 else math.inf
    return float(min(by_epochs, by_steps))
