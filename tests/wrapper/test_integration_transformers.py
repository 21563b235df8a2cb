"""The Trainer of Transformers under a limit: the same training, in fewer bytes."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import pickle
import sys
from pathlib import Path

import pytest
import torch
from gpt2_models import small_gpt2
from torch import nn
from torchvision_standins import import_torchvision

import rotor
from rotor import memory

with contextlib.suppress(ModuleNotFoundError):
    # Transformers imports torchvision where it is there.
    import_torchvision()
pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from rotor.integrations.transformers import RotorCallback  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]

LIMIT = 800_000
WORDS, LENGTH = 120, 32


def make_model(layers: int = 1) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return small_gpt2(layers, WORDS, LENGTH)


def texts(count: int = 64) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(WORDS, (count, LENGTH), generator=generator)
    return [{"input_ids": line, "labels": line} for line in ids]


class Metered(TrainerCallback):
    """Meters the last training step, optimizer not included."""

    def __init__(self, last: int) -> None:
        self.last, self.peak_bytes = last, 0

    def on_init_end(self, args, state, control, **_):
        self.meter = None

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.last - 1:
            self.meter = memory.meter("cpu").start()

    def on_pre_optimizer_step(self, args, state, control, **_):
        if self.meter is not None:
            self.meter.stop()
            self.peak_bytes, self.meter = self.meter.peak_bytes, None


def train(model, folder: Path, *callbacks, steps=2, resume=None, kind=Trainer, **arguments):
    settings = {
        "per_device_train_batch_size": 8,
        "max_steps": steps,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 3,
        **arguments,
    }
    loss = settings.pop("compute_loss_func", None)
    trainer = kind(
        model=model,
        args=TrainingArguments(output_dir=str(folder), **settings),
        train_dataset=texts(),
        eval_dataset=texts(8),
        callbacks=list(callbacks),
        compute_loss_func=loss,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_training_is_the_same_in_fewer_bytes(tmp_path):
    plain, model = make_model(), make_model()
    usual = Metered(4)
    arguments = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    saving = {"save_strategy": "steps", "save_steps": 2}
    first = train(plain, tmp_path / "plain", usual, steps=4, **arguments)
    limit, metered = RotorCallback(LIMIT, effort="fast"), Metered(4)
    second = train(model, tmp_path / "rotor", limit, metered, steps=4, **arguments, **saving)

    assert losses(first) == losses(second)
    evaluated = [
        [h["eval_loss"] for h in t.state.log_history if "eval_loss" in h] for t in (first, second)
    ]
    assert len(evaluated[0]) == 2
    assert evaluated[0] == evaluated[1]
    assert same_weights(plain, model)

    # With accumulation a step of the Trainer is two of ours; gradients stay in between.
    gradients = sum(p.nbytes for p in model.parameters())
    assert 0 < metered.peak_bytes <= LIMIT + gradients < usual.peak_bytes
    plans = limit.model.plans.values()
    assert all(plan.measured_bytes <= LIMIT for plan in plans)
    assert all(plan.meterings == 1 and plan.recomputed > 0 for plan in plans)
    assert "limit" in limit.report()

    # The model is what it was: a class, its keys, its methods.
    assert "forward" not in vars(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.save_pretrained(tmp_path / "saved")
    assert same_weights(GPT2LMHeadModel.from_pretrained(tmp_path / "saved"), plain)

    # Resumed from the checkpoint of step 2, it ends where it ended.
    resumed = make_model()
    again = RotorCallback(LIMIT, effort="fast")
    checkpoint = tmp_path / "rotor" / "checkpoint-2"
    train(resumed, tmp_path / "again", again, steps=4, resume=str(checkpoint), **arguments)
    assert same_weights(resumed, plain)


def test_bf16_and_generation(tmp_path):
    class Generates(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_):
            was, model_ = model.training, model.eval()
            found.append(model_.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=3))
            model.train(was)

    plain, model = make_model(), make_model()
    limit, ids = RotorCallback(LIMIT, effort="fast"), []
    for candidate, callbacks in ((plain, []), (model, [limit])):
        found = []
        trainer = train(candidate, tmp_path, *callbacks, Generates(), bf16=True)
        ids.append((losses(trainer), found))
    assert ids[0][0] == pytest.approx(ids[1][0], rel=1e-3)
    assert [one.shape for one in ids[0][1]] == [one.shape for one in ids[1][1]]
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.allclose(p, q, atol=3e-4)
    assert limit.model.plan.measured_bytes <= LIMIT
    assert not limit._planned.active


class FromLogits(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss + outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


def test_losses_of_ones_own(tmp_path):
    plain, model = make_model(), make_model()
    limit = RotorCallback("1 MB", all_gradients=True, effort="fast")
    assert losses(train(plain, tmp_path, kind=FromLogits)) == losses(
        train(model, tmp_path, limit, kind=FromLogits)
    )
    assert same_weights(plain, model)

    def outside(outputs, labels, num_items_in_batch=None):
        return nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())

    # The Trainer keeps the labels for itself, so the model returns no loss.
    plain, model = make_model(), make_model()
    limit = RotorCallback("1 MB", effort="fast")
    train(plain, tmp_path, compute_loss_func=outside)
    train(model, tmp_path, limit, compute_loss_func=outside)
    assert same_weights(plain, model)
    assert limit.model.plan.measured_bytes <= 1_000_000


def test_the_optimizer_of_a_trainer_is_in_a_second_tier(tmp_path):
    """Steps, schedule, checkpoints and what is resumed from them are those of plain training."""
    plain, model, resumed = make_model(), make_model(), make_model()
    saving = {"save_strategy": "steps", "save_steps": 1}
    first = train(plain, tmp_path / "plain", **saving)
    settings = {"effort": "fast", "offload": "disk", "offload_state": True}
    limit = RotorCallback(2_000_000, **settings)
    second = train(model, tmp_path / "rotor", limit, **saving)
    assert losses(first) == losses(second)
    assert limit.model.homes["states"] == 2 * limit.model.homes["gradients"] > 0
    assert same_weights(plain, model)
    saved = GPT2LMHeadModel.from_pretrained(tmp_path / "rotor" / "checkpoint-2")
    assert same_weights(saved, plain)
    begun = str(tmp_path / "rotor" / "checkpoint-1")
    train(resumed, tmp_path / "resumed", RotorCallback(2_000_000, **settings), resume=begun)
    assert same_weights(resumed, plain)
    # A further training with an optimizer of its own.
    for trainer, net in ((first, plain), (second, model)):
        trainer.optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        trainer.lr_scheduler = None
        torch.manual_seed(0)
        trainer.train()
    assert losses(first) == losses(second)
    assert same_weights(plain, model)
    assert limit.model.homes["states"] == limit.model.homes["gradients"] > 0


@pytest.mark.parametrize("arguments, message", [({"torch_compile": True}, 'backend="inductor"')])
def test_arguments_that_do_not_go_with_a_limit(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        train(make_model(), tmp_path, RotorCallback(LIMIT), **arguments)


def arguments_of(**changes):
    args = TrainingArguments(output_dir="unused", use_cpu=True, report_to=[])
    vars(args).update(changes)
    return args


def refused(model, message, args):
    limit = RotorCallback(LIMIT)
    with pytest.raises(ValueError, match=message):
        limit.on_init_end(args, None, None, model=model)
    assert limit.model is None
    assert "forward" not in vars(model)


def test_what_needs_other_machines_is_refused():
    refused(make_model(), r"2 GPUs in one process \(DataParallel\)", arguments_of(_n_gpu=2))
    refused(make_model(), "deepspeed, in the arguments", arguments_of(deepspeed={"bf16": {}}))
    model = make_model()
    model.transformer.wte.to("meta")
    refused(model, "cut over devices", arguments_of())


@pytest.mark.parametrize("plugin", ["fsdp", "deepspeed", "dynamo"])
def test_what_the_launcher_of_accelerate_brings_is_refused(plugin, monkeypatch):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin

    args = arguments_of()
    Accelerator(cpu=True)
    shared, model = AcceleratorState._shared_state, make_model()
    limit = RotorCallback(LIMIT)
    limit.on_init_end(args, None, None, model=model)
    limit.on_train_end(args, TrainerState(), None)
    if plugin == "fsdp":
        # On the CPU alone Accelerate leaves it out.
        monkeypatch.setitem(shared, "fsdp_plugin", FullyShardedDataParallelPlugin(fsdp_version=1))
        refused(model, "or in Accelerate's configuration, has flat parameters", args)
    elif plugin == "deepspeed":
        # Its plugin needs the package.
        monkeypatch.setitem(shared, "deepspeed_plugins", {"default": object()})
        refused(model, "or in Accelerate's configuration, has an engine", args)
    else:
        monkeypatch.setitem(shared, "dynamo_plugin", TorchDynamoPlugin(backend="inductor"))
        refused(model, "torch_compile=True", args)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_model_that_checkpoints_by_itself_is_told(tmp_path, is_wrapped):
    plain, model = make_model(), make_model()
    train(plain, tmp_path)
    limited = rotor.Checkpointable(model, mem_limit="1 MB") if is_wrapped else model
    limits = [] if is_wrapped else [RotorCallback("1 MB")]
    with pytest.warns(rotor.MemoryLimitWarning, match="gradient checkpointing is on"):
        train(limited, tmp_path, *limits, gradient_checkpointing=True)
    assert same_weights(plain, model)


def test_a_wrapped_model_is_trained_evaluated_saved_and_resumed(tmp_path):
    plain, model = make_model(), make_model()
    wrapped = rotor.Checkpointable(model, mem_limit="1 MB", effort="fast")
    arguments = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "steps": 4}
    first = train(plain, tmp_path / "plain", save_steps=2, **arguments)
    metered = Metered(4)
    second = train(wrapped, tmp_path / "rotor", metered, save_steps=2, **arguments)
    assert wrapped.plan.predicted_bytes <= 1_000_000
    assert metered.peak_bytes <= 1_000_000
    assert losses(first) == losses(second)
    assert same_weights(plain, model)
    assert second.label_names == ["labels"]
    assert first.evaluate()["eval_loss"] == second.evaluate()["eval_loss"]
    expected, found = (trainer.predict(texts(8)).predictions for trainer in (first, second))
    assert found.shape == (8, LENGTH, WORDS)
    assert (expected == found).all()
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "rotor" / "checkpoint-4")
    assert same_weights(loaded, model)
    tokens = texts(1)[0]["input_ids"][None, :4]
    generated = [m.generate(tokens, max_new_tokens=3, do_sample=False) for m in (plain, wrapped)]
    assert torch.equal(*generated)
    other = rotor.Checkpointable(make_model(), mem_limit="1 MB", effort="fast")
    checkpoint = str(tmp_path / "rotor" / "checkpoint-2")
    train(other, tmp_path / "resumed", steps=4, resume=checkpoint)
    assert same_weights(plain, other)


def test_columns_that_the_model_does_not_take_are_left_out(tmp_path):
    wrapped = rotor.Checkpointable(make_model(), mem_limit="1 MB", effort="fast")
    assert inspect.signature(wrapped.forward) == inspect.signature(wrapped.module.forward)
    data = [{**line, "source": "a page"} for line in texts(16)]
    trainer = Trainer(
        model=wrapped,
        args=TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], max_steps=1),
        train_dataset=data,
    )
    trainer.train()
    assert wrapped.plan is not None


def test_a_wrapped_model_passes_for_its_class_and_is_copied():
    wrapped = rotor.Checkpointable(make_model(), mem_limit="1 MB")
    copies = [copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))]
    for model in (wrapped, *copies):
        assert isinstance(model, GPT2LMHeadModel)
        assert isinstance(model, rotor.Checkpointable)
        assert type(model) is rotor.Checkpointable
        assert same_weights(model, wrapped)


def test_the_callback_comes_before_mixed_precision(tmp_path):
    def made(limit, **arguments):
        trainer = Trainer(
            model=make_model(),
            args=TrainingArguments(
                output_dir=str(tmp_path), use_cpu=True, report_to=[], max_steps=1, **arguments
            ),
            train_dataset=texts(),
        )
        trainer.add_callback(limit)
        return trainer

    with pytest.raises(RuntimeError, match=r"Trainer\(callbacks=\[...\]\)"):
        made(RotorCallback(LIMIT), bf16=True).train()
    limit = RotorCallback(LIMIT, effort="fast")
    with pytest.raises(ValueError, match="give this callback to a Trainer"):
        limit.report()
    made(limit, disable_tqdm=True).train()
    assert limit.model.plan.measured_bytes <= LIMIT


def test_wrong_limits_are_told_when_the_trainer_is_made(tmp_path):
    with pytest.raises(ValueError, match="a lot"):
        train(make_model(), tmp_path, RotorCallback("a lot"))


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "rotor.integrations.transformers")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install transformers accelerate"):
        importlib.import_module("rotor.integrations.transformers")
