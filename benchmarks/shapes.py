"""Fine-tuning with dynamic padding: another length in nearly every batch, within one limit.

Run as ``python benchmarks/shapes.py``. Models of Hugging Face, of random weights, train plainly and
under a limit on the same batches, in turn; lengths are drawn from a log-normal distribution, like
those of sentences. Times are CPU seconds of one thread: everything that the limit costs, captures
and planning included, against the plain steps.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

import rotor
from rotor import memory
from rotor.report.text import table

VOCABULARY = 2000
LEAST, MOST = 16, 256


def lengths(count: int, seed: int = 7) -> list[int]:
    """Lengths of the longest of a batch's sentences."""
    rng = random.Random(seed)
    drawn = [round(rng.lognormvariate(4.5, 0.55)) for _ in range(count)]
    return [min(max(length, LEAST), MOST) for length in drawn]


def bert(layers: int, width: int) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
    )
    return BertForSequenceClassification(config)


def gpt2(layers: int, width: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=width,
        n_layer=layers,
        n_head=4,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=1,
    )
    return GPT2LMHeadModel(config)


def batch_of(name: str, size: int, length: int, generator: torch.Generator) -> dict[str, Any]:
    """Sentences of at most this length, padded to it."""
    ids = torch.randint(0, VOCABULARY, (size, length), generator=generator)
    ends = torch.randint(length // 2, length + 1, (size, 1), generator=generator)
    ends[0] = length
    mask = (torch.arange(length)[None] < ends).long()
    if name == "bert":
        labels = torch.randint(0, 2, (size,), generator=generator)
    else:
        labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class Loop:
    """A model, its optimizer, and the CPU seconds of each of its steps."""

    def __init__(self, model: Any, parameters: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(parameters, lr=1e-3)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, batch: dict[str, Any], seed: int) -> None:
        """Train on a batch, with random numbers from a seed."""
        torch.manual_seed(seed)
        begun = time.process_time()
        self.optimizer.zero_grad()
        loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.process_time() - begun)
        self.losses.append(loss.item())


def peak_of(model: Any, batch: dict[str, Any]) -> int:
    """Bytes that a step has allocated at most, above its start."""
    model.zero_grad()
    with memory.meter("cpu") as meter:
        model(**batch).loss.backward()
    model.zero_grad()
    return meter.peak_bytes


def run(name: str, args: argparse.Namespace) -> list[str]:
    """Train one model plainly and under a limit; return the row of its figures."""
    torch.manual_seed(0)
    model = {"bert": bert, "gpt2": gpt2}[name](args.layers, args.width).train()
    copied = copy.deepcopy(model)
    plain = Loop(copied, copied.parameters())
    generator = torch.Generator().manual_seed(1)
    drawn = lengths(args.steps)
    largest = batch_of(name, args.batch, max(drawn), generator)
    limit = int(args.share * peak_of(copy.deepcopy(model), largest))
    wrapped = rotor.Checkpointable(model, mem_limit=limit, engine="graph", verbosity=-1)
    limited = Loop(wrapped, model.parameters())
    predicted = 0.0
    counters["stats"].clear()
    begun = time.process_time()
    for number, length in enumerate(drawn):
        batch = batch_of(name, args.batch, length, generator)
        plain.step(batch, number)
        limited.step(batch, number)
        predicted += plain.seconds[-1] * limited.model.program.slowdown
        if args.verbose:
            now = f"{number} length {length}: plain {plain.seconds[-1]:.3f} s, "
            print(now + f"limited {limited.seconds[-1]:.3f} s", flush=True)
    if args.verbose:
        print(f"{name}: {time.process_time() - begun:.0f} s of CPU time in all")
        print(limited.model.report())
    captured = counters["stats"]["unique_graphs"]
    first = {length: k for k, length in reversed(list(enumerate(drawn)))}
    captures = sorted(first.values())[:2]
    later = [k for k in first.values() if k not in captures]
    seen = [k for k in range(len(drawn)) if k not in captures]
    steady = [k for k in seen if k not in later]
    peaks = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for length in sorted(first):
            peaks.append(peak_of(limited.model, batch_of(name, args.batch, length, generator)))

    def ratio(steps: list[int]) -> str:
        ours = sum(limited.seconds[k] for k in steps)
        theirs = sum(plain.seconds[k] for k in steps)
        return f"{ours / theirs:.3f}" if theirs else "-"

    return [
        name,
        str(len(first)),
        str(captured),
        ratio(list(range(len(drawn)))),
        ratio(seen),
        ratio(later),
        ratio(steady),
        f"{predicted / sum(plain.seconds):.3f}",
        " ".join(f"{limited.seconds[k]:.1f}" for k in captures),
        f"{max(peaks) / limit:.3f}",
        "equal" if limited.losses == plain.losses else "differ",
    ]


