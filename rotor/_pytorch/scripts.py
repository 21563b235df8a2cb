"""Scripts of ``torch.jit`` in captured code: each call of one is an operator of our own.

Dynamo reads no script. While it works, a module with the same tensors stands in for each script of
a model, and calls the operator. That runs the script's own code, as plain PyTorch does: in a
forward with gradients too, which are dropped, for the executor of scripts chooses code by what
requires them. The backward runs the script again.
"""

from __future__ import annotations

import hashlib
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.autograd.function import Function
from torch.utils._python_dispatch import TorchDispatchMode

from rotor._pytorch import core, devices
from rotor._pytorch.casts import autocast_dtypes
from rotor._pytorch.draws import is_random
from rotor.errors import CaptureError

_LIBRARY = torch.library.Library("rotor_script", "FRAGMENT")
_LIBRARY.define("run(str call, Tensor[] tensors) -> Tensor[]")
_LIBRARY.define("gradients(str call, Tensor[] tensors, Tensor?[] tangents) -> Tensor[]")
_RUN = torch.ops.rotor_script.run.default
_GRADIENTS = torch.ops.rotor_script.gradients.default

_OPAQUE = re.compile(r"(prim::(SetAttr|CallMethod|CallFunction|PythonOp|fork|Print)|\^\w*)\b")
"""Nodes of a script that change it, or may do anything."""
_RESULTS = re.compile(r"Tensor|Tuple\[Tensor(, Tensor)*\]")
_PLAIN = (type(None), bool, int, float, str)


class _Script:
    """Code of a script or of a function of ``torch.jit``, and what it reads beside its arguments.

    `tensors` and `others` are the paths of the attributes that are tensors, and of those that are
    not. `gives_tuple` is True if it returns several tensors. `refusal` says why no captured graph
    can have it, and is empty if one can.
    """

    def __init__(self, script: Any) -> None:
        module = None if isinstance(script, torch.jit.ScriptFunction) else script._c
        self.kind = script.qualified_name if module is None else module._type()
        self._code = script if module is None else module._get_method("forward")
        self._name = script.name if module is None else script.original_name
        self._first = int(module is not None)
        self._graph = self._code.inlined_graph
        self.text = str(self._graph)
        read = _attributes(self._graph, module)
        self.tensors = [path for path, value in read.items() if isinstance(value, torch.Tensor)]
        self.others = [path for path in read if path not in self.tensors]
        (result,) = self._code.schema.returns
        self.gives_tuple = result.type.annotation_str != "Tensor"
        self.refusal = ""
        if not _RESULTS.fullmatch(result.type.annotation_str):
            self.refusal = "returns something other than tensors"
        elif found := _OPAQUE.search(self.text):
            self.refusal = f"has {found[0]} among its operations"
        elif not all(_is_plain(read[path]) for path in self.others):
            self.refusal = "reads objects among its attributes"

    def refused(self, reason: str) -> CaptureError:
        """Return the error that says what in the script no graph can have."""
        return CaptureError(
            f"{self._name} is a script of torch.jit that {reason}, which no captured graph can "
            "have: give the module or function from which torch.jit.script or torch.jit.trace made "
            'it, or leave the engine at "auto", which runs it'
        )

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return all arguments of a call by position."""
        declared = self._code.schema.arguments[self._first :]
        names = [argument.name for argument in declared]
        given = {a.name: a.default_value for a in declared if a.has_default_value()}
        given |= {**dict(zip(names, args, strict=False)), **kwargs}
        is_one_each = len({*names[: len(args)], *kwargs}) == len(args) + len(kwargs)
        if not is_one_each or given.keys() != set(names):
            raise self.refused("is called with other arguments than it declares")
        return [given[name] for name in names]

    def registered(self, module: Any) -> str:
        """Return the key of the script with the attributes that its module has now."""
        values = [_within(module, path) for path in self.others]
        digest = hashlib.sha256(repr((self.text, values)).encode()).hexdigest()[:16]
        key = f"{self.kind if module is None else self.kind.qualified_name()} {digest}"
        while key in _SCRIPTS and _SCRIPTS[key][0].kind != self.kind:
            key += "'"  # Loaded scripts share names.
        if key not in _SCRIPTS:
            _SCRIPTS[key] = self, None if module is None else _copied(module, empties=True)
        return key

    def run(self, module: Any, args: Any, tensors: Sequence[torch.Tensor], traced: bool) -> Any:
        """Return the results; traced, by a copy, so that no executor learns of fake tensors."""
        code = self._code
        if module is not None:
            module = _copied(module)
            for path, tensor in zip(self.tensors, tensors, strict=True):
                _within(module, path[:-1]).setattr(path[-1], tensor)
            code = module._get_method("forward")
        if traced:
            code = torch._C._create_function_from_graph("forward", self._graph.copy())
            args = args if module is None else [module, *args]
        return code(*args)


_SCRIPTS: dict[str, tuple[_Script, Any]] = {}
"""Scripts, and their modules without tensors, by a key; PyTorch keeps their code for good too."""


def _copied(module: Any, *, empties: bool = False) -> Any:
    """Return a copy of a script's module, without its tensors if asked."""
    copy = module._replicate_for_data_parallel()
    for name, child in torch._C.ModuleDict(copy).items():
        copy.setattr(name, _copied(child, empties=empties))
    kinds: Any = (torch._C.ParameterDict, torch._C.BufferDict) if empties else ()
    for held in [kind(copy) for kind in kinds]:
        for name, _ in held.items():
            copy.setattr(name, torch.empty(0))
    return copy


