"""Imported before any test: loads the engine package first, which settles how torch's threads wait."""

import engine  # noqa: F401
