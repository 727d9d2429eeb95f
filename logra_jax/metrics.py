"""Scalars of a run: one JSON object a line."""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any


class Writer:
  """Appends scalars to `metrics.jsonl`, one object an event, flushed.

  Args:
    path: of the file.
    position: bytes of it that count, as `position()` gave them; what lies
      behind is cut off. None starts the file anew.

  Raises:
    ValueError: if the file is shorter than that.
  """

  def __init__(self, path: pathlib.Path, position: int | None = None):
    if position is not None:
      size = path.stat().st_size if path.exists() else 0
      if size < position:
        raise ValueError(
            f"{str(path)!r} has {size} bytes and the checkpoint counts on"
            f" {position}: restore the file, or start again in another workdir")
      os.truncate(path, position)
    self._file = path.open("w" if position is None else "a")

  def write(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Writes one line; a value that is not finite becomes null."""
    line = {"step": step} | {k: _plain(v) for k, v in scalars.items()}
    self._file.write(json.dumps(line) + "\n")
    self._file.flush()

  def position(self) -> int:
    """Bytes written so far, all of them on disk."""
    os.fsync(self._file.fileno())
    return os.fstat(self._file.fileno()).st_size

  def __enter__(self) -> "Writer":
    return self

  def __exit__(self, *exc) -> None:
    self._file.close()


def read(path: pathlib.Path) -> list[dict[str, Any]]:
  """The lines of a metrics file; a last one cut off by a kill is left out."""
  whole, _, _ = path.read_text().rpartition("\n")
  return [json.loads(line) for line in whole.splitlines()]


def write_json(path: pathlib.Path, values: Mapping[str, Any]) -> None:
  """Writes a whole JSON file; a value that is not finite becomes null."""
  plain = {k: _plain(v) for k, v in values.items()}
  path.write_text(json.dumps(plain, indent=2) + "\n")


def _plain(value):
  value = value.item() if hasattr(value, "item") else value
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value
