"""What the tests of several evaluations need."""

from __future__ import annotations

import pytest

from tests.helpers import save_byte_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """Save a random model of bytes and its tokenizer, and return the directory, which tests only read."""
    path = tmp_path_factory.mktemp("model")
    save_byte_model(path)
    return str(path)
