"""Structured log lines: `time level event key=value ...` on stderr."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime


def _quote(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return repr(text) if not text or any(c.isspace() or c in "\"'=" for c in text) else text


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = getattr(record, "fields", {})
        tail = "".join(f" {key}={_quote(value)}" for key, value in fields.items())
        line = f"{when} {record.levelname.lower()} {record.getMessage()}{tail}"
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


class Log:
    """Logger whose calls take an event name and fields: `log.info("dumped", job=7, size_bytes=9)`."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def _emit(self, level: int, event: str, fields: dict[str, object], exc_info: bool = False) -> None:
        self._logger.log(level, "%s", event, extra={"fields": fields}, exc_info=exc_info)

    def debug(self, event: str, **fields: object) -> None:
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._emit(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """As `error`, with the traceback of the exception being handled."""
        self._emit(logging.ERROR, event, fields, exc_info=True)


def setup(level: str = "info") -> None:
    """Send every log line of level `level` and above to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
