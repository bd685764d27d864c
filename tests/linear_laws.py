"""The ways to a layer's gradient that the tests of the fast path compare."""

import torch
import torch.nn.functional as F

import sketchprop as sp
from sketchprop.core.vjp import Vjp

B, N, D = 6, 5, 4
INPUTS = {1: (D,), 2: (B, D), 3: (2, 3, D), 4: (2, 1, 3, D)}
TOLERANCE = {
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
    torch.float32: 1e-4,
    torch.float64: 1e-10,
}


def leaf(t, *, grad=True):
    return t.detach().clone().requires_grad_(grad)


def parameters(dtype=torch.float64, stack=()):
    weight = torch.randn(*stack, N, D, dtype=dtype, requires_grad=True)
    bias = torch.randn(*stack, N, dtype=dtype, requires_grad=True)
    return weight, bias


def rows_of(t, stack=0):
    return t.reshape(*t.shape[:stack], -1, t.shape[-1])


def fast(x, weight, bias, sketch, G, uniforms, planner=None):
    y = sp.sketched_linear(x, weight, bias, sketch, uniforms=uniforms, planner=planner)
    return torch.autograd.grad(y, (x, weight, bias), G)


def gated(x, weight, bias, sketch, G, uniforms):
    y = sp.gate(F.linear(x, weight, bias), sketch, weight=weight, uniforms=uniforms)
    return torch.autograd.grad(y, (x, weight, bias), G)


def dense(x, weight, bias, sketch, G, uniforms, planner=None):
    """dX, dW, db from the dense Ĝ, in plain products."""
    with torch.no_grad():
        rows, X = rows_of(G), rows_of(x)
        if sketch.keeps_all(len(rows), *weight.shape):  # then no planner is asked
            planner, sketch = None, sp.ColumnMask(1.0, exact_bias=sketch.exact_bias)
        vjp = Vjp(rows, weight, X, sketch.samples_of(tuple(x.shape[:-1])))
        atoms = sketch.atoms(vjp) if planner is None else planner.atoms(sketch, vjp)
        G_hat = atoms.draw(vjp, uniforms).dense()
        return (
            (G_hat @ weight).view(x.shape),
            G_hat.mT @ X,
            (rows if sketch.exact_bias else G_hat).sum(0),
        )


def assert_same(first, second, tolerance=1e-10):
    for a, b in zip(first, second, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        scale = max(1.0, float(b.detach().abs().max()))
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * scale)


def saved_by(f):
    """What a pass saves for backward, and its result."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = f()
    return saved, out


def holds(saved, tensor):
    return any(t.data_ptr() == tensor.data_ptr() for t in saved)
