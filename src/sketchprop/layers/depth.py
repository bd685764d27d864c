"""A budget for all blocks together, shared out over them by the noise that each feels.

With ε = E‖e‖²/‖G‖² the relative noise of the gradient G that arrives at a block, and b the budgets
of its rows, queries and keys, the noise of the block's own gradient over ‖g‖², and what arrives at
the block below, are

    v = felt · ε + (1 + ε) Σ own · law(b),        ε' = through · ε + (1 + ε) Σ out · law(b)

law(b) = Σ n²(1/p(b) - 1)/Σ n² for rows and queries, n the norms of the rows of G and p by
water-filling, and 1/b - 1 for keys. The factors are measured in one backward pass, block by block:
the block's exact vjp takes G and a draw's e, and with one kind of draw alone it takes G again. The
budgets are those on ``RUNGS`` with the least (Σ v⁶)^⅙ that cost what the even ones cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.probabilities import water_fill
from ..core.proof import no_gradient_hooks
from ..core.random import random_state_kept
from ..core.sampling import draw_uniforms
from ..sketches import Tokens
from ..sketches.tokens import QUERIES, ROOM
from ..tokens.draw import draw_rows, kept_count, row_norms
from .isolation import evaluated

RUNGS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.85, 1.0)
KINDS = ("rows", "queries", "keys")
KEYS_TRIED = 0.5
WORST = 6.0
"""Between the mean over blocks (1) and the worst of them (∞)."""
WORTH = 0.9
"""Of the even budgets' noise: what shares may leave, or budgets stay even."""
ATTENTION = 4 * ROOM
"""FLOPs of attention's backward for each kept query, key and channel, with room for more queries:
of its ten, as its kernel takes less time for them than layers do (MiniLM at 512 tokens, a CPU)."""

PATIENCE = 3
"""Backward passes after which blocks without a gradient are not waited for."""
NOTHING = [math.nan] * (len(RUNGS) + 12)
"""The numbers of a block that could not be measured."""

Budgets = tuple[float, float, float]
"""Of rows, queries and keys."""


class Factors(NamedTuple):
    """Those of all blocks, bottom first. ``cost``: FLOPs for a budget of 1 by kind, 0 for a part
    that is exact anyway, and of attention itself."""

    fill: Tensor
    own: Tensor
    out: Tensor
    felt: Tensor
    through: Tensor
    cost: Tensor

    @classmethod
    def of(cls, blocks: Sequence[Sequence[float]]) -> Factors:
        """From the numbers that were measured."""
        sizes = [len(RUNGS), 3, 3, 1, 1, 4]
        return cls(*torch.split(torch.tensor(blocks, dtype=torch.float64), sizes, -1))

    @property
    def laws(self) -> Tensor:
        """law(b) of each block, kind and rung."""
        keys = (1 / torch.tensor(RUNGS, dtype=self.fill.dtype) - 1).expand_as(self.fill)
        return torch.stack([self.fill, self.fill, keys], 1)

    def noise(self, laws: Tensor) -> Tensor:
        """v of each block for ``laws[..., blocks, 3]`` of its draws."""
        own, out = (laws * self.own).sum(-1), (laws * self.out).sum(-1)
        arrives, found = torch.zeros_like(own[..., 0]), torch.zeros_like(own)
        for k in reversed(range(len(self.felt))):
            found[..., k] = self.felt[k] * arrives + (1 + arrives) * own[..., k]
            arrives = self.through[k] * arrives + (1 + arrives) * out[..., k]
        return found


