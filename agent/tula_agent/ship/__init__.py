"""Sends measurements in columns to the service from a background thread, which spools them to disk if this fails."""
