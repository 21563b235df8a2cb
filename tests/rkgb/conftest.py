"""Cases of rk-GB's graphs that several test files read."""

from __future__ import annotations

import pytest
from rkgb_cases import case


@pytest.fixture(scope="module")
def resnet():
    return case("resnet")


@pytest.fixture(scope="module")
def transformer():
    return case("gpt")


@pytest.fixture(scope="module")
def unet():
    return case("unet")


@pytest.fixture(scope="module")
def perceptron():
    return case("mlp")