def shared_out(blocks: Sequence[Sequence[float]], tokens: Tokens) -> list[Budgets]:
    """Budgets of each block, bottom first, that cost what the even ones cost; these themselves
    where others promise little. Rung by rung what most lowers the noise for its cost; queries are
    never fewer than rows. Budgets that were given stay."""
    factors = Factors.of(blocks)
    even = [float(b) for b in (tokens.budget, tokens.query_budget, tokens.key_budget)]
    given = torch.tensor([False, tokens.queries is not None, tokens.keys is not None])
    fixed = given | (factors.cost[:, :3] == 0)
    rungs = torch.tensor(RUNGS, dtype=torch.float64)
    laws, flat = factors.laws, torch.tensor(even, dtype=torch.float64).expand(len(blocks), 3)

    def judged(own: Tensor, budgets: Tensor) -> tuple[Tensor, Tensor]:
        """The score and the cost of budgets whose laws are ``own[..., blocks, 3]``."""
        score = factors.noise(own).pow(WORST).mean(-1).pow(1 / WORST)
        # Attention has places for the usual number of queries, see ``Tokens.capacity``.
        places = torch.maximum(budgets[..., 1], budgets[..., 0] + QUERIES).clamp(max=1)
        budgets = torch.cat([budgets, places.unsqueeze(-1)], -1)
        return score, (factors.cost * budgets).sum((-1, -2))

    def weighed(plans: Tensor) -> tuple[Tensor, Tensor]:
        """The same of rungs; budgets that are given stay."""
        own = laws.expand(*plans.shape, -1).gather(-1, plans.unsqueeze(-1)).squeeze(-1)
        return judged(torch.where(fixed, usual, own), torch.where(fixed, flat, rungs[plans]))

    # A law is nearly a line in 1/b between two rungs.
    above = torch.searchsorted(rungs, flat[0]).clamp(1, len(RUNGS) - 1)
    low, high = 1 / rungs[above - 1], 1 / rungs[above]
    share = (1 / flat[0] - high) / (low - high)
    at = [
        laws.gather(-1, i.expand(len(blocks), 3).unsqueeze(-1)).squeeze(-1)
        for i in (above - 1, above)
    ]
    usual = share * at[0] + (1 - share) * at[1]
    before, most = judged(usual, flat)
    now = torch.zeros(len(blocks), 3, dtype=torch.int64)
    score, cost = weighed(now)
    moves = [divmod(int(i), 3) for i in (~fixed).flatten().nonzero()]
    while moves:
        plans = now.repeat(len(moves), 1, 1)
        for plan, (k, i) in zip(plans, moves, strict=True):
            plan[k, i] += 1
            if i == 0 and not fixed[k, 1]:
                plan[k, 1] = max(plan[k, 0], plan[k, 1])
        scores, costs = weighed(plans.clamp(max=len(RUNGS) - 1))
        possible = (plans < len(RUNGS)).all(-1).all(-1) & (costs <= most * (1 + 1e-9))
        gains = torch.where(possible, (score - scores) / (costs - cost), 0.0)
        best = int(gains.argmax())
        if not gains[best] > 0:
            break
        now, score, cost = plans[best], scores[best], costs[best]
    if not score < WORTH * before:
        return [(even[0], even[1], even[2])] * len(blocks)
    chosen = torch.where(fixed, flat, rungs[now])
    return [(rows, queries, keys) for rows, queries, keys in chosen.tolist()]


