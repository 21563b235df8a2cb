"""Training scripts as people write them, each without a word of rotor, for a device of any size.

Environment variables set the number of steps, and the bytes of a simulated card; without the latter
a script trains on the CPU. Each prints the bits of its losses.
"""

from __future__ import annotations

from collections.abc import Mapping

import children

__all__ = ["SCRIPTS", "environment"]

BEGIN = """
import os
import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
STEPS = int(os.environ.get("STEPS", "4"))
device = torch.device("cpu")
if "CARD" in os.environ:
    import accelerator
    from torch.optim.optimizer import register_optimizer_step_post_hook

    sim = accelerator.load()
    sim.set_capacity(int(os.environ["CARD"]))
    device = torch.device("sim", 0)

    def count(optimizer, *_):
        global counted
        gradients = [p.grad for g in optimizer.param_groups for p in g["params"]]
        counted = sim.memory_allocated() - sum(g.nbytes for g in gradients if g is not None)

    register_optimizer_step_post_hook(count)
ROWS = 16384 if "CARD" in os.environ else 65536
FEWER = min(ROWS, 32768)

"""

NET = """
class Net(nn.Module):
    def __init__(self, width=32, depth=8):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


model = Net().to(device)


def batch():
    return torch.randn(ROWS, 32).to(device)


"""

LOOP = """
for step in range(STEPS):
    optimizer.zero_grad()
    x = batch()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item().hex(), flush=True)
"""

EIGHT_BITS = """
class Adam8bit(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    for name in ("state1", "state2"):
                        state[name] = torch.zeros_like(p, dtype=torch.uint8)
                        state["scale" + name[-1]] = torch.zeros((), device=p.device)
                for name, new in (("state1", p.grad), ("state2", p.grad.square())):
                    scale = state["scale" + name[-1]]
                    shift = 128 if name == "state1" else 0
                    value = (state[name].float() - shift).mul_(scale).lerp_(new, 0.1)
                    scale.copy_(value.abs().amax() / (255 - shift - 0.5) + 1e-30)
                    state[name].copy_((value / scale + shift).round_().clamp_(0, 255))
                    if name == "state1":
                        first = value
                p.addcdiv_(first, value.clamp_(0).sqrt_().add_(1e-6), value=-group["lr"])


"""

FRAMEWORK = """
import contextlib

with contextlib.suppress(ModuleNotFoundError):
    from torchvision_standins import import_torchvision

    import_torchvision()

"""

TEXTS = """
from transformers import GPT2Config, GPT2LMHeadModel

config = GPT2Config(
    vocab_size=64, n_positions=128, n_embd=64, n_layer=6, n_head=4,
    resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, bos_token_id=1, eos_token_id=2,
    loss_type="ForCausalLM",
)
ROWS = FEWER // 512
texts = torch.randint(64, (ROWS * 40, 128))
"""

TRAINER = """
import tempfile
from transformers import Trainer, TrainerCallback, TrainingArguments

if device.type == "sim":
    from accelerate.state import PartialState

    PartialState.default_device = property(lambda self: device)
    TrainingArguments.device = property(lambda self: (self._setup_devices, device)[1])


class Shown(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print(float(logs["loss"]).hex(), flush=True)


def main():
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=ROWS, max_steps=STEPS,
        report_to=[], save_strategy="no", use_cpu=device.type == "cpu", logging_steps=1,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model, args=arguments, callbacks=[Shown()],
        train_dataset=[{"input_ids": line, "labels": line} for line in texts],
    )
    trainer.train()


main()
"""

LIGHTNING = """
import lightning
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, index):
        (x,) = batch
        loss = self.net(x).square().mean()
        print(loss.item().hex(), flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class AnyDevice(CPUAccelerator):
    def setup_device(self, device):
        pass


lit = Lit()
trainer = lightning.Trainer(
    max_steps=STEPS, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
    **({"accelerator": "cpu"} if device.type == "cpu" else {
        "strategy": SingleDeviceStrategy(device=device, accelerator=AnyDevice()),
    }),
)
data = [(torch.randn(ROWS, 32),) for _ in range(STEPS)]
trainer.fit(lit, torch.utils.data.DataLoader(data, batch_size=None))
"""

