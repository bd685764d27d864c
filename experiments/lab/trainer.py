"""Trains one model: batches, schedule, curves, and a state that can be saved.

    model = initialised(lambda: zoo.ViT(dim=96), seed=0)
    sp.sketch_(model, sp.L1(0.1))
    trainer = Trainer(model, feed, recipe, evaluate, seed=0, marks=[100, 200])
    found = trainer.train()

Initial weights, batches and draws have streams of their own for each seed, so two methods with one
seed start from the same weights and see the same batches.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sketchprop.layers.depth import load_shares_, shares_of
from sketchprop.meters import measure_flops

from .checkpoints import Checkpoint, State

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
_LOOK_EVERY = 20
"""Steps between two looks at whether the loss is still finite."""
_DIGITS = {"validation": 4, "test": 4, "loss": 6, "seconds": 4}
_NUMBERS = ("steps", "stretch", "spent", "clipped", "diverged", "flops", "seconds", "wall")
Model = TypeVar("Model", bound=nn.Module)


class Feed(Protocol):
    """The batches of a run, in the order of its seed."""

    def first(self) -> Batch:
        """A batch for meters; takes nothing from the stream."""

    def next(self) -> Batch: ...

    def state(self) -> State: ...

    def load_state(self, state: State) -> None: ...


class Control(Protocol):
    """Changes a model between its steps, and knows what they cost."""

    def before(self, batch: Batch) -> float:
        """Called before a step on this batch; its cost and that of what was done for it."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


@dataclass(frozen=True)
class Recipe:
    """How a model is trained: optimizer and schedule."""

    optimizer: str
    """``sgd`` or ``adamw``."""
    learning_rate: float
    steps: int
    """With a ``Control``: the cost that may be spent, in units of its own; so is ``warmup``."""
    weight_decay: float = 0.0
    momentum: float = 0.9
    """Of ``sgd``."""
    warmup: int = 0
    """Steps in which the rate rises to its value."""
    decay: bool = True
    """Whether it then falls in a cosine to ``final_rate``; else it stays."""
    final_rate: float = 0.0
    clip: float = 0.0
    """Largest norm of the gradient; 0: no clipping."""

    def rate(self, step: float) -> float:
        """The learning rate of a step: up in a line, then down in a cosine."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / (self.warmup + 1)
        if not self.decay:
            return self.learning_rate
        share = min(1.0, (step - self.warmup) / max(1, self.steps - 1 - self.warmup))
        low = min(self.final_rate, self.learning_rate)
        return low + (self.learning_rate - low) * (1 + math.cos(math.pi * share)) / 2

    def make(self, model: nn.Module) -> torch.optim.Optimizer:
        options: dict[str, Any] = {"lr": self.learning_rate, "weight_decay": self.weight_decay}
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), momentum=self.momentum, **options)
        return torch.optim.AdamW(model.parameters(), **options)


def seed_of(purpose: str, seed: int) -> int:
    """A number of its own for each purpose of each seed."""
    digest = hashlib.sha256(f"{purpose}/{seed}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def generator(purpose: str, seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A stream of its own for each purpose of each seed."""
    return torch.Generator(device).manual_seed(seed_of(purpose, seed))


