"""What the tests of nn share."""

import pytest

from nagnet.nn.residual import RESIDUAL_STREAMS


@pytest.fixture(params=RESIDUAL_STREAMS.values(), ids=RESIDUAL_STREAMS)
def rule_class(request):
    """Each residual rule."""
    return request.param.update_class