@dataclass(eq=False)
class Shares:
    """The blocks that one ``Tokens`` was given to: what was measured, and the budgets of each."""

    tokens: Tokens
    states: dict[str, Any]
    """``Sketching`` by the block's name, in the order of the model."""
    blocks: dict[str, list[float]] = field(default_factory=dict)
    """What was measured, see ``Factors``."""
    note: str = "even: not measured yet"
    open: bool = True
    """Whether the next backward pass measures."""
    alone: bool = False
    """Whether it measures for this process only."""
    _passes: int = 0
    _expected: set[str] = field(default_factory=set)
    _arrived: dict[str, Any] = field(default_factory=dict)
    _task: int = -1

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrived": {}, "_expected": set()}

    def watch(self, block: Any, y: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Looks at the gradient of a block's result ``y``; measures when the pass is done."""
        if not y.requires_grad:
            return
        name = next(name for name, state in self.states.items() if state is block.sketching)
        if torch._C._current_graph_task_id() != -1 and name not in self._expected:
            self.open = False
            self.note = "even: checkpointing is reentrant; checkpoint with use_reentrant=False"
            return
        device = y.device.type
        autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        together = None if self.alone else _processes()
        self._expected.add(name)
        result = y.detach()  # a hook that holds y itself would never be freed

        def arrived(G: Tensor) -> None:
            task = torch._C._current_graph_task_id()
            if self.open and task != self._task:
                self._task, self._arrived = task, {}
                after: Any = torch.autograd.Variable._execution_engine
                after.queue_callback(lambda: self._measure(together))
            if self.open:
                given = (result, block, args, kwargs, G.detach(), autocast)
                self._arrived.setdefault(name, given)

        y.register_hook(arrived)  # type: ignore[no-untyped-call]

    def _measure(self, together: Any) -> None:
        arrived, self._arrived, self._task = self._arrived, {}, -1
        # One may have been unsketched since its forward pass.
        arrived = {n: own for n, own in arrived.items() if "sketching" in vars(own[1])}
        weights = [(p, own[4]) for own in arrived.values() for p in own[1].parameters()]
        # Those of functional_call may be elsewhere.
        odd = any(type(p) is not nn.Parameter or p.device != G.device for p, G in weights)
        if together == "unknown" or odd:
            self.open, self.note = False, "even: weights are not plain parameters"
            if together == "unknown":
                self.note = "even: several processes, and not DDP"
            return
        place, exact = 0, None
        for name, (y, block, args, kwargs, G, autocast) in arrived.items():
            # From the block above, if it read y: without the noise that its draws have made.
            G = exact if exact is not None and y.data_ptr() == place else G  # noqa: PLW2901
            self.blocks[name], x, exact = _measured(self.tokens, block, args, kwargs, G, autocast)
            place = x.data_ptr()
        # Of each block whether it has numbers, and whether it ran and has none yet.
        found = []
        for name in self.states:
            own = self.blocks.get(name, NOTHING)
            good = all(map(math.isfinite, own))
            missing = not good and name in self._expected
            found.append([*(own if good else [0.0] * len(own)), float(good), float(missing)])
        if together is not None:  # processes may have run different blocks
            device, group = next(together.parameters()).device, together.process_group
            found = mean_over_processes(found, device, group)
        self._passes += 1
        self.blocks = {
            name: [number / good for number in own]
            for name, (*own, good, _) in zip(self.states, found, strict=True)
            if good
        }
        waits = any(missing for *_, missing in found) and self._passes < PATIENCE
        if self.blocks and not waits:
            self.open = False
            self.note = "even: fewer than two blocks have a gradient"
            self.give(self.tokens)

    def sketches(self, tokens: Tokens) -> dict[str, Tokens]:
        """What each block gets of ``tokens``, by what was measured; even where nothing was."""
        names = [name for name in self.states if name in self.blocks]
        found = dict.fromkeys(self.states, tokens)
        if shareable(tokens) and not self.open and len(names) > 1:
            budgets = shared_out([self.blocks[name] for name in names], tokens)
            even = len(set(budgets)) == 1
            self.note = "even: shares would gain little" if even else f"a share of {tokens!r}"
            if not even:
                shares = (_with(tokens, *own) for own in budgets)
                found.update(zip(names, shares, strict=True))
        return found

    def give(self, tokens: Tokens) -> None:
        """Shares ``tokens`` out from now on."""
        self.tokens = tokens
        for name, sketch in self.sketches(tokens).items():
            # As text, because 1 is a rank and 1.0 is everything; only what changes is given.
            if repr(self.states[name].sketch) != repr(sketch):
                self.states[name].sketch = sketch


def _with(tokens: Tokens, rows: float, queries: float, keys: float) -> Tokens:
    return replace(tokens, budget=rows, queries=queries, keys=keys, share="even")


def shareable(tokens: Any) -> bool:
    """Whether a budget can be shared out."""
    if not isinstance(tokens, Tokens) or tokens.share != "measured":
        return False
    whole = (tokens.budget, tokens.queries, tokens.keys)
    return not any(isinstance(b, int) for b in whole) and 2 * RUNGS[0] <= tokens.budget < 1


def share_out(states: Mapping[str, Any]) -> None:
    """Blocks, by name, that were given the same ``Tokens`` share them from now on."""
    groups: dict[Tokens, dict[str, Any]] = {}
    for name, state in states.items():
        if shareable(state.sketch):
            groups.setdefault(state.sketch, {})[name] = state
    for tokens, group in groups.items():
        shares = Shares(tokens, group)
        for state in group.values() if len(group) > 1 else ():
            state.shares = shares


def leave(state: Any) -> None:
    """A block that is sketched anew, or no more, shares its budget no longer."""
    if state.shares is not None:
        for name in [name for name, own in state.shares.states.items() if own is state]:
            del state.shares.states[name]
            state.shares.blocks.pop(name, None)


def shares_in(model: nn.Module) -> list[Shares]:
    """Each once."""
    states = [vars(m).get("sketching") for m in model.modules()]
    found = [s.shares for s in states if s is not None and s.shares is not None]
    return list({id(shares): shares for shares in found}.values())


def shares_of(model: nn.Module) -> dict[str, list[float]]:
    """The measured numbers of each block, for a checkpoint; empty before the first backward pass.

    Save them: ``torch.save({"model": model.state_dict(), "shares": shares_of(model)}, path)``.
    """
    done = [shares for shares in shares_in(model) if not shares.open]
    return {name: own for shares in done for name, own in shares.blocks.items()}


def load_shares_(model: nn.Module, blocks: Mapping[str, Sequence[float]]) -> None:
    """Distributes budgets over blocks by the numbers of ``shares_of``, without measuring again.

    If the model is sketched as it was then, its blocks get the same budgets.
    """
    for shares in shares_in(model):
        found = {name: list(blocks[name]) for name in shares.states if name in blocks}
        if found:
            shares.blocks, shares.open = found, False
            shares.give(shares.tokens)


def _processes() -> Any:
    """The DDP model whose forward pass this is; ``"unknown"`` in several processes without one."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    ddp: Any = nn.parallel.DistributedDataParallel
    alone = distributed.get_world_size() == 1
    return None if alone else ddp._get_active_ddp_module() or "unknown"


def mean_over_processes(
    numbers: Sequence[Sequence[float]], device: torch.device, group: Any = None
) -> list[list[float]]:
    """One all-reduce of a few numbers: the same ones in each process; alone: the numbers."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return [list(own) for own in numbers]
    wide = torch.float32 if device.type == "mps" else torch.float64
    # Gloo reduces on the CPU, NCCL on its own device.
    place = torch.device("cpu") if distributed.get_backend(group) == "gloo" else device
    sums = torch.tensor(numbers, dtype=wide, device=place)
    distributed.all_reduce(sums, group=group)
    means: list[list[float]] = (sums / distributed.get_world_size(group)).tolist()
    return means


@contextmanager
def _aside(block: nn.Module, device: torch.device, autocast: Any) -> Iterator[None]:
    """Runs of a block that leave no trace, without dropout, which each would draw anew."""
    state = vars(block)["sketching"]
    noted = state.note, state.whole
    with ExitStack() as stack:
        stack.enter_context(random_state_kept(device))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(*autocast))
        stack.enter_context(no_gradient_hooks(block.parameters()))
        stack.enter_context(evaluated(block))
        try:
            yield
        finally:
            state.note, state.whole = noted


