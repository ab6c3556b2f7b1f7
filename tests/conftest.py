"""Fixtures that several test files share."""

import pytest

import rope_probe as rp


@pytest.fixture(scope="session")
def smollm2():
    """The SmolLM2 demo checkpoint, opened once."""
    return rp.open("demo:smollm2")
