"""The public interface is the one that `tests/contract/` records: names, parameters, options, saved formats."""

from __future__ import annotations

import difflib

import pytest

from contract import interface


def advice(kind: str, recorded: str, found: str) -> str:
    """What to do about a change of the interface, by whether something was removed."""
    changes = list(difflib.unified_diff(recorded.splitlines(), found.splitlines(), n=0, lineterm=""))[2:]
    removed = [line[1:] for line in changes if line.startswith("-")]
    task = (
        "Something is gone or changed, which breaks programs or files of users: keep it working for one minor version "
        "with a DeprecationWarning or a reader of the old format, and say in CHANGELOG.md what replaces it and in "
        "docs/upgrading.md what to do. A change that keeps old calls valid, such as a new optional parameter, needs a "
        "line in CHANGELOG.md only."
        if removed
        else "Something was added: give it a line in CHANGELOG.md."
    )
    where = f"{kind}.txt in tests/contract differs from the code."
    return "\n".join([where, task, "Then run `make contract`.", *changes])


@pytest.mark.parametrize("kind", interface.TEXTS)
def test_the_public_interface_is_the_recorded_one(kind: str) -> None:
    recorded = (interface.FOLDER / f"{kind}.txt").read_text(encoding="utf-8")
    found = interface.text(kind)
    if found != recorded:
        pytest.fail(advice(kind, recorded, found), pytrace=False)