class Batches(torch.utils.data.IterableDataset):
    """Batches of drawn lengths, whole: the Trainer pads nothing."""

    def __init__(self, name: str, size: int, drawn: list[int]) -> None:
        self.name, self.size, self.drawn = name, size, drawn

    def __iter__(self) -> Iterator[dict[str, Any]]:
        generator = torch.Generator().manual_seed(1)
        for length in self.drawn:
            yield batch_of(self.name, self.size, length, generator)


def run_trainer(name: str, args: argparse.Namespace) -> list[str]:
    """Train by the Trainer of Transformers, plainly and under a limit; return a row of figures."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from rotor.integrations.transformers import RotorCallback

    class Clock(TrainerCallback):
        """CPU seconds of each step."""

        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begun = time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.process_time() - self.begun)

    torch.manual_seed(0)
    model = {"bert": bert, "gpt2": gpt2}[name](args.layers, args.width).train()
    drawn = lengths(args.steps)
    generator = torch.Generator().manual_seed(2)
    largest = batch_of(name, args.batch, max(drawn), generator)
    limit = int(args.share * peak_of(copy.deepcopy(model), largest))
    clocks, losses, given = [], [], RotorCallback(mem_limit=limit, engine="graph")
    for callbacks in ([], [given]):
        clock = Clock()
        with tempfile.TemporaryDirectory() as directory:
            trainer = Trainer(
                copy.deepcopy(model),
                TrainingArguments(
                    directory,
                    max_steps=len(drawn),
                    per_device_train_batch_size=1,
                    logging_steps=1,
                    save_strategy="no",
                    report_to=[],
                    use_cpu=True,
                    disable_tqdm=True,
                    optim="sgd",
                    seed=0,
                ),
                train_dataset=Batches(name, args.batch, drawn),
                data_collator=lambda batches: batches[0],
                callbacks=[clock, *callbacks],
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        clocks.append(clock.seconds)
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    plain, limited = clocks
    first = {length: k for k, length in reversed(list(enumerate(drawn)))}
    captures = set(sorted(first.values())[:2])
    seen = [k for k in range(len(drawn)) if k not in captures]
    predicted = max(plan.predicted_bytes for plan in given.model.plans.values())
    return [
        name,
        str(len(first)),
        f"{sum(limited) / sum(plain):.3f}",
        f"{sum(limited[k] for k in seen) / sum(plain[k] for k in seen):.3f}",
        " ".join(f"{limited[k]:.1f}" for k in sorted(captures)),
        f"{predicted / limit:.3f}",
        "equal" if losses[0] == losses[1] else "differ",
    ]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["bert", "gpt2"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--share", type=float, default=0.6, help="limit / largest plain peak")
    parser.add_argument("--trainer", action="store_true", help="train by Transformers' Trainer")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit("install transformers: pip install transformers")
    from transformers import logging as messages

    messages.set_verbosity_error()
    torch.set_num_threads(1)
    if args.trainer:
        head = ["Trainer", "lengths", "total / plain", "without captures", "captures, s"]
        rows = [[*head, "plan / limit", "losses"]]
        rows += [run_trainer(name, args) for name in ("bert", "gpt2") if args.only in (None, name)]
        print(table(rows))
        return
    rows = [
        [
            "model",
            "lengths",
            "captures",
            "total / plain",
            "without captures",
            "new shapes",
            "known shapes",
            "plans' own",
            "captures, s",
            "peak / limit",
            "losses",
        ]
    ]
    rows += [run(name, args) for name in ("bert", "gpt2") if args.only in (None, name)]
    print(table(rows))


if __name__ == "__main__":
    # A torchvision of another build than PyTorch's would keep transformers from loading.
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
    main()
