"""A callback for transformers' ``Trainer``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..layers.schedule import Schedule
from ..layers.transform import Filter
from ..sketches import Sketch
from ._routine import Metrics, Routine, added_variance, check_log_every

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "sketchprop.integrations.transformers needs transformers: "
        "pip install 'sketchprop[transformers]'"
    ) from error

__all__ = ["SketchCallback", "added_variance"]


class SketchCallback(TrainerCallback):
    """Sketches the model when training begins, follows a schedule, logs what is kept.

    ``sketch`` and ``filter_fn``: as for ``sketch_``; ``None`` leaves the model as it comes.
    ``schedule(step)``: the budget of all sketched layers, for example a ``Ladder``.
    ``log_every``: asks for a log every so many steps; ``None`` joins those that are made anyway.
    ``metrics(model)``: further values to log, for example ``added_variance(loss_fn, batches)``.
    ``rows``: samples × tokens of a forward pass, for which kept FLOPs are counted.
    ``unsketch``: gives the layers their own class back when training ends.

    The budget is a function of ``state.global_step`` and draws come from the random state that
    ``Trainer`` saves: a resumed run needs the same callback, nothing else, and is bitwise the
    run that was not stopped.

    Values join the log they belong to in ``state.log_history`` and the progress bar. Reporters
    (TensorBoard, ...) are called before callbacks that are given to ``Trainer``; to let one see
    them, move it behind: ``trainer.add_callback(trainer.pop_callback(TensorBoardCallback))``.

        Trainer(model, args, callbacks=[SketchCallback(L1(0.1))])
        SketchCallback(L1(0.1), schedule=Ladder({0: 1.0, 500: 0.3, 2000: 0.1}))
    """

    def __init__(
        self,
        sketch: Sketch | Mapping[str, Sketch | None] | None,
        filter_fn: Filter | None = None,
        schedule: Schedule | None = None,
        *,
        log_every: int | None = None,
        metrics: Metrics | None = None,
        rows: int = 128,
        unsketch: bool = False,
    ) -> None:
        check_log_every(log_every)
        self.routine = Routine(sketch, filter_fn, schedule, metrics, rows, unsketch)
        self.log_every = log_every

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.routine.begin(kwargs["model"], state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.routine.follow(kwargs["model"], state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.log_every is not None and state.global_step % self.log_every == 0:
            control.should_log = True

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs.get("logs")
        # Only logs of training steps: those of evaluation and the final summary have no "loss".
        if logs is None or "loss" not in logs:
            return
        if self.log_every is None or state.global_step % self.log_every == 0:
            values = self.routine.values(kwargs["model"])
            logs.update(values)
            state.log_history[-1].update(values)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.routine.end(kwargs["model"])
