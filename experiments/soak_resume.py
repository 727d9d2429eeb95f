"""Kills a run at random moments and compares it with an uninterrupted one.

  python experiments/soak_resume.py [--kills=20] [--seed=0]

Every line of metrics but the timings, and every bit of the last checkpoint
(weights, moments, bases, keys, counters), must be the uninterrupted run's.
"""

import argparse
import pathlib
import random
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from experiments import resume  # noqa: E402
from logra_jax import checkpoint  # noqa: E402
from logra_jax import metrics  # noqa: E402

# As small as the walk gets; what it learns does not matter here.
_FIELDS = (
    "model.embed_dim=32", "model.num_heads=2", "model.head_dim=16",
    "model.mlp_dim=64", "optimizer.rank=8", "data.examples=200",
    "data.held_out=16", "warm_start.updates=4", "warm_start.batch_size=16",
    "rollout.prompts=8", "rollout.group_size=4", "probe_rows=8", "updates=24",
    "eval_every=6", "checkpoint_every=2", "advantage=reinforce")
_TIMED = ("seconds", "tokens_per_second")


def command(workdir: pathlib.Path, cache_dir: pathlib.Path) -> list[str]:
  """The command line of a run that takes a few seconds."""
  return [
      sys.executable, "experiments/launch.py",
      "--config=configs/quickstart.py:short", f"--workdir={workdir}",
      f"--cache_dir={cache_dir}", *(f"--config.{f}" for f in _FIELDS)]


def wait_for_updates(
    workdir: pathlib.Path, count: int, process: subprocess.Popen
) -> None:
  """Waits until a run has logged so many updates, or has ended."""
  path = workdir / "metrics.jsonl"
  while process.poll() is None:
    if path.exists() and len(_updates(path)) >= count:
      return
    time.sleep(0.02)


def soak(scratch: pathlib.Path, kills: int, seed: int) -> None:
  """Runs, kills and compares.

  Args:
    scratch: an empty directory.
    kills: how many times.
    seed: of the moments.

  Raises:
    RuntimeError: if a run fails or differs.
  """
  rng = random.Random(seed)
  cache_dir = scratch / "cache"
  _finish(command(scratch / "whole", cache_dir))
  killed = command(scratch / "killed", cache_dir)
  for kill in range(kills):
    process = subprocess.Popen(
        killed, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    # A point of the run, then a moment within an update, a save or a start.
    wait_for_updates(
        scratch / "killed", rng.randint(0, 24 * (kill + 1) // kills), process)
    time.sleep(rng.uniform(0.0, 0.3))
    process.kill()
    process.wait()
  _finish(killed)
  for name in ("whole", "killed"):
    print(f"{name}: {_last(scratch / name)}")
  if _trace(scratch / "whole") != _trace(scratch / "killed"):
    raise RuntimeError(
        f"seed {seed}: the metrics of the killed run differ; see {scratch}")
  if _last(scratch / "whole") != _last(scratch / "killed"):
    raise RuntimeError(
        f"seed {seed}: the last checkpoints differ in some bit; see {scratch}")


def _finish(line):
  done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
  if done.returncode:
    raise RuntimeError(f"{' '.join(line)} failed: {done.stderr}")


def _updates(path):
  return [line for line in metrics.read(path) if "reward" in line]


def _trace(workdir):
  return [{k: v for k, v in line.items() if k not in _TIMED}
          for line in metrics.read(workdir / "metrics.jsonl")]


def _last(workdir):
  """(step, fingerprint) of the last checkpoint."""
  with checkpoint.Checkpoints(workdir / resume.CHECKPOINTS) as checkpoints:
    step = checkpoints.steps()[-1]
    return step, checkpoints.record(step)["fingerprint"]


def main(argv: list[str]) -> int:
  """Soaks in a temporary directory. Returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--kills", type=int, default=20)
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args(argv)
  if args.kills < 1:
    print(f"error: kills {args.kills} is below 1", file=sys.stderr)
    return 2
  with tempfile.TemporaryDirectory() as scratch:
    try:
      soak(pathlib.Path(scratch), args.kills, args.seed)
    except RuntimeError as error:
      print(f"error: {error}", file=sys.stderr)
      return 1
  print(f"bitwise equal after {args.kills} kills")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
