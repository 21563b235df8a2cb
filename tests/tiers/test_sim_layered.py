"""A limit of the host's memory with a disk beneath, on the simulated accelerator."""

from __future__ import annotations

import copy
import os
import random
import resource
import subprocess
import sys
import textwrap
import threading
from functools import cache, partial

import children
import command_line
import pytest
import torch
from devices.test_sim_larger import Asking, model
from torch import nn, optim

import rotor
from rotor.tier import LayeredTier, host, layered
from rotor.tier.homes import AwayTensor, Home
from rotor.tier.interface import TransferError

STAGING = layered.STAGING_BYTES
PIECE_BYTES = STAGING // 4
HOMES = 8 * 64 << 10
"""Bytes of the parameters that have homes."""
LIMIT = 600 << 10
WAYS = {"plain": {}, "clipped": {"clips": True}, "accumulated": {"backwards": 2}}
OPTIMIZERS = {
    "SGD": partial(optim.SGD, lr=1e-2),
    "AdamW": partial(optim.AdamW, lr=1e-2),
    "Adafactor": partial(optim.Adafactor, lr=1e-2),
}


def wide() -> nn.Module:
    """Model of weights that are moved in two pieces each."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 2500), nn.ReLU(), nn.Linear(2500, 64))


def train(sim, net, call, optimizer, *, steps=3, clips=False, backwards=1):
    """Return losses, norms and parameters, and the device's largest bytes above each begin."""
    found, peaks = [], []
    torch.manual_seed(1)
    for _ in range(steps):
        level = sim.memory_allocated()
        sim.reset_peak_memory_stats()
        for _ in range(backwards):
            loss = call(torch.randn(32, 64, device="sim")).square().mean()
            loss.backward()
            found.append(loss.detach().cpu())
            del loss
        if clips:
            found.append(nn.utils.clip_grad_norm_(net.parameters(), 0.1).cpu())
        optimizer.step()
        optimizer.zero_grad()
        peaks.append(sim.max_memory_allocated() - level)
    return [*found, *(p.detach().cpu() for p in net.parameters())], peaks


@cache
def plain(make, kind, way, device="sim"):
    """Return what plain training gives."""
    import torch.sim as sim

    net = make().to(device)
    return train(sim, net, net, OPTIMIZERS[kind](net.parameters()), **WAYS[way])[0]


@pytest.fixture
def pinned(monkeypatch):
    """Give the sizes of pinned memory that is taken, as PyTorch rounds them."""
    sizes, take = [], host.pinned

    def noted(nbytes):
        sizes.append(1 << (nbytes - 1).bit_length())
        return take(nbytes)

    for module in (host, layered):
        monkeypatch.setattr(module, "pinned", noted)
    return sizes


def compare(sim, make, kind, way, host_limit, limit=LIMIT, **settings):
    """Train a wrapped model, and compare; return it and its optimizer."""
    net = make().to("sim")
    optimizer = OPTIMIZERS[kind](net.parameters())
    chk = rotor.Checkpointable(
        net,
        mem_limit=limit,
        offload="host",
        host_limit=host_limit,
        offload_state=optimizer,
        effort="fast",
        **settings,
    )
    races = sim.races()
    found, peaks = train(sim, net, chk, optimizer, **WAYS[way])
    for one, other in zip(found, plain(make, kind, way), strict=True):
        assert torch.equal(one, other)
    assert sim.races() == races, sim.last_race()
    own = [*net.parameters(), *(s for v in optimizer.state.values() for s in v.values())]
    here = [t for t in own if t.device.type == "sim" and not isinstance(t, AwayTensor)]
    # The first step measures the speed of the links too, in memory of its own.
    assert max(peaks[1:]) + sum(t.nbytes for t in here) <= limit
    return chk, optimizer


@pytest.mark.parametrize("update", ["device", "host"])
@pytest.mark.parametrize(
    ("kind", "room"),
    [("AdamW", "all"), ("AdamW", "parameters"), ("AdamW", "nothing"), ("SGD", "nothing")],
)
def test_training_is_that_of_the_plain_model(sim, pinned, kind, update, room):
    limit = STAGING + {"all": 4 * HOMES, "parameters": HOMES, "nothing": 0}[room]
    chk, optimizer = compare(sim, model, kind, "plain", limit, update=update)
    assert sum(pinned) <= limit
    tier, homes = chk.offload.tier, {p.home.tier for p in chk.parameters() if hasattr(p, "home")}
    assert homes == {tier.beneath if room == "nothing" else tier}
    states = [s for v in optimizer.state.values() for s in v.values() if s.nbytes > 4096]
    assert len(states) == (16 if kind == "AdamW" else 0)
    assert {s.home.tier for s in states} <= {tier if room == "all" else tier.beneath}
    stored = tier.beneath.disk.taken_bytes
    copies = (
        {"all": 0, "parameters": 2, "nothing": 3}[room]
        if kind == "AdamW"
        else (1 if room == "nothing" else 0)
    )
    assert copies * HOMES <= stored <= 1.05 * copies * HOMES


