"""The web application of a test, on the test's own event loop."""

from __future__ import annotations

import pytest

from tests.app.web import Web


@pytest.fixture
async def web() -> Web:
    return Web()


@pytest.fixture(params=[False, True], ids=["through ASGI", "past it"])
def outlet(request: pytest.FixtureRequest) -> bool:
    """Whether tokens are written past ASGI, straight to the socket."""
    is_there: bool = request.param
    return is_there
