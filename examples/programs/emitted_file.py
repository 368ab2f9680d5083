"""Shows the emitted file: write it, import it as any Python file, and use its ModelNew."""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch

PROBLEM = Path(__file__).parents[1] / "blocks" / "linear_relu_softmax.py"


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "model_new.py"
        command = [sys.executable, "-m", "fusewright", "optimize", str(PROBLEM)]
        command += ["--mode", "eval", "--device", "cpu", "-o", str(output)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        print(f"{output.name}: {len(output.read_text().splitlines())} lines")

        # The file needs PyTorch and a compiler. It does not import Fusewright.
        new = imported(output)
        torch.manual_seed(0)
        model, fast = new.Model(*new.get_init_inputs()), new.ModelNew(*new.get_init_inputs())
        fast.load_state_dict(model.state_dict())
        inputs = new.get_inputs()
        with torch.no_grad():
            expected, found = model.eval()(*inputs), fast.eval()(*inputs)
        print(f"largest difference: {(found - expected).abs().max().item():.1e}")


if __name__ == "__main__":
    main()
