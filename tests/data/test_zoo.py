"""Models of the paper's larger study, against what was published about them."""

import pytest
import torch
from torch import nn

from sketchprop import zoo

PUBLISHED = 16_213_032
"""Parameters of the published BagNet-17 with 1000 classes."""


def count(model):
    return sum(p.numel() for p in model.parameters())


def seen(model, size):
    """The rectangle of pixels that one output position depends on, by autograd."""
    model.eval()
    x = torch.randn(1, 3, size, size, requires_grad=True)
    features = model.stages(model.norm(model.conv(model.project(x))).relu())
    middle = features.shape[-1] // 2
    features[0, :, middle, middle].sum().backward()
    touched = x.grad[0].abs().sum(0) > 0
    return int(touched.any(1).sum()), int(touched.any(0).sum())


def test_bagnet_has_the_published_number_of_parameters():
    with torch.device("meta"):
        assert count(zoo.BagNet(classes=1000)) == PUBLISHED
        features = 4 * 64 * 8
        assert count(zoo.BagNet()) == PUBLISHED - 990 * (features + 1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"width": 8, "blocks": (1, 1, 1, 1)},
        {"width": 4, "blocks": (2, 1, 2, 1)},
    ],
)
def test_bagnet_sees_seventeen_pixels(options):
    torch.manual_seed(0)
    assert seen(zoo.BagNet(**options), 64 if options else 40) == (17, 17)


def test_bagnet_is_mostly_linear_layers_over_channels():
    with torch.device("meta"):
        model = zoo.BagNet()
    kernels = [m.kernel_size[0] for m in model.modules() if isinstance(m, nn.Conv2d)]
    # 16 blocks of three and 4 shortcuts, and two in the stem: as in the published model.
    assert (kernels.count(1), kernels.count(3)) == (50, 4)
    assert kernels[:2] == [1, 3]


def test_bagnet_takes_pictures_of_cifar():
    model = zoo.BagNet(width=4)
    x = torch.randn(2, 3, 32, 32)
    assert model(x).shape == (2, 10)
    assert model.stages(model.conv(model.project(x))).shape == (2, 128, 2, 2)


def test_a_convolution_starts_as_published():
    """Normal with variance 2 over the fan-out; over 2·10⁶ draws within 5 standard errors."""
    torch.manual_seed(0)
    weight = zoo.BagNet(width=32).stages[3][0].shortcut[0].weight.detach()
    error = 5 / (2 * weight.numel()) ** 0.5
    assert abs(float(weight.std()) / (2 / weight.shape[0]) ** 0.5 - 1) < error


def test_the_vit_of_the_paper():
    """Patch 4, dimension 192, MLP 1024, depth 9: weights and biases counted by hand."""
    with torch.device("meta"):
        model = zoo.ViT(dim=192, depth=9, heads=12, hidden=1024, dropout=0.1)
    block = 2 * 2 * 192 + (193 * 576) + (193 * 192) + (193 * 1024) + (1025 * 192)
    assert count(model) == (49 * 192) + 64 * 192 + 9 * block + 2 * 192 + 193 * 10
    assert [m.p for m in model.blocks[0].modules() if isinstance(m, nn.Dropout)] == [0.1, 0.1]
