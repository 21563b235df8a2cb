"""Entries of `run_all.py`: scripts, their questions, their arguments and times."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Benchmark:
    """One run of a script: its question, its arguments, how long it may take, in seconds.

    A kind of run (`quick`, `full`, `gpu`) without arguments, ``None``, leaves it out. `rotor` as a
    script is the command line. Where a script's tables are taken on one thread, it gets
    `OMP_NUM_THREADS=1`, but not on a GPU. Entries of the same script have different names.
    """

    script: str
    question: str
    quick: tuple[str, ...] | None = ()
    limit_s: float = 1200.0
    quick_limit_s: float = 180.0
    gpu: tuple[str, ...] | None = None
    gpu_limit_s: float = 60.0
    full: tuple[str, ...] | None = ()
    name: str = ""
    one_thread: bool = False

    def __post_init__(self) -> None:
        """Name it after its script, where it has no name."""
        object.__setattr__(self, "name", self.name or self.script)

    def command(self, given: tuple[str, ...]) -> list[str]:
        """What Python is called with."""
        start = ["-m", "rotor"] if self.script == "rotor" else [f"benchmarks/{self.script}"]
        return [*start, *given]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


BENCHMARKS = (
    Benchmark(
        "truth.py",
        "chains: limit, prediction, measured peak, equal numbers",
        _words("ResNet-18 --fractions 0.8"),
        gpu=_words("ResNet-18 GPT --device cuda --fractions 0.8 0.6"),
        gpu_limit_s=45,
    ),
    Benchmark(
        "graph_truth.py",
        "graphs: limit, prediction, measured peak, and PyTorch's own at equal peak",
        _words("ResNet-18 --shrink 2 --fractions 0.7 --rounds 3"),
        gpu=_words("ResNet-18 GPT --device cuda --fractions 0.7 0.5 --rounds 5 --stock 1"),
        gpu_limit_s=60,
        full=_words("--fractions 0.8 0.5"),
        one_thread=True,
    ),
    Benchmark(
        "dtr_table.py",
        "the dynamic runtime: peak and time",
        _words("--tiny --rounds 2"),
        gpu=_words("resnet gpt --device cuda --rounds 3"),
        gpu_limit_s=50,
        one_thread=True,
    ),
    Benchmark(
        "first_step.py",
        "what the first step of a model costs, and the ones in which plans are improved",
        _words("GPT --steps 5"),
        limit_s=1800,
        one_thread=True,
    ),
    Benchmark(
        "shapes.py",
        "training on batches of 110 lengths",
        _words("--only bert --steps 6 --layers 1 --width 32"),
        limit_s=1800,
        one_thread=True,
    ),
    Benchmark(
        "tier.py",
        "keeping, recomputing and moving to a disk, at equal limits",
        _words("--quick --rounds 3 --shares .6"),
        limit_s=2400,
        full=_words("--rounds 7"),
        one_thread=True,
    ),
    Benchmark(
        "tier_plans.py",
        "plans with a second tier beside recomputation and the bound",
        _words("--effort fast --graphs none --sizes 1000"),
        limit_s=3600,
        full=_words("--bandwidths 0.3 1 3"),
    ),
    Benchmark(
        "tier_rivals.py",
        "PyTorch's own offloading and checkpoints beside plans with a tier, at equal peaks",
        _words("--quick --speeds 1"),
        limit_s=1200,
        one_thread=True,
    ),
    Benchmark(
        "larger.py",
        "streaming of blocks beside plans, parameters and states exceeding the limit",
        _words("--quick --speeds 1 --shares .5"),
        limit_s=2400,
        one_thread=True,
    ),
    Benchmark(
        "against_segments.py",
        "chains against torch.utils.checkpoint at equal peak",
        _words("ResNet-18 --segments 2 --rounds 3"),
        full=_words("--segments 2 4 8"),
    ),
    *(
        Benchmark(
            "one_card.py",
            f"{name}: limits, costs and bits of every engine beside what PyTorch has",
            quick=None,
            gpu=_words(f"{name} --device cuda"),
            gpu_limit_s=200,
            full=None,
            name=f"one_card.py, {name}",
        )
        for name in ("GPT", "Llama", "convolutions", "diffusion")
    ),
    Benchmark(
        "graph_curve.py",
        "whether points of a curve are what a run of them shows",
        _words("ResNet-18 --shrink 2 --points 3 --rounds 3"),
        gpu=_words("ResNet-18 --device cuda --points 5 --rounds 5"),
        gpu_limit_s=30,
        full=_words("gpt resnet-18 --rounds 11"),
        one_thread=True,
    ),
    Benchmark(
        "inductor.py",
        "plans of Inductor's kernels beside torch.compile and its memory budget",
        _words("gpt --fractions 0.7 --budgets 0.6 --rounds 3 --layers 2"),
        full=_words("--budgets 0.6 0.3"),
        gpu=_words("gpt --device cuda --fractions 0.7 --budgets 0.6 --layers 2"),
        gpu_limit_s=70,
    ),
    Benchmark(
        "largest_batch.py",
        "the largest batch, by planning and by trial",
        _words("--only GPT"),
        gpu=_words("--only GPT --device cuda"),
        gpu_limit_s=30,
    ),
    Benchmark(
        "demo.py",
        "one model, one limit, everything",
        _words("--batch 8 --size 128 --steps 3 --fraction 0.9"),
        gpu=_words("--device cuda"),
        gpu_limit_s=30,
    ),
    Benchmark(
        "dtr_overhead.py",
        "what the dynamic runtime costs an operator",
        gpu=_words("--device cuda"),
        gpu_limit_s=35,
    ),
    Benchmark(
        "graph_overhead.py",
        "what emitted code costs beyond the work itself",
        _words("--depths 2 10 --rounds 40"),
        gpu=_words("--device cuda --depths 2 10 --rounds 40"),
        gpu_limit_s=20,
    ),
    Benchmark(
        "verified_steps.py",
        "what proving a step while it runs costs",
        _words("--shrink 4 --shares 0.05 --rounds 5"),
        one_thread=True,
    ),
    Benchmark(
        "dtr_table.py",
        "what each mechanism of the dynamic runtime is worth",
        _words("gpt --ablation --tiny --rounds 1"),
        full=_words("--ablation"),
        name="dtr_table.py --ablation",
        one_thread=True,
    ),
    Benchmark(
        "readme_curve.py",
        "the picture and the table of the README",
        _words("--layers 2 --rounds 2 --out build/quick"),
        one_thread=True,
    ),
    Benchmark(
        "overhead.py", "what the executor costs beyond the work itself", _words("--rounds 40")
    ),
    Benchmark(
        "planning.py",
        "time and memory of the solvers of chains",
        _words("--exact 20 50 --dense 50"),
    ),
    Benchmark(
        "planner.py",
        "quality and speed of the planner of graphs",
        _words("--seconds 0.5 --sizes 1000 --curve-sizes 200 --graphs none"),
    ),
    Benchmark(
        "sharded.py",
        "a model sharded by FSDP2 on two processes",
        _words("--blocks 2 --width 32 --length 32 --steps 2 --shares 0.8"),
        full=_words("--steps 3"),
    ),
    Benchmark(
        "sharded.py",
        "a sharded model that is no chain, by graphs of its blocks",
        _words("--loop --blocks 2 --width 32 --length 32 --steps 2 --shares 0.8"),
        full=_words("--loop --steps 3"),
        name="sharded.py loop",
    ),
    Benchmark(
        "overlap.py",
        "how much of DistributedDataParallel's overlap a plan keeps",
        _words("--layers 2 --steps 2"),
    ),
    Benchmark(
        "simulator.py",
        "reading and replaying logs",
        _words("--sizes 1000 10000 --no-oracle"),
    ),
    Benchmark("dtr_simulator.py", "the dynamic runtime beside the simulator"),
    Benchmark("reserved.py", "limits in reserved bytes, simulated", ("--quick",), 1200.0, 300.0),
    Benchmark("dynamic_tier.py", "the dynamic engine with a disk", ("--quick",), one_thread=True),
    Benchmark(
        "check_random_chains.py",
        "the solvers beside exhaustive search",
        _words("--count 100"),
        full=_words("--count 10000000 --minutes 3"),
    ),
    Benchmark(
        "rotor",
        "how many operations run again as a network grows",
        _words("experiment linear --sizes 16 32 --heat-size 0 --formats --fresh --out build/quick"),
        full=_words("experiment linear --heat-size 0 --formats --fresh --out build/linear"),
        name="rotor experiment linear",
    ),
)
"""The most important ones first: where time ends early, the last ones are left out."""
