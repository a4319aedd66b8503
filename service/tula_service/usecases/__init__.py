"""Implements the use cases, with one file per API resource.

A use case authorises the caller, loads data, analyses the data, and stores the result.
"""
