"""Registry of the engines of a model, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from rotor._pytorch import fsdp
from rotor.engines.chain.engine import ChainEngine
from rotor.engines.chain.sharded import SpansStages, find_sharding
from rotor.engines.chain.stages import is_plain_sequential
from rotor.engines.contract import Context, Engine
from rotor.engines.dynamic.engine import DynamicEngine
from rotor.engines.graph.engine import GraphEngine
from rotor.engines.graph.shared_engine import SharedGraphEngine
from rotor.engines.parts.engine import PartsEngine
from rotor.engines.parts.sharded_engine import ShardedBlocksEngine
from rotor.engines.plain import PlainEngine
from rotor.engines.sequential import SequentialEngine


def _automatic(context: Context) -> list[Engine]:
    """Return the engine that a model suits, and the engines that take over its refusals."""
    settings = context.settings
    if settings.counts == "reserved":
        return [*_graph(context), PlainEngine(context)]
    # Only the operations of a graph can be priced without running.
    is_timed = isinstance(settings.profile, str) and settings.profile == "measured"
    is_chain = is_plain_sequential(settings.module) and is_timed and settings.offload is None
    if is_chain and settings.backend == "fx" and ChainEngine.name not in settings.unsuited:
        # Blocks, which follow, need no unit of their own.
        with suppress(SpansStages):
            return [SequentialEngine(context)]
    if settings.backend == "fx" and fsdp.is_loaded():
        sharding = find_sharding(settings.module, context.wrapper())
        if sharding is not None:
            return [ShardedBlocksEngine(context, sharding)]
    if not settings.preserve_rng_state and ChainEngine.name in settings.unsuited:
        return [PlainEngine(context)]
    following = [PartsEngine(context), DynamicEngine(context), PlainEngine(context)]
    return [*_graph(context), *following]


def _graph(context: Context) -> list[Engine]:
    """Return the engine of captured graphs."""
    return [(context.settings.graph_class or GraphEngine)(context)]


ENGINES: dict[str, Callable[[Context], list[Engine]]] = {
    "auto": _automatic,
    "chain": lambda context: [ChainEngine(context)],
    "graph": _graph,
    "dynamic": lambda context: [DynamicEngine(context)],
}
"""Makers of engines, by the value of ``engine=``."""


def engines_for(context: Context) -> list[Engine]:
    """Return the engines of a model: the first is asked first, and each hands over to the next."""
    found = ENGINES[context.settings.engine](context)
    if context.peers.ranks is not None and isinstance(found[0], GraphEngine):
        # A refusal on one rank is a refusal on all.
        shared: list[Engine] = [SharedGraphEngine(context)]
        takes_over = context.settings.engine == "auto" and context.peers.has_collectives
        return [*shared, DynamicEngine(context)] if takes_over else shared
    return found
