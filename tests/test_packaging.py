"""The wheel alone: jax and optax, and the README's example runs."""

import pathlib
import re
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def run(*command, cwd):
  done = subprocess.run(
      list(map(str, command)), cwd=cwd, capture_output=True, text=True,
      timeout=600)
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
  folder = tmp_path_factory.mktemp("wheel")
  run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir",
      folder, ROOT, cwd=folder)
  found, = folder.glob("*.whl")
  return found


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
  names = zipfile.ZipFile(wheel).namelist()
  assert "logra_jax/py.typed" in names and "logra_jax/rl/step.py" in names
  assert {n.split("/")[0].split("-")[0] for n in names} == {"logra_jax"}


def test_the_readme_example_runs_with_the_base_alone(wheel, tmp_path):
  python = tmp_path / "venv" / "bin" / "python"
  run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
  run(python, "-m", "pip", "install", "-q", wheel, cwd=tmp_path)
  text = (ROOT / "README.md").read_text()
  example = re.search(r"```python\n(.*?)```", text, re.DOTALL)
  assert example is not None
  (tmp_path / "example.py").write_text(example[1])
  run(python, "example.py", cwd=tmp_path)
  installed = run(python, "-m", "pip", "list", "--format=freeze", cwd=tmp_path)
  names = {line.split("==")[0].lower() for line in installed.splitlines()}
  assert {"jax", "optax", "logra-jax"} <= names
  assert not {"flax", "chex", "orbax-checkpoint", "grain"} & names, names
  version = run(
      python, "-c", "import logra_jax; print(logra_jax.__version__)",
      cwd=tmp_path)
  assert version.strip() in wheel.name
