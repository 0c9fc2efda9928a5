"""`qkv survey merge`: merge the shards of a survey that several processes computed."""

from __future__ import annotations

import sys
from typing import Annotated

import tyro

from qkv.cli.survey_show import show, write
from qkv.errors import InputError, renamed


def merge(
    folders: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR …", help_behavior_hint="")
    ] = (),
    /,
    *,
    out: Annotated[str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None,
) -> None:
    """Merge the shards of a survey that several processes computed (qkv survey … --only-shards i/N).

    The result has the same bytes as the survey of a single process. The folders must be of the same survey (model,
    corpus, settings), and together have every shard once; else a sentence says what is missing or differs. Shards are
    only read. Exit code 1: shards are missing; exit code 2: the folders do not fit together.

    qkv survey merge /shared/survey                    (one folder that all processes wrote to)

    qkv survey merge node0/ node1/ node2/ --out all    (a folder of each machine, copied to one)

    Args:
        folders: Folders that qkv survey wrote to, also at addresses such as s3://bucket/survey.
        out: Folder for the result; by default the first of the folders.
    """
    from qkv.profiler.surveys.folder import Folder
    from qkv.profiler.surveys.merging import Incomplete, merge_folders

    if not folders:
        raise InputError("DIR is missing, expected folders that qkv survey wrote to, for example qkv-survey")
    try:
        with renamed(folders="DIR", out="--out"):
            result = merge_folders(folders, out)
    except Incomplete as error:
        print(f"qkv: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    show(result)
    write(result, Folder(out or folders[0]))
