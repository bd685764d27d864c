"""Which layers are taken: filters, patterns, layers of one's own, and what summary says."""

import copy
import pickle

import pytest
import torch
from torch import nn

import sketchprop as sp
from sketchprop.layers import SketchedModule, select, sketched_class


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.down(self.up(x).relu())


class Subclass(nn.Linear):
    pass


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.mix = nn.Conv2d(width, width, 1)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.odd = Subclass(width, width)
        self.pool = nn.Linear(width, 4)
        self.head = nn.Linear(4, 10)

    def forward(self, x):
        x = self.mix(self.depthwise(self.stem(x)).relu()).flatten(2).mT
        return self.head(self.pool(self.odd(self.blocks(x))).mean(1))


CONVS = ["stem", "depthwise", "mix"]
ATTENTION = ["blocks.0.attn", "blocks.1.attn"]
MLP = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]
LINEAR = [*MLP, "pool", "head"]
ALL = ["stem", "depthwise", "mix"] + [
    f"blocks.{i}.{part}" for i in (0, 1) for part in ("attn", "up", "down")
]
ALL += ["pool", "head"]


def is_linear(module, name):
    return isinstance(module, nn.Linear)


def taken(model):
    return [name for name, m in model.named_modules() if isinstance(m, SketchedModule)]


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        (select.everything, ALL),
        (lambda module, name: isinstance(module, nn.Conv2d), CONVS),
        (lambda module, name: name.startswith("blocks"), [n for n in ALL if "blocks" in n]),
        (lambda module, name: False, []),
    ],
)
def test_a_filter_is_a_function_of_module_and_name(rule, names):
    model = Net()
    if not names:
        with pytest.raises(ValueError, match="filter_fn took none"):
            sp.sketch_(model, sp.L1(0.5), rule)
    for _ in range(2 if names else 0):  # sketched layers are asked as plain ones are
        sp.sketch_(model, sp.L1(0.5), rule)
        assert taken(model) == [n for n in names if n != "depthwise"]  # groups


def test_what_is_no_filter_is_refused():
    with pytest.raises(TypeError, match="mapping from name patterns"):
        sp.sketch_(Net(), sp.L1(0.5), filter_fn="blocks.*")


def test_the_default_takes_all_but_the_last_linear_layer():
    model = sp.sketch_(Net(), sp.L1(0.5))
    assert taken(model) == [n for n in ALL if n not in ("depthwise", "head")]
    assert type(model.blocks[0].attn.out_proj) is type(nn.MultiheadAttention(2, 1).out_proj)
    model(torch.randn(2, 3, 4, 4)).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_row_sketches_leave_kernels_exact():
    model = sp.sketch_(Net(), sp.SampleMask(0.5))
    assert taken(model) == [n for n in ALL if n not in ("stem", "depthwise", "head")]
    notes = {layer.name: layer.note for layer in sp.summary(model).layers}
    assert "column sketch, for example L1" in notes["stem"]


def test_summary_says_what_was_done_and_why_not():
    model = sp.sketch_(Net(), {"stem": sp.L1(0.25), "blocks.*": sp.L1(2), "mix": sp.L1(8)})
    layers = {layer.name: layer for layer in sp.summary(model, rows=1000).layers}
    assert layers["stem"].kept == 0.25
    assert layers["stem"].flops == pytest.approx(0.25, abs=0.03)
    assert layers["stem"].kind == "SketchedConv2d"
    assert layers["stem"].shape == (8, 3, 3, 3)
    # 2 of 24 columns of q, k, v and 2 of 8 of the output: 3 : 1 in FLOPs
    assert layers["blocks.0.attn"].kept == pytest.approx(4 / 32)
    assert layers["blocks.0.attn"].flops == pytest.approx(4 / 32, abs=0.1)
    assert "keeps everything at 1000 rows" in layers["mix"].note
    assert "groups=8" in layers["depthwise"].note
    assert "part of 'blocks.0.attn'" in layers["blocks.0.attn.out_proj"].note
    assert "subclass of nn.Linear" in layers["odd"].note
    assert layers["pool"].note == "not taken by sketch_"
    assert "blocks.0.norm" not in layers
    assert "groups=8" in str(sp.summary(model))


def test_summary_of_classes_that_nobody_knows():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Parameter(torch.zeros(4, 6, 5))
            self.bias = nn.Parameter(torch.zeros(4, 6))

    model = nn.Sequential(nn.Embedding(7, 5), Experts(), nn.Linear(5, 5))
    notes = [layer.note for layer in sp.summary(model).layers]
    assert notes[0] == "Embedding is not a class that sketch_ knows"
    assert "stacks of weights up" in notes[1]
    assert notes[2] == "not taken by sketch_"


@pytest.mark.parametrize("pattern", ["stem", "st*"])
def test_a_pattern_that_only_meets_refusals_is_an_error(pattern):
    model = Net()
    with pytest.raises(ValueError, match="'stem' cannot be sketched: SampleMask"):
        sp.sketch_(model, {"blocks.*": sp.L1(0.5), pattern: sp.SampleMask(0.5)})
    assert taken(model) == []


