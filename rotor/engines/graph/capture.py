"""Capture of the joint forward and backward graph of a call, through ``torch.compile``.

The compiled call runs the functions that were set last: under any plan, AOTAutograd sees a forward
that returns the model's outputs, the inputs that autograd keeps, and one token. A plan can thus be
replaced without capturing again. A capture is for one signature, unless dimensions of its arguments
were marked as symbols.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import fx, nn

from rotor._pytorch import (
    backwards,
    captures,
    core,
    dispatch,
    inductor,
    quiet_capture,
    region_guards,
    regions,
    scripts,
    symbols,
)
from rotor._pytorch.captures import fresh
from rotor._pytorch.draws import Draws
from rotor.common.calls import shared_places
from rotor.common.collector import CollectorPause
from rotor.common.frames import release, reported, weakly
from rotor.common.modes import SPLIT_BACKWARD
from rotor.common.rerun import Rerun
from rotor.common.tensor_trees import tree_tensors
from rotor.common.undisturbed import generators_kept
from rotor.engines.around import attach
from rotor.engines.contract import NothingToPlan
from rotor.engines.graph.code.early import Delivery, EarlyStep
from rotor.engines.graph.code.emit import Emitted, is_unchecked, read_primals, saved_primals
from rotor.engines.graph.code.numbers import LateReads, numbers_of, write_numbers
from rotor.engines.graph.costs.profile import warm_up_scripts
from rotor.engines.graph.costs.symbols import origin_values
from rotor.engines.graph.tracing.alike import alike_modules
from rotor.engines.graph.tracing.false_edges import DEVICES, without_memory
from rotor.engines.graph.tracing.fetches import insert_fetches
from rotor.engines.graph.tracing.folding import CastOnce, Changed, Folding
from rotor.engines.graph.tracing.fusing import fuse
from rotor.engines.graph.tracing.lowering import Lowered, lower
from rotor.engines.graph.tracing.rewrite import as_in_eager, drop_tokens, split_sums
from rotor.errors import CaptureError
from rotor.tier.homes import Home

_GRAPH = "rotor's graph"
_SHARED = (
    "the model writes to an input that shares its memory with another one, which no graph of it "
    "allows for: give the model a clone of one of them"
)
_UNSIZED = (
    "an input has sizes that are known only in a step, such as a jagged tensor, or one that "
    "torch._dynamo.mark_dynamic has marked: give a padded tensor without marks, or use "
    'engine="dynamic"'
)
_ARGUMENT = re.compile(r"L\['(args|kwargs|targets)'\]")
"""Expression of dynamo's for what is within the arguments of a call."""


