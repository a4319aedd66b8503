"""Provides helpers for tests of several parts; this package contains no tests."""
