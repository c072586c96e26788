"""Every error of the project: sentence, code, hint."""

from __future__ import annotations

import errno
import importlib
import pkgutil
import string

import pytest

import gpucr_hpc
from gpucr_hpc import errors
from gpucr_hpc.errors import GpucrError

AREAS = {
    errors.HostError: range(10, 20),
    errors.SlurmError: range(20, 30),
    errors.CudaError: range(30, 40),
    errors.CriuError: range(40, 50),
    errors.ImageError: range(50, 60),
    errors.StoreError: range(60, 70),
    errors.CoordinationError: range(70, 80),
}


def all_errors() -> list[type[GpucrError]]:
    for module in pkgutil.walk_packages(gpucr_hpc.__path__, "gpucr_hpc."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found, todo = [], [GpucrError]
    while todo:
        kind = todo.pop()
        found.append(kind)
        todo += kind.__subclasses__()
    return found


def test_names_are_unique():
    """The class name is the id for machines."""
    names = [kind.__name__ for kind in all_errors()]
    assert sorted(set(names)) == sorted(names)


def test_codes_are_unique():
    codes = [kind.exit_code for kind in all_errors() if "exit_code" in vars(kind)]
    assert len(codes) - len(set(codes)) == 1, "only UsageError and ConfigError share one: both are 2"


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_code_lies_in_the_range_of_its_area(kind):
    for area, codes in AREAS.items():
        if issubclass(kind, area):
            assert kind.exit_code in codes
            return
    assert kind.exit_code in (1, 2, *range(80, 90))


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_sentence_and_hint_can_be_filled(kind):
    texts = [text for text in (kind.__doc__, kind.hint) if text]
    wanted = {field for text in texts for _, field, spec, _ in string.Formatter().parse(text) if field}
    if "__init__" in vars(kind):
        pytest.skip("has a constructor of its own")
    made = kind(**{field: 1 for field in wanted})
    assert "no value for" not in str(made)
    assert "{" not in str(made) + made.advice()
    assert set(made.as_dict()) == {"type", "id", "code", "message", "hint", "retryable"}


def test_missing_field_does_not_hide_the_error():
    assert "no value for 'job'" in str(errors.JobUnknown())


def test_full_store_is_its_own_error():
    """ENOSPC, EDQUOT and EFBIG are one thing for the user."""
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        assert type(errors.store_error("/p", OSError(number, "x"))) is errors.StoreFull
    assert type(errors.store_error("/p", OSError(errno.EIO, "x"))) is errors.StoreError