@dataclass
class Captured:
    """Graph of a call, and the program that it runs."""

    lowered: Lowered
    emitted: Emitted | EarlyStep | None = None
    """Functions that the next call runs; None before a program is set."""
    meet: Callable[[], object] | None = None
    """Function that is called before the forward, for ranks that begin it together."""
    saved: int = 0
    """Number of primals before the token among the backward's inputs."""
    reached: list[frozenset[int]] | None = None
    """For each gradient, the tangents from which it is computed."""
    absent: frozenset[int] | None = None
    """Tangents that came in no backward so far; None before the first."""
    zeros: dict[tuple[int, tuple[int, ...]], torch.Tensor] = field(default_factory=dict)
    """Stand-ins for absent tangents, by number and shape."""
    tokens: int = 0
    """Number of arguments of the backward, and of its results, that are no tensors."""
    guarded: dict[str, bool] = field(default_factory=dict)
    """Dynamo's expressions for the parts of the arguments that the code has read; True: whole."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """Numbers that the code has read, by dynamo's expressions of the model's attributes."""
    keeps: bool | None = None
    """True if modules hold results after a call; None before the first."""
    late: dict[str, CodeType] = field(default_factory=dict)
    """Dynamo's expressions of what the code reads in a backward, and their code."""

    @cached_property
    def are_differentiable(self) -> list[bool]:
        """For each primal True if it gets a gradient."""
        return [gradient is not None for gradient in self.lowered.gradients]

    @cached_property
    def are_whole(self) -> bool:
        """True if no primal that gets a gradient is a part of a distributed tensor.

        No forward can run again from parts.
        """
        wanted = compress(self.lowered.primals, self.are_differentiable)
        return all(isinstance(node.meta.get("val"), torch.Tensor) for node in wanted)

    def reads(self, expression: str | None) -> bool:
        """Return whether the code depends on the value of an expression of dynamo's."""
        return expression is None or any(
            expression in name or (is_whole and expression.startswith(name))
            for name, is_whole in self.guarded.items()
        )

    def sizes(self, primals: Sequence[Any]) -> dict[str, int]:
        """Return the values of the symbols in a call, by name."""
        names = self.lowered.symbols
        return dict(zip(names, origin_values(self.lowered, primals), strict=True)) if names else {}

    def fill(self, args: list[Any], sizes: Mapping[str, int]) -> None:
        """Replace absent tangents in `args`, the arguments of a backward, and note which came.

        `sizes` are the values of the symbols.
        """
        first = self.saved + 1
        absent = frozenset(k for k, tangent in enumerate(args[first:]) if tangent is None)
        self.absent = absent if self.absent is None else self.absent & absent
        for k in absent:
            value = self.lowered.tangents[k].meta["val"]
            shape, strides = (
                tuple([int(symbols.evaluated(symbols.text_of(part), sizes)) for part in parts])
                for parts in (value.shape, value.stride())
            )
            if (k, shape) not in self.zeros:
                made = without_memory(torch.Size(shape), strides, value.dtype)
                self.zeros[k, shape] = made
            args[first + k] = self.zeros[k, shape]


class Unplanned(Exception):
    """Signal that a captured call with the inputs `primals` was reached before it had a program."""

    def __init__(self, captured: Captured, primals: list[Any]) -> None:
        super().__init__("no program yet")
        self.captured = captured
        self.primals = primals

    def written(self) -> set[int]:
        """Return the identities of the storages to which the call writes.

        Raises CaptureError if one is also that of an input that autograd keeps: for autograd, all
        views of a storage change at once, and a graph writes to its inputs at its end.
        """
        lowered = self.captured.lowered
        storage_of = {
            node: core.storage_identity(part)
            for node, primal in zip(lowered.primals, self.primals, strict=True)
            if isinstance(primal, torch.Tensor)
            for part in core.strided_parts(primal)
        }
        written = {storage_of[node] for node in lowered.mutated if node in storage_of}
        if written and any(storage_of.get(node) in written for node in read_primals(lowered)):
            raise CaptureError(_SHARED)
        return written

    def drop(self) -> None:
        """Drop the inputs, which must not live as long as a frame in a cycle, and the frames."""
        self.primals.clear()
        release(self)