def initialised(make: Callable[[], Model], seed: int) -> Model:
    """A model with the initial weights of a seed; the default generator stays as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed_of("initial weights", seed))
        return make()


def outputs(model: nn.Module, batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
    """What the model says and what was wanted, sample by sample; in eval mode."""
    was = model.training
    model.eval()
    with torch.no_grad():
        pairs = [(model(x), y) for x, y in batches]
    model.train(was)
    return torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])


def accuracy(logits: Tensor, targets: Tensor) -> float:
    """In percent, of the targets that are not -100."""
    wanted = targets != -100
    right = (logits.argmax(-1) == targets) & wanted
    return 100.0 * int(right.sum()) / max(1, int(wanted.sum()))


class Trainer:
    """One run in progress; all that changes is in ``state``.

    ``marks`` are the steps after which ``evaluate(model)`` gives the scores on validation and test;
    with a ``control``, which makes steps of different costs, the costs after which it does.
    ``worst`` is the score of a run whose loss is not finite any more.
    With a checkpoint a killed run goes on where it was saved; on the CPU its results are bitwise
    those of a run that was never stopped.
    """

    def __init__(
        self,
        model: nn.Module,
        feed: Feed,
        recipe: Recipe,
        evaluate: Callable[[nn.Module], tuple[float, float]],
        seed: int,
        marks: Sequence[int],
        *,
        loss: Loss = F.cross_entropy,
        device: torch.device | None = None,
        control: Callable[[nn.Module, torch.optim.Optimizer], Control] | None = None,
        worst: float = 0.0,
    ) -> None:
        self.device = device or torch.device("cpu")
        self.model, self.feed, self.recipe, self.marks = model.to(self.device), feed, recipe, marks
        self.evaluate, self.loss_fn, self.seed = evaluate, loss, seed
        self.worst = worst
        self.optimizer = recipe.make(model)
        self.control = control(self.model, self.optimizer) if control else None
        self.steps = self.clipped = self.diverged = self.stretch = 0
        self.spent, self.flops, self.seconds, self.wall = 0.0, 0.0, 0.0, 0.0
        self.loss = torch.zeros((), device=self.device)
        self.curves: dict[str, list[float | None]] = {name: [] for name in _DIGITS}
        self.random: list[Tensor] = []

    def train(self, checkpoint: Checkpoint | None = None) -> dict[str, Any]:
        """To the end; what was found, as plain numbers.

        ``validation_curve``, ``test_curve`` (percent), ``loss_curve`` and ``seconds_curve``
        (training alone, without evaluation) have one entry for each mark; ``flops_step`` counts
        one step: forward, backward, scores and decompositions.
        """
        for _ in self.stretches(checkpoint):
            pass
        return self.found()

    def stretches(self, checkpoint: Checkpoint | None = None) -> Generator[None, None, None]:
        """The same, with a pause after each mark."""
        state = checkpoint.load() if checkpoint else None
        if state is not None:
            self.load_state(state)
        while len(self.curves["loss"]) < len(self.marks):
            self.run_to(self.marks[len(self.curves["loss"])], checkpoint)
            yield

    def run_to(self, mark: int, checkpoint: Checkpoint | None = None) -> None:
        """Trains to a step; evaluates if that is the next mark."""
        with torch.random.fork_rng():
            if self.random:
                torch.set_rng_state(self.random[0])
                for state in self.random[1:]:
                    torch.cuda.set_rng_state(state, self.device)
            else:
                self._start()
            lost = False
            while self.spent < mark and not lost:
                lost = self.train_step()
                if lost or self.at_mark:
                    self._end_stretch(lost)
                self.random = self._random()
                if checkpoint:
                    checkpoint.offer(self.state)

    @property
    def at_mark(self) -> bool:
        done = len(self.curves["loss"])
        return done < len(self.marks) and self.spent >= self.marks[done]

    def _start(self) -> None:
        """What a new run does once: counts a step, and seeds the draws."""
        began = time.perf_counter()
        torch.manual_seed(seed_of("counting", self.seed))
        self.model.train()
        counted = measure_flops(
            self.model,
            lambda model, batch: self.loss_fn(model(batch[0]), batch[1]),
            self.feed.first(),
        )
        self.flops = counted.forward + counted.sketched_backward
        self.model.zero_grad()
        torch.manual_seed(seed_of("draws", self.seed))
        self.random = self._random()
        self.wall += time.perf_counter() - began

    def train_step(self) -> bool:
        """One step alone; whether the run is lost."""
        began = time.perf_counter()
        self.model.train()
        x, y = self.feed.next()
        cost = self.control.before((x, y)) if self.control else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate(self.spent)
        self.optimizer.zero_grad()
        loss = self.loss_fn(self.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.recipe.clip:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
            self.clipped += int(norm > self.recipe.clip)
        self.optimizer.step()
        self.loss += loss.detach()
        self.steps += 1
        self.stretch += 1
        self.spent += cost
        last = self.at_mark
        lost = (last or self.steps % _LOOK_EVERY == 0) and not bool(self.loss.isfinite())
        lost = lost or (last and not all(bool(p.isfinite().all()) for p in self.model.parameters()))
        spent = time.perf_counter() - began
        self.seconds += spent
        self.wall += spent
        return lost

    def _end_stretch(self, lost: bool) -> None:
        began = time.perf_counter()
        done = len(self.curves["loss"])
        if lost:
            self.diverged, rest = done + 1, len(self.marks) - done
            for name, value in (("validation", self.worst), ("test", self.worst), ("loss", None)):
                self.curves[name] += [value] * rest
            self.curves["seconds"] += [self.seconds] + [0.0] * (rest - 1)
            self.spent = float(self.marks[-1])
        else:
            scores = self.evaluate(self.model)
            for name, score in zip(("validation", "test"), scores, strict=True):
                self.curves[name].append(score)
            self.curves["loss"].append(float(self.loss) / self.stretch)
            self.curves["seconds"].append(self.seconds)
        self.loss.zero_()
        self.seconds, self.stretch = 0.0, 0
        self.wall += time.perf_counter() - began

    def state(self) -> State:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "feed": self.feed.state(),
            "loss": self.loss,
            "curves": self.curves,
            "numbers": {name: getattr(self, name) for name in _NUMBERS},
            "random": self.random,
            "shares": shares_of(self.model),
            **({"control": self.control.state_dict()} if self.control else {}),
        }

    def load_state(self, state: State) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.feed.load_state(state["feed"])
        self.loss.copy_(state["loss"])
        self.curves, self.random = state["curves"], state["random"]
        load_shares_(self.model, state.get("shares", {}))
        if self.control:
            self.control.load_state_dict(state["control"])
        for name in _NUMBERS:
            setattr(self, name, state["numbers"][name])

    def _random(self) -> list[Tensor]:
        """The state of the default generators, of this device too."""
        own = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return [torch.get_rng_state(), *own]

    def found(self) -> dict[str, Any]:
        return {
            **{
                f"{name}_curve": [v if v is None else round(v, _DIGITS[name]) for v in values]
                for name, values in self.curves.items()
            },
            "clipped_fraction": round(self.clipped / max(1, self.steps), 6),
            "diverged_epoch": self.diverged,
            "flops_step": self.flops,
            "wall_seconds": round(self.wall, 4),
        }