def test_a_wildcard_may_meet_layers_that_stay_exact():
    model = sp.sketch_(Net(), {"*": sp.SampleMask(0.5)})
    assert taken(model) == [n for n in ALL if n not in ("stem", "depthwise")]
    with pytest.raises(ValueError, match="groups=8"):
        sp.sketch_(Net(), {"depthwise": sp.L1(0.5), "*": sp.L1(0.5)})


def test_patterns_and_filters_together():
    model = sp.sketch_(Net(), {"blocks.0.*": sp.L1(0.5), "*": sp.L2(0.5)}, is_linear)
    assert taken(model) == LINEAR
    assert model.blocks[0].up.sketch == sp.L1(0.5)
    assert model.blocks[1].up.sketch == sp.L2(0.5)
    sp.sketch_(model, {"head": None})
    assert taken(model) == LINEAR[:-1]


def test_out_proj_is_not_a_layer_of_its_own():
    with pytest.raises(ValueError, match="near names"):
        sp.sketch_(Net(), {"blocks.0.attn.out_proj": sp.L1(0.5)})


def test_nothing_taken_says_why():
    with pytest.raises(ValueError, match="groups=4"):
        sp.sketch_(nn.Conv2d(4, 4, 3, groups=4), sp.L1(0.5))
    with pytest.raises(ValueError, match=r"nn\.Conv1d.*@sketchable"):
        sp.sketch_(nn.Embedding(3, 4), sp.L1(0.5))


class Scaled(nn.Module):
    """y = gain · x Wᵀ, with weight [d, n] as somebody might store it."""

    def __init__(self, d, n):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d, n))
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.gain * (x @ self.weight)


@sp.sketchable(Scaled)
class SketchedScaled(SketchedModule, Scaled):
    def forward(self, x):
        if not self.is_sketching():
            return super().forward(x)
        return self.gain * sp.sketched_linear(x, self.weight.mT, None, self.sketch)

    @classmethod
    def matrices(cls, layer):
        return (tuple(reversed(layer.weight.shape)),)


def test_layers_of_your_own():
    model = nn.Sequential(Scaled(6, 10), nn.ReLU(), nn.Linear(10, 3))
    plain = copy.deepcopy(model)
    sp.sketch_(model, sp.L1(0.3))
    assert type(model[0]) is SketchedScaled
    assert list(select.sketchable_layers(model)) == ["0", "2"]
    x = torch.randn(20, 6)
    assert torch.equal(model(x), plain(x))
    report = sp.check_unbiased(model, lambda m, x: m(x).square().mean(), x, draws=300)
    assert report.ok, report
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin[0]) is SketchedScaled
        assert twin[0].sketch == sp.L1(0.3)
    (layer, _) = sp.summary(model).layers
    assert (layer.kind, layer.kept) == ("SketchedScaled", 0.3)
    assert type(sp.unsketch_(model)[0]) is Scaled


def test_a_layer_can_say_which_sketches_it_takes():
    class Picky(nn.Linear):
        pass

    @sp.sketchable(Picky)
    class SketchedPicky(SketchedModule, Picky):
        @classmethod
        def left_exact(cls, layer, sketch):
            return "" if isinstance(sketch, sp.L2) else "only L2 will do"

    model = nn.Sequential(Picky(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    sp.sketch_(model, sp.L1(0.5))
    assert taken(model) == ["1"]
    assert sp.summary(model).layers[0].note == "only L2 will do"
    sp.sketch_(model, sp.L2(0.5))
    assert taken(model) == ["0", "1"]


def test_wrong_uses_of_sketchable():
    with pytest.raises(ValueError, match="Linear can be sketched already"):
        sp.sketchable(nn.Linear)
    with pytest.raises(TypeError, match="give the class of a layer"):
        sp.sketchable(nn.Linear(2, 2))

    class Mine(nn.Linear):
        pass

    with pytest.raises(TypeError, match="must be both"):

        @sp.sketchable(Mine)
        class NotSketched(Mine):
            pass

    with pytest.raises(TypeError, match="must come first"):

        @sp.sketchable(Mine)
        class WrongOrder(Mine, SketchedModule):
            pass

    assert sketched_class(Mine) is None
    for _ in range(2):  # as when a notebook cell is run again

        @sp.sketchable(Mine)
        class SketchedMine(SketchedModule, Mine):
            pass

    assert sketched_class(Mine) is SketchedMine


def test_a_class_made_on_top_of_a_sketched_one_keeps_its_own():
    """What fully_shard does: unsketch_ must not take away a class that it did not give."""
    layer = sp.sketch_(nn.Linear(8, 8), sp.L1(0.5), select.everything)
    layer.__class__ = type("ShardedLinear", (type(layer),), {})
    sp.sketch_(layer, sp.L1(0.25), select.everything)
    assert layer.sketch == sp.L1(0.25)
    with pytest.raises(TypeError, match=r"sketchprop\.exact"):
        sp.unsketch_(layer)
    assert type(layer).__name__ == "ShardedLinear"
