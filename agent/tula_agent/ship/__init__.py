"""Sends measurements to the service as columns from one background thread, with a spool on disk."""
