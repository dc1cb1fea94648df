"""What the demo's data are made of, read once: the sources of the standard library take seconds."""

import pytest

from groundup.demo import python_talks


@pytest.fixture(scope="session")
def described() -> list:
    """All subjects that can be asked about, with their descriptions."""
    return list(python_talks.described())
