"""Lightning's Trainer under a limit: the same training, in fewer bytes."""

from __future__ import annotations

import contextlib
import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision_standins import import_torchvision
from zoo.models import Gated, chain

import rotor
from rotor import memory

with contextlib.suppress(ModuleNotFoundError):
    # Lightning's metrics import torchvision where it is there.
    import_torchvision()
lightning = pytest.importorskip("lightning.pytorch")

from rotor.integrations.lightning import RotorCallback  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*num_workers.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*treespec.*:UserWarning"),
]

LIMIT = 600_000


class Module(lightning.LightningModule):
    def __init__(self, kind=Gated, *, other: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = kind()
        if other:
            self.head = nn.Linear(64, 64)
        self.losses: list[float] = []
        self.peaks: list[int] = []
        self.validated: list[float] = []
        self.is_metered = False

    def forward(self, x):
        y = self.net(x)
        return self.head(y) if hasattr(self, "head") else y

    def training_step(self, batch, index):
        loss = self(batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        assert not self.net.training
        self.validated.append(self(batch[0]).sum().item())

    def on_train_batch_start(self, batch, index):
        # The last steps are metered here: those before by rotor itself.
        if self.is_metered and index >= 3:
            # Lightning frees the old gradients between forward and backward.
            old = [p.grad for p in self.parameters() if p.grad is not None]
            self.meter = memory.meter("cpu", existing=old).start()

    def on_after_backward(self):
        if self.is_metered and hasattr(self, "meter"):
            self.meter.stop()
            self.peaks.append(self.meter.peak_bytes)
            del self.meter

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(count: int = 5) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(
        TensorDataset(torch.randn(256 * count, 64, generator=generator)), batch_size=256
    )


def fit(module, *callbacks, kind=lightning.Trainer, resume=None, folder=None, **arguments):
    settings = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **arguments,
    }
    torch.manual_seed(2)
    trainer = kind(callbacks=list(callbacks), **settings)
    trainer.fit(module, loader(), loader(1), ckpt_path=resume)
    return trainer


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


class Scheduled(Module):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Two(Module):
    def configure_optimizers(self):
        parts = list(self.parameters())
        return [torch.optim.SGD(parts[:1]), torch.optim.SGD(parts[1:])]


def test_the_optimizer_of_a_module_is_in_a_second_tier(tmp_path):
    plain, module, resumed = Scheduled(), Scheduled(), Scheduled()
    fit(plain)
    settings = {"effort": "fast", "offload": "disk", "offload_state": True}
    saving = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    limit = RotorCallback(2_000_000, **settings)
    trainer = fit(module, limit, **saving)
    assert limit.model.homes["states"] == 2 * limit.model.homes["gradients"] > 0
    assert module.losses == plain.losses
    saving |= {"resume": trainer.checkpoint_callback.best_model_path, "max_epochs": 2}
    fit(plain, **saving)
    fit(resumed, RotorCallback(2_000_000, **settings), **saving)
    assert len(resumed.losses) == 5
    assert resumed.losses == plain.losses[5:]
    assert same_weights(plain, resumed)
    two = Two()
    two.automatic_optimization = False
    with pytest.raises(ValueError, match="gave 2 optimizers, and offload_state=True is for one"):
        fit(two, RotorCallback(2_000_000, **settings))


@pytest.mark.parametrize("kind", [Gated, chain])
def test_training_is_the_same_in_fewer_bytes(kind):
    plain, module = Module(kind), Module(kind)
    names = list(vars(module.net))
    limit = RotorCallback(LIMIT)
    plain.is_metered = module.is_metered = True
    fit(plain)
    fit(module, limit)
    assert plain.losses == module.losses
    assert plain.validated == module.validated
    assert len(plain.validated) > 0
    assert same_weights(plain, module)
    assert max(module.peaks) <= LIMIT < max(plain.peaks)
    assert limit.model.plan.measured_bytes <= LIMIT
    assert "limit" in limit.report()
    assert list(vars(module.net)) == names
    assert list(module.state_dict()) == list(plain.state_dict())


def test_accumulation_and_bf16():
    plain, module = Module(chain), Module(chain)
    limit = RotorCallback(LIMIT)
    for candidate, callbacks in ((plain, []), (module, [limit])):
        fit(candidate, *callbacks, accumulate_grad_batches=2, precision="bf16-mixed")
    assert plain.losses == module.losses
    assert same_weights(plain, module)
    assert limit.model.plan.measured_bytes <= LIMIT


def test_checkpoints_are_those_of_the_plain_module(tmp_path):
    plain, module, resumed = Module(chain), Module(chain), Module(chain)
    fit(plain, max_epochs=2)
    trainer = fit(module, RotorCallback(LIMIT))
    path = tmp_path / "first.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=False)["state_dict"]
    assert list(saved) == list(plain.state_dict())
    fit(resumed, RotorCallback(LIMIT), resume=path, max_epochs=2)
    # Dropout draws other numbers after a restart, with a limit and without.
    again = Module(chain)
    fit(again, resume=path, max_epochs=2)
    assert resumed.losses == again.losses
    assert same_weights(resumed, again)


@pytest.mark.filterwarnings("ignore:the limit of .* was not kept in a first step")
def test_the_module_is_chosen_by_name():
    with pytest.raises(ValueError, match="'net', 'head'"):
        fit(Module(chain, other=True), RotorCallback(LIMIT))
    with pytest.raises(ValueError, match="nothing_such"):
        fit(Module(chain), RotorCallback(LIMIT, module="nothing_such"))
    plain, module, whole = Module(chain, other=True), Module(chain, other=True), Module()
    limit, all_of_it = RotorCallback(LIMIT, module="net"), RotorCallback("2 MB", module="")
    fit(plain)
    fit(module, limit)
    assert same_weights(plain, module)
    assert limit.model.module is module.net
    fit(whole, all_of_it)
    assert all_of_it.model.module is whole
    usual = Module()
    fit(usual)
    assert same_weights(usual, whole)


def test_a_module_that_is_never_called_is_told():
    class Elsewhere(Module):
        def forward(self, x):
            return self.net[0](x)

    with pytest.warns(rotor.MemoryLimitWarning, match=r"never called self\.net, so"):
        fit(Elsewhere(chain), RotorCallback(LIMIT), limit_train_batches=1)


def test_the_plain_module_is_back_after_an_error():
    module = Module(chain)
    limit = RotorCallback(1)
    with pytest.raises(ValueError, match="give this callback to a Trainer"):
        limit.report()
    with pytest.raises(rotor.InfeasibleError):
        fit(module, limit)
    assert "forward" not in vars(module.net)


class Returns(nn.Module):
    """Computes the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Gated()

    def forward(self, x):
        y = self.net(x)
        return y.square().mean(), y


class OfTuples(Module):
    def forward(self, x):
        return self.net(x)[0]


def test_a_loss_inside_of_the_module_is_planned():
    plain, module = OfTuples(Returns), OfTuples(Returns)
    limit = RotorCallback(LIMIT, all_gradients=False)
    fit(plain)
    fit(module, limit)
    assert plain.losses == module.losses
    assert same_weights(plain, module)
    plan = limit.model.plan
    assert plan.measured_bytes <= LIMIT
    assert plan.meterings == 1
    assert plan.step.loss_captured


def test_sharding_strategies_are_refused():
    strategies = lightning.strategies

    class MadeOfOne(strategies.FSDPStrategy):
        pass

    # DeepSpeed's wants its package when it is made.
    deepspeed = object.__new__(strategies.DeepSpeedStrategy)
    found = strategies.FSDPStrategy(), strategies.ModelParallelStrategy(), MadeOfOne(), deepspeed
    for strategy in found:
        module = Module()
        with pytest.raises(ValueError, match=f"does not go with {type(strategy).__name__}, which"):
            RotorCallback(LIMIT).on_fit_start(SimpleNamespace(strategy=strategy), module)
        assert "forward" not in vars(module.net)


def test_either_name_of_the_package():
    old = pytest.importorskip("pytorch_lightning")

    class Other(old.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = chain()

        def training_step(self, batch, index):
            return self.net(batch[0]).square().mean()

        def validation_step(self, batch, index):
            assert not self.net.training

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    limit = RotorCallback(LIMIT)
    fit(Other(), limit, kind=old.Trainer)
    assert limit.model.plan.measured_bytes <= LIMIT


def test_without_lightning_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "rotor.integrations.lightning")
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install lightning"):
        importlib.import_module("rotor.integrations.lightning")
