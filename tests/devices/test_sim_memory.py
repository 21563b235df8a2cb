"""The simulated accelerator's memory: its caching allocator, by hand, and its capacity."""

import pytest
import torch

KIB, MIB = 1 << 10, 1 << 20


def bytes_on(nbytes, device="sim"):
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def test_blocks_by_hand(sim):
    """Sizes as PyTorch documents them for CUDA: 512 B, 1 MiB, 2 MiB, 10 MiB and 20 MiB."""

    def figures():
        stats = sim.memory_stats()
        names = ("allocated_bytes", "reserved_bytes", "requested_bytes")
        return [stats.get(f"{name}.all.current", 0) for name in names]

    assert figures() == [0, 0, 0]
    one = bytes_on(1)
    assert figures() == [512, 2 * MIB, 1]
    small = bytes_on(MIB)  # Still of the small pool: in the rest of the segment.
    assert figures() == [512 + MIB, 2 * MIB, 1 + MIB]
    large = bytes_on(MIB + 1)  # A segment of 20 MiB, split.
    assert figures() == [512 + MIB + MIB + 512, 22 * MIB, 2 + 2 * MIB]
    own = bytes_on(10 * MIB + 1)  # Fits into the rest, 19 MiB - 512, and splits it.
    assert figures()[:2] == [12 * MIB + 3 * 512, 22 * MIB]
    more = bytes_on(9 * MIB)  # The rest is 9 MiB - 1024: another segment.
    assert figures()[:2] == [21 * MIB + 3 * 512, 42 * MIB]
    alone = bytes_on(13 * MIB)  # From 10 MiB on: a multiple of 2 MiB, and the rest stays with it.
    assert figures()[:2] == [35 * MIB + 3 * 512, 56 * MIB]
    peak = sim.max_memory_allocated()
    assert peak == figures()[0]
    del one, small, large, own, more, alone
    assert figures()[0] == 0
    assert sim.memory_reserved() == 56 * MIB
    assert sim.max_memory_allocated() == peak
    sim.empty_cache()
    assert figures() == [0, 0, 0]


def test_rest_of_a_large_block(sim):
    """Keep a rest of 1 MiB with its block, and split off a larger one."""
    first = bytes_on(11 * MIB)  # A segment of 12 MiB: the rest is 1 MiB.
    assert sim.memory_allocated() == 12 * MIB
    del first
    second = bytes_on(10 * MIB)  # The cached segment is used, and 2 MiB of it split off.
    assert sim.memory_allocated() == 10 * MIB
    assert sim.memory_reserved() == 12 * MIB
    third = bytes_on(2 * MIB)
    assert sim.memory_reserved() == 12 * MIB
    del second
    del third
    assert len(sim.memory_snapshot()) == 1
    assert [block["size"] for block in sim.memory_snapshot()[0]["blocks"]] == [12 * MIB]


def test_best_fit(sim):
    """Take the smallest block that fits, the lowest one among equals."""
    kept = [bytes_on(size * KIB) for size in (64, 4, 16, 4, 32, 4)]
    places = [tensor.data_ptr() for tensor in kept]
    kept[0] = kept[2] = kept[4] = None
    assert bytes_on(10 * KIB).data_ptr() == places[2]
    again = bytes_on(20 * KIB)
    assert again.data_ptr() == places[4]
    assert bytes_on(16 * KIB).data_ptr() == places[2]
    assert bytes_on(64 * KIB).data_ptr() == places[0]


def test_capacity_ends_in_out_of_memory(sim):
    """Give cached segments back before failing, and leave the counters right."""
    sim.set_capacity(40 * MIB)
    cached = bytes_on(24 * MIB)
    del cached
    kept = bytes_on(30 * MIB)  # Only without the cached segment.
    assert sim.memory_stats()["num_alloc_retries"] == 1
    with pytest.raises(torch.OutOfMemoryError, match="sim out of memory"):
        bytes_on(12 * MIB)
    assert sim.memory_allocated() == 30 * MIB
    assert sim.memory_stats()["num_ooms"] == 1
    del kept
    sim.empty_cache()
    sim.set_per_process_memory_fraction(0.25)
    with pytest.raises(torch.OutOfMemoryError):
        bytes_on(5 * MIB)  # Its segment has 20 MiB.
    bytes_on(10 * MIB)
    assert sim.memory_reserved() == 10 * MIB


def test_out_of_memory_inside_of_a_kernel(sim):
    """Let a backward end in the error, and its memory be freed."""
    sim.set_capacity(24 * MIB)
    value = torch.randn(MIB, device="sim", requires_grad=True)  # 4 MiB
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            (value.exp().sin().cos() * value.exp()).sum().backward()
        assert sim.memory_allocated() == 4 * MIB
        assert value.grad is None


def test_pools_of_streams(sim):
    """Keep the free blocks of a stream for it."""
    first = bytes_on(5 * MIB)
    place = first.data_ptr()
    del first
    with torch.Stream("sim"):
        assert bytes_on(5 * MIB).data_ptr() != place
    assert sim.memory_reserved() == 40 * MIB
    assert bytes_on(5 * MIB).data_ptr() == place


def test_recorded_stream_keeps_a_block(sim):
    """Hold a freed block until the other stream has passed the place of its release."""
    sim.set_link(0.00002)  # 20 kB/s: the copy takes 0.2 s.
    side = torch.Stream("sim")
    value = torch.full((1000,), 7.0, device="sim")
    side.wait_stream(torch.accelerator.current_stream())
    host = torch.empty(1000).pin_memory()
    with side:
        host.copy_(value, non_blocking=True)
    value.record_stream(side)
    place = value.data_ptr()
    del value
    assert sim.memory_stats()["active_bytes.all.current"] == 4096
    assert sim.memory_allocated() == 0
    assert torch.zeros(1000, device="sim").data_ptr() != place
    side.synchronize()
    assert host.eq(7).all()
    assert torch.empty(1000, device="sim").data_ptr() == place
    sim.set_link(8.0)


def test_profiler_sees_the_device(sim):
    """Report allocations to the profiler, as CUDA's allocator does."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as session:
        value = bytes_on(1000)
        del value
    sizes = {event.name: event.device_memory_usage for event in session.events()}
    assert sizes == {"aten::empty": 1024, "[memory]": -1024}
