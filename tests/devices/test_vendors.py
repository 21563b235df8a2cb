"""Where the package names a vendor of accelerators."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Lines that name a vendor, each for a fact of that vendor: everything else goes by PyTorch's words
# for any accelerator, in rotor/_pytorch/devices.py.
VENDOR_LINES = {
    "rotor/_core.pyi": 2,  # the driver, by dlopen
    "rotor/_pytorch/devices.py": 3,  # versions of its libraries; the default where none is here
    "rotor/_pytorch/cudnn.py": 1,  # where BatchNorm is cuDNN's
    "rotor/_pytorch/dispatch.py": 2,  # precisions of cuBLAS and cuDNN
    "rotor/_pytorch/inductor.py": 1,  # devices that Triton compiles for
    "rotor/commands/checks.py": 1,  # an example
    "rotor/common/model_state.py": 1,  # cuDNN's batch norm
    "rotor/dtr/guard.py": 1,  # an interface that reads memory
    "rotor/meter/allocator.py": 2,  # the driver's free bytes
    "rotor/wrapper/usage_warnings.py": 1,  # an example
}


def test_vendors_are_named_for_their_own_facts():
    files = [*sorted((ROOT / "rotor").rglob("*.py")), ROOT / "rotor/_core.pyi"]
    assert len(files) > 100
    found = {
        p.relative_to(ROOT).as_posix(): sum(
            "cuda" in line for line in p.read_text(encoding="utf-8").splitlines()
        )
        for p in files
    }
    assert {path: count for path, count in found.items() if count} == VENDOR_LINES
    assert sum(VENDOR_LINES.values()) <= 15
