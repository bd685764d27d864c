"""One thread per worker, a fixed seed for each test, hypothesis without a clock."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("exact", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("exact")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