def _measured(
    tokens: Tokens, block: Any, args: Any, kwargs: Any, G: Tensor, autocast: Any
) -> tuple[list[float], Tensor, Tensor | None]:
    """The numbers of a block, its input and the exact gradient of that; not finite where the
    gradient that arrives is zero or not finite."""
    parameters = [p for p in block.parameters() if p.requires_grad]
    norms = row_norms(G.flatten(0, -2))
    with _aside(block, G.device, autocast):
        call = block.anatomy(*args, **kwargs)
        if not 0 < float(norms.sum()) < math.inf:
            return NOTHING, call.x, None

        def pulled(budgets: Sequence[float], *grads: Tensor) -> list[list[Tensor]]:
            """The gradients of x and of the parameters, for each of ``grads``."""
            x = call.x.detach().requires_grad_()
            y = block.run(call._replace(x=x), _with(tokens, *budgets))
            pull = partial(torch.autograd.grad, y, [x, *parameters], materialize_grads=True)
            return [list(pull(g, retain_graph=True)) for g in grads]

        fill = {b: _fill(norms, b) for b in (*RUNGS, float(tokens.budget))}
        # Where so many rows are all that there are, with fewer; if need be with none.
        tried = max((b for b in fill if b <= tokens.budget and fill[b] > 0), default=0.0)
        e = _noise(G, norms, tried) if tried else G
        exact, noisy = pulled((1.0,) * 3, G, e)
        signal, sizes = _squares(exact), _squares([G, e])
        through, felt = _over(_squares(noisy), signal, sizes[1] / sizes[0])
        out, own = [0.0] * 3, [0.0] * 3
        for i, b in enumerate((tried, tried, KEYS_TRIED)):
            if b:
                alone = [1.0] * 3
                alone[i] = b
                difference = [a - c for a, c in zip(*pulled(alone, G), exact, strict=True)]
                law = fill[b] if i < 2 else 1 / b - 1
                out[i], own[i] = _over(_squares(difference), signal, law)
    fills = [fill[b] for b in RUNGS]
    return [*fills, *own, *out, felt, through, *_cost(block, call.x)], call.x, exact[0]