def _stub(
    module: fx.GraphModule, inputs: Sequence[fx.Node], outputs: Sequence[Any]
) -> fx.GraphModule:
    """Return a graph of the right inputs and outputs that never runs."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        known[node] = graph.placeholder(node.name)
        known[node].meta.update(node.meta)
    made = []
    for output in outputs:
        if isinstance(output, fx.Node) and output not in known:
            known[output] = graph.call_function(torch.ops.aten.empty.memory_format, ([0],))
            known[output].meta.update(output.meta)
        made.append(known[output] if isinstance(output, fx.Node) else output)
    graph.output(tuple(made))
    stub = fx.GraphModule(module, graph)
    # PyTorch copies the graph of a backward before it has it compiled.
    vars(stub)["__deepcopy__"] = lambda memo: stub
    return stub


class Capture:
    """Captured call of a module; several captures if its code depends on Python values.

    A fresh code object of `function` is compiled for each capture. For the backend "inductor",
    operators are decomposed as it does, and its kernels are the operations. With `folds`, one of
    alike modules is traced, and its operations are copied for the others. `branches` answers code
    that asks whether it is compiled (by default no), and `numbers` are dynamo's expressions of
    numbers among the arguments that are to be inputs. `home_of` gives the home of a parameter,
    which the graph then fetches. With `is_part`, other code may use the arguments too: the terms of
    their gradients are not added up.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        backend: str = "fx",
        *,
        folds: bool = True,
        branches: quiet_capture.Branches | None = None,
        numbers: Collection[str] = (),
        home_of: Callable[[Any], Home | None] | None = None,
        is_part: bool = False,
    ) -> None:
        captures.check()
        self.backend = backend
        self._home_of = home_of
        self._homes: list[Home | None] = []
        self._is_part = is_part
        self._are_arguments: list[bool] = []
        self._numbers = frozenset(numbers)
        self._branches = branches or quiet_capture.Branches()
        self._draws = Draws()
        self._owner: weakref.ref[nn.Module] | None = None
        self._shared: Any = None
        self._scripts: list[core.Slot] = []
        self.graphs: list[Captured] = []
        self.ran: Captured | None = None
        """Graph that the last call ran."""
        self.token: weakref.ref[torch.Tensor] | None = None
        """Object that lives while the last call's backward is still to come."""
        self.leaves: list[Any] | None = None
        """Primals of the last call that get gradients, if this was a list when it began."""
        decompositions = inductor.decompositions() if backend == "inductor" else as_in_eager()
        self._function = function
        # Dynamo keeps compiled code as long as the function's: that must not keep the capture,
        # which keeps the function.
        partition, forward = weakly(self._partition), weakly(self._forward)
        note_inputs = weakly(self._note_inputs)

        def compiled(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            return Capture._boxed(forward, module.meta[_GRAPH])

        compiler = core.aot_backend(
            partition=partition,
            forward=captures.for_emitted(compiled, keeps_layouts=backend != "inductor"),
            backward=lambda module, inputs: Capture._boxed(Capture._backward, module.meta[_GRAPH]),
            inference=lambda module, inputs: Capture._refused,
            decompositions=decompositions,
        )

        def noting(module: fx.GraphModule, inputs: Any) -> Any:
            note_inputs(module)
            return compiler(module, inputs)

        self._compiler = captures.as_eager(noting)
        self._modes: list[Any] = []
        self.folding: Folding | None = None
        self._unfolded = ""
        if folds and backend != "fx":
            self._unfolded = "the graph is for Inductor"
        elif numbers:
            self._unfolded = "numbers among the arguments are inputs"
        elif folds and not regions.is_available():
            self._unfolded = "this PyTorch keeps no guards of a part of a graph"
        elif folds:
            self.folding = Folding(self._compiler, decompositions)
        self._has_alike = False
        self._call = self._compiled()

    def _compiled(self) -> Callable[..., Any]:
        compiler: Any = self.folding or self._compiler
        code, modes = self._function.__code__, self._modes
        weakref.finalize(self, captures.forget_compiled, code, id(compiler), modes).atexit = False
        return torch.compile(self._function, backend=compiler, fullgraph=True, dynamic=False)

    @property
    def alike(self) -> str:
        """Text on the alike modules, and why they were traced one by one; empty without any."""
        if self.folding is not None and not self._unfolded:
            return self.folding.text
        return f"traced one by one: {self._unfolded}" if self._has_alike else ""

    def unfold(self, reason: str = "") -> None:
        """Have the next call captured without copies of alike modules."""
        self._has_alike = self.folding is not None and bool(self.folding.alike.modules)
        self.folding, self._unfolded = None, reason
        self._function = fresh(self._function)
        self._call = self._compiled()

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the call on a module; raise `Unplanned` if it has no program yet.

        A CaptureError says why no single graph of the call exists, and for which line of code.
        """
        if not self.graphs or self._owner is None or self._owner() is not module:
            self._owner, self._scripts = weakref.ref(module), scripts.script_slots(module)
        given = tree_tensors((args, kwargs))
        symbols.forget_propagated(given)
        if self._shared is not None and shared_places(given) != self._shared:
            raise CaptureError(_SHARED)
        if self.folding is not None and self.graphs:
            watch = self.folding.watch
            if watch is not None and not watch.is_of(module):
                self.unfold("another model shares the capture")
        try:
            result = self._called(module, args, kwargs)
            self._draws.keep()
            if self.ran is not None and self.ran.late and self.token is not None:
                token: Any = self.token()
                token.reads = LateReads(self.ran.late, self._function, (module, *args))
            return result
        except Unplanned as reached:
            written = reached.written()
            if written & set(map(core.storage_identity, given)):
                self._shared = shared_places(given)
            raise
        except NothingToPlan:
            raise
        except core.CAPTURE_ERRORS as error:
            refused = _refusal(error)
            if refused is not None:
                raise refused from None
            if len(self.graphs) > 1:
                raise CaptureError(
                    f"the model's code depends on Python values that keep changing: it was "
                    f"captured {len(self.graphs)} times, each time for other values; keep such "
                    "values in tensors (buffers) or out of the forward. TORCH_LOGS=recompiles "
                    f"shows them.\n{_reason(error)}"
                ) from error
            raise CaptureError(_reason(error)) from error
        except Exception as error:
            if isinstance(error, Warning | CaptureError) or not core.is_of_capture(error):
                raise
            raise CaptureError(
                f"the capture failed in its own code: {type(error).__name__}: {_reason(error)}\n"
                f"{reported(error)}"
            ) from error
        finally:
            self._draws.take_back()

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.ran = None
        numbers = symbols.numbers_as_inputs(self._numbers)
        stood_in = scripts.stood_in(self._scripts)
        hidden = dispatch.hidden_from_hooks(lambda t: hasattr(t, "backward_of_program"))
        with core.one_graph(), hidden, numbers, stood_in:
            if self.graphs:
                with quiet_capture.CapturingAgain(self._branches, self._draws):
                    try:
                        return self._call(module, *args, **kwargs)
                    except Changed:
                        self.unfold("one was changed")
                    return self._call(module, *args, **kwargs)
            with quiet_capture.capturing(self._branches, self._draws):
                if symbols.are_marked() and self.folding is not None:
                    self._unfolded = "sizes are symbols"
                folding = None if self._unfolded else self.folding
                if folding is None:
                    self._has_alike = bool(self._unfolded and alike_modules(module).modules)
                    return self._call(module, *args, **kwargs)
                try:
                    with folding.tracing(module):
                        return self._call(module, *args, **kwargs)
                except (Unplanned, NothingToPlan):
                    raise
                except Exception as error:
                    inner = getattr(error, "inner_exception", None)
                    if isinstance(inner, CaptureError) or not folding.was_tried:
                        raise
                    is_sharing = isinstance(inner, CastOnce)
                    self.unfold(str(inner) if is_sharing else "a trace of one of them failed")
                return self._call(module, *args, **kwargs)

    @staticmethod
    def _refused(*_: Any) -> Any:
        raise NothingToPlan

    def reach(
        self, module: nn.Module, *args: Any, symbolic: Iterable[symbols.Dimension] = ()
    ) -> Unplanned:
        """Capture a call without running it; raise CaptureError as a call does.

        `symbolic` are dimensions of its tensors that may differ in later calls of a new graph.
        """
        self.forget_programs()
        # Code made by dynamo draws Python's random numbers before it calls the graph.
        pause = CollectorPause(collects=True)
        marked = symbols.marked(symbolic)
        with dispatch.keys_kept(), generators_kept(module.modules()), marked, pause:
            try:
                self(module, *args)
            except Unplanned as reached:
                return reached
        raise CaptureError("the call ran without its graph being captured")

    @staticmethod
    def _boxed(
        function: Callable[[Captured, list[Any]], Any], captured: Captured
    ) -> Callable[[list[Any]], Any]:
        def boxed(args: list[Any]) -> Any:
            return function(captured, args)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    def _forward(self, captured: Captured, args: list[Any]) -> Any:
        emitted = captured.emitted
        if emitted is None:
            warm_up_scripts(captured.lowered, args)
            raise Unplanned(captured, list(args))
        self.ran = captured
        # Checks that come in order add inputs to the model's: such a call does not run again.
        is_models = len(args) == captured.lowered.first_terms
        if self.leaves is not None and is_models and captured.are_whole:
            leaves = [*compress(args, captured.are_differentiable)]
            original = getattr(emitted, "original", None)
            self.leaves = leaves if original is None else [*map(original, leaves)]
        sizes = captured.sizes(args)
        if captured.meet is not None:
            captured.meet()
        result = emitted.forward(args)
        token = result[-1]
        token.sizes = sizes
        # The program may differ when the backward of this step comes.
        token.backward_of_program = emitted.backward
        token.absent, token.is_passed, token.reads = frozenset(), False, None
        token.owner = self._owner
        self.token = weakref.ref(token)
        return result

    @staticmethod
    def _backward(captured: Captured, args: list[Any]) -> Any:
        token = args[captured.saved]
        tokens = [args.pop() for _ in range(captured.tokens)]
        absent = token.absent
        run = token.backward_of_program
        owner, sizes, is_passed, reads = token.owner(), token.sizes, token.is_passed, token.reads
        del token
        if is_passed:
            if isinstance(run, Delivery):
                run.forget()
            return (None,) * captured.lowered.first_terms
        is_half = owner is not None and backwards.in_split_backward()
        if is_half and core.splits_backward(owner.parameters()):
            raise RuntimeError(SPLIT_BACKWARD)
        if reads is not None:
            reads.check()
        withheld: frozenset[int] = frozenset()
        if absent and captured.reached is not None:
            # As in plain PyTorch, inputs that reach only outputs without a gradient get none.
            withheld = frozenset(
                index for index, tangents in enumerate(captured.reached) if tangents <= absent
            )
        captured.fill(args, sizes)
        if isinstance(run, Delivery):
            run.withheld = withheld
        gradients = run(args)
        if withheld:
            gradients = tuple(None if i in withheld else g for i, g in enumerate(gradients))
        return (*gradients, *tokens) if tokens else gradients

    def with_a_way_around(self, output: Any, rerun: Rerun, forward: Callable[[Any], Any]) -> Any:
        """Return the result of the last call, whose forward may run again in plain autograd.

        `rerun` is the state in which the call began, and `forward` its function without a plan.
        """
        leaves, self.leaves = self.leaves, None
        if not leaves or self.token is None or self.ran is None:
            return output
        if self.ran.late:
            rerun.keep_state()
        return attach(output, rerun, forward, leaves, self.token, self.ran)

    def forget_programs(self) -> None:
        """Have the next call of each graph ask for a program."""
        for captured in self.graphs:
            captured.emitted = None

    def note_absent_tangents(self, outputs: Sequence[torch.Tensor]) -> None:
        """Have the backward of the last call see which of its outputs get no gradient."""
        if self.ran is None or self.token is None:
            return
        standing = self.ran.lowered.output_of_tangent
        if len(standing) < 2:
            return
        node = core.compiled_node(outputs)
        token = self.token()
        if node is None or token is None:
            return
        if self.ran.reached is None:
            self.ran.reached = self.ran.lowered.tangents_of_gradients()
        del token
        myself = self.token

        def arrived(gradients: Sequence[torch.Tensor | None]) -> None:
            token = myself()
            if token is not None:
                token.absent = frozenset(  # type: ignore[attr-defined]
                    tangent for tangent, k in enumerate(standing) if gradients[k] is None
                )

        node.register_prehook(arrived)
        if all(n.meta["val"].device.type in DEVICES for n in self.ran.lowered.tangents):
            # Autograd would make zeros of an absent tangent.
            node.set_materialize_grads(False)

    def _note_inputs(self, module: fx.GraphModule) -> None:
        """Note the homes of the inputs of dynamo's graph, and which are plain tensors."""
        if self._home_of is not None:
            self._homes = [*map(self._home_of, regions.tensors_of_inputs(module.graph))]
        if self._is_part:
            given = regions.tensors_of_inputs(module.graph)
            self._are_arguments = [type(tensor) is torch.Tensor for tensor in given]

    def _partition(
        self, module: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        if self.backend == "inductor":
            inductor.joint_passes(module)
        if self.folding is not None:
            self.folding.expand(module)
        tokens = drop_tokens(module)
        variables = write_numbers(module) if self._numbers else {}
        if self.backend == "inductor":
            with inductor.explained():
                fuse(module, num_fwd_outputs)
        if self._homes:
            insert_fetches(module, self._homes, num_fwd_outputs)
        further = split_sums(module, num_fwd_outputs, self._are_arguments)
        lowered = lower(module, num_fwd_outputs)
        lowered.further = further
        lowered.variables = variables
        if lowered.symbols and not symbols.are_marked() and not self._numbers:
            raise CaptureError(_UNSIZED)
        names = region_guards.guarded_names()
        lowered.reads_gradients = region_guards.reads_gradients(names)
        token = module.graph.call_function(torch.ops.aten.empty.memory_format, ([0],))
        token.name = "token"
        mode = core.fake_mode_of(lowered.primals + lowered.tangents)
        self._modes.append(mode)
        with mode:
            # If the token had memory of its own, PyTorch would let no backward keep the graph.
            inputs = [node.meta.get("val") for node in lowered.primals]
            token.meta["val"] = next(
                (t.as_strided((0,), (1,)) for t in inputs if isinstance(t, torch.Tensor)),
                torch.empty(0),
            )
        saved = saved_primals(lowered)
        if any(map(is_unchecked, saved)):
            # AOTAutograd takes the kept values in this order: compared ones, then the others.
            token.meta["saved_tensor_with_no_vc_check"] = True
        forward = _stub(module, lowered.primals, [*lowered.outputs, *saved, token])
        backward = _stub(
            module,
            [*saved, token, *lowered.tangents, *tokens],
            [*lowered.gradients[: lowered.first_terms], *tokens],
        )
        module.graph.erase_node(token)
        captured = Captured(lowered, saved=len(saved), tokens=len(tokens))
        captured.guarded = {name: whole for name, whole in names.items() if _ARGUMENT.search(name)}
        captured.late = {name: compile(name, "", "eval") for name in backwards.noted_reads()}
        captured.numbers = numbers_of(None if self._owner is None else self._owner(), names)
        self.graphs.append(captured)
        # PyTorch compiles a backward when it is first needed, maybe after another capture.
        forward.meta[_GRAPH] = backward.meta[_GRAPH] = captured
        return forward, backward


_FOR_DEVELOPERS = (
    "Developer debug context",
    "For more details about this graph break",
    "Hint: It may be possible to write Dynamo tracing rules",
    "Hint: This graph break is fundamental",
    "Set TORCHDYNAMO_VERBOSE",
    "consider using data-dependent friendly APIs",
)


def _refusal(error: BaseException | None) -> CaptureError | None:
    """Return our own error that led to an error of dynamo's; None without one."""
    while error is not None and not isinstance(error, CaptureError):
        inner = getattr(error, "inner_exception", None) or error.__cause__
        error = inner or error.__context__
    return error


def _reason(error: BaseException) -> str:
    """Return dynamo's message without parts for its developers and our own lines of code."""
    found: list[str] = []
    ours = f'File "{Path(__file__).parent}'
    was_ours = False
    # Errors of symbolic sizes have the user's line three times.
    message = re.sub(r"\nCaused by: .*?\n(?=\nfrom user code:)", "", str(error), flags=re.DOTALL)
    for line in map(str.rstrip, message.splitlines()):
        text = line.strip()
        is_code = was_ours and not text.startswith("File ")
        was_ours = text.startswith(ours)
        is_mark = set(text) <= set("^~")
        if not (was_ours or is_code or is_mark or text.startswith(_FOR_DEVELOPERS)):
            found.append(line.partition("  (Size-like symbols")[0])
    return "\n".join(found[:40])
