"""Shows `verify`: a ModelNew written by hand is checked in float64, and a wrong one is found."""

import subprocess
import sys
import tempfile
from pathlib import Path

PROBLEM = Path(__file__).parents[1] / "blocks" / "focal_loss.py"
# p - 2pt + t is 1 - right; softplus(x) - xt is the cross entropy with logits.
RIGHT = """
class ModelNew(Model):
    def forward(self, logits, targets):
        chance = torch.sigmoid(logits)
        wrong = chance - 2 * chance * targets + targets
        loss = nn.functional.softplus(logits) - logits * targets
        return (self.alpha * wrong * wrong * loss).mean()
"""
# Forgets the square.
WRONG = RIGHT.replace("wrong * wrong", "wrong")


def verify(text: str, folder: Path) -> int:
    """The exit code of `fusewright verify`: 0 where every check is right, 1 where one is wrong."""
    candidate = folder / "model_new.py"
    candidate.write_text(PROBLEM.read_text() + text)
    command = [sys.executable, "-m", "fusewright", "verify", str(PROBLEM), str(candidate)]
    # The text is our own, so it needs no namespaces of Linux.
    options = ["--mode", "eval", "--device", "cpu", "--unconfined"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    last = (done.stderr or done.stdout).strip().splitlines()[-1]
    print(f"exit code {done.returncode}: {last.replace(str(candidate), candidate.name)}")
    return done.returncode


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert verify(RIGHT, Path(folder)) == 0
        assert verify(WRONG, Path(folder)) == 1


if __name__ == "__main__":
    main()
