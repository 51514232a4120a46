"""What the tests of nn share."""

import pytest

from nagnet.nn.residual import NoResidual, NormAgnosticResidual, PostNormResidual, PreNormResidual

RULES = [NoResidual, PostNormResidual, PreNormResidual, NormAgnosticResidual]


@pytest.fixture(params=RULES, ids=lambda rule: rule.__name__)
def rule_class(request):
    """Each residual rule."""
    return request.param