@pytest.mark.parametrize("update", ["device", "host"])
@pytest.mark.parametrize("way", ["clipped", "accumulated"])
def test_ways_to_train(sim, way, update):
    compare(sim, wide, "AdamW", way, STAGING + (1 << 20), limit=4 << 20, update=update)


def test_an_update_of_whole_parameters(sim):
    """Of an optimizer that cannot compute piece by piece."""
    compare(sim, wide, "Adafactor", "plain", STAGING, limit=4 << 20, update="device")


@pytest.mark.parametrize("update", ["device", "host"])
def test_training_goes_on_from_loaded_states(sim, update):
    found = []
    for is_wrapped in (False, True):
        net = wide().to("sim")
        optimizer = OPTIMIZERS["AdamW"](net.parameters())
        call = net
        if is_wrapped:
            settings = {"offload": "host", "host_limit": STAGING + (3 << 20), "effort": "fast"}
            settings |= {"offload_state": optimizer, "update": update}
            call = rotor.Checkpointable(net, mem_limit=4 << 20, **settings)
        first, _ = train(sim, net, call, optimizer, steps=2)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        found.append([*first, *train(sim, net, call, optimizer, steps=2)[0]])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize(
    ("engine", "limit"),
    [("dynamic", 520 << 10), pytest.param("auto", 600 << 10, marks=pytest.mark.slow)],
)
def test_models_without_a_graph(sim, engine, limit):
    net, twin = (Asking().to("sim") for _ in range(2))
    expected, _ = train(sim, twin, twin, OPTIMIZERS["AdamW"](twin.parameters()))
    optimizer = OPTIMIZERS["AdamW"](net.parameters())
    settings = {"mem_limit": limit, "offload": "host", "host_limit": STAGING + HOMES // 2}
    chk = rotor.Checkpointable(net, **settings, offload_state=optimizer, engine=engine)
    found, _ = train(sim, net, chk, optimizer)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert {p.home.tier for p in net.parameters() if hasattr(p, "home")} == {
        chk.offload.tier,
        chk.offload.tier.beneath,
    }


def test_plans_count_on_the_speed_of_each_home(sim):
    chk, _ = compare(sim, model, "SGD", "plain", STAGING + HOMES // 2, update="device")
    tier, step = chk.offload.tier, chk.plan.step
    links = step.homes.links
    assert list(links) == [tier, tier.beneath]
    assert links[tier].read_bytes_per_s > links[tier.beneath].read_bytes_per_s
    seen = set()
    for task, operation in zip(step.lowered.tasks, chk.graph.operations, strict=True):
        home = getattr(getattr(task.node, "target", None), "home", None)
        if home is not None:
            seen.add(home.tier)
            assert operation.cost_ns == links[home.tier].read_ns(home.nbytes)
    assert seen == {tier, tier.beneath}
    assert "of the host's 2.25 MiB, 2.25 MiB are pinned" in chk.report()
    assert chk.limits == {
        "in_host": tier.taken_bytes,
        "beneath": tier.beneath.disk.taken_bytes,
    }
    assert repr(tier) == f"LayeredTier({STAGING + HOMES // 2}, {tier.beneath.disk!r})"


# -- the tier alone


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("seed", range(3))
def test_transfers_keep_their_order(sim, seed, tmp_path):
    """Random writes and reads by two threads, of the device and the host, in and beneath it."""
    tier, races = LayeredTier(STAGING + (1 << 17), rotor.DiskTier(tmp_path)), sim.races()
    wrong = []

    def run(number: int) -> None:
        draw = random.Random(2 * seed + number)
        levels = [tier, tier.beneath]
        rooms = [tier.room(9000) * 4, tier.room(PIECE_BYTES + 9000) * 2]
        areas = [level.allocate(room) for level, room in zip(levels, rooms, strict=True)]
        known, waiting = [{}, {}], []
        for _ in range(60):
            where = draw.randrange(2)
            sizes = [9000, PIECE_BYTES + 9000]
            offset = tier.room(sizes[where]) * draw.randrange((4, 2)[where])
            device = draw.choice(["sim", "sim", "cpu"])
            level, area = levels[where], areas[where]
            if draw.random() < 0.5 or offset not in known[where]:
                value = draw.randrange(256)
                size = draw.randrange(1, sizes[where])
                source = torch.full((size,), value, dtype=torch.uint8)
                source = source.pin_memory().to("sim", non_blocking=True).clone()
                if device == "cpu":
                    source = source.cpu()
                known[where][offset] = size, value
                waiting.append((level, level.write(area, offset, source), source, None))
            else:
                size, value = known[where][offset]
                target = torch.empty(size, dtype=torch.uint8, device=device)
                waiting.append((level, level.read(area, offset, target), target, value))
            while len(waiting) > draw.randrange(12):
                level, ticket, moved, value = waiting.pop(0)
                level.wait(ticket)
                if value is not None and not moved.eq(value).all().item():
                    wrong.append((where, value))
        for level, ticket, *_ in waiting:
            level.wait(ticket)
        for level, area in zip(levels, areas, strict=True):
            level.release(area)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert sim.races() == races, sim.last_race()
    assert tier.taken_bytes == STAGING
    tier.close()


def test_room_that_was_given_back_is_taken_again(sim, pinned):
    tier = LayeredTier(STAGING + (1 << 20))
    values = [torch.full((1 << 16,), k, dtype=torch.float32, device="sim") for k in range(6)]
    homes = [Home(tier, value) for value in values]
    for home, value in zip(homes, values, strict=True):
        home.write(value)
    assert [home.tier for home in homes] == [tier] * 4 + [tier.beneath] * 2
    del homes[1], home
    homes.append(Home(tier, values[1]))
    assert homes[-1].tier is tier
    homes[-1].write(values[1])
    for home, value in zip(homes, [values[0], *values[2:], values[1]], strict=True):
        assert torch.equal(home.fetch(), value)
        assert torch.equal(home.fetch(torch.device("cpu")), value.cpu())
    assert sum(pinned) <= tier.limit_bytes


def test_values_of_steps_beyond_the_room_go_beneath(sim):
    """Of a forward that begins before the backward of another one."""
    chk = rotor.Checkpointable(model().to("sim"), offload="host", host_limit=STAGING + (1 << 18))
    assert chk.offload.tier.spare_bytes() == 1 << 18
    held = [Home(chk.offload.tier, torch.zeros(1 << 16, device="sim")) for _ in range(2)]
    assert [home.tier.has_memory for home in held] == [True, False]
    assert chk.offload.tier.spare_bytes() == 0


def damage(folder) -> None:
    """Change all bytes of the file without a name in a folder."""
    for name in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{name}"
        if os.path.exists(link) and os.readlink(link).startswith(str(folder)):
            with open(link, "r+b") as file:
                size = os.fstat(file.fileno()).st_size
                file.write(b"\xff" * size)
                os.fsync(file.fileno())


def test_damaged_bytes_are_an_error_each_time(sim, tmp_path):
    tier = LayeredTier(STAGING, rotor.DiskTier(tmp_path))
    value = torch.zeros(200_000, device="sim")
    home = Home(tier, value)
    home.write(value)
    damage(tmp_path)
    made, tickets = home.read()
    for _ in range(2):
        with pytest.raises(TransferError, match="other bits than were written") as caught:
            home.wait(tickets)
        assert caught.value.filename == str(tmp_path)
    assert made.shape == value.shape
    home.write(value)
    assert torch.equal(home.fetch(), value)


@pytest.mark.parametrize("update", ["device", "host"])
def test_a_full_disk_is_an_error_in_the_step(sim, update, tmp_path):
    net = model().to("sim")
    optimizer = OPTIMIZERS["AdamW"](net.parameters())
    chk = rotor.Checkpointable(
        net,
        mem_limit="4MiB",
        offload=f"host:{tmp_path}",
        host_limit=STAGING,
        offload_state=optimizer,
        update=update,
        effort="fast",
    )
    chk(torch.randn(32, 64, device="sim")).square().mean().backward()
    disk = chk.offload.tier.beneath.disk
    taken = [disk.allocate(1 << 16) for _ in range(300)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (disk.reserved_bytes, before[1]))
    try:
        with pytest.raises(OSError, match="a folder with more room") as caught:
            optimizer.step()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.filename == str(tmp_path)
    assert "half done" in caught.value.__notes__[0]
    assert len(taken) == 300


def test_a_child_process_reads_what_was_there(sim, tmp_path):
    tier = LayeredTier(STAGING, rotor.DiskTier(tmp_path))
    value = torch.arange(200_000, dtype=torch.float32)
    home = Home(tier, value)
    _, tickets = home.begin_write(value)
    child = os.fork()
    if child == 0:
        try:
            is_equal = torch.equal(home.fetch(), value)
            try:
                home.write(value)
            except ValueError as error:
                os._exit(0 if is_equal and "forked" in str(error) else 3)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    home.wait(tickets)
    assert torch.equal(home.fetch(), value)


def test_a_process_ends_while_bytes_move(tmp_path):
    script = """
        import torch
        from accelerator import load
        load()
        from rotor.tier import LayeredTier
        from rotor.tier.homes import Home
        value = torch.ones(8 << 20, device="sim")
        home = Home(LayeredTier(2 << 20), value)
        kept = [home.begin_write(value), home.read(), home.read(torch.device("cpu"))]
        print("moving")
    """
    settings = children.environment()
    settings.pop("ROTOR_SIM_REPORTS", None)  # This one runs no tests.
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=settings,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr == ""
    assert (done.returncode, done.stdout) == (0, "moving\n")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"offload": "disk", "host_limit": "1GiB"}, 'give offload="host"'),
        ({"host_limit": "1GiB"}, "offload is None"),
        ({"offload": "host", "host_limit": "much"}, "host_limit"),
        ({"offload": "host", "host_limit": "1MiB"}, "alone take 2097152 bytes|alone take 2 MiB"),
        ({"offload": "host:/var/tmp"}, "give host_limit= too"),
        ({"offload": "host:", "host_limit": "1GiB"}, "unknown offload"),
    ],
)
def test_wrong_options(sim, options, text):
    net = model().to("sim")
    with pytest.raises(ValueError, match=text):
        rotor.Checkpointable(net, mem_limit="1MiB", **options)