def _fill(norms: Tensor, budget: float) -> float:
    """Σ n²(1/p - 1)/Σ n²."""
    rank, n = kept_count(budget, norms.numel()), norms.double()
    if rank >= norms.numel():
        return 0.0
    p = water_fill(norms, rank).double().clamp_min(1e-30)
    return float(torch.where(n > 0, n * n * (1 / p - 1), 0.0).sum() / (n * n).sum())


def _noise(G: Tensor, norms: Tensor, budget: float) -> Tensor:
    """e = Ĝ - G of one draw of rows."""
    drawn = draw_rows(norms, kept_count(budget, norms.numel()), draw_uniforms)
    scale = torch.zeros_like(norms).index_copy_(0, drawn.rows, drawn.scale.to(norms.dtype))
    return (scale - 1).view(*G.shape[:-1], 1).to(G.dtype) * G


def _squares(gradients: Sequence[Tensor]) -> tuple[float, float]:
    """‖·‖² of the first, and of all others together."""
    first, *others = (float(g.double().square().sum()) for g in gradients)
    return first, math.fsum(others)


def _over(noise: Sequence[float], signal: Sequence[float], times: float) -> list[float]:
    """noise/(signal · times); 0 where there is no signal."""
    return [v / (s * times) if s > 0 else 0.0 for v, s in zip(noise, signal, strict=True)]


def _cost(block: Any, x: Tensor) -> list[float]:
    """FLOPs of a row of its backward, by kind; 0 for what is exact anyway."""
    flops = dict.fromkeys(KINDS, 0.0)
    for size in block.sizes(block, 1):
        if size.part in flops:
            flops[size.part] += size.exact_flops
    known = [0.0 if kind in block.sketching.whole else v for kind, v in flops.items()]
    return [*known, ATTENTION * x.shape[1] * x.shape[-1] if known[1] else 0.0]
