"""Sends measurements out of the training process: as columns, from one background thread, with a spool on disk."""
