"""Draw the README's picture: step time against memory of a GPT, and where plain PyTorch stands.

Writes ``docs/curve.svg``. Times are relative to a step without recomputation.

    OMP_NUM_THREADS=1 python benchmarks/readme_curve.py [--layers 12] [--out docs]
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from common import cross_entropy, step_peak_bytes, token_batch

import rotor
from rotor.report.figures import save, styled

WIDTH, TOKENS = 256, 128
DOCS = Path(__file__).resolve().parents[1] / "docs"


@styled
def draw(curve: rotor.algorithms.Curve, plain_bytes: int, folder: Path) -> list[Path]:
    """One picture, with the curve and the plain step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 2.8), layout="constrained")
    ax = figure.subplots()
    share = curve.bytes / plain_bytes * 100
    ax.step(share, curve.seconds / curve.seconds[-1], where="post", label="rotor")
    ax.plot([100], [1], "o", color="tab:grey", label="plain PyTorch")
    ax.set_xlabel("memory of a training step (% of plain PyTorch)")
    ax.set_ylabel("time of a step")
    ax.set_xlim(0, 105)
    ax.legend()
    folder.mkdir(parents=True, exist_ok=True)
    return save(figure, folder / "curve", ["svg"])


def main() -> None:
    """Measure, draw, and print the figures that the README quotes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of the picture")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = rotor.gpt.gpt(
        "gpt2",
        layers=arguments.layers,
        width=WIDTH,
        heads=8,
        vocab_size=1000,
        context_length=TOKENS,
    )
    batch = token_batch(8, TOKENS, 1000, torch.device("cpu"))
    plain_bytes = step_peak_bytes(copy.deepcopy(model), batch)
    limited = rotor.Checkpointable(model, loss_fn=cross_entropy)
    limited.measure(batch[0], targets=(batch[1],))
    curve = limited.curve()
    for percent in (80, 60, 40):
        slower = curve.at(plain_bytes * percent // 100) / curve.seconds[-1]
        print(f"{percent} % of the memory: {slower:.2f} times the step")
    print(f"least: {curve.minimum_bytes / plain_bytes:.0%} of {plain_bytes / 1e6:.1f} MB")
    draw(curve, plain_bytes, arguments.out)


if __name__ == "__main__":
    main()
