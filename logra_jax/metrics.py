"""Scalars of a run: one JSON object a line."""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any


class Writer:
  """Appends scalars to `metrics.jsonl`, one object an event, flushed."""

  def __init__(self, path: pathlib.Path):
    self._file = path.open("w")

  def write(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Writes one line; a value that is not finite becomes null."""
    line = {"step": step} | {k: _plain(v) for k, v in scalars.items()}
    self._file.write(json.dumps(line) + "\n")
    self._file.flush()

  def __enter__(self) -> "Writer":
    return self

  def __exit__(self, *exc) -> None:
    self._file.close()


def write_json(path: pathlib.Path, values: Mapping[str, Any]) -> None:
  """Writes a whole JSON file; a value that is not finite becomes null."""
  plain = {k: _plain(v) for k, v in values.items()}
  path.write_text(json.dumps(plain, indent=2) + "\n")


def _plain(value):
  value = value.item() if hasattr(value, "item") else value
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value
