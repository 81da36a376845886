"""A tiny pair, and a server of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from qspec.pair.package import package
from qspec.serving.server import Server
from tests.own_server import running
from tests.pairs import halves, recipe


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    return package(*halves(folder / "source"), recipe(), folder)


@pytest.fixture(scope="module")
def served(pair: Path) -> Iterator[tuple[Server, str]]:
    with running(pair) as found:
        yield found
