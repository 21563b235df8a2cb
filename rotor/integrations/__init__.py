"""Hooks for training frameworks; each module needs the framework that it is named after."""

from __future__ import annotations