def _within(module: Any, path: Sequence[str]) -> Any:
    for name in path:
        module = module.getattr(name)
    return module


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def _attributes(graph: Any, module: Any) -> dict[tuple[str, ...], Any]:
    """Return the attributes of a module that a graph reads, but modules, by their paths."""
    paths: dict[str, tuple[str, ...]] = {}
    found: dict[tuple[str, ...], Any] = {}
    if module is not None:
        paths[next(graph.inputs()).debugName()] = ()

    def read(block: Any) -> None:
        for node in block.nodes():
            if node.kind() == "prim::GetAttr" and next(node.inputs()).debugName() in paths:
                path = (*paths[next(node.inputs()).debugName()], node.s("name"))
                value = _within(module, path)
                if isinstance(value, torch.ScriptModule):
                    paths[node.output().debugName()] = path
                else:
                    found[path] = value
            for inner in node.blocks():
                read(inner)

    read(graph)
    return found


class _Call(NamedTuple):
    """Call of a script, but for its tensors."""

    script: _Script
    module: Any
    leaves: list[Any]
    """Arguments with ``torch.Tensor`` in place of tensors."""
    form: Any
    wants: list[bool]
    """True for each tensor, of the arguments and then of the script, that requires a gradient."""
    dtypes: dict[str, torch.dtype]
    """Lower precision of autocast by kind of device."""
    caches: bool

    def run(self, tensors: Sequence[torch.Tensor], traced: bool) -> tuple[list[Any], list[Any]]:
        """Return the tensors as leaves of autograd, and the results."""
        pairs = zip(tensors, self.wants, strict=True)
        leaves = [tensor.detach().requires_grad_(want) for tensor, want in pairs]
        given = iter(leaves)
        args = [next(given) if leaf is torch.Tensor else leaf for leaf in self.leaves]
        with ExitStack() as entered:
            for kind in {"cpu", devices.accelerator_in_use().type}:
                dtype = self.dtypes.get(kind)
                entered.enter_context(
                    torch.autocast(kind, dtype, dtype is not None, cache_enabled=self.caches)
                )
            entered.enter_context(_autograd())
            entered.enter_context(torch.set_grad_enabled(any(self.wants)))
            arguments = core.tree_unflatten(args, self.form)
            made = self.script.run(self.module, arguments, list(given), traced)
        return leaves, [made] if isinstance(made, torch.Tensor) else list(made)


_CALLS: dict[str, _Call] = {}


