"""How measurements leave the training process: columns, one background thread, a spool on disk."""
