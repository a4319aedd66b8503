"""Sends measurements to the service from a background thread, or stores them on disk if sending fails."""
