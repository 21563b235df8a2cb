"""Eager in the place of Inductor: what is compiled is run, and takes no time to compile."""

from __future__ import annotations

import torch


def seeded_random(size, seed, mode, *, align_dtype=None):
    """What Inductor's random operator means: numbers that only its seed decides."""
    generator = torch.Generator().manual_seed(int(seed))
    return getattr(torch, mode)(size, generator=generator)


def run_by_eager(waste_bytes=lambda is_backward: 0):
    """In the place of Inductor: eager, that allocates some bytes for nothing."""

    def compiled(module, values, *, is_backward, apart, options):
        for node in module.graph.nodes:
            if node.target is torch.ops.prims.inductor_random.default:
                node.target = seeded_random
        module.recompile()
        returned = module.graph.find_nodes(op="output")[0].args[0]
        strides = [
            n.meta["val"].stride() if isinstance(n, torch.fx.Node) else None for n in returned
        ]

        def run(args):
            given = list(args)
            args.clear()
            wasted = torch.empty(waste_bytes(is_backward), dtype=torch.uint8)
            try:
                with torch.no_grad():
                    return torch.fx.Interpreter(module).boxed_run(given)
            finally:
                del wasted

        return run, strides

    return compiled
