"""Training loops of frameworks: Transformers, Accelerate, Lightning."""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

import torch
from gpt2_models import small_gpt2
from loops import Loop, case, drawn, words
from torchvision_standins import import_torchvision
from zoo.models import Gated

with contextlib.suppress(ModuleNotFoundError):
    # Transformers and Lightning import torchvision where it is there.
    import_torchvision()


def hugging_face(layers: int = 2) -> Any:
    """Return a small GPT-2."""
    return small_gpt2(layers, 64, 32)


def trained(loop: Loop, model: Any, callbacks: Any = (), **arguments: Any) -> Any:
    """Train with the Trainer of Transformers, and record its steps."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Recorder(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            loop.begin()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            loop.end()

    resume = arguments.pop("resume", None)
    collator, data = arguments.pop("collator", None), arguments.pop("data", None)
    folder = tempfile.mkdtemp()
    settings = {
        "output_dir": folder,
        "per_device_train_batch_size": 8,
        "max_steps": loop.steps,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 3,
        **arguments,
    }
    texts = [{"input_ids": line, "labels": line} for line in words(1, 64, 32)]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**settings),
        train_dataset=texts if data is None else data,
        eval_dataset=texts[:8],
        data_collator=collator,
        callbacks=[*callbacks, Recorder()],
    )
    trainer.train(resume_from_checkpoint=resume)
    loop.losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    loop.losses += [h["eval_loss"] for h in trainer.state.log_history if "eval_loss" in h]
    loop.parameters = [p.detach().clone() for p in trainer.model.parameters()]
    return trainer


HF = ("transformers", "accelerate")


@case("Transformers: own loop, cache of keys and values", needs=("transformers",))
def own_hugging_face(loop: Loop) -> None:
    """Train a causal model in a loop of one's own, with its default arguments."""
    model = loop.wrap(hugging_face().train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    texts = [(words(k, 8, 32),) for k in range(loop.steps)]
    loop.train(model, optimizer, texts.__getitem__, lambda ids: model(ids, labels=ids).loss)


@case("Trainer, wrapper", needs=HF, is_slow=True)
def trainer_wrapper(loop: Loop) -> None:
    """Train a wrapped model with the Trainer."""
    trained(loop, loop.wrap(hugging_face()))


@case("Trainer, callback", needs=HF, is_slow=True)
def trainer_callback(loop: Loop) -> None:
    """Train with the Trainer's callback."""
    from rotor.integrations.transformers import RotorCallback

    trained(loop, hugging_face(), loop.callback(RotorCallback))


@case("Trainer, batches padded to their longest", needs=HF, is_slow=True)
def trainer_padding(loop: Loop) -> None:
    """Train on texts of several lengths, padded batch by batch."""
    lines = words(1, 64, 32)
    lengths = 8 + 4 * words(2, 64, most=7)

    def padded(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(one["input_ids"]) for one in batch)
        ids = torch.full((len(batch), longest), 2)
        for row, one in zip(ids, batch, strict=True):
            row[: len(one["input_ids"])] = one["input_ids"]
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": (ids != 2).long()}

    data = [{"input_ids": line[:n]} for line, n in zip(lines, lengths.tolist(), strict=True)]
    extra = {"data": data, "collator": padded, "remove_unused_columns": False}
    trained(loop, loop.wrap(hugging_face()), **extra)


@case("Trainer, PEFT (LoRA)", needs=(*HF, "peft"), is_slow=True)
def trainer_peft(loop: Loop) -> None:
    """Train low-rank parts of a model with the Trainer."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    trained(loop, loop.wrap(get_peft_model(hugging_face(), config)), learning_rate=1e-2)


@case("Trainer, evaluation while training", needs=HF, is_slow=True)
def trainer_evaluation(loop: Loop) -> None:
    """Evaluate every other step."""
    trained(loop, loop.wrap(hugging_face()), eval_strategy="steps", eval_steps=2)


@case("Trainer, resumed from a checkpoint", needs=HF, is_slow=True)
def trainer_resumed(loop: Loop) -> None:
    """Train, and train on from a checkpoint in a new model."""
    saving = {"save_strategy": "steps", "save_steps": 3}
    first = Loop(loop.limit_bytes, dict(loop.options), 3)
    trainer = trained(first, first.wrap(hugging_face()), **saving)
    checkpoint = f"{trainer.args.output_dir}/checkpoint-3"
    trained(loop, loop.wrap(hugging_face()), resume=checkpoint)


@case("Accelerate", needs=("accelerate",))
def accelerated(loop: Loop) -> None:
    """Train with a prepared model, optimizer and loader."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = loop.wrap(Gated())
    optimizer = torch.optim.Adam(model.parameters())
    data = torch.utils.data.DataLoader([drawn(k, 64) for k in range(128 * loop.steps)], 128)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for x in data:
        optimizer.zero_grad()
        with loop.step():
            loss = model(x).square().mean()
            accelerator.backward(loss)
        optimizer.step()
        loop.done(loss)
    loop.parameters = list(accelerator.unwrap_model(model).parameters())


@case("Lightning", needs=("lightning",), is_slow=True)
def lightning(loop: Loop) -> None:
    """Train with Lightning's Trainer and the callback."""
    import lightning.pytorch as framework

    from rotor.integrations.lightning import RotorCallback

    class Module(framework.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Gated()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.net(batch).square().mean()
            loop.done(loss)
            return loss

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            # Lightning frees the old gradients between forward and backward.
            loop.begin(p.grad for p in self.parameters() if p.grad is not None)

        def on_after_backward(self) -> None:
            loop.end()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), lr=0.1)

    data = torch.utils.data.DataLoader([drawn(k, 64) for k in range(128 * loop.steps)], 128)
    module = Module()
    framework.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=loop.callback(RotorCallback),
    ).fit(module, data)
    loop.parameters = list(module.parameters())
