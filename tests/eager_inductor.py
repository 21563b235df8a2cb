"""Eager in the place of Inductor: what is compiled is run, and takes no time to compile."""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from rotor._pytorch import inductor as _inductor
from rotor._pytorch import symbols
from rotor.engines.graph.tracing import groups


def seeded_random(size, seed, mode, *, align_dtype=None):
    """What Inductor's random operator means: numbers that only its seed decides."""
    generator = torch.Generator().manual_seed(int(seed))
    return getattr(torch, mode)(size, generator=generator)


def laid_out(made, strides, given):
    """The values of a result in memory of its own, with the strides that were promised."""
    tensors = [value for value in given if isinstance(value, torch.Tensor)]
    known = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if made.stride() == strides and made.untyped_storage().data_ptr() not in known:
        return made
    new = torch.empty_strided(made.shape, strides, dtype=made.dtype)
    return new.copy_(made)


def run_by_eager(compiled=None):
    """In the place of Inductor: eager; the list takes the text of each graph that is compiled."""

    def compile_graph(module, values, mode):
        if compiled is not None:
            compiled.append(str(module.graph))
        with torch.no_grad():
            promised = FakeTensorProp(module, mode).propagate_dont_convert_inputs(*values)
        for node in module.graph.nodes:
            if node.target is torch.ops.prims.inductor_random.default:
                node.target = seeded_random
        names = [symbols.text_of(value) for value in values]

        def run(args):
            given = list(args)
            args.clear()
            sizes = {n: v for n, v in zip(names, given, strict=True) if isinstance(v, int)}
            strides = [
                tuple([symbols.evaluated(symbols.text_of(part), sizes) for part in made.stride()])
                for made in promised
            ]
            with torch.no_grad():
                made = torch.fx.Interpreter(module).run(*given)
            return [laid_out(one, s, given) for one, s in zip(made, strides, strict=True)]

        return run, ()

    return compile_graph


def stand_in(monkeypatch, folder, compiled=None):
    """Have eager run the groups of captures made from now on; a folder takes their costs."""
    monkeypatch.setenv("ROTOR_CACHE_DIR", str(folder))
    monkeypatch.setattr(groups, "_known", WeakValueDictionary())
    monkeypatch.setattr(_inductor, "compile_graph", run_by_eager(compiled))


def refuse_to_compile(monkeypatch):
    """Have Inductor fail at each group."""

    def refuse(*_):
        raise ValueError("no such kernel")

    monkeypatch.setattr(_inductor, "compile_graph", refuse)


def rely_on_sizes(monkeypatch):
    """Have Inductor compile kernels that take the sizes of one call for constants."""
    compile_graph = _inductor.compile_graph

    def compile_relying(module, values, mode):
        known = len(mode.shape_env.replacements)
        with _inductor._open(mode.shape_env):
            for value in values:
                if symbols.is_symbol(value):
                    bool(value == symbols.hint_of(value))
        _inductor._conditions(mode.shape_env, known, set())
        return compile_graph(module, values, mode)

    monkeypatch.setattr(_inductor, "compile_graph", compile_relying)
