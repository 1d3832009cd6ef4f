"""Fixtures of the claims: the engine under test, and the folder where its files go."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "helpers")]

from prove import GROUPS  # noqa: E402

import engines  # noqa: E402


def pytest_configure(config):
    for group in GROUPS:
        config.addinivalue_line("markers", f"{group}: a group of claims")
    config.addinivalue_line("markers", "of(engine): a claim of one engine alone")


def pytest_collection_modifyitems(config, items):
    """Leave out what is the other engine's."""
    name, kept = engines.chosen().name, []
    for item in items:
        mark = item.get_closest_marker("of")
        if mark is None or mark.args[0] == name:
            kept.append(item)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.fixture(scope="session")
def engine():
    """Its plug-ins loaded, in this process; `engine.known_before`: the method was there already."""
    engine = engines.chosen()
    engine.known_before = engine.load_plugins()
    engine.start()
    return engine


@pytest.fixture(scope="session")
def work():
    return Path(os.environ["BITNET_PROOF_WORK"])
