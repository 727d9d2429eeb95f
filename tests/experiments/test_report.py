"""The picture of a run is drawn whatever the run went through."""

import json
import random
import subprocess
import sys

import pytest
from matplotlib import figure
from matplotlib import image

from experiments import report

SUMMARY = {
    "accuracy_before": 0.42, "accuracy_after": 0.94, "greedy_before": 0.66,
    "greedy_after": 0.96, "updates": 9, "seconds": 253.4, "devices": 8,
    "kl_predicted_median": 4e-3, "kl_realised_median": None,
    "sync_bytes_per_update": 612_344, "full_sync_bytes": 7_700_000,
    "optimizer_state_bytes": 1_240_000, "dense_adam_state_bytes": 14_400_000}
CONTROL = "kl_predicted", "kl_budget", "step_scale"
TRACES = "reward", "kl_realised", "completion_length", *CONTROL


def _evaluation(step, value):
  names = "accuracy", "greedy_accuracy", "accuracy/gcd", "greedy_accuracy/gcd"
  return {"step": step} | dict.fromkeys(names, value)


def _update(step):
  return {"step": step, "refused": step % 4 == 0} | {
      k: random.uniform(0.1, 0.9) for k in TRACES}


def _run(workdir, updates, evaluations=None, summary=SUMMARY):
  evaluations = evaluations or [
      _evaluation(0, 0.4), _evaluation(len(updates), 0.9)]
  (workdir / "metrics.jsonl").write_text("".join(
      json.dumps(line) + "\n" for line in evaluations + updates))
  (workdir / "summary.json").write_text(json.dumps(summary))
  return workdir


def _is_a_page(path):
  pixels = image.imread(path)[..., :3]
  return pixels.shape == (1000, 1600, 3) and 0 < (pixels < 1).mean() < 0.5


def _draw_panels(monkeypatch, workdir):
  """The axes of a drawn report, by title."""
  figures = []
  save = figure.Figure.savefig
  with monkeypatch.context() as patch:
    patch.setattr(figure.Figure, "savefig", lambda fig, path: (
        figures.append(fig), save(fig, path)))
    assert _is_a_page(report.draw(workdir))
  return {ax.get_title(loc="left").strip(): ax for ax in figures[0].axes}


def _texts(ax):
  return " ".join(text.get_text() for text in ax.texts)


def test_a_run_becomes_a_page_in_its_own_directory(tmp_path):
  _run(tmp_path, [_update(i + 1) for i in range(9)])
  assert report.draw(tmp_path) == tmp_path / "report.png"
  assert _is_a_page(tmp_path / "report.png")


def test_a_run_without_control_says_so(tmp_path, monkeypatch):
  updates = [_update(i + 1) for i in range(9)]
  for line in updates:
    for key in CONTROL:
      del line[key]
  panels = _draw_panels(monkeypatch, _run(tmp_path, updates))
  assert "control is off" in _texts(panels["Step scale α"])
  legend = panels["KL of each update"].get_legend().get_texts()
  assert [text.get_text() for text in legend] == ["realised"]


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_nan_leaves_gaps_and_never_an_error(tmp_path, monkeypatch, share):
  updates = [_update(i + 1) for i in range(30)]
  for line in updates:
    line |= {k: None for k in TRACES if random.random() < share}
  nothing = [_evaluation(0, None), _evaluation(30, None)]
  panels = _draw_panels(monkeypatch, _run(tmp_path, updates, nothing))
  assert "nan" not in "".join(map(_texts, panels.values()))


@pytest.mark.parametrize("updates", [1, 2])
def test_the_shortest_runs_show_every_point(tmp_path, monkeypatch, updates):
  lines = [_update(i + 1) for i in range(updates)]
  panels = _draw_panels(monkeypatch, _run(tmp_path, lines))
  raw, alone, *_ = panels["Training reward"].lines
  assert list(raw.get_ydata()) == [line["reward"] for line in lines]
  assert len(alone.get_xdata()) == (updates == 1)


@pytest.mark.parametrize("predicted", [1e-3, 4e-3])
def test_the_cap_shows_where_budget_is_left(tmp_path, monkeypatch, predicted):
  control = {"kl_predicted": predicted, "kl_budget": 4e-3, "step_scale": 2.5}
  lines = [_update(1) | control]
  panels = _draw_panels(monkeypatch, _run(tmp_path, lines))
  assert ("cap 2.5" in _texts(panels["Step scale α"])) == (predicted < 4e-3)


def test_memory_is_compared_in_readable_units(tmp_path, monkeypatch):
  panels = _draw_panels(monkeypatch, _run(tmp_path, [_update(1)]))
  text = _texts(panels["Memory and traffic"])
  assert "1.18 MiB,  8.6% of dense Adam's state" in text
  assert "598 KiB,  8.0% of full sync" in text


def test_a_missing_run_exits_2_with_one_line(tmp_path):
  found = subprocess.run(
      [sys.executable, report.__file__, str(tmp_path / "nowhere")],
      capture_output=True, text=True, check=False)
  assert (found.returncode, found.stdout) == (2, "")
  assert found.stderr.count("\n") == 1 and "nowhere" in found.stderr


@pytest.mark.parametrize(("name", "text"), [
    ("metrics.jsonl", '{"step": 1, "rew'), ("metrics.jsonl", "[1]\n"),
    ("summary.json", ""), ("summary.json", "{}"), ("summary.json", "[]")])
def test_an_unreadable_run_exits_2_with_one_line(tmp_path, capsys, name, text):
  (_run(tmp_path, [_update(1)]) / name).write_text(text)
  assert report.main(["report.py", str(tmp_path)]) == 2
  found = capsys.readouterr()
  assert found.out == "" and found.err.count("\n") == 1
  assert not (tmp_path / "report.png").exists()