def _autograd() -> Any:
    """Return a context in which autograd sees what runs, within modes that are below it too."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    included = torch._C._dispatch_tls_local_include_set()
    return torch._C._ForceDispatchKeyGuard(included, excluded)


def _call(key: str, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Any:
    script, module = _SCRIPTS[key]
    if script.refusal:
        raise script.refused(script.refusal)
    leaves, form = core.tree_flatten(script.arguments(args, kwargs))
    given = [*(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), *tensors]
    leaves = [torch.Tensor if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    if not all(leaf is torch.Tensor or type(leaf) in _PLAIN for leaf in leaves):
        raise script.refused("takes something other than tensors and constants")
    wants = [torch.is_grad_enabled() and tensor.requires_grad for tensor in given]
    caches = torch.is_autocast_cache_enabled()
    call = _Call(script, module, leaves, form, wants, autocast_dtypes(), caches)
    text = f"{key} {call[2:]}"
    _CALLS[text] = call
    made = _Operator.apply(text, *given) if any(wants) else _RUN(text, given)
    return tuple(made) if script.gives_tuple else made[0]


class _Operator(Function):
    @staticmethod
    def forward(ctx: Any, text: str, *tensors: torch.Tensor) -> Any:
        ctx.text = text
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        made = tuple(_RUN(text, tensors))
        ctx.mark_non_differentiable(*[tensor for tensor in made if not _may_require(tensor)])
        return made

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        found = iter(_GRADIENTS(ctx.text, ctx.saved_tensors, tangents))
        return None, *[next(found) if want else None for want in _CALLS[ctx.text].wants]


def _may_require(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _forward(text: str, tensors: Sequence[torch.Tensor], traced: bool = False) -> Any:
    # What autograd saves is dropped at once.
    dropped: Any = (lambda _: None, lambda _: None)
    with torch.autograd.graph.saved_tensors_hooks(*dropped):
        _, made = _CALLS[text].run(tensors, traced)
    return made


def _backward(text: str, tensors: Any, tangents: Any, traced: bool = False) -> Any:
    call = _CALLS[text]
    leaves, made = call.run(tensors, traced)
    outputs = [k for k, tangent in enumerate(tangents) if tangent is not None]
    found = torch.autograd.grad(
        [made[k] for k in outputs],
        [leaf for leaf in leaves if leaf.requires_grad],
        [tangents[k] for k in outputs],
        allow_unused=True,
    )
    if any(gradient is None for gradient in found):
        raise call.script.refused("gives no gradient to some of the tensors that require one")
    known = {core.storage_identity(tangents[k]) for k in outputs}
    fresh = []
    for gradient in found:
        place = core.storage_identity(gradient)
        fresh.append(gradient.clone() if place in known else gradient)
        known.add(place)
    return fresh


@torch.library.impl(_LIBRARY, "run", "CompositeExplicitAutograd")
def _run(call: str, tensors: Sequence[torch.Tensor]) -> Any:
    return [tensor.detach() for tensor in _forward(call, tensors)]


torch.library.impl(_LIBRARY, "gradients", "CompositeExplicitAutograd")(_backward)


class _Watch(TorchDispatchMode):
    """Look-out for operators that draw random numbers, or write to tensors of the caller's.

    `seen` says what was seen, if anything: an error would lose its message in the interpreter.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.seen = ""
        self._places = set(map(core.storage_identity, tensors))
        self._fakes: Any = torch._guards.detect_fake_mode(list(tensors))

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Look out in the context, where real tensors, constants of scripts, meet fake ones."""
        with core.replaced(self._fakes, allow_non_fake_inputs=True), self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and type(args[0]) in _PLAIN:
            return args[0]  # PyTorch gives tensors made of numbers to modes as numbers.
        declared = func._schema.arguments
        given = {**{a.name: v for a, v in zip(declared, args, strict=False)}, **kwargs}
        written = [given.get(a.name) for a in declared if a.alias_info and a.alias_info.is_write]
        if given.get("training"):
            written += [given.get("running_mean"), given.get("running_var")]
        tensors = [t for t in core.tree_flatten(written)[0] if isinstance(t, torch.Tensor)]
        if is_random(func, args, kwargs):
            self.seen = f"draws random numbers ({func})"
        elif not self._places.isdisjoint(map(core.storage_identity, tensors)):
            self.seen = f"writes to its tensors or arguments ({func})"
        return func(*args, **kwargs)


def _traced_run(call: str, tensors: Sequence[torch.Tensor]) -> Any:
    script = _CALLS[call].script
    if any(type(n) is not int for tensor in tensors for n in (*tensor.shape, *tensor.stride())):
        raise script.refused("runs on sizes that are symbols")
    watch = _Watch(tensors)
    try:
        with watch.tracing():
            made = _forward(call, tensors, traced=True)
    except RuntimeError as error:
        reason = watch.seen or "writes to its arguments, or depends on the values of tensors"
        raise script.refused(reason) from error
    places = list(map(core.storage_identity, (*tensors, *made)))
    reason = watch.seen
    if len({*places}) < len({*places[: len(tensors)]}) + len(made):
        reason = reason or "returns its arguments, views of them, or views of one tensor"
    if any(_CALLS[call].wants) and any(_may_require(t) and not t.requires_grad for t in made):
        reason = reason or "returns tensors without a gradient"
    if reason:
        raise script.refused(reason)
    return [tensor.detach() for tensor in made]


def _traced_backward(call: str, tensors: Sequence[torch.Tensor], tangents: Any) -> Any:
    with _Watch(tensors).tracing():
        return _backward(call, tensors, tangents, traced=True)


torch.library.register_fake("rotor_script::run", _traced_run, lib=_LIBRARY)
torch.library.register_fake("rotor_script::gradients", _traced_backward, lib=_LIBRARY)


def refused(call: str, reason: str) -> CaptureError:
    """Return the error that says what no graph can have in the script of a call."""
    return _CALLS[call].script.refused(reason)


def runs_script(node: fx.Node | None) -> bool:
    return node is not None and node.target in (_RUN, _GRADIENTS)


class ScriptModel(nn.Module):
    """Module that is planned in the place of a script; it calls the script, without its hooks."""

    training: Any = property(lambda self: self.script.training, lambda self, mode: None)

    def __init__(self, script: torch.jit.ScriptModule) -> None:
        super().__init__()
        self.script = script

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.script.forward(*args, **kwargs)


class StandIn(nn.Module):
    """Module that a capture reads in place of a script."""

    def __init__(self, script: torch.jit.ScriptModule) -> None:
        super().__init__()
        hooks = {name: value for name, value in vars(script).items() if name in vars(self)}
        vars(self).update(hooks | {n: {} for n in ("_parameters", "_buffers", "_modules")})
        self._held: list[torch.Tensor] = []
        self._key = ""

    def fill(self, code: _Script, script: torch.jit.ScriptModule) -> None:
        """Take the tensors and attributes that a script has now."""
        self._key = code.registered(script._c)
        self._held[:] = [_within(script._c, path) for path in code.tensors]
        _reflect(self, script)

    def empty(self) -> None:
        self._held.clear()
        for part in self.modules():
            part._parameters.clear()
            part._buffers.clear()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _call(self._key, args, kwargs, self._held)


def _reflect(copy: Any, script: Any) -> None:
    copy.training = script.training
    copy._parameters.update(script._parameters.items())
    copy._buffers.update(script._buffers.items())
    for name, child in script._modules.items():
        _reflect(copy._modules.setdefault(name, nn.Module()), child)


_STAND_INS: weakref.WeakKeyDictionary[Any, tuple[_Script, StandIn]] = weakref.WeakKeyDictionary()


def script_slots(module: nn.Module) -> list[core.Slot]:
    """Return the slots of a model's scripts: (the dictionary of their module, their name)."""
    return [
        (part._modules, name)
        for part in module.modules()
        if not isinstance(part, torch.jit.ScriptModule)
        for name, child in part._modules.items()
        if isinstance(child, torch.jit.ScriptModule)
    ]