def test_what_is_refused_before_anything_moves(sim, tmp_path):
    for place, folder, kind, text in (
        ("cpu", tmp_path, ValueError, "LayeredTier does not reach the memory of cpu"),
        ("sim", tmp_path / "none", OSError, "no file for offloaded values"),
    ):
        net = model().to(place)
        options = {"offload": f"host:{folder}", "host_limit": "1GiB"}
        optimizer = OPTIMIZERS["AdamW"](net.parameters())
        with pytest.raises(kind, match=text):
            rotor.Checkpointable(net, mem_limit="1MiB", offload_state=optimizer, **options)
        assert all(type(parameter) is nn.Parameter for parameter in net.parameters())


def test_offmate_takes_the_limit_too(sim):
    net = model().to("sim")
    optimizer = OPTIMIZERS["SGD"](net.parameters())
    chk = rotor.Offmate(net, None, LIMIT, optimizer, host_limit=STAGING + HOMES)
    assert chk.offload.tier.limit_bytes == STAGING + HOMES
    assert copy.deepcopy(chk.offload.tier).limit_bytes == STAGING + HOMES


SCRIPT = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

if __name__ == "__main__":
    torch.manual_seed(0)
    model = make().to("sim")
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        loss = model(torch.randn(64, 64, device="sim")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item())
"""


def test_commands_bound_the_memory_of_the_host(sim, capsys, tmp_path, monkeypatch):
    made, begin = [], LayeredTier.__init__
    monkeypatch.setattr(
        LayeredTier, "__init__", lambda *given: made.append(given[1]) or begin(*given)
    )
    tier = ("--offload", "host", "--host-limit", "2100KiB", "--limit", "1MiB", "--offload-state")
    with command_line.folder_with("train.py", SCRIPT, tmp_path, monkeypatch):
        planned = ("plan", "train.py:make", "--device", "sim", "--input", "64,64", *tier, "adam")
        homes = command_line.data_of(capsys, *planned)["plan"]["homes"]
        assert homes["states"] == 2 * homes["parameters"] == 4 * 64 * 64 * 4
        _, expected, _ = command_line.run(capsys, "run", "train.py")
        code, out, err = command_line.run(capsys, "run", *tier, "train.py")
    assert (code, out) == (0, expected), err
    assert made == ["2100KiB", "2100KiB"]
