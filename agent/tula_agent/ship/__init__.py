"""Sends measurements to the service in columns, on one background thread, with a spool on disk."""