def stood_in(slots: Sequence[core.Slot]) -> AbstractContextManager[None]:
    """Return a context in which modules stand in for the scripts in these slots."""
    return _stood_in(slots) if slots else core.NOTHING


@contextmanager
def _stood_in(slots: Sequence[core.Slot]) -> Iterator[None]:
    found: list[tuple[Any, str, Any]] = [(held, name, held.get(name)) for held, name in slots]
    found = [entry for entry in found if isinstance(entry[2], torch.jit.ScriptModule)]
    try:
        for held, name, script in found:
            if script not in _STAND_INS:
                _STAND_INS[script] = _Script(script), StandIn(script)
            code, stand_in = _STAND_INS[script]
            stand_in.fill(code, script)
            held[name] = stand_in
        yield
    finally:
        for held, name, script in found:
            held[name] = script
            if script in _STAND_INS:
                _STAND_INS[script][1].empty()


@contextmanager
def functions_run_whole() -> Iterator[None]:
    """Have dynamo take functions of ``torch.jit`` as calls of the operator.

    It would read the Python from which they were made, whose gradients have other bits.
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.variables import TorchInGraphFunctionVariable
    from torch._dynamo.variables.builder import VariableBuilder

    def wrapped(builder: Any, function: Any) -> Any:
        builder.install_guards(GuardBuilder.ID_MATCH)
        key = _Script(function).registered(None)

        def called(*args: Any, **kwargs: Any) -> Any:
            return _call(key, args, kwargs, ())

        return TorchInGraphFunctionVariable(called, source=builder.source)

    table = VariableBuilder._type_dispatch()
    inlined = table[torch.jit.ScriptFunction]
    table[torch.jit.ScriptFunction] = wrapped
    torch._dynamo.allow_in_graph(_call)
    try:
        yield
    finally:
        table[torch.jit.ScriptFunction] = inlined
