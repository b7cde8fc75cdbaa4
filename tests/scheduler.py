"""How pytest-xdist hands out tests with `--dist loadfile`."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

ONE_WORKER = ("tests/cluster/data/",)
"""Folders whose files share a fixture that costs more than their tests, here a warm Ray cluster."""


class FilesAndFolders(LoadFileScheduling):
    """Hands out whole files, and each folder of `ONE_WORKER` as if it were one file."""

    def _split_scope(self, nodeid: str) -> str:
        for folder in ONE_WORKER:
            if nodeid.startswith(folder):
                return folder
        scope: str = super()._split_scope(nodeid)
        return scope