VISION = """
import argparse


class Attention(nn.Module):
    def __init__(self, dim, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, img_size=64, patch_size=8, embed_dim=64, depth=6, num_classes=10):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, embed_dim, patch_size, patch_size)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 65, embed_dim) * 0.02)
        self.blocks = nn.Sequential(*(Block(embed_dim) for _ in range(depth)))
        self.norm = nn.LayerNorm(embed_dim)
        self.head = nn.Linear(embed_dim, num_classes)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


def create_model(name, **kwargs):
    return {"vit_tiny": VisionTransformer}[name](**kwargs)


def train_one_epoch(model, loader, optimizer, loss_fn):
    model.train()
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        output = model(images)
        loss = loss_fn(output, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item().hex(), flush=True)


def main(args):
    model = create_model(args.model, num_classes=args.num_classes)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    drawn = torch.Generator().manual_seed(1)
    count = args.batch_size * STEPS
    images = torch.randn(count, 3, 64, 64, generator=drawn)
    labels = torch.arange(count) % args.num_classes
    data = torch.utils.data.TensorDataset(images, labels)
    loader = torch.utils.data.DataLoader(data, batch_size=args.batch_size)
    train_one_epoch(model, loader, optimizer, nn.CrossEntropyLoss(label_smoothing=0.1))


parser = argparse.ArgumentParser()
parser.add_argument("--model", default="vit_tiny")
parser.add_argument("--num-classes", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=FEWER // 128)
parser.add_argument("--lr", type=float, default=1e-3)
if __name__ == "__main__":
    main(parser.parse_args())
"""

END = """
import sys

if device.type == "cpu":
    print([line for line in open("/proc/self/status") if "VmPeak" in line][0], file=sys.stderr)
else:
    peak = torch.accelerator.memory_stats(device)["reserved_bytes.all.peak"]
    print("peak", peak, "counted", counted, file=sys.stderr)
"""


def _plain(optimizer: str, loop: str = LOOP) -> str:
    return f"{NET}optimizer = {optimizer}\n{loop}"


_BODIES = {
    "sgd": _plain("torch.optim.SGD(model.parameters(), 0.01)"),
    "momentum": _plain("torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)"),
    "adam": _plain("torch.optim.Adam(model.parameters())"),
    "adamw": _plain("torch.optim.AdamW(model.parameters())"),
    "8-bit": EIGHT_BITS + _plain("Adam8bit(model.parameters())"),
    "accumulation": _plain(
        "torch.optim.Adam(model.parameters())",
        """
for step in range(STEPS):
    x = batch()
    loss = model(x).square().mean()
    loss.backward()
    if step % 2:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    print(loss.item().hex(), flush=True)
""",
    ),
    "averages": _plain(
        "torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)",
        """
import copy

average = copy.deepcopy(model)
for step in range(STEPS):
    optimizer.zero_grad()
    x = batch()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for mine, other in zip(average.parameters(), model.parameters()):
            mine.lerp_(other, 0.1)
    print(loss.item().hex(), flush=True)
""",
    ),
    "clipped bf16": _plain(
        "torch.optim.AdamW(model.parameters())",
        """
ROWS *= 2 if device.type == "cpu" else 1
for step in range(STEPS):
    optimizer.zero_grad()
    x = batch()
    with torch.autocast(device.type, torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(loss.item().hex(), flush=True)
""",
    ),
    "trainer": FRAMEWORK + TEXTS + TRAINER,
    "transformers": FRAMEWORK
    + TEXTS
    + """
model = GPT2LMHeadModel(config).to(device).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    ids = texts[step * ROWS : (step + 1) * ROWS].to(device)
    loss = model(ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item().hex(), flush=True)
""",
    "lightning": FRAMEWORK + NET.partition("model = ")[0] + LIGHTNING,
    "vision": VISION,
}

SCRIPTS: Mapping[str, str] = {name: BEGIN + body + END for name, body in _BODIES.items()}
"""Texts of the scripts, by a name."""


def environment(steps: int, card_bytes: int | None = None) -> dict[str, str]:
    """Return the environment of a script that trains for some steps."""
    card = {} if card_bytes is None else {"CARD": str(card_bytes)}
    return children.environment(STEPS=str(steps), **card)
