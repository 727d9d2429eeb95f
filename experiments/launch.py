"""Starts the run that a configuration describes, or goes on with it.

  python experiments/launch.py --config=configs/quickstart.py[:short] \
      [--workdir=runs/quickstart] [--config.optimizer.rank=64 ...]

The same command goes on where a killed or stopped run left its checkpoints.
"""

import importlib
import pathlib
import sys

# Run as a script, so that neither experiments nor configs need installing.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax  # noqa: E402
from absl import flags  # noqa: E402
from absl import logging as absl_logging  # noqa: E402
from ml_collections import config_dict  # noqa: E402
from ml_collections import config_flags  # noqa: E402

from experiments import resume  # noqa: E402

CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Configuration, e.g. configs/quickstart.py:short.")
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where results go; default runs/<configuration>.")
CACHE_DIR = flags.DEFINE_string(
    "cache_dir", "~/.cache/logra_jax", "Warm starts, shared between runs.")

RESUME = flags.DEFINE_enum(
    "resume", "auto", ["auto", "never"],
    "auto: go on with the run in the workdir if it has this configuration;"
    " never: start again and move an earlier run into a folder beside.")
MAX_SECONDS = flags.DEFINE_float(
    "max_seconds", None, "Save and leave after this time.", lower_bound=0.0)

# Configuration errors exit with this code, as command lines do by custom.
BAD_INPUT = 2


def main(argv: list[str]) -> int:
  """Parses, checks, runs. Returns the exit code."""
  try:
    config, name = _parse(argv)
    _choose_devices(config)
    experiment = importlib.import_module(config.experiment)
    run = experiment.prepare(config)
    workdir = _make_dir(WORKDIR.value or f"runs/{name}", "workdir")
    cache_dir = _make_dir(CACHE_DIR.value, "cache_dir")
    # Programs that took long to compile, for the next start.
    jax.config.update("jax_compilation_cache_dir", str(cache_dir / "compiled"))
    resume.check(workdir, config, RESUME.value)
  except (ValueError, ModuleNotFoundError) as error:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return BAD_INPUT
  # What orbax logs as tracebacks, a run reports as one line.
  absl_logging.set_verbosity(absl_logging.FATAL)
  stop = resume.Stop(MAX_SECONDS.value)
  try:
    summary = experiment.run(run, workdir, cache_dir, stop)
  except KeyboardInterrupt:
    print("interrupted: nothing was saved since the last checkpoint",
          file=sys.stderr)
    return 130
  except ValueError as error:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return BAD_INPUT
  return stop.exit_code if summary is None else 0


def _parse(argv):
  """(configuration, its name); every mistake becomes one ValueError."""
  try:
    rest = flags.FLAGS(argv)[1:]
    config = CONFIG.value
    if config is None:
      raise ValueError(
          "no configuration: pass --config=configs/quickstart.py")
    if not isinstance(config, config_dict.ConfigDict):
      raise ValueError(
          f"cannot read {_flag(argv, 'config')!r}: give the path of a file with"
          " get_config()")
  except (flags.Error, AttributeError, KeyError, TypeError) as error:
    # The parser's own text may hold a whole traceback; its end is the cause.
    lines = str(error).replace("\\n", "\n").strip().splitlines()
    raise ValueError(f"bad command line: {_cause(lines)}") from error
  if rest:
    raise ValueError(f"unknown argument {rest[0]!r}: flags start with --")
  path, _, variant = (_flag(argv, "config") or "").partition(":")
  stem = pathlib.Path(path).stem
  return config, f"{stem}-{variant}" if variant else stem


def _choose_devices(config):
  """Fake CPU devices if asked for; must run before a backend starts."""
  if config.platform:
    jax.config.update("jax_platforms", config.platform)
  if config.platform == "cpu":
    if config.devices < 1:
      raise ValueError(f"devices {config.devices} is below 1")
    jax.config.update("jax_num_cpu_devices", config.devices)
  try:
    jax.devices()
  except RuntimeError as error:
    raise ValueError(
        f"platform {config.platform!r} cannot start ({error}): choose cpu, or"
        " install jax for it") from error


def _make_dir(path, name):
  """An existing directory that can be written to."""
  path = pathlib.Path(path).expanduser().resolve()
  try:
    path.mkdir(parents=True, exist_ok=True)
    probe = path / ".writable"
    probe.touch()
    probe.unlink()
  except OSError as error:
    raise ValueError(
        f"cannot write to {name} {str(path)!r} ({error.strerror}): choose"
        f" another with --{name}=...") from error
  return path


def _flag(argv, name):
  for arg in argv:
    if arg.lstrip("-").startswith(f"{name}="):
      return arg.split("=", 1)[1]
  return None


def _cause(lines):
  return lines[-1].strip(" \"'") if len(lines) > 2 else " ".join(lines)


if __name__ == "__main__":
  sys.exit(main(sys.argv))
