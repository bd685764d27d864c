"""Budget 1.0 is plain training, to the last bit, for a hundred steps in every integration."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import sketchprop as sp
from distributed_helpers import of, run_once
from sketchprop.distributed import sketch_stage_
from sketchprop.integrations.lightning import SketchCallback as LightningCallback
from sketchprop.integrations.transformers import SketchCallback as TransformersCallback
from sketchprop.sketches import ForwardRows
from sketchprop.zoo import ViT
from stack_helpers import batch as rows
from stack_helpers import equal, net

STEPS = 100
Train = Callable[[nn.Module], list[Tensor]]


def vit() -> ViT:
    torch.manual_seed(0)
    return ViT(8, 2, 1, 8, depth=1, heads=2, hidden=12, classes=4, dropout=0.1)


def everything(model: nn.Module) -> nn.Module:
    """Blocks on kept tokens, rows, columns and pairs, all of which keep all."""
    pair = sp.Split(input=sp.L1(1.0), weight=ForwardRows(1.0))
    return sp.sketch_(model, {"*blocks.*": sp.Tokens(1.0), "*head": sp.L1(1.0), "*embed": pair})


def pictures(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 1, 8, 8, generator=generator), torch.arange(4)


def state_of(model: nn.Module) -> list[Tensor]:
    found = [p.detach() for p in model.parameters()]
    return [p.full_tensor() if isinstance(p, DTensor) else p.clone() for p in found]


def train(
    model: nn.Module,
    *,
    wrap: Callable[[nn.Module], Callable[..., Any]] = lambda model: model,
    autocast: bool = False,
    accumulate: int = 1,
    shift: int = 0,
) -> list[Tensor]:
    """A plain loop; ``wrap`` makes of the model what is called."""
    called = wrap(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01)
    torch.manual_seed(5 + shift)
    for step in range(STEPS):
        for part in range(accumulate):
            x, y = pictures(step * accumulate + part + 1000 * shift)
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                loss = F.cross_entropy(called(x), y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model)


def accelerated(model: nn.Module) -> list[Tensor]:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(5)
    for step in range(STEPS):
        x, y = pictures(step)
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    AcceleratorState._reset_state(reset_partial_state=True)
    return state_of(accelerator.unwrap_model(model))


def adapted(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(3)
    config = LoraConfig(r=2, target_modules=["qkv", "mlp.0"], lora_dropout=0.1)
    return train(get_peft_model(model, config))


def checkpointed(model: nn.Module, *, reentrant: bool) -> list[Tensor]:
    def wrap(model: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)

    return train(model, wrap=wrap)


LOOPS: dict[str, Train] = {
    "plain loop": train,
    "autocast": partial(train, autocast=True),
    "accumulation": partial(train, accumulate=3),
    "checkpointing": partial(checkpointed, reentrant=False),
    "reentrant checkpointing": partial(checkpointed, reentrant=True),
    "accelerate": accelerated,
    "PEFT": adapted,
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_trains_bitwise_like_the_plain_model(name: str) -> None:
    plain = LOOPS[name](vit())
    found = LOOPS[name](everything(vit()))
    assert equal(plain, found)
    assert not equal(plain[1:2], state_of(vit())[1:2]) or name == "PEFT"
    assert all(bool(p.isfinite().all()) for p in plain)


def test_a_compiled_model_trains_bitwise_like_the_compiled_plain_one() -> None:
    def run(model: nn.Module) -> list[Tensor]:
        # Kernels are compared in test_stack_compile; what is traced need not be compiled here.
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for step in range(STEPS):
            x, y = rows(rows=8, seed=step)
            F.cross_entropy(compiled(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model)

    plain = run(net())
    assert equal(plain, run(sp.sketch_(net(), sp.L1(1.0), sp.select.everything)))
    assert not equal(plain, state_of(net()))


def test_transformers_trainer_trains_bitwise_like_the_plain_one(tmp_path: Path) -> None:
    def run(name: str, callbacks: list[Any]) -> list[Tensor]:
        torch.manual_seed(0)
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = BertForSequenceClassification(
            BertConfig(vocab_size=20, intermediate_size=12, max_position_embeddings=8, **sizes)
        )
        ids = torch.randint(0, 20, (40, 6), generator=torch.Generator().manual_seed(3))
        examples = [{"input_ids": row, "labels": row[0] % 2} for row in ids]
        settings = TrainingArguments(
            str(tmp_path / name), max_steps=STEPS, per_device_train_batch_size=4, use_cpu=True,
            learning_rate=0.01, save_strategy="no", report_to=[], disable_tqdm=True, seed=11,
        )  # fmt: skip
        Trainer(model, settings, train_dataset=examples, callbacks=callbacks).train()
        return state_of(model)

    plain = run("plain", [])
    assert equal(plain, run("tokens", [TransformersCallback(sp.Tokens(1.0))]))
    assert equal(plain, run("layers", [TransformersCallback(sp.L1(1.0))]))


def test_lightning_trains_bitwise_like_the_plain_trainer(tmp_path: Path) -> None:
    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = vit()

        def training_step(self, data: list[Tensor], index: int) -> Tensor:
            return F.cross_entropy(self.model(data[0]), data[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 0.01)

    def run(callbacks: list[Any]) -> list[Tensor]:
        model = Classifier()
        parts = [pictures(step) for step in range(10)]
        data = TensorDataset(*(torch.cat(each) for each in zip(*parts, strict=True)))
        trainer = pl.Trainer(
            max_steps=STEPS, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, callbacks=callbacks,
            default_root_dir=str(tmp_path),
        )  # fmt: skip
        torch.manual_seed(5)
        trainer.fit(model, DataLoader(data, batch_size=4))
        assert trainer.global_step == STEPS
        return state_of(model)

    plain = run([])
    assert equal(plain, run([LightningCallback(sp.Tokens(1.0))]))
    assert equal(plain, run([LightningCallback(sp.L1(1.0))]))


# --- two processes ---


def both(wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    rank = dist.get_rank()

    def run(model: nn.Module) -> list[Tensor]:
        return train(wrap(model), shift=rank)

    return {"plain": run(vit()), "found": run(everything(vit()))}


def ddp() -> dict[str, Any]:
    return both(DistributedDataParallel)


def fsdp() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))

    def wrap(model: nn.Module) -> nn.Module:
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return both(wrap)


def pipeline() -> dict[str, Any]:
    rank = dist.get_rank()
    one = sp.L1(1.0)

    def run(sketched: bool) -> list[Tensor]:
        whole = net()
        stage = whole[:3] if rank == 0 else whole[3:]
        device = torch.device("cpu")
        if sketched:
            sp.sketch_(stage, one, sp.select.everything)
        built = PipelineStage(stage, rank, 2, device)
        if sketched:
            sketch_stage_(built, one)
        schedule = Schedule1F1B(built, 2, loss_fn=F.cross_entropy)
        optimizer = torch.optim.AdamW(stage.parameters(), 0.01)
        for step in range(STEPS):
            x, y = rows(rows=8, seed=step)
            schedule.step(*((x,) if rank == 0 else ()), target=y if rank else None)
            optimizer.step()
            optimizer.zero_grad()
        return state_of(stage)

    return {"plain": run(False), "found": run(True)}


CASES = (ddp, fsdp, pipeline)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    return run_once(tmp_path_factory, request, "hundred-steps", 2, CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_processes_train_bitwise_like_the_plain_model(results: Any, case: Any) -> None:
    start = copy.deepcopy(state_of(vit()))
    for record in of(results, case):
        assert equal(record["plain"], record["found"])
        assert case is pipeline or not equal(record["plain"], start)
