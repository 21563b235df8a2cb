"""Training on the simulated accelerator, plain and under a limit, by the device's own counters."""

import copy

import torch

import rotor


def batches(count=3, rows=512, width=128):
    """Return seeded batches."""
    torch.manual_seed(0)
    return [torch.randn(rows, width, device="sim") for _ in range(count)]


def distance(output, target):
    return (output - target).square().mean()


def one_step(model, batch, inside, autocast=None):
    """Return the loss of a step; a wrapped model computes it itself if `inside`."""
    with torch.autocast("sim", dtype=autocast, enabled=autocast is not None):
        target = torch.tensor(0.5, device="sim")
        if inside and isinstance(model, rotor.Checkpointable):
            loss = model(batch, targets=(target,))
        else:
            loss = distance(model(batch), target)
    loss.backward()
    return loss.detach()


class Trained:
    """Losses, gradients and peaks (above the level before each step) of a number of steps."""

    def __init__(self, sim, model, batches, *, inside=False, accumulate=1, autocast=None):
        self.losses, self.gradients, self.peaks = [], [], []
        torch.manual_seed(2)
        for number, batch in enumerate(batches):
            if number % accumulate == 0:
                model.zero_grad()
            level = sim.memory_allocated()
            sim.reset_peak_memory_stats()
            loss = one_step(model, batch, inside, autocast)
            self.peaks.append(sim.max_memory_allocated() - level)
            self.losses.append(loss.cpu())
            del loss
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            self.gradients.append([grad.cpu() for grad in grads])
            del grads
        self.state = [value.cpu() for value in model.state_dict().values()]
        model.zero_grad()


def assert_equal(one, other):
    """Assert that two trainings have the same bits."""
    for name in ("losses", "state"):
        for a, b in zip(getattr(one, name), getattr(other, name), strict=True):
            assert torch.equal(a, b), name
    for grads in zip(one.gradients, other.gradients, strict=True):
        for a, b in zip(*grads, strict=True):
            assert torch.equal(a, b), "gradients"


def compared(sim, make, batches, share, *, engine, inside=False, settings=None, **options):
    """Return the limit, plain training's figures and ours, which are asserted to be equal."""
    torch.manual_seed(1)
    plain = make().to("sim")
    model = copy.deepcopy(plain)
    expected = Trained(sim, plain, batches, **options)
    del plain
    limit = int(max(expected.peaks) * share)
    settings = dict(settings or {})
    if inside:
        settings["loss_fn"] = distance
    wrapped = rotor.Checkpointable(model, mem_limit=limit, engine=engine, **settings)
    if engine != "dynamic" and "autocast" not in options:
        # Measuring has a bound of its own.
        targets = {"targets": (torch.tensor(0.5, device="sim"),)} if inside else {}
        wrapped.measure(batches[0], **targets)
    found = Trained(sim, wrapped, batches, inside=inside, **options)
    assert_equal(found, expected)
    found.model = wrapped
    return limit, expected, found
