"""Checks of numbers that a user of the library gives."""

from __future__ import annotations

from numbers import Integral

from hicache.errors import ConfigError

__all__ = ["check_count"]


def check_count(what: str, value: object, least: int = 1) -> None:
    """Raise ConfigError unless `value` is a whole number of at least `least`. what: how the message begins."""
    if not isinstance(value, Integral) or int(value) < least:
        raise ConfigError(f"{what} must be a whole number of at least {least}, not {value}")
